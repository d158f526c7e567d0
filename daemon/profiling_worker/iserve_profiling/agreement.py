"""Choice of the bursts of one point that count, and whether they agree. Arithmetic only.

A burst counts unless a kernel was compiled in it, or it took so much longer than the fastest that something else
happened in it once. Bursts agree when the medians of their earlier and their later half differ by at most a stated
share: times that still fall, or that were stalled now and then, do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Span = tuple[float, float]  # begin and end, in seconds of one clock

_ONCE_S, _ONCE_FACTOR = 0.3, 2.0


def alike(bursts: Sequence[Span]) -> list[Span]:
    """Return ``bursts`` without those that took so much longer than the fastest that something was done once."""
    most_s = _ONCE_S + _ONCE_FACTOR * min((end - begin for begin, end in bursts), default=0.0)
    return [(begin, end) for begin, end in bursts if end - begin <= most_s]


def is_long(bursts: Sequence[Span]) -> bool:
    """Return whether one of ``bursts`` was long enough to hold what is done once."""
    return max(end - begin for begin, end in bursts) > _ONCE_S


def counted(bursts: Sequence[Span], compilations: Sequence[Span]) -> list[Span]:
    """Return ``bursts`` in which nothing was compiled, and of these the ones that are alike."""
    return alike([burst for burst in bursts if not any(_overlap(burst, made) for made in compilations)])


def union_s(spans: Sequence[Span]) -> float:
    """Return the seconds that at least one of ``spans`` covers: several threads compile at once."""
    total, end_s = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, end_s))
        end_s = max(end_s, end)
    return total


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def difference(seconds: Sequence[float]) -> float:
    """Return how far the medians of the two halves are apart, over the smaller; infinite for none, 0.0 for one.

    Args:
        seconds: of the bursts that count, in the order in which they ran.
    """
    if len(seconds) < 2:
        return 0.0 if seconds else math.inf
    middle = len(seconds) // 2
    earlier, later = statistics.median(seconds[:middle]), statistics.median(seconds[middle:])
    return abs(earlier - later) / min(earlier, later) if min(earlier, later) > 0 else math.inf
