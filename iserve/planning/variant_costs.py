"""Costs of one variant on one deployment: time of steps, prompts and loads, and memory. Pure."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, SlotFormat, Workload, even_split
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimator, Quantity
from fingerprint.estimators.adapter_slots import kernel_cost, loads_stop_steps, variant_cost
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.lora.slot_bytes import slot_bytes
from fingerprint.model_spec import ModelSpec
from iserve.api_documents import VariantCostDocument, VariantDocument
from iserve.planning.words import rounded

__all__ = ["variant_cost_document"]

_MIB = 2**20


def variant_cost_document(
    variant: VariantDocument,
    deployment: str,
    spec: ModelSpec,
    config: DeploymentConfig,
    workload: Workload,
    estimator: Estimator | None,
    table: EngineCapabilities,
) -> VariantCostDocument:
    """Return what ``variant`` takes on ``deployment``.

    An adapter in slots that hold deltas too takes the time of adapters; the memory of its slot is that of both.

    Args:
        config: of the deployment's workers, with adapter slots.
        workload: that it was planned for: requests at once, and their tokens.
        estimator: of the base alone, by its profile; None: there is none, and what rests on it is not known.
        table: of the deployment's engine, which says how adapters are computed and loaded.
    """
    slot = config
    if variant.rank and config.adapter_rank:
        config = replace(config, delta_format=SlotFormat.NONE, delta_mib=0)
    kernels = _ByKernels(spec) if estimator is None and table.adapter_kernels else None
    cost = variant_cost(estimator or kernels, spec, config)
    is_aside = table.adapters_aside and variant.rank > 0 and config.num_gpus == 1
    step_s = None if cost is None else cost.step_s(workload.batch, 1)
    found = VariantCostDocument(
        deployment=deployment,
        engine=config.engine,
        requests=workload.batch,
        prompt_tokens=workload.input_tokens,
        step_s=step_s,
        prompt_s=None if cost is None or estimator is None else _prompt_s(cost, config, workload, estimator),
        slot_bytes=slot_bytes(spec, slot, max(even_split(spec.num_layers, slot.pp))),
        host_bytes=0 if traits_of(config.engine).loads_on_gpu else variant.size_bytes,
        disk_bytes=variant.disk_bytes,
        load_s=None if cost is None else _load_s(cost, variant),
        load_stops_steps=loads_stop_steps(config) and not is_aside,
        text="",
    )
    is_measured = None if cost is None else cost.measured is not None
    return replace(found, text=_words(found, is_measured, is_aside))


def _load_s(cost: VariantCost, variant: VariantDocument) -> float:
    if variant.rank:
        return cost.load_s(variant.size_bytes, 2 * variant.num_modules)
    return cost.load_s(variant.size_bytes)


class _ByKernels:
    """Costs of adapters by our kernels where there is no profile (``variant_cost.TellsVariantCost``)."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of a recording; None: they do not serve such slots."""
        return kernel_cost(self._spec, config)


def _prompt_s(
    cost: VariantCost, config: DeploymentConfig, workload: Workload, estimator: Estimator
) -> Quantity | None:
    """Return what one prompt of the variant takes longer than the base's; None: the base's is not known."""
    alone = replace(workload, batch=1)
    try:
        ttft_s = estimator.estimate(config.without_slots, alone).ttft_s.value
    except (ConfigError, NotMeasuredError):
        return None
    return cost.prompts_s(alone, ttft_s, 0.0, 1.0)


def _words(found: VariantCostDocument, is_measured: bool | None, is_aside: bool) -> str:
    memory = f"{_mib(found.slot_bytes)} of each device for its slot"
    if found.host_bytes:
        memory += f", {_mib(found.host_bytes)} of the host's memory while it is loaded"
    memory += f", {_mib(found.disk_bytes)} on disk"
    several = f"{found.requests:,} request{'s' * (found.requests > 1)}"
    times = "; ".join(
        [
            f"each decode step of {several} longer by {_times(found.step_s)}",
            f"each prompt of {found.prompt_tokens:,} tokens by {_times(found.prompt_s)}",
            f"a load takes {_load(found, is_aside)}",
        ]
    )
    if found.step_s is None and found.prompt_s is None and found.load_s is None:
        times = "its times are not known: none of its kind were profiled"
    origin = {None: "", True: " (measured from fingerprints)", False: " (scaled from one H200)"}[is_measured]
    return f"costs on {found.deployment}: {memory}; {times}{origin}"


def _load(found: VariantCostDocument, is_aside: bool) -> str:
    if found.load_s is None:
        return "a time that is not known"
    stops = ", in which its worker decodes nothing" if found.load_stops_steps else ""
    if is_aside:
        stops = " or more, next to the steps"
    return f"{rounded(found.load_s, 2)} s{stops}"


def _times(added: Quantity | None) -> str:
    if added is None:
        return "a time that is not known"
    low, value, high = (rounded(1e3 * one, 2) for one in (added.low, added.value, added.high))
    return f"{value} ms ({low} to {high})"


def _mib(num_bytes: int) -> str:
    return f"{rounded(num_bytes / _MIB, 3)} MiB"
