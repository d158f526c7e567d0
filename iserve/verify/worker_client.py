"""The worker that a check asks: bursts, its own account of itself, and why it died if it did."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator

from daemon.client import DaemonClient
from daemon.engines.base import Engine
from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from daemon.status import WorkerState, WorkerStats
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import authorization
from fingerprint.config import Workload
from fingerprint.errors import EngineError, IserveError, NotFoundError, UnavailableError
from fingerprint.model_spec import ModelSpec
from iserve.verify.bursts import BurstClient
from iserve.verify.timing import Burst

__all__ = ["CheckedWorker", "worker_stats"]

_MAX_ANSWER_BYTES = 1 << 20
_STATS_TIMEOUT_S = 2.0
_BURST_TIMEOUT_S = 600.0
_SETTLE_S = 2.0  # statistics may lag behind the answer
_DEATH_S = 5.0  # for the daemon to see that a worker died, and to read its last words


def worker_stats(engine: Engine, spec: WorkerSpec, url: str, token: str | None) -> WorkerStats | None:
    """Return the worker's own statistics now; None: nothing that its engine is documented to say."""
    try:
        status, body = exchange(
            url,
            "GET",
            engine.stats_path,
            headers=authorization(token),
            timeout_s=_STATS_TIMEOUT_S,
            max_bytes=_MAX_ANSWER_BYTES,
        )
        return engine.read_stats(spec, body) if status == 200 else None
    except (*EXCHANGE_ERRORS, IserveError):
        return None


class CheckedWorker:
    """A ready worker of ``spec`` at ``url``, from one plain thread."""

    def __init__(
        self,
        spec: WorkerSpec,
        engine: Engine,
        url: str,
        daemon: Callable[[], DaemonClient],
        model: ModelSpec,
        token: str | None = None,
    ) -> None:
        self._spec, self._engine, self._url, self._daemon = spec, engine, url, daemon
        self._token = token
        self._client = BurstClient(
            url,
            spec.served_model,
            model.vocab_size,
            timeout_s=_BURST_TIMEOUT_S,
            seed=time.monotonic_ns(),
            token=token,
        )

    def burst(self, work: Workload) -> Burst:
        """Run one burst, and return whether the worker served no other request meanwhile, as far as it reports."""
        before = self.stats()
        elapsed_s = self._client.burst(work)
        prompt_tokens = work.batch * work.input_tokens
        after = self.stats()
        deadline_s = time.monotonic() + _SETTLE_S
        while (
            before is not None
            and after is not None
            and after.prompt_tokens - before.prompt_tokens < prompt_tokens
            and time.monotonic() < deadline_s
        ):
            time.sleep(0.02)
            after = self.stats()
        if before is None or after is None:
            return Burst(elapsed_s, alone=True)
        idle = before.running + before.waiting == 0
        return Burst(elapsed_s, idle and after.prompt_tokens - before.prompt_tokens <= prompt_tokens)

    def stats(self) -> WorkerStats | None:
        """Return the worker's statistics now; None where that is nothing that its engine is documented to say."""
        return worker_stats(self._engine, self._spec, self._url, self._token)

    def held_bytes(self, stats: WorkerStats) -> int:
        """Return the bytes on the fullest of its devices by its own count; 0: it does not count."""
        devices = [device_id for stage in self._spec.stages for device_id in stage.device_ids]
        held: Counter[str] = Counter()
        for rank in stats.memory:
            held[devices[rank.rank]] += (
                rank.weights_bytes
                + rank.kv_bytes
                + rank.activation_peak_bytes
                + rank.pp_buffer_bytes
                + rank.runtime_bytes
                + rank.graph_bytes
            )
        return max(held.values(), default=0)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Report the death of a worker inside the block with its last words.

        Raises:
            EngineError: it died, was stopped, or was started again.
        """
        restarts = self._daemon().worker(self._spec.worker_id).restarts
        try:
            yield
        except EngineError as error:
            raise EngineError(
                f"{self._fate(restarts, patience_s=_DEATH_S) or error}; nothing was corrected by this check"
            ) from error
        if (fate := self._fate(restarts, patience_s=0.0)) is not None:
            raise EngineError(f"{fate}; nothing was corrected by this check")

    def _fate(self, restarts: int, *, patience_s: float) -> str | None:
        """Return what became of the worker, by the daemon; None while it lives as before."""
        deadline_s = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(UnavailableError):
                try:
                    status = self._daemon().worker(self._spec.worker_id)
                except NotFoundError:
                    return "the worker was stopped during the check"
                if status.state is not WorkerState.READY or status.restarts != restarts:
                    again = (
                        "it was started again" if status.state is WorkerState.READY else f"it is {status.state}"
                    )
                    return f"the worker died during the check ({status.error or again})"
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(0.1)
