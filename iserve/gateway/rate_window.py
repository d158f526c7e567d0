"""Requests over the last two minutes: of a deployment, and of each of its variants."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

__all__ = ["WINDOW_S", "RateWindow", "VariantCounts"]

WINDOW_S = 120
_LEAST_S = 30.0  # of a second after a start one request would be a rate of one a second


class RateWindow:
    """Counts by the second, in constant memory.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_s = clock()
        self._counts = [0] * WINDOW_S
        self._second = int(self._began_s)

    def count(self) -> None:
        """Count one arrival."""
        self._go_on()
        self._counts[self._second % WINDOW_S] += 1

    @property
    def requests(self) -> int:
        """Arrivals in the window."""
        self._go_on()
        return sum(self._counts)

    @property
    def per_s(self) -> float | None:
        """Over the window, or since the beginning where that is shorter; None: it was too short ago to tell."""
        counted_s = self._clock() - self._began_s
        return None if counted_s < _LEAST_S else self.requests / min(float(WINDOW_S), counted_s)

    def _go_on(self) -> None:
        now = int(self._clock())
        for second in range(max(self._second, now - WINDOW_S) + 1, now + 1):
            self._counts[second % WINDOW_S] = 0
        self._second = now


class VariantCounts:
    """Requests of each variant in the window; a variant without one takes no memory.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, Counter[str]]] = deque()  # those with a request, the oldest first
        self._total: Counter[str] = Counter()

    def count(self, variant: str) -> None:
        """Count one arrival."""
        now = self._drop_old()
        if not self._seconds or self._seconds[-1][0] != now:
            self._seconds.append((now, Counter()))
        self._seconds[-1][1][variant] += 1
        self._total[variant] += 1

    @property
    def requests(self) -> tuple[tuple[str, int], ...]:
        """Arrivals in the window by variant, most first, of equals by name."""
        self._drop_old()
        return tuple(sorted(self._total.items(), key=lambda item: (-item[1], item[0])))

    def _drop_old(self) -> int:
        """Drop what has left the window; return the second that it is."""
        now = int(self._clock())
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            for variant, number in self._seconds.popleft()[1].items():
                self._total[variant] -= number
                if not self._total[variant]:
                    del self._total[variant]
        return now
