"""Statistics of a trace in one pass: rate, burstiness, lengths.

Memory does not grow with the number of requests, only with how many different lengths and models there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError
from traces.request import Request
from traces.request_arrays import Moments, blocks, count_values

__all__ = ["BIN_WIDTHS_S", "BinStatistics", "LengthStatistics", "RateCurve", "TraceStatistics", "statistics_of"]

BIN_WIDTHS_S = (1, 10, 60)
_CURVE_SLOTS = 512


@dataclass(frozen=True)
class BinStatistics:
    """Arrivals counted in bins of ``width_s`` from the first request on.

    ``iod`` is the index of dispersion, variance over mean of the counts (1 = Poisson), and ``empty_fraction`` the
    share of bins without a request, both over the bins that the trace spans whole; None where there is no such
    bin. ``peak_per_s`` is the fullest bin's rate.
    """

    width_s: int
    peak_per_s: float
    iod: float | None
    empty_fraction: float | None


@dataclass(frozen=True)
class LengthStatistics:
    """Tokens of one side. Quantiles are lower order statistics: lengths that some request has."""

    mean: float
    p50: int
    p95: int
    p99: int
    max: int


@dataclass(frozen=True)
class RateCurve:
    """Requests per second in slots of equal width; the last one may be partly past the trace's end."""

    slot_s: float
    rates_per_s: tuple[float, ...]


@dataclass(frozen=True)
class TraceStatistics:
    """``cv`` is that of the gaps, standard deviation over mean (1 = Poisson); rate and cv are None where there are
    too few requests or no time passes. ``correlation`` is that of input and output tokens."""

    requests: int
    span_s: float
    rate_per_s: float | None
    cv: float | None
    longest_gap_s: float
    bins: tuple[BinStatistics, ...]
    input_tokens: LengthStatistics
    output_tokens: LengthStatistics
    correlation: float
    same_times: int
    models: tuple[tuple[str, int], ...]
    curve: RateCurve


def statistics_of(requests: Iterable[Request]) -> TraceStatistics:
    """Return statistics of a stream, which is consumed.

    Raises:
        BadInputError: it has no requests.
    """
    gaps, lengths = Moments(1), Moments(2)
    histograms: tuple[dict[int, int], dict[int, int]] = ({}, {})
    bins = [_Bins(width) for width in BIN_WIDTHS_S]
    curve = _Curve()
    models: Counter[str] = Counter()
    first_s = last_s = longest_gap_s = 0.0
    count = same_times = 0
    for block in blocks(requests):
        if count == 0:
            first_s = float(block.arrival_s[0])
            steps = np.diff(block.arrival_s)
        else:
            steps = np.diff(block.arrival_s, prepend=last_s)
        last_s = float(block.arrival_s[-1])
        gaps.add(steps[:, None])
        longest_gap_s = max(longest_gap_s, float(steps.max(initial=0.0)))
        same_times += int((steps == 0).sum())
        lengths.add(block.tokens.astype(np.float64))
        for column, histogram in enumerate(histograms):
            count_values(block.tokens[:, column], histogram)
        since_first = block.arrival_s - first_s
        for one in bins:
            one.add(since_first)
        curve.add(since_first)
        models.update(request.model for request in block.requests)
        count += len(block.requests)
    if count == 0:
        raise BadInputError("a trace without requests has no statistics")
    span_s = last_s - first_s
    return TraceStatistics(
        requests=count,
        span_s=span_s,
        rate_per_s=(count - 1) / span_s if span_s > 0 else None,
        cv=float(gaps.std[0] / gaps.mean[0]) if count > 2 and span_s > 0 else None,
        longest_gap_s=longest_gap_s,
        bins=tuple(one.statistics() for one in bins),
        input_tokens=_length_statistics(histograms[0]),
        output_tokens=_length_statistics(histograms[1]),
        correlation=lengths.correlation,
        same_times=same_times,
        models=tuple(models.most_common()),
        curve=curve.curve(),
    )


class _Bins:
    """Counts in bins: only the fullest, the sums of the full ones, and the bin still being filled are kept."""

    def __init__(self, width_s: int) -> None:
        self._width_s = width_s
        self._now = 0
        self._held = 0
        self._peak = self._sum = self._squares = self._filled = 0

    def add(self, since_first_s: NDArray[np.float64]) -> None:
        indexes, counts = np.unique((since_first_s // self._width_s).astype(np.int64), return_counts=True)
        for index, count in zip(indexes.tolist(), counts.tolist(), strict=True):
            if index != self._now:
                self._sum += self._held
                self._squares += self._held**2
                self._filled += 1
                self._now, self._held = index, 0
            self._held += count
            self._peak = max(self._peak, self._held)

    def statistics(self) -> BinStatistics:
        full = self._now  # every bin before the one being filled
        if full == 0:
            return BinStatistics(self._width_s, self._peak / self._width_s, None, None)
        mean = self._sum / full
        iod = (self._squares / full - mean**2) / mean
        return BinStatistics(self._width_s, self._peak / self._width_s, iod, 1 - self._filled / full)


class _Curve:
    """Counts in equal slots that double in width whenever the trace outgrows them."""

    def __init__(self) -> None:
        self._slot_s = 1 / 64
        self._counts = np.zeros(_CURVE_SLOTS, dtype=np.int64)
        self._used = 1

    def add(self, since_first_s: NDArray[np.float64]) -> None:
        while since_first_s[-1] >= self._slot_s * _CURVE_SLOTS:
            pairs = self._counts.reshape(-1, 2).sum(1)
            self._counts = np.concatenate([pairs, np.zeros_like(pairs)])
            self._slot_s *= 2
        indexes = (since_first_s / self._slot_s).astype(np.int64)
        self._counts += np.bincount(indexes, minlength=_CURVE_SLOTS)
        self._used = int(indexes[-1]) + 1

    def curve(self) -> RateCurve:
        return RateCurve(self._slot_s, tuple((self._counts[: self._used] / self._slot_s).tolist()))


def _length_statistics(histogram: dict[int, int]) -> LengthStatistics:
    values = sorted(histogram)
    upto = np.cumsum([histogram[value] for value in values])
    count = int(upto[-1])

    def quantile(fraction: float) -> int:
        rank = int(fraction * (count - 1))
        return values[int(np.searchsorted(upto, rank, side="right"))]

    total = sum(value * times for value, times in histogram.items())
    return LengthStatistics(total / count, quantile(0.5), quantile(0.95), quantile(0.99), values[-1])
