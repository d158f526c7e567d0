"""Variants of a world's models: which request is for which, what contestants know of them, what they take.

A contestant that knows variants plans slots for them next to their base. The number of slots is the same for all:
what ``iserve deploy --variants`` reserves on one GPU, of deltas what decodes most tokens, or what the world says.
One that does not know them is asked for a deployment of each variant, merged into a copy of its base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.delta.formats import FORMATS, delta_bytes
from fingerprint.errors import ConfigError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.evaluation.world import Truth, World, WorldModel, WorldVariants
from iserve.planning.pipeline import slots_for, variant_load, with_traffic
from iserve.simulation.delta_choice import with_delta_slots
from iserve.simulation.running import SimulatedModel, adapter_cost
from planner.space import slots_in_bounds
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost

__all__ = ["merged_models", "slot_cost", "with_variant_names", "with_variant_slots"]

_MOST_MERGED = 1_000  # a rule takes minutes to place so many
_VARIANT_SEED = 7_919  # keeps the draws of variants apart from those of models


def with_variant_names(world: World, requests: Sequence[Request], seed: int) -> tuple[Request, ...]:
    """Return ``requests`` with a variant each by its model's law; where a trace names variants, it decides."""
    names = [one.model for one in requests]
    called = set(names)
    for index, model in enumerate(world.models):
        law, variants = model.variants, model.variant_names
        if law is None or not variants or not called.isdisjoint(variants):
            continue
        edges = np.cumsum(variant_load(law.traffic(0)).shares)  # the rest is for the base
        if not law.base_share:
            edges[-1] = 1.0
        rows = [row for row, name in enumerate(names) if name == model.name]
        drawn = np.random.default_rng((_VARIANT_SEED, seed, index)).random(len(rows))
        for row, number in zip(rows, np.searchsorted(edges, drawn, side="right").tolist(), strict=True):
            if number < len(variants):
                names[row] = variants[number]
    return tuple(
        one if one.model == name else replace(one, model=name) for one, name in zip(requests, names, strict=True)
    )


def with_variant_slots(model: SimulatedModel, variants: WorldVariants | None, gpu: GpuSpec) -> SimulatedModel:
    """Return ``model`` as a deploy for ``variants`` plans it, with a number of slots that no plan changes.

    Raises:
        ConfigError: no engine of it serves such variants.
    """
    if variants is None or not variants.number:
        return model
    traffic = variants.traffic(_delta_mib(variants, model.spec))
    options = replace(model.options, intent=replace(model.options.intent, traffic=traffic))
    model = replace(
        model,
        engines=tuple(replace(table, assumes_deltas=traffic.delta_mib > 0) for table in model.engines),
        estimator=with_traffic(model.estimator, model.spec, options),
        options=options,
    )
    refusals = [table.refusal(model.spec, _with_slots(model), gpu) for table in model.engines]
    if refusals[0] is not None and all(refusals):
        raise ConfigError(f"variants of {model.name!r}: {refusals[0]}")
    return replace(model, options=replace(options, adapter_slots=variants.slots or _planned_slots(model, gpu)))


def _planned_slots(model: SimulatedModel, gpu: GpuSpec) -> int:
    """Return the slots of a worker on one GPU that serves as many requests as memory holds."""
    usual = replace(model, options=replace(model.options, more_requests=True))
    if by_time := with_delta_slots(usual, gpu).options.adapter_slots:
        return by_time
    return slots_in_bounds(model.spec, gpu, _with_slots(usual)).adapter_slots


def _with_slots(model: SimulatedModel) -> DeploymentConfig:
    """Return the configuration of one GPU with the slots that the model's variants need, in memory or not."""
    need = slots_for(variant_load(model.options.intent.traffic), model.options)
    return DeploymentConfig(
        weights=model.spec.as_given,
        engine=model.engines[0].engine,
        adapter_slots=need.slots,
        adapter_rank=need.rank,
        delta_mib=need.delta_mib,
    )


def _delta_mib(variants: WorldVariants, spec: ModelSpec) -> int:
    if variants.delta_format is None:
        return variants.delta_mib or 0
    return math.ceil(delta_bytes(spec, FORMATS[variants.delta_format]) / 2**20)


def slot_cost(config: DeploymentConfig, model: SimulatedModel, truth: Truth) -> AdapterCost | None:
    """Return what the slots of a replica take in the simulator; None: it has none.

    These are the product's estimates; ``step_times`` lengthens what is added to steps, ``load_times`` loads.
    """
    cost = adapter_cost(config, model.spec, model.options.intent.traffic.variant_rank, model.estimator)
    if cost is None:
        return None
    cost = replace(cost, load_s=truth.load_times * cost.load_s)
    factor = truth.step_times
    if factor == 1:
        return cost
    added_s, prompt_s = cost.added_s, cost.prompt_s
    return replace(
        cost,
        added_s=lambda rows, active: factor * added_s(rows, active),
        prompt_s=None if prompt_s is None else lambda tokens: factor * prompt_s(tokens),
    )


def merged_models(world: World, requests: Sequence[Request]) -> tuple[WorldModel, ...]:
    """Return a model for each variant, and for each base that is called or may be.

    Raises:
        ConfigError: there are more than a thousand of them.
    """
    called = {one.model for one in requests}
    found: list[WorldModel] = []
    for model in world.models:
        alone = replace(model, variants=None)
        if not model.variant_names or model.name in called or (model.variants and model.variants.base_share):
            found.append(alone)
        found += (replace(alone, name=name) for name in model.variant_names)
    if len(found) > _MOST_MERGED:
        raise ConfigError(
            f"{world.name}: {len(found):,} variants as deployments of their own are not simulated, "
            f"{_MOST_MERGED:,} are; name contestants that know variants, such as ours and rule-min-tp-full"
        )
    return tuple(found)
