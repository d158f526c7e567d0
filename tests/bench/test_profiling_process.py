"""Profiling workers that a script starts itself: none outlives the script."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]

# The worker's module, found in the working directory before the real one: it writes its id, then each SIGTERM that
# it ignores.
WORKER = """
import os, signal, socket
report = socket.create_connection(("127.0.0.1", {port})).makefile("w")
signal.signal(signal.SIGTERM, lambda *_: print("ignored SIGTERM", file=report, flush=True))
print(os.getpid(), file=report, flush=True)
while True:
    signal.pause()
"""
SCRIPT = """
import signal
from pathlib import Path

from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import MachineInfo
from tests.bench.profiling_process import ProfilingProcess

limits = WorkerLimits(
    max_batch=1, max_batched_tokens=64, max_context_tokens=64, kv_tokens=64, memory_bytes_per_device=1
)
spec = WorkerSpec(
    worker_id="w",
    served_model="m",
    checkpoint="/m",
    config=DeploymentConfig(engine="vllm"),
    stages=(StageAssignment(device_ids=("0",), num_layers=1),),
    limits=limits,
)
machine = MachineInfo(
    device=gpu_spec("h200"), num_devices=1, cores_per_device=1, cpu_model="", driver=None, versions=()
)
process = ProfilingProcess(spec, machine, Path.cwd())
signal.pause()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux signals a process at the death of its parent")
def test_a_worker_that_ignores_sigterm_ends_with_a_killed_script(tmp_path: Path) -> None:
    (tmp_path / "iserve_profiling").mkdir()
    (tmp_path / "iserve_profiling/__init__.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        (tmp_path / "iserve_profiling/vllm.py").write_text(WORKER.format(port=listener.getsockname()[1]))
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        script = subprocess.Popen([sys.executable, "-c", SCRIPT], cwd=tmp_path, env=env)
        try:
            listener.settimeout(PATIENCE_S)
            connection, _ = listener.accept()
            connection.settimeout(PATIENCE_S)
            lines = connection.makefile()
            worker = int(lines.readline())
        finally:
            script.kill()
            script.wait()
    try:
        assert lines.readline() == ""  # the end: the worker alone could write there
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)
        lines.close()
        connection.close()
