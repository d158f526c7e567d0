"""All workers of a node: launched within what is free, adopted after a restart, watched once a second, stopped.

Workers do not depend on it: when the daemon dies they serve on until their leases run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from daemon.engines.base import Engine
from daemon.lease import LEASE_FILE, shim_is_alive
from daemon.monitor import Monitor, WorkerUse
from daemon.port_owner import free_port
from daemon.probe import Prober
from daemon.settings import DaemonSettings
from daemon.status import DeviceStatus, NodeStatus, WorkerStatus
from daemon.worker import SupervisedWorker
from daemon.worker_process import Phase, WorkerProcess, read_spec
from daemon.worker_spec import WorkerSpec
from fingerprint.errors import (
    BadInputError,
    CheckpointError,
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    NotFoundError,
    UnavailableError,
)

__all__ = ["Supervisor"]

log = logging.getLogger(__name__)

_WORKER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,63}")
_READ_STALE_S = 30.0  # a driver that blocks for so long says nothing about now


def _may_be_kept(folder: Path) -> bool:
    """Return whether a shim holds the folder; yes where that cannot be seen."""
    try:
        return shim_is_alive(folder)
    except OSError:
        return True


class Supervisor:
    """For one event loop. :meth:`run` does a pass each second; :meth:`tick` is one pass."""

    def __init__(self, settings: DaemonSettings, monitor: Monitor, engines: Callable[[str], Engine]) -> None:
        self._settings, self._monitor, self._engines = settings, monitor, engines
        self._workers: dict[str, SupervisedWorker] = {}
        self._passes: set[asyncio.Task[None]] = set()
        self._prober = Prober(timeout_s=settings.probe_timeout_s)
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device-reader")
        self._reading: asyncio.Future[None] | None = None

    # --- the loop ----------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Look at the devices and adopt what runs. Before that, any answer would be wrong.

        Raises:
            UnavailableError: the workers' folder cannot be read.
        """
        await self._prober.__aenter__()
        await self._read_devices()
        await self._adopt()

    async def run(self, *, until: asyncio.Event) -> None:
        """Make a pass each ``tick_s`` until asked to leave."""
        while not until.is_set():
            next_s = time.monotonic() + self._settings.tick_s
            await self.tick()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), max(0.0, next_s - time.monotonic()))

    async def close(self) -> None:
        """Let go of everything; the workers run on."""
        for worker in self._workers.values():
            worker.let_go()
        for task in self._passes:
            task.cancel()
        await self._prober.__aexit__(None, None, None)
        self._reader.shutdown(wait=False, cancel_futures=True)

    async def tick(self) -> None:
        """Make one pass: look at the devices, renew and probe every worker, add to the loads.

        A worker that takes its time (one that is being ended, say) is not waited for.
        """
        await self._read_devices()
        passes = [self._begin_pass(worker) for worker in self._workers.values()]
        if passes:
            await asyncio.wait(passes, timeout=self._settings.tick_s)
        self._monitor.observe(self._uses())

    def _begin_pass(self, worker: SupervisedWorker) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(worker.tick(self._prober), name=worker.worker_id)
        self._passes.add(task)
        task.add_done_callback(self._end_pass)
        return task

    def _end_pass(self, task: asyncio.Task[None]) -> None:
        """Log a bug in one worker's pass; it must not end the passes of all."""
        self._passes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("worker %s: its pass failed", task.get_name(), exc_info=error)

    def _wake(self, worker: SupervisedWorker) -> None:
        """Look after one worker now; it has ended, or is about to be ready."""
        if self._workers.get(worker.worker_id) is worker:
            self._begin_pass(worker)

    async def _read_devices(self) -> None:
        """Start a look if none is under way; wait a moment for it, not for ever: a driver call can block."""
        loop = asyncio.get_running_loop()
        if self._reading is None or self._reading.done():
            self._reading = loop.run_in_executor(self._reader, self._monitor.read)
        done, _ = await asyncio.wait([self._reading], timeout=self._settings.tick_s)
        if not done:
            log.warning("the devices' driver has not answered for %.0f s", self._settings.tick_s)
        elif (error := self._reading.exception()) is not None:
            log.error("the devices cannot be read", exc_info=error)

    # --- answers -----------------------------------------------------------------------------------------------

    def _listed_pids(self) -> set[int]:
        return {pid for d in self._monitor.devices for pid in (self._monitor.reading(d).process_bytes or {})}

    def _status(self, worker: SupervisedWorker, listed_pids: set[int]) -> WorkerStatus:
        return replace(worker.status(), held=self._monitor.held(worker.use(listed_pids)))

    def _uses(self) -> list[WorkerUse]:
        pids = self._listed_pids()
        return [worker.use(pids) for worker in self._workers.values() if not (worker.stopped or worker.gave_up)]

    def devices(self) -> tuple[DeviceStatus, ...]:
        """Return the devices.

        Raises UnavailableError: the driver has not answered for long, so nothing is known.
        """
        read_at_s = self._monitor.read_at_s
        if read_at_s is None or time.monotonic() - read_at_s > _READ_STALE_S:
            raise UnavailableError(f"the devices of this node have not answered for {_READ_STALE_S:.0f} s")
        return self._monitor.statuses(self._uses())

    def node(self) -> NodeStatus:
        return NodeStatus(
            node_id=self._settings.node_id,
            observed_at=time.time(),
            devices=self.devices(),
            workers=self.workers(),
            driver=self._monitor.driver,
        )

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return every worker but the stopped ones."""
        pids = self._listed_pids()
        return tuple(self._status(worker, pids) for worker in self._workers.values() if not worker.stopped)

    def worker(self, worker_id: str) -> WorkerStatus:
        """Return one worker. Raises NotFoundError: never heard of, or stopped long ago."""
        return self._status(self._worker(worker_id), self._listed_pids())

    def log_path(self, worker_id: str) -> Path:
        """Return where the worker's output goes. Raises NotFoundError."""
        return self._worker(worker_id).process.folder / "worker.log"

    def _worker(self, worker_id: str) -> SupervisedWorker:
        try:
            return self._workers[worker_id]
        except KeyError:
            raise NotFoundError(f"there is no worker {worker_id!r} on node {self._settings.node_id}") from None

    # --- launching and stopping --------------------------------------------------------------------------------

    async def launch(self, spec: WorkerSpec) -> WorkerStatus:
        """Start a worker on exactly the devices of ``spec``; it is then ``starting``.

        Raises:
            ConfigError, NotFoundError: a value, device or checkpoint that cannot be.
            ConflictError: the id or the fixed port is in use.
            InfeasibleError: a device has less memory free than the limits promise.
            EngineError: the engine is not installed here.
            UnavailableError: nothing can be written or started; nothing is left then.
        """
        engine = self._engines(spec.config.engine)
        table = await asyncio.to_thread(engine.capabilities)  # may ask another interpreter
        self._check_new(spec)
        if table.unavailable is not None:
            where = f"node {self._settings.node_id}"
            raise EngineError(f"{engine.name} cannot be started on {where}: {table.unavailable}")
        self._check_devices(spec)
        fixed = spec.port != 0
        spec = spec if fixed else replace(spec, port=self._free_port(spec.host))
        process = WorkerProcess(self._settings.workers_folder / spec.worker_id)
        worker = self._supervised(spec, engine, process, fixed_port=fixed)
        self._workers[spec.worker_id] = worker  # its id, port and memory are taken: no await since checked
        try:
            await worker.launch()
        except BaseException:
            del self._workers[spec.worker_id]
            raise
        log.info("worker %s launched: %s of %s", spec.worker_id, spec.config, spec.served_model)
        return worker.status()

    def _supervised(
        self, spec: WorkerSpec, engine: Engine, process: WorkerProcess, *, fixed_port: bool
    ) -> SupervisedWorker:
        return SupervisedWorker(
            spec,
            engine,
            process,
            self._settings,
            self._monitor.devices,
            self._wake,
            fixed_port=fixed_port,
        )

    def _check_new(self, spec: WorkerSpec) -> None:
        if not _WORKER_ID.fullmatch(spec.worker_id):
            raise ConfigError(f"worker_id must be 1 to 64 of A-Z, a-z, 0-9 and '-', got {spec.worker_id!r}")
        if not 0 <= spec.port <= 65535:
            raise ConfigError(f"port must be in 0..65535, got {spec.port}")
        if spec.host not in ("127.0.0.1", "::1", "localhost"):
            raise ConfigError(f"a worker listens on loopback only, not on {spec.host!r}")
        if not 1.0 <= spec.lease_ttl_s <= 86400:
            raise ConfigError(f"lease_ttl_s must be between 1 and 86400, got {spec.lease_ttl_s}")
        former = self._workers.get(spec.worker_id)
        if former is not None and not former.stopped:
            raise ConflictError(
                f"worker {spec.worker_id} is there already ({former.state()}); stop it or choose another id"
            )
        if _may_be_kept(self._settings.workers_folder / spec.worker_id):
            raise ConflictError(
                f"a shim of worker {spec.worker_id} still runs; wait for its end or choose another id"
            )
        running = [worker for worker in self._workers.values() if not worker.stopped]
        if len(running) >= self._settings.max_workers:
            raise ConflictError(f"{len(running)} workers are there already, the most allowed; stop one")
        if spec.port and any(worker.spec.port == spec.port for worker in running):
            raise ConflictError(f"port {spec.port} is another worker's; choose another or 0")
        if not spec.profiling and not Path(spec.checkpoint).is_dir():
            raise CheckpointError(
                f"checkpoint {spec.checkpoint!r} is not a folder on node {self._settings.node_id}"
            )

    def _check_devices(self, spec: WorkerSpec) -> None:
        devices = {device.device_id: device for device in self.devices()}
        slots = Counter(device_id for stage in spec.stages for device_id in stage.device_ids)
        if unknown := sorted(slots.keys() - devices.keys()):
            raise NotFoundError(
                f"node {self._settings.node_id} has no device {unknown[0]!r}; it has {sorted(devices)}"
            )
        if len({devices[device_id].kind for device_id in slots}) > 1:
            raise ConfigError("a worker runs on GPUs or on CPU shares, not on both")
        shares_bytes = (stage.memory_bytes_per_device or 0 for stage in spec.stages)
        if (least_bytes := min(spec.limits.memory_bytes_per_device, *shares_bytes)) < 0:
            raise ConfigError(f"memory_bytes_per_device must not be negative, got {least_bytes}")
        for device_id, need_bytes in spec.promised_bytes().items():
            device = devices[device_id]
            if slots[device_id] > 1 and device.kind == "cuda":
                raise ConfigError(
                    f"device {device_id} is given {slots[device_id]} times; a GPU holds one rank of a worker"
                )
            if need_bytes > device.free_bytes:
                raise InfeasibleError(
                    f"worker {spec.worker_id} needs {need_bytes / 2**30:.2f} GiB on {device_id}, "
                    f"{device.free_bytes / 2**30:.2f} GiB are free; stop a worker there or choose another device"
                )

    def _free_port(self, host: str) -> int:
        taken = {worker.spec.port for worker in self._workers.values() if not worker.stopped}
        while (port := free_port(host)) in taken:  # promised to a worker that does not listen yet
            pass
        return port

    async def stop(self, worker_id: str) -> WorkerStatus:
        """End a worker, its group and its descendants, and see its memory free. Idempotent.

        Raises:
            NotFoundError: no such worker.
            UnavailableError: a process of it cannot be ended.
        """
        worker = self._worker(worker_id)
        if not worker.stopped:
            held = self._held_on_gpus(worker)
            await worker.stop()
            worker.error = await self._memory_not_freed(held)
            if worker.error:
                log.error("worker %s: %s", worker_id, worker.error)
            self._forget_oldest()
        return worker.status()

    def _held_on_gpus(self, worker: SupervisedWorker) -> dict[str, frozenset[int]]:
        """Return, by GPU, the processes of the worker that the driver lists."""
        held = {}
        for device_id, device in self._monitor.devices.items():
            if device.kind == "cuda":
                held[device_id] = worker.use(self._monitor.reading(device_id).process_bytes or {}).pids
        return {device_id: pids for device_id, pids in held.items() if pids}

    async def _memory_not_freed(self, held: dict[str, frozenset[int]]) -> str | None:
        """Wait until the driver no longer lists the worker's processes; what is wrong if it goes on doing so."""
        deadline_s = time.monotonic() + self._settings.memory_free_timeout_s
        while held:
            await self._read_devices()
            held = {
                device_id: pids & (self._monitor.reading(device_id).process_bytes or {}).keys()
                for device_id, pids in held.items()
            }
            held = {device_id: pids for device_id, pids in held.items() if pids}
            if held and time.monotonic() > deadline_s:
                return f"ended, but the driver still counts memory of its processes on {sorted(held)}"
            if held:
                await asyncio.sleep(min(1.0, self._settings.tick_s))
        return None

    def _forget_oldest(self) -> None:
        """Keep the folders and logs of the last few ended workers only."""
        ended = [worker for worker in self._workers.values() if worker.stopped]
        for worker in ended[: max(0, len(ended) - self._settings.ended_kept)]:
            worker.process.remove()
            del self._workers[worker.worker_id]

    # --- adoption ----------------------------------------------------------------------------------------------

    async def _adopt(self) -> None:
        """Take up the workers that an earlier daemon left running, none restarted; clear up after the dead."""
        try:
            folders = [path for path in self._settings.workers_folder.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return
        except OSError as error:
            raise UnavailableError(
                f"cannot read {self._settings.workers_folder}: {error.strerror}; mend the folder"
            ) from error
        await asyncio.gather(*(self._adopt_one(folder) for folder in folders))
        ended = sorted(
            (folder for folder in folders if folder.name not in self._workers and not _may_be_kept(folder)),
            key=lambda folder: folder.stat().st_mtime,
        )
        for folder in ended[: max(0, len(ended) - self._settings.ended_kept)]:
            WorkerProcess(folder).remove()

    async def _adopt_one(self, folder: Path) -> None:
        process = WorkerProcess(folder)
        process.remove_stale_temporaries()
        await asyncio.to_thread(process.withdraw)
        phase = process.look()
        deadline_s = time.monotonic() + 5.0
        lease_file = folder / LEASE_FILE  # written in one step: one that is there and unreadable stays so
        while phase is Phase.STARTING and not lease_file.exists() and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)  # the old daemon died while this shim was starting its engine
            phase = process.look()
        phase = process.look()
        lease = process.lease
        if phase in (Phase.ENDED, Phase.ENDING):
            await asyncio.to_thread(process.end, grace_s=0.0)
            process.mark_ended()
            log.info("worker %s had ended; its log stays in %s", folder.name, folder)
            return
        if lease is None:
            log.warning("%s cannot be read; its worker is left to the end of its lease", lease_file)
            return
        try:
            spec = read_spec(folder, lease)
            engine = self._engines(spec.config.engine)
            if unknown := {d for s in spec.stages for d in s.device_ids} - self._monitor.devices.keys():
                raise BadInputError(f"it runs on devices this node does not have: {sorted(unknown)}")
        except BadInputError as error:
            log.warning("worker %s cannot be adopted and is ended: %s", folder.name, error)
            await asyncio.to_thread(process.end, grace_s=self._settings.stop_grace_s)
            process.mark_ended()
            return
        worker = self._supervised(replace(spec, port=lease.port), engine, process, fixed_port=False)
        self._workers[folder.name] = worker
        await worker.tick(self._prober)  # its state is asked for as soon as this daemon listens
        log.info("worker %s (process %d) adopted", folder.name, lease.pid)
