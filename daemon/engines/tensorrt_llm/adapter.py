"""TensorRT-LLM 1.2: starts ``trtllm-serve`` with the PyTorch backend from the environment that a setting names.

Written from its documentation and never run: the tests hold it against a strict stand-in for ``trtllm-serve``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from packaging.version import InvalidVersion, Version

from daemon.devices import Device
from daemon.engines.base import Command, Container, Inside
from daemon.engines.external import ExternalEngine, Installation, Interpreter, profiling_worker, wrapped
from daemon.engines.failures import explain
from daemon.engines.machine_info import gpu_machine
from daemon.engines.tensorrt_llm.capabilities import TABLE
from daemon.engines.tensorrt_llm.checkpoint import check_formats, stored_formats
from daemon.engines.tensorrt_llm.error_patterns import ERROR_PATTERNS
from daemon.engines.tensorrt_llm.options import as_yaml, llm_options
from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import WorkerStats, read_own_stats
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.config import WeightFormat
from fingerprint.config_json import read_config
from fingerprint.errors import ConfigError, EngineError, IserveError
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec, match_device
from fingerprint.model_spec import ModelSpec

__all__ = ["TensorRtLlmEngine"]

_DISTRIBUTION = "tensorrt-llm"
_OPTIONS_FILE = "llm_options.yaml"
_OUR_PACKAGES = str(Path(__file__).parents[3])  # for the proxy; it hides them from the engine
_IMAGE, _RELEASE = "nvcr.io/nvidia/tensorrt-llm/release", "1.2.0"
_KNOWN_RELEASE = (1, 2)
_ADAPTERS_NOTE = (
    "Without iServe's proxy a request names an adapter by `lora_request`: lora_name, lora_int_id, and lora_path, "
    "which is a folder of the container. Give no lora_int_id to other content, and let the gateway before it pass "
    "none from clients, which could name any folder. Adapters on TensorRT-LLM were never run."
)
_ENVIRONMENT = (
    ("HF_HUB_OFFLINE", "1"),
    ("PYTHONUNBUFFERED", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TLLM_LOG_LEVEL", "INFO"),  # beats --log_level, and what the daemon's own environment may say
)


class TensorRtLlmEngine(ExternalEngine):
    """Adapter of TensorRT-LLM: a worker is one HTTP process and a rank per GPU, spawned through MPI."""

    stats_path = "/stats"

    def __init__(self) -> None:
        interpreter = Interpreter("ISERVE_TENSORRT_LLM_PYTHON", _DISTRIBUTION, beside=("torch", "transformers"))
        super().__init__(TABLE, interpreter)

    def standing(self, found: Installation) -> str:
        return "read" if _is_known(found.version(_DISTRIBUTION)) else "unknown"

    def check(self, found: Installation) -> None:
        """Raise EngineError for a release whose options were not read, or one without its server."""
        version = found.version(_DISTRIBUTION)
        if not _is_known(version):
            raise EngineError(
                f"TensorRT-LLM {version} of {found.python} is not one that iServe knows: install 1.2, or set "
                f"{self.interpreter.variable} to the Python of an environment that has it"
            )
        if not _server(found).is_file():
            raise EngineError(f"there is no trtllm-serve beside {found.python}; install TensorRT-LLM there anew")

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        """Return ``trtllm-serve`` behind our proxy, under our wrapper; all limits are in its options file.

        Raises:
            EngineError: not installed, or not a 1.2 release.
            ConfigError: the table refuses the configuration, or a profile with pipeline stages is asked for.
            CheckpointError: the checkpoint has no safetensors, is not in the planned formats, or brings code of
                its own.
        """
        found = self.installed(spec.engine_version)
        if spec.profiling:
            return self._profiling(spec, folder, devices, found)
        model = _read_model(spec, devices)
        server = (found.python, str(_server(found)), *_arguments("{model}", folder / _OPTIONS_FILE))
        proxy = (sys.executable, "-m", "daemon.engines.tensorrt_llm.proxy", str(folder / "spec.json"))
        return Command(
            argv=wrapped(spec, (*proxy, *server), python_path=_OUR_PACKAGES),
            env=_environment(found),
            files=((_OPTIONS_FILE, as_yaml(llm_options(spec, model))),),
        )

    def _profiling(
        self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device], found: Installation
    ) -> Command:
        """Return a worker around ``tensorrt_llm.LLM`` that speaks the profiling routes and loads nothing yet."""
        if spec.config.pp > 1:
            raise ConfigError(
                "tensorrt-llm is measured without pipeline stages only: with them it samples on a stream of its "
                "own, beside the next step, and what the step timer then reads was not worked out; profile tp "
                "alone, other degrees are scaled from it"
            )
        machine = gpu_machine(devices.values(), self.versions(spec.engine_version))
        return Command(
            argv=profiling_worker(spec, found, "tensorrt_llm", folder),
            env=_environment(found),
            files=(("machine.json", to_json(machine).decode()),),
        )

    def container(self, spec: WorkerSpec, inside: Inside, devices: Mapping[str, Device]) -> Container:
        model = _read_model(replace(spec, dummy_weights=True), devices)  # its weights may lie on another machine
        where = ("--host", spec.host, "--port", str(spec.port))
        return Container(
            image=f"{_IMAGE}:{Version(inside.release or _RELEASE).public}",  # a tag has no local part
            argv=("trtllm-serve", *_arguments(inside.model, Path(inside.files) / _OPTIONS_FILE), *where),
            env=_ENVIRONMENT,
            files=((_OPTIONS_FILE, as_yaml(llm_options(spec, model))),),
            notes=(
                "Without iServe's proxy trtllm-serve checks no model name, and cuts an answer that is too long "
                "without a word.",
                *([_ADAPTERS_NOTE] if spec.config.adapter_slots else []),
            ),
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        return read_own_stats(spec.worker_id, body)

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        return explain(self.name, spec, exit_code, log_tail, ERROR_PATTERNS)


def _is_known(version: str) -> bool:
    """Return whether the options of ``version`` were read; early candidates lack some."""
    try:
        found = Version(version)
    except InvalidVersion:
        return False
    return (found.major, found.minor) == _KNOWN_RELEASE and not found.is_prerelease


def _environment(found: Installation) -> tuple[tuple[str, str], ...]:
    path = os.pathsep.join((str(Path(found.python).parent), os.environ.get("PATH", os.defpath)))
    return (("PATH", path), *_ENVIRONMENT)


def _arguments(model: str, options_file: Path) -> tuple[str, ...]:
    """Return the arguments after ``trtllm-serve``, host and port aside."""
    return ("serve", model, "--backend", "pytorch", "--extra_llm_api_options", str(options_file))


def _read_model(spec: WorkerSpec, devices: Mapping[str, Device]) -> ModelSpec:
    """Return the checkpoint of ``spec``; raises as ``command``."""
    directory = Path(spec.checkpoint)
    stored = stored_formats(directory)
    config = read_config(directory)
    if spec.config.weights is not WeightFormat.STORED:
        # our own reader does not know what ModelOpt writes; what is quantized, and how, has just been read
        config["quantization_config"] = None
    model = read_spec(config)
    _check_runs(spec, model, devices)
    check_formats(stored, spec.config, directory)
    if not spec.dummy_weights:
        Checkpoint.open(directory)
    return model


def _server(found: Installation) -> Path:
    """Return the console script of the same environment."""
    return Path(found.python).parent / "trtllm-serve"


def _check_runs(spec: WorkerSpec, model: ModelSpec, devices: Mapping[str, Device]) -> None:
    """Raise ConfigError if the table has a reason why this does not run on these devices."""
    for device in devices.values():
        if device.kind != "cuda":
            raise ConfigError(f"tensorrt-llm needs an NVIDIA GPU, {device.device_id} is none")
        # a GPU without a datasheet row is judged like an H200: all that is left then is what no GPU changes
        gpu = match_device(device.name) or gpu_spec("h200-sxm")
        reason = TABLE.refusal(model, spec.config, gpu)
        if reason is not None:
            raise ConfigError(reason)
