"""Loads that failed at one worker: the variants that it does not load ahead of need again. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

__all__ = ["FailedLoads"]

_MOST_IN_A_ROW = 3  # loads ahead of need
_LONGEST_PAUSE_S = 300.0


@dataclass(slots=True)
class FailedLoads:
    """Names whose last load at a worker failed, until a load of theirs succeeds.

    A load that ended without an answer may have ended its worker, and would do so after each start: its name
    stays. A name that was refused with an answer is tried again after the next start, and stays when it is refused
    then as well: an engine that ends in a load may answer with an error first.

    A pinned variant is tried again and again all the same, after pauses that double, so that the rest is loaded
    meanwhile.
    """

    lost: set[str] = field(default_factory=set)  # these stay when the worker is started again
    _refused: set[str] = field(default_factory=set)
    _refused_before: set[str] = field(default_factory=set)  # in the life of the worker before
    _in_a_row: int = 0
    _times: dict[str, tuple[int, float]] = field(default_factory=dict)  # in a row, and when the last one failed

    @property
    def names(self) -> AbstractSet[str]:
        return self.lost | self._refused

    @property
    def allows_preload(self) -> bool:
        """False after several loads ahead of need that failed in a row, until one succeeds or a restart."""
        return self._in_a_row < _MOST_IN_A_ROW

    def fail(self, name: str, *, answered: bool, ahead: bool, now_s: float) -> None:
        """Note a failed load; ``ahead``: it was begun before a request needed it."""
        (self._refused if answered else self.lost).add(name)
        self._in_a_row += ahead
        self._times[name] = self._times.get(name, (0, 0.0))[0] + 1, now_s

    def retry_s(self, name: str, pause_s: float) -> float:
        """Return when a pinned variant is tried again, its first pause being ``pause_s``; 0: it has not failed."""
        if name not in self._times:
            return 0.0
        times, failed_s = self._times[name]
        return failed_s + min(_LONGEST_PAUSE_S, pause_s * 2.0 ** min(times - 1, 10))

    def succeed(self, name: str) -> None:
        """Note a load that succeeded."""
        self._forget({name})
        self._in_a_row = 0

    def restart(self) -> None:
        """Note that the worker is started again, or is not ready."""
        if self._refused:
            self.lost |= self._refused & self._refused_before
            self._refused, self._refused_before = set(), self._refused
        self._times = {name: times for name, times in self._times.items() if name in self.lost}
        self._in_a_row = min(self._in_a_row, len(self.lost))

    def keep(self, names: AbstractSet[str]) -> None:
        """Forget all but ``names``, which are in the table."""
        self._forget((self.lost | self._refused | self._refused_before | self._times.keys()) - names)

    def _forget(self, names: AbstractSet[str]) -> None:
        for known in (self.lost, self._refused, self._refused_before):
            known -= names
        for name in names & self._times.keys():
            del self._times[name]
