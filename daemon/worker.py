"""Supervision of one worker: it is started, probed, restarted with backoff, given up, stopped.

Its state is computed from observations when it is asked for. The mechanics are in ``daemon.worker_process``,
the whole set of workers in ``daemon.supervisor``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from daemon.backoff import RestartHistory
from daemon.devices import Device
from daemon.engines.base import Engine
from daemon.lease import ExitRecord
from daemon.monitor import WorkerUse
from daemon.port_owner import free_port
from daemon.probe import Health, Prober
from daemon.procfs import read_stat
from daemon.settings import DaemonSettings
from daemon.status import WorkerState, WorkerStats, WorkerStatus
from daemon.warm_up import WarmUp
from daemon.worker_process import COLD_FILE, VERSIONS_FILE, Phase, WorkerProcess
from daemon.worker_spec import WorkerSpec
from daemon.worker_token import TOKEN_FILE, new_token
from fingerprint.codec import to_json
from fingerprint.errors import ConflictError, EngineError, IserveError, UnavailableError

__all__ = ["SupervisedWorker"]

log = logging.getLogger(__name__)

_PORT_TRIES = 5
_SOON_S = 0.2
_ENDING_LIMIT_S = 20.0  # a shim that has not finished by then is ended


@dataclass(slots=True)
class _Sight:
    """Results of the probes of the present start."""

    since_s: float
    warm_up: WarmUp
    last_ok_s: float | None = None
    misses: int = 0  # since the last healthy answer
    stats: WorkerStats | None = None
    stranger: str | None = None  # why healthy answers are not believed: another process listens on the port


def _signal_name(number: int) -> str:
    """Return " (SIGKILL)"; nothing for a real-time signal, most of which have no name."""
    try:
        return f" ({signal.Signals(number).name})"
    except ValueError:
        return ""


class SupervisedWorker:
    """Everything but the lock is for the event loop's thread only."""

    def __init__(
        self,
        spec: WorkerSpec,
        engine: Engine,
        process: WorkerProcess,
        settings: DaemonSettings,
        devices: Mapping[str, Device],
        wake: Callable[[SupervisedWorker], None],
        *,
        fixed_port: bool,
    ) -> None:
        self.spec, self.process = spec, process
        self._engine, self._settings, self._devices, self._wake = engine, settings, devices, wake
        self._fixed_port = fixed_port
        self._lock = asyncio.Lock()
        self._history = RestartHistory(settings.restart)
        self._sight = self._new_sight()
        self._may_have_served = True  # its present process: one that is adopted may have, for days
        self._launched_at = time.time()
        # On the monotonic clock from here on, so that setting the wall clock neither ends it nor keeps it.
        self._ends_at_s = None if spec.ends_at is None else time.monotonic() + spec.ends_at - time.time()
        self._restart_at_s: float | None = None
        self._ending_since_s: float | None = None
        self._port_tries = 0
        self._exit_watch: int | None = None  # pidfd
        self._timer: asyncio.TimerHandle | None = None
        self._put_off = False  # a pass was asked for while another was under way
        self._resident_bytes: int | None = None
        self._resident_at_s = float("-inf")
        self._versions, self._token = process.versions(), process.token()  # of one that is adopted
        self.restarts = 0
        self.error: str | None = None
        self._ended_because: str | None = None  # of an end that we brought about
        self.gave_up = self.stopping = self.stopped = False

    def _new_sight(self) -> _Sight:
        bursts = self._engine.warm_up_bursts(self.spec)
        return _Sight(time.monotonic(), WarmUp(bursts, self.process, self._settings.warm_up_s))

    # --- looking -----------------------------------------------------------------------------------------------

    @property
    def worker_id(self) -> str:
        return self.spec.worker_id

    @property
    def url(self) -> str:
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.spec.port}"

    def state(self) -> WorkerState:
        """State of the worker, computed now: the processes are looked at; health is as of the last probe."""
        if self.stopped:
            return WorkerState.STOPPED
        if self.stopping:
            return WorkerState.STOPPING
        if self.gave_up:
            return WorkerState.FAILED
        if self._restart_at_s is not None:
            return WorkerState.RESTARTING
        phase = self.process.look()
        if phase is Phase.RUNNING:
            return WorkerState.READY if self.is_ready else WorkerState.STARTING
        return WorkerState.STARTING if phase is Phase.STARTING else WorkerState.RESTARTING

    @property
    def is_healthy(self) -> bool:
        """Healthy at the last probes; a busy worker may miss a few in a row."""
        return self._sight.last_ok_s is not None and self._sight.misses < self._settings.probe_misses

    @property
    def is_ready(self) -> bool:
        """Healthy, and its warm-up is over: requests may be routed to it."""
        return self.is_healthy and not self._sight.warm_up.is_under_way

    def status(self) -> WorkerStatus:
        state = self.state()
        lease = self.process.lease
        running = lease is not None and state in (WorkerState.STARTING, WorkerState.READY, WorkerState.STOPPING)
        started_at = lease.started_at if lease is not None else self._launched_at
        return WorkerStatus(
            spec=self.spec,
            state=state,
            url=self.url,
            pid=lease.pid if running and lease is not None else None,
            restarts=self.restarts,
            started_at=datetime.fromtimestamp(started_at, UTC).isoformat(),
            error=self.error,
            versions=self._versions,
            token=self._token,
        )

    def use(self, listed_pids: Iterable[int]) -> WorkerUse:
        """Return its use of its devices, ``listed_pids`` being the processes that the driver lists.

        A worker that waits for its restart keeps its promise; one that gave up has none.
        """
        slots = Counter(device_id for stage in self.spec.stages for device_id in stage.device_ids)
        lease, stats = self.process.lease, self._sight.stats
        return WorkerUse(
            worker_id=self.worker_id,
            pid=lease.pid if lease is not None else None,
            slots=slots,
            promised_bytes=self.spec.promised_bytes(),
            resident_bytes=self._resident_bytes,
            pids=frozenset(pid for pid in listed_pids if self._owns(pid)),
            ready=self.is_healthy,
            busy=stats.busy if stats is not None else None,
        )

    def _owns(self, pid: int) -> bool:
        try:
            stat = read_stat(pid)
        except OSError:  # its memory counts as not listed, as in a container
            return False
        return stat is not None and self.process.owns(stat)

    # --- one pass ----------------------------------------------------------------------------------------------

    async def tick(self, prober: Prober) -> None:
        """Renew, probe, and act on what is seen; put off while an earlier pass, a start or a stop is under way."""
        if self._lock.locked():
            self._put_off = True
            return
        async with self._lock:
            if self.stopping:
                await self._go_on_stopping()
            elif not (self.stopped or self.gave_up):
                await self._tick(prober)
        if self._put_off:
            self._put_off = False
            self._wake_soon()

    async def _tick(self, prober: Prober) -> None:
        now_s = time.monotonic()
        if self._ends_at_s is not None and now_s > self._ends_at_s:
            await self._end_overdue()
            return
        if self._restart_at_s is not None:
            if now_s >= self._restart_at_s:
                await self._restart()
            return
        phase = self.process.look()
        if phase is Phase.RUNNING:
            self._ending_since_s = None
            self._watch_exit()
            self.process.renew()
            self._look_at_memory(now_s)
            await self._probe(prober)
            await self._end_if_hopeless()
        elif phase is Phase.ENDING:
            if self._ending_since_s is None:
                self._ending_since_s = now_s
            elif now_s - self._ending_since_s > _ENDING_LIMIT_S:
                await self._end(grace_s=0.0)
            self._wake_soon()
        elif phase is Phase.ENDED:
            await self._on_exit()
        else:
            self._wake_soon()

    def _wake_soon(self, in_s: float = _SOON_S) -> None:
        """Ask for one pass of its own, sooner than the next tick's; there is never more than one asked for."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if not self._timer.cancelled() and loop.time() <= self._timer.when() <= loop.time() + in_s:
                return
            self._timer.cancel()
        self._timer = loop.call_later(in_s, self._wake, self)

    async def _probe(self, prober: Prober) -> None:
        sight = self._sight
        health, stats = await asyncio.gather(prober.health(self.url), self._stats(prober))
        sight.stats = stats
        if health is Health.OK and not self.is_healthy and not await self._has_its_port():
            return  # until the next tick: the look is too costly for more
        if health is Health.OK:
            if sight.last_ok_s is None:
                log.info("worker %s is healthy at %s", self.worker_id, self.url)
                self.error = None
                sight.warm_up.begin(prober, self.url, self.spec, self._token)
            sight.last_ok_s, sight.misses, self._may_have_served = time.monotonic(), 0, True
        elif health is Health.SILENT:
            sight.misses += 1
        else:
            # It says itself that it does not serve.
            sight.misses = max(sight.misses + 1, self._settings.probe_misses)
        if health is not Health.OK and sight.stranger is not None:  # it has left the port
            sight.stranger = self.error = None
        if sight.last_ok_s is None:
            self._wake_soon()  # a start is worth a closer look than once a second

    async def _has_its_port(self) -> bool:
        """Return whether the worker itself gave the healthy answer, before it is believed and sent the token.

        An engine that loads does not have its port yet, and another program may have taken it. Where the owner
        cannot be seen (a sandbox, a process whose descriptors are hidden), the answer is believed: a healthy
        worker is not given up for what iServe may not look at.
        """
        sight, port = self._sight, self.spec.port
        listens = await asyncio.to_thread(self.process.listens_on, port)
        if listens is None:
            log.warning("worker %s: who listens on port %d cannot be seen; taken to be it", self.worker_id, port)
        if listens is not False:
            if sight.stranger is not None:
                sight.stranger = self.error = None
            return True
        if sight.stranger is None:
            sight.stranger = f"port {port} is not the worker's: another process listens there and answers /health"
            self.error = f"{sight.stranger}; end that process (`ss -ltnp` lists it)"
            log.warning("worker %s: %s", self.worker_id, self.error)
        return False

    async def _stats(self, prober: Prober) -> WorkerStats | None:
        if self._sight.last_ok_s is None:
            return None
        engine, spec = self._engine, self.spec
        read = partial(engine.read_stats, spec)
        return await prober.stats(self.url + engine.stats_path, read, self._token)

    async def _end_if_hopeless(self) -> None:
        """End an engine that never became healthy or fell silent; its exit is then handled like any other."""
        now_s, settings = time.monotonic(), self._settings
        if self._sight.last_ok_s is None and now_s - self._sight.since_s > settings.start_timeout_s:
            why = f"not healthy {settings.start_timeout_s:.0f} s after its start; ended"
        elif self._sight.last_ok_s is not None and now_s - self._sight.last_ok_s > settings.unresponsive_s:
            why = f"no healthy answer for {settings.unresponsive_s:.0f} s; ended"
        else:
            return
        if self._sight.stranger is not None:
            why = f"{why}: {self._sight.stranger}"
        self._ended_because = why
        log.warning("worker %s: %s", self.worker_id, why)
        await self._end(grace_s=settings.stop_grace_s)
        self._wake_soon()

    async def _end_overdue(self) -> None:
        """End a worker whose time is up, when the process that was to end it is gone."""
        self._restart_at_s = self._resident_bytes = None
        if await self._end(grace_s=self._settings.stop_grace_s):
            self.error = "its time was up"
            self._give_up("")

    def _look_at_memory(self, now_s: float) -> None:
        """Read the resident bytes of a CPU worker, seldom: it means reading all of /proc."""
        kinds = {self._devices[d].kind for s in self.spec.stages for d in s.device_ids if d in self._devices}
        if "cpu" not in kinds or now_s - self._resident_at_s < self._settings.resident_period_s:
            return
        self._resident_at_s = now_s
        with contextlib.suppress(OSError):  # /proc cannot be read now: the last figure is kept
            stats = [read_stat(pid) for pid in self.process.pids()]
            self._resident_bytes = sum(stat.rss_bytes for stat in stats if stat is not None)

    def _watch_exit(self) -> None:
        """Have the loop woken the moment the engine ends."""
        if self._exit_watch is not None or self.process.lease is None:
            return
        with contextlib.suppress(OSError):
            self._exit_watch = os.pidfd_open(self.process.lease.pid)
            asyncio.get_running_loop().add_reader(self._exit_watch, self._on_exit_event)

    def _on_exit_event(self) -> None:
        self.let_go()
        self._wake(self)

    def let_go(self) -> None:
        """Stop looking, and warming up; the worker itself runs on."""
        self._sight.warm_up.cancel()
        if self._exit_watch is not None:
            asyncio.get_running_loop().remove_reader(self._exit_watch)
            os.close(self._exit_watch)
            self._exit_watch = None

    async def _end(self, *, grace_s: float) -> bool:
        """End its processes, and all that is asked of them; return whether none is left."""
        self.let_go()
        return await asyncio.to_thread(self.process.end, grace_s=grace_s)

    # --- starting and ending -----------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start for the first time. Raises EngineError, UnavailableError: nothing runs, nothing is left."""
        async with self._lock:
            await asyncio.to_thread(self.process.remove)  # what an ended worker of this id left
            try:
                await self._start()
            except IserveError:
                self.process.remove()
                raise

    async def _start(self) -> None:
        folder = self.process.folder
        devices = {device.device_id: device for device in self._own_devices()}
        command = await asyncio.to_thread(self._engine.command, self.spec, folder, devices)
        self._versions = await asyncio.to_thread(self._engine.pinned(self.spec.engine_version).versions)
        self._token = self._token or new_token()  # the same after a restart: the gateway's table has it
        files = [(VERSIONS_FILE, to_json(self._versions).decode()), (TOKEN_FILE, self._token)]
        if self._engine.warm_up_bursts(self.spec):
            files.append((COLD_FILE, ""))
        command = replace(
            command,
            env=(*self._device_env(), *command.env),  # of two the later counts
            files=(*command.files, *files),
        )
        cores = sorted({core for device in devices.values() for core in device.cores})
        self._sight, self._may_have_served = self._new_sight(), False
        self._launched_at = time.time()
        self._ending_since_s = self._ended_because = None
        self._history.note_start(time.monotonic())
        await asyncio.to_thread(self.process.start, self.spec, command, tuple(cores), self._settings)
        self._wake_soon()

    def _own_devices(self) -> list[Device]:
        named = [d for stage in self.spec.stages for d in stage.device_ids]
        gone = [d for d in named if d not in self._devices]
        if gone:  # lost, or hidden from a daemon that was started again
            raise UnavailableError(
                f"worker {self.worker_id} needs {', '.join(gone)}, which this node does not offer"
            )
        return [self._devices[d] for d in named]

    def _device_env(self) -> tuple[tuple[str, str], ...]:
        """Return the variables that show exactly its devices, in stage order; a CPU worker sees no GPU."""
        gpus = ",".join(device.device_id for device in self._own_devices() if device.kind == "cuda")
        cores = {d.device_id: ",".join(map(str, d.cores)) for d in self._own_devices() if d.kind == "cpu"}
        env = [("CUDA_VISIBLE_DEVICES", gpus)]
        if cores:
            env.append(("ISERVE_DEVICE_CORES", ";".join(f"{name}={value}" for name, value in cores.items())))
        return tuple(env)

    async def _on_exit(self) -> None:
        """Clear up after the engine and its shim are gone, and decide whether to start again."""
        await self._end(grace_s=0.0)  # what a killed shim left behind
        record = self.process.exit_record()
        self._resident_bytes = None
        failure = self._explain(record)
        if not self._may_have_served and isinstance(failure, ConflictError) and self._move_port():
            await self._restart(at_once=True)
            return
        self.error = str(failure)
        delay_s = self._history.delay_s(time.monotonic())
        # One that served has started as it is; and what its log says then may be a client's words.
        permanent = not (self._may_have_served or isinstance(failure, EngineError | UnavailableError))
        if permanent or delay_s is None:
            self._give_up("" if permanent else " (it was started too often in a short time)")
            return
        log.warning("worker %s ended: %s; next start in %.1f s", self.worker_id, self.error, delay_s)
        self._restart_at_s = time.monotonic() + delay_s
        self._wake_soon(delay_s)

    def _move_port(self) -> bool:
        """Choose another port, if it was ours to choose and this is not the fifth time in a row."""
        self._port_tries += 1
        if self._fixed_port or self._port_tries > _PORT_TRIES:
            return False
        old = self.spec.port
        self.spec = replace(self.spec, port=free_port(self.spec.host))
        log.warning("worker %s: port %d was taken, now %d", self.worker_id, old, self.spec.port)
        return True

    def _give_up(self, why: str) -> None:
        self.gave_up = True
        self.error = f"{self.error}{why}"
        self.process.mark_ended()
        log.error("worker %s failed: %s", self.worker_id, self.error)

    async def _restart(self, *, at_once: bool = False) -> None:
        self._restart_at_s = None
        if not at_once:
            self.restarts += 1
            self._port_tries = 0
        try:
            await self._start()
        except (UnavailableError, EngineError) as error:  # a full disk, say, or an engine that pip replaces now
            self.error = str(error)
            delay_s = self._history.delay_s(time.monotonic())
            if delay_s is None:
                self._give_up("")
                return
            self._restart_at_s = time.monotonic() + delay_s
        except IserveError as error:
            self.error = str(error)
            self._give_up("")

    def _explain(self, record: ExitRecord | None) -> IserveError:
        if self._ended_because is not None:
            return EngineError(self._ended_because)
        if record is None:
            complaint = self.process.shim_log_tail()
            return EngineError(
                f"its shim was killed, and the worker with it{': ' if complaint else ''}{complaint}"
            )
        if record.reason != "exited":
            return EngineError(record.reason)
        if record.signal is not None:
            return EngineError(f"ended by signal {record.signal}{_signal_name(record.signal)}")
        return self._engine.explain_failure(self.spec, record.exit_code or 0, record.log_tail)

    def _left(self) -> str:
        try:
            return str(sorted(self.process.left()))
        except OSError as error:
            return f"(/proc cannot be read: {error.strerror or error})"

    async def stop(self) -> None:
        """End it for good; idempotent.

        Raises:
            UnavailableError: a process of it cannot be ended; each pass tries again, until none is left.
        """
        self.stopping = True
        async with self._lock:
            if self.stopped:
                return
            if not await self._end(grace_s=self._settings.stop_grace_s):
                raise UnavailableError(
                    f"worker {self.worker_id}: processes {self._left()} cannot be ended yet, look at the node"
                )
            self._note_stopped()

    async def _go_on_stopping(self) -> None:
        """Try again what a stop could not do: a process outlives SIGKILL while the kernel frees its memory."""
        with contextlib.suppress(OSError):  # /proc cannot be read now
            if await asyncio.to_thread(self.process.kill_what_is_left):
                self._note_stopped()

    def _note_stopped(self) -> None:
        self.process.mark_ended()
        self._resident_bytes = self._restart_at_s = self.error = None
        self.stopped, self.stopping = True, False
