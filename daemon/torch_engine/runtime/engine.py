"""The engine's loop: schedule, run, sample, deliver, in one thread that owns the runner.

Decides when a sequence ends by its tokens (length, end of sequence). Knows nothing of HTTP, of text, or of what a
step does on the devices.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from daemon.status import DeviceBusy, WorkerStats
from daemon.torch_engine.runner_types import Runner, StepItem, StepPlan, StepResult
from daemon.torch_engine.runtime.adapter_loads import AdapterLoads
from daemon.torch_engine.runtime.adapters import Adapter, Adapters
from daemon.torch_engine.runtime.sampling import Sampler, sample
from daemon.torch_engine.runtime.scheduler import Demand, Scheduler, Work
from daemon.torch_engine.runtime.scoring import TokenScore, score
from daemon.torch_engine.runtime.sequences import Finish, LiveSequence, SequenceRequest, TokenEvent
from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, ConflictError, EngineError, IserveError, UnavailableError
from fingerprint.measurements import RankMemory

__all__ = ["Engine", "EngineState", "Totals"]

MAX_WAITING = 512  # sequences in the queue; the gateway's own limit is lower
_MEMORY_REFRESH_S = 5.0

T = TypeVar("T")


class EngineState(StrEnum):
    LOADING = "loading"
    OK = "ok"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """Sums since the process started."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    device_s: float = 0.0
    handover_s: float = 0.0
    busy_s: tuple[float, ...] = ()  # per rank


class Engine:
    """Thread-safe face of one runner.

    Args:
        runner: used from this engine's thread only, but for preparing adapters.
        deliver: called in that thread with the events of each step; must not block.
        failed: called once in that thread when it ends by an error, after all sequences got theirs.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        deliver: Callable[[list[TokenEvent]], None],
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._runner = runner
        self._deliver = deliver
        self._failed = failed
        self._wake = threading.Condition()
        self._calls: list[tuple[Future, Callable[[], object]]] = []
        self._scheduler: Scheduler | None = None
        self._live: dict[int, LiveSequence] = {}
        self._ids = itertools.count(1)
        self._state = EngineState.LOADING
        self._stopping = False
        self._adapters = Adapters(0)
        self._adapter_loads = AdapterLoads(runner, self.call, self._end_load)
        self._stages: tuple[StageAssignment, ...] = ()
        self._limits: WorkerLimits | None = None
        self._totals = Totals()
        self._memory: tuple[RankMemory, ...] = ()
        self._memory_at_s = 0.0
        self._broken: IserveError | None = None
        self.error: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from any thread.

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def totals(self) -> Totals:
        return self._totals

    @property
    def vocab_size(self) -> int:
        return self._runner.vocab_size

    @property
    def limits(self) -> WorkerLimits | None:
        """Limits of what is loaded; None while nothing is."""
        return self._limits

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    @property
    def adapters(self) -> tuple[Adapter, ...]:
        """Adapters that requests may name."""
        with self._wake:
            return self._adapters.loaded

    def start(self) -> None:
        self._thread.start()

    def ready(self) -> None:
        """Admit requests from now on."""
        with self._wake:
            if self._state is EngineState.LOADING:
                self._state = EngineState.OK

    def load(
        self,
        checkpoint: Path,
        config: DeploymentConfig,
        stages: tuple[StageAssignment, ...],
        limits: WorkerLimits,
    ) -> Future[None]:
        """Replace what is loaded; fails as ``Runner.load`` does, or with ConflictError while sequences run or
        adapters are loaded.
        """

        def replace_model() -> None:
            with self._wake:
                if self._live:
                    raise ConflictError(f"{len(self._live)} sequences are running; load when the engine is idle")
                if self._adapters.num_loading:
                    raise ConflictError(
                        f"adapters are being loaded ({self._adapters.num_loading}); load the model after them"
                    )
                self._scheduler = self._limits = None
            self._runner.load(checkpoint, config, stages, limits)
            scheduler = Scheduler(
                max_batch=limits.max_batch,
                max_batched_tokens=limits.max_batched_tokens,
                max_context_tokens=limits.max_context_tokens,
                max_waiting=MAX_WAITING,
                adapter_slots=config.adapter_slots,
            )
            with self._wake:
                self._scheduler, self._stages, self._limits = scheduler, stages, limits
                self._adapters = Adapters(config.loaded_adapters)
                num_ranks = sum(len(stage.device_ids) for stage in stages)
                self._totals = replace(self._totals, busy_s=self._totals.busy_s or (0.0,) * num_ranks)
            self._read_memory()

        return self.call(replace_model)

    def warm_up(self) -> Future[None]:
        """Run the largest steps that may occur, on a cache that no request uses yet.

        Work that a device does only once (loading kernels, choosing algorithms, first allocations) is then behind
        the first request, and a plan whose activations do not fit fails at the start instead of under load. A
        piece of a prompt takes most at the context's end, where its mask is widest and other kernels run than at
        its beginning; the steps that follow take most when every slot gives a token.
        """

        def first_steps() -> None:
            limits = self._limits
            if limits is None:
                raise EngineError("nothing is loaded that could be warmed up")
            last = limits.max_context_tokens - 1
            tokens = max(1, min(limits.max_batched_tokens, last))
            for start in sorted({0, max(0, last - tokens)}):
                self._runner.step(StepPlan((StepItem(0, start, (0,) * tokens),)))
            slots = range(min(limits.max_batch, limits.max_batched_tokens))
            self._runner.step(StepPlan(tuple(StepItem(slot, last, (0,)) for slot in slots)))
            self._read_memory()

        return self.call(first_steps)

    def memory(self) -> Future[tuple[RankMemory, ...]]:
        """Read memory afresh, between two steps."""
        return self.call(self._read_memory)

    def load_adapter(self, name: str, folder: Path) -> Future[None]:
        """Load the adapter in ``folder``, for requests that name it so; steps go on meanwhile.

        Raises:
            ConflictError: the name is taken, or as many are loaded as may be.
            UnavailableError: not ready.
        The future fails as ``Runner.prepare_adapter`` does; nothing is loaded then.
        """
        with self._wake:
            self._require_ready()
            adapter = self._adapters.begin(name, str(folder), int(time.time()))
        try:
            return self._adapter_loads.start(adapter, folder)
        except UnavailableError:
            with self._wake:
                self._adapters.finish(adapter, is_loaded=False)
            raise

    def unload_adapter(self, name: str) -> None:
        """Admit no further request of an adapter, and free it once the last of those that are here has ended.

        Raises:
            NotFoundError: none is loaded under this name.
        """
        with self._wake:
            self._adapters.unload(name)
            self._wake.notify()

    def submit(self, requests: Sequence[SequenceRequest]) -> tuple[int, ...]:
        """Queue all of ``requests`` at once, or none; returns their ids.

        Raises:
            BadInputError: a request is longer than the context.
            NotFoundError: a request is of an adapter that is not loaded.
            UnavailableError: not ready, draining, failed, or the queue is full.
        """
        with self._wake:
            scheduler = self._require_ready()
            new = {
                next(self._ids): LiveSequence(
                    request,
                    Sampler(request.sampling),
                    None if request.adapter is None else self._adapters.find(request.adapter).adapter_id,
                    list(request.prompt),
                )
                for request in requests
            }
            scheduler.submit(
                [
                    Demand(id_, len(live.request.prompt), live.request.max_tokens, live.adapter_id)
                    for id_, live in new.items()
                ]
            )
            self._live |= new
            self._wake.notify()
        return tuple(new)

    def _require_ready(self) -> Scheduler:
        """Return the scheduler of what is loaded; call it with the lock held."""
        if self._state is not EngineState.OK:
            raise UnavailableError(f"the worker is {self._state}" + (f": {self.error}" if self.error else ""))
        if self._scheduler is None:
            raise UnavailableError("no model is loaded")
        return self._scheduler

    def cancel(self, sequence_ids: Sequence[int]) -> None:
        """Forget these sequences; no event follows beyond those of the step that runs. Unknown ids are ignored."""
        with self._wake:
            for sequence_id in sequence_ids:
                if self._live.pop(sequence_id, None) is not None and self._scheduler is not None:
                    self._scheduler.cancel(sequence_id)
            self._wake.notify()  # an adapter may have lost its last

    def begin_drain(self) -> None:
        """Admit nothing more; what runs or waits goes on."""
        with self._wake:
            if self._state is not EngineState.FAILED:
                self._state = EngineState.DRAINING

    def close(self, timeout_s: float) -> bool:
        """End the loop after its present step, then the runner. False if that takes longer than ``timeout_s``."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if not self._thread.is_alive():
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stats(self, model: str) -> WorkerStats:
        """Return a consistent account; memory as last read, refreshed in the background."""
        if time.perf_counter() - self._memory_at_s > _MEMORY_REFRESH_S and self._scheduler is not None:
            self._memory_at_s = time.perf_counter()
            self.call(self._read_memory)
        with self._wake:
            scheduler, totals = self._scheduler, self._totals
            room = scheduler.max_batch * scheduler.max_context_tokens if scheduler else 0
            device_ids = [device for stage in self._stages for device in stage.device_ids]
            return WorkerStats(
                model=model,
                running=scheduler.num_running if scheduler else 0,
                waiting=scheduler.num_waiting if scheduler else 0,
                kv_tokens_total=room,
                kv_tokens_free=room - (scheduler.cached_tokens if scheduler else 0),
                prompt_tokens=totals.prompt_tokens,
                output_tokens=totals.output_tokens,
                steps=totals.steps,
                busy=tuple(
                    DeviceBusy(device_id=d, busy_s=s) for d, s in zip(device_ids, totals.busy_s, strict=False)
                ),
                memory=self._memory,
            )

    def call(self, function: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Run ``function`` in the engine's thread, between two steps; answer ``future``, else a new one."""
        future = Future() if future is None else future
        with self._wake:
            if self._stopping or self._state is EngineState.FAILED:
                future.set_exception(UnavailableError(f"the engine has ended: {self.error or 'it was closed'}"))
            else:
                self._calls.append((future, function))
                self._wake.notify()
        return future

    # Called in the engine's thread only.

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._loop()
        except IserveError as known:
            error = known
        finally:  # a bug travels on and keeps its traceback, after all callers have their answer
            error = error or sys.exception()
            try:
                self._end(error)
            finally:
                self._runner.close()
                if error is not None:
                    self._failed(error)

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._stopping or self._calls or self._live or self._unused_adapters()):
                    self._wake.wait()
                if self._stopping:
                    return
                calls, self._calls = self._calls, []
                unused = self._unused_adapters()
                plan = self._scheduler.plan() if self._scheduler is not None and not calls else ()
            self._free(unused)
            for future, function in calls:
                self._answer(future, function)
            if self._broken is not None:
                raise self._broken
            if plan:
                self._step(plan)

    def _unused_adapters(self) -> frozenset[int]:
        return self._adapters.unused(live.adapter_id for live in self._live.values())

    def _end_load(self, adapter: Adapter, error: Exception | None) -> None:
        """Let requests name an adapter that is loaded, or raise the error of its load."""
        with self._wake:
            self._adapters.finish(adapter, is_loaded=error is None)
        if isinstance(error, IserveError) and not isinstance(error, BadInputError):
            self._read_memory()  # no room, or a rank is gone, which this finds out
        if error is not None:
            raise error

    def _free(self, adapter_ids: Collection[int]) -> None:
        for adapter_id in adapter_ids:
            self._runner.unload_adapter(adapter_id)
            with self._wake:
                self._adapters.freed(adapter_id)

    @staticmethod
    def _answer(future: Future, function: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return  # the caller has left; from here on the future cannot be cancelled any more
        try:
            future.set_result(function())
        except (IserveError, MemoryError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
            future.set_exception(error)
        finally:
            if not future.done():
                future.set_exception(EngineError(f"the engine broke: {sys.exception()!r}"))

    def _step(self, plan: tuple[Work, ...]) -> None:
        with (
            self._wake
        ):  # what was cancelled since the plan was made is left out, what is cancelled now runs along
            live = {work.sequence_id: self._live.get(work.sequence_id) for work in plan}
        # Those of one adapter lie together, so that each update is one product of a piece of the batch.
        present = [(work, sequence) for work in plan if (sequence := live[work.sequence_id]) is not None]
        present.sort(key=lambda each: each[1].adapter_id or 0)
        plan = tuple(work for work, _ in present)
        items = []
        prompt_tokens = 0
        for work, sequence in present:
            items.append(
                StepItem(
                    work.slot,
                    work.start,
                    tuple(sequence.tokens[work.start : work.start + work.num_tokens]),
                    sequence.adapter_id,
                )
            )
            prompt_tokens += max(0, min(work.num_tokens, len(sequence.request.prompt) - work.start))
        if items:
            result = self._runner.step(StepPlan(tuple(items)))
            events = self._account(plan, result)
            self._book(result, prompt_tokens, sum(event.token is not None for event in events))
            self._deliver(events)

    def _account(self, plan: tuple[Work, ...], result: StepResult) -> list[TokenEvent]:
        """Sample for the sequences of a step that ran, and let those leave that have ended."""
        with self._wake:
            rows = [
                (row, work.sequence_id, self._live[work.sequence_id])
                for row, work in enumerate(plan)
                if work.samples and work.sequence_id in self._live
            ]
        logits_NV = result.logits.numpy()
        if len(rows) < len(plan):
            logits_NV = logits_NV[[row for row, _, _ in rows]]
        chosen = sample(logits_NV, [live.sampler for _, _, live in rows], [live.barred() for _, _, live in rows])
        scores: dict[int, TokenScore] = {}
        for row, (_, id_, live) in enumerate(rows):
            if live.forced is not None and chosen[row] is not None:
                chosen[row] = live.forced
                scores[id_] = score(logits_NV[row], live.forced, live.request.score_top)
        new = {id_: (live, token) for (_, id_, live), token in zip(rows, chosen, strict=True)}
        stopped = {id_ for id_, (live, token) in new.items() if token is None or token in live.request.end_ids}
        now_s = time.perf_counter()
        events = []
        with self._wake:
            assert self._scheduler is not None
            at_length = self._scheduler.complete(plan, stopped)
            for id_, (live, token) in new.items():
                if id_ not in self._live:  # cancelled meanwhile
                    continue
                if token is None:
                    message = "the model's logits are not numbers"
                    events.append(TokenEvent(id_, None, Finish.ERROR, now_s, message))
                else:
                    live.tokens.append(token)
                    finish = Finish.STOP if id_ in stopped else Finish.LENGTH if id_ in at_length else None
                    events.append(TokenEvent(id_, token, finish, now_s, score=scores.get(id_)))
                if events[-1].finish is not None:
                    del self._live[id_]
        return events

    def _book(self, result: StepResult, prompt_tokens: int, output_tokens: int) -> None:
        totals = self._totals
        busy_s = totals.busy_s or (0.0,) * len(result.busy_s)
        self._totals = Totals(
            prompt_tokens=totals.prompt_tokens + prompt_tokens,
            output_tokens=totals.output_tokens + output_tokens,
            steps=totals.steps + 1,
            device_s=totals.device_s + result.device_s,
            handover_s=totals.handover_s + result.handover_s,
            busy_s=tuple(a + b for a, b in zip(busy_s, result.busy_s, strict=True)),
        )

    def _read_memory(self) -> tuple[RankMemory, ...]:
        try:
            self._memory = self._runner.memory()
        except IserveError as error:  # a rank is gone: known before a request has to find it out
            self._broken = error
            raise
        self._memory_at_s = time.perf_counter()
        return self._memory

    def _end(self, error: BaseException | None) -> None:
        """End the loop: every waiting caller is answered."""
        message = str(error) or type(error).__name__ if error is not None else "the worker is shutting down"
        with self._wake:
            if error is not None:
                self._state, self.error = EngineState.FAILED, message
            self._stopping = True
            ids, self._live = tuple(self._live), {}
            calls, self._calls = self._calls, []
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(UnavailableError(f"the engine has ended: {message}"))
        now_s = time.perf_counter()
        self._deliver([TokenEvent(id_, None, Finish.ERROR, now_s, message) for id_ in ids])
