"""vLLM as an engine: joins its table, command line, statistics and last words. Never imports it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon.devices import Device
from daemon.engines.base import Command, Container, Inside, WorkerSpec
from daemon.engines.failures import explain
from daemon.engines.foreign import ForeignEngine, Installation, Interpreter, guarded
from daemon.engines.machine import gpu_machine
from daemon.engines.vllm import launch, metrics, signs
from daemon.engines.vllm.table import RUN_RELEASE, TABLE
from daemon.worker_stats import WorkerStats
from fingerprint.capability import EngineCapabilities, Note
from fingerprint.codec import to_json
from fingerprint.errors import EngineError, IserveError

__all__ = ["HOSTED_PATH", "VllmEngine"]

_OLDEST, _NEWEST = (0, 20), (0, 24)
_IMAGE = "vllm/vllm-openai"
_DAEMON = Path(__file__).parents[2]
_PROFILING_WORKER = _DAEMON / "vllm_worker" / "__main__.py"
HOSTED_PATH = os.pathsep.join(  # vLLM finds the step timer as a plugin when it is on its path
    str(_DAEMON / name) for name in ("step_timer", "hosted_worker")
)


class VllmEngine(ForeignEngine):
    """``vllm serve`` of the Python that ``ISERVE_VLLM_PYTHON`` names."""

    stats_path = "/metrics"

    def __init__(self) -> None:
        interpreter = Interpreter("ISERVE_VLLM_PYTHON", "vllm", beside=("torch", "transformers"))
        super().__init__(TABLE, interpreter)

    def capabilities(self) -> EngineCapabilities:
        """With a note where the release that is installed is not the one that was run."""
        table = super().capabilities()
        if not table.deployable:
            return table
        version = self.installed().version("vllm")
        if version.startswith(f"{RUN_RELEASE}."):
            return table
        said = (
            f"vllm {version} is installed here; what is verified was run with {RUN_RELEASE}, of {version} sources"
        )
        return replace(table, notes=(*table.notes, Note(text=f"{said} were read")))

    def check(self, found: Installation) -> None:
        """Raises EngineError: a release whose command line was not read."""
        version = found.version("vllm")
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers is None or not _OLDEST <= (int(numbers[1]), int(numbers[2])) <= _NEWEST:
            raise EngineError(
                f"vllm {version} of {found.python} is not one that iServe knows: install one of 0.20 to 0.24, or "
                f"set {self.interpreter.variable} to the Python of an environment that has one"
            )

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        python = self.installed().python
        if spec.profiling:
            worker = (python, str(_PROFILING_WORKER), "--spec", str(folder / "spec.json"))
            machine = to_json(gpu_machine(devices.values(), self.versions())).decode()
            return Command(
                guarded(spec, worker, python_path=HOSTED_PATH),
                launch.environment(spec, devices),
                (("machine.json", machine),),
            )
        model = launch.read_model(spec)
        server = (python, "-m", "vllm.entrypoints.cli.main", *launch.arguments(spec, model, devices))
        return Command(guarded(spec, server), launch.environment(spec, devices))

    def container(self, spec: WorkerSpec, inside: Inside, devices: Mapping[str, Device]) -> Container:
        model = launch.read_model(replace(spec, dummy_weights=True))  # its weights may lie on another machine
        release = inside.release or "{}.{}.0".format(*_NEWEST)
        return Container(
            image=f"{_IMAGE}:v{release}",
            argv=("vllm", *launch.arguments(replace(spec, checkpoint=inside.model), model, devices)),
            env=launch.environment(spec, devices),
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        return metrics.read_stats(spec.served_model, body)

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        return explain(self.name, spec, exit_code, log_tail, signs.SIGNS, signs.DULL)
