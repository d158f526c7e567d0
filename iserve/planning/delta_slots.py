"""Slots for deltas by what distinct deltas add to a step, and by what slots leave of memory for the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.adapter_slots import loads_stop_steps, variant_cost, variant_load_s
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.gpu_spec import GpuSpec
from fingerprint.lora.slot_bytes import reserved_bytes
from fingerprint.model_spec import ModelSpec
from planner.adapter_slots import MOST_SLOTS, AskedVariants, SlotNeed
from planner.delta_slots import StepTime, slots_by_step_time
from planner.hot_variants import USABLE
from planner.space import TP_DEGREES, slots_in_bounds

__all__ = ["chooses_by_steps", "delta_step_time", "room_rows", "slots_by_steps"]


@dataclass(frozen=True, slots=True)
class _Law:
    """Facts of a configuration with one slot that the law of steps asks for."""

    config: DeploymentConfig
    cost: VariantCost
    rows: Callable[[int], float]
    step_s: StepTime


def slots_by_steps(
    need: SlotNeed,
    load: AskedVariants,
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    engine_of: Callable[[DeploymentConfig], str],
    workload: Workload,
    requests: int,
) -> SlotNeed:
    """Return ``need`` with the slots by which most tokens a second are decoded (``planner.delta_slots``).

    Steps are those of the fewest GPUs that hold the base with one slot. Slots that were asked for, those of
    adapters alone, and those of deltas whose time is not known stay as they are (:func:`chooses_by_steps`).

    Args:
        estimator: of the base alone.
        engine_of: names the engine of a configuration.
        requests: at a worker, running and waiting.
    """
    law = _law(need, spec, gpu, estimator, engine_of, workload)
    if law is None:
        return need
    found = slots_by_step_time(
        load,
        requests,
        law.step_s,
        steps=workload.output_tokens,
        max_rows=requests,
        most_slots=slots_in_bounds(spec, gpu, replace(law.config, adapter_slots=MOST_SLOTS)).adapter_slots,
        loads_s=_loads_s(load, spec, law.config, law.cost),
        loads_stop_steps=loads_stop_steps(law.config),
        room_rows=law.rows,
    )
    return replace(need, slots=found.slots)


def chooses_by_steps(
    need: SlotNeed,
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    engine_of: Callable[[DeploymentConfig], str],
    workload: Workload,
) -> bool:
    """Return whether :func:`slots_by_steps` chooses by the law; else it returns the need as it is."""
    return _law(need, spec, gpu, estimator, engine_of, workload) is not None


def _law(
    need: SlotNeed,
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    engine_of: Callable[[DeploymentConfig], str],
    workload: Workload,
) -> _Law | None:
    if need.is_fixed or (not need.delta_mib and need.delta_format is SlotFormat.NONE):
        return None
    for tp in TP_DEGREES:
        config = DeploymentConfig(
            tp=tp,
            adapter_slots=1,
            adapter_rank=need.rank,
            delta_mib=need.delta_mib,
            delta_format=need.delta_format,
        )
        config = replace(config, engine=engine_of(config))
        cost = variant_cost(estimator, spec, config)
        if cost is None or cost.prompt_s is None:
            return None
        try:
            rows = room_rows(spec, gpu, estimator, config, workload)
            if rows(1) >= 1:
                return _Law(config, cost, rows, delta_step_time(estimator, config, cost, workload))
        except NotMeasuredError:
            return None
    return None


def _loads_s(
    load: AskedVariants, spec: ModelSpec, config: DeploymentConfig, cost: VariantCost
) -> Callable[[int], float]:
    """Return the time of loads for each request by the slots of a worker."""
    load_s = variant_load_s(cost, spec, config)
    return lambda slots: load.missed(replace(config, adapter_slots=slots).loaded_adapters) * load_s


def delta_step_time(
    estimator: Estimator, config: DeploymentConfig, cost: VariantCost, workload: Workload
) -> StepTime:
    """Return the time of a step by rows and distinct deltas, with the share of prompts that belongs to a token.

    Raises:
        NotMeasuredError: the estimator knows no time of this configuration.
    """
    assert cost.prompt_s is not None  # of deltas whose time is known
    plain = config.without_slots
    prompt_s = estimator.estimate(plain, replace(workload, batch=1)).ttft_s.value
    prompt_s += cost.prompt_s(workload.input_tokens)

    @cache
    def base_s(rows: int) -> float:
        return estimator.estimate(plain, replace(workload, batch=rows)).tpot_s.value

    def step_s(rows: float, distinct: float) -> float:
        decode_s = base_s(max(1, round(rows))) + cost.step_s(rows, distinct).value
        return decode_s + rows * prompt_s / workload.output_tokens

    return step_s


def room_rows(
    spec: ModelSpec, gpu: GpuSpec, estimator: Estimator, config: DeploymentConfig, workload: Workload
) -> Callable[[int], float]:
    """Return how many requests have room in the KV cache of a GPU next to so many slots of ``config``.

    The reserved bytes of slots are not the cache's; each request has its whole length there.
    """
    one = estimator.estimate(config.without_slots, replace(workload, batch=1)).memory.stage(0, spec.num_layers)
    fixed_bytes = one.total_bytes - one.kv_bytes

    def rows(slots: int) -> float:
        taken = reserved_bytes(spec, replace(config, adapter_slots=slots), spec.num_layers)
        return (USABLE * gpu.memory_bytes - fixed_bytes - taken) / max(1, one.kv_bytes)

    return rows
