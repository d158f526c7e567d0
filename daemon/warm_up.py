"""Warm-up of a worker before it counts as ready: requests of the shapes at which an engine compiles kernels."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daemon.worker_spec import WorkerLimits, WorkerSpec

if TYPE_CHECKING:  # engines name bursts where no HTTP client is installed
    from daemon.probe import Prober

__all__ = ["Burst", "WarmUp", "warm_up_bursts"]

log = logging.getLogger(__name__)

_LEAST_TOKENS, _MANY = 16, 8
_TOKEN_IDS = range(3, 250)  # every vocabulary has them


@dataclass(frozen=True, slots=True)
class Burst:
    """Requests that are sent at once."""

    requests: int
    input_tokens: int
    output_tokens: int


def warm_up_bursts(limits: WorkerLimits) -> tuple[Burst, ...]:
    """Return bursts whose steps have every size of prompt for which Triton makes a kernel of its own.

    A kernel is chosen by the size of the step, mostly by its power of two, and made anew where that is no multiple
    of 16: so each power of two up to the largest step, and one token less. A last burst has prompts of several
    requests in one step and decodes them together.
    """
    longest = min(limits.max_batched_tokens, limits.max_context_tokens - 2)
    lengths, tokens = [1], _LEAST_TOKENS
    while tokens <= longest:
        lengths += [tokens - 1, tokens]
        tokens *= 2
    alone = [Burst(1, length, 2) for length in (*lengths, longest) if length <= longest]
    many = min(_MANY, limits.max_batch)
    together = [Burst(many, length, 4) for length in (64, 1024) if length + 4 <= limits.max_context_tokens]
    return tuple(dict.fromkeys((*alone, *together)))


class WarmUp:
    """Warm-up of one start of a worker; it goes on in the background."""

    def __init__(self, bursts: tuple[Burst, ...] = ()) -> None:
        self._bursts = bursts
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, prober: Prober, url: str, spec: WorkerSpec, token: str | None) -> None:
        """Send the bursts, the first time that this is called."""
        if self._task is None and self._bursts:
            self._task = asyncio.get_running_loop().create_task(self._send(prober, url, spec, token))

    async def _send(self, prober: Prober, url: str, spec: WorkerSpec, token: str | None) -> None:
        begun_s, failed = time.monotonic(), 0
        for burst in self._bursts:
            bodies = [_completion(spec, burst) for _ in range(burst.requests)]
            answered = await asyncio.gather(*(prober.completes(url, body, token) for body in bodies))
            failed += answered.count(False)
        report = log.warning if failed else log.info
        took_s = time.monotonic() - begun_s
        report("worker %s: warmed up in %.1f s, %d requests failed", spec.worker_id, took_s, failed)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _completion(spec: WorkerSpec, burst: Burst) -> dict[str, object]:
    """Return a request of random tokens, so that none finds an earlier one's prefix in a cache."""
    return {
        "model": spec.served_model,
        "prompt": random.choices(_TOKEN_IDS, k=burst.input_tokens),
        "max_tokens": burst.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
