"""Profiling an engine that is another process: ``fingerprint.measurements.ProfileTarget`` over a worker's HTTP.

Synchronous, from any plain thread, with the standard library only. How a worker is started is the caller's.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

from daemon.engine_options import NO_OPTIONS, EngineOptions
from daemon.engines.registry import get_engine
from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from daemon.profile_messages import ProfileBursts, ProfileError, ProfileLoad, ProfileRun, ProfileVariants
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from daemon.worker_token import OPEN_PATHS, authorization
from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, SlotFormat, WeightFormat
from fingerprint.errors import (
    BadInputError,
    EngineError,
    InfeasibleError,
    IserveError,
    NotMeasuredError,
    TooLittleTimeError,
    error_class,
)
from fingerprint.measurements import MachineInfo, RankMemory, RunReading
from fingerprint.profile_sessions import CallState

__all__ = ["LOAD_MARK", "WorkerHandle", "WorkerProfileSession", "WorkerProfileTarget"]

# A worker whose engine is in processes of its own begins a line of its log with it when it starts the engine.
LOAD_MARK = "iserve: starting the engine"

_MAX_ANSWER_BYTES = 4 * 2**20
_POLL_S = 0.05
_HEALTH_TIMEOUT_S = 2.0
_TELL_S = 5.0  # between looks at what calls under way do: seldom, since the worker measures meanwhile
_END_SEEN_S = 5.0  # by when the watcher of a worker that hung up has seen its end

T = TypeVar("T")


class WorkerHandle(Protocol):
    """Worker that was launched for this target only."""

    url: str  # http://127.0.0.1:PORT
    token: str | None  # that its clients send

    def failure(self) -> str | None:
        """Return why it has ended or was given up; None while it may still become ready or serves."""
        ...

    def stop(self) -> None:
        """End it and wait until its memory is free. Safe to call twice."""
        ...


class WorkerProfileTarget:
    """An engine on some devices, measured through workers launched with ``profiling: true``.

    :meth:`machine` launches one for tp=1, pp=1 and keeps it for the next :meth:`open` of that degree; use the
    target as a context manager, or :meth:`close` it, so that it never remains.

    Args:
        launch: starts a worker from its spec (port 0: the launcher chooses) and returns at once.
        checkpoint: the model that is profiled; a profiling worker loads nothing of it by itself.
        device_ids: devices that may be used, in the order in which stages take them.
        limits: ``max_batched_tokens`` and ``memory_bytes_per_device`` hold for all loads; each load says the rest.
        options: for the engine itself: which parts of the model are loaded, and whether its code may run.
        engine_version: of an engine in an environment of its own; None: the first that is installed.
        start_timeout_s, call_timeout_s: for a worker to answer at all, and for one load or run.
        explain: may know more of what a worker answered with an error than the worker.
    """

    def __init__(
        self,
        launch: Callable[[WorkerSpec], WorkerHandle],
        *,
        checkpoint: Path,
        device_ids: Sequence[str],
        limits: WorkerLimits,
        engine: str = "torch",
        engine_version: str | None = None,
        options: EngineOptions = NO_OPTIONS,
        start_timeout_s: float = 300.0,
        call_timeout_s: float = 600.0,
        explain: Callable[[WorkerSpec, IserveError], IserveError] = lambda _spec, error: error,
    ) -> None:
        self.engine, self._engine_version, self._options = engine, engine_version, options
        self._launch = launch
        self._checkpoint = checkpoint
        self._device_ids = tuple(device_ids)
        self._limits = limits
        self._start_timeout_s = start_timeout_s
        self._call_timeout_s = call_timeout_s
        self._explain = explain
        self._machine: MachineInfo | None = None
        self._spare: WorkerProfileSession | None = None

    def __enter__(self) -> WorkerProfileTarget:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the worker that :meth:`machine` kept, if no session opened it. Safe to call twice."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.close()

    def machine(self) -> MachineInfo:
        if self._machine is None:
            session = self.open(tp=1, pp=1)
            try:
                found = session.machine()
            except BaseException:
                session.close()
                raise
            self._machine = replace(found, num_devices=len(self._device_ids))
            self._spare = session
        return self._machine

    def open(
        self,
        *,
        tp: int,
        pp: int,
        expert_parallel: bool = False,
        delta_format: SlotFormat = SlotFormat.NONE,
    ) -> WorkerProfileSession:
        """Launch a worker on tp * pp devices.

        Args:
            expert_parallel: whether those of ``tp`` divide a mixture's experts as wholes.
            delta_format: of deltas that its engine is to serve from slots of one format; `none`: it serves none.

        Raises:
            EngineError: the worker did not start.
            InfeasibleError: fewer devices than that may be used.
        """
        config = DeploymentConfig(tp=tp, pp=pp, engine=self.engine, expert_parallel=expert_parallel)
        if delta_format is not SlotFormat.NONE:
            config = replace(config, adapter_slots=1, delta_format=delta_format)  # loads give the number of slots
        elif (tp, pp) == (1, 1) and self._spare is not None:
            session, self._spare = self._spare, None
            return session
        self.close()  # its devices may be needed
        if tp * pp > len(self._device_ids):
            raise InfeasibleError(f"tp={tp}, pp={pp} needs {tp * pp} devices, {len(self._device_ids)} may be used")
        spec = WorkerSpec(
            worker_id=f"profile-{tp}-{pp}-{uuid.uuid4().hex[:8]}",
            served_model=self._checkpoint.name or "profile",
            checkpoint=str(self._checkpoint),
            config=config,
            stages=tuple(
                StageAssignment(device_ids=self._device_ids[first : first + tp], num_layers=1)
                for first in range(0, tp * pp, tp)
            ),
            limits=self._limits,
            profiling=True,
            engine_version=self._engine_version,
            options=self._options,
        )
        session = WorkerProfileSession(
            self._launch(spec),
            self._call_timeout_s,
            lambda error: self._explain(spec, error),
            num_devices=tp * pp,
            engine_order=lambda order: get_engine(self.engine).profile_order(spec, order),
        )
        try:
            session.wait_ready(self._start_timeout_s)
        except BaseException:
            session.close()
            raise
        return session


class WorkerProfileSession:
    """Both sessions of ``fingerprint.measurements`` on one worker; :meth:`close` always ends it."""

    def __init__(
        self,
        handle: WorkerHandle,
        call_timeout_s: float,
        explain: Callable[[IserveError], IserveError] = lambda error: error,
        *,
        num_devices: int = 1,
        engine_order: Callable[[ProfileLoad], ProfileLoad] = lambda order: order,
    ) -> None:
        self.num_devices = num_devices
        self._engine_order = engine_order
        self._handle = handle
        self._call_timeout_s = call_timeout_s
        self._explain = explain
        self._closed = False

    def wait_ready(self, timeout_s: float) -> None:
        """Wait until ``/health`` says 200.

        Raises:
            EngineError: the worker has ended, or took longer than ``timeout_s``.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            self._check_alive()
            try:
                status, _ = self._exchange("GET", "/health", None, _HEALTH_TIMEOUT_S)
            except EXCHANGE_ERRORS:
                status = 0
            if status == 200:
                return
            if time.monotonic() > end_s:
                raise EngineError(f"the worker at {self._handle.url} was not ready after {timeout_s:.0f} s")
            time.sleep(_POLL_S)

    def load(
        self,
        checkpoint: Path,
        *,
        weights: WeightFormat,
        kv: KvFormat,
        layers_per_stage: tuple[int, ...],
        max_batch: int,
        max_context_tokens: int,
        kv_tokens: int = 0,
    ) -> None:
        order = ProfileLoad(
            checkpoint=str(checkpoint),
            weights=weights,
            kv=kv,
            layers_per_stage=layers_per_stage,
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
        )
        self._call("POST", "/profile/load", self._engine_order(order), dict[str, str])

    def run(self, *, batch: int, input_tokens: int, output_tokens: int) -> RunReading:
        order = ProfileRun(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)
        return self._call("POST", "/profile/run", order, RunReading)

    def bursts(
        self,
        *,
        batch: int,
        input_tokens: int,
        output_tokens: int,
        repeat: int = 1,
        most: int,
        until_s: float,
        steps: bool = True,
        agree_within: float | None = None,
        agree_limit_s: float = 0.0,
        active: int = 0,
        limit_s: float | None = None,
        tell: Callable[[CallState], None] = lambda _: None,
    ) -> tuple[RunReading, ...]:
        order = ProfileBursts(
            batch=batch,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            repeat=repeat,
            most=most,
            until_s=until_s,
            steps=steps,
            agree_within=agree_within,
            agree_limit_s=agree_limit_s,
            active=active,
        )
        return self._watched(
            lambda: self._call("POST", "/profile/bursts", order, tuple[RunReading, ...], limit_s), tell
        )

    def load_with_slots(
        self,
        checkpoint: Path,
        *,
        num_layers: int,
        max_batch: int,
        max_context_tokens: int,
        slots: int,
        rank: int,
        delta_mib: int = 0,
        delta_format: SlotFormat = SlotFormat.NONE,
        kv_tokens: int = 0,
    ) -> None:
        config = DeploymentConfig()
        order = ProfileLoad(
            checkpoint=str(checkpoint),
            weights=config.weights,
            kv=config.kv,
            layers_per_stage=(num_layers,),
            max_batch=max_batch,
            max_context_tokens=max_context_tokens,
            kv_tokens=kv_tokens,
            adapter_slots=slots,
            adapter_rank=rank,
            delta_mib=delta_mib,
            delta_format=delta_format,
        )
        self._call("POST", "/profile/load", self._engine_order(order), dict[str, str])

    def load_variants(self, folders: Sequence[Path]) -> tuple[float, ...]:
        order = ProfileVariants(folders=tuple(map(str, folders)))
        return self._call("POST", "/profile/variants", order, tuple[float, ...])

    def run_variants(self, *, batch: int, input_tokens: int, output_tokens: int, active: int) -> RunReading:
        order = ProfileRun(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, active=active)
        return self._call("POST", "/profile/run", order, RunReading)

    def memory(self) -> tuple[RankMemory, ...]:
        return self._call("GET", "/profile/memory", None, tuple[RankMemory, ...])

    def machine(self) -> MachineInfo:
        return self._call("GET", "/profile/machine", None, MachineInfo)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._handle.stop()

    def _check_alive(self, *, patience_s: float = 0.0) -> None:
        """Raise EngineError if it has ended, or does within that time."""
        end_s = time.monotonic() + patience_s
        while (failure := self._handle.failure()) is None and time.monotonic() < end_s:
            time.sleep(_POLL_S)
        if failure is not None:
            raise EngineError(failure)

    def _watched(self, call: Callable[[], T], tell: Callable[[CallState], None]) -> T:
        """Return what ``call`` does, made by a thread of its own; report its state now and then, and at its end.

        Raises:
            IserveError: as the call.
        """
        answers: list[T] = []
        errors: list[BaseException] = []

        def make() -> None:
            try:
                answers.append(call())
            except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits for it
                errors.append(error)

        begun_s = time.monotonic()
        thread = threading.Thread(target=make, daemon=True, name="profile-calls")
        thread.start()
        while thread.is_alive():
            thread.join(_TELL_S)
            if thread.is_alive():
                tell(self._state(time.monotonic() - begun_s))
        error = errors[0] if errors else None
        if error is None or isinstance(error, NotMeasuredError):  # as one that compiled in each call
            tell(replace(self._state(time.monotonic() - begun_s), ended=True))
        if error is not None:
            raise error
        return answers[0]

    def _state(self, elapsed_s: float) -> CallState:
        """Return what the worker says of its calls; nothing but their seconds where it does not answer."""
        try:
            status, body = self._exchange("GET", "/profile/state", None, _HEALTH_TIMEOUT_S)
            found = (
                from_json(body, CallState, what="the answer of /profile/state") if status == 200 else CallState()
            )
        except (*EXCHANGE_ERRORS, BadInputError):
            found = CallState()
        return replace(found, elapsed_s=elapsed_s)

    def _call(self, method: str, path: str, order: object, kind: type[T], limit_s: float | None = None) -> T:
        """Send one request and return its answer as ``kind``.

        Raises:
            IserveError: the class that the worker named; TooLittleTimeError when there is no answer after
                ``limit_s``; EngineError when it does not answer in time or at all.
        """
        timeout_s = self._call_timeout_s if limit_s is None else min(limit_s, self._call_timeout_s)
        try:
            status, body = self._exchange(method, path, order, timeout_s)
        except EXCHANGE_ERRORS as error:
            if isinstance(error, TimeoutError) and timeout_s == limit_s:
                self._check_alive()
                raise TooLittleTimeError(
                    f"no answer after {timeout_s:.0f} s, when the time given ended: the engine may have compiled "
                    "kernels, which are kept; give more seconds, or profile it once more"
                ) from error
            self._check_alive(patience_s=0.0 if isinstance(error, TimeoutError) else _END_SEEN_S)
            raise EngineError(f"{path} of the worker at {self._handle.url} gave no answer: {error!r}") from error
        try:
            if status == 200:
                return from_json(body, kind, what=f"the answer of {path}")
            told = from_json(body, ProfileError, what=f"the answer of {path}")
        except BadInputError as error:  # not the caller's input: the worker's word
            raise EngineError(f"the worker answered {status}: {error}") from error
        raise self._explain(error_class(told.error, EngineError)(told.message))

    def _exchange(self, method: str, path: str, order: object, timeout_s: float) -> tuple[int, bytes]:
        """Return the status and body of one exchange.

        Raises:
            EXCHANGE_ERRORS: no whole answer; TimeoutError: none by then, however many bytes of it have arrived.
        """
        token = None if path in OPEN_PATHS else self._handle.token
        return exchange(
            self._handle.url,
            method,
            path,
            body=None if order is None else to_json(order),
            headers={"Content-Type": "application/json"} | authorization(token),
            timeout_s=timeout_s,
            max_bytes=_MAX_ANSWER_BYTES,
            in_all=True,
        )
