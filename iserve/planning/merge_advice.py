"""Advice to merge the hottest variants of a base, with the numbers and the commands that do it. Pure."""

from __future__ import annotations

from itertools import chain

from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.estimators.adapter_slots import variant_cost
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from fingerprint.service_model import LARGEST_BATCH, ServiceModel, service_model
from iserve.api_documents import MergeAdviceDocument
from iserve.planning.pipeline import PlanOptions, in_slots, slots_for, variant_load, with_traffic
from iserve.planning.words import rounded
from planner.adapter_slots import VariantShares
from planner.hot_variants import PEAK, HotVariants, hot_variants
from planner.intent import MAX_REPLICAS
from planner.space import slots_in_bounds

__all__ = ["merge_advice", "merge_advice_of_plan"]


def merge_advice_of_plan(
    base: str,
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    options: PlanOptions,
    config: DeploymentConfig | None,
) -> MergeAdviceDocument | None:
    """Return the advice on the variants of ``options``, planned with ``config``; None: there is none.

    Args:
        base: argument of a command, quoted.
        estimator: of the base alone.
        config: None: none is feasible.
    """
    rate_per_s = options.intent.rate_per_s
    if config is None or rate_per_s is None or not options.intent.traffic.variants:
        return None
    load = VariantShares(tuple(variant_load(options.intent.traffic).shares.tolist()))
    return merge_advice(base, spec, gpu, estimator, options, config, load, rate_per_s)


def merge_advice(
    base: str,
    spec: ModelSpec,
    gpu: GpuSpec,
    estimator: Estimator,
    options: PlanOptions,
    config: DeploymentConfig,
    load: VariantShares,
    rate_per_s: float,
    names: tuple[str, ...] = (),
    keeps_slots: bool = False,
) -> MergeAdviceDocument | None:
    """Return the advice on variants that are asked for as ``load`` and ``rate_per_s`` say; None: there is none.

    There is none where the time of variants is not known. Slots for deltas are judged by the time of deltas, also
    where adapters share them.

    Args:
        base: argument of a command, quoted.
        config: of the base, with adapter slots.
        names: of the variants of ``load``, where they are known.
        keeps_slots: whether the rest stays on the slots of ``config``; else on those that it needs.
    """
    if variant_cost(estimator, spec, config) is None:
        return None
    most = LARGEST_BATCH if options.more_requests else min(LARGEST_BATCH, options.workload.batch)

    def service(config: DeploymentConfig, load: VariantShares) -> ServiceModel:
        judged = with_traffic(estimator, spec, options, load)
        return service_model(judged, config, options.workload, largest_batch=most)

    def on_slots(load: VariantShares) -> ServiceModel:
        if keeps_slots:
            return service(config, load)
        need = slots_for(load, options)
        wanted = in_slots(config, need)
        return service(wanted if need.is_fixed else slots_in_bounds(spec, gpu, wanted), load)

    try:
        plain = service(config.without_slots, load)
        found = hot_variants(load, rate_per_s, on_slots, plain, gpu.memory_bytes)
    except (ConfigError, NotMeasuredError):
        return None
    if found is None:
        return None
    return _document(found, names[: found.merged], _commands(base, config, names[: found.merged]))


def _commands(base: str, config: DeploymentConfig, names: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the commands for each variant that is to be merged; without names, those for one of them."""
    if config.has_delta_slots or config.delta_mib:
        if not names:
            return [(f"iserve variant add NAME --base {base} PATH --as-deployment",)]
        return [(f"iserve variant deploy {name}",) for name in names]
    merges = [(name, f"{name}-merged") for name in names] or [(f"{base} ADAPTER", "OUT")]
    return [(f"iserve variant merge {what} {out}", f"iserve deploy {out}") for what, out in merges]


def _document(found: HotVariants, names: tuple[str, ...], commands: list[tuple[str, ...]]) -> MergeAdviceDocument:
    rate_per_s, on_slots, split = found.on_slots.rate_per_s, found.on_slots, found.split
    several = f"{found.merged} most popular variants" if found.merged > 1 else "most popular variant"
    which = ", ".join(names) or f"the {several}"
    merged_s, on_slots_s = split.gpu_s_per_request, on_slots.gpu_s_per_request
    per_s, one = f"{rounded(rate_per_s, 3)} requests/s", f"{rounded(merged_s, 2)} GPU-seconds a request"
    if on_slots.is_served:  # no number of GPUs: it would be another than the plan's, whose law holds more
        gain = f"take {1 - merged_s / on_slots_s:.0%} less GPU time at {per_s}, {one} in place of "
        gain += f"{rounded(on_slots_s, 2)}, both as shares"
    else:
        gain = (
            f"serve {per_s}, which {MAX_REPLICAS} replicas with all variants on slots do not, at {one}, as shares"
        )
    text = (
        f"merging {which} ({found.share:.0%} of the requests) is estimated to {gain} of "
        f"GPUs with replicas for {PEAK:g} times the rate, where a plan holds GPUs for up to 2.5 times: "
        f"{'; '.join(commands[0])}{' (of each)' * (found.merged > 1)}"
    )
    return MergeAdviceDocument(
        variants=found.merged,
        names=names,
        request_share=found.share,
        rate_per_s=rate_per_s,
        gpus_held_on_slots=on_slots.gpus_held if on_slots.is_served else None,
        gpus_held_merged=split.gpus_held,
        gpu_s_per_request_on_slots=on_slots_s if on_slots.is_served else None,
        gpu_s_per_request_merged=merged_s,
        commands=tuple(chain.from_iterable(commands)),
        text=text,
    )
