"""Exact placement: equal to brute force, never worse than the heuristics, honest about what it did not prove."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement import ilp_placer
from placement.fit import fit
from placement.ilp_placer import ExactPlacer, Layout, place_together
from placement.multi_model import Choice, Wanted, beside, one_by_one
from placement.policies import Hybrid, LeastLoaded, Packing
from placement.types import BlockDemand, ClusterSnapshot, GpuState, Placement
from tests.golden_words import Golden
from tests.placement.clusters import (
    blocks,
    brute_force_fits,
    check_placement,
    cluster,
    demands,
    gpu,
    permuted,
    snapshots,
)

# A solve takes 5 to 50 ms: fewer examples than elsewhere.
law = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
few = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


# The reference: every arrangement of every choice, priced by hand.

Arrangement = tuple[tuple[tuple[GpuState, ...], int], ...]  # each stage's GPUs and layers


def splits(num_layers: int, pp: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, num_layers), pp - 1):
        yield tuple(b - a for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True))


def arrangements(demand: BlockDemand, gpus: tuple[GpuState, ...]) -> Iterator[Arrangement]:
    groups = [g for g in combinations(gpus, demand.tp) if len({one.node_id for one in g}) == 1]
    for stages in product(groups, repeat=demand.pp):
        ids = [one.device_id for group in stages for one in group]
        if len(set(ids)) == len(ids):
            for split in splits(demand.num_layers, demand.pp):
                yield tuple(zip(stages, split, strict=True))


def price(choice: Choice, arrangement: Arrangement, link: int) -> float:
    num_layers, pp, factor = choice.demand.num_layers, choice.demand.pp, 0.0
    for group, layers in arrangement:
        load = max(one.load_fraction for one in group)
        slow = 1 / (1 - load) if load <= 0.95 else 20 + (load - 0.95) * 400
        if len(group) <= link and len({one.gpu_index // link for one in group}) > 1:
            slow += 1
        factor += slow * layers / num_layers
    even = -(-num_layers // pp)
    factor += (max(layers for _, layers in arrangement) - even) / even
    return choice.cost * factor if choice.timed else choice.cost * (1 + 0.001 * (factor - 1))


def cheapest(wanted: list[Wanted], snapshot: ClusterSnapshot, link: int) -> tuple[int, float]:
    """(models placed, cost): as many as go together, then at least cost."""

    def search(left: list[Wanted], free: dict[str, int]) -> tuple[int, float]:
        if not left:
            return 0, 0.0
        best = search(left[1:], free)
        for choice in left[0].choices:
            for arrangement in arrangements(choice.demand, snapshot.gpus):
                after = dict(free)
                for stage, (group, layers) in enumerate(arrangement):
                    for one in group:
                        after[one.device_id] -= choice.demand.stage_bytes(stage, layers)
                if min(after.values()) >= 0:
                    placed, cost = search(left[1:], after)
                    found = placed + 1, cost + price(choice, arrangement, link)
                    best = min(best, found, key=lambda one: (-one[0], one[1]))
        return best

    free = {one.device_id: min(one.free_bytes, one.total_bytes) for one in snapshot.gpus}
    return search(wanted, free)


@st.composite
def tiny_clusters(draw: st.DrawFn) -> ClusterSnapshot:
    return ClusterSnapshot(
        tuple(
            gpu(i, draw(st.integers(0, 30)), node=draw(st.sampled_from("ab")), load=draw(st.sampled_from(LOADS)))
            for i in range(draw(st.integers(1, 3)))
        )
    )


LOADS = [0.0, 0.0, 0.25, 0.5, 0.9, 0.97]


@st.composite
def wishes(draw: st.DrawFn, most_models: int = 2) -> list[Wanted]:
    wanted = []
    for model in range(draw(st.integers(1, most_models))):
        num_layers = draw(st.integers(2, 4))
        timed = draw(st.booleans())
        choices = tuple(
            Choice(
                label=str(i),
                demand=replace(draw(demands()), tp=tp, pp=pp, num_layers=num_layers),
                cost=draw(st.sampled_from([0.5, 1.0, 1.25, 2.0, 3.0])),
                timed=timed,
            )
            for i, (tp, pp) in enumerate(
                draw(st.lists(st.sampled_from([(1, 1), (1, 2), (2, 1), (1, 3)]), min_size=1, max_size=3))
            )
            if pp <= num_layers
        )
        if choices:
            wanted.append(Wanted(model=f"m{model}", choices=choices))
    return wanted


def check_layout(layout: Layout, wanted: list[Wanted], snapshot: ClusterSnapshot) -> None:
    """Each model placed or left out with a reason, as one of its choices, in memory that is there."""
    names = [one.model for one in (*layout.placed, *layout.left_out)]
    assert sorted(names) == sorted(one.model for one in wanted)
    free = snapshot
    for one in layout.placed:
        assert one.choice in next(w.choices for w in wanted if w.model == one.model)
        check_placement(one.placement, one.choice.demand, free)
        free = beside(free, [one.placement])
    assert all(out.refusal.reason for out in layout.left_out)


@law
@given(snapshot=tiny_clusters(), wanted=wishes(), link=st.sampled_from([1, 2]))
def test_it_is_what_trying_everything_finds(snapshot: ClusterSnapshot, wanted: list[Wanted], link: int) -> None:
    layout = place_together(wanted, snapshot, link_group_size=link)
    check_layout(layout, wanted, snapshot)
    models, cost = cheapest(wanted, snapshot, link)
    assert layout.proven
    assert (len(layout.placed), layout.cost) == (models, pytest.approx(cost, rel=1e-6))


@few
@given(snapshot=snapshots(), wanted=wishes(most_models=3), link=st.sampled_from([None, 2]))
def test_it_is_never_worse_than_one_by_one(
    snapshot: ClusterSnapshot, wanted: list[Wanted], link: int | None
) -> None:
    layout = place_together(wanted, snapshot, link_group_size=link)
    check_layout(layout, wanted, snapshot)
    assert layout.proven
    for policy in (LeastLoaded(), Packing(), Hybrid()):
        for order in (wanted, wanted[::-1]):
            placed, _ = one_by_one(order, snapshot, policy, link_group_size=link)
            assert len(placed) <= len(layout.placed)
            if len(placed) == len(layout.placed):
                assert layout.cost <= sum(one.cost for one in placed) * (1 + 1e-6)


@few
@given(snapshot=snapshots(), wanted=wishes(), data=st.data())
def test_the_order_of_gpus_and_models_never_matters(
    snapshot: ClusterSnapshot, wanted: list[Wanted], data: st.DataObject
) -> None:
    other = place_together(data.draw(st.permutations(wanted)), permuted(data, snapshot))
    assert other.placed == place_together(wanted, snapshot).placed


@few
@given(demand=demands(), snapshot=snapshots(), link=st.sampled_from([None, 1, 2]))
def test_as_a_policy_it_places_exactly_when_some_placement_exists(
    demand: BlockDemand, snapshot: ClusterSnapshot, link: int | None
) -> None:
    answer = ExactPlacer(snapshot, link_group_size=link).fit(demand)
    if brute_force_fits(demand, snapshot):
        assert isinstance(answer, Placement)
        check_placement(answer, demand, snapshot)
    else:
        assert answer == fit(demand, snapshot, LeastLoaded(), link_group_size=link)


def one(model: str, *choices: tuple[BlockDemand, float]) -> Wanted:
    return Wanted(
        model=model, choices=tuple(Choice(label=str(i), demand=d, cost=c) for i, (d, c) in enumerate(choices))
    )


def test_the_first_model_gives_way_where_the_second_gains_more() -> None:
    """Alone, "a" takes both GPUs; then "b" finds no room. Together "a" takes one, though that costs it more."""
    a = one("a", (blocks(2, pp=2, layer=60), 1.0), (blocks(2, layer=45), 1.5))
    b = one("b", (blocks(1, layer=50), 1.0))
    two = cluster(gpu(0, 100), gpu(1, 100))
    placed, left_out = one_by_one([a, b], two, LeastLoaded())
    assert ([p.model for p in placed], [out.model for out in left_out]) == (["a"], ["b"])
    layout = place_together([a, b], two)
    assert [(p.model, p.choice.label) for p in layout.placed] == [("a", "1"), ("b", "0")]
    assert (layout.cost, layout.left_out, layout.proven) == (pytest.approx(2.5), (), True)


def test_layers_move_off_a_loaded_gpu_only_where_that_pays() -> None:
    """A layer moves off the loaded one of two GPUs, each with two of four layers, only where that pays.

    One moved makes the longest stage half as long again (0.5) and saves a quarter of the loaded one's extra time,
    1 / (1 - r) - 1.
    """
    for load, layers in ((0.5, [2, 2]), (0.7, [1, 3])):
        answer = ExactPlacer(cluster(gpu(0, 90), gpu(1, 90, load=load))).fit(blocks(4, pp=2))
        assert isinstance(answer, Placement)
        assert sorted(answer.layers_per_stage) == layers


def test_the_demands_of_one_plan_share_the_solvers_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for hundreds of places, each of which might take all of it."""
    limits: list[float] = []

    def slow(*wanted: object, time_limit_s: float, **options: object) -> Layout:
        limits.append(time_limit_s)
        return replace(place_together(*wanted, time_limit_s=time_limit_s, **options), solver_s=4.0)  # type: ignore[arg-type]

    monkeypatch.setattr(ilp_placer, "place_together", slow)
    placer = ExactPlacer(cluster(gpu(0, 90), gpu(1, 90, load=0.7)), time_limit_s=10.0)
    answers = [placer.fit(blocks(4, pp=2)) for _ in range(5)]
    assert limits == [10.0, 6.0, 2.0]
    layers = [sorted(a.layers_per_stage) for a in answers if isinstance(a, Placement)]
    assert layers == [[1, 3]] * 3 + [[2, 2]] * 2  # then where the heuristic puts it


def test_a_tp_group_leaves_its_link_group_only_where_the_load_there_costs_more() -> None:
    """GPUs 1 and 2 are idle, their partners loaded: leaving the links counts as the group's time once more."""
    for load, devices in ((0.45, ("a0", "a1")), (0.55, ("a1", "a2"))):
        four = cluster(gpu(0, 90, load=load), gpu(1, 90), gpu(2, 90), gpu(3, 90, load=0.9))
        answer = ExactPlacer(four, link_group_size=2).fit(blocks(4, tp=2))
        assert isinstance(answer, Placement)
        assert answer.device_ids == devices


def test_who_is_left_out_and_why(golden: Golden) -> None:
    two = cluster(gpu(0, 100), gpu(1, 60))
    small, large, huge = (
        one("s", (blocks(1, layer=60), 1.0)),
        one("l", (blocks(1, layer=90), 1.0)),
        blocks(1, layer=500),
    )
    layout = place_together([small, large, one("h", (huge, 1.0)), one("t", (blocks(1, layer=55), 9.0))], two)
    assert [p.model for p in layout.placed] == ["l", "s"]
    assert [out.model for out in layout.left_out] == ["h", "t"]
    alone, together = (out.refusal for out in layout.left_out)
    assert alone == fit(huge, two, LeastLoaded())
    golden("planning", together.reason)
    assert together.shortfall_bytes == 45  # 10 are left
    assert layout.proven


def test_nothing_to_place_and_nowhere_to_place_it() -> None:
    assert place_together([], cluster(gpu(0, 9))).placed == ()
    nowhere = place_together([one("a", (blocks(1), 1.0))], ClusterSnapshot(()))
    assert (nowhere.placed, nowhere.proven) == ((), True)
    assert "there are 0" in nowhere.left_out[0].refusal.reason


def test_at_the_time_limit_the_best_found_is_told_with_its_bound() -> None:
    """In no time the solver finds nothing: the heuristics' layout stays, and what no place goes below."""
    eight = cluster(*(gpu(i, 900 + 13 * i, load=0.07 * i) for i in range(8)))
    wanted = [
        one(
            f"m{m:02d}",
            *(
                (blocks(40, tp=tp, pp=pp, layer=(9 + m % 5) // tp, fixed=20), 1.0 + 0.1 * m + 0.3 / (tp * pp))
                for tp in (1, 2)
                for pp in (1, 2, 3)
            ),
        )
        for m in range(4)
    ]
    layout = place_together(wanted, eight, time_limit_s=1e-9)
    check_layout(layout, wanted, eight)
    assert (len(layout.placed), layout.most_models) == (4, 4)
    assert 0 < layout.bound < layout.cost
    assert not layout.proven


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        pytest.param([one("a", (blocks(1), 1.0))] * 2, {}, id="twice"),
        pytest.param([], {"time_limit_s": 0.0}, id="no-time"),
        pytest.param([], {"time_limit_s": float("nan")}, id="nan-time"),
        pytest.param([one("a", (blocks(80, tp=8, pp=4, layer=1), 1.0))], {}, id="too-many"),
    ],
)
def test_what_cannot_be_asked(wanted: list[Wanted], options: dict[str, float], golden: Golden) -> None:
    twenty = cluster(*(gpu(i, 900, load=0.01 * i) for i in range(40)))
    with golden.raises("planning", ConfigError):
        place_together(wanted, twenty, **options)


@pytest.mark.parametrize("cost", [0.0, -1.0, float("nan"), float("inf")])
def test_a_cost_is_a_positive_number(cost: float) -> None:
    with pytest.raises(ConfigError, match="positive and finite"):
        Choice(label="a", demand=blocks(1), cost=cost)
    with pytest.raises(ConfigError, match="no configuration"):
        Wanted(model="a", choices=())
