"""Laws of ranking, over random candidates with many ties, random limits and a random cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimates import Estimate
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel, Intent, IntentKind, Quality, Slo, quality_needed
from planner.plan import QUALITIES, Candidate, Layout, LimitKind, NoRoom, Plan, Relaxation
from planner.queueing import md1_wait_quantile
from planner.rank import rank
from tests.planner.candidates import estimate, fits_below

PRICES = Prices(usd_per_gpu_hour=2.0)

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
        rate_per_s=draw(maybe([0.01, 0.2, 0.6, 3.0])),
        quality=draw(st.sampled_from(list(Quality))),
        budget=10.0 if kind is IntentKind.COST_SLO and budget is None else budget,
    )


free_gib = st.sampled_from([2.0, 5.0, 10.0, 20.0])
cases = {"candidates": candidate_lists(), "intent": intents(), "free": free_gib}


def plan_of(candidates: list[Candidate], intent: Intent, free: float) -> Plan:
    return rank(candidates, intent, fits=fits_below(free), prices=PRICES)


def no_worse(plan: Plan, before: Plan) -> bool:
    """Whether ``plan`` is at least as good as ``before``, of the same kind of intent."""
    if before.best is None:
        return True
    if plan.best is None or plan.best.objective is None or before.best.objective is None:
        return False
    sign = -1 if plan.maximize else 1
    return sign * plan.best.objective <= sign * before.best.objective


@given(**cases, data=st.data())
def test_the_order_of_the_candidates_never_matters(
    candidates: list[Candidate], intent: Intent, free: float, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(candidates))
    assert plan_of(shuffled, intent, free) == plan_of(candidates, intent, free)


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
        assert COSTS[intent.cost_model].of(figures([guess]), PRICES)[0] <= intent.budget
    wait_s = 0.0
    if intent.rate_per_s is not None:
        service = figures([guess]).service_s
        assert service[0] * intent.rate_per_s < 1
        wait_s = float((service * md1_wait_quantile(service * intent.rate_per_s, intent.percentile))[0])
    if intent.slo is not None:
        tolerance = 1e-9
        assert guess.ttft_s.high + wait_s <= (intent.slo.ttft_s or 1e9) + tolerance
        assert guess.tpot_s.high <= (intent.slo.tpot_s or 1e9) + tolerance
        assert guess.e2e_s.high + wait_s <= (intent.slo.e2e_s or 1e9) + tolerance


@given(**cases, extra=candidate_lists())
def test_a_further_candidate_never_makes_the_best_worse(
    candidates: list[Candidate], intent: Intent, free: float, extra: list[Candidate]
) -> None:
    have = {c.config for c in candidates}
    more = candidates + [c for c in extra if c.config not in have]
    assert no_worse(plan_of(more, intent, free), plan_of(candidates, intent, free))


def relaxed_intents(intent: Intent) -> list[Intent]:
    """``intent`` with each of its limits wider, one at a time."""
    found = [replace(intent, quality=Quality.ANY)]
    if intent.budget is not None:
        found.append(replace(intent, budget=intent.budget * 3))
    if intent.rate_per_s is not None:
        found += [replace(intent, rate_per_s=intent.rate_per_s / 3), replace(intent, percentile=40.0)]
        found.append(replace(intent, rate_per_s=None))
    if intent.slo is not None:
        for name in ("ttft_s", "tpot_s", "e2e_s"):
            if (value := getattr(intent.slo, name)) is not None:
                found.append(replace(intent, slo=replace(intent.slo, **{name: value * 3})))
    return found


@given(**cases)
def test_a_wider_limit_never_makes_the_best_worse(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    before = plan_of(candidates, intent, free)
    for wider in relaxed_intents(intent):
        assert no_worse(plan_of(candidates, wider, free), before), wider
    assert no_worse(plan_of(candidates, intent, free * 2), before)


def follow(intent: Intent, advice: Relaxation) -> Intent:
    if advice.limit is LimitKind.QUALITY:
        return replace(intent, quality=QUALITIES[int(advice.needed)])
    if advice.limit is LimitKind.BUDGET:
        return replace(intent, budget=advice.needed)
    if advice.limit is LimitKind.RATE:
        return replace(intent, rate_per_s=advice.needed)
    assert intent.slo is not None
    return replace(intent, slo=replace(intent.slo, **{f"{advice.limit}_s": advice.needed}))


@settings(max_examples=300)
@given(**cases)
def test_following_a_relaxation_makes_the_plan_feasible(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    plan = plan_of(candidates, intent, free)
    for advice in plan.why_not.relaxations:
        if advice.limit is LimitKind.MEMORY:
            after = plan_of(candidates, intent, free + advice.needed / 2**30)
        else:
            after = plan_of(candidates, follow(intent, advice), free)
        assert advice.config in {r.config for r in after.candidates if r.feasible}, advice


@given(**cases)
def test_the_nearest_point_is_admitted_once_all_it_misses_is_granted(
    candidates: list[Candidate], intent: Intent, free: float
) -> None:
    nearest = plan_of(candidates, intent, free).why_not.nearest
    if nearest is None or any(v.limit is LimitKind.MEMORY for v in nearest.violations):
        return
    granted = intent
    for violation in nearest.violations:
        slightly = {LimitKind.QUALITY: 1.0, LimitKind.RATE: 1 - 1e-9}.get(violation.limit, 1 + 1e-9)
        needed = violation.actual * slightly
        advice = Relaxation(violation.limit, violation.allowed, needed, nearest.config, None, "")
        granted = follow(granted, advice)
    after = plan_of(candidates, granted, free)
    assert nearest.config in {r.config for r in after.candidates if r.feasible}


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
    """Also where the slower one alone is saturated, so that only a rate can be told of it."""
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
