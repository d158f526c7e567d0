"""Choice of the engine where none is named, alike for a deploy here and for GPUs that are not here.

The first in the order of preference that can be measured and run is taken; where no configuration is feasible on
it, the next one on which one is.

Pure: tables and a model in, a name out, with the reason why each engine that would have been preferred was not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.engines import preference
from fingerprint.errors import UnsupportedModelError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from planner.intent import Quality, allows

__all__ = [
    "EngineChoice",
    "by_preference",
    "engine_choices",
    "engine_choices_for_gpus",
    "first_feasible",
    "nothing_feasible_on",
]


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """An engine, and a sentence for each that is preferred to it and was not taken."""

    engine: str
    passed_over: tuple[str, ...] = ()


def by_preference(tables: Sequence[EngineCapabilities], gpu: GpuSpec) -> tuple[EngineCapabilities, ...]:
    """Return ``tables`` in the order in which an estimate for ``gpu``, which is not here, asks them.

    The order is that of a deploy; last are those that no deploy takes unasked: nothing can be measured on them, or
    nothing of them was ever run. What is installed here does not count.
    """

    def rank(table: EngineCapabilities) -> tuple[bool, bool, int]:
        last = table.unprofiled is not None or not table.verified
        return last, gpu.is_cpu and not table.cpu, preference(table.engine)

    return tuple(sorted(tables, key=rank))


def engine_choices(
    spec: ModelSpec,
    gpu: GpuSpec | None,
    tables: Sequence[EngineCapabilities],
    quality: Quality,
    *,
    on_gpus: bool,
) -> tuple[EngineChoice, ...]:
    """Return the engines for 16-bit checkpoints of ``spec``, the preferred one first.

    The order is that of ``fingerprint.engines``; on a CPU only those that run there are asked.

    Args:
        gpu: the node's; None where nothing says what it can do, or for a CPU.
        tables: of every engine, installed or not.
        quality: an engine that runs the model only in formats beyond it is passed over.

    Raises:
        UnsupportedModelError: none of them; the message has each one's reason.
    """
    able = [table for table in tables if on_gpus or table.cpu]
    choices, passed_over = [], tuple[str, ...]()
    for table in sorted(able, key=lambda table: preference(table.engine)):
        reason = _why_not(spec, gpu, table, quality, on_gpus=on_gpus)
        if reason is None:
            choices.append(EngineChoice(table.engine, passed_over))
        else:
            passed_over += (f"engine {table.engine} is passed over: {reason}",)
    if not choices:
        raise UnsupportedModelError(f"no engine serves this model here: {'; '.join(passed_over)}")
    return tuple(choices)


def engine_choices_for_gpus(
    name: str, spec: ModelSpec, gpu: GpuSpec, tables: Sequence[EngineCapabilities], quality: Quality
) -> tuple[EngineChoice, ...]:
    """Return the engine called ``name``, or for ``auto`` those that a deploy on ``gpu`` may take.

    Every engine counts as installed there.

    Raises:
        UnsupportedModelError: as :func:`engine_choices`.
    """
    if name != "auto":
        return (EngineChoice(name),)
    installed = [replace(table, unavailable=None) for table in tables]
    return engine_choices(spec, gpu, installed, quality, on_gpus=not gpu.is_cpu)


def first_feasible(choices: Sequence[EngineChoice], is_feasible: Callable[[str], bool]) -> EngineChoice:
    """Return the first engine on which a configuration is feasible; the preferred one where there is none.

    Args:
        is_feasible: plans on an engine. Not asked where there is one choice only.
    """
    passed_over = tuple[str, ...]()
    for choice in choices if len(choices) > 1 else ():
        if is_feasible(choice.engine):
            return replace(choice, passed_over=(*passed_over, *choice.passed_over))
        passed_over += (nothing_feasible_on(choice.engine),)
    return choices[0]


def nothing_feasible_on(engine: str) -> str:
    """Return the sentence on a preferred engine that runs the model, but in no configuration here."""
    return f"engine {engine} is passed over: no configuration of it is feasible here; --engine {engine} says why"


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
        return table.architecture_refusal(spec)  # the rest is judged when the device has been measured
    configs = (
        DeploymentConfig(weights=weights, kv=kv, engine=table.engine)
        for weights, kv in product(WeightFormat, KvFormat)
    )
    prepared = table.unprepared()
    reasons = [prepared.refusal(spec, config, gpu) for config in configs if allows(quality, config)]
    return None if any(reason is None for reason in reasons) else reasons[0]
