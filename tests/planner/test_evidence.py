"""Measured configurations before predicted ones: the rule for every intent, by cases and as laws."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.estimates import Correction, Quantity
from planner.costs import Prices
from planner.intent import CostModel, Intent, IntentKind, Slo, Traffic
from planner.plan import Candidate, Plan, Ranked
from planner.rank import best_of, rank
from tests.golden_words import Golden
from tests.planner.candidates import candidate, everything_fits, fits_below
from tests.planner.test_rank_laws import PRICES, candidate_lists, free_gib, intents

ONE, TWO = (DeploymentConfig(tp=tp) for tp in (1, 2))
OTHER = DeploymentConfig(weights=WeightFormat.INT8)
INTENTS = (
    Intent(),
    Intent(cost_model=CostModel.MEMORY),
    Intent(cost_model=CostModel.GPU_HOURS),
    Intent(cost_model=CostModel.DOLLARS),
    Intent(kind=IntentKind.MIN_LATENCY),
    Intent(kind=IntentKind.MIN_LATENCY, rate_per_s=0.05),
    Intent(
        kind=IntentKind.MIN_LATENCY, rate_per_s=0.05, traffic=Traffic(relative_rates=(1.5, 0.5), window_s=30.0)
    ),
    Intent(kind=IntentKind.MIN_MEMORY),
    Intent(kind=IntentKind.MIN_GPU_HOURS),
    Intent(kind=IntentKind.MAX_THROUGHPUT),
    Intent(kind=IntentKind.MIN_ENERGY),
    Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(e2e_s=60.0)),
    Intent(kind=IntentKind.COST_SLO, budget=1e6),
)


def run(one: Candidate) -> Candidate:
    """Return the candidate as if a profile had run it."""
    assert one.estimate is not None
    return one._replace(estimate=replace(one.estimate, measured_config=one.config))


def scaled(one: Candidate, anchor: DeploymentConfig) -> Candidate:
    assert one.estimate is not None
    return one._replace(estimate=replace(one.estimate, measured_config=anchor))


def better_by(times: float, spread: float) -> Candidate:
    """Another format with a ``times``-th of what ``MEASURED`` takes, in every respect."""
    return candidate(
        OTHER,
        gib_per_gpu=10.0 / times,
        ttft_s=0.4 / times,
        tpot_s=0.02 / times,
        power_w=300.0,
        spread=spread,
        memory_spread=spread,
    )


MEASURED = run(candidate(ONE, gib_per_gpu=10.0, ttft_s=0.4, tpot_s=0.02, power_w=300.0, spread=0.1))


def planned(candidates: list[Candidate], intent: Intent) -> Plan:
    return rank(candidates, intent, fits=everything_fits, prices=Prices(usd_per_gpu_hour=2.0))


@pytest.mark.parametrize("intent", INTENTS, ids=str)
@pytest.mark.parametrize(("times", "spread", "wins"), [(1.5, 0.9, False), (3.0, 0.2, True)])
def test_what_was_not_measured_wins_only_with_its_whole_interval(
    intent: Intent, times: float, spread: float, wins: bool
) -> None:
    """The unmeasured one is 1.5 times as good, give or take 90%, or three times as good, give or take 20%."""
    plan = planned([MEASURED, scaled(better_by(times, spread), ONE)], intent)
    first, second = plan.candidates
    assert plan.chosen == 0
    assert first.config == (OTHER if wins else ONE)
    assert [one.config for one in plan.passed_over] == ([] if wins else [OTHER])
    assert plan.indistinguishable == (() if wins else (1,))
    assert (second.config, second.is_measured) == ((ONE, True) if wins else (OTHER, False))


def test_passing_over_is_told_with_both_intervals(golden: Golden) -> None:
    plan = planned([MEASURED, scaled(better_by(1.5, 0.9), ONE)], Intent(kind=IntentKind.MIN_LATENCY))
    (told,) = plan.passed_over
    golden("planning", told.reason)


def test_a_limit_must_hold_at_the_unfavourable_end_too(golden: Golden) -> None:
    """At 0.25 requests/s the p50 of TTFT keeps 0.2 s by far at the value, and not at the upper end: 0.13 s of
    service, up to 0.26."""
    wide = candidate(TWO, gib_per_gpu=1.0, ttft_s=0.05, tpot_s=0.01, spread=0.9)
    intent = Intent(kind=IntentKind.MIN_MEMORY, slo=Slo(ttft_s=0.45), rate_per_s=0.25, percentile=80.0)
    alone = planned([wide], intent)
    assert alone.chosen == 0, "the rules for all admit it"
    plan = planned([run(candidate(ONE, gib_per_gpu=9.0, ttft_s=0.04, tpot_s=0.01)), scaled(wide, ONE)], intent)
    assert plan.candidates[0].config == ONE
    golden("planning", plan.passed_over[0].reason)


def test_a_check_of_this_workload_is_a_measurement() -> None:
    unrun = scaled(better_by(1.5, 0.9), ONE)
    assert unrun.estimate is not None
    checked = Correction(
        measured_at="", config=OTHER, workload=unrun.estimate.workload, exact=True,
        ttft_log_ratio=0.0, tpot_log_ratio=0.0, memory_bytes=0,
    )  # fmt: skip
    for exact in (True, False):
        seen = replace(unrun.estimate, correction=replace(checked, exact=exact))
        plan = planned([MEASURED, unrun._replace(estimate=seen)], Intent(kind=IntentKind.MIN_LATENCY))
        assert (plan.candidates[0].config == OTHER) is exact


def test_what_is_refused_stands_in_nobodys_way() -> None:
    """The measured one keeps no limit: the best of the rest is chosen by its value."""
    others = [scaled(better_by(1.5, 0.9), ONE), scaled(candidate(TWO, gib_per_gpu=5.0, ttft_s=0.3), ONE)]
    plan = planned([MEASURED, *others], Intent(kind=IntentKind.MIN_LATENCY, slo=Slo(ttft_s=0.35)))
    assert plan.candidates[0].config == TWO, "the other may take 0.5 s"
    assert plan.passed_over == ()


@st.composite
def mixed(draw: st.DrawFn) -> list[Candidate]:
    """Some run, some not; wide and narrow intervals."""
    found = []
    for one in draw(candidate_lists()):
        if one.estimate is not None:
            spread = draw(st.sampled_from([0.0, 0.05, 0.3, 0.9]))
            times = [
                Quantity(q.value, q.value * (1 - spread), q.value * (1 + spread), q.source)
                for q in (one.estimate.ttft_s, one.estimate.tpot_s)
            ]
            measured_config = draw(
                st.sampled_from([one.config, None, DeploymentConfig(weights=WeightFormat.GPTQ4)])
            )
            guess = replace(one.estimate, ttft_s=times[0], tpot_s=times[1], measured_config=measured_config)
            one = one._replace(estimate=guess)
        found.append(one)
    return found


def plan_of(candidates: list[Candidate], intent: Intent, free: float) -> Plan:
    return rank(candidates, intent, fits=fits_below(free), prices=PRICES)


def wholly_better(plan: Plan, one: Ranked, other: Ranked) -> bool:
    mine, theirs = one.interval, other.interval
    assert mine is not None
    assert theirs is not None
    return mine[0] > theirs[1] if plan.maximize else mine[1] < theirs[0]


def ahead(plan: Plan, one: Ranked, other: Ranked) -> bool:
    assert one.objective is not None
    assert other.objective is not None
    return one.objective > other.objective if plan.maximize else one.objective < other.objective


cases = {"candidates": mixed(), "intent": intents(), "free": free_gib}


@given(**cases)
def test_the_law_of_the_choice(candidates: list[Candidate], intent: Intent, free: float) -> None:
    plan = plan_of(candidates, intent, free)
    feasible = [one for one in plan.candidates if one.feasible]
    run_ones = [one for one in feasible if one.is_measured]
    if not run_ones:
        return
    best, mark = feasible[0], min(run_ones, key=lambda one: one.row)
    assert best.is_measured == (best.config == mark.config)
    if not best.is_measured:
        assert wholly_better(plan, best, mark)
        assert ahead(plan, best, mark)
    for one in feasible[1:]:
        if ahead(plan, one, best):
            assert not one.is_measured
            passed = next(p for p in plan.passed_over if p.config == one.config)
            assert passed.reason
            assert not wholly_better(plan, one, mark) or intent.rate_per_s is not None


@given(**cases)
def test_the_others_stay_in_the_order_of_their_values(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    feasible = [one for one in plan.candidates if one.feasible]
    assert [one.row for one in feasible[1:]] == sorted(one.row for one in feasible[1:])
    for one in feasible:
        low, high = one.interval or (0.0, 0.0)
        assert one.objective is not None
        assert low <= one.objective * (1 + 1e-9)
        assert one.objective <= high * (1 + 1e-9)
    told = {p.config for p in plan.passed_over}
    assert told == {one.config for one in feasible[1:] if one.row < feasible[0].row}
    if feasible and intent.rate_per_s is None:
        chosen = feasible[0].interval
        assert chosen is not None
        overlapping = [
            index
            for index, one in enumerate(feasible)
            if index and one.interval and one.interval[0] <= chosen[1] and chosen[0] <= one.interval[1]
        ]
        assert list(plan.indistinguishable) == overlapping


@given(**cases, measured=st.booleans())
def test_where_all_are_alike_the_value_decides(
    candidates: list[Candidate], intent: Intent, free: float, measured: bool
) -> None:
    alike = [
        one if one.estimate is None
        else one._replace(estimate=replace(one.estimate, measured_config=one.config if measured else None))
        for one in candidates
    ]  # fmt: skip
    plan = plan_of(alike, intent, free)
    feasible = [one for one in plan.candidates if one.feasible]
    assert [one.row for one in feasible] == sorted(one.row for one in feasible)
    assert plan.passed_over == ()


@given(**cases)
def test_the_best_alone_is_that_of_the_plan(candidates: list[Candidate], intent: Intent, free: float) -> None:
    plan = plan_of(candidates, intent, free)
    best = best_of(candidates, intent, fits=fits_below(free), prices=PRICES)
    assert (best and best.config) == (plan.best and plan.best.config)
