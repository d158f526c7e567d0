"""Loads of variants that are under way at a worker, and those that a request waits for. Pure.

A worker makes one load at a time, in the order in which they were ordered (docs/decisions/0050). So a request
for a variant that is not loaded waits for its load and for those before it. Gateway and simulator keep one
``PendingLoads`` for each worker; ``planner.admission`` judges requests by what they wait for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

__all__ = ["LoadsAhead", "PendingLoads", "loads_ahead_in_queue"]


class LoadsAhead(NamedTuple):
    """Loads of one worker that end before a request for a variant can begin there, its own included."""

    number: int
    ran_s: float = 0.0  # time for which the first of them is under way
    waiting: int = 0  # further ones, of variants of requests that wait before it

    def left_s(self, load_s: float) -> float:
        """Return the time until the last of ``number`` ends; ``load_s`` is that of one load."""
        return (self.number - 1) * load_s + max(0.0, load_s - self.ran_s)


class PendingLoads:
    """Loads of one worker that have not ended, in their order."""

    def __init__(self) -> None:
        self._names: list[str] = []  # one may be there twice: its place was given away before its first load ended
        self._began_s = 0.0  # the first of them

    def order(self, name: str, now_s: float) -> None:
        """Note one more load, which a worker that is not ready yet begins later: at ``now_s``."""
        if not self._names:
            self._began_s = now_s
        self._names.append(name)

    def end(self, name: str, now_s: float) -> float | None:
        """Note that the oldest load of ``name`` has ended, well or not; return the time that it took.

        None: one that was ordered before it has not ended, so that nothing is known of when it began. The time of
        that one then counts both. It is at the head until it ends, so that times are missing only until then.
        """
        took_s = None
        if self._names[0] == name:
            took_s, self._began_s = max(0.0, now_s - self._began_s), now_s
        self._names.remove(name)
        return took_s

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def ahead(self, name: str, now_s: float, *, has_place: bool) -> LoadsAhead | None:
        """Return the loads that a request for ``name`` waits for now; None: it is loaded.

        Args:
            has_place: it is loaded or being loaded; else its load is ordered for that request.
        """
        if not has_place:
            number = len(self._names) + 1
        elif name in self._names:
            number = len(self._names) - self._names[::-1].index(name)
        else:
            return None
        return LoadsAhead(number, max(0.0, now_s - self._began_s) if self._names else 0.0)


def loads_ahead_in_queue(
    name: str,
    workers: Sequence[tuple[Collection[str], PendingLoads]],
    before: Iterable[str | None],
    now_s: float,
) -> LoadsAhead | None:
    """Return the loads that a request for ``name`` waits for at the worker of ``workers`` with fewest of them.

    Args:
        workers: what has a place at each of them, and its loads; there is at least one.
        before: variants of the requests that wait before it. Their loads that are ordered nowhere yet are shared
            evenly by the workers; None: a request of the base.
    """
    ahead = [pending.ahead(name, now_s, has_place=name in placed) for placed, pending in workers]
    if any(loads is None for loads in ahead):
        return None
    fewest = min((loads for loads in ahead if loads is not None), key=lambda loads: (loads.number, -loads.ran_s))
    if any(name in placed for placed, _ in workers):  # ordered before what waits
        return fewest
    lacking = {one for one in before if one is not None and not any(one in placed for placed, _ in workers)}
    return fewest._replace(waiting=len(lacking - {name}) // len(workers))
