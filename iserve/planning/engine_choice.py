"""Which engine is taken when nobody named one: by a deploy the first that can be measured and run here; by a plan
of GPUs that are not here, in the same order.

Pure: tables and a model in, a name out, with the reason why each engine that would have been preferred was not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import UnsupportedModelError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from planner.intent import Quality, allows

__all__ = ["EngineChoice", "by_preference", "choose_engine"]

_ON_GPUS = ("vllm", "tensorrt-llm", "torch")
_ON_CPUS = ("torch",)


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and a sentence for each that is preferred to it and cannot be had."""

    engine: str
    passed_over: tuple[str, ...] = ()


def by_preference(tables: Sequence[EngineCapabilities], gpu: GpuSpec) -> tuple[EngineCapabilities, ...]:
    """``tables`` in the order in which a plan for ``gpu``, which is not here, asks them: as a deploy prefers them,
    and last those that none takes unasked: nothing can be measured on them, or nothing of them was ever run. What
    is installed here does not count.
    """
    names = _ON_CPUS if gpu.compute_capability is None else _ON_GPUS

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
        gpu: the node's; None where no datasheet has it, or for a CPU.
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
        if on_gpus and table.step_timed:
            return "fingerprint/data/gpus.json has no datasheet of this GPU, which estimates on it need"
        return table.family_refusal(spec)  # what else the table says is judged when the device has been measured
    configs = (
        DeploymentConfig(weights=weights, kv=kv, engine=table.engine)
        for weights, kv in product(WeightFormat, KvFormat)
    )
    prepared = table.unprepared()
    reasons = [prepared.refusal(spec, config, gpu) for config in configs if allows(quality, config)]
    return None if any(reason is None for reason in reasons) else reasons[0]
