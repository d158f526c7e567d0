"""Rows of the accuracy tables: truths, predictions, memory, and what measuring cost."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.config import Workload
from tests.bench.accuracy_measure import OUTPUT

__all__ = ["SHORT_S", "CostRow", "FamilyRow", "MemoryRow", "Row", "TimerRow", "Truth"]

SHORT_S = 0.015  # a TTFT below it is judged in milliseconds


@dataclass(frozen=True, slots=True)
class Truth:
    """The whole model at one point: medians of its runs."""

    batch: int
    input_tokens: int
    ttft_s: float
    tpot_s: float
    ttft_spread: float  # half of what lies between the 5th and the 95th percentile of the calls, over their median

    @property
    def workload(self) -> Workload:
        return Workload(batch=self.batch, input_tokens=self.input_tokens, output_tokens=OUTPUT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Predicted number next to its truth."""

    model: str
    variant: str  # "16bit", "fp8", "16bit tp=2"
    method: str
    metric: str  # "ttft" | "tpot"
    batch: int
    input_tokens: int
    truth_s: float
    predicted_s: float
    low_s: float
    high_s: float
    truth_spread: float  # of TTFT, as in ``Truth``

    @property
    def point(self) -> tuple[str, str, str, int, int]:
        """Return what was measured: two rows of it have one truth."""
        return self.model, self.variant, self.metric, self.batch, self.input_tokens

    @property
    def error(self) -> float:
        return self.predicted_s / self.truth_s - 1

    @property
    def inside(self) -> bool:
        return self.low_s <= self.truth_s <= self.high_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryRow:
    """Memory that the engine logged of the whole model, and what was predicted. Bytes per GPU."""

    model: str
    variant: str  # "16bit", "fp8", "16bit tp=2"
    weights_bytes: int
    weights_predicted: int
    non_kv_bytes: int  # weights, activations, context, graphs
    non_kv_predicted: int
    blocks: int
    blocks_predicted: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CostRow:
    """Cost in GPU time of the fingerprints and of the whole model."""

    model: str
    variant: str  # "16bit", "fp8", "16bit tp=2"
    profile_s: float
    profile_gib_s: float | None  # None: what was held was not recorded
    profile_start_s: float
    profile_start_gib_s: float | None
    whole_s: float
    whole_gib_s: float | None
    whole_start_s: float
    whole_start_gib_s: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class TimerRow:
    """Calls of the whole model with the step timer off and on: medians, one after the other in one process."""

    model: str
    variant: str  # "16bit", "fp8", "16bit tp=2"
    batch: int
    input_tokens: int
    calls: int
    off_s: float
    on_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """Errors of one family's predictions on one release; absolute fractions, seconds, shares."""

    family: str
    mixture: bool  # of experts
    engine: str
    gpu: str
    measured: tuple[str, str]  # first and last day
    models: tuple[str, ...]
    points: int
    tpot: tuple[float, float]  # median, worst
    ttft: tuple[float, float]  # of those from ``SHORT_S`` on; nan where there are none
    short_ttft_s: float  # worst error of shorter ones; 0 where there are none
    ttft_bias: float  # median of all errors with their signs: above 0 where predictions are too long
    inside: tuple[float, float]  # share of TPOTs and of TTFTs in the 90% interval
    half_width: tuple[float, float]  # median over the prediction, TPOT and TTFT
    weights: float  # worst errors of memory
    non_kv: float
    blocks: float
    profile_s: float  # longest, GPU-seconds
    graph_tokens: int = 512  # of the largest CUDA graph
    has_earlier_graphs: bool = False  # of mixtures that were recorded again with larger ones
