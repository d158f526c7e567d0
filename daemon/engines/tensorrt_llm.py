"""TensorRT-LLM 1.2: starts ``trtllm-serve`` with the PyTorch backend from the environment that a setting names.

Written from its documentation and never run: the tests hold it against a strict stand-in for ``trtllm-serve``. The
parts are in ``daemon.engines.tensorrt``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon.devices import Device
from daemon.engines.base import Command, WorkerSpec
from daemon.engines.failures import explain
from daemon.engines.foreign import Installation, Interpreter, guarded
from daemon.engines.tensorrt.checkpoint import check_formats, stored_formats
from daemon.engines.tensorrt.failures import SIGNS
from daemon.engines.tensorrt.iterations import IterationReader
from daemon.engines.tensorrt.options import as_yaml, llm_options
from daemon.engines.tensorrt.table import TABLE
from daemon.worker_stats import WorkerStats
from fingerprint.capability import EngineCapabilities
from fingerprint.config_json import read_config
from fingerprint.errors import ConfigError, EngineError, IserveError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec, match_device
from fingerprint.model_spec import ModelSpec

__all__ = ["TensorRtLlmEngine"]

_OPTIONS_FILE = "llm_options.yaml"
_KNOWN_RELEASE = re.compile(r"1\.2\.\d")  # 1.2.0, 1.2.1, and candidates such as 1.2.0rc5


class TensorRtLlmEngine:
    """Its workers are one HTTP process and a rank per GPU, spawned through MPI."""

    name = TABLE.engine
    stats_path = "/metrics"

    def __init__(self) -> None:
        self._interpreter = Interpreter("ISERVE_TENSORRT_LLM_PYTHON", "tensorrt-llm", ("torch", "transformers"))
        self._iterations = IterationReader()

    def capabilities(self) -> EngineCapabilities:
        return replace(TABLE, unavailable=self._interpreter.missing())

    def versions(self) -> tuple[tuple[str, str], ...]:
        try:
            found = self._interpreter.find()
        except EngineError:
            return ()
        return (
            ("engine", f"tensorrt-llm {found.version('tensorrt-llm')}"),
            ("torch", found.version("torch")),
            ("transformers", found.version("transformers")),
        )

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        """``trtllm-serve`` under our guard; all limits are in its options file.

        Raises:
            EngineError: not installed, or not a 1.2 release.
            ConfigError: the table refuses the configuration, or a profile is asked for.
            CheckpointError: the checkpoint is not in the planned formats, or brings code of its own.
        """
        found = self._interpreter.find()
        if not _KNOWN_RELEASE.match(version := found.version("tensorrt-llm")):
            raise EngineError(
                f"TensorRT-LLM {version} is installed, this adapter was written for 1.2; install 1.2.1"
            )
        if spec.profiling:
            raise ConfigError("tensorrt-llm has no profiling routes; profile on torch or vllm")
        directory = Path(spec.checkpoint)
        stored = stored_formats(directory)
        # our own reader takes 16-bit models only; what is quantized, and how, has just been read
        model = read_spec(read_config(directory) | {"quantization_config": None})
        _check_runs(spec, model, devices)
        check_formats(stored, spec.config, directory)
        argv = (found.python, _server(found), "serve", str(directory.resolve()), "--backend", "pytorch")
        where = ("--host", spec.host, "--port", str(spec.port))
        options = ("--extra_llm_api_options", str(folder / _OPTIONS_FILE))
        return Command(
            argv=guarded(spec, (*argv, *where, *options)),
            env=(
                ("PATH", os.pathsep.join((str(Path(found.python).parent), os.environ.get("PATH", os.defpath)))),
                ("HF_HUB_OFFLINE", "1"),
                ("PYTHONUNBUFFERED", "1"),
                ("TOKENIZERS_PARALLELISM", "false"),
                ("TLLM_LOG_LEVEL", "INFO"),  # beats --log_level, and what the daemon's own environment may say
            ),
            files=((_OPTIONS_FILE, as_yaml(llm_options(spec, model))),),
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        return self._iterations.read(spec, body)

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        return explain(self.name, spec, exit_code, log_tail, SIGNS)


def _server(found: Installation) -> str:
    """The console script of the same environment. Raises EngineError: it is not there."""
    script = Path(found.python).parent / "trtllm-serve"
    if not script.is_file():
        raise EngineError(
            f"there is no trtllm-serve beside {found.python}; install TensorRT-LLM there with its scripts"
        )
    return str(script)


def _check_runs(spec: WorkerSpec, model: ModelSpec, devices: Mapping[str, Device]) -> None:
    """Raises ConfigError: the table has a reason why this does not run on these devices."""
    for device in devices.values():
        if device.kind != "cuda":
            raise ConfigError(f"tensorrt-llm needs an NVIDIA GPU, {device.device_id} is none")
        # a GPU without a datasheet row is judged like an H200: all that is left then is what no GPU changes
        gpu = match_device(device.name) or gpu_spec("h200-sxm")
        reason = TABLE.refusal(model, spec.config, gpu)
        if reason is not None:
            raise ConfigError(reason)
