"""Choices of the joint planner against the plain rule: laws over random fleets, and cases with a known answer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, InfeasibleError
from placement.fleet.memory import kv_room
from placement.fleet.performance import forecast
from placement.fleet.search import choose
from placement.fleet.starts import more_replicas, more_split, most_split, rule_plan
from placement.fleet.types import Fleet, FleetDeployment, FleetGoal, FleetPlan, FleetReplica
from tests.golden_words import Golden
from tests.placement.fleet.fleets import fleet, gpus, option

MODELS = st.lists(
    st.builds(
        lambda gib, step, answer: (gib, step, answer),
        st.floats(8, 40),
        st.floats(0.005, 0.03),
        st.integers(20, 600),
    ),
    min_size=1,
    max_size=4,
)


def random_fleet(models: list[tuple[float, float, int]], count: int) -> Fleet:
    degrees = [tp for tp in (1, 2, 4) if tp <= count]
    return Fleet(
        tuple(
            FleetDeployment(
                name=f"m{number}",
                options=tuple(
                    option(tp, fixed_gib=gib, step_s=step_s, output_tokens=answer, measured=tp == 1)
                    for tp in degrees
                ),
            )
            for number, (gib, step_s, answer) in enumerate(models)
        ),
        gpus(count),
    )


def latency(one: Fleet, plan: FleetPlan, choice: object) -> np.ndarray:
    room = kv_room(one, plan)
    assert room is not None
    loads = choice.loads  # type: ignore[attr-defined]
    return (loads.rates_per_s * forecast(one, plan, loads, room).e2e_s).sum(axis=1)


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(MODELS, st.integers(2, 4))
def test_with_no_rate_known_a_plan_loses_to_the_rule_at_no_load_of_the_prior(
    models: list[tuple[float, float, int]], count: int
) -> None:
    one = random_fleet(models, count)
    choice = choose(one, FleetGoal.LATENCY, most_judgements=300)
    if len({replica.deployment for replica in choice.rule.plan.replicas}) < len(models):
        return  # the rule found no place for one
    ratios = latency(one, choice.chosen.plan, choice) / latency(one, choice.rule.plan, choice)
    assert ratios.max() <= 1.02 + 1e-9
    assert choice.loads.weights @ np.log(ratios) <= 1e-9


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(MODELS, st.integers(1, 4), st.sampled_from(FleetGoal))
def test_every_plan_fits_and_serves_no_fewer_than_the_rule(
    models: list[tuple[float, float, int]], count: int, goal: FleetGoal
) -> None:
    one = random_fleet(models, count)
    choice = choose(one, goal, most_judgements=200)
    assert kv_room(one, choice.chosen.plan) is not None
    served = {replica.deployment for replica in choice.chosen.plan.replicas}
    assert len({replica.deployment for replica in choice.rule.plan.replicas}) <= len(served)
    for replica in choice.chosen.plan.replicas:
        assert len(set(replica.gpus)) == one.option(replica).num_gpus


def test_as_many_evenly_loaded_models_as_gpus_take_the_rule() -> None:
    assert choose(fleet(4, 4), FleetGoal.LATENCY).is_rule


def test_the_rule_spreads_and_takes_the_fewest_gpus() -> None:
    plan = rule_plan(fleet(3, 4))
    assert sorted(replica.gpus for replica in plan.replicas) == [(0,), (1,), (2,)]


def test_idle_gpus_are_used_for_latency_and_left_for_cost() -> None:
    one = fleet(1, 4)
    fast, cheap = choose(one, FleetGoal.LATENCY), choose(one, FleetGoal.COST, (0.05,))
    assert len({gpu for replica in fast.chosen.plan.replicas for gpu in replica.gpus}) == 4
    assert len({gpu for replica in cheap.chosen.plan.replicas for gpu in replica.gpus}) == 1


def test_a_hot_model_gets_the_idle_gpus_where_rates_are_given() -> None:
    plan = choose(fleet(2, 4), FleetGoal.LATENCY, (20.0, 0.1)).chosen.plan
    assert len({gpu for replica in plan.of(0) for gpu in replica.gpus}) >= 3


def test_cheap_plans_keep_the_guard_or_the_rule_breaks_it_as_well() -> None:
    one = fleet(3, 2)
    choice = choose(one, FleetGoal.COST, (1.0, 1.0, 1.0))
    assert choice.chosen.score[0] <= choice.rule.score[0] + 1e-9


def test_running_replicas_stay() -> None:
    runs = FleetReplica(0, 0, (1,), kv_tokens=50_000.0)
    old = FleetDeployment(name="old", options=(option(),), fixed=(runs,), most_replicas=1)
    one = Fleet((old, FleetDeployment(name="new", options=(option(), option(2)))), gpus(2))
    choice = choose(one, FleetGoal.LATENCY)
    assert runs in choice.chosen.plan.replicas
    assert choice.chosen.plan.of(0) == (runs,)
    assert choice.chosen.plan.of(1)


def test_reserved_gpus_stay_empty() -> None:
    one = replace(fleet(1, 4), reserved=frozenset({2, 3}))
    plan = choose(one, FleetGoal.LATENCY).chosen.plan
    assert {gpu for replica in plan.replicas for gpu in replica.gpus} <= {0, 1}


def test_the_same_question_has_the_same_answer() -> None:
    one = fleet(3, 4)
    assert choose(one, FleetGoal.LATENCY).chosen.plan.key == choose(one, FleetGoal.LATENCY).chosen.plan.key


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        pytest.param(lambda one: more_replicas(one, rule_plan(one)), [(1, 2), (1, 2)], id="replicas"),
        pytest.param(lambda one: more_split(one, rule_plan(one)), [(2, 1), (2, 1)], id="split"),
        pytest.param(most_split, [(4, 1), (4, 1)], id="most-split"),
    ],
)
def test_starts_use_idle_gpus_in_their_way(start, expected) -> None:
    """Two models on four GPUs: (GPUs of each replica, replicas) of each."""
    one = fleet(2, 4)
    plan = start(one)
    assert [(len(plan.of(n)[0].gpus), len(plan.of(n))) for n in (0, 1)] == expected


def test_what_fits_nowhere_is_refused(golden: Golden) -> None:
    with golden.raises("planning", InfeasibleError):
        choose(fleet(1, 1, degrees=(1,), fixed_gib=200), FleetGoal.LATENCY)


def test_rates_are_one_for_each_deployment(golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        choose(fleet(2, 2), FleetGoal.LATENCY, (1.0,))


def test_a_gpu_that_two_busy_replicas_share_is_held_once() -> None:
    one = fleet(2, 1, kv_bytes_per_token=1.0, fixed_gib=1)
    judged = choose(one, FleetGoal.COST, (50.0, 50.0)).rule
    assert judged.score[1] == pytest.approx(1.0, rel=0.15)


@pytest.mark.parametrize("rate", [2.0, 3.0])
def test_a_rate_whose_peak_one_gpu_carries_within_the_guard_takes_one_gpu(rate: float) -> None:
    plan = choose(fleet(1, 4), FleetGoal.COST, (rate,)).chosen.plan
    assert len({gpu for replica in plan.replicas for gpu in replica.gpus}) == 1


def test_plans_with_two_replicas_alike_are_not_one_with_a_single() -> None:
    twin = FleetReplica(0, 0, (1,))
    assert FleetPlan((twin, twin)).key != FleetPlan((twin,)).key


def test_groups_lie_within_link_groups_whatever_gpu_is_missing() -> None:
    one = fleet(1, 4)
    without_first = replace(one, gpus=one.gpus[1:])
    assert without_first.groups[2] == ((1, 2),)  # GPUs 2 and 3, by their numbers here


def test_gpu_hours_of_unknown_load_are_those_of_the_rule_where_models_have_gpus_of_their_own() -> None:
    one = replace(fleet(2, 8), expected=2)
    choice = choose(one, FleetGoal.GPUS)
    assert sorted(replica.gpus for replica in choice.chosen.plan.replicas) == sorted(
        replica.gpus for replica in choice.rule.plan.replicas
    )


def test_gpu_hours_at_a_known_rate_serve_it_and_slow_no_other_for_it() -> None:
    """The first asks for 1.7 times what one GPU serves; the second needs its own to keep its time."""
    one = fleet(2, 8, degrees=(1,))
    most = option().requests_per_s(256)
    choice = choose(one, FleetGoal.GPUS, (1.7 * most, 0.5 * most))
    plan = choice.chosen.plan
    room = kv_room(one, plan)
    assert room is not None
    assert forecast(one, plan, choice.loads.at_peak(1.5), room).utilisation.max() <= 1
    used = [{gpu for replica in plan.of(number) for gpu in replica.gpus} for number in (0, 1)]
    assert used[0].isdisjoint(used[1])
    assert len(used[0] | used[1]) < 8


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(MODELS, st.integers(2, 4), st.floats(0.1, 1.5))
def test_a_cheap_plan_at_a_known_rate_is_no_slower_than_the_rule_in_a_burst(
    models: list[tuple[float, float, int]], count: int, load: float
) -> None:
    """At 2.5 times the rates no deployment is further beyond its guard than in the rule's plan."""
    one = random_fleet(models, count)
    rates = tuple(load * one.least(number).requests_per_s(32) / len(models) for number in range(len(models)))
    choice = choose(one, FleetGoal.COST, rates, most_judgements=300)
    if choice.chosen.score[0] > 1e-9:
        return
    burst = choice.loads.at_peak(2.5)
    alone = np.array([one.least(number).alone_s for number in range(len(models))])

    def beyond(plan: FleetPlan) -> np.ndarray:
        room = kv_room(one, plan, wanted_tokens=list(tokens[id(plan)]) if id(plan) in tokens else None)
        assert room is not None
        return np.maximum(1.0, forecast(one, plan, burst, room).e2e_s / (2.3 * alone))

    tokens = {id(choice.chosen.plan): choice.chosen.room.kv_tokens}
    assert (beyond(choice.chosen.plan) <= beyond(choice.rule.plan) * (1 + 1e-6)).all()


def test_plans_that_differ_in_which_idle_gpus_they_take_are_judged_once() -> None:
    """A start fills 32 idle GPUs: its descent takes 34 plans, and 973 if each GPU counts for itself."""
    model = FleetDeployment(name="m", options=(option(1, fixed_gib=60), option(2, fixed_gib=60)))
    whole, small = (
        choose(Fleet((model,), gpus(32)), FleetGoal.COST, [20.0], most_judgements=most) for most in (10_000, 60)
    )
    assert small.chosen.plan.key == whole.chosen.plan.key
