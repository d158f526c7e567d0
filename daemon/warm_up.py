"""Warm-up of a worker before it counts as ready: it answers requests at which its engine compiles kernels."""

from __future__ import annotations

import asyncio
import logging
import random
import time

from daemon.engines.base import Burst
from daemon.probe import Prober
from daemon.worker_process import WorkerProcess
from daemon.worker_spec import WorkerSpec

__all__ = ["WarmUp"]

log = logging.getLogger(__name__)

_TOKEN_IDS = range(3, 250)  # every vocabulary has them


class WarmUp:
    """Warm-up of one start of a worker; it goes on in the background."""

    def __init__(self, bursts: tuple[Burst, ...], process: WorkerProcess, limit_s: float) -> None:
        self._bursts, self._process, self._limit_s = bursts, process, limit_s
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, prober: Prober, url: str, spec: WorkerSpec, token: str | None) -> None:
        """Send the bursts, unless an earlier daemon did. It is over once they are answered, or after its limit."""
        if self._bursts and self._process.is_cold():
            self._task = asyncio.get_running_loop().create_task(self._send(prober, url, spec, token))

    async def _send(self, prober: Prober, url: str, spec: WorkerSpec, token: str | None) -> None:
        begun_s, failed = time.monotonic(), 0
        try:
            async with asyncio.timeout(self._limit_s):
                for burst in self._bursts:
                    bodies = [_completion(spec, burst) for _ in range(burst.requests)]
                    answered = await asyncio.gather(*(prober.completes(url, body, token) for body in bodies))
                    failed += answered.count(False)
        except TimeoutError:
            log.warning("worker %s: warm-up cut short after %.0f s", spec.worker_id, self._limit_s)
        else:
            report = log.warning if failed else log.info
            took_s = time.monotonic() - begun_s
            report("worker %s: warmed up in %.1f s, %d requests failed", spec.worker_id, took_s, failed)
        self._process.note_warm()

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
