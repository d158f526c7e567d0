"""Several models on one cluster: what each may become, what a place costs under the load that is there, and the
plain way to place them, one after the other.

What a place costs is the intent's objective of the configuration times how much longer its requests take there:

*   a stage on GPUs with the load r takes ``1 / (1 - r)`` times as long (``load_model``); stages follow one
    another, a TP group is as slow as its slowest GPU;
*   a TP group that leaves its link group, where the estimate assumed that it does not, counts as twice as long
    (what it costs is not predicted; this makes it rare);
*   a split whose longest stage has more layers than an even split's counts as that much longer: a full pipeline
    is as slow as its longest stage.

Models that are placed together do not slow one another in it: their load is not known yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fingerprint.errors import ConfigError
from placement.fit import Placer
from placement.load_model import Key, Tenant, shares, slowdown, stretch
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement, PlacementPolicy, Refusal

__all__ = [
    "LOOKED_AT",
    "Choice",
    "LeftOut",
    "Placed",
    "Wanted",
    "beside",
    "by_key",
    "cost_of",
    "group_factor",
    "largest_first",
    "least_cost",
    "one_by_one",
]

_ACROSS_LINKS = 1.0  # of the stage's time, on top
# An objective without time in it (bytes) looks at time only to break ties.
_TIE = 1e-3

# Places times GPUs that a choice by load may look at: a place on 1,000 GPUs takes as long as 100 on ten.
LOOKED_AT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Configuration of a model with its demand and cost.

    Raises:
        ConfigError: a cost that is not positive and finite.
    """

    label: str
    demand: BlockDemand
    cost: float  # the intent's objective on idle GPUs, lower is better; of a throughput, the inverse
    timed: bool = True  # whether it grows with the time that requests take

    def __post_init__(self) -> None:
        if not (math.isfinite(self.cost) and self.cost > 0):
            raise ConfigError(f"the cost of {self.label} must be positive and finite, got {self.cost}")

    @property
    def even_layers(self) -> int:
        """Layers of the longest stage of an even split."""
        return -(-self.demand.num_layers // self.demand.pp)

    @property
    def time_cost(self) -> float:
        """Increase of the cost when the time doubles."""
        return self.cost if self.timed else self.cost * _TIE


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A model that is to be placed, as one of its choices.

    Raises:
        ConfigError: no choice.
    """

    model: str
    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        if not self.choices:
            raise ConfigError(f"{self.model} has no configuration to choose from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A model, as what, where, and what that costs (module docstring)."""

    model: str
    choice: Choice
    placement: Placement
    cost: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """A model that found no place, and why."""

    model: str
    refusal: Refusal


def group_factor(gpus: Sequence[GpuState], link_group_size: int) -> float:
    """Return how many times as long a stage takes on this TP group as on idle GPUs of one link group."""
    return stretch(max(gpu.load_fraction for gpu in gpus)) + _across(gpus, link_group_size)


def _across(gpus: Sequence[GpuState], link_group_size: int) -> float:
    leaves = len({gpu.gpu_index // link_group_size for gpu in gpus}) > 1
    return _ACROSS_LINKS if leaves and len(gpus) <= link_group_size else 0.0


def cost_of(
    choice: Choice, placement: Placement, gpus: Mapping[Key, GpuState], *, link_group_size: int | None = None
) -> float:
    """Return the module docstring's cost. ``gpus``: at least those of the placement."""
    link = link_group_size or 1
    loads = {key: gpu.load_fraction for key, gpu in gpus.items()}
    tenant = Tenant(1.0, shares(placement))
    factor = slowdown(tenant, loads) + sum(
        share * _across([gpus[key] for key in keys], link) for share, keys in tenant.stages
    )
    uneven = max(placement.layers_per_stage) / choice.even_layers - 1
    return choice.cost + choice.time_cost * (factor - 1 + uneven)


def least_cost(choice: Choice, gpus: Iterable[GpuState]) -> float:
    """Return a lower bound on the cost of ``choice`` in any place, whatever memory is free."""
    nodes: dict[str, list[float]] = {}
    for gpu in gpus:
        nodes.setdefault(gpu.node_id, []).append(gpu.load_fraction)
    tp = choice.demand.tp
    coolest = min((sorted(loads)[tp - 1] for loads in nodes.values() if len(loads) >= tp), default=0.0)
    return choice.cost + choice.time_cost * (stretch(coolest) - 1)


def by_key(snapshot: ClusterSnapshot) -> dict[Key, GpuState]:
    return {(gpu.node_id, gpu.device_id): gpu for gpu in snapshot.gpus}


def beside(snapshot: ClusterSnapshot, placements: Sequence[Placement]) -> ClusterSnapshot:
    """Return what is free once ``placements`` hold their memory; below zero where they hold too much."""
    gpus = by_key(snapshot)
    for placement in placements:
        for stage in placement.stages:
            for device in stage.device_ids:
                gpu = gpus[stage.node_id, device]
                gpus[stage.node_id, device] = replace(gpu, free_bytes=gpu.free_bytes - stage.bytes_per_gpu)
    return ClusterSnapshot(tuple(gpus.values()), snapshot.deployments)


def largest_first(wanted: Sequence[Wanted]) -> list[Wanted]:
    """Sort by the memory of the smallest choice, largest first: a model with fewer places chooses earlier."""
    return sorted(wanted, key=lambda one: (-min(_total_bytes(c.demand) for c in one.choices), one.model))


def _total_bytes(demand: BlockDemand) -> int:
    layers, ends = demand.num_layers * demand.layer_bytes, demand.first_stage_bytes + demand.last_stage_bytes
    return demand.tp * (layers + ends + demand.pp * demand.fixed_bytes)


def one_by_one(
    wanted: Sequence[Wanted],
    snapshot: ClusterSnapshot,
    policy: PlacementPolicy,
    *,
    link_group_size: int | None = None,
    weigh_load: bool = False,
) -> tuple[tuple[Placed, ...], tuple[LeftOut, ...]]:
    """Place models in their order, each where ``policy`` puts it, given those before it.

    Args:
        weigh_load: take the choice that costs least where it would be placed, of as many as ``LOOKED_AT`` allows;
            else, as a plan does, the first that fits in the order of their costs on idle GPUs.
    """
    placed: list[Placed] = []
    left_out: list[LeftOut] = []
    gpus = by_key(snapshot)
    for one in wanted:
        free = beside(snapshot, [p.placement for p in placed])
        found = _place(
            one, Placer(free, policy, link_group_size=link_group_size), gpus, link_group_size, weigh_load
        )
        if isinstance(found, Placed):
            placed.append(found)
        else:
            left_out.append(LeftOut(model=one.model, refusal=found))
    return tuple(placed), tuple(left_out)


def _place(
    one: Wanted, placer: Placer, gpus: Mapping[Key, GpuState], link_group_size: int | None, weigh_load: bool
) -> Placed | Refusal:
    best: Placed | None = None
    refusals: list[Refusal] = []
    looks = max(1, LOOKED_AT // max(len(gpus), 1)) if weigh_load else 1
    for choice in sorted(one.choices, key=lambda c: (c.cost, c.demand.tp * c.demand.pp, c.label)):
        if best is not None and (looks == 0 or choice.cost >= best.cost):
            break  # load makes nothing cheaper
        answer = placer.fit(choice.demand)
        if isinstance(answer, Refusal):
            refusals.append(answer)
            continue
        looks -= 1
        cost = cost_of(choice, answer, gpus, link_group_size=link_group_size)
        if best is None or cost < best.cost:
            best = Placed(model=one.model, choice=choice, placement=answer, cost=cost)
    return best or min(refusals, key=lambda refusal: (refusal.missing_gpus, refusal.shortfall_bytes))
