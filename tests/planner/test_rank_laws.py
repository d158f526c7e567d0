"""Laws of ranking, over random candidates with many ties, random limits and a random cluster."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimates import Estimate
from planner.attainment import Attainment, Metric
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo, quality_needed
from planner.plan import QUALITIES, Candidate, Change, Layout, LimitKind, NoRoom, Plan, Relaxation
from planner.rank import rank
from tests.fingerprint.test_queueing import erlang_c
from tests.planner.candidates import estimate, fits_below

PRICES = Prices(usd_per_gpu_hour=2.0)
LATENCIES = (IntentKind.MIN_LATENCY, IntentKind.COST_SLO)

configs = st.builds(
    DeploymentConfig,
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
    weights=st.sampled_from(list(WeightFormat)),
    kv=st.sampled_from(list(KvFormat)),
    pruning=st.sampled_from([Pruning.NONE, Pruning.NONE, Pruning.WANDA]),
)


@st.composite
def candidate_lists(draw: st.DrawFn) -> list[Candidate]:
    """Few distinct figures, so that ties are common; some without estimate, some refused."""
    found = []
    for config in draw(st.lists(configs, min_size=1, max_size=12, unique=True)):
        guess = estimate(
            config,
            gib_per_gpu=draw(st.sampled_from([5.0, 10.0, 20.0])),
            ttft_s=draw(st.sampled_from([0.1, 0.2, 0.4])),
            tpot_s=draw(st.sampled_from([0.01, 0.02, 0.03])),
            spread=draw(st.sampled_from([0.0, 0.1])),
            memory_spread=draw(st.sampled_from([0.0, 0.05])),
            power_w=draw(st.sampled_from([None, 200.0, 300.0])),
            workload=Workload(batch=draw(st.sampled_from([1, 4])), input_tokens=8, output_tokens=101),
        )
        kind = draw(st.sampled_from(["fine", "fine", "fine", "refused", "unknown"]))
        refusal = "the engine does not run it" if kind == "refused" else None
        found.append(Candidate(config, None if kind == "unknown" else guess, refusal))
    return found


def maybe(values: list[float]) -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), st.sampled_from(values))


@st.composite
def intents(draw: st.DrawFn) -> Intent:
    limits = [
        draw(maybe([0.05, 0.15, 0.3, 1.0])),
        draw(maybe([0.005, 0.015, 0.05])),
        draw(maybe([0.5, 2.0, 4.0])),
    ]
    kind = draw(st.sampled_from(list(IntentKind)))
    if kind is IntentKind.LATENCY_SLO and not any(limits):
        limits[2] = 3.0
    budget = draw(maybe([0.01, 1.0, 20.0, 100.0]))
    return Intent(
        kind=kind,
        cost_model=draw(st.sampled_from(list(CostModel))),
        slo=Slo(ttft_s=limits[0], tpot_s=limits[1], e2e_s=limits[2]) if any(limits) else None,
        percentile=draw(st.sampled_from([50.0, 95.0, 99.0])),
        rate_per_s=draw(st.sampled_from([None] * 16 + [0.01, 0.2, 0.6, 3.0])),  # a plan with one is slow
        quality=draw(st.sampled_from(list(Quality))),
        budget=10.0 if kind is IntentKind.COST_SLO and budget is None else budget,
    )


free_gib = st.sampled_from([2.0, 5.0, 10.0, 20.0])
cases = {"candidates": candidate_lists(), "intent": intents(), "free": free_gib}


def plan_of(candidates: list[Candidate], intent: Intent, free: float) -> Plan:
    return rank(candidates, intent, fits=fits_below(free), prices=PRICES)


def no_worse(plan: Plan, before: Plan) -> bool:
    """Return whether ``plan`` is at least as good as ``before``, of the same kind of intent."""
    if before.best is None:
        return True
    if plan.best is None or plan.best.objective is None or before.best.objective is None:
        return False
    sign = -1 if plan.maximize else 1
    return sign * plan.best.objective <= sign * before.best.objective


@pytest.mark.slow
@given(**cases, data=st.data())
def test_the_order_of_the_candidates_never_matters(
    candidates: list[Candidate], intent: Intent, free: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert plan_of(shuffled, intent, free) == plan_of(candidates, intent, free)


@pytest.mark.slow
@given(**cases)
def test_every_candidate_is_listed_once_with_a_reason_or_none(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    assert Counter(r.config for r in plan.candidates) == Counter(c.config for c in candidates)
    for ranked in plan.candidates:
        assert (ranked.reason is None) == ranked.feasible
    feasible = [r.feasible for r in plan.candidates]
    assert feasible == sorted(feasible, reverse=True), "the feasible ones come first"
    assert (plan.chosen is None) == (not any(feasible))
    for kind in (True, False):
        values = [r.objective for r in plan.candidates if r.feasible is kind and r.objective is not None]
        assert values == sorted(values, reverse=plan.maximize)


@pytest.mark.slow
@given(**cases)
def test_the_chosen_one_keeps_every_limit(candidates: list[Candidate], intent: Intent, free: float) -> None:
    """Checked by formulas of its own, on the estimate's own e2e."""
    best = plan_of(candidates, intent, free).best
    if best is None:
        return
    guess = best.estimate
    assert guess is not None
    assert next(c for c in candidates if c.config == best.config).refusal is None
    assert guess.memory.layer_weight_bytes <= free * 2**30
    assert QUALITIES.index(quality_needed(best.config)) <= QUALITIES.index(intent.quality)
    if intent.budget is not None:
        assert COSTS[intent.cost_model].of(figures([guess]).at_high, PRICES)[0] <= intent.budget
    assert keeps_under_load(guess, intent)
    if intent.slo is not None:
        tolerance = 1e-9
        assert guess.ttft_s.high <= (intent.slo.ttft_s or 1e9) + tolerance
        assert guess.tpot_s.high <= (intent.slo.tpot_s or 1e9) + tolerance
        assert guess.e2e_s.high <= (intent.slo.e2e_s or 1e9) + tolerance


@pytest.mark.slow
@given(**cases, extra=candidate_lists())
def test_a_further_candidate_never_makes_the_best_worse(
    candidates: list[Candidate], intent: Intent, free: float, extra: list[Candidate]
) -> None:
    have = {c.config for c in candidates}
    more = candidates + [c for c in extra if c.config not in have]
    assert no_worse(plan_of(more, intent, free), plan_of(candidates, intent, free))


def keeps_under_load(guess: Estimate, intent: Intent) -> bool:
    """Return whether the rate is served, and each limit missed by as few as may.

    ``tests/planner/test_attainment.py`` holds these probabilities against integrals.
    """
    rate, slo = intent.rate_per_s, intent.slo
    if rate is None:
        return True
    served = Attainment.of_estimates(figures([guess]), [guess], intent.traffic)
    if rate * float(served.service_at(max(95.0, intent.percentile))[0]) >= 1:
        return False
    limits: tuple[tuple[Metric, float | None], ...] = (
        () if slo is None else (("ttft", slo.ttft_s), ("tpot", slo.tpot_s), ("e2e", slo.e2e_s))
    )
    allowed = 1 - intent.percentile / 100
    return all(float(served.misses(m, limit, rate)[0]) <= allowed for m, limit in limits if limit is not None)


def relaxed_intents(intent: Intent) -> list[Intent]:
    """``intent`` with each of its limits wider, one at a time."""
    found = [replace(intent, quality=Quality.ANY)]
    if intent.budget is not None:
        found.append(replace(intent, budget=intent.budget * 3))
    if intent.rate_per_s is not None:
        found += [replace(intent, rate_per_s=intent.rate_per_s / 3), replace(intent, percentile=40.0)]
        if intent.kind not in LATENCIES:  # without a rate theirs is another objective
            found.append(replace(intent, rate_per_s=None))
    if intent.slo is not None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            if (value := getattr(intent.slo, name)) is not None:
                found.append(replace(intent, slo=replace(intent.slo, **{name: value * 3})))
    return found


@pytest.mark.slow
@given(**cases)
def test_a_wider_limit_never_makes_the_best_worse(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    before = plan_of(candidates, intent, free)
    for wider in relaxed_intents(intent):
        assert no_worse(plan_of(candidates, wider, free), before), wider
    assert no_worse(plan_of(candidates, intent, free * 2), before)


Advice = Relaxation | Change


def follow(intent: Intent, free: float, *advice: Advice) -> tuple[Intent, float]:
    """The intent and the free GiB with every limit of ``advice`` as it says."""
    for limit, needed in ((one.limit, one.needed) for one in advice):
        if limit is LimitKind.MEMORY:
            free += needed / 2**30
        elif limit is LimitKind.QUALITY:
            intent = replace(intent, quality=QUALITIES[int(needed)])
        elif limit is LimitKind.BUDGET:
            intent = replace(intent, budget=needed)
        elif limit is LimitKind.RATE:
            intent = replace(intent, rate_per_s=needed)
        else:
            assert intent.slo is not None
            intent = replace(intent, slo=replace(intent.slo, **{f"{limit}_s": needed}))
    return intent, free


def feasible(plan: Plan) -> set[DeploymentConfig]:
    return {ranked.config for ranked in plan.candidates if ranked.feasible}


@pytest.mark.slow
@given(**cases)
def test_following_a_relaxation_makes_the_plan_feasible(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    for advice in plan_of(candidates, intent, free).why_not.relaxations:
        followed = {one.config: one for one in plan_of(candidates, *follow(intent, free, advice)).candidates}
        assert followed[advice.config].feasible, advice
        assert followed[advice.config].objective == advice.objective, "it is what following it gives"


@pytest.mark.slow
@given(**cases)
def test_no_smaller_change_of_a_limit_alone_would_do(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    """Smaller by what rounding to 3 digits can add, 1%; for memory by one byte."""
    for advice in plan_of(candidates, intent, free).why_not.relaxations:
        if advice.limit in (LimitKind.QUALITY, LimitKind.MEMORY):
            less = advice.needed - 1
        else:
            less = advice.needed * (1.011 if advice.limit is LimitKind.RATE else 0.989)
            if (less - advice.allowed) * (advice.needed - advice.allowed) <= 0:
                continue
        smaller = replace(advice, needed=less)
        assert not feasible(plan_of(candidates, *follow(intent, free, smaller))), advice


@pytest.mark.slow
@given(**cases)
def test_a_limit_is_passed_over_only_where_no_change_of_it_would_do(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    if plan.chosen is not None:
        return
    told = {advice.limit for advice in plan.why_not.relaxations}
    without: dict[LimitKind, Intent] = {LimitKind.QUALITY: replace(intent, quality=Quality.ANY)}
    without[LimitKind.BUDGET] = replace(intent, budget=None if intent.budget is None else 1e9)
    if intent.rate_per_s is not None:
        without[LimitKind.RATE] = replace(intent, rate_per_s=1e-6)
    if intent.slo is not None:
        for limit in (LimitKind.TTFT, LimitKind.TPOT, LimitKind.E2E):
            name = f"{limit}_s"
            if getattr(intent.slo, name) is not None:
                without[limit] = replace(intent, slo=replace(intent.slo, **{name: 1e9}))
    for limit, wider in without.items():
        assert (limit in told) == bool(feasible(plan_of(candidates, wider, free))), limit
    assert (LimitKind.MEMORY in told) == bool(feasible(plan_of(candidates, intent, 1e6)))


@pytest.mark.slow
@given(**cases)
def test_what_is_relaxed_together_does_and_nothing_of_it_is_spare(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    together = plan_of(candidates, intent, free).why_not.combined_relaxation
    if together is None:
        return
    assert together.config in feasible(plan_of(candidates, *follow(intent, free, *together.changes)))
    for spared in together.changes:
        others = [change for change in together.changes if change is not spared]
        assert together.config not in feasible(plan_of(candidates, *follow(intent, free, *others))), spared


@pytest.mark.slow
@given(**cases)
def test_there_is_always_a_way_where_something_can_run(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    able = [ranked for ranked in plan.candidates if ranked.refusal is None and ranked.estimate is not None]
    why_not = plan.why_not
    assert bool(why_not.relaxations or why_not.combined_relaxation) == bool(able and plan.chosen is None)
    assert (why_not.nearest is None) == (not able or plan.chosen is not None)


@pytest.mark.slow
@given(**cases)
def test_the_nearest_of_all_is_the_nearest_of_those_that_are_near_alone(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    """Each candidate planned for alone tells its own distance; the law is about choosing among them."""

    def distance(config: DeploymentConfig) -> tuple[float, ...]:
        alone = plan_of([c for c in candidates if c.config == config], intent, free)
        assert alone.why_not.nearest is not None
        missed = {violation.limit: violation for violation in alone.nearest_misses}
        short = missed.pop(LimitKind.MEMORY, None)
        quality = missed.pop(LimitKind.QUALITY, None)
        steps = 0.0 if quality is None else quality.actual - quality.allowed
        ratios = sum(abs(math.log(v.actual / v.allowed)) for v in missed.values())
        return short is not None, steps, round(ratios, 9), 0.0 if short is None else short.actual

    plan = plan_of(candidates, intent, free)
    if plan.why_not.nearest is None:
        return
    able = [ranked.config for ranked in plan.candidates if ranked.refusal is None and ranked.estimate is not None]
    assert distance(plan.why_not.nearest.config) == min(map(distance, able))


@given(**cases)
def test_the_nearest_point_is_admitted_once_all_it_misses_is_granted(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    nearest = plan.why_not.nearest
    if nearest is None:
        return
    granted = []
    for limit, allowed, actual, _ in plan.nearest_misses:
        slightly = {LimitKind.QUALITY: 1.0, LimitKind.RATE: 1 - 1e-9}.get(limit, 1 + 1e-9)
        granted.append(Change(limit, allowed, actual * slightly))
    assert nearest.config in feasible(plan_of(candidates, *follow(intent, free, *granted)))


def mean_beside_constant_lengths(e2e_s: float, slots: int, rate_per_s: float) -> float:
    """M/D/c where a batch is as fast as one request: as many wait as in M/M/c, half as long; NaN: for ever."""
    load = rate_per_s * e2e_s / slots
    if load >= 1:
        return math.nan
    return e2e_s * (1 + erlang_c(slots, load) / (2 * slots * (1 - load)))


def by_hand(candidate: Candidate, intent: Intent, free: float) -> tuple[float, bool] | None:
    """Objective and verdict of one candidate, by formulas for one alone; None: the objective is not known."""
    guess = candidate.estimate
    assert guess is not None
    gpus, batch, tokens = candidate.config.num_gpus, guess.workload.batch, guess.workload.output_tokens
    gib = gpus * guess.memory.layer_weight_bytes / 2**30
    e2e_s = guess.ttft_s.value + (tokens - 1) * guess.tpot_s.value
    e2e_high_s = guess.ttft_s.high + (tokens - 1) * guess.tpot_s.high
    gib_high = gib * (1 + guess.memory.relative_error)
    cost, cost_high = (
        {
            CostModel.MEMORY_LATENCY: size * seconds / batch,
            CostModel.MEMORY: size,
            CostModel.GPU_HOURS: gpus * seconds / batch,
            CostModel.DOLLARS: 2.0 * gpus * seconds / batch / 3600,
        }[intent.cost_model]
        for size, seconds in ((gib, e2e_s), (gib_high, e2e_high_s))
    )
    power = math.nan if guess.power_w_per_gpu is None else guess.power_w_per_gpu.value
    mean_s = e2e_s if intent.rate_per_s is None else mean_beside_constant_lengths(e2e_s, batch, intent.rate_per_s)
    objective = {
        IntentKind.MIN_LATENCY: mean_s,
        IntentKind.MIN_COST: cost,
        IntentKind.MIN_MEMORY: gib,
        IntentKind.MIN_GPU_HOURS: gpus * e2e_s / batch,
        IntentKind.MAX_THROUGHPUT: batch * tokens / e2e_s,
        IntentKind.MIN_ENERGY: power * gpus * e2e_s / batch,
        IntentKind.LATENCY_SLO: cost,
        IntentKind.COST_SLO: mean_s,
    }[intent.kind]
    if math.isnan(objective):
        return None
    fine = candidate.refusal is None and guess.memory.layer_weight_bytes <= free * 2**30
    fine &= quality_needed(candidate.config) in QUALITIES[: QUALITIES.index(intent.quality) + 1]
    fine &= intent.budget is None or cost_high <= intent.budget
    fine &= keeps_under_load(guess, intent)
    slo = intent.slo
    if slo is not None:
        fine &= guess.ttft_s.high <= (slo.ttft_s or math.inf)
        fine &= guess.tpot_s.high <= (slo.tpot_s or math.inf)
        fine &= e2e_high_s <= (slo.e2e_s or math.inf)
    return objective, fine


@pytest.mark.slow
@settings(max_examples=200)
@given(**cases)
def test_the_plan_is_what_each_candidate_gives_by_hand(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    told = {ranked.config: ranked for ranked in plan.candidates}
    fine = []
    at_a_rate = intent.kind in LATENCIES and intent.rate_per_s is not None
    close = 0.02 if at_a_rate else 1e-6  # Sakasegawa's for Erlang's share that waits
    for candidate in candidates:
        if candidate.estimate is None:
            continue
        expected, ranked = by_hand(candidate, intent, free), told[candidate.config]
        if expected is None:
            assert (ranked.objective, ranked.feasible) == (None, False)
            continue
        assert ranked.objective == pytest.approx(expected[0], rel=close)
        assert ranked.feasible == expected[1]
        if expected[1]:
            fine.append(expected[0])
    if fine:
        assert plan.best is not None
        assert plan.best.objective == pytest.approx(max(fine) if plan.maximize else min(fine), rel=close)


@pytest.mark.slow
@given(
    ttft_s=st.floats(0.1, 1.0),
    tpot_s=st.floats(0.005, 0.05),
    faster=st.floats(0.5, 0.99),
    utilisation=st.floats(0.1, 1.5),
    limit=st.floats(0.3, 3.0),
    percentile=st.sampled_from([50.0, 95.0, 99.0]),
)
def test_what_is_faster_in_every_way_is_nearer(
    ttft_s: float, tpot_s: float, faster: float, utilisation: float, limit: float, percentile: float
) -> None:
    """The law holds also where the slower one alone is saturated, so that only a rate describes it."""
    slow, fast = DeploymentConfig(tp=1), DeploymentConfig(tp=2)
    candidates = [
        Candidate(slow, estimate(slow, ttft_s=ttft_s, tpot_s=tpot_s)),
        Candidate(fast, estimate(fast, ttft_s=ttft_s * faster, tpot_s=tpot_s * faster)),
    ]
    rate_per_s = utilisation / (ttft_s + 100 * tpot_s)  # of the slower one
    slo = Slo(ttft_s=ttft_s * limit)
    plan = plan_of(candidates, Intent(slo=slo, rate_per_s=rate_per_s, percentile=percentile), 20.0)
    assert plan.why_not.nearest is None or plan.why_not.nearest.config == fast


@dataclass
class Counting:
    """Counts what is asked of a cluster."""

    free: float
    asked: Counter[DeploymentConfig]

    def __call__(self, seen: Estimate) -> Layout | NoRoom:
        self.asked[seen.config] += 1
        return fits_below(self.free)(seen)


@given(**cases)
def test_the_cluster_is_asked_at_most_once_per_candidate(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    fits = Counting(free, Counter())
    plan = rank(candidates, intent, fits=fits, prices=PRICES)
    assert all(count == 1 for count in fits.asked.values())
    if plan.chosen is not None:
        judged = {r.config for r in plan.candidates if r.feasible or r.no_room is not None}
        assert set(fits.asked) == judged, "and only where nothing else refuses it"
