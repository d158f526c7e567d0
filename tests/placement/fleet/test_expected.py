"""Fleets that more deployments are expected in, loads known in part, and the promises of cheap plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel
from placement.fleet.load import given_rates, loads_of, prior
from placement.fleet.memory import kv_room
from placement.fleet.objective import Judged, judge_of
from placement.fleet.performance import forecast
from placement.fleet.search import FleetChoice, choose
from placement.fleet.starts import rule_plan
from placement.fleet.types import Fleet, FleetDeployment, FleetGoal, FleetGpu, FleetPlan, FleetReplica
from tests.golden_words import Golden
from tests.placement.fleet.fleets import GIB, fleet, gpus, option

MEAN_FACTOR = 1.0 * 0.5 + 1.6 * 0.3 + 2.5 * 0.2  # of a rate that is known, over its cases
EPSILON = 1e-9


def in_turn(
    options: tuple[ServiceModel, ...],
    on: tuple[FleetGpu, ...],
    expected: int,
    goal: FleetGoal,
    most_replicas: int | None = 1,
) -> Iterator[FleetChoice]:
    """Yield the choice for each deployment of ``expected`` that are alike, the earlier ones running."""
    placed: list[tuple[FleetReplica, ...]] = []
    for number in range(expected):
        new = FleetDeployment(name=f"m{number}", options=options, most_replicas=most_replicas)
        old = tuple(
            FleetDeployment(
                name=f"m{row}",
                options=options,
                fixed=tuple(replace(one, deployment=row + 1) for one in fixed),
                most_replicas=len(fixed),
            )
            for row, fixed in enumerate(placed)
        )
        one = Fleet((new, *old), on, expected=expected)
        choice = choose(one, goal, most_judgements=300)
        yield choice
        room = choice.chosen.room.kv_tokens
        rows = [row for row, replica in enumerate(choice.chosen.plan.replicas) if replica.deployment == 0]
        own = tuple(replace(choice.chosen.plan.replicas[row], kv_tokens=room[row]) for row in rows)
        taken = [0] * len(on)
        for replica in own:
            for gpu in replica.gpus:
                taken[gpu] += options[replica.option].bytes_per_gpu(replica.kv_tokens or 0)
        left = [gpu.usable_bytes - size for gpu, size in zip(on, taken, strict=True)]
        assert min(left) >= -expected, "memory is never promised twice, to the byte"
        on = tuple(replace(gpu, usable_bytes=max(0, size)) for gpu, size in zip(on, left, strict=True))
        placed.append(own)


def all_find_room(choices: Iterator[FleetChoice]) -> None:
    """Hold the choices against the promise of the first that none stays unplaced."""
    for number, choice in enumerate(choices):
        if number == 0 and choice.chosen.room.unplaced:
            return
        assert choice.chosen.plan.of(0), f"number {number} finds no room"
        assert choice.chosen.room.unplaced == 0, f"number {number} leaves no room for the rest"


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 4),
    expected=st.integers(2, 8),
    gib=st.floats(5, 60),
    per_token=st.floats(1_000, 400_000),
    goal=st.sampled_from(FleetGoal),
    most=st.sampled_from([1, None]),
)
def test_as_many_as_have_room_by_a_plan_find_it_one_after_the_other(
    count: int, expected: int, gib: float, per_token: float, goal: FleetGoal, most: int | None
) -> None:
    degrees = [tp for tp in (1, 2, 4) if tp <= count]
    options = tuple(option(tp, fixed_gib=gib, kv_bytes_per_token=per_token) for tp in degrees)
    all_find_room(in_turn(options, gpus(count), expected, goal, most))


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(2, 5),
    expected=st.integers(2, 6),
    gib=st.floats(20, 300),
    goal=st.sampled_from(FleetGoal),
)
def test_models_that_need_several_gpus_find_the_room_that_was_left_for_them(
    count: int, expected: int, gib: float, goal: FleetGoal
) -> None:
    """Groups of two are neighbours of one node: the last of three GPUs is in none."""
    options = tuple(option(tp, fixed_gib=gib) for tp in (2, 4) if tp <= count)
    if min(one.bytes_per_gpu(one.longest_tokens) for one in options) > gpus(1)[0].usable_bytes:
        return
    all_find_room(in_turn(options, gpus(count), expected, goal))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    free_gib=st.lists(st.floats(25, 76), min_size=2, max_size=4),
    expected=st.integers(2, 8),
    gib=st.floats(5, 40),
    goal=st.sampled_from(FleetGoal),
)
def test_on_gpus_that_are_not_equally_free_all_find_the_room_that_was_left_for_them(
    free_gib: list[float], expected: int, gib: float, goal: FleetGoal
) -> None:
    on = tuple(
        replace(one, usable_bytes=int(free * GIB)) for one, free in zip(gpus(len(free_gib)), free_gib, strict=True)
    )
    if gib + 1 > max(free_gib):
        return
    options = tuple(option(tp, fixed_gib=gib) for tp in (1, 2))
    all_find_room(in_turn(options, on, expected, goal))


def test_kv_cache_is_smaller_while_more_are_expected() -> None:
    """Three need 20.2 GiB each of 76 GiB: 55.8 GiB are free, of which two take 40.4."""
    one = fleet(1, 1, degrees=(1,), kv_bytes_per_token=1_000_000)
    plan = FleetPlan((FleetReplica(0, 0, (0,)),))
    alone, of_three = kv_room(one, plan), kv_room(replace(one, expected=3), plan)
    assert alone is not None
    assert of_three is not None
    assert of_three.unplaced == 0
    assert 2000 <= of_three.kv_tokens[0] < alone.kv_tokens[0]
    need = option(kv_bytes_per_token=1_000_000)
    left = one.gpus[0].usable_bytes - need.bytes_per_gpu(of_three.kv_tokens[0])
    assert left >= 2 * need.bytes_per_gpu(need.longest_tokens)


@pytest.mark.parametrize(("expected", "unplaced"), [(0, 0), (1, 0), (3, 0), (4, 1), (6, 3), (50, 47)])
def test_those_that_cannot_have_room_are_counted(expected: int, unplaced: int) -> None:
    """Three of 20.2 GiB fit on a GPU of 76 GiB."""
    one = replace(fleet(1, 1, degrees=(1,)), expected=expected)
    room = kv_room(one, FleetPlan((FleetReplica(0, 0, (0,)),)))
    assert room is not None
    assert room.unplaced == unplaced


def test_a_gpu_that_is_in_no_group_is_room_for_none() -> None:
    """Three models of 25.2 GiB each fit on a pair of GPUs; the third GPU has no neighbour."""
    one = Fleet((FleetDeployment(name="m", options=(option(2, fixed_gib=50),)),), gpus(3), expected=4)
    room = kv_room(one, FleetPlan((FleetReplica(0, 0, (0, 1)),)))
    assert room is not None
    assert room.unplaced == 1


@pytest.mark.parametrize("expected", [0, 3])
def test_a_gpu_that_is_full_takes_no_room_from_the_rest(expected: int) -> None:
    """Usable memory is below zero where more is taken than deployments may take together."""
    full, free = gpus(2)
    one = replace(fleet(1, 2), gpus=(replace(full, usable_bytes=-GIB), free), expected=expected)
    assert kv_room(one, FleetPlan((FleetReplica(0, 0, (1,)),))) is not None
    assert kv_room(one, FleetPlan((FleetReplica(0, 0, (0,)),))) is None


@given(st.integers(1, 4), st.integers(1, 30), st.floats(5, 70), st.floats(1_000, 400_000))
def test_no_more_are_unplaced_than_the_memory_has_no_room_for(
    count: int, expected: int, gib: float, per_token: float
) -> None:
    one = replace(fleet(1, count, degrees=(1,), fixed_gib=gib, kv_bytes_per_token=per_token), expected=expected)
    room = kv_room(one, FleetPlan((FleetReplica(0, 0, (0,)),)))
    assert room is not None
    model = one.deployments[0].options[0]
    need = model.bytes_per_gpu(model.longest_tokens)
    most = count * (one.gpus[0].usable_bytes // need)
    assert room.unplaced >= max(0, expected - most)
    # a 1,024th of what is free stays with the first at the least, which may be what one more would need
    assert room.unplaced <= max(0, expected - (most - 1))


def test_known_rates_are_the_mean_ones_of_the_prior_and_up_to_2_5_times_as_high_in_the_rest() -> None:
    one = fleet(3, 4)
    plan = rule_plan(one)
    loads, of_none = loads_of(one, plan, (None, 7.0, 0.5)), prior(one, plan)
    for column, rate in ((1, 7.0), (2, 0.5)):
        assert loads.of_mean_rates @ loads.rates_per_s[:, column] == pytest.approx(rate)
        assert set(np.round(loads.rates_per_s[:, column] / rate, 9)) == {1.0, 1.6, 2.5}
    np.testing.assert_allclose(loads.rates_per_s[:, 0], of_none.rates_per_s[:, 0])
    np.testing.assert_allclose(loads.weights, of_none.weights)
    assert not loads.are_known


def test_where_all_rates_are_known_their_mean_is_that_factor_of_them() -> None:
    one = fleet(2, 2)
    loads = loads_of(one, rule_plan(one), (7.0, 0.5))
    np.testing.assert_allclose(loads.rates_per_s, given_rates([7.0, 0.5]).rates_per_s)
    np.testing.assert_allclose(loads.weights @ loads.rates_per_s, np.array([7.0, 0.5]) * MEAN_FACTOR)
    np.testing.assert_allclose(loads.of_mean_rates @ loads.rates_per_s, [7.0, 0.5])
    assert loads.are_known


def test_where_no_rate_is_known_loads_are_those_of_the_prior() -> None:
    one = fleet(2, 4)
    loads, of_none = loads_of(one, rule_plan(one), (None, None)), prior(one, rule_plan(one))
    np.testing.assert_array_equal(loads.rates_per_s, of_none.rates_per_s)


def test_one_that_was_asked_nothing_counts_a_little() -> None:
    one = fleet(2, 2)
    asked_nothing = loads_of(one, rule_plan(one), (None, 0.0)).rates_per_s[:, 1]
    assert (asked_nothing > 0).all()
    assert (asked_nothing < 0.01).all()


@pytest.mark.parametrize("rates", [(), (None,), (1.0, None, None), (1.0, 1.0, 1.0)])
def test_rates_known_in_part_are_one_for_each_deployment(rates: tuple[float | None, ...], golden: Golden) -> None:
    one = fleet(2, 2)
    with golden.raises("planning", ConfigError):
        loads_of(one, rule_plan(one), rates)


def every_plan(one: Fleet) -> Iterator[FleetPlan]:
    """Yield each plan of the only deployment of ``one``: an option, and any groups with no GPU in common."""
    for number, chosen in enumerate(one.deployments[0].options):
        groups = one.groups[chosen.num_gpus]
        for count in range(1, len(groups) + 1):
            for found in combinations(groups, count):
                yield FleetPlan(tuple(FleetReplica(0, number, group) for group in found))


def every_judged(one: Fleet, choice: FleetChoice, goal: FleetGoal) -> list[Judged]:
    judge = judge_of(one, choice.loads, choice.rule.plan, goal)
    return [judged for plan in every_plan(one) if (judged := judge(plan)) is not None]


def held(plan: FleetPlan) -> int:
    return len({gpu for replica in plan.replicas for gpu in replica.gpus})


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 60), st.integers(1, 4), st.floats(10, 70))
def test_fewest_gpus_that_keep_the_guard_are_taken(rate: float, count: int, gib: float) -> None:
    one = fleet(1, count, fixed_gib=gib)
    choice = choose(one, FleetGoal.GPUS, (rate,))
    able = [judged for judged in every_judged(one, choice, FleetGoal.GPUS) if judged.score[0] <= EPSILON]
    if able:
        assert choice.chosen.score[0] <= EPSILON
        assert held(choice.chosen.plan) == min(held(judged.plan) for judged in able)


def test_gpus_that_hold_anything_grow_with_the_rate() -> None:
    one = fleet(1, 4)
    numbers = [held(choose(one, FleetGoal.GPUS, (rate,)).chosen.plan) for rate in (0.1, 4.0, 8.0, 16.0, 24.0)]
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert numbers[-1] > 1


def limited(count: int, limit_s: float) -> Fleet:
    one = fleet(1, count)
    return replace(one, deployments=(replace(one.deployments[0], limit_s=limit_s),))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(st.floats(0.4, 6.0), st.floats(0.05, 20), st.integers(1, 4), st.sampled_from(["cost", "gpus"]))
def test_a_limit_is_kept_where_any_plan_keeps_it(limit_s: float, rate: float, count: int, goal: str) -> None:
    one = limited(count, limit_s)
    choice = choose(one, FleetGoal(goal), (rate,))
    if any(judged.score[0] <= EPSILON for judged in every_judged(one, choice, FleetGoal(goal))):
        assert choice.chosen.score[0] <= EPSILON
        loads = choice.loads.at_peak(1.5)
        found = forecast(one, choice.chosen.plan, loads, choice.chosen.room)
        assert found.e2e_s.max() <= limit_s


def test_a_limit_below_one_gpus_time_takes_a_split() -> None:
    """A request alone takes 1.11 s on one GPU, 0.65 s on two and 0.36 s on four."""
    plan = choose(limited(4, 0.75), FleetGoal.COST, (0.01,)).chosen.plan
    assert {len(replica.gpus) for replica in plan.replicas} == {4}
    assert {len(r.gpus) for r in choose(limited(4, 4.0), FleetGoal.COST, (0.01,)).chosen.plan.replicas} == {1}


def with_least(one: Fleet, least: int, most: int | None = None) -> Fleet:
    (deployment,) = one.deployments
    return replace(one, deployments=(replace(deployment, least_replicas=least, most_replicas=most),))


@settings(max_examples=60, deadline=None)
@given(
    least=st.integers(1, 4),
    count=st.integers(1, 4),
    gib=st.floats(8, 140),
    goal=st.sampled_from(FleetGoal),
    rate=st.sampled_from([None, 0.1, 5.0]),
    exact=st.booleans(),
)
def test_no_fewer_replicas_than_must_be_where_they_fit(
    least: int, count: int, gib: float, goal: FleetGoal, rate: float | None, exact: bool
) -> None:
    one = with_least(fleet(1, count, fixed_gib=gib), least, least if exact else None)
    most_bytes = one.gpus[0].usable_bytes
    fits = any(
        found.bytes_per_gpu(found.longest_tokens) <= most_bytes and len(one.groups[found.num_gpus]) >= least
        for found in one.deployments[0].options
    )
    if not fits:
        return
    replicas = choose(one, goal, (rate,)).chosen.plan.of(0)
    assert len(replicas) == least if exact else len(replicas) >= least
    taken = [gpu for replica in replicas for gpu in replica.gpus]
    assert len(taken) == len(set(taken))


def test_too_few_gpus_for_all_replicas_break_a_promise() -> None:
    choice = choose(with_least(fleet(1, 1), 2), FleetGoal.COST, (0.1,))
    assert len(choice.chosen.plan.of(0)) == 1
    assert choice.chosen.score[0] > EPSILON


@pytest.mark.parametrize(("least", "most"), [(0, None), (0, 1), (3, 2), (-1, 4)])
def test_replicas_that_cannot_be_are_refused(least: int, most: int | None, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        FleetDeployment(name="m", options=(option(),), least_replicas=least, most_replicas=most)
