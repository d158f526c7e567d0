"""Restart delay of a worker that ended: arithmetic on start times, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

__all__ = ["RestartHistory", "RestartPolicy"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """At most ``max_starts`` in any ``window_s``, each wait twice the one before."""

    max_starts: int = 5
    window_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 60.0


@dataclass(slots=True)
class RestartHistory:
    """The starts of one worker."""

    policy: RestartPolicy
    _starts_s: deque[float] = field(default_factory=deque)

    def note_start(self, now_s: float) -> None:
        self._starts_s.append(now_s)

    def delay_s(self, now_s: float) -> float | None:
        """Return the seconds to wait before the next start; None when there were too many lately: give up."""
        while self._starts_s and self._starts_s[0] <= now_s - self.policy.window_s:
            self._starts_s.popleft()
        recent = len(self._starts_s)
        if recent >= self.policy.max_starts:
            return None
        return min(self.policy.max_delay_s, self.policy.first_delay_s * 2.0 ** max(0, recent - 1))
