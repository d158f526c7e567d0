"""Fit of a configuration into the free memory of a cluster: whether, and on which GPUs. Knows no intents or costs.

A stage is a TP group of tp GPUs of one node and its room is its least free member. ``fit`` finds a placement
exactly when one exists, whatever the policy:

*   Grouping. Sort a node's GPUs by free memory and cut them into groups of tp. If any other grouping has i groups
    with room >= r, then i * tp GPUs have r free, so the i-th sorted group has room >= r too. The sorted groups
    therefore dominate every other grouping, rank by rank; and the pp largest of all nodes dominate every choice.
*   Roles. The layers a stage can hold grow with its room, so the dominating groups can take over the roles of any
    placement that exists. The groups of the first stage (embedding) and of the last (head) are tried out: pp * (pp
    - 1) pairs.

So one pass over the sorted GPUs answers "does any order fit?" (step II). The policy then decides which GPUs are
used (step III), in this order of importance:

1.  the policy's tiers, in order; all GPUs together where no tier alone suffices;
2.  the most even split: the longest stage is as short as the tier's memory allows;
3.  TP groups inside one link group (adjacent GPU indexes), where that costs no evenness: the latency estimates
    assume it;
4.  the policy's preference: the least preferred GPU used is as good as possible, then the second least, and so on.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from fingerprint.errors import ConfigError
from fingerprint.estimates import MemoryEstimate
from placement.load_model import Key
from placement.types import (
    BlockDemand,
    ClusterSnapshot,
    GpuState,
    Placement,
    PlacementPolicy,
    Refusal,
    StagePlacement,
)

__all__ = ["Placer", "capacity", "demand", "fit", "free_bytes", "split_layers"]

GIB = 2**30


def demand(memory: MemoryEstimate) -> BlockDemand:
    """Return the blocks of ``memory`` at the upper end of its interval: every part times ``1 + relative_error``.

    Raises:
        ConfigError: a relative error that is negative or not a number.
    """
    if not (math.isfinite(memory.relative_error) and memory.relative_error >= 0):
        raise ConfigError(f"the memory estimate's relative error must be at least 0, got {memory.relative_error}")
    scale = 1 + memory.relative_error

    def upper(size_bytes: int) -> int:
        return math.ceil(size_bytes * scale)

    return BlockDemand(
        tp=memory.tp,
        pp=memory.pp,
        num_layers=memory.num_layers,
        layer_bytes=upper(memory.layer_weight_bytes + memory.layer_kv_bytes),
        first_stage_bytes=upper(memory.first_stage_bytes),
        last_stage_bytes=upper(memory.last_stage_bytes),
        fixed_bytes=upper(memory.activation_bytes + memory.pp_buffer_bytes + memory.runtime_bytes),
    )


def fit(
    demand: BlockDemand,
    snapshot: ClusterSnapshot,
    policy: PlacementPolicy,
    *,
    link_group_size: int | None = None,
) -> Placement | Refusal:
    """Return where ``demand`` goes on ``snapshot`` under ``policy``, or why it goes nowhere.

    To ask about many demands on one snapshot, build one :class:`Placer`.

    Args:
        link_group_size: GPUs joined by the fast link (``GpuSpec.link_group_size``); None: all of a node are equal.

    Raises:
        ConfigError: a demand or snapshot that contradicts itself.
    """
    return Placer(snapshot, policy, link_group_size=link_group_size).fit(demand)


class _Seat(NamedTuple):
    """A GPU in the policy's order."""

    rank: int
    free_bytes: int
    node: str
    link: tuple[str, int]  # its link group
    gpu: GpuState


_Island = Callable[[_Seat], object]  # a TP group lies within one island

_node: _Island = attrgetter("node")
_link: _Island = attrgetter("link")


class _Seats(NamedTuple):
    """GPUs of a tier that are left, in two orders."""

    order: list[_Seat]  # as the policy prefers
    by_room: list[_Seat]  # most free memory first, and those that are alike as they are preferred

    def without(self, gone: Iterable[_Seat]) -> _Seats:
        order, by_room = [*self.order], [*self.by_room]
        for seat in gone:
            del order[bisect_left(order, seat.rank, key=attrgetter("rank"))]
            del by_room[bisect_left(by_room, _roominess(seat), key=_roominess)]
        return _Seats(order, by_room)


def _roominess(seat: _Seat) -> tuple[int, int]:
    return -seat.free_bytes, seat.rank


class Placer:
    """Placer on one snapshot under one policy, sorted once, for any number of demands."""

    def __init__(
        self, snapshot: ClusterSnapshot, policy: PlacementPolicy, *, link_group_size: int | None = None
    ) -> None:
        if link_group_size is not None and link_group_size < 1:
            raise ConfigError(f"link_group_size must be at least 1, got {link_group_size}")
        _check(snapshot)
        self._link_group_size = link_group_size or 1
        tiers = policy.tiers(snapshot.gpus)
        everything = [gpu for tier in tiers for gpu in tier]
        if len(everything) < len(snapshot.gpus):
            known = {(gpu.node_id, gpu.device_id) for gpu in everything}
            rest = (gpu for gpu in snapshot.gpus if (gpu.node_id, gpu.device_id) not in known)
            everything += sorted(rest, key=lambda g: (g.node_id, g.gpu_index))
        is_one = len(tiers) == 1 and len(tiers[0]) == len(everything)
        self._tiers = [*tiers] if is_one else [*tiers, tuple(everything)]
        self._seated: dict[int, _Seats] = {}  # by tier: the last one is seldom asked
        self._named: dict[int, dict[Key, _Seat]] = {}  # as well, once any are gone; shared with what is left
        self._gone: tuple[Key, ...] = ()

    def without(self, placement: Placement) -> Placer:
        """Return the same without the GPUs of ``placement``, which it gave: nothing is sorted again."""
        left = copy(self)
        keys = tuple((stage.node_id, device) for stage in placement.stages for device in stage.device_ids)
        left._gone = self._gone + keys
        left._seated = {tier: seats.without(self._among(tier, keys)) for tier, seats in self._seated.items()}
        return left

    def _among(self, tier: int, keys: tuple[Key, ...]) -> list[_Seat]:
        """Return the seats of a seated tier by their keys; first called while all of the tier are there."""
        if tier not in self._named:
            self._named[tier] = {(seat.node, seat.gpu.device_id): seat for seat in self._seated[tier].order}
        return [self._named[tier][key] for key in keys if key in self._named[tier]]

    def _seats(self, tier: int) -> _Seats:
        if tier not in self._seated:
            self._seated[tier] = seats = self._seat(self._tiers[tier])
            if self._gone:
                self._seated[tier] = seats.without(self._among(tier, self._gone))
        return self._seated[tier]

    def _seat(self, gpus: tuple[GpuState, ...]) -> _Seats:
        size = self._link_group_size
        order = [
            _Seat(
                rank,
                free_bytes(gpu),
                gpu.node_id,
                (gpu.node_id, gpu.gpu_index // size),
                gpu,
            )
            for rank, gpu in enumerate(gpus)
        ]
        return _Seats(order, _by_room(order))

    def fit(self, demand: BlockDemand) -> Placement | Refusal:
        """Return where ``demand`` goes, or why it goes nowhere (the module's docstring has the preferences)."""
        if min(demand.tp, demand.pp, demand.num_layers) < 1 or min(_sizes(demand)) < 0:
            raise ConfigError(f"a demand has at least one layer, one GPU and no negative size, got {demand}")
        if demand.pp > demand.num_layers:
            return Refusal(
                f"pp={demand.pp} needs at least {demand.pp} layers, the model has {demand.num_layers}", 0
            )
        for tier in range(len(self._tiers)):
            chosen = self._in_tier(self._seats(tier), demand)
            if chosen is not None:
                return chosen
        everything = self._seats(len(self._tiers) - 1)
        kind = next((seat.gpu.kind for seat in everything.by_room), "GPU")
        return _refusal(demand, _top_rooms(everything.by_room, _node, demand), kind)

    def _in_tier(self, seats: _Seats, demand: BlockDemand) -> Placement | None:
        order, by_room = seats
        rooms = _top_rooms(by_room, _node, demand)
        longest = _shortest_longest_stage(rooms, demand)
        if longest is None:
            return None
        island = _node
        if 1 < demand.tp <= self._link_group_size and _holds(_top_rooms(by_room, _link, demand), demand, longest):
            island = _link
        return _arrange(_select(order, island, demand, longest), island, demand, longest)


def _check(snapshot: ClusterSnapshot) -> None:
    """Check the snapshot.

    Raises:
        ConfigError: a device listed twice, or a load that is not a fraction.
    """
    seen: set[tuple[str, str]] = set()
    for gpu in snapshot.gpus:
        if (gpu.node_id, gpu.device_id) in seen:
            raise ConfigError(f"device {gpu.device_id} is listed twice in the cluster snapshot")
        seen.add((gpu.node_id, gpu.device_id))
        if not 0 <= gpu.load_fraction <= 1:
            raise ConfigError(f"device {gpu.device_id} has a load of {gpu.load_fraction}, not between 0 and 1")


def free_bytes(gpu: GpuState) -> int:
    """Return the free bytes: never more than the GPU has nor less than nothing, whatever was reported."""
    return max(0, min(gpu.free_bytes, gpu.total_bytes))


def _sizes(demand: BlockDemand) -> tuple[int, int, int, int]:
    return demand.layer_bytes, demand.first_stage_bytes, demand.last_stage_bytes, demand.fixed_bytes


def _top_rooms(by_room: Iterable[_Seat], island: _Island, demand: BlockDemand) -> list[int]:
    """Return rooms of the (at most) pp roomiest groups, largest first."""
    waiting: dict[object, int] = {}
    rooms: list[int] = []
    for seat in by_room:
        key = island(seat)
        members = waiting.get(key, 0) + 1
        if members < demand.tp:
            waiting[key] = members
            continue
        waiting[key] = 0
        rooms.append(seat.free_bytes)
        if len(rooms) == demand.pp:
            break
    return rooms


def capacity(room_bytes: int, extra_bytes: int, demand: BlockDemand, longest: int) -> int:
    """Return how many layers fit in a room after the fixed part and ``extra_bytes``; below 1: not even one."""
    spare = room_bytes - demand.fixed_bytes - extra_bytes
    if demand.layer_bytes == 0:
        return longest if spare >= 0 else 0
    return min(longest, spare // demand.layer_bytes)


def _most_layers(rooms: Sequence[int], demand: BlockDemand, longest: int) -> int:
    """Return the most layers that ``rooms`` hold, each from one to ``longest``; 0 if some room holds none."""
    if len(rooms) < demand.pp:
        return 0
    first_extra, last_extra = demand.first_stage_bytes, demand.last_stage_bytes
    if demand.pp == 1:
        return max(0, capacity(rooms[0], first_extra + last_extra, demand, longest))
    middle = [capacity(room, 0, demand, longest) for room in rooms]
    if min(middle) < 1:
        return 0
    first = [capacity(room, first_extra, demand, longest) for room in rooms]
    last = [capacity(room, last_extra, demand, longest) for room in rooms]
    total = sum(middle)
    return max(
        (
            total - middle[f] - middle[s] + first[f] + last[s]
            for f in range(demand.pp)
            for s in range(demand.pp)
            if f != s and first[f] >= 1 and last[s] >= 1
        ),
        default=0,
    )


def _holds(rooms: Sequence[int], demand: BlockDemand, longest: int) -> bool:
    return _most_layers(rooms, demand, longest) >= demand.num_layers


def _shortest_longest_stage(rooms: Sequence[int], demand: BlockDemand) -> int | None:
    """Return the smallest bound on a stage's layers under which ``rooms`` still hold the model; None: they never
    do.
    """
    even, loosest = -(-demand.num_layers // demand.pp), demand.num_layers - demand.pp + 1
    if _holds(rooms, demand, even):
        return even
    if not _holds(rooms, demand, loosest):
        return None
    return _first_true(even + 1, loosest, lambda longest: _holds(rooms, demand, longest))


def _first_true(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """Return the smallest value in [low, high] for which the monotone ``holds`` is true; it is for ``high``."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _by_room(order: list[_Seat]) -> list[_Seat]:
    """Return the seats by free memory, most first, those that are alike in the given order."""
    return sorted(order, key=attrgetter("free_bytes"), reverse=True)


def _select(order: list[_Seat], island: _Island, demand: BlockDemand, longest: int) -> list[_Seat]:
    """Return the tp * pp GPUs to use.

    The shortest prefix of ``order`` that fits ends in a GPU that is needed; keep it, and shorten the prefix of
    what is left in the same way. For a single stage this gives the first tp GPUs with room of the island that
    first has so many.
    """
    if demand.pp == 1:
        need_bytes, roomy = demand.stage_bytes(0, demand.num_layers), dict[object, list[_Seat]]()
        for seat in order:
            if seat.free_bytes >= need_bytes:
                group = roomy.setdefault(island(seat), [])
                group.append(seat)
                if len(group) == demand.tp:
                    return group
    kept: list[_Seat] = []
    prefix, wanted = order, demand.tp * demand.pp

    def holds(length: int) -> bool:
        return _holds(_top_rooms(_by_room(prefix[:length] + kept), island, demand), demand, longest)

    while len(prefix) + len(kept) > wanted and len(kept) < wanted:
        length = len(prefix)
        if not kept or holds(length - 1):  # mostly a group's GPUs are neighbours, and the last one is needed too
            low = high = wanted - len(kept)
            while high < length and not holds(high):  # mostly the first few do
                low, high = high + 1, 2 * high
            length = _first_true(low, min(high, length), holds)
        prefix, kept = prefix[: length - 1], [prefix[length - 1], *kept]
    return prefix[: wanted - len(kept)] + kept


def _arrange(seats: list[_Seat], island: _Island, demand: BlockDemand, longest: int) -> Placement:
    """Make groups from the chosen GPUs, their order as stages, and the layers of each."""
    neighbours = _groups(seats, island, demand.tp, key=lambda s: (s.gpu.gpu_index, s.gpu.device_id))
    if _holds(sorted((_room(group) for group in neighbours), reverse=True), demand, longest):
        groups = neighbours
    else:
        groups = _groups(seats, island, demand.tp, key=lambda s: (-s.free_bytes, s.rank))
    groups.sort(key=lambda group: (group[0].node, min(seat.gpu.gpu_index for seat in group)))
    best: tuple[tuple[object, ...], list[list[_Seat]], tuple[int, ...]] | None = None
    for first, last in _role_pairs(len(groups)):
        middle = [group for i, group in enumerate(groups) if i not in (first, last)]
        stages = [groups[first], *middle, groups[last]] if len(groups) > 1 else groups
        layers = split_layers(demand.num_layers, _stage_capacities([_room(g) for g in stages], demand, longest))
        if layers is None:
            continue
        crossings = sum(a[0].node != b[0].node for a, b in pairwise(stages))
        key = (sorted(layers, reverse=True), crossings)
        if best is None or key < best[0]:
            best = (key, stages, layers)
        if max(layers) - min(layers) <= 1 and first == 0:
            break  # as even as can be, in the order with the fewest node crossings
    assert best is not None, "the chosen GPUs hold the model under some order of stages"
    return _placement(best[1], best[2], demand)


def _groups(
    seats: list[_Seat], island: _Island, tp: int, *, key: Callable[[_Seat], tuple[int | str, ...]]
) -> list[list[_Seat]]:
    members: dict[object, list[_Seat]] = {}
    for seat in seats:
        members.setdefault(island(seat), []).append(seat)
    groups = []
    for among in members.values():
        among.sort(key=key)
        groups += [among[i : i + tp] for i in range(0, len(among), tp)]
    return groups


def _room(group: list[_Seat]) -> int:
    return min(seat.free_bytes for seat in group)


def _role_pairs(pp: int) -> list[tuple[int, int]]:
    """Return (first, last) in order of preference: the natural order of the groups before any other."""
    if pp == 1:
        return [(0, 0)]
    pairs = [(f, s) for f in range(pp) for s in range(pp) if f != s]
    return sorted(pairs, key=lambda pair: (pair != (0, pp - 1), pair[0], pp - pair[1]))


def _stage_capacities(rooms: Sequence[int], demand: BlockDemand, longest: int) -> list[int]:
    return [
        capacity(room, demand.stage_bytes(stage, 0) - demand.fixed_bytes, demand, longest)
        for stage, room in enumerate(rooms)
    ]


def split_layers(num_layers: int, capacities: Sequence[int]) -> tuple[int, ...] | None:
    """Return the most even split of ``num_layers`` into stages of at least one layer and at most ``capacities``
    each.

    Every stage is filled to one common level or to its capacity; what is left over goes to the first stages, as in
    ``fingerprint.config.even_split``, which this equals when no capacity binds. None when they do not go in.
    """
    if min(capacities) < 1 or sum(capacities) < num_layers or num_layers < len(capacities):
        return None
    level = _first_true(1, num_layers, lambda bound: sum(min(c, bound) for c in capacities) >= num_layers) - 1
    split = [min(capacity, level) for capacity in capacities]
    left = num_layers - sum(split)
    for stage, capacity in enumerate(capacities):
        if left and capacity > level:
            split[stage] += 1
            left -= 1
    return tuple(split)


def _placement(stages: list[list[_Seat]], layers: tuple[int, ...], demand: BlockDemand) -> Placement:
    placed, first_layer = [], 0
    for stage, (group, num_layers) in enumerate(zip(stages, layers, strict=True)):
        placed.append(
            StagePlacement(
                node_id=group[0].node,
                device_ids=tuple(seat.gpu.device_id for seat in sorted(group, key=lambda s: s.gpu.gpu_index)),
                first_layer=first_layer,
                num_layers=num_layers,
                bytes_per_gpu=demand.stage_bytes(stage, num_layers),
            )
        )
        first_layer += num_layers
    return Placement(tuple(placed))


def _refusal(demand: BlockDemand, rooms: list[int], kind: str) -> Refusal:
    """Return the refusal with both numbers, and the smallest equal addition of memory per GPU that suffices."""
    missing = demand.pp - len(rooms)
    padded = rooms + [0] * missing  # a further GPU brings what it has: it starts at nothing
    loosest = demand.num_layers - demand.pp + 1
    most = _largest_even_stage(demand)
    shortfall = _first_true(0, most, lambda extra: _holds([room + extra for room in padded], demand, loosest))
    degrees = f"tp={demand.tp},pp={demand.pp}"
    if missing:
        have = len(rooms) * demand.tp
        reason = (
            f"{degrees} needs {demand.tp * demand.pp} {kind}s in groups of {demand.tp} on one node, "
            f"there are {have} in {len(rooms)} such groups"
        )
    elif demand.pp == 1:
        what = f"one {kind}" if demand.tp == 1 else f"each of {demand.tp} {kind}s of one node"
        reason = (
            f"{degrees} needs {demand.stage_bytes(0, demand.num_layers) / GIB:.2f} GiB free on {what}, "
            f"the best offer is {rooms[0] / GIB:.2f} GiB"
        )
    else:
        held = _most_layers(rooms, demand, loosest)
        reason = (
            f"{degrees} needs up to {most / GIB:.2f} GiB free on each of {demand.tp * demand.pp} {kind}s; the "
            f"roomiest have {rooms[-1] / GIB:.2f} to {rooms[0] / GIB:.2f} GiB and hold {held} of "
            f"{demand.num_layers} layers"
        )
    return Refusal(reason, shortfall, missing * demand.tp, kind)


def _largest_even_stage(demand: BlockDemand) -> int:
    """Return the bytes per GPU of the fullest stage of the even split: with this much free everywhere, it fits."""
    longest = -(-demand.num_layers // demand.pp)
    return max(demand.stage_bytes(stage, longest) for stage in range(demand.pp))
