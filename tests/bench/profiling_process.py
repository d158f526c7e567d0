"""A profiling worker that a script starts itself, where no daemon runs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from daemon.engines.external import PROFILING_PATH
from daemon.engines.vllm.variant_plug_in import PLUG_IN_PATH, has_adapter_kernels
from daemon.process_tree import set_parent_death_signal
from daemon.worker_spec import WorkerSpec
from fingerprint.codec import to_json
from fingerprint.measurements import MachineInfo

__all__ = ["ROUTING", "ProfilingProcess"]

ROUTING = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # law by which a mixture's experts are drawn


class ProfilingProcess:
    """``WorkerHandle`` on a profiling worker started here, without a daemon."""

    def __init__(self, spec: WorkerSpec, machine: MachineInfo, folder: Path) -> None:
        self.url, self.token = f"http://{spec.host}:{spec.port}", None
        self._folder = folder
        (folder / "spec.json").write_bytes(to_json(spec))
        (folder / "machine.json").write_bytes(to_json(machine))
        plug_ins = [PLUG_IN_PATH] if spec.config.has_delta_slots or has_adapter_kernels() else []
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([PROFILING_PATH, *plug_ins, os.environ.get("PYTHONPATH", "")]),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "CUDA_VISIBLE_DEVICES": ",".join(d for stage in spec.stages for d in stage.device_ids),
            ROUTING: os.environ.get(ROUTING, "uniform_random"),
            "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
            "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        }
        self._log = (folder / "log.txt").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "iserve_profiling.vllm", "--spec", str(folder / "spec.json")],
            env=env,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            preexec_fn=partial(set_parent_death_signal, signal.SIGKILL),  # an engine may not heed SIGTERM
        )

    def failure(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        text = (self._folder / "log.txt").read_text(errors="replace")[-2000:]
        return f"the worker ended with {code}: {text}"

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        self._log.close()
