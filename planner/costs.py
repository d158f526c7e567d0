"""What a request costs and what an intent optimises, as small functions of one candidate's figures.

The formulas are those of the design, section 5. A ``None`` means that a figure the formula needs is not known;
nothing is guessed in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimate, MemoryEstimate
from planner.intent import CostModel, Intent, IntentKind

__all__ = [
    "COSTS",
    "OBJECTIVES",
    "Cost",
    "Figures",
    "Objective",
    "Prices",
    "figures",
    "objective_of",
    "total_bytes",
]

GIB = 2**30


class Figures(NamedTuple):
    """What ranking needs of an estimate, flat. Times are of the whole batch, from the estimate's workload."""

    batch: int
    output_tokens: int
    num_gpus: int
    total_bytes: int  # over all GPUs, KV included
    ttft_high_s: float
    tpot_high_s: float
    e2e_s: float
    e2e_high_s: float
    power_w_per_gpu: float | None

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds per request."""
        return self.num_gpus * self.e2e_s / self.batch

    @property
    def service_s(self) -> float:
        """Seconds of the deployment that one request takes, at the upper end of the interval."""
        return self.e2e_high_s / self.batch


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """What GPU time costs here.

    ``shared``: GPUs are shared with other deployments, and each is paid by the share of its memory that is used;
    otherwise a GPU is paid as a whole.

    Raises:
        ConfigError: a price or memory that is not positive and finite, or a share of a memory that is not known.
    """

    usd_per_gpu_hour: float | None = None
    gpu_memory_bytes: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        for name, value in (("price", self.usd_per_gpu_hour), ("GPU memory", self.gpu_memory_bytes)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"the {name} must be positive and finite, got {value}")
        if self.shared and self.gpu_memory_bytes is None:
            raise ConfigError("to pay a shared GPU by its memory share, its memory must be given")


def total_bytes(memory: MemoryEstimate) -> int:
    """Bytes over all tp * pp GPUs: the same for every layer split, so that ranking needs no placement."""
    fixed = memory.activation_bytes + memory.pp_buffer_bytes + memory.runtime_bytes
    layer = memory.layer_weight_bytes + memory.layer_kv_bytes
    ends = memory.first_stage_bytes + memory.last_stage_bytes
    return memory.tp * (memory.num_layers * layer + ends + memory.pp * fixed)


def figures(estimate: Estimate) -> Figures:
    """The flat figures of ``estimate``."""
    workload, memory, ttft, tpot = estimate.workload, estimate.memory, estimate.ttft_s, estimate.tpot_s
    steps = workload.output_tokens - 1
    power = estimate.power_w_per_gpu
    return Figures(
        workload.batch,
        workload.output_tokens,
        memory.tp * memory.pp,
        total_bytes(memory),
        ttft.high,
        tpot.high,
        ttft.value + steps * tpot.value,
        ttft.high + steps * tpot.high,
        None if power is None else power.value,
    )


class Cost(NamedTuple):
    """One cost model."""

    unit: str  # per request
    of: Callable[[Figures, Prices], float | None]
    unknown: str  # why ``of`` can be None


def _memory_latency(f: Figures, prices: Prices) -> float:
    return f.total_bytes / GIB * f.e2e_s / f.batch


def _memory(f: Figures, prices: Prices) -> float:
    return f.total_bytes / GIB


def _gpu_hours(f: Figures, prices: Prices) -> float:
    return f.gpu_seconds


def _dollars(f: Figures, prices: Prices) -> float | None:
    if prices.usd_per_gpu_hour is None:
        return None
    usd_per_gpu_s = prices.usd_per_gpu_hour / 3600
    if prices.shared and prices.gpu_memory_bytes is not None:
        return usd_per_gpu_s * f.total_bytes / prices.gpu_memory_bytes * f.e2e_s / f.batch
    return usd_per_gpu_s * f.gpu_seconds


_NEVER = "it is always known"
COSTS: Mapping[CostModel, Cost] = {
    CostModel.MEMORY_LATENCY: Cost("GiB*s", _memory_latency, _NEVER),
    CostModel.MEMORY: Cost("GiB", _memory, _NEVER),
    CostModel.GPU_HOURS: Cost("GPU-seconds", _gpu_hours, _NEVER),
    CostModel.DOLLARS: Cost("USD", _dollars, "no price per hour is known for this GPU; choose another cost model"),
}


class Objective(NamedTuple):
    """What one kind of intent optimises, under one cost model."""

    unit: str
    maximize: bool
    of: Callable[[Figures, Prices], float | None]
    unknown: str


def _e2e(f: Figures, prices: Prices) -> float:
    return f.e2e_s


def _tokens_per_s(f: Figures, prices: Prices) -> float:
    return f.batch * f.output_tokens / f.e2e_s


def _energy(f: Figures, prices: Prices) -> float | None:
    return None if f.power_w_per_gpu is None else f.power_w_per_gpu * f.gpu_seconds


_LATENCY = Objective("s", False, _e2e, _NEVER)
# None: the intent's own cost model is the objective.
OBJECTIVES: Mapping[IntentKind, Objective | None] = {
    IntentKind.MIN_LATENCY: _LATENCY,
    IntentKind.MIN_COST: None,
    IntentKind.MIN_MEMORY: Objective("GiB", False, _memory, _NEVER),
    IntentKind.MIN_GPU_HOURS: Objective("GPU-seconds", False, _gpu_hours, _NEVER),
    IntentKind.MAX_THROUGHPUT: Objective("output tokens/s", True, _tokens_per_s, _NEVER),
    IntentKind.MIN_ENERGY: Objective("J", False, _energy, "the power draw is not known on this hardware"),
    IntentKind.LATENCY_SLO: None,
    IntentKind.COST_SLO: _LATENCY,
}


def objective_of(intent: Intent) -> Objective:
    """What ``intent`` optimises."""
    own = OBJECTIVES[intent.kind]
    if own is not None:
        return own
    cost = COSTS[intent.cost_model]
    return Objective(cost.unit, False, cost.of, cost.unknown)
