"""Ranking: the winner of every intent by hand, every refusal with its numbers."""

from __future__ import annotations

import math
import re

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimates import Estimate
from fingerprint.queueing import MODEL_NAME
from planner.costs import Prices
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo
from planner.plan import Candidate, Layout, LimitKind, NoRoom, Plan, Ranked
from planner.rank import rank
from tests.golden_words import Golden
from tests.planner.candidates import Somewhere, candidate, estimate, everything_fits, fits_below

# 101 output tokens, so e2e = ttft + 100 * tpot.
ONE = DeploymentConfig(tp=1)  # e2e 4.4 s, 30 GiB: 132 GiB*s, 4.4 GPU-s, 1320 J
TWO = DeploymentConfig(tp=2)  # e2e 2.2 s, 40 GiB:  88 GiB*s, 4.4 GPU-s, 1320 J
FOUR = DeploymentConfig(tp=4)  # e2e 1.6 s, 60 GiB: 96 GiB*s, 6.4 GPU-s, 1280 J
THREE = (
    candidate(ONE, gib_per_gpu=30.0, ttft_s=0.4, tpot_s=0.04, power_w=300.0),
    candidate(TWO, gib_per_gpu=20.0, ttft_s=0.2, tpot_s=0.02, power_w=300.0),
    candidate(FOUR, gib_per_gpu=15.0, ttft_s=0.1, tpot_s=0.015, power_w=200.0),
)


def best(plan: Plan) -> DeploymentConfig:
    assert plan.best is not None
    return plan.best.config


def found(plan: Plan, config: DeploymentConfig) -> Ranked:
    return next(ranked for ranked in plan.candidates if ranked.config == config)


@pytest.mark.parametrize(
    ("intent", "order", "objective"),
    [
        pytest.param(Intent(), (TWO, FOUR, ONE), 88.0, id="min-cost-is-the-default"),
        pytest.param(Intent(kind=IntentKind.MIN_LATENCY), (FOUR, TWO, ONE), 1.6, id="min-latency"),
        pytest.param(Intent(kind=IntentKind.MIN_MEMORY), (ONE, TWO, FOUR), 30.0, id="min-memory"),
        pytest.param(
            Intent(kind=IntentKind.MIN_GPU_HOURS), (ONE, TWO, FOUR), 4.4, id="min-gpu-hours-tie-to-fewer-gpus"
        ),
        pytest.param(Intent(kind=IntentKind.MAX_THROUGHPUT), (FOUR, TWO, ONE), 101 / 1.6, id="max-throughput"),
        pytest.param(Intent(kind=IntentKind.MIN_ENERGY), (FOUR, ONE, TWO), 1280.0, id="min-energy"),
        pytest.param(
            Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(e2e_s=2.0)), (FOUR, TWO, ONE), 96.0, id="latency-slo"
        ),
        pytest.param(Intent(kind=IntentKind.COST_SLO, budget=90.0), (TWO, FOUR, ONE), 2.2, id="cost-slo"),
        pytest.param(Intent(cost_model=CostModel.MEMORY), (ONE, TWO, FOUR), 30.0, id="cost-is-memory"),
        pytest.param(Intent(cost_model=CostModel.GPU_HOURS), (ONE, TWO, FOUR), 4.4, id="cost-is-gpu-hours"),
        pytest.param(Intent(cost_model=CostModel.DOLLARS), (ONE, TWO, FOUR), 0.0044, id="cost-is-dollars"),
    ],
)
def test_every_intent_and_cost_model(
    intent: Intent, order: tuple[DeploymentConfig, ...], objective: float
) -> None:
    plan = rank(THREE, intent, fits=everything_fits, prices=Prices(usd_per_gpu_hour=3.6))
    assert tuple(ranked.config for ranked in plan.candidates) == order
    assert plan.chosen == 0
    assert plan.candidates[0].objective == pytest.approx(objective)


def test_equal_throughput_goes_to_fewer_gpus_then_less_memory_then_the_first_configuration() -> None:
    int8 = DeploymentConfig(weights=WeightFormat.INT8)
    same = (
        candidate(DeploymentConfig(tp=2), gib_per_gpu=1.0),
        candidate(DeploymentConfig(kv=KvFormat.INT8), gib_per_gpu=8.0),
        candidate(int8, gib_per_gpu=4.0),
        candidate(DeploymentConfig(), gib_per_gpu=8.0),
    )
    plan = rank(same, Intent(kind=IntentKind.MAX_THROUGHPUT), fits=everything_fits)
    assert [ranked.config for ranked in plan.candidates] == [
        int8,
        DeploymentConfig(),
        DeploymentConfig(kv=KvFormat.INT8),
        DeploymentConfig(tp=2),
    ]


def test_limits_hold_under_every_intent() -> None:
    plan = rank(THREE, Intent(kind=IntentKind.MIN_MEMORY, slo=Slo(e2e_s=3.0)), fits=everything_fits)
    assert best(plan) == TWO
    assert [b.config for b in plan.why_not.better] == [ONE]


def test_slo_and_budget_are_judged_at_the_upper_end_and_the_objective_on_the_value(golden: Golden) -> None:
    """e2e 2.4 s, at most 3.0; 10 GiB, at most 11: 24 GiB*s, at most 33."""
    wide = (candidate(ONE, gib_per_gpu=10.0, ttft_s=0.4, tpot_s=0.02, spread=0.25, memory_spread=0.1),)
    assert rank(wide, Intent(slo=Slo(e2e_s=2.99), budget=33.01), fits=everything_fits).chosen is None
    plan = rank(wide, Intent(slo=Slo(e2e_s=3.01), budget=33.01), fits=everything_fits)
    assert plan.best is not None
    assert (plan.best.objective, plan.best.cost) == (pytest.approx(24.0), pytest.approx(24.0))
    dear = rank(wide, Intent(slo=Slo(e2e_s=3.01), budget=32.99), fits=everything_fits)
    golden("planning", dear.candidates[0].reason)
    (advice,) = dear.why_not.relaxations
    assert advice.needed == 33.0


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (CostModel.MEMORY_LATENCY, 2 * 11 * 3.0),
        (CostModel.MEMORY, 2 * 11),
        (CostModel.GPU_HOURS, 2 * 3.0),
        (CostModel.DOLLARS, 2 * 3.0 * 2.0 / 3600),
    ],
)
def test_the_budget_of_every_cost_model_is_held_against_what_it_may_come_to(model: CostModel, most: float) -> None:
    wide = (candidate(TWO, gib_per_gpu=10.0, ttft_s=0.4, tpot_s=0.02, spread=0.25, memory_spread=0.1),)
    for budget, kept in ((most * 1.001, True), (most * 0.999, False)):
        intent = Intent(cost_model=model, budget=budget)
        plan = rank(wide, intent, fits=everything_fits, prices=Prices(usd_per_gpu_hour=2.0))
        assert (plan.best is not None) == kept


def test_a_rate_adds_the_wait_at_the_percentile() -> None:
    """e2e 1 s at batch 1 and 0.5 requests/s: M/D/1 at utilisation 0.5, whose 80th percentile is
    2 ln 1.6 = 0.9400 s; within 8% by the planner's queue, which is exact in the mean and far out."""
    served = (candidate(ONE, gib_per_gpu=1.0, ttft_s=0.5, tpot_s=0.005),)
    for e2e_s, chosen in ((1.9, None), (2.02, 0)):
        intent = Intent(slo=Slo(e2e_s=e2e_s), rate_per_s=0.5, percentile=80.0)
        plan = rank(served, intent, fits=everything_fits)
        assert plan.chosen == chosen
        assert plan.queueing == MODEL_NAME
    calm = rank(served, Intent(slo=Slo(ttft_s=0.5, tpot_s=0.005, e2e_s=1.0)), fits=everything_fits)
    assert calm.chosen == 0, "no rate, no wait"
    assert calm.queueing is None


def test_the_wait_counts_for_ttft_and_not_for_tpot() -> None:
    served = (candidate(ONE, gib_per_gpu=1.0, ttft_s=0.5, tpot_s=0.005),)
    at_rate = Intent(slo=Slo(ttft_s=0.6, tpot_s=0.005), rate_per_s=0.5, percentile=80.0)
    missed = rank(served, at_rate, fits=everything_fits).candidates[0].violations
    assert [(v.limit, v.actual) for v in missed] == [
        (LimitKind.TTFT, pytest.approx(0.5 + 2 * math.log(1.6), rel=0.055))
    ]


def test_a_batch_shares_the_service_time() -> None:
    """e2e 2.4 s at batch 8 serves a request every 0.3 s: 3 requests/s keep it 0.9 busy."""
    batched = Candidate(ONE, estimate(ONE, workload=Workload(batch=8, input_tokens=1, output_tokens=101)))
    assert rank([batched], Intent(rate_per_s=3.0), fits=everything_fits).chosen == 0
    assert rank([batched], Intent(rate_per_s=3.4), fits=everything_fits).chosen is None


INT4 = DeploymentConfig(weights=WeightFormat.INT4)
PRUNED = DeploymentConfig(pruning=Pruning.WANDA_2_4)


@pytest.mark.parametrize(
    ("quality", "feasible"),
    [
        ("exact", {ONE}),
        ("near", {ONE, DeploymentConfig(weights=WeightFormat.INT8, kv=KvFormat.FP8)}),
        ("any", {ONE, DeploymentConfig(weights=WeightFormat.INT8, kv=KvFormat.FP8), INT4, PRUNED}),
    ],
)
def test_quality(quality: str, feasible: set[DeploymentConfig], golden: Golden) -> None:
    all_of_them = [
        candidate(c) for c in (ONE, DeploymentConfig(weights=WeightFormat.INT8, kv=KvFormat.FP8), INT4, PRUNED)
    ]
    plan = rank(all_of_them, Intent(quality=Quality(quality)), fits=everything_fits)
    assert {r.config for r in plan.candidates if r.feasible} == feasible
    golden("planning", sorted({r.reason for r in plan.candidates if not r.feasible}))


@pytest.mark.parametrize(
    ("intent", "numbers"),
    [
        pytest.param(Intent(slo=Slo(ttft_s=0.3)), ("ttft 0.44 s", "ttft=0.3 s"), id="ttft"),
        pytest.param(Intent(slo=Slo(tpot_s=0.01)), ("tpot 0.022 s", "tpot=0.01 s"), id="tpot"),
        pytest.param(Intent(slo=Slo(e2e_s=2.0)), ("e2e 2.64 s", "e2e=2 s"), id="e2e"),
        pytest.param(Intent(budget=20.0), ("cost 26.4 GiB*s", "budget=20", "upper end"), id="budget"),
        pytest.param(Intent(rate_per_s=1.0), ("at most 0.3788 requests/s", "rate=1 ", "2.64"), id="rate"),
    ],
)
def test_refusals_say_both_numbers(intent: Intent, numbers: tuple[str, ...]) -> None:
    plan = rank([candidate(ONE, spread=0.1)], intent, fits=everything_fits)
    assert plan.chosen is None
    reason = plan.candidates[0].reason
    assert reason is not None
    for number in numbers:
        assert number in reason


def test_all_missed_limits_are_told_at_once() -> None:
    plan = rank([candidate(INT4)], Intent(slo=Slo(ttft_s=0.1, e2e_s=0.1), budget=1.0), fits=everything_fits)
    reason = plan.candidates[0].reason
    assert reason is not None
    assert re.findall(r"quality|budget|ttft=|e2e=", reason) == ["quality", "budget", "ttft=", "e2e="]


def test_what_cannot_run_is_listed_with_its_own_reason(golden: Golden) -> None:
    refused = candidate(INT4, gib_per_gpu=1.0, refusal="torch has no weights=int4")
    unknown = Candidate(PRUNED)
    shape = Candidate(DeploymentConfig(tp=8), None, "tp=8 does not divide the 71 attention heads")
    plan = rank([unknown, shape, refused, candidate(ONE)], Intent(quality=Quality.ANY), fits=everything_fits)
    assert [(r.config, r.feasible, r.reason) for r in plan.candidates] == [
        (ONE, True, None),
        (INT4, False, "torch has no weights=int4"),
        (PRUNED, False, plan.candidates[2].reason),
        (DeploymentConfig(tp=8), False, shape.refusal),
    ]
    golden("planning", plan.candidates[2].reason)
    assert plan.candidates[1].objective == pytest.approx(2.4), "known, though refused"


def test_energy_and_dollars_are_refused_where_unknown(golden: Golden) -> None:
    on_cpu = [candidate(ONE, power_w=None)]
    energy = rank(on_cpu, Intent(kind=IntentKind.MIN_ENERGY), fits=everything_fits)
    assert energy.chosen is None
    golden("planning", str(energy.candidates[0].reason))
    dollars = Intent(cost_model=CostModel.DOLLARS)
    golden("planning", str(rank(on_cpu, dollars, fits=everything_fits).candidates[0].reason))
    fastest = Intent(kind=IntentKind.MIN_LATENCY, cost_model=CostModel.DOLLARS)
    free = rank(on_cpu, fastest, fits=everything_fits)
    assert free.chosen == 0, "a cost that nobody asked for need not be known"
    assert free.candidates[0].cost is None
    in_budget = Intent(kind=IntentKind.MIN_LATENCY, cost_model=CostModel.DOLLARS, budget=1.0)
    golden("planning", str(rank(on_cpu, in_budget, fits=everything_fits).candidates[0].reason))


@pytest.mark.parametrize("ttft_s", [math.nan, math.inf, -1e9])
def test_an_estimate_that_is_no_number_is_refused(ttft_s: float, golden: Golden) -> None:
    broken = candidate(ONE, ttft_s=ttft_s)
    for kind in (IntentKind.MIN_LATENCY, IntentKind.MIN_MEMORY, IntentKind.MAX_THROUGHPUT):
        plan = rank([broken, candidate(TWO)], Intent(kind=kind), fits=everything_fits)
        assert best(plan) == TWO
        golden("planning", str(found(plan, ONE).reason))
        assert found(plan, ONE).objective is None


def test_memory_is_asked_last_and_best_first() -> None:
    asked: list[DeploymentConfig] = []

    def fits(seen: Estimate) -> Layout | NoRoom:
        asked.append(seen.config)
        return NoRoom("full", 7) if seen.config == FOUR else Somewhere((3, 2))

    intent = Intent(kind=IntentKind.MIN_LATENCY, slo=Slo(ttft_s=0.3))
    plan = rank(THREE, intent, fits=fits)
    assert asked == [FOUR, TWO], "the one that misses the SLO is not asked about"
    assert best(plan) == TWO
    assert plan.candidates[0].layout == Somewhere((3, 2))
    assert found(plan, FOUR).reason == "full"
    assert [(b.config, b.reason) for b in plan.why_not.better] == [(FOUR, "full")]


def test_nothing_at_all() -> None:
    plan = rank([], Intent(), fits=everything_fits)
    assert (plan.candidates, plan.chosen, plan.best) == ((), None, None)
    assert plan.why_not.nearest is None


def test_better_ones_are_at_most_five_and_best_first() -> None:
    many = [candidate(DeploymentConfig(pp=pp), gib_per_gpu=50.0, ttft_s=0.1 * pp) for pp in range(1, 9)]
    roomy = candidate(DeploymentConfig(tp=8), gib_per_gpu=1.0, ttft_s=9.0)
    plan = rank([*many, roomy], Intent(kind=IntentKind.MIN_LATENCY), fits=fits_below(40.0))
    assert best(plan) == DeploymentConfig(tp=8)
    assert [b.config.pp for b in plan.why_not.better] == [1, 2, 3, 4, 5]
