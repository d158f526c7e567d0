"""Measurements of fingerprints with variants: runs next to runs of the base alone, loads, and bytes held.

``fingerprint.variant_profile`` takes them, and ``fingerprint.variant_steps`` on an engine with our step timer. A
:class:`~fingerprint.measurements.Profile` keeps them; ``estimators.measured_variants`` extrapolates from them.
Nothing here predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime

from fingerprint.config import ADAPTER_RANKS, DeploymentConfig, SlotFormat
from fingerprint.errors import ConfigError

__all__ = [
    "LONG_TOKENS",
    "VariantKind",
    "VariantLoads",
    "VariantMeasurement",
    "VariantRuns",
    "VariantSteps",
    "asked_kind",
    "kind_of",
]

LONG_TOKENS = 2048
"""Length from about which on a prompt takes its device's time: on an H200 the host is slower below it."""


@dataclass(frozen=True, order=True, slots=True)
class VariantKind:
    """Kind of variant that takes one amount of time: adapters of one rank, or deltas of one format."""

    rank: int = 0
    """Rank of the adapters; 0: they are deltas."""
    delta_format: SlotFormat = SlotFormat.NONE
    """Format of the deltas; `none`: they are adapters."""

    def __post_init__(self) -> None:
        if (self.rank > 0) == self.is_delta:
            raise ConfigError("variants of a profile have a rank or a delta format, one of the two")
        if self.rank not in (0, *ADAPTER_RANKS):
            ranks = ", ".join(map(str, ADAPTER_RANKS))
            raise ConfigError(f"adapters are measured at a rank of {ranks}, got {self.rank}")

    @property
    def is_delta(self) -> bool:
        return self.delta_format is not SlotFormat.NONE

    def __str__(self) -> str:
        return f"{self.delta_format} deltas" if self.is_delta else f"adapters of rank {self.rank}"


def asked_kind(rank: int, delta_format: SlotFormat) -> VariantKind | None:
    """Return the kind of adapters of ``rank``, whose slots are made for the next rank that engines offer, or of
    deltas; None: neither is asked for.

    Raises:
        ConfigError: both are, or the rank is larger than any.
    """
    if not rank and delta_format is SlotFormat.NONE:
        return None
    return VariantKind(next((one for one in ADAPTER_RANKS if one >= rank), rank) if rank else 0, delta_format)


def kind_of(config: DeploymentConfig) -> VariantKind | None:
    """Return the kind that takes most time in the slots of ``config``; None: there are none.

    Slots with a size in place of a format hold deltas of any format; of those it is the default one.
    """
    if not config.adapter_slots:
        return None
    if config.has_delta_slots or config.delta_mib:
        return VariantKind(delta_format=config.delta_format if config.has_delta_slots else SlotFormat.INT2)
    return VariantKind(config.adapter_rank)


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRuns:
    """Repeated runs of one fingerprint, each next to one of the same requests for the base alone."""

    num_layers: int
    """Hidden layers of the fingerprint."""
    active: int
    """Distinct variants that the requests ask for in turn; 0: all are for the base, with variants loaded."""
    batch: int
    """Requests at once."""
    input_tokens: int
    """Prompt length in tokens."""
    output_tokens: int
    """Answer length in tokens."""
    runs_s: tuple[float, ...]
    """Seconds of each run, from the first prompt to the last output token."""
    base_runs_s: tuple[float, ...]
    """Seconds of the base's run in the same round; of 0 variants, of a run before any was loaded."""

    def __post_init__(self) -> None:
        if len(self.runs_s) != len(self.base_runs_s):
            raise ConfigError(
                f"each of the {len(self.runs_s)} runs needs one of the base, got {len(self.base_runs_s)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantSteps:
    """Engine steps of one composition in a fingerprint whose forward is repeated, each next to one of the base."""

    num_layers: int
    """Hidden layers of the fingerprint."""
    repeat: int
    """Times that each step's forward was run."""
    slots: int
    """Slots that the engine was started with."""
    active: int
    """Distinct variants in the step; 0: all rows are for the base, next to an engine without slots."""
    tokens: int
    """Tokens that the step computes, of prompts or one of each request."""
    sequences: int
    """Requests in the step."""
    is_prompt: bool
    """Whether the step computes prompts; else each request decodes a token."""
    forwards_s: tuple[float, ...]
    """Seconds of the forward, of all its repeats, in each run."""
    base_forwards_s: tuple[float, ...]
    """Seconds of the base's forward in the same round; of 0 variants, of the engine without slots."""
    rests_s: tuple[float, ...]
    """Seconds outside of the forward: inputs, logits, sampling and, of decode steps, waiting for the host."""
    base_rests_s: tuple[float, ...]
    """Seconds outside of the base's forward, likewise."""

    def __post_init__(self) -> None:
        counts = {len(one) for one in (self.forwards_s, self.base_forwards_s, self.rests_s, self.base_rests_s)}
        if len(counts) != 1:
            raise ConfigError(f"steps of variants and of the base go in pairs, got {sorted(counts)} of them")


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantLoads:
    """Loads of variants into one fingerprint, from the page cache."""

    num_layers: int
    """Hidden layers of the fingerprint."""
    file_bytes: int
    """Bytes of a variant's tensors, as its files have them."""
    held_bytes: int
    """Bytes that a loaded variant takes on a device; 0: the engine does not report it."""
    loads_s: tuple[float, ...]
    """Seconds of each load, without the first of a fingerprint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantMeasurement:
    """Fingerprints at tp = pp = 1 with variants of one kind."""

    kind: VariantKind
    """Kind of the variants, which have random values."""
    slots: int
    """Most variants that may take part in one step of the engine as it was started."""
    created_at: str
    """Time of the measurement, ISO 8601 in UTC."""
    spent_s: float
    """Seconds that it took."""
    warm_up_s: float = 0.0
    """Seconds of these in which engines with our step timer warmed up, and compiled kernels."""
    runs: tuple[VariantRuns, ...] = ()
    """Runs of each fingerprint, by requests and variants."""
    steps: tuple[VariantSteps, ...] = ()
    """Steps of each fingerprint, of an engine with our step timer; without it there are `runs`."""
    loads: tuple[VariantLoads, ...] = ()
    """Loads into each fingerprint."""
    failure: str = ""
    """Reason for which there is no measurement; empty: there is one."""
    tried_s: float | None = None
    """Budget in which two tries ended without one, in seconds; None: more time would change nothing."""

    @classmethod
    def failed(
        cls, kind: VariantKind, failure: str, spent_s: float, tried_s: float | None = None
    ) -> VariantMeasurement:
        """Return what is kept where there is no measurement."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(kind=kind, slots=0, created_at=now, spent_s=spent_s, failure=failure, tried_s=tried_s)

    def is_final(self, budget_s: float) -> bool:
        """Return whether a deploy with this budget leaves it as it is: more time may be enough."""
        return self.tried_s is None or budget_s <= self.tried_s
