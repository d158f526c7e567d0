"""Advice with nothing feasible: the nearest point, and what each limit alone would have to be."""

from __future__ import annotations

import pytest

from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.estimates import Estimate
from fingerprint.queueing import MODEL_NAME
from planner.intent import Intent, Quality, Slo
from planner.plan import Change, LimitKind, NoRoom, Plan, Relaxation
from planner.rank import rank
from tests.golden_words import Golden
from tests.planner.candidates import candidate, everything_fits, fits_below

ONE, TWO, FOUR = DeploymentConfig(tp=1), DeploymentConfig(tp=2), DeploymentConfig(tp=4)
INT4 = DeploymentConfig(weights=WeightFormat.INT4)


def relaxation(plan: Plan, limit: LimitKind) -> Relaxation:
    assert plan.chosen is None
    (only,) = (r for r in plan.why_not.relaxations if r.limit is limit)
    return only


def test_a_feasible_plan_needs_no_relaxation() -> None:
    plan = rank([candidate(ONE)], Intent(), fits=everything_fits)
    assert (plan.why_not.nearest, plan.why_not.relaxations) == (None, ())


def test_ttft_is_relaxed_to_the_least_that_admits_a_candidate_that_fits() -> None:
    plan = rank(
        [
            candidate(ONE, ttft_s=0.9, gib_per_gpu=10.0),
            candidate(TWO, ttft_s=0.8301, gib_per_gpu=10.0),
            candidate(FOUR, ttft_s=0.6, gib_per_gpu=99.0),  # closer, and too large
        ],
        Intent(slo=Slo(ttft_s=0.5)),
        fits=fits_below(40.0),
    )
    advice = relaxation(plan, LimitKind.TTFT)
    assert (advice.allowed, advice.needed, advice.config) == (0.5, 0.831, TWO)
    assert advice.text == "ttft=0.5 -> 0.831 s would admit tp=2,pp=1,weights=16bit,kv=16bit,pruning=none"
    assert plan.why_not.nearest is not None
    assert plan.why_not.nearest.config == TWO


def test_limits_that_do_only_together_are_told_together(golden: Golden) -> None:
    """The only candidate misses TTFT and budget: no single change helps."""
    plan = rank([candidate(ONE)], Intent(slo=Slo(ttft_s=0.1), budget=1.0), fits=everything_fits)
    assert plan.why_not.relaxations == ()
    nearest = plan.why_not.nearest
    assert nearest is not None
    assert [(v.limit, v.allowed, v.actual) for v in plan.nearest_misses] == [
        (LimitKind.BUDGET, 1.0, pytest.approx(24.0)),
        (LimitKind.TTFT, 0.1, pytest.approx(0.4)),
    ]
    together = plan.why_not.combined_relaxation
    assert together is not None
    assert together.changes == (Change(LimitKind.BUDGET, 1.0, 24.0), Change(LimitKind.TTFT, 0.1, 0.4))
    golden("planning", together.text)


def test_a_nearest_point_that_misses_one_limit_needs_nothing_together() -> None:
    plan = rank([candidate(ONE)], Intent(slo=Slo(ttft_s=0.1)), fits=everything_fits)
    assert [r.limit for r in plan.why_not.relaxations] == [LimitKind.TTFT]
    assert plan.why_not.combined_relaxation is None


def test_where_nothing_fits_either_memory_is_one_of_the_limits(golden: Golden) -> None:
    """Both miss TTFT and fit nowhere; the second is farther from its limit though less short of memory."""
    plan = rank(
        [candidate(ONE, gib_per_gpu=30.0), candidate(TWO, gib_per_gpu=20.0, ttft_s=0.8)],
        Intent(slo=Slo(ttft_s=0.2)),
        fits=fits_below(10.0),
    )
    assert plan.why_not.relaxations == ()
    nearest, together = plan.why_not.nearest, plan.why_not.combined_relaxation
    assert nearest is not None
    assert together is not None
    assert nearest.config == together.config == ONE
    assert together.changes == (Change(LimitKind.TTFT, 0.2, 0.4), Change(LimitKind.MEMORY, 0.0, 20.0 * 2**30))
    golden("planning", together.text)
    golden("planning", nearest.text)


def test_no_number_is_promised_where_gpus_are_missing(golden: Golden) -> None:
    def two_more(seen: Estimate) -> NoRoom:
        return NoRoom("needs 3 GPUs, there is 1", 2**30, missing_gpus=2)

    why_not = rank([candidate(ONE)], Intent(slo=Slo(ttft_s=0.2)), fits=two_more).why_not
    assert why_not.nearest is not None
    golden("planning", why_not.nearest.text)
    assert (why_not.relaxations, why_not.combined_relaxation) == ((), None)


def test_budget_names_its_unit() -> None:
    plan = rank([candidate(ONE)], Intent(budget=20.0), fits=everything_fits)
    assert relaxation(plan, LimitKind.BUDGET).text.startswith("budget=20 -> 24 GiB*s would admit tp=1")


def test_quality_is_relaxed_one_step_where_one_does() -> None:
    int8 = DeploymentConfig(weights=WeightFormat.INT8)
    big, small, smallest = (
        candidate(ONE, gib_per_gpu=20.0),
        candidate(int8, gib_per_gpu=10.0),
        candidate(INT4, gib_per_gpu=5.0),
    )
    intent = Intent(quality=Quality.EXACT)
    to_near = relaxation(rank([big, small, smallest], intent, fits=fits_below(12.0)), LimitKind.QUALITY)
    assert to_near.text.startswith("quality=exact -> near would admit tp=1,pp=1,weights=int8")
    to_any = relaxation(rank([big, small, smallest], intent, fits=fits_below(6.0)), LimitKind.QUALITY)
    assert to_any.text.startswith("quality=exact -> any would admit tp=1,pp=1,weights=int4")


def test_rate_is_relaxed_to_what_can_be_served() -> None:
    """e2e 2.4 s serves 0.41667 requests/s at most; the largest rate below that, rounded down."""
    plan = rank([candidate(ONE)], Intent(rate_per_s=1.0), fits=everything_fits)
    advice = relaxation(plan, LimitKind.RATE)
    assert (advice.allowed, advice.needed) == (1.0, 0.416)
    assert MODEL_NAME in advice.text


def test_rate_is_also_what_a_missed_ttft_asks_for_when_the_queue_is_the_reason() -> None:
    plan = rank([candidate(ONE)], Intent(slo=Slo(ttft_s=0.5), rate_per_s=0.3), fits=everything_fits)
    slower = relaxation(plan, LimitKind.RATE)
    later = relaxation(plan, LimitKind.TTFT)
    assert 0 < slower.needed < 0.3
    assert later.needed > 0.5


def test_a_ttft_that_no_rate_can_meet_does_not_blame_the_rate() -> None:
    plan = rank([candidate(ONE)], Intent(slo=Slo(ttft_s=0.3), rate_per_s=0.3), fits=everything_fits)
    assert [r.limit for r in plan.why_not.relaxations] == [LimitKind.TTFT]


def test_memory_says_how_much(golden: Golden) -> None:
    plan = rank(
        [candidate(ONE, gib_per_gpu=30.0), candidate(TWO, gib_per_gpu=16.0)], Intent(), fits=fits_below(10.0)
    )
    golden("planning", [r.text for r in plan.why_not.relaxations])
    assert plan.why_not.nearest is not None
    golden("planning", plan.why_not.nearest.text)


def test_the_nearest_point_fits_and_keeps_the_quality_before_it_is_fast() -> None:
    plan = rank(
        [
            candidate(ONE, ttft_s=5.0, gib_per_gpu=10.0),  # 10 times the limit, but of the quality asked for
            candidate(INT4, ttft_s=0.51, gib_per_gpu=5.0),
            candidate(TWO, ttft_s=0.52, gib_per_gpu=90.0),  # does not fit
        ],
        Intent(slo=Slo(ttft_s=0.5)),
        fits=fits_below(40.0),
    )
    assert plan.why_not.nearest is not None
    assert plan.why_not.nearest.config == ONE


def test_what_cannot_run_is_never_the_nearest(golden: Golden) -> None:
    plan = rank(
        [candidate(ONE, refusal="torch does not run it"), candidate(TWO, ttft_s=9.0)],
        Intent(slo=Slo(ttft_s=0.5)),
        fits=everything_fits,
    )
    assert plan.why_not.nearest is not None
    assert plan.why_not.nearest.config == TWO
    only_refused = rank([candidate(ONE, refusal="torch does not run it")], Intent(), fits=everything_fits)
    assert only_refused.why_not.nearest is None
    golden("planning", [b.reason for b in only_refused.why_not.better])


def test_the_nearest_rate_has_the_slo_in_view(golden: Golden) -> None:
    """At 0.5 requests/s both are saturated: the one that serves more has no time to let anybody wait.

    ONE: TTFT 0.499 s of 0.5 s, e2e 2.1 s: 0.001 s to wait, so 95% must find it idle, 0.05 / 2.1 requests/s.
    TWO: TTFT 0.1 s, e2e 2.3 s, which leaves 0.4 s to wait.
    """
    plan = rank(
        [candidate(ONE, ttft_s=0.499, tpot_s=0.01601), candidate(TWO, ttft_s=0.1, tpot_s=0.022)],
        Intent(slo=Slo(ttft_s=0.5), rate_per_s=0.5),
        fits=everything_fits,
    )
    nearest = plan.why_not.nearest
    assert nearest is not None
    assert nearest.config == TWO
    (only,) = plan.nearest_misses
    assert only.limit is LimitKind.RATE
    assert 0.05 / 2.3 < only.actual < 0.1
    golden("planning", nearest.text)


def test_the_faster_of_two_is_the_nearer_although_only_the_slower_is_saturated() -> None:
    """Candidate ONE, whose long wait ends, is not the farther for having a wait to report; TWO is saturated.

    At 0.4 requests/s, ONE has e2e 2.4 s, utilisation 0.96; TWO e2e 2.6 s, 1.04: only a rate describes it.
    """
    plan = rank(
        [candidate(ONE), candidate(TWO, ttft_s=0.45, tpot_s=0.0215)],
        Intent(slo=Slo(ttft_s=0.5), rate_per_s=0.4),
        fits=everything_fits,
    )
    nearest = plan.why_not.nearest
    assert nearest is not None
    assert nearest.config == ONE
    (only,) = plan.nearest_misses
    assert (only.limit, only.allowed) == (LimitKind.RATE, 0.4)
    # TTFT leaves ONE 0.1 s, 0.042 of its service time: P(W = 0) = 1 - u, so 95% wait as long at u = 0.052
    assert only.actual == pytest.approx(0.052 / 2.4, rel=0.05), "waits are taken for exponential"


def test_a_percentile_that_only_an_idle_server_keeps_is_refused_in_words() -> None:
    """TTFT leaves no time to wait: all but 1e-12 of the requests must find it idle, at no rate worth a number."""
    plan = rank(
        [candidate(ONE)],
        Intent(slo=Slo(ttft_s=0.4), rate_per_s=0.4, percentile=99.9999999999),
        fits=everything_fits,
    )
    assert plan.chosen is None
    assert [r.limit for r in plan.why_not.relaxations] == [LimitKind.TTFT]
    assert plan.why_not.nearest is not None
    assert plan.why_not.nearest.text


@pytest.mark.parametrize("rate_per_s", [None, 0.4])
@pytest.mark.filterwarnings("error")
def test_the_least_limit_that_there_is_has_a_nearest_too(rate_per_s: float | None) -> None:
    """The quotient of a time and 5e-324 s is no number; how far a time is from it is one, and orders them."""
    plan = rank(
        [candidate(ONE, ttft_s=0.9), candidate(TWO, ttft_s=0.5), candidate(FOUR, ttft_s=0.7)],
        Intent(slo=Slo(ttft_s=5e-324), rate_per_s=rate_per_s),
        fits=everything_fits,
    )
    nearest = plan.why_not.nearest
    assert nearest is not None
    assert rate_per_s is not None or nearest.config == TWO
