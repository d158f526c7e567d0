"""Configurations, workloads and figures in words, for terminals and pages. Numbers get their units here."""

from __future__ import annotations

from collections.abc import Sequence

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import Quantity
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.interconnect import MeasuredLinks

__all__ = [
    "ELSEWHERE",
    "device_kind",
    "devices",
    "differences",
    "dollars",
    "ends",
    "engine_name",
    "figure",
    "gib",
    "interval",
    "links_times",
    "measured_variants_words",
    "rounded",
    "seconds",
    "short",
    "slots_words",
    "spoken",
    "with_interval",
    "workload_words",
]

ELSEWHERE = "or give --gpus, such as a6000:8, to plan without this machine"


def gib(size_bytes: float) -> str:
    """Return bytes for people: MiB below one GiB."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """Return seconds for people: ms below one second."""
    return f"{value:.2f} s" if value >= 0.9995 else f"{value * 1e3:.3g} ms"  # three digits: not 1e+03 ms


def links_times(links: MeasuredLinks) -> str:
    """Return the times of the smallest and the largest measured all-reduce."""
    small, large = links.sizes_bytes[0], links.sizes_bytes[-1]
    return (
        f"an all-reduce of {small / 2**10:.0f} KiB takes {seconds(links.all_reduce_s[0])}, "
        f"of {large / 2**20:.0f} MiB {seconds(links.all_reduce_s[-1])}"
    )


def figure(value: float | None) -> str:
    """Return four digits of a number, or that it is unknown."""
    return "unknown" if value is None else f"{value:.4g}"


def rounded(value: float, digits: int) -> str:
    """Return so many digits of a number, and all before the decimal point where there are more."""
    text = f"{value:.{digits}g}"
    return f"{value:,.0f}" if "e+" in text else text


def dollars(value: float) -> str:
    """Return US dollars with three digits; cents of larger amounts are left out."""
    return f"${value:,.0f}" if value >= 100 else f"${value:.2f}" if value >= 1 else f"${value:.2g}"


def interval(quantity: Quantity) -> str:
    """Return both ends of an interval: ``182 ms to 1.20 s``."""
    return f"{seconds(quantity.low)} to {seconds(quantity.high)}"


def with_interval(quantity: Quantity) -> str:
    """Return a time with its interval in the same unit: ``257 ms [165-662]``."""
    scale = 1.0 if quantity.value >= 1 else 1e3
    return f"{seconds(quantity.value)} {ends(quantity.low * scale, quantity.high * scale)}"


def ends(low: float, high: float) -> str:
    """Return both ends of an interval behind its value: ``[497-1360]``, three digits or all before the point."""
    first, last = (f"{end:.0f}" if end >= 1000 else f"{end:.3g}" for end in (low, high))
    return f"[{first}-{last}]"


def workload_words(work: Workload) -> str:
    """Return a workload in a sentence."""
    longest = f", requests of up to {work.longest_tokens}" if work.longest_tokens else ""
    return f"batch {work.batch}, {work.input_words} input and {work.output_tokens} output tokens{longest}"


def short(config: DeploymentConfig) -> str:
    """Return a configuration without what is usual, its engine left out."""
    parts = [f"tp={config.tp} pp={config.pp}", f"weights={config.weights}", f"kv={config.kv}"]
    if config.pruning != "none":
        parts.append(f"pruning={config.pruning}")
    if config.expert_parallel:
        parts.append("experts=parallel")
    if config.draft_tokens:
        parts.append(f"drafts={config.draft_tokens}")
    if config.adapter_slots:
        parts.append(f"adapters={config.adapter_slots}xr{config.adapter_rank}")
    if config.delta_mib:
        parts.append(f"delta={config.delta_mib}MiB")
    if config.has_delta_slots:
        parts.append(f"deltas={config.delta_format}")
    return " ".join(parts)


def differences(config: DeploymentConfig, other: DeploymentConfig) -> str:
    """Return the parts of ``config`` in which it differs from ``other``: ``tp=4 on torch``."""
    names = {name: name for name in ("tp", "pp", "weights", "kv", "pruning")}
    names |= {
        "draft_tokens": "drafts",
        "adapter_slots": "adapters",
        "adapter_rank": "adapter rank",
        "delta_mib": "delta MiB",
        "delta_format": "deltas",
    }
    parts = [
        f"{shown}={getattr(config, name)}"
        for name, shown in names.items()
        if getattr(config, name) != getattr(other, name)
    ]
    if config.expert_parallel != other.expert_parallel:
        parts.append("experts=parallel" if config.expert_parallel else "experts=tensor")
    return " ".join([*parts, *([f"on {config.engine}"] if config.engine != other.engine else [])])


def spoken(
    model: str,
    config: DeploymentConfig,
    *,
    gpu: str,
    num_gpus: int,
    layers_per_stage: Sequence[int] | None = None,
    replicas: int = 1,
) -> str:
    """Return what runs where, in one line that a person says aloud.

    ``Llama-2-70B on 2 of 8 A6000 by tensor parallelism, int8 weights, on vLLM``.

    Args:
        gpu: name of the devices, as in ``--gpus``.
        num_gpus: all there are.
    """
    what = model if replicas == 1 else f"{replicas} replicas of {model}, each"
    taken = config.num_gpus
    count = f"{taken} of {num_gpus}" if taken < num_gpus else f"all {num_gpus}" if taken > 1 else "1"
    in_all = "" if replicas == 1 else f" ({replicas * taken} in all)"
    parts = [
        f"{what} on {count} {devices(gpu, num_gpus)}{in_all}{_split(config, layers_per_stage)}",
        *_formats(config),
    ]
    return f"{', '.join(parts)}, on {engine_name(config.engine)}"


def slots_words(config: DeploymentConfig) -> str:
    """Return the adapter slots of a configuration that has some: ``16 adapter slots of rank 16``."""
    plural = "s" * (config.adapter_slots > 1)
    if config.has_delta_slots:
        adapter = f" or an adapter of rank {config.adapter_rank}" if config.adapter_rank else ""
        return f"{config.adapter_slots} slot{plural} for a delta in {config.delta_format}{adapter}"
    delta = f" or a delta of {config.delta_mib:,} MiB" if config.delta_mib else ""
    return f"{config.adapter_slots} adapter slot{plural} of rank {config.adapter_rank}{delta}"


def measured_variants_words(cost: VariantCost) -> str:
    """Return where the time of variants that were measured is from."""
    assert cost.measured is not None
    kind, at = cost.measured.kind, cost.measured.created_at[:10]
    to_steps, to_prompts = " to steps", "; to prompts it is scaled from a recording of an H200"
    if cost.has_measured_prompts:
        to_steps = to_prompts = ""
    if cost.is_exact:
        of = f"the time that {kind} add{to_steps}"
        return f"{of} is measured, from fingerprints with slots filled ({at}){to_prompts}"
    return (
        f"the time that variants add{to_steps} is scaled from {kind} on one device, which were measured from "
        f"fingerprints with slots filled ({at}): it lies between no change and proportion{to_prompts}"
    )


def devices(gpu: str, count: int) -> str:
    """Name of ``count`` devices: ``A6000``, ``CPU devices``."""
    return "CPU device" + "s" * (count > 1) if gpu == "cpu" else gpu.upper()


def device_kind(hardware: str) -> str:
    """Return what one device of a plan's hardware, such as ``2 x cpu (node0)``, is: a GPU or a CPU device."""
    return "CPU device" if hardware.partition(" x ")[2].split(" ")[0] == "cpu" else "GPU"


def engine_name(engine: str) -> str:
    """Return an engine's name as its makers spell it."""
    return traits_of(engine).title or engine


def _split(config: DeploymentConfig, layers_per_stage: Sequence[int] | None) -> str:
    tensor = "" if config.tp == 1 else " by tensor parallelism" + f" of {config.tp}" * (config.pp > 1)
    tensor += " and expert parallelism" * config.expert_parallel
    if config.pp == 1:
        return tensor
    uneven = layers_per_stage is not None and len(set(layers_per_stage)) > 1
    layers = f" of {'+'.join(map(str, layers_per_stage or ()))} layers" if uneven else ""
    return f"{tensor} in {config.pp} pipeline stages{layers}"


def _formats(config: DeploymentConfig) -> list[str]:
    weights = {WeightFormat.BITS16: "16-bit", WeightFormat.STORED: "stored"}.get(
        config.weights, str(config.weights)
    )
    if config.kv is KvFormat.BITS16:
        said = [f"{weights} weights"]
    elif str(config.kv) == str(config.weights):
        said = [f"{weights} weights and KV cache"]
    else:
        said = [f"{weights} weights", f"{config.kv} KV cache"]
    if config.pruning is not Pruning.NONE:
        said.append(f"pruned by {config.pruning}")
    if config.draft_tokens:
        said.append(f"{config.draft_tokens} n-gram drafts a step")
    if config.adapter_slots:
        said.append(slots_words(config))
    return said
