"""Intent of a user: what to optimise and which limits to keep. Knows nothing of any configuration's figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import StrEnum

from fingerprint.config import (
    ADAPTER_RANKS,
    MAX_DELTA_MIB,
    DeploymentConfig,
    KvFormat,
    Pruning,
    SlotFormat,
    WeightFormat,
)
from fingerprint.errors import ConfigError

__all__ = [
    "LIMITED",
    "MAX_REPLICAS",
    "MAX_VARIANTS",
    "MOST_BASE_SHARE",
    "MOST_SKEW",
    "MOST_WINDOWS",
    "CostModel",
    "Intent",
    "IntentKind",
    "Quality",
    "Slo",
    "Traffic",
    "allows",
    "check_replicas",
    "parse_slo",
    "quality_needed",
]


class IntentKind(StrEnum):
    """Objective kinds. ``latency-slo``: the cheapest that meets the SLO; ``cost-slo``: the fastest in budget."""

    MIN_LATENCY = "min-latency"
    MIN_COST = "min-cost"
    MIN_MEMORY = "min-memory"
    MIN_GPU_HOURS = "min-gpu-hours"
    MAX_THROUGHPUT = "max-throughput"
    MIN_ENERGY = "min-energy"
    LATENCY_SLO = "latency-slo"
    COST_SLO = "cost-slo"


LIMITED = (IntentKind.LATENCY_SLO, IntentKind.COST_SLO)  # which are nothing without their limit


class CostModel(StrEnum):
    """Cost of a request, by model; the formulas and units are in ``planner.costs``."""

    MEMORY_LATENCY = "memory-latency"
    MEMORY = "memory"
    GPU_HOURS = "gpu-hours"
    DOLLARS = "dollars"


_UNITS = {
    CostModel.MEMORY_LATENCY: "GiB of GPU memory times seconds",
    CostModel.MEMORY: "GiB of GPU memory",
    CostModel.GPU_HOURS: "GPU-seconds",
    CostModel.DOLLARS: "US dollars",
}


class Quality(StrEnum):
    """Extent to which the model's answers may change, strictest first.

    ``exact``: 16bit weights, or those of the checkpoint as it is, and 16bit KV, nothing pruned. ``near``: also
    int8 and fp8 weights, with any KV format. ``any``: everything.
    """

    EXACT = "exact"
    NEAR = "near"
    ANY = "any"


_AS_GIVEN = (WeightFormat.BITS16, WeightFormat.STORED)
_NEAR_WEIGHTS = (*_AS_GIVEN, WeightFormat.INT8, WeightFormat.FP8)


def quality_needed(config: DeploymentConfig) -> Quality:
    """Return the strictest quality that still allows ``config``."""
    if config.pruning is not Pruning.NONE or config.weights not in _NEAR_WEIGHTS:
        return Quality.ANY
    if config.weights in _AS_GIVEN and config.kv is KvFormat.BITS16:
        return Quality.EXACT
    return Quality.NEAR


def allows(quality: Quality, config: DeploymentConfig) -> bool:
    """Return whether ``config`` changes the model's answers no further than ``quality`` lets it."""
    strictness = list(Quality)
    return strictness.index(quality_needed(config)) <= strictness.index(quality)


_MOST_CV = 100.0
MOST_SKEW = 10.0  # of Zipf's law: nearly all requests are of one variant
MAX_VARIANTS = 10_000  # of one base
MOST_BASE_SHARE = 0.999  # of the requests; with fewer for all variants together, slots are of no use
_MOST_PER_S = 1e9
_MEAN = 1e-3  # rates are given with few digits


def _positive(name: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{name} must be a positive, finite number, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Latency limits in seconds; None: not limited. Judged at the intent's percentile and rate.

    Raises:
        ConfigError: a limit that is not positive and finite, or no limit at all.
    """

    ttft_s: float | None = None
    """Limit of the time to first token in seconds; None: not limited."""
    tpot_s: float | None = None
    """Limit of the time per output token in seconds; None: not limited."""
    e2e_s: float | None = None
    """Limit of the time of a whole request in seconds; None: not limited."""

    def __post_init__(self) -> None:
        limits = [(entry.name, getattr(self, entry.name)) for entry in fields(self)]
        for name, value in limits:
            _positive(f"the SLO's {name.removesuffix('_s')}", value)
        if all(value is None for _, value in limits):
            raise ConfigError("an SLO needs at least one of ttft=, tpot=, e2e= (seconds)")


def parse_slo(text: str) -> Slo:
    """Read ``ttft=0.5,tpot=0.05,e2e=10`` (seconds), any subset.

    Raises:
        ConfigError: an unknown or repeated name, a value that is not a positive number, or nothing at all.
    """
    values: dict[str, float] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, separator, value = (piece.strip() for piece in part.partition("="))
        if not separator or name not in {"ttft", "tpot", "e2e"}:
            raise ConfigError(f"{part!r} is not one of ttft=, tpot=, e2e= with a number of seconds")
        if name in values:
            raise ConfigError(f"{name} is given twice in {text!r}")
        try:
            if "_" in value or not value.isascii():  # float() takes 1_0 for 10, and other scripts' digits
                raise ValueError(value)
            values[name] = float(value)
        except ValueError as error:
            raise ConfigError(f"{name} needs a number of seconds, got {value!r}") from error
    return Slo(ttft_s=values.get("ttft"), tpot_s=values.get("tpot"), e2e_s=values.get("e2e"))


MOST_WINDOWS = 2048
MAX_REPLICAS = 64  # a node has no more devices


def check_replicas(number: int) -> int:
    """Return ``number``. Raises ConfigError: no deployment has so many replicas."""
    if not 1 <= number <= MAX_REPLICAS:
        raise ConfigError(f"a deployment has 1 to {MAX_REPLICAS} replicas, got {number}")
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Pattern of arrivals, and variation of lengths about the workload's, which are the means.

    ``relative_rates``: over their mean, in windows of ``window_s`` that follow one another again and again; none:
    the rate is always the same. The burstiness is that within a window.

    Raises:
        ConfigError: a coefficient of variation below 0 or above 100, no burstiness at all, prefix hits or an
            acceptance that are no share below 1, requests for the base that are more than 0.999 of all, too many
            variants or of too high a rank, rates below 0 or whose mean is not 1, more than 2,048 of them, or a
            window that is not positive.
    """

    burstiness: float = 1.0  # coefficient of variation of the gaps between arrivals; 1: Poisson
    input_cv: float = 0.0
    output_cv: float = 0.0
    relative_rates: tuple[float, ...] = ()
    window_s: float = 10.0
    prefix_hits: float = 0.0  # share of the prompts' tokens that the engine's prefix cache holds
    draft_acceptance: float = (
        0.0  # of n-gram drafts, those whose predecessors were accepted; 0: not known, no drafts
    )
    variants: int = 0  # LoRA adapters that requests ask for, next to the base; 0: the base alone
    variant_rank: int = 16  # the largest; 0 with a format: all are deltas
    delta_mib: int = 0  # of the largest delta of a full fine-tune among the variants; 0: all are adapters
    delta_format: SlotFormat = SlotFormat.NONE  # of deltas among the variants, where slots have a format
    variant_skew: float = 1.0  # exponent of Zipf's law by which they are popular; 0: all alike
    base_share: float = 0.0  # of the requests, those for the base itself, where it has variants

    def __post_init__(self) -> None:
        _positive("the burstiness", self.burstiness)
        _positive("the window of a rate that moves", self.window_s)
        for name in ("burstiness", "input_cv", "output_cv"):
            value = getattr(self, name)
            if not 0 <= value <= _MOST_CV:
                raise ConfigError(f"{name} must be from 0 to {_MOST_CV:g}, got {value}")
        if not 0 <= self.prefix_hits < 1:
            raise ConfigError(
                f"prefix hits are a share of the prompts' tokens, 0 to below 1, got {self.prefix_hits:g}"
            )
        if not 0 <= self.draft_acceptance < 1:
            raise ConfigError(
                "the acceptance is the share of n-gram drafts that are accepted, 0 to below 1, got "
                f"{self.draft_acceptance:g}"
            )
        if not 0 <= self.variants <= MAX_VARIANTS:
            raise ConfigError(f"there may be 0 to {MAX_VARIANTS:,} variants, got {self.variants:,}")
        has_format = self.delta_format is not SlotFormat.NONE
        if self.variant_rank < (0 if has_format else 1):
            raise ConfigError(
                f"adapters of rank 1 to {ADAPTER_RANKS[-1]} are served next to their base, got "
                f"{self.variant_rank}; 0 says that all variants are deltas of full fine-tunes, and needs their "
                "format (--delta-format)"
            )
        if self.variant_rank > ADAPTER_RANKS[-1]:
            raise ConfigError(
                f"adapters of rank 1 to {ADAPTER_RANKS[-1]} are served next to their base, got "
                f"{self.variant_rank}; merge one of a higher rank: iserve variant merge"
            )
        if not 0 <= self.delta_mib <= MAX_DELTA_MIB:
            raise ConfigError(f"slots hold deltas of 0 to {MAX_DELTA_MIB:,} MiB, got {self.delta_mib:,}")
        if self.delta_mib and has_format:
            raise ConfigError(
                "slots for deltas have a size on the embedded engine (--delta-mib) and a format on vLLM "
                "(--delta-format); give one of them"
            )
        if not 0 <= self.variant_skew <= MOST_SKEW:
            raise ConfigError(
                f"the exponent of Zipf's law must be from 0 to {MOST_SKEW:g}, got {self.variant_skew:g}"
            )
        if not 0 <= self.base_share <= MOST_BASE_SHARE:
            raise ConfigError(
                f"the base's share is that of the requests without a variant, 0 to {MOST_BASE_SHARE:g}, got "
                f"{self.base_share}; where none is for a variant, leave out the variants"
            )
        if self.relative_rates:
            self._check_rates()

    def _check_rates(self) -> None:
        if len(self.relative_rates) > MOST_WINDOWS:
            raise ConfigError(
                f"at most {MOST_WINDOWS:,} windows can be given, got {len(self.relative_rates):,}; lengthen them"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in self.relative_rates):
            raise ConfigError("the rates of windows must be finite and not below 0")
        mean = sum(self.relative_rates) / len(self.relative_rates)
        if abs(mean - 1) > _MEAN:
            raise ConfigError(f"the rates of windows are over their mean, which must be 1; it is {mean:g}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Intent:
    """Intent of a user.

    The limits (slo, rate, budget, quality) hold under every kind of intent that is given them.

    Raises:
        ConfigError: a value out of its range, or a limit that the kind cannot do without.
    """

    kind: IntentKind = IntentKind.MIN_COST
    cost_model: CostModel = CostModel.MEMORY_LATENCY
    slo: Slo | None = None
    slo_by_value: bool = False  # without a rate: judged by the estimate, not by the upper end of its interval
    percentile: float = 95.0  # of the requests that keep each limit of the SLO, when a rate is given
    rate_per_s: float | None = None  # requests; None: no queueing is considered
    replicas: int = 1  # that get ``rate_per_s`` each; reasons and advice give the rate of all
    traffic: Traffic = field(default_factory=Traffic)  # of use with a rate only
    quality: Quality = Quality.NEAR
    budget: float | None = None  # per request, in the unit of the cost model

    def __post_init__(self) -> None:
        _positive("the budget", self.budget)
        _positive("the rate", self.rate_per_s)
        if self.rate_per_s is not None and self.rate_per_s > _MOST_PER_S:
            raise ConfigError(f"the rate may be {_MOST_PER_S:g} requests/s at most, got {self.rate_per_s:g}")
        _positive("the number of replicas", self.replicas)
        if not 0 < self.percentile < 100:
            raise ConfigError(f"the percentile must be above 0 and below 100, got {self.percentile}")
        if self.kind is IntentKind.LATENCY_SLO and self.slo is None:
            raise ConfigError("the intent latency-slo needs an SLO, such as ttft=0.5,tpot=0.05")
        if self.kind is IntentKind.COST_SLO and self.budget is None:
            raise ConfigError(
                "the intent cost-slo needs a budget (--budget): the most a request may cost, in "
                f"{_UNITS[self.cost_model]} (cost model {self.cost_model})"
            )
