"""Values of a plan: every candidate with its verdict, the chosen one, and why not any other."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from fingerprint.queueing import MODEL_NAME
from planner.intent import Intent, Quality
from planner.rate_profile import Level

__all__ = [
    "VALUE_NOTE",
    "Better",
    "Candidate",
    "Change",
    "CombinedRelaxation",
    "LatencyForecast",
    "Layout",
    "Limit",
    "LimitKind",
    "LoadForecast",
    "LoadWaitForecast",
    "Nearest",
    "NoRoom",
    "Numbers",
    "PassedOver",
    "Plan",
    "Ranked",
    "RefusedFor",
    "Relaxation",
    "Room",
    "Violation",
    "WhyNot",
]

GIB = 2**30
QUALITIES = tuple(Quality)
INTERVAL_NOTE = "(upper end of the 90% interval)"
VALUE_NOTE = "(by its estimate)"


class Candidate(NamedTuple):
    """Configuration of the space. ``refusal``: why it cannot run at all (its shape, its engine).

    ``alone``: the same configuration with one request, which says what a batch costs each of its requests.
    Without it a request alone is taken to be as slow as the batch. It is asked for with a rate only.
    """

    config: DeploymentConfig
    estimate: Estimate | None = None  # None: nothing is predicted of it
    refusal: str | None = None
    alone: Estimate | None = None


class Layout(Protocol):
    """Place of a candidate; the planner reads the layer split only (``placement.Placement`` is one)."""

    @property
    def layers_per_stage(self) -> tuple[int, ...]: ...


class NoRoom(NamedTuple):
    """A candidate goes nowhere: ``shortfall_bytes`` more on each GPU and ``missing_gpus`` more GPUs would do."""

    reason: str
    shortfall_bytes: int
    missing_gpus: int = 0
    device: str = "GPU"  # kind of the devices, in messages
    is_too_large: bool = False  # for idle devices: no memory that is freed would do


class LimitKind(StrEnum):
    """Kinds of limits that can be relaxed."""

    TTFT = "ttft"
    TPOT = "tpot"
    E2E = "e2e"
    BUDGET = "budget"
    RATE = "rate"
    QUALITY = "quality"
    MEMORY = "memory"
    GPUS = "gpus"
    BATCH = "batch"
    REPLICAS = "replicas"


class RefusedFor(StrEnum):
    """First reason of a refusal, in the order in which the planner asks."""

    SHAPE = "shape"  # the model cannot be split so
    ENGINE = "engine"  # no engine runs it
    UNKNOWN = "unknown"  # a figure that the intent needs is not known
    QUALITY = "quality"
    BUDGET = "budget"
    RATE = "rate"
    LATENCY = "latency"  # TTFT, TPOT or E2E
    MEMORY = "memory"


_REFUSED_FOR = {
    LimitKind.QUALITY: RefusedFor.QUALITY,
    LimitKind.BUDGET: RefusedFor.BUDGET,
    LimitKind.RATE: RefusedFor.RATE,
    LimitKind.MEMORY: RefusedFor.MEMORY,
}


# What may be missed only because other deployments run on the same GPUs.


class Limit(NamedTuple):
    """Limit of an intent.

    ``allowed`` is in its unit: seconds, requests/s, the cost model's unit; for quality the position in
    ``Quality``, for memory 0.
    """

    kind: LimitKind
    allowed: float
    note: str = ""
    replicas: int = 1  # that share a rate; ``allowed`` is the share of one

    def violation(self, actual: float) -> Violation:
        """Return the violation of a candidate with ``actual``; a rate is that of all replicas."""
        times = self.replicas if self.kind is LimitKind.RATE else 1
        return Violation(self.kind, self.allowed * times, actual * times, self.note)


class Violation(NamedTuple):
    """Limit that a candidate misses, and its own number: for memory the missing bytes per GPU."""

    limit: LimitKind
    allowed: float
    actual: float
    note: str = ""

    @property
    def text(self) -> str:
        """Violation in one line with both numbers."""
        match self.limit:
            case LimitKind.QUALITY:
                return "changes the model's answers; quality not measured"
            case LimitKind.MEMORY:
                return self.note
            case LimitKind.RATE if self.note:
                served = f"serves at most {self.actual:.4g} requests/s {self.note}"
                return f"{served}, rate={self.allowed:g} ({MODEL_NAME})"
            case LimitKind.RATE:
                return (
                    f"serves at most {self.actual:.4g} requests/s at the upper end of its interval, "
                    f"rate={self.allowed:g} is a utilisation of {self.allowed / self.actual:.2f} ({MODEL_NAME})"
                )
            case LimitKind.BUDGET:
                cost = f"cost {self.actual:.4g} {self.note} per request"
                return f"{cost} exceeds budget={self.allowed:g} {INTERVAL_NOTE}"
            case _:
                return f"{self.limit} {self.actual:.4g} s exceeds {self.limit}={self.allowed:g} s {self.note}"


class Numbers(Protocol):
    """Numbers of the candidates of one plan, a row each; computed when asked for."""

    def actual(self, row: int) -> tuple[float, ...]:
        """Return the number of every limit that the row misses."""
        ...

    def risk(self, row: int) -> float | None: ...

    def utilisation(self, row: int) -> float | None: ...

    def interval(self, row: int) -> tuple[float, float] | None:
        """Return the interval of the objective; None of a row that misses a limit."""
        ...


class Ranked(NamedTuple):
    """Candidate with its verdict.

    ``missed``: the limits it misses, one value for all candidates that miss the same ones. Its own number for each
    is ``row`` of ``numbers``.
    """

    config: DeploymentConfig
    estimate: Estimate | None
    objective: float | None  # None: unknown or, of a latency at a rate that is not served, without end
    cost: float | None  # per request, in the cost model's unit
    feasible: bool
    refusal: str | None = None  # cannot run at all; no limit can be relaxed to admit it
    missed: tuple[Limit, ...] = ()
    layout: Layout | None = None  # where it would go, when it was found to fit
    no_room: NoRoom | None = None
    numbers: Numbers | None = None
    row: int = 0
    is_unknown: bool = False  # refused because a figure that the intent needs is not known

    @property
    def actual(self) -> tuple[float, ...]:
        """Numbers of the candidate for each of ``missed``."""
        if self.no_room is not None:
            return (float(self.no_room.shortfall_bytes),)
        return self.numbers.actual(self.row) if self.numbers is not None and self.missed else ()

    @property
    def risk(self) -> float | None:
        """Share of requests that miss the SLO's tightest limit; None: no rate or no SLO."""
        return None if self.numbers is None else self.numbers.risk(self.row)

    @property
    def utilisation(self) -> float | None:
        """None: no rate."""
        return None if self.numbers is None else self.numbers.utilisation(self.row)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 90% interval of the objective; None where it is not feasible, or has no end."""
        return None if self.numbers is None or not self.feasible else self.numbers.interval(self.row)

    @property
    def is_measured(self) -> bool:
        """True when this configuration was run, and not estimated from another one or from datasheets."""
        return self.estimate is not None and self.estimate.is_measured

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(limit.violation(actual) for limit, actual in zip(self.missed, self.actual, strict=True))

    @property
    def reason(self) -> str | None:
        """Reason for which it is refused, None when it is feasible."""
        if self.refusal is not None:
            return self.refusal
        return "; ".join(violation.text for violation in self.violations) or None

    @property
    def refused_for(self) -> RefusedFor | None:
        """The kind of its first reason, None when it is feasible."""
        if self.refusal is None:
            return None if not self.missed else _REFUSED_FOR.get(self.missed[0].kind, RefusedFor.LATENCY)
        if self.is_unknown:
            return RefusedFor.UNKNOWN
        return RefusedFor.SHAPE if self.estimate is None else RefusedFor.ENGINE


@dataclass(frozen=True, slots=True)
class Better:
    """Refused configuration that would rank above the chosen one."""

    config: DeploymentConfig
    """Configuration that is refused."""
    objective: float
    """Value of what the intent optimises, in the plan's `objective_unit`."""
    reason: str
    """Reason of the refusal."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """Feasible and better by its value than the chosen one, but not measured."""

    config: DeploymentConfig
    """Configuration that was passed over."""
    objective: float | None
    """Value of what the intent optimises, in the plan's `objective_unit`."""
    objective_low: float | None
    """Lower end of the objective's 90% interval."""
    objective_high: float | None
    """Upper end of the objective's 90% interval."""
    reason: str
    """Reason why it was passed over."""


@dataclass(frozen=True, slots=True)
class Change:
    """Change of one limit; alone it may not be enough."""

    limit: LimitKind
    """Limit to relax."""
    allowed: float
    """Value that the request allows."""
    needed: float
    """Value that would be needed."""


@dataclass(frozen=True, slots=True)
class Relaxation(Change):
    """Change of one limit that would admit a configuration.

    Both values are in the limit's unit: seconds, requests/s, the cost's unit, bytes on each GPU for ``memory``,
    the position in ``Quality``. For ``gpus``, ``batch`` and ``replicas``, which only another plan can assess, they
    are numbers of each.
    """

    config: DeploymentConfig
    """Configuration that the change would admit."""
    objective: float | None
    """Value of what the intent optimises; None: not known."""
    text: str
    """Sentence that gives the change as advice."""


@dataclass(frozen=True, slots=True)
class CombinedRelaxation:
    """Changes of several limits that together would admit a configuration, and no fewer would."""

    changes: tuple[Change, ...]
    """Changes that are needed together."""
    config: DeploymentConfig
    """Configuration that the changes would admit."""
    objective: float | None
    """Value of what the intent optimises; None: not known."""
    text: str
    """Sentence that gives the changes as advice."""


@dataclass(frozen=True, slots=True)
class Nearest:
    """Configuration that misses the limits by least, where nothing is feasible."""

    config: DeploymentConfig
    """Refused configuration that misses the limits by least."""
    objective: float | None
    """Value of what the intent optimises; None: not known."""
    text: str
    """Sentence that says what it misses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """``better``: refused candidates that rank above the chosen one; the rest only when nothing is feasible.

    Each of ``relaxations`` is enough alone. ``combined_relaxation``: the changes that ``nearest`` needs, where
    it misses several limits.
    """

    better: tuple[Better, ...] = ()
    """Refused candidates that rank above the chosen one."""
    nearest: Nearest | None = None
    """Configuration that misses the limits by least; None: something is feasible."""
    relaxations: tuple[Relaxation, ...] = ()
    """Changes of one limit each that would admit a configuration."""
    combined_relaxation: CombinedRelaxation | None = None
    """Changes of several limits that `nearest` needs at once; None: one is enough."""

    @property
    def advice(self) -> tuple[str, ...]:
        """Every way out in words, those of one limit first."""
        together = () if self.combined_relaxation is None else (self.combined_relaxation.text,)
        return (*(relaxation.text for relaxation in self.relaxations), *together)


@dataclass(frozen=True, slots=True)
class LatencyForecast:
    """Time under the rate, against its limit."""

    quantile_s: float | None
    """Time in seconds that the percentile of the requests stay within; None: waiting grows without end."""
    limit_s: float | None
    """Limit of the SLO in seconds; None: none."""
    miss_probability: float | None
    """Probability of missing the limit; None: no limit."""


class Room(NamedTuple):
    """For whom a plan leaves room."""

    later: int  # deployments that are still expected
    num_gpus: int  # of the cluster

    def text(self, config: DeploymentConfig) -> str:
        more = "1 more deployment" if self.later == 1 else f"{self.later} more deployments"
        return f"{config} takes {config.num_gpus} of {self.num_gpus} GPUs: chosen with {more} to come"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWaitForecast:
    """Waits for loads of variants that a worker makes next to its steps, one at a time, in steady state."""

    share: float
    """Share of the requests that wait for a load."""
    mean_s: float
    """Mean wait of these, in seconds, the load included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadForecast:
    """Times of one replica under its share of the rate, the estimates' intervals taken into account."""

    rate_per_s: float
    """Requests per second of one replica."""
    percentile: float
    """Percentage of the requests that must keep each limit."""
    burstiness: float
    """Coefficient of variation of the gaps between arrivals; 1: Poisson."""
    input_cv: float
    """Coefficient of variation of the prompts' lengths."""
    output_cv: float
    """Coefficient of variation of the answers' lengths."""
    utilisation: float
    """Utilisation of the replica at this rate."""
    highest_rate_per_s: float
    """Highest rate that keeps the SLO or, without one, is served."""
    miss_probability: float | None
    """Probability of missing the tightest limit; None: no SLO."""
    ttft: LatencyForecast
    """Time to first token under this rate."""
    tpot: LatencyForecast
    """Time per output token under this rate."""
    e2e: LatencyForecast
    """Time of a whole request under this rate."""
    rate_levels: tuple[Level, ...] = ()
    """Levels between which the rate moves; empty: it is constant."""
    load_wait: LoadWaitForecast | None = None
    """Waits for loads next to the steps, which TTFT and E2E include; None: there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every candidate: the chosen one, the other feasible ones best first, then the refused ones by objective, the
    unknown ones last."""

    intent: Intent
    candidates: tuple[Ranked, ...]
    chosen: int | None  # index into ``candidates``: 0, or None when nothing is feasible
    objective_unit: str
    maximize: bool
    cost_unit: str
    queueing: str | None  # the queueing model that was used, None without a rate
    served: LoadForecast | None  # of the chosen one, None without a rate
    why_not: WhyNot
    nearest_misses: tuple[Violation, ...] = ()  # of ``why_not.nearest``, memory included
    room: Room | None = None  # None: no deployment is expected
    passed_over: tuple[PassedOver, ...] = ()  # better by their values than the chosen one, and not measured
    indistinguishable: tuple[int, ...] = ()  # feasible ones whose ``interval`` overlaps the chosen one's

    @property
    def best(self) -> Ranked | None:
        return None if self.chosen is None else self.candidates[self.chosen]
