"""Disturbances of a measured GPU: a clock that changed, and another process that took the GPU meanwhile.

The clock of a GPU follows its load: a kept recording of an undisturbed H200 has 1,425 to 1,980 MHz under its power
cap. So like is compared with like, a point's calls with each other and with the same point at another depth. The
tolerances are above all that the kept recordings show (docs/decisions/0056).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, pairwise
from statistics import median
from typing import NamedTuple

from fingerprint.measurements import MeasuredKey, OtherProcess, RunReading, TimingPoint

__all__ = [
    "CLOCK_TOLERANCE",
    "COMMON_CLOCK_TOLERANCE",
    "LEAST_COMMON_POINTS",
    "SLOWDOWNS",
    "disturbance",
    "disturbance_marks",
]

CLOCK_TOLERANCE = (
    0.30  # of one point: between halves of its calls, and between depths; 0.254 at most in recordings
)
COMMON_CLOCK_TOLERANCE = 0.07  # of the median over points of two depths; 0.036 at most in recordings
LEAST_COMMON_POINTS = 4  # for that median; points of one depth are few in a short profile
SLOWDOWNS = frozenset(
    ("thermal slowdown", "hardware thermal slowdown", "hardware slowdown", "power brake")
)  # never usual, at whatever clock; a power cap is
_MIB = 2**20

_Like = tuple[MeasuredKey, bool, int, int, int, bool]  # what is compared: shard, batch, input, output, repeated


class _Change(NamedTuple):
    fast_mhz: float
    slow_mhz: float
    reasons: tuple[str, ...]
    where: str

    @property
    def ratio(self) -> float:
        return self.fast_mhz / self.slow_mhz - 1 if self.slow_mhz else 0.0

    def __str__(self) -> str:
        why = f"throttle: {', '.join(self.reasons)}" if self.reasons else "no reason reported"
        clocks = f"fell from {self.fast_mhz:,.0f} to {self.slow_mhz:,.0f} MHz"
        if self.fast_mhz <= self.slow_mhz:
            clocks = f"was held at {self.slow_mhz:,.0f} MHz"
        return f"the GPU's clock {clocks} ({why}) {self.where}"

    @property
    def mark(self) -> str:
        """The change and what it does to times."""
        return f"{self}: times up to {self.ratio:.0%} longer" if self.ratio > 0 else str(self)


def disturbance(points: Sequence[TimingPoint], known: Sequence[TimingPoint]) -> str | None:
    """Return what disturbed ``points``, just measured; None: nothing that is seen.

    Args:
        known: measured before, at other depths among them.
    """
    taken = _taken_by(list(chain.from_iterable(point.runs for point in points)))
    if taken:
        return _others_text(taken, _place(points[0]))
    fastest_mhz = max((mhz for point in (*points, *known) if (mhz := _clock(point.runs))), default=0.0)
    for point in points:
        if change := _slowdown(point, fastest_mhz) or _within(point):
            return str(change)
    for point in points:
        for other in known:
            if _like(other) == _like(point) and (change := _between(other, point)):
                return str(change)
    return None


def disturbance_marks(points: Sequence[TimingPoint]) -> tuple[str, ...]:
    """Return a line for each way in which ``points``, all of a profile, were disturbed; empty for sound ones."""
    return (*_process_marks(points), *_clock_marks(points))


def _process_marks(points: Sequence[TimingPoint]) -> list[str]:
    most: dict[int | None, OtherProcess] = {}
    places: dict[int | None, list[str]] = defaultdict(list)
    for point in points:
        taken = _taken_by(point.runs)
        for other in taken:
            former = most.get(other.pid, other)
            most[other.pid] = max(former, other, key=lambda one: one.used_bytes or 0)
        for pid in dict.fromkeys(other.pid for other in taken):
            places[pid].append(_place(point))
    found = (_others_text((other,), _and_more(places[pid])) for pid, other in most.items())
    return [f"{text}: times may be too long" for text in found]


def _taken_by(runs: Sequence[RunReading]) -> tuple[OtherProcess, ...]:
    return tuple(dict.fromkeys(other for run in runs for other in run.others))


def _others_text(others: Sequence[OtherProcess], where: str) -> str:
    found = [
        ("memory that is not the engine's" if other.pid is None else f"process {other.pid}")
        + ("" if other.used_bytes is None else f" ({other.used_bytes / _MIB:,.0f} MiB)")
        for other in others
    ]
    return f"another process took the GPU meanwhile: {', '.join(found)}, during {where}"


def _clock_marks(points: Sequence[TimingPoint]) -> list[str]:
    changes: list[_Change] = []
    by_key: dict[tuple[MeasuredKey, bool], list[TimingPoint]] = defaultdict(list)
    for point in points:
        by_key[point.key, point.shard].append(point)
    for of_key in by_key.values():
        fastest_mhz = max((mhz for point in of_key if (mhz := _clock(point.runs))), default=0.0)
        changes += [change for point in of_key if (change := _slowdown(point, fastest_mhz) or _within(point))]
        changes += _across(of_key)
    return _merged(changes)


def _merged(changes: Sequence[_Change]) -> list[str]:
    """Return a line for each set of reasons: the largest change, and the number of further points."""
    by_reason: dict[tuple[str, ...], list[_Change]] = defaultdict(list)
    for change in changes:
        by_reason[change.reasons].append(change)
    lines = []
    for alike in by_reason.values():
        worst = max(alike, key=lambda change: change.ratio)
        rest = [change.where for change in alike if change is not worst]
        lines.append(worst._replace(where=_and_more([worst.where, *rest])).mark)
    return lines


def _across(points: Sequence[TimingPoint]) -> list[_Change]:
    """Return changes between depths: of single points, else of the median over all that both have."""
    by_like: dict[_Like, dict[int, TimingPoint]] = defaultdict(dict)
    for point in points:
        if _clock(point.runs):
            by_like[_like(point)][point.num_layers] = point
    single: list[_Change] = []
    ratios: dict[tuple[int, int], list[tuple[float, TimingPoint, TimingPoint]]] = defaultdict(list)
    for by_depth in by_like.values():
        depths = sorted(by_depth)
        for fewer, more in pairwise(depths):
            one, other = by_depth[fewer], by_depth[more]
            if change := _between(one, other):
                single.append(change)
            if one.repeat > 1:
                ratios[fewer, more].append((_clock(one.runs) / _clock(other.runs), one, other))
    return single or [change for pairs in ratios.values() if (change := _common(pairs))]


def _common(pairs: Sequence[tuple[float, TimingPoint, TimingPoint]]) -> _Change | None:
    """Return by how much one depth's clock was lower at most points; None: within tolerance, or too few points."""
    if len(pairs) < LEAST_COMMON_POINTS:
        return None
    middle = median(ratio for ratio, _, _ in pairs)
    if max(middle, 1 / middle) - 1 <= COMMON_CLOCK_TOLERANCE:
        return None
    slower = [one if middle < 1 else other for _, one, other in pairs]
    faster = [other if middle < 1 else one for _, one, other in pairs]
    slow_mhz = median(_clock(point.runs) for point in slower)
    return _Change(
        slow_mhz * max(middle, 1 / middle),
        slow_mhz,
        _reasons(list(chain.from_iterable(point.runs for point in slower))),
        f"between {_layers(faster[0])} and {_layers(slower[0])} (median of {len(pairs)} points)",
    )


def _slowdown(point: TimingPoint, fastest_mhz: float) -> _Change | None:
    slowed = [run for run in point.runs if SLOWDOWNS.intersection(run.slowed_by)]
    if not slowed:
        return None
    slow_mhz = min((run.sm_clock_mhz for run in slowed if run.sm_clock_mhz), default=0.0)
    return _Change(fastest_mhz, slow_mhz, _reasons(slowed), f"during {_place(point)}")


def _within(point: TimingPoint) -> _Change | None:
    """Return the change between the halves of the point's calls; None: within tolerance, or one call."""
    runs = [run for run in point.runs if run.sm_clock_mhz]
    middle = len(runs) // 2
    halves = (runs[:middle], runs[middle:])
    return _change(*halves, f"during {_place(point)}") if middle else None


def _between(one: TimingPoint, other: TimingPoint) -> _Change | None:
    """Return the change between two depths of one point; None: within tolerance."""
    if one.num_layers == other.num_layers or not (_clock(one.runs) and _clock(other.runs)):
        return None
    slower, faster = sorted((one, other), key=lambda point: _clock(point.runs))
    where = f"between {_layers(faster)} and {_layers(slower)} of {_shape(slower)}"
    return _change(faster.runs, slower.runs, where)


def _change(one: Sequence[RunReading], other: Sequence[RunReading], where: str) -> _Change | None:
    slow, fast = sorted((one, other), key=_clock)
    change = _Change(_clock(fast), _clock(slow), _reasons(slow), where)
    return change if change.ratio > CLOCK_TOLERANCE else None


def _clock(runs: Sequence[RunReading]) -> float:
    """Return the median clock in MHz; 0.0 where none is reported."""
    clocks = [run.sm_clock_mhz for run in runs if run.sm_clock_mhz]
    return median(clocks) if clocks else 0.0


def _reasons(runs: Sequence[RunReading]) -> tuple[str, ...]:
    return tuple(sorted({reason for run in runs for reason in run.slowed_by}))


def _like(point: TimingPoint) -> _Like:
    return point.key, point.shard, point.batch, point.input_tokens, point.output_tokens, point.repeat > 1


def _shape(point: TimingPoint) -> str:
    return f"batch {point.batch} with {point.input_tokens} in, {point.output_tokens} out"


def _layers(point: TimingPoint) -> str:
    return f"{point.num_layers} layer{'s' if point.num_layers > 1 else ''}"


def _place(point: TimingPoint) -> str:
    return f"{_shape(point)}, {_layers(point)}"


def _and_more(places: Sequence[str]) -> str:
    rest = len(places) - 1
    return places[0] + (f" and {rest} more point{'s' if rest > 1 else ''}" if rest else "")
