"""What an engine can run, as a value. Engines fill it in (``daemon.engines``); planners only ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec

__all__ = ["EngineCapabilities"]

_NOT_LISTED = ""


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """One engine's table. A ``None`` reason means yes; a text is the reason for the no.

    Attributes:
        families: model families it loads.
        tp_families: of these, the ones it can split by tensor parallelism.
        weights, kv, pruning: reason per format; a format that is not listed is a no.
        max_tp, max_pp: largest degrees it runs.
        deployable: False while only the table exists and no adapter starts the engine.
        verified: False where the table was read in documentation and never run.
    """

    engine: str
    families: frozenset[str]
    tp_families: frozenset[str]
    weights: Mapping[WeightFormat, str | None]
    kv: Mapping[KvFormat, str | None]
    pruning: Mapping[Pruning, str | None]
    max_tp: int
    max_pp: int
    cpu: bool = False
    deployable: bool = False
    verified: bool = False
    notes: tuple[str, ...] = field(default=())

    def refusal(self, spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> str | None:
        """Why this engine cannot run ``config`` of ``spec`` on ``gpu``; None when it can."""
        name = self.engine
        if spec.family not in self.families:
            return f"{name} does not run the {spec.family} family"
        if gpu.compute_capability is None and not self.cpu:
            return f"{name} needs an NVIDIA GPU"
        for axis, value, reason in (
            ("weights", config.weights, self.weights.get(config.weights, _NOT_LISTED)),
            ("kv", config.kv, self.kv.get(config.kv, _NOT_LISTED)),
            ("pruning", config.pruning, self.pruning.get(config.pruning, _NOT_LISTED)),
        ):
            if reason is not None:
                return f"{name} has no {axis}={value}" + (f": {reason}" if reason else "")
        if config.tp > 1 and spec.family not in self.tp_families:
            return f"{name} does not split the {spec.family} family by tensor parallelism"
        if config.tp > self.max_tp:
            return f"{name} runs tp up to {self.max_tp}"
        if config.pp > self.max_pp:
            return f"{name} runs pp up to {self.max_pp}"
        return None
