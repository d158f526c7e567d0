"""Times on shared GPUs: twice as slow everywhere is the plan of estimates twice as long."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Quantity
from planner.intent import Intent, IntentKind, Slo
from planner.plan import Candidate, Layout, LimitKind, NoRoom, Ranked
from planner.rank import best_of, rank
from tests.planner.candidates import Somewhere, estimate, fits_below
from tests.planner.test_rank_laws import PRICES, candidate_lists, intents


@dataclass(frozen=True)
class Alike:
    """Interference that is equally slow everywhere, and costs other deployments nothing."""

    times: float
    fits_gib: float = 100.0

    def slowdown(self, layout: Layout) -> float:
        return self.times

    def taken(self, layout: Layout) -> float:
        return 0.0

    def later(self, layout: Layout, seen: Estimate) -> float:
        return 0.0

    def quietest(self, seen: Estimate) -> Layout | NoRoom:
        return fits_below(self.fits_gib)(seen)


def longer(seen: Estimate, times: float) -> Estimate:
    def all_of(quantity: Quantity, by: float) -> Quantity:
        return replace(quantity, value=quantity.value * by, low=quantity.low * by, high=quantity.high * by)

    power = seen.power_w_per_gpu
    return replace(
        seen,
        ttft_s=all_of(seen.ttft_s, times),
        tpot_s=all_of(seen.tpot_s, times),
        power_w_per_gpu=None if power is None else all_of(power, 1 / times),
    )


@settings(max_examples=25)
@given(
    candidates=candidate_lists(), intent=intents(), room=st.sampled_from([7.0, 15.0, 100.0]), alone=st.booleans()
)
def test_twice_as_slow_is_the_plan_of_times_twice_as_long(
    candidates: list[Candidate], intent: Intent, room: float, alone: bool
) -> None:
    if alone:
        candidates = [
            c if c.estimate is None else c._replace(alone=replace(c.estimate, workload=Workload(1, 8, 101)))
            for c in candidates
        ]
    slow = [
        c._replace(estimate=c.estimate and longer(c.estimate, 2.0), alone=c.alone and longer(c.alone, 2.0))
        for c in candidates
    ]
    fits = fits_below(room)
    beside = rank(candidates, intent, fits=fits, prices=PRICES, neighbours=Alike(2.0, room))
    plain = rank(slow, intent, fits=fits, prices=PRICES)

    def told(one: Ranked) -> object:
        return one.objective, one.cost, one.feasible, one.refusal, one.violations, one.utilisation

    verdicts = {one.config: told(one) for one in plain.candidates}
    for one in beside.candidates:
        if one.no_room is None and one.slowdown > 1:
            assert told(one) == verdicts[one.config]
    assert [one.config for one in beside.candidates if one.feasible] == [
        one.config for one in plain.candidates if one.feasible
    ]
    assert beside.served == plain.served
    assert [r for r in beside.why_not.relaxations if r.limit is not LimitKind.MEMORY] == [
        r for r in plain.why_not.relaxations if r.limit is not LimitKind.MEMORY
    ]  # what has no place has no neighbours
    assert best_of(candidates, intent, fits=fits, prices=PRICES, neighbours=Alike(2.0, room)) == (beside.best)


class ByPlace:
    """Busy where the policy goes, idle elsewhere."""

    def __init__(self) -> None:
        self.quiet = Somewhere((2,))

    def slowdown(self, layout: Layout) -> float:
        return 1.0 if layout is self.quiet else 4.0

    def taken(self, layout: Layout) -> float:
        return 0.0

    def later(self, layout: Layout, seen: Estimate) -> float:
        return 0.0

    def quietest(self, seen: Estimate) -> Layout | NoRoom:
        return self.quiet


@pytest.mark.parametrize(("limit_s", "quiet"), [(9.7, False), (3.0, True), (2.0, None)])
def test_only_a_limit_takes_it_from_the_place_that_the_policy_likes(limit_s: float, quiet: bool | None) -> None:
    """An E2E of 2.4 s, of 9.6 s where the policy goes."""
    one = Candidate(DeploymentConfig(), estimate(DeploymentConfig()))
    intent = Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(e2e_s=limit_s))
    neighbours = ByPlace()
    plan = rank([one], intent, fits=lambda _: Somewhere(), neighbours=neighbours)
    if quiet is None:
        assert plan.best is None
        assert [r.limit for r in plan.why_not.relaxations] == [LimitKind.E2E]
        assert plan.why_not.relaxations[0].needed == pytest.approx(2.4)
    else:
        assert plan.best is not None
        assert (plan.best.layout is neighbours.quiet) == quiet
        assert plan.best.slowdown == (1.0 if quiet else 4.0)


def test_what_others_lose_counts_in_a_latency_only() -> None:
    """Two are fastest on idle GPUs and take what they save from other deployments."""

    class Wide(Alike):
        def taken(self, layout: Layout) -> float:
            return 3.0 if layout.layers_per_stage == (2,) else 0.0

    slow, fast = DeploymentConfig(), DeploymentConfig(tp=2)
    both = [
        Candidate(slow, estimate(slow)),
        Candidate(fast, estimate(fast, tpot_s=0.01, ttft_s=0.2)),
    ]

    def chosen(kind: IntentKind) -> DeploymentConfig:
        plan = rank(
            both,
            Intent(kind=kind),
            fits=lambda seen: Somewhere((2,) if seen.config == fast else (1,)),
            neighbours=Wide(1.5),
        )
        assert plan.best is not None
        if plan.best.config == slow and kind is IntentKind.MIN_LATENCY:
            assert plan.better_idle is not None
            assert "costs the others 3.6 s for each request" in plan.better_idle.text
        return plan.best.config

    assert chosen(IntentKind.MIN_LATENCY) == slow
    assert chosen(IntentKind.MAX_THROUGHPUT) == fast


@settings(max_examples=25)
@given(
    candidates=candidate_lists(),
    intent=intents(),
    room=st.sampled_from([7.0, 15.0, 100.0]),
    times=st.sampled_from([1.0, 2.0]),
)
def test_who_is_expected_keeps_no_candidate_from_a_limit(
    candidates: list[Candidate], intent: Intent, room: float, times: float
) -> None:
    """Neither what is feasible nor any figure changes; only a latency's order may."""

    @dataclass(frozen=True)
    class Expecting(Alike):
        def later(self, layout: Layout, seen: Estimate) -> float:
            return float(seen.config.num_gpus) ** 2

    fits = fits_below(room)
    before = rank(candidates, intent, fits=fits, prices=PRICES, neighbours=Alike(times, room))
    after = rank(candidates, intent, fits=fits, prices=PRICES, neighbours=Expecting(times, room))

    def told(one: Ranked) -> object:
        return one.objective, one.cost, one.feasible, one.refusal, one.violations, one.slowdown

    assert {one.config: told(one) for one in after.candidates if one.feasible} == {
        one.config: told(one) for one in before.candidates if one.feasible
    }
    if intent.kind not in (IntentKind.MIN_LATENCY, IntentKind.COST_SLO):
        assert [one.config for one in after.candidates] == [one.config for one in before.candidates]
    weights = [one.weight for one in after.candidates if one.feasible and one.weight is not None]
    assert weights == sorted(weights, reverse=after.maximize)


def test_what_all_lose_later_decides_and_is_told() -> None:
    """Four GPUs are fastest now, and bring four times the load."""
    narrow, wide = DeploymentConfig(), DeploymentConfig(tp=4)
    both = [Candidate(narrow, estimate(narrow)), Candidate(wide, estimate(wide, tpot_s=0.01, ttft_s=0.2))]

    class Expecting(Alike):
        def later(self, layout: Layout, seen: Estimate) -> float:
            return 3.0 * seen.config.num_gpus - 3.0

    def chosen(kind: IntentKind) -> DeploymentConfig:
        plan = rank(both, Intent(kind=kind), fits=lambda _: Somewhere(), neighbours=Expecting(1.0))
        assert plan.best is not None
        if plan.best.config == narrow and kind is IntentKind.MIN_LATENCY:
            assert plan.better_idle is not None
            assert plan.better_idle.config == wide
            assert "with those to come, all lose 10.8 s more by each request" in plan.better_idle.text
            assert "times as slow" not in plan.better_idle.text.split(";")[1]
        return plan.best.config

    assert chosen(IntentKind.MIN_LATENCY) == narrow
    assert chosen(IntentKind.MAX_THROUGHPUT) == wide
