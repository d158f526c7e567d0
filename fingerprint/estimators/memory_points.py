"""The memory points of one weight format at one (tp, pp), as lines: weights in layers, peaks in tokens.

Where a format was not loaded at a degree, :func:`in_format` says what its points would have been, from a format
that was. Knows nothing of W, A and A_pp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from fingerprint.config import WeightFormat
from fingerprint.errors import NotMeasuredError
from fingerprint.measurements import MemoryPoint, RankMemory

__all__ = ["BytesOf", "Degree", "Line", "Peak", "Steps", "along_tokens", "in_format"]


@dataclass(frozen=True, slots=True)
class Line:
    """Bytes of a rank against the layers it holds."""

    layer: float
    end: float


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes and how far they may be off."""

    value: float
    error: float


BytesOf = Callable[[RankMemory], int]
Steps = dict[int, float]  # tokens of a step -> bytes


class Degree:
    """The memory points of one weight format at one (tp, pp)."""

    def __init__(
        self,
        weights: WeightFormat,
        tp: int,
        pp: int,
        points: Iterable[MemoryPoint],
        borrowed_from: Degree | None = None,
    ) -> None:
        self.format, self.tp, self.pp, self.points = weights, tp, pp, tuple(points)
        self.borrowed_from = borrowed_from  # None: these were measured

    def weights(self, stage: int) -> dict[int, float]:
        """Layers on the stage -> weight bytes of its fullest rank."""
        found: dict[int, float] = {}
        for point in self.points:
            layers = point.num_layers // self.pp
            held = max(rank.weights_bytes for rank in point.ranks if rank.stage == stage)
            found[layers] = max(found.get(layers, 0.0), held)
        return found

    def line(self, stage: int, layer: float | None = None) -> Line:
        """Through the depths measured; with one depth, ``layer`` must be given."""
        held = self.weights(stage)
        (low, high) = (min(held), max(held))
        slope = (held[high] - held[low]) / (high - low) if high > low else layer
        if slope is None:
            raise NotMeasuredError(
                f"the weights of one layer at tp={self.tp} pp={self.pp} need fingerprints of two depths"
            )
        return Line(slope, max(0.0, held[high] - high * slope))

    def steps(self, bytes_of: BytesOf, stage: int | None = None) -> dict[int, Steps]:
        """For every depth: tokens of a step -> bytes of the fullest rank (of one stage)."""
        found: dict[int, Steps] = {}
        for point in self.points:
            steps = found.setdefault(point.num_layers, {})
            held = max((bytes_of(rank) for rank in point.ranks if stage is None or rank.stage == stage), default=0)
            steps[point.max_batched_tokens] = max(steps.get(point.max_batched_tokens, 0.0), float(held))
        return found

    def activation(self, tokens: int) -> float:
        """Peak of a step of ``tokens`` at the deepest fingerprint."""
        steps = self.steps(lambda rank: rank.activation_peak_bytes)
        return along_tokens(steps[max(steps)], tokens, None).value

    @property
    def runtime_bytes(self) -> list[int]:
        return [rank.runtime_bytes for point in self.points for rank in point.ranks]

    def total(self, num_layers: int) -> float:
        """All ranks of the full model at the largest step, runtime and KV taken off."""
        most = max(point.max_batched_tokens for point in self.points)
        at_most = sorted((p for p in self.points if p.max_batched_tokens == most), key=lambda p: p.num_layers)
        weights = {p.num_layers: float(sum(rank.weights_bytes for rank in p.ranks)) for p in at_most}
        low, high = min(weights), max(weights)
        if high == low and high != num_layers:
            raise NotMeasuredError(f"tp={self.tp} pp={self.pp} was measured at one depth, two are needed")
        slope = (weights[high] - weights[low]) / (high - low) if high > low else 0.0
        rest = sum(rank.activation_peak_bytes + rank.pp_buffer_bytes for rank in at_most[-1].ranks)
        return weights[high] + slope * (num_layers - high) + rest


def along_tokens(steps: Steps, tokens: int, growth: Steps | None) -> Peak:
    """Linear in tokens between and beyond the measured steps; half of what lies beyond them counts as error.

    A single step grows in proportion to ``growth``, measured elsewhere; without that, to the tokens.
    """
    ordered = sorted(steps.items())
    if len(ordered) == 1:
        ((at, held),) = ordered
        if growth is not None:
            value = held * _on_line(growth, tokens) / max(_on_line(growth, at), 1.0)
        else:
            value = held * tokens / at if at else held
        return Peak(value, abs(value - held) / 2)
    value = _on_line(steps, tokens)
    nearest = min(max(tokens, ordered[0][0]), ordered[-1][0])
    return Peak(value, abs(value - _on_line(steps, nearest)) / 2)


def _on_line(steps: Steps, tokens: int) -> float:
    """Through the two measured steps around ``tokens``, or the nearest two; bytes never shrink with tokens."""
    pairs = list(pairwise(sorted(steps.items())))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if tokens <= pair[1][0]), pairs[-1])
    return max(0.0, y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (tokens - x1))


def in_format(base: Degree, other_base: Degree, other: Degree) -> Degree:
    """The points of ``other`` as they would be in the format of ``base``.

    A format changes the linear weights, which TP divides, and what computing with them needs: so a rank holds
    fewer (or more) bytes by the difference between the two formats' layers on one GPU, over tp; its activation
    peak differs by the same factor as there, the runtime by the same bytes. KV and pipeline buffers are the same.

    Args:
        base, other_base: both formats at tp = pp = 1, with fingerprints of two depths.
        other: the other format at the degree that is wanted.
    """
    line, other_line = base.line(0), other_base.line(0)
    layer, end = line.layer - other_line.layer, line.end - other_line.end
    runtime = max(base.runtime_bytes) - max(other_base.runtime_bytes)

    def rank_of(point: MemoryPoint, rank: RankMemory) -> RankMemory:
        extra = layer * (point.num_layers // other.pp) + (end if rank.stage == other.pp - 1 else 0.0)
        tokens = point.max_batched_tokens
        factor = base.activation(tokens) / max(other_base.activation(tokens), 1.0)
        return replace(
            rank,
            weights_bytes=max(0, round(rank.weights_bytes + extra / other.tp)),
            runtime_bytes=max(0, rank.runtime_bytes + runtime),
            activation_peak_bytes=round(rank.activation_peak_bytes * factor),
        )

    points = [
        replace(p, weights=base.format, ranks=tuple(rank_of(p, rank) for rank in p.ranks)) for p in other.points
    ]
    return Degree(base.format, other.tp, other.pp, points, borrowed_from=other)
