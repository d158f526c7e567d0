"""Deadline for a worker of a ready deployment to become ready again.

The daemon ends a start that takes too long and starts the worker once more. A worker that hangs each time is never
given up there: the daemon counts the starts of some minutes, which such starts outlast. Here it is, after as long
as a worker may take to start and one that serves may be silent before. It then rests for as long, so that half of
the time its memory is free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from daemon.status import WorkerState, WorkerStatus

__all__ = ["Patience"]

_NOT_YET = frozenset({WorkerState.STARTING, WorkerState.RESTARTING})


class Patience:
    """Deadlines of one controller's workers; a new one begins to count anew.

    Args:
        limit_s: that a worker may not serve in one go, and then rests.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit_s, self._clock = limit_s, clock
        self._since_s: dict[str, float] = {}  # worker -> when it was first seen not to serve
        self._rests_until_s: dict[str, float] = {}

    def given_up(self, workers: Iterable[WorkerStatus]) -> tuple[str, ...]:
        """Return the ids of those of ``workers``, all of ready deployments, whose time is up; they rest from now
        on.
        """
        now_s = self._clock()
        late = [worker.spec.worker_id for worker in workers if worker.state in _NOT_YET]
        self._since_s = {one: self._since_s.get(one, now_s) for one in late}
        self._rests_until_s = {one: until_s for one, until_s in self._rests_until_s.items() if until_s > now_s}
        over = tuple(one for one, since_s in self._since_s.items() if now_s - since_s > self.limit_s)
        for one in over:
            del self._since_s[one]
            self._rests_until_s[one] = now_s + self.limit_s
        return over

    def rests(self, worker_id: str) -> bool:
        """Return whether a worker rests, as of the last look."""
        return worker_id in self._rests_until_s
