"""Cost models and objectives of intents, as small functions of the candidates' figures.

The formulas are those of the design, section 5. NaN means that a figure the formula needs is not known; nothing is
guessed in its place, and the planner refuses the candidate with that reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

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

Column = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the estimates that ranking needs, as one column per figure and one row per estimate.

    Times are of the whole batch of the estimate's workload. Columns, because one array operation over 10,000
    candidates costs what a few calls over single ones do.
    """

    batch: Column
    most_at_once: Column  # of the batch, that run at once (``Estimate.at_once``)
    input_tokens: Column
    output_tokens: Column
    num_gpus: Column
    total_bytes: Column  # over all GPUs, KV included; exact up to 2**53
    total_low_bytes: Column
    total_high_bytes: Column
    ttft_s: Column
    ttft_low_s: Column
    ttft_high_s: Column
    tpot_s: Column
    tpot_low_s: Column
    tpot_high_s: Column
    e2e_s: Column
    e2e_high_s: Column
    power_w_per_gpu: Column  # NaN: not known
    power_low_w_per_gpu: Column
    power_high_w_per_gpu: Column

    @property
    def gpu_seconds(self) -> Column:
        """GPU-seconds per request."""
        return self.num_gpus * self.e2e_s / self.most_at_once

    @property
    def service_s(self) -> Column:
        """Seconds of the deployment that one request takes, at the upper end of the interval."""
        return self.e2e_high_s / self.most_at_once

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """Mask of rows that can be compared: finite, positive, and the interval the right way round."""
        ordered = (self.e2e_s > 0) & (self.e2e_s <= self.e2e_high_s) & np.isfinite(self.e2e_high_s)
        return ordered & (self.ttft_high_s >= 0) & (self.tpot_high_s >= 0) & (self.total_bytes >= 0)

    @property
    def at_low(self) -> Figures:
        """The same with time, memory and power at the lower ends of their intervals."""
        return replace(
            self,
            ttft_s=self.ttft_low_s,
            tpot_s=self.tpot_low_s,
            e2e_s=self.ttft_low_s + (self.output_tokens - 1) * self.tpot_low_s,
            total_bytes=self.total_low_bytes,
            power_w_per_gpu=self.power_low_w_per_gpu,
        )

    @property
    def at_high(self) -> Figures:
        """The same at the upper ends, for limits on what time and memory make together."""
        return replace(
            self,
            ttft_s=self.ttft_high_s,
            tpot_s=self.tpot_high_s,
            e2e_s=self.e2e_high_s,
            total_bytes=self.total_high_bytes,
            power_w_per_gpu=self.power_high_w_per_gpu,
        )

    def take(self, rows: npt.NDArray[np.intp]) -> Figures:
        """Return the same columns with ``rows`` only, in that order."""
        return self._each(lambda column: column[rows])

    def where(self, kept: npt.NDArray[np.bool_], other: float) -> Figures:
        """Return the same columns with ``other`` in place of the rows that are not ``kept``."""
        return self._each(lambda column: np.where(kept, column, other))

    def _each(self, function: Callable[[Column], Column]) -> Figures:
        return Figures(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """Price of GPU time here; a GPU is paid as a whole, even when other deployments share it.

    Raises:
        ConfigError: a price that is not positive and finite.
    """

    usd_per_gpu_hour: float | None = None

    def __post_init__(self) -> None:
        price = self.usd_per_gpu_hour
        if price is not None and not (math.isfinite(price) and price > 0):
            raise ConfigError(f"the price must be positive and finite, got {price}")


def total_bytes(memory: MemoryEstimate) -> int:
    """Return bytes over all tp * pp GPUs: the same for every layer split, so that ranking needs no placement."""
    fixed = memory.activation_bytes + memory.pp_buffer_bytes + memory.runtime_bytes
    layer = memory.layer_weight_bytes + memory.layer_kv_bytes
    ends = memory.first_stage_bytes + memory.last_stage_bytes
    return memory.tp * (memory.num_layers * layer + ends + memory.pp * fixed)


def figures(estimates: Sequence[Estimate]) -> Figures:
    """Return the columns of ``estimates``, in their order."""
    values = np.fromiter(chain.from_iterable(map(_row, estimates)), np.float64, _ROW * len(estimates))
    columns = values.reshape(-1, _ROW).T.copy()  # contiguous
    batch, at_once, inputs, outputs, gpus, size, size_error, *times, power, power_low, power_high = columns
    ttft, ttft_low, ttft_high, tpot, tpot_low, tpot_high = times
    return Figures(
        batch=batch,
        most_at_once=at_once,
        input_tokens=inputs,
        output_tokens=outputs,
        num_gpus=gpus,
        total_bytes=size,
        total_low_bytes=size * np.maximum(0.0, 1 - size_error),
        total_high_bytes=size * (1 + size_error),
        ttft_s=ttft,
        ttft_low_s=ttft_low,
        ttft_high_s=ttft_high,
        tpot_s=tpot,
        tpot_low_s=tpot_low,
        tpot_high_s=tpot_high,
        e2e_s=ttft + (outputs - 1) * tpot,
        e2e_high_s=ttft_high + (outputs - 1) * tpot_high,
        power_w_per_gpu=power,
        power_low_w_per_gpu=power_low,
        power_high_w_per_gpu=power_high,
    )


_ROW = 16
_UNKNOWN = (math.nan, math.nan, math.nan)


def _row(estimate: Estimate) -> tuple[float, ...]:
    work, memory, ttft, tpot = estimate.workload, estimate.memory, estimate.ttft_s, estimate.tpot_s
    drawn = estimate.power_w_per_gpu
    power = _UNKNOWN if drawn is None else (drawn.value, drawn.low, drawn.high)
    return (
        work.batch, estimate.at_once, work.input_tokens, work.output_tokens, memory.tp * memory.pp,
        total_bytes(memory), memory.relative_error, ttft.value, ttft.low, ttft.high,
        tpot.value, tpot.low, tpot.high, *power,
    )  # fmt: skip


class Cost(NamedTuple):
    """Cost model: its unit and its formula."""

    unit: str  # per request
    of: Callable[[Figures, Prices], Column]
    unknown: str  # why ``of`` can be NaN


def _memory_latency(f: Figures, prices: Prices) -> Column:
    return f.total_bytes / GIB * f.e2e_s / f.most_at_once


def _memory(f: Figures, prices: Prices) -> Column:
    return f.total_bytes / GIB


def _gpu_hours(f: Figures, prices: Prices) -> Column:
    return f.gpu_seconds


def _dollars(f: Figures, prices: Prices) -> Column:
    if prices.usd_per_gpu_hour is None:
        return np.full_like(f.e2e_s, np.nan)
    return prices.usd_per_gpu_hour / 3600 * f.gpu_seconds


_NEVER, _NO_POWER = "it is always known", "the power draw is not known on this hardware"
COSTS: Mapping[CostModel, Cost] = {
    CostModel.MEMORY_LATENCY: Cost("GiB*s", _memory_latency, _NEVER),
    CostModel.MEMORY: Cost("GiB", _memory, _NEVER),
    CostModel.GPU_HOURS: Cost("GPU-seconds", _gpu_hours, _NEVER),
    CostModel.DOLLARS: Cost("USD", _dollars, "no price per hour is known for this GPU; choose another cost model"),
}


class Objective(NamedTuple):
    """Objective of one kind of intent under one cost model."""

    unit: str
    maximize: bool
    of: Callable[[Figures, Prices], Column]
    unknown: str
    words: str  # what is optimised
    spares_memory: bool = False  # whether memory for more requests than planned would defeat it
    rate_per_s: float | None = None  # of a latency: that of its requests, whose mean E2E takes the place of ``of``


def _e2e(f: Figures, prices: Prices) -> Column:
    return f.e2e_s


def _tokens_per_s(f: Figures, prices: Prices) -> Column:
    return f.most_at_once * f.output_tokens / f.e2e_s


def _energy(f: Figures, prices: Prices) -> Column:
    return f.power_w_per_gpu * f.gpu_seconds


_LATENCY = Objective("s", False, _e2e, _NEVER, "end-to-end latency")
# Every intent, in the order in which a runner-up is tried by them; None: the objective is its own cost model.
OBJECTIVES: Mapping[IntentKind, Objective | None] = {
    IntentKind.MIN_LATENCY: _LATENCY,
    IntentKind.MAX_THROUGHPUT: Objective("output tokens/s", True, _tokens_per_s, _NEVER, "throughput"),
    IntentKind.MIN_COST: None,
    IntentKind.MIN_GPU_HOURS: Objective("GPU-seconds", False, _gpu_hours, _NEVER, "GPU time per request"),
    IntentKind.MIN_MEMORY: Objective("GiB", False, _memory, _NEVER, "memory over all GPUs", spares_memory=True),
    IntentKind.MIN_ENERGY: Objective("J", False, _energy, _NO_POWER, "energy per request"),
    IntentKind.LATENCY_SLO: None,
    IntentKind.COST_SLO: _LATENCY,
}


def objective_of(intent: Intent) -> Objective:
    """Return what ``intent`` optimises.

    A latency is of the batch or, where a rate is given, of the mean request at it
    (:meth:`planner.attainment.Attainment.mean_e2e`).
    """
    own, rate = OBJECTIVES[intent.kind], intent.rate_per_s
    if own is _LATENCY and rate is not None:
        return own._replace(unit=f"{own.unit} at {rate * intent.replicas:g} requests/s", rate_per_s=rate)
    if own is not None:
        return own
    cost = COSTS[intent.cost_model]
    return Objective(cost.unit, False, cost.of, cost.unknown, f"the cost of a request ({intent.cost_model})")
