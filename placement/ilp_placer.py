"""Exact placement of one or several models: the cheapest choice of configurations, GPUs and layers per stage.

``program`` states the problem; this module prepares its input and reads its result. A configuration that another
of the same degrees beats in cost and in every size is left out, and so is one whose cost alone exceeds what the
heuristics reached. ``fit`` builds the answer anew on the chosen GPUs, so that a place of the program is one by the
heuristics' own code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fingerprint.errors import ConfigError
from placement.fit import Placer
from placement.ilp_model import Program
from placement.multi_model import (
    Choice,
    LeftOut,
    Placed,
    Wanted,
    beside,
    by_key,
    cost_of,
    largest_first,
    least_cost,
    one_by_one,
)
from placement.policies import Hybrid, LeastLoaded, Packing
from placement.types import BlockDemand, ClusterSnapshot, Placement, Refusal

__all__ = ["DEFAULT_TIME_LIMIT_S", "ExactPlacer", "Layout", "place_together"]

DEFAULT_TIME_LIMIT_S = 10.0

_PROVEN = 1e-6  # of the cost, between it and the bound
_MARGINS_BYTES = (0, 2**16)  # the second where the solver's rounding went over a GPU's edge


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The best layout found: as many models as can be have a place, then the cost is least.

    ``bound``: no layout of as many models costs less; ``most_models``: none places more.
    """

    placed: tuple[Placed, ...]
    left_out: tuple[LeftOut, ...]
    bound: float
    most_models: int
    solver_s: float  # spent

    @property
    def cost(self) -> float:
        return sum(one.cost for one in self.placed)

    @property
    def proven(self) -> bool:
        """True when nothing is better; False when the time limit was reached first."""
        return len(self.placed) == self.most_models and self.cost <= self.bound * (1 + _PROVEN)


def place_together(
    wanted: Sequence[Wanted],
    snapshot: ClusterSnapshot,
    *,
    link_group_size: int | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
) -> Layout:
    """Return the layout of ``wanted`` that costs least (``layout``); after the time limit, the best found and its
    bound.

    Never worse than placing one by one under any policy. The same every time where it is proven.

    Args:
        link_group_size: GPUs joined by the fast link; None: all of a node are equal.
        time_limit_s: of the solver, over all its runs; stating the program takes further time.

    Raises:
        ConfigError: a demand or snapshot that contradicts itself, a model wanted twice, or more than
            ``program.MAX_PLACES``.
    """
    if not time_limit_s > 0:
        raise ConfigError(f"the exact placement's time limit must be above 0 s, got {time_limit_s}")
    names = [one.model for one in wanted]
    if len(set(names)) < len(names):
        raise ConfigError(f"a model is wanted twice: {', '.join(sorted(names))}")
    gpus = tuple(sorted(snapshot.gpus, key=lambda g: (g.node_id, g.gpu_index, g.device_id)))
    return _Search(
        sorted(wanted, key=lambda one: one.model), replace(snapshot, gpus=gpus), link_group_size or 1, time_limit_s
    ).run()


class ExactPlacer:
    """Exact placer on one snapshot, for any number of demands; answers as :class:`placement.fit.Placer` does.

    The place in which a configuration's requests take least time. Where the heuristics' place can not be beaten,
    nothing is solved; nor once the time is spent, which a plan of many configurations shares.

    Args:
        time_limit_s: of the solver, over all demands.

    Raises:
        ConfigError: a snapshot that contradicts itself.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        *,
        link_group_size: int | None = None,
        time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    ) -> None:
        self._snapshot, self._link, self._left_s = snapshot, link_group_size, time_limit_s
        self._placer = Placer(snapshot, LeastLoaded(), link_group_size=link_group_size)
        self._gpus = by_key(snapshot)

    def fit(self, demand: BlockDemand) -> Placement | Refusal:
        """Return the best place; a refusal is that of ``Placer``, which refuses exactly when nothing fits."""
        answer = self._placer.fit(demand)
        if isinstance(answer, Refusal):
            return answer
        choice = Choice(label="", demand=demand, cost=1.0)
        cost = cost_of(choice, answer, self._gpus, link_group_size=self._link)
        if cost <= least_cost(choice, self._snapshot.gpus) * (1 + _PROVEN) or self._left_s <= 0:
            return answer
        found = place_together(
            [Wanted(model="", choices=(choice,))],
            self._snapshot,
            link_group_size=self._link,
            time_limit_s=self._left_s,
        )
        self._left_s -= found.solver_s
        return found.placed[0].placement


class _Search:
    def __init__(self, wanted: list[Wanted], snapshot: ClusterSnapshot, link: int, time_limit_s: float) -> None:
        self._snapshot, self._link = snapshot, link
        self._limit_s = self._left_s = time_limit_s
        self._gpus, self._least = by_key(snapshot), 0.0
        alone = [one_by_one([one], snapshot, LeastLoaded(), link_group_size=link) for one in wanted]
        self._never = tuple(out for _, outs in alone for out in outs)
        homeless = {out.model for out in self._never}
        self._wanted = [
            replace(one, choices=_undominated(one.choices)) for one in wanted if one.model not in homeless
        ]

    def run(self) -> Layout:
        best, bound, most = self._heuristics(), 0.0, len(self._wanted)
        if len(best) < most:
            fewest_out, found = self._solve(self._wanted, leave_out=None)
            most -= math.ceil(fewest_out - _PROVEN)
            if len(found) > len(best):
                best = found
        if best:
            leave_out = len(self._wanted) - len(best)
            wanted = self._wanted if leave_out else self._affordable(sum(one.cost for one in best))
            bound, found = self._solve(wanted, leave_out=leave_out)
            bound = max(bound, 0.0 if leave_out else self._least)
            best = min(best, found or best, key=lambda layout: sum(one.cost for one in layout))
        return Layout(
            placed=best,
            left_out=self._left_out(best),
            bound=bound,
            most_models=most,
            solver_s=self._limit_s - self._left_s,
        )

    def _heuristics(self) -> tuple[Placed, ...]:
        """Return the best of placing one by one: most models, then least cost."""
        answers = [
            one_by_one(wanted, self._snapshot, policy, link_group_size=self._link, weigh_load=weigh_load)[0]
            for policy in (LeastLoaded(), Hybrid(), Packing())
            for weigh_load in (False, True)
            for wanted in (self._wanted, largest_first(self._wanted))
        ]
        return min(answers, key=lambda placed: (-len(placed), sum(one.cost for one in placed)))

    def _affordable(self, ceiling: float) -> list[Wanted]:
        """Return the models without choices that are dearer than the known layout, all else at its cheapest."""
        costs = [[least_cost(c, self._snapshot.gpus) for c in one.choices] for one in self._wanted]
        self._least = sum(min(of_one) for of_one in costs)
        spare = ceiling * (1 + _PROVEN) - self._least
        return [
            replace(
                one,
                choices=tuple(
                    c for c, cost in zip(one.choices, of_one, strict=True) if cost <= min(of_one) + spare
                ),
            )
            for one, of_one in zip(self._wanted, costs, strict=True)
        ]

    def _solve(self, wanted: Sequence[Wanted], *, leave_out: int | None) -> tuple[float, tuple[Placed, ...]]:
        """Return the objective's bound, and the layout found; nothing where none was found in time."""
        bound = 0.0
        for margin in _MARGINS_BYTES:
            program = Program(
                wanted,
                self._snapshot.gpus,
                link_group_size=self._link,
                leave_out=leave_out,
                margin_bytes=margin,
            )
            solved = program.solve(self._left_s)
            self._left_s -= solved.seconds
            bound = bound if margin else max(0.0, solved.bound)
            if solved.chosen is None:
                break
            placed = self._put_together(solved.chosen)
            if placed is not None:
                return bound, placed
        return bound, ()

    def _put_together(self, chosen: dict[str, tuple[Choice, Placement]]) -> tuple[Placed, ...] | None:
        """Place each model by ``fit`` on its own GPUs, with all the rest placed; None where one does not fit."""
        placements = {model: placement for model, (_, placement) in chosen.items()}
        placed = []
        for model, (choice, stated) in chosen.items():
            others = [placement for name, placement in placements.items() if name != model]
            own = {(stage.node_id, device) for stage in stated.stages for device in stage.device_ids}
            there = beside(self._snapshot, others)
            offered = replace(there, gpus=tuple(g for g in there.gpus if (g.node_id, g.device_id) in own))
            if any(gpu.free_bytes < 0 for gpu in offered.gpus):
                return None
            fitted = Placer(offered, LeastLoaded(), link_group_size=self._link).fit(choice.demand)
            if isinstance(fitted, Refusal):
                return None
            ways = [fitted, stated] if _holds(stated, offered) else [fitted]
            costs = [cost_of(choice, way, self._gpus, link_group_size=self._link) for way in ways]
            best = 1 if len(ways) == 2 and costs[1] < costs[0] * (1 - _PROVEN) else 0
            placements[model] = ways[best]
            placed.append(Placed(model=model, choice=choice, placement=ways[best], cost=costs[best]))
        return tuple(placed)

    def _left_out(self, placed: tuple[Placed, ...]) -> tuple[LeftOut, ...]:
        there = {one.model for one in placed}
        rest = [one for one in self._wanted if one.model not in there]
        free = beside(self._snapshot, [one.placement for one in placed])
        outs = list(self._never)
        for one in rest:
            _, refused = one_by_one([one], free, LeastLoaded(), link_group_size=self._link)
            for out in refused:
                why = f"beside {len(there)} other models {out.refusal.reason}"
                outs.append(replace(out, refusal=replace(out.refusal, reason=why)))
        return tuple(sorted(outs, key=lambda out: out.model))


def _holds(placement: Placement, offered: ClusterSnapshot) -> bool:
    free = {key: gpu.free_bytes for key, gpu in by_key(offered).items()}
    return all(
        free[stage.node_id, device] >= stage.bytes_per_gpu
        for stage in placement.stages
        for device in stage.device_ids
    )


def _undominated(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return the choices without those that another of the same degrees beats or equals in cost and every size."""
    kept: list[Choice] = []
    for choice in sorted(choices, key=_figures):
        figures = _figures(choice)
        if not any(
            _degrees(one) == _degrees(choice)
            and all(a <= b for a, b in zip(_figures(one)[:-1], figures[:-1], strict=True))
            for one in kept
        ):
            kept.append(choice)
    return tuple(kept)


def _degrees(choice: Choice) -> tuple[int, int, int, bool]:
    return choice.demand.tp, choice.demand.pp, choice.demand.num_layers, choice.timed


def _figures(choice: Choice) -> tuple[float, int, int, int, int, str]:
    demand = choice.demand
    sizes = (demand.layer_bytes, demand.first_stage_bytes, demand.last_stage_bytes, demand.fixed_bytes)
    return (choice.cost, *sizes, choice.label)
