"""The embedded engine's adapter: what it runs, how its worker process starts, what its exit codes mean."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from daemon import exit_codes
from daemon.devices import Device
from daemon.engine_options import EngineOptions, refuse_options
from daemon.engines.base import Burst, Command, Container, Inside
from daemon.engines.environments import is_version
from daemon.profile_messages import ProfileLoad
from daemon.sources.transformers_classes import recorded_transformers
from daemon.torch_engine.model import capabilities
from daemon.torch_engine.model.architectures import architectures_of, installed_transformers
from daemon.torch_engine.versions import component_versions, version_of
from daemon.worker_spec import WorkerSpec
from daemon.worker_stats import WorkerStats, read_own_stats
from fingerprint.capability import EngineCapabilities, Exclusion, Note, Verified
from fingerprint.codec import to_json
from fingerprint.config import WeightFormat
from fingerprint.errors import (
    CheckpointError,
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    IserveError,
)
from fingerprint.extras import missing_extra, need_extra

__all__ = ["TABLE", "TorchEngine"]

TABLE = EngineCapabilities(
    engine="torch",
    architectures=architectures_of(recorded_transformers()),  # where none is installed
    weights=capabilities.WEIGHTS,
    kv=capabilities.KV,
    pruning=capabilities.PRUNING,
    stored=capabilities.STORED,
    max_tp=capabilities.MAX_TP,
    max_pp=capabilities.MAX_PP,
    expert_parallel="its ranks divide the matrices of each expert",
    degree_reason="more ranks were not run there yet",
    adapters=True,
    cpu=True,
    eager=True,
    verified=(Verified(max_tp=capabilities.MAX_TP, max_pp=capabilities.MAX_PP),),
    exclusions=(
        Exclusion(
            families=frozenset({"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"}),
            weights=frozenset({WeightFormat.INT8}),
            reason="transformers fuses a layer's experts into one tensor, which the int8 format does not cover",
        ),
        Exclusion(
            families=frozenset({"gpt2"}),
            weights=frozenset({WeightFormat.INT8}),
            reason="transformers holds its matrices transposed (Conv1D), which the int8 format does not cover",
        ),
    ),
)

_ENVIRONMENT = (("HF_HUB_OFFLINE", "1"), ("PYTHONUNBUFFERED", "1"), ("TOKENIZERS_PARALLELISM", "false"))
_SPEC_FILE = "spec.json"

_MEANINGS: dict[int, tuple[type[IserveError], str]] = {
    exit_codes.PORT_IN_USE: (
        ConflictError,
        "its port is in use; choose another or let the daemon choose (port 0)",
    ),
    exit_codes.OUT_OF_MEMORY: (
        EngineError,
        "it ran out of memory; give it more memory, a smaller batch or a shorter context",
    ),
    exit_codes.BAD_CHECKPOINT: (CheckpointError, "the checkpoint or configuration cannot be served"),
    exit_codes.ENGINE_FAILED: (EngineError, "a rank died or a step failed"),
}


class TorchEngine:
    """transformers' models in a process of our own; needs the extra ``torch`` and nothing else."""

    name = "torch"
    table = TABLE
    stats_path = "/stats"

    def pinned(self, version: str | None) -> TorchEngine:
        if version is None or is_version(own := version_of("iserve"), version):
            return self
        raise InfeasibleError(
            f"torch {version} is asked for, and the embedded engine is part of iServe, here {own}; leave "
            "--engine-version out, or name the engine that has this version"
        )

    def capabilities(self) -> EngineCapabilities:
        missing = missing_extra("torch", "the embedded engine")
        if missing is not None:
            return replace(TABLE, unavailable=missing)
        try:
            return replace(TABLE, architectures=architectures_of(installed_transformers()))
        except EngineError as error:
            there = TABLE.architectures.source
            said = f"{error}; the classes of {there} are taken to be there"
            return replace(TABLE, notes=(Note(text=said),))

    def versions(self) -> tuple[tuple[str, str], ...]:
        return component_versions()

    def profile_order(self, spec: WorkerSpec, order: ProfileLoad) -> ProfileLoad:
        return order

    def shares_places(self, spec: WorkerSpec) -> bool:
        return False

    def warm_up_bursts(self, spec: WorkerSpec) -> tuple[Burst, ...]:
        return ()  # it runs its largest steps before it is healthy

    def check_options(self, options: EngineOptions) -> None:
        refuse_options(self.name, options)

    def command(self, spec: WorkerSpec, folder: Path, devices: Mapping[str, Device]) -> Command:
        need_extra("torch", "the embedded engine")
        if spec.dummy_weights:
            raise ConfigError("engine torch has no dummy weights; give it a checkpoint with generated ones")
        return Command(
            argv=(sys.executable, *_arguments(folder / _SPEC_FILE)),
            env=_ENVIRONMENT,
        )

    def container(self, spec: WorkerSpec, inside: Inside, devices: Mapping[str, Device]) -> Container:
        release = inside.release or version_of("iserve")
        return Container(
            image=f"iserve:{release}",
            argv=("python", *_arguments(Path(inside.files) / _SPEC_FILE)),
            env=_ENVIRONMENT,
            files=((_SPEC_FILE, to_json(replace(spec, checkpoint=inside.model), indent=2).decode() + "\n"),),
            notes=(
                "No registry has this image; in iServe's source: "
                f"docker build -t iserve:{release} -f docs/Dockerfile .",
            ),
        )

    def read_stats(self, spec: WorkerSpec, body: bytes) -> WorkerStats:
        return read_own_stats(spec.worker_id, body)

    def explain_failure(self, spec: WorkerSpec, exit_code: int, log_tail: str) -> IserveError:
        """Return the error that a worker ended with.

        Its message is what the worker itself said (its last JSON line), else what its exit code means, else its
        last words.
        """
        error, meaning = _MEANINGS.get(exit_code, (EngineError, f"exit code {exit_code}"))
        said = _reported(log_tail)
        if said is None:
            lines = [line for line in log_tail.splitlines() if line.strip()]
            said = f"last words: {lines[-1][:500]}" if lines else "it said nothing"
        return error(f"worker {spec.worker_id} (torch) ended: {meaning}; {said}")


def _arguments(spec_file: Path) -> tuple[str, ...]:
    """Return the arguments after the Python."""
    return ("-m", "daemon.torch_engine", "--spec", str(spec_file))


def _reported(log_tail: str) -> str | None:
    """Return the message of the last ``{"error", "message"}`` line that ``exit_codes.report_failure`` printed."""
    for line in reversed(log_tail.splitlines()):
        if line.startswith('{"error"'):
            try:
                body = json.loads(line)
            except ValueError:
                continue
            message = body.get("message") if isinstance(body, dict) else None
            if isinstance(message, str):
                return message
    return None
