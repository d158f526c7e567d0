"""Times beside what runs on the GPUs already: where each candidate would go, and how much longer its requests
take there than on idle GPUs.

A candidate goes where the placement policy puts it. Where it would miss a limit there for the others' sake, the
quietest GPUs with room are asked for: a policy may pay for sharing, a limit may not be broken for it. Every time
of a candidate is multiplied by one number, and all that is made of times follows: costs, limits, queues.

A latency is ranked by its own and what the requests of others lose by it, which are seconds as well: a TP group
over all GPUs may be fastest and slow all others. Other objectives are of things that nobody tells of the others.
So it is with who is expected: what all lose once they have come counts in a latency, and in no limit, which is
kept or not as things are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from planner.cells import Column, Mask
from planner.plan import BetterIdle, Layout, NoRoom, Ranked

__all__ = ["Fits", "Load", "Neighbours", "Sites", "idle", "told_of_idle"]

_ROUNDING = 1e-9

Fits = Callable[[Estimate], Layout | NoRoom]


class Neighbours(Protocol):
    """Interface to the load already on the GPUs. Pure: one answer per question."""

    def slowdown(self, layout: Layout) -> float:
        """Return how many times as long as on idle GPUs requests take at ``layout`` of ``fits``; at least 1."""
        ...

    def taken(self, layout: Layout) -> float:
        """Seconds that the requests of others lose together by each second that one at ``layout`` takes alone."""
        ...

    def later(self, layout: Layout, estimate: Estimate) -> float:
        """Seconds that one at ``layout`` and the others lose together, for each second that it takes alone, once
        who is expected has come; 0 where nobody is."""
        ...

    def quietest(self, estimate: Estimate) -> Layout | NoRoom:
        """Return the layout as ``fits`` does, on the GPUs with the least load."""
        ...


class Load(NamedTuple):
    """Effect of other deployments on each row, and of the row on them (``Neighbours``)."""

    slowdowns: Column
    taken: Column
    later: Column


def idle(rows: int) -> Load:
    return Load(np.ones(rows), np.zeros(rows), np.zeros(rows))


class Sites:
    """Layouts of the rows and how slow each is: asked once, so that every later answer is the same.

    Args:
        estimates: None of a row that cannot run at all.
    """

    def __init__(self, estimates: Sequence[Estimate | None], fits: Fits, neighbours: Neighbours) -> None:
        self._estimates, self._fits, self._neighbours = estimates, fits, neighbours
        self.load = idle(len(estimates))
        self._answers: dict[int, Layout | NoRoom] = {}  # by the identity of the estimate

    def ask(self, rows: Mask) -> None:
        for row in np.flatnonzero(rows).tolist():
            estimate = self._estimates[row]
            if estimate is not None and id(estimate) not in self._answers:
                self._put(row, estimate, self._fits(estimate))

    def assume(self, row_like: int) -> None:
        """The load of that row, of those that were not asked."""
        for row, estimate in enumerate(self._estimates):
            if estimate is not None and id(estimate) not in self._answers:
                for column in self.load:
                    column[row] = column[row_like]

    def quieten(self, late: Mask) -> bool:
        """Let the rows that are ``late`` go to the quietest GPUs; whether any is faster there."""
        slowdowns = self.load.slowdowns
        before = slowdowns.copy()
        for row in np.flatnonzero(late & (before > 1)).tolist():
            estimate = self._estimates[row]
            assert estimate is not None, "a row without a place is not slowed"
            first = self._answers[id(estimate)]
            self._put(row, estimate, self._neighbours.quietest(estimate))
            if slowdowns[row] >= before[row]:
                self._put(row, estimate, first)
        return bool((slowdowns < before).any())

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
        if not isinstance(answer, NoRoom):
            self.load.slowdowns[row] = self._neighbours.slowdown(answer)
            self.load.taken[row] = self._neighbours.taken(answer)
            self.load.later[row] = self._neighbours.later(answer, estimate)


def told_of_idle(
    config: DeploymentConfig, objective: float, unit: str, here: Ranked, chosen: Ranked | None
) -> BetterIdle | None:
    """Return why ``config``, best on idle GPUs with ``objective`` there, is not chosen; None when it is.

    Args:
        here: its verdict where it would go.
    """
    if chosen is not None and chosen.config == config:
        return None
    why = []
    if here.slowdown > 1 or not here.later_s:
        late = f"what runs on the GPUs that it would get makes it {here.slowdown:.3g} times as slow"
        if here.feasible and here.objective is not None:
            late += f" ({here.objective:.4g} {unit})"
            taken = 0.0 if here.weight is None else here.weight - here.objective - here.later_s
            if taken > _ROUNDING * here.objective:
                late += f" and costs the others {taken:.3g} s for each request"
        why.append(late)
    if not here.feasible:
        why.append("it misses a limit")
    elif here.later_s:
        why.append(f"with those to come, all lose {here.later_s:.3g} s more by each request")
    text = f"{config} would be best on idle GPUs ({objective:.4g} {unit}); {', and '.join(why)}"
    if chosen is not None and chosen.objective is not None:
        text += f"; {chosen.config} comes to {chosen.objective:.4g} {unit}"
        if chosen.slowdown > 1 or not here.later_s:
            text += f", {chosen.slowdown:.3g} times as slow"
        if here.later_s:
            text += f", and loses them {chosen.later_s:.3g} s"
    return BetterIdle(config, objective, here.slowdown, text)
