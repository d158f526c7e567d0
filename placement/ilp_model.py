"""Integer linear program of exact placement, in PuLP, solved by HiGHS in this process.

For every model m, choice c of it, role of a stage (first, middle, last; a single one where pp is 1) and TP group G
of one node: x = 1 where a stage of that role stands on G, and L its layers.

*   One choice of each model, or the model is left out: sum over c of z + out = 1.
*   Its stages: sum over G of x = z times the stages of that role. Its layers: sum over roles and G of L = N z. A
    GPU serves at most one stage of it.
*   x <= L <= x times the layers that G's room holds in that role (``fit.capacity``, in whole bytes).
*   Memory of each GPU, over all models: sum of L * layer_bytes + x * (fixed and end bytes) <= free.
*   Cost: ``layout.cost_of``, linear in L, with one variable per choice for the longest stage's excess.

Middle stages are counted, not named: no two solutions differ by their order alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import NamedTuple

import pulp

from fingerprint.errors import ConfigError
from placement.fit import capacity, free_bytes
from placement.load_model import Key
from placement.multi_model import Choice, Wanted, group_factor
from placement.types import BlockDemand, GpuState, Placement, StagePlacement

__all__ = ["MAX_PLACES", "Program", "Solved"]

MAX_PLACES = 50_000  # x variables: some 500 MB, and beyond what ends in time

_REL_GAP = 1e-7
_FIRST, _MIDDLE, _LAST = range(3)


class Solved(NamedTuple):
    """Result of solving a program."""

    chosen: dict[str, tuple[Choice, Placement]] | None  # by model; None: nothing was found
    bound: float  # of the objective, from below
    seconds: float


class _Place(NamedTuple):
    role: int
    group: tuple[GpuState, ...]
    used: pulp.LpVariable
    layers: pulp.LpAffineExpression


class _Option(NamedTuple):
    model: str
    choice: Choice
    taken: pulp.LpVariable
    places: list[_Place]
    excess: pulp.LpAffineExpression  # layers of the longest stage above an even split's


class Program:
    """Variables and constraints of ``wanted`` on ``gpus``; to be solved once.

    Args:
        leave_out: how many models have no place; None: as few as can be, and that is the objective.
        margin_bytes: of every GPU that stay free.

    Raises:
        ConfigError: more than ``MAX_PLACES``.
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        gpus: Sequence[GpuState],
        *,
        link_group_size: int,
        leave_out: int | None,
        margin_bytes: int = 0,
    ) -> None:
        self._link, self._wanted = link_group_size, wanted
        self._nodes: dict[str, list[GpuState]] = {}
        for gpu in gpus:
            self._nodes.setdefault(gpu.node_id, []).append(gpu)
        self._room = {_key(gpu): free_bytes(gpu) - margin_bytes for gpu in gpus}
        self._problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self._made = 0
        self._check_size()
        self._options = [
            option for one in wanted for choice in one.choices if (option := self._option(one.model, choice))
        ]
        outs = self._models()
        self._memory()
        self._scale = 1.0
        if leave_out is None:
            self._problem.setObjective(pulp.lpSum(outs))
        else:
            self._problem += pulp.lpSum(outs) == leave_out
            self._scale = sum(min(c.cost for c in one.choices) for one in wanted)
            self._problem.setObjective(pulp.lpSum(self._cost(option) for option in self._options))

    def solve(self, time_limit_s: float) -> Solved:
        """Return the best there is, or the best found in time."""
        solver = pulp.HiGHS(
            msg=False,
            threads=1,
            timeLimit=max(time_limit_s, 0.0),
            gapRel=_REL_GAP,
            gapAbs=0.0,
            mip_feasibility_tolerance=1e-9,
            primal_feasibility_tolerance=1e-9,
        )
        self._problem.solve(solver)
        model = self._problem.solverModel
        info = model.getInfo()
        found = info.primal_solution_status == 2  # HiGHS: kSolutionStatusFeasible
        chosen = {o.model: (o.choice, self._read(o)) for o in self._options if _is(o.taken)} if found else None
        return Solved(chosen, info.mip_dual_bound * self._scale, model.getRunTime())

    def _variable(self, kind: str, most: int | None, *, whole: bool = True) -> pulp.LpVariable:
        self._made += 1
        category = pulp.LpInteger if whole else pulp.LpContinuous
        return self._problem.add_variable(f"{kind}{self._made}", 0, most, cat=category)

    def _option(self, model: str, choice: Choice) -> _Option | None:
        """Return a choice's variables with their constraints; None where it fits nowhere even alone."""
        demand = choice.demand
        taken = self._variable("z", 1)
        places: list[_Place] = []
        for role, count in _roles(demand.pp):
            here = [self._place(taken, demand, role, group, most) for group, most in self._groups(demand, role)]
            if len(here) < count:
                return None
            self._problem += pulp.lpSum(place.used for place in here) == count * taken
            places += here
        excess: pulp.LpAffineExpression = pulp.LpAffineExpression()
        if demand.pp > 1:
            excess = pulp.LpAffineExpression(self._variable("e", None, whole=False))
            self._problem += pulp.lpSum(place.layers for place in places) == demand.num_layers * taken
            for of_gpu in _by_gpu(places).values():
                self._problem += pulp.lpSum(place.used for place in of_gpu) <= taken
            for place in places:
                self._problem += place.layers - choice.even_layers * place.used <= excess
        return _Option(model, choice, taken, places, excess)

    def _check_size(self) -> None:
        places = sum(
            math.comb(len(roomy), choice.demand.tp)
            for one in self._wanted
            for choice in one.choices
            for role, _ in _roles(choice.demand.pp)
            for roomy in self._roomy(choice.demand, role)
        )
        if places > MAX_PLACES:
            raise ConfigError(
                f"exact placement of {len(self._wanted)} models on {len(self._room)} GPUs has {places} places to "
                f"choose from, it takes {MAX_PLACES}; give it fewer GPUs, models or configurations, or use hybrid"
            )

    def _roomy(self, demand: BlockDemand, role: int) -> Iterator[list[tuple[GpuState, int]]]:
        """Yield, for each node, the GPUs with room for a stage of that role, and the layers that fit."""
        extra, loosest = _extra_bytes(demand, role), demand.num_layers - demand.pp + 1
        least = demand.num_layers if demand.pp == 1 else 1
        for members in self._nodes.values():
            held = [(gpu, capacity(self._room[_key(gpu)], extra, demand, loosest)) for gpu in members]
            yield [(gpu, layers) for gpu, layers in held if layers >= least]

    def _groups(self, demand: BlockDemand, role: int) -> Iterator[tuple[tuple[GpuState, ...], int]]:
        """Yield TP groups with room for a stage of that role, and the layers that go in."""
        for roomy in self._roomy(demand, role):
            for group in combinations(roomy, demand.tp):
                yield tuple(gpu for gpu, _ in group), min(layers for _, layers in group)

    def _place(
        self, taken: pulp.LpVariable, demand: BlockDemand, role: int, group: tuple[GpuState, ...], most: int
    ) -> _Place:
        used = self._variable("x", 1)
        if demand.pp == 1:
            return _Place(role, group, used, demand.num_layers * used)
        layers = self._variable("L", most)
        self._problem += layers <= most * used
        self._problem += layers >= used
        return _Place(role, group, used, pulp.LpAffineExpression(layers))

    def _models(self) -> list[pulp.LpVariable]:
        outs = []
        for one in self._wanted:
            out = self._variable("o", 1)
            outs.append(out)
            self._problem += pulp.lpSum(o.taken for o in self._options if o.model == one.model) + out == 1
        return outs

    def _memory(self) -> None:
        needs: dict[Key, list[pulp.LpAffineExpression]] = {}
        for option in self._options:
            demand = option.choice.demand
            for place in option.places:
                still = demand.fixed_bytes + _extra_bytes(demand, place.role)
                for gpu in place.group:
                    unit = 1 / max(self._room[_key(gpu)], 1)
                    needs.setdefault(_key(gpu), []).append(
                        demand.layer_bytes * unit * place.layers + still * unit * place.used
                    )
        for parts in needs.values():
            self._problem += pulp.lpSum(parts) <= 1

    def _cost(self, option: _Option) -> pulp.LpAffineExpression:
        choice, num_layers = option.choice, option.choice.demand.num_layers
        timed, flat = choice.time_cost / self._scale, choice.cost / self._scale
        factor = pulp.lpSum(
            group_factor(place.group, self._link) / num_layers * place.layers for place in option.places
        )
        return (flat - timed) * option.taken + timed * factor + timed / choice.even_layers * option.excess

    def _read(self, option: _Option) -> Placement:
        demand = option.choice.demand
        used = sorted(
            (place for place in option.places if _is(place.used)),
            key=lambda p: (p.role, p.group[0].node_id, p.group[0].gpu_index),
        )
        stages, first_layer = [], 0
        for index, place in enumerate(used):
            num_layers = round(place.layers.value())
            stages.append(
                StagePlacement(
                    node_id=place.group[0].node_id,
                    device_ids=tuple(gpu.device_id for gpu in place.group),
                    first_layer=first_layer,
                    num_layers=num_layers,
                    bytes_per_gpu=demand.stage_bytes(index, num_layers),
                )
            )
            first_layer += num_layers
        assert first_layer == demand.num_layers, "a layer is placed once"
        return Placement(tuple(stages))


def _key(gpu: GpuState) -> Key:
    return gpu.node_id, gpu.device_id


def _is(variable: pulp.LpVariable) -> bool:
    return bool(variable.varValue is not None and variable.varValue > 0.5)


def _roles(pp: int) -> list[tuple[int, int]]:
    """Return the roles of a pipeline's stages, and how many have each."""
    if pp == 1:
        return [(_FIRST, 1)]
    return [(_FIRST, 1), *([(_MIDDLE, pp - 2)] if pp > 2 else []), (_LAST, 1)]


def _extra_bytes(demand: BlockDemand, role: int) -> int:
    """Return the bytes that a stage of that role holds in addition to its layers and the fixed part."""
    stage = {_FIRST: 0, _MIDDLE: 1, _LAST: demand.pp - 1}[role]
    return demand.stage_bytes(stage, 0) - demand.fixed_bytes


def _by_gpu(places: Iterable[_Place]) -> Mapping[Key, list[_Place]]:
    found: dict[Key, list[_Place]] = {}
    for place in places:
        for gpu in place.group:
            found.setdefault(_key(gpu), []).append(place)
    return found
