"""Times beside what runs on the GPUs already: where each candidate would go, and how much longer its requests
take there than on idle GPUs.

A candidate goes where the placement policy puts it. Where it would miss a limit there for the others' sake, the
quietest GPUs with room are asked for: a policy may pay for sharing, a limit may not be broken for it. Every time
of a candidate is multiplied by one number, and all that is made of times follows: costs, limits, queues.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from planner.cells import Mask
from planner.plan import BetterIdle, Layout, NoRoom, Ranked

__all__ = ["Fits", "Neighbours", "Sites", "told_of_idle"]

Fits = Callable[[Estimate], Layout | NoRoom]


class Neighbours(Protocol):
    """What runs on the GPUs. Pure: one answer per question."""

    def slowdown(self, layout: Layout) -> float:
        """How many times as long as on idle GPUs requests take at ``layout``, which ``fits`` gave; at least 1."""
        ...

    def quietest(self, estimate: Estimate) -> Layout | NoRoom:
        """As ``fits``, on the GPUs with the least load."""
        ...


class Sites:
    """Where each row would go and how slow that is: asked once, so that every later answer is the same.

    Args:
        estimates: None of a row that cannot run at all.
    """

    def __init__(self, estimates: Sequence[Estimate | None], fits: Fits, neighbours: Neighbours) -> None:
        self._estimates, self._fits, self._neighbours = estimates, fits, neighbours
        self.slowdowns = np.ones(len(estimates))
        self._answers: dict[int, Layout | NoRoom] = {}  # by the identity of the estimate

    def ask(self, rows: Mask) -> None:
        for row in np.flatnonzero(rows).tolist():
            estimate = self._estimates[row]
            if estimate is not None and id(estimate) not in self._answers:
                self._put(row, estimate, self._fits(estimate))

    def assume(self, slowdown: float) -> None:
        """Of the rows that were not asked."""
        for row, estimate in enumerate(self._estimates):
            if estimate is not None and id(estimate) not in self._answers:
                self.slowdowns[row] = slowdown

    def quieten(self, late: Mask) -> bool:
        """Let the rows that are ``late`` go to the quietest GPUs; whether any is faster there."""
        before = self.slowdowns.copy()
        for row in np.flatnonzero(late & (before > 1)).tolist():
            estimate = self._estimates[row]
            assert estimate is not None, "a row without a place is not slowed"
            first = self._answers[id(estimate)]
            self._put(row, estimate, self._neighbours.quietest(estimate))
            if self.slowdowns[row] >= before[row]:
                self._answers[id(estimate)], self.slowdowns[row] = first, before[row]
        return bool((self.slowdowns < before).any())

    @property
    def placed(self) -> Mask:
        """The rows that were asked and have a place."""
        found = [None if e is None else self._answers.get(id(e)) for e in self._estimates]
        return np.array([one is not None and not isinstance(one, NoRoom) for one in found], dtype=np.bool_)

    def fits(self, estimate: Estimate) -> Layout | NoRoom:
        """For the planner, later; of a row that was not asked the answer is that of ``fits``."""
        answer = self._answers.get(id(estimate))
        return self._fits(estimate) if answer is None else answer

    def _put(self, row: int, estimate: Estimate, answer: Layout | NoRoom) -> None:
        self._answers[id(estimate)] = answer
        self.slowdowns[row] = 1.0 if isinstance(answer, NoRoom) else self._neighbours.slowdown(answer)


def told_of_idle(
    config: DeploymentConfig, objective: float, unit: str, here: Ranked, chosen: Ranked | None
) -> BetterIdle | None:
    """Why ``config``, which is best on idle GPUs and comes to ``objective`` there, is not chosen; None when it is.

    Args:
        here: its verdict where it would go.
    """
    if chosen is not None and chosen.config == config:
        return None
    late = f"what runs on the GPUs that it would get makes it {here.slowdown:.3g} times as slow"
    if here.feasible and here.objective is not None:
        late += f" ({here.objective:.4g} {unit})"
    else:
        late += ", and it misses a limit"
    text = f"{config} would be best on idle GPUs ({objective:.4g} {unit}); {late}"
    if chosen is not None and chosen.objective is not None:
        text += f"; {chosen.config} comes to {chosen.objective:.4g} {unit}, {chosen.slowdown:.3g} times as slow"
    return BetterIdle(config, objective, here.slowdown, text)
