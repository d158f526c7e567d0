"""Cost of a daemon to its node at one look a second: processor time and resident memory, its shims' too.

``python tests/bench/daemon_cost.py --workers 2 --seconds 60 --json out.json``. The workers are the tests' stdlib
stand-ins, idle; their own cost is not counted. With ``--fake-gpus N`` the devices are N simulated GPUs instead of
CPU shares (the driver's own time is then not in the figure). Not a test: nothing fails on a slow machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from daemon.client import DaemonClient
from daemon.devices import Device
from daemon.engines.base import Command
from daemon.engines.torch import TorchEngine
from daemon.lease import LEASE_FILE, Lease, read_file
from daemon.process import is_alive, read_record
from daemon.procfs import read_stat
from daemon.settings import DaemonSettings
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig

HERE = Path(__file__).parent
FAKES = HERE.parent / "daemon"


@dataclass(frozen=True)
class DaemonCost:
    """Cost in one run."""

    workers: int
    devices: str
    seconds: float
    core_fraction: float  # of the daemon, all its threads
    daemon_rss_bytes: int
    shims_core_fraction: float  # all of them
    shim_rss_bytes: int  # the largest
    machine: str


class _StandInEngine(TorchEngine):
    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        return Command(argv=(sys.executable, "-S", str(FAKES / "fake_worker.py"), str(folder / "spec.json")))


def run_daemon(home: Path, fake_gpus: int) -> None:
    """The process that is measured: the real daemon, at its default settings."""
    if fake_gpus:
        spec = importlib.util.spec_from_file_location("fake_nvml", FAKES / "fake_nvml.py")
        assert spec is not None
        assert spec.loader is not None
        fake = importlib.util.module_from_spec(spec)
        sys.modules["fake_nvml"] = sys.modules["pynvml"] = fake
        spec.loader.exec_module(fake)
        fake.GPUS[:] = [fake.Gpu(f"GPU-{index}") for index in range(fake_gpus)]
    from daemon.server import serve

    settings = DaemonSettings(home=home, cpu_devices=None if fake_gpus else 2)
    asyncio.run(serve(settings, lambda _name: _StandInEngine()))


def cpu_s(pid: int) -> float:
    """Processor seconds that the process has used, all threads, by the scheduler's nanoseconds: the tick-based
    counters of /proc/PID/stat miss work shorter than a tick."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def launch(client: DaemonClient, count: int, checkpoint: Path) -> None:
    devices = [device.device_id for device in client.node().devices]
    limits = WorkerLimits(
        max_batch=1, max_batched_tokens=1, max_context_tokens=1, kv_tokens=1, memory_bytes_per_device=2**20
    )
    for number in range(count):
        client.launch(
            WorkerSpec(
                worker_id=f"w{number}",
                served_model="stand-in",
                checkpoint=str(checkpoint),
                config=DeploymentConfig(),
                stages=(StageAssignment(device_ids=(devices[number % len(devices)],), num_layers=1),),
                limits=limits,
            )
        )
    while any(worker.state is not WorkerState.READY for worker in client.workers()):
        time.sleep(0.2)


def measure(workers: int, seconds: float, fake_gpus: int) -> DaemonCost:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        arguments = [sys.executable, __file__, "--serve", str(home), "--fake-gpus", str(fake_gpus)]
        with (Path(folder) / "log").open("wb") as log:
            daemon = subprocess.Popen(arguments, stderr=log)
        try:
            record_file = home / "run" / "daemon.json"
            while (record := read_record(record_file)) is None or not is_alive(record):
                time.sleep(0.1)
            client = DaemonClient(record.url, record.token)
            launch(client, workers, Path(folder))
            shims = [read_file(home / "workers" / f"w{n}" / LEASE_FILE, Lease).shim_pid for n in range(workers)]
            time.sleep(3)  # starting is over
            began_s, before_s, shims_before_s = time.monotonic(), cpu_s(daemon.pid), sum(map(cpu_s, shims))
            time.sleep(seconds)
            spent_s = time.monotonic() - began_s
            stats = [read_stat(pid) for pid in (daemon.pid, *shims)]
            cost = DaemonCost(
                workers=workers,
                devices=f"{fake_gpus} simulated GPUs" if fake_gpus else "2 CPU shares",
                seconds=spent_s,
                core_fraction=(cpu_s(daemon.pid) - before_s) / spent_s,
                daemon_rss_bytes=stats[0].rss_bytes if stats[0] else 0,
                shims_core_fraction=(sum(map(cpu_s, shims)) - shims_before_s) / spent_s,
                shim_rss_bytes=max((stat.rss_bytes for stat in stats[1:] if stat), default=0),
                machine=f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
            )
            for worker in client.workers():
                client.stop(worker.spec.worker_id)
            return cost
        finally:
            daemon.terminate()
            daemon.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fake-gpus", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        run_daemon(options.serve, options.fake_gpus)
        return
    cost = measure(options.workers, options.seconds, options.fake_gpus)
    print(json.dumps(asdict(cost), indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(asdict(cost)))


if __name__ == "__main__":
    main()
