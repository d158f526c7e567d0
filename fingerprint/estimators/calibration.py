"""Calibration of depth-tied predictions by their errors on other models that were measured whole.

``fingerprint/data/depth_tied_errors.json`` is what ``tests/bench/accuracy_families.py`` writes. What most models
were off by is taken off, where they were measured with this engine, GPU, weight format and degrees, and where nine
in ten of them lie is the interval. The own errors of a model never move its numbers: they are left out by shape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources

import numpy as np
import numpy.typing as npt
from packaging.version import InvalidVersion, Version

from fingerprint.codec import from_json
from fingerprint.config import WeightFormat
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.model_spec import ModelSpec

Array = npt.NDArray[np.float64]

__all__ = ["Calibration", "LogErrors", "MeasuredError", "kernels_of", "shipped_calibration"]

_INTERVAL = 0.90
_FEWEST_MODELS = 2
_EXPERTS = " experts"  # behind a format that kernels of experts multiply
# The edges are means of the quantiles from the 4th to the 5th percentile and from the 95th to the 96th: a quantile
# alone jumps from one error to the next as weights change, and one more prompt token would halve an interval.
_EDGE = 0.01
_ROUNDING = 1e-9  # of a sum of shares: in whatever order errors are added, the same one is at the edge
# A burst of few prompt tokens waits for the host, one of many for the GPU's arithmetic: errors differ tenfold.
_NEAR_OCTAVES = 1.5  # standard deviation of the weight over log2 of the prompt tokens
_UNCALIBRATED = 0.15  # of the logarithm, on both sides: an assumption, until two other models were measured


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredError:
    """Error of one predicted number of one model, against the whole model."""

    model: str
    shape_hash: str
    engine: str  # "vllm 0.24.0"
    gpu: str
    weights: str  # ``kernels_of``
    tp: int
    pp: int
    metric: str  # "ttft" | "tpot"
    batch: int
    input_tokens: int
    log_error: float  # ln(measured / predicted)
    graph_tokens: int = GRAPH_TOKENS  # of the largest CUDA graph, on both sides
    expert_parallel: bool = False


@dataclass(frozen=True, slots=True)
class LogErrors:
    """Middle of ln(measured / predicted) of other models, and an interval of at least nine tenths of it."""

    low: float
    middle: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """Errors that count for a prediction.

    Attributes:
        tokens: prompt tokens of each in all.
        same_model: how many there are of the model of each.
        order: of the log errors, which ``ordered`` has ascending.
        is_here: measured with the engine and graphs, on the GPU, in the format and at the degrees that were asked.
    """

    tokens: Array
    same_model: Array
    order: npt.NDArray[np.intp]
    ordered: Array
    is_here: bool

    @classmethod
    def of(cls, errors: Sequence[MeasuredError], *, is_here: bool) -> _Chosen:
        points = Counter(error.shape_hash for error in errors)
        values = np.array([_rounded(error.log_error) for error in errors])
        order = np.argsort(values)
        tokens = np.array([float(error.batch * error.input_tokens) for error in errors])
        same_model = np.array([float(points[error.shape_hash]) for error in errors])
        return cls(tokens, same_model, order, values[order], is_here)

    def quantiles(self, prompt_tokens: int) -> LogErrors:
        octaves = np.log2(self.tokens / prompt_tokens)
        far = (octaves**2 - (octaves**2).min()) / (2 * _NEAR_OCTAVES**2)  # the nearest has weight 1
        weights = np.exp(-far) / self.same_model
        share = np.cumsum(weights[self.order]) / weights.sum()
        tail = (1 - _INTERVAL) / 2
        at = np.searchsorted(share, np.array([tail, 0.5, 1 - tail]) - _ROUNDING)
        low, middle, high = (float(value) for value in self.ordered[at])
        return LogErrors(
            _mean_between(self.ordered, share, tail - _EDGE, tail, low),
            middle,
            _mean_between(self.ordered, share, 1 - tail, 1 - tail + _EDGE, high),
        )


@dataclass(frozen=True, slots=True)
class Calibration:
    """Errors of predictions, all models."""

    errors: tuple[MeasuredError, ...] = ()
    _chosen: dict[tuple[object, ...], _Chosen | None] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )  # by what was asked but prompt tokens

    def of_others(
        self,
        metric: str,
        *,
        prompt_tokens: int,
        exclude_shape: str,
        engine: str,
        gpu: str,
        weights: str,
        tp: int = 1,
        pp: int = 1,
        graph_tokens: int = GRAPH_TOKENS,
        expert_parallel: bool = False,
    ) -> LogErrors:
        """Return the errors of predictions of other models at points with about as many prompt tokens in all.

        Each model counts alike, however many points of it were measured. Of models that were not measured with
        this engine on this GPU in this weight format at these degrees and with such graphs the middle is not known
        here: it is 0, and the interval holds 0. It is that of models measured in this format with such graphs
        anywhere; where those are too few, in this format; then of dense ones or of mixtures of experts, as the
        model is; else of all. With fewer than two other models it is -0.15 to 0.15, which is an assumption.

        Args:
            prompt_tokens: batch times input.
            engine: with its version, as in a profile's machine; its patch release does not count.
            weights: ``kernels_of`` the format; another erred to the opposite side (fp8 and 16 bits on an H200).
            tp: with ``pp``, for where several GPUs share a step, the host has more time for its part of it.
            graph_tokens: of the largest CUDA graph, beyond which a step goes at the host's pace.
            expert_parallel: errors with it and those without it say nothing of each other.
        """
        asked = (metric, exclude_shape, engine, gpu, weights, tp, pp, graph_tokens, expert_parallel)
        if asked not in self._chosen:
            self._chosen[asked] = self._choose(*asked)
        chosen = self._chosen[asked]
        if chosen is None:
            return LogErrors(-_UNCALIBRATED, 0.0, _UNCALIBRATED)
        found = chosen.quantiles(prompt_tokens)
        return found if chosen.is_here else LogErrors(min(0.0, found.low), 0.0, max(0.0, found.high))

    def _choose(
        self,
        metric: str,
        exclude_shape: str,
        engine: str,
        gpu: str,
        weights: str,
        tp: int,
        pp: int,
        graph_tokens: int,
        expert_parallel: bool,
    ) -> _Chosen | None:
        """Return the errors that count, by the rules of :meth:`of_others`; None where models are too few."""
        others = [
            e
            for e in self.errors
            if (e.metric, e.expert_parallel) == (metric, expert_parallel) and e.shape_hash != exclude_shape
        ]
        asked = (_release(engine), gpu, weights, tp, pp, graph_tokens)
        here = [e for e in others if (_release(e.engine), e.gpu, e.weights, e.tp, e.pp, e.graph_tokens) == asked]
        same_format = [e for e in others if e.weights == weights]
        same_graphs = [e for e in same_format if e.graph_tokens == graph_tokens]
        same_kind = [e for e in others if e.weights.endswith(_EXPERTS) == weights.endswith(_EXPERTS)]
        for errors in (here, same_graphs, same_format, same_kind, others):
            if _num_models(errors) >= _FEWEST_MODELS:
                return _Chosen.of(errors, is_here=errors is here)
        return None


def kernels_of(spec: ModelSpec, weights: WeightFormat) -> str:
    """Return the weight format, by the kernels that multiply it, under which errors are kept.

    A quantized checkpoint's ``stored`` is any of many: errors of GPTQ say nothing of fp8. Its fp8 and fp8 made
    while loading are told apart too, though the matrices may be the same: where scales are, and whether those of
    the activations are stored, chooses the kernel, and whether the errors are alike was not measured. Experts are
    multiplied by kernels of their own, whose time depends on how tokens are routed.
    """
    experts = _EXPERTS if spec.is_mixture else ""
    if weights is not WeightFormat.STORED or spec.stored is None:
        return f"{weights}{experts}"
    return f"{weights} {spec.stored.method}, {spec.stored.form}{experts}"


@cache
def _release(engine: str) -> str:
    """Return ``vllm 0.24`` of ``vllm 0.24.0``; a pre-release or a development build is a release of its own."""
    name, _, version = engine.rpartition(" ")
    try:
        found = Version(version)
    except InvalidVersion:
        return engine
    return engine if found.is_prerelease else f"{name} {found.major}.{found.minor}"


def _num_models(errors: Sequence[MeasuredError]) -> int:
    return len({error.shape_hash for error in errors})


def _mean_between(ordered: Array, share: Array, begin: float, end: float, about: float) -> float:
    """Mean of the quantiles from ``begin`` to ``end``, computed from deviations from ``about``."""
    held = np.diff(np.clip(share, begin, end), prepend=begin)
    return _rounded(about + float(held @ (ordered - about)) / (end - begin))


def _rounded(value: float) -> float:
    """To 12 digits: equal ones are equal however means of them were summed."""
    return float(f"{value:.12g}")


@cache
def shipped_calibration() -> Calibration:
    """Return the measured errors shipped with the package; none when the file is missing."""
    file = resources.files("fingerprint").joinpath("data/depth_tied_errors.json")
    if not file.is_file():
        return Calibration()
    return Calibration(from_json(file.read_bytes(), tuple[MeasuredError, ...], what="depth_tied_errors.json"))
