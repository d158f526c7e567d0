"""The time a profile may take: what is left of it, and what the next action is likely to need.

An action that was never taken is expected to take what the last one like it did, so that a launch or a first run
is not begun when it would end after the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Action", "Budget", "OutOfTimeError"]


class OutOfTimeError(Exception):
    """The next action would end after its deadline."""


class Action(NamedTuple):
    """Something that takes time; actions of one ``kind`` and ``about`` are alike wherever they are taken."""

    kind: str  # "launch", "load", "run" or "close"
    about: Hashable = None  # of a run: its shape
    where: Hashable = None  # what is loaded


@dataclass
class Budget:
    """Time left, and how long each action took last.

    Args:
        clock: seconds that only grow.
        total_s: all that may be spent, from now on.
        launch_s: what a launch is known to take already.
        uncharged: kinds of actions whose time counts for nothing: the clock is stopped while they run.
    """

    clock: Callable[[], float]
    total_s: float
    launch_s: float = 0.0
    uncharged: frozenset[str] = frozenset()
    seen_s: dict[Action, float] = field(default_factory=dict)
    _alike_s: dict[tuple[str, Hashable], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        running, self._stopped_s = self.clock, 0.0
        self.clock = lambda: running() - self._stopped_s
        self.started = self.clock()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.started

    @property
    def end(self) -> float:
        """Time by which the last action must have ended, so that there is time to close what is open."""
        return self.started + self.total_s - self._alike_s.get(("close", None), 0.0)

    @property
    def left_s(self) -> float:
        return self.end - self.clock()

    def expected_s(self, action: Action) -> float:
        """Return what the action took the last time, else what the last one like it took; 0 if none."""
        if action.kind == "launch":
            return self.launch_s
        return self.seen_s.get(action, self._alike_s.get((action.kind, action.about), 0.0))

    @contextmanager
    def spend(self, action: Action, deadline: float) -> Iterator[None]:
        """Run one action, unless it is expected to end after ``deadline``.

        Raises:
            OutOfTimeError: it is; nothing was done.
        """
        now = self.clock()
        if now + self.expected_s(action) > deadline or now >= deadline:
            raise OutOfTimeError
        with self.note(action):
            yield

    @contextmanager
    def note(self, action: Action) -> Iterator[None]:
        """Run one action whatever the time, and remember how long it took."""
        now = self.clock()
        yield
        took = self.clock() - now
        if action.kind in self.uncharged:
            self._stopped_s += took
            took = 0.0
        if action.kind == "launch":  # the longest: an engine that is up already opens in no time
            self.launch_s = max(self.launch_s, took)
        # the last, not the longest: the first of a kind may compile
        self.seen_s[action] = self._alike_s[action.kind, action.about] = took
