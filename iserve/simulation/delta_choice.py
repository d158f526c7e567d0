"""Slots of a simulated model whose variants are deltas, by its step times."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.config import ADAPTER_RANKS, LOADED_PER_SLOT, DeploymentConfig
from fingerprint.estimators.adapter_slots import loads_stop_steps, variant_cost
from fingerprint.gpu_spec import GpuSpec
from iserve.planning.delta_slots import delta_step_time
from iserve.planning.pipeline import variant_load
from iserve.simulation.running import SimulatedModel
from planner.adapter_slots import MOST_SLOTS
from planner.delta_slots import slots_by_step_time

__all__ = ["with_delta_slots"]

_USUAL_REQUESTS = 32  # at a worker, where the batch is left open


def with_delta_slots(model: SimulatedModel, gpu: GpuSpec) -> SimulatedModel:
    """Return ``model`` with the slots for deltas by which most tokens are decoded (``planner.delta_slots``).

    Steps are those of one GPU, with the share of prompts and loads that belongs to a token. More slots than one
    take no more than half of a GPU's memory. A model without deltas, with a number of slots that was asked for, or
    whose deltas take a time that is not known is returned as it is.
    """
    options, engine = model.options, model.engines[0].engine
    traffic, workload = options.intent.traffic, options.workload
    if not traffic.delta_mib or options.adapter_slots:
        return model
    config, delta_bytes = DeploymentConfig(engine=engine), traffic.delta_mib << 20
    in_slots = replace(config, adapter_slots=1, adapter_rank=ADAPTER_RANKS[0], delta_mib=traffic.delta_mib)
    cost = variant_cost(model.estimator, model.spec, in_slots)
    if cost is None or cost.prompt_s is None:
        return model
    requests = _USUAL_REQUESTS if options.more_requests else workload.batch
    step_s = delta_step_time(model.estimator, in_slots, cost, workload)
    load = variant_load(traffic)
    load_s = cost.load_s(delta_bytes)
    found = slots_by_step_time(
        load,
        requests,
        step_s,
        steps=workload.output_tokens,
        max_rows=requests,
        most_slots=min(MOST_SLOTS, max(1, gpu.memory_bytes // 2 // delta_bytes)),
        loads_s=lambda slots: load.missed(LOADED_PER_SLOT * slots) * load_s,
        loads_stop_steps=loads_stop_steps(in_slots),
    )
    return replace(model, options=replace(options, adapter_slots=found.slots))
