"""Points that a profile planned and did not measure, by what they lacked."""

from __future__ import annotations

from collections.abc import Iterable

from fingerprint.errors import InfeasibleError, IserveError, TooLittleTimeError, UnavailableError
from fingerprint.measurements import Lack, MeasuredKey, Unreached

__all__ = ["Gaps", "lack_of"]


def lack_of(error: IserveError) -> Lack:
    """Return what was lacking, to an attempt to measure that ended with ``error``."""
    if isinstance(error, InfeasibleError):
        return Lack.MEMORY
    if isinstance(error, UnavailableError):
        return Lack.AVAILABILITY
    return Lack.BUDGET if isinstance(error, TooLittleTimeError) else Lack.FAILURE


class Gaps:
    """Missing points of each configuration. Of a point the first reason counts."""

    def __init__(self) -> None:
        self._points: dict[MeasuredKey, dict[tuple[int, int], Lack]] = {}

    def add(self, key: MeasuredKey, points: Iterable[tuple[int, int]], lacked: Lack = Lack.BUDGET) -> None:
        of_key = self._points.setdefault(key, {})
        for point in points:
            of_key.setdefault(point, lacked)

    def unreached(self, engine: str, planned_points: int) -> tuple[Unreached, ...]:
        return tuple(
            Unreached(
                config=key.config(engine),
                missing_points=len(points),
                planned_points=planned_points,
                lacked=lack,
                points=points,
            )
            for key, of_key in self._points.items()
            for lack in Lack
            if (points := tuple(sorted(point for point, lacked in of_key.items() if lacked is lack)))
        )
