"""Choice of the engine where none is named, alike for a deploy here and for GPUs that are not here.

The first in the order of preference that can be measured and run is taken.

Pure: tables and a model in, a name out, with the reason why each engine that would have been preferred was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import UnsupportedModelError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from planner.intent import Quality, allows

__all__ = ["EngineChoice", "by_preference", "choose_engine", "engine_for_gpus", "takes_unasked"]

_ON_GPUS = ("vllm", "tensorrt-llm", "torch")
_ON_CPUS = ("torch",)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and a sentence for each that is preferred to it and cannot be had."""

    engine: str
    passed_over: tuple[str, ...] = ()


def by_preference(tables: Sequence[EngineCapabilities], gpu: GpuSpec) -> tuple[EngineCapabilities, ...]:
    """Return ``tables`` in the order in which an estimate for ``gpu``, which is not here, asks them.

    The order is that of a deploy; last are those that no deploy takes unasked: nothing can be measured on them, or
    nothing of them was ever run. What is installed here does not count.
    """
    names = _ON_CPUS if gpu.is_cpu else _ON_GPUS

    def rank(table: EngineCapabilities) -> tuple[bool, int]:
        last = table.unprofiled is not None or not table.verified
        return last, names.index(table.engine) if table.engine in names else len(names)

    return tuple(sorted(tables, key=rank))


def choose_engine(
    spec: ModelSpec,
    gpu: GpuSpec | None,
    tables: Sequence[EngineCapabilities],
    quality: Quality,
    *,
    on_gpus: bool,
) -> EngineChoice:
    """The engine for 16-bit checkpoints of ``spec``: on GPUs vllm before tensorrt-llm before torch, else torch.

    Args:
        gpu: the node's; None where nothing says what it can do, or for a CPU.
        tables: of every engine, installed or not.
        quality: an engine that runs the model only in formats beyond it is passed over.

    Raises:
        UnsupportedModelError: none of them; the message has each one's reason.
    """
    by_name = {table.engine: table for table in tables}
    passed_over: list[str] = []
    for table in (by_name[name] for name in (_ON_GPUS if on_gpus else _ON_CPUS) if name in by_name):
        reason = _why_not(spec, gpu, table, quality, on_gpus=on_gpus)
        if reason is None:
            return EngineChoice(table.engine, tuple(passed_over))
        passed_over.append(f"engine {table.engine} is passed over: {reason}")
    raise UnsupportedModelError(f"no engine serves this model here: {'; '.join(passed_over)}")


def engine_for_gpus(
    name: str, spec: ModelSpec, gpu: GpuSpec, tables: Sequence[EngineCapabilities], quality: Quality
) -> EngineChoice:
    """Return the engine called ``name``, or for ``auto`` the one that a deploy on ``gpu`` takes.

    Every engine counts as installed there.

    Raises:
        UnsupportedModelError: as :func:`choose_engine`.
    """
    if name != "auto":
        return EngineChoice(name)
    return choose_engine(spec, gpu, _installed(tables), quality, on_gpus=not gpu.is_cpu)


def takes_unasked(
    name: str, spec: ModelSpec, gpu: GpuSpec, tables: Sequence[EngineCapabilities], quality: Quality
) -> bool:
    """Return whether a deploy on ``gpu`` takes the engine called ``name`` where no preferred one is installed."""
    on_gpus = not gpu.is_cpu
    (table,) = (table for table in _installed(tables) if table.engine == name)
    named = name in (_ON_GPUS if on_gpus else _ON_CPUS)
    return named and _why_not(spec, gpu, table, quality, on_gpus=on_gpus) is None


def _installed(tables: Sequence[EngineCapabilities]) -> list[EngineCapabilities]:
    return [replace(table, unavailable=None) for table in tables]


def _why_not(
    spec: ModelSpec, gpu: GpuSpec | None, table: EngineCapabilities, quality: Quality, *, on_gpus: bool
) -> str | None:
    if table.unprofiled is not None:
        return table.unprofiled
    if table.unavailable is not None:
        return table.unavailable
    if not table.verified:
        return f"nothing of iServe's adapter for it was ever run; --engine {table.engine} takes it all the same"
    if gpu is None:
        if on_gpus and table.own_environment:
            return "no datasheet table has this GPU, and its driver does not say what estimates on it need"
        return table.family_refusal(spec)  # what else the table says is judged when the device has been measured
    configs = (
        DeploymentConfig(weights=weights, kv=kv, engine=table.engine)
        for weights, kv in product(WeightFormat, KvFormat)
    )
    prepared = table.unprepared()
    reasons = [prepared.refusal(spec, config, gpu) for config in configs if allows(quality, config)]
    return None if any(reason is None for reason in reasons) else reasons[0]
