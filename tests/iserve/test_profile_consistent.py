"""Fingerprints whose times contradict each other, without a step timer: measured again, then left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.errors import EngineError, NotMeasuredError, TooLittleTimeError, UnmeasurableError
from fingerprint.estimates import Source
from fingerprint.estimators.l2 import MeasuredKey
from fingerprint.measurements import Profile, TimingPoint
from fingerprint.profile import ProfilePlan
from iserve.controller.profiling import _check_usable
from iserve.controller.profiling_run import consistent
from iserve.planning.estimator_factory import contradictions, estimator_for
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile
from tests.golden_words import Golden

GOOD = take_profile(SyntheticMachine(llama()))
PLAN = ProfilePlan(degrees=((1, 1), (2, 1), (1, 2)), budget_s=60.0)
WORK = Workload(1, 512, 128)
WHOLE, SPLIT = DeploymentConfig(engine=GOOD.engine), DeploymentConfig(tp=2, engine=GOOD.engine)


def key(point: TimingPoint) -> MeasuredKey:
    return MeasuredKey(point.tp, point.pp, point.weights, point.kv)


def swapped(tp: int) -> Profile:
    """Return a profile as if two layers had been run as one and one as two, by so many ranks of one stage."""
    at = {(key(p), p.batch, p.input_tokens, p.output_tokens, p.num_layers): p for p in GOOD.timing}
    timing = []
    for point in GOOD.timing:
        if (point.tp, point.pp) == (tp, 1):
            depth = 3 - point.num_layers
            other = at[key(point), point.batch, point.input_tokens, point.output_tokens, depth]
            point = replace(point, runs=other.runs, loads=other.loads)
        timing.append(point)
    return replace(GOOD, timing=tuple(timing))


def never(plan: ProfilePlan) -> Profile:
    raise AssertionError(f"measured again: {plan}")


def test_what_agrees_is_kept_as_it_is() -> None:
    assert contradictions(GOOD) == {}
    assert consistent(GOOD, PLAN, never) is GOOD


def test_what_contradicts_itself_is_measured_again_and_nothing_else_is() -> None:
    asked: list[ProfilePlan] = []

    def again(plan: ProfilePlan) -> Profile:
        asked.append(plan)
        return replace(GOOD, timing=tuple(p for p in GOOD.timing if (p.tp, p.pp) == (2, 1)), spent_s=7.0)

    mended = consistent(replace(swapped(2), spent_s=50.0), PLAN, again)
    ((plan,), (note,)) = asked, mended.notes
    assert (plan.degrees, plan.weights, plan.budget_s) == (((2, 1),), (WeightFormat.BITS16,), pytest.approx(20.0))
    assert note.startswith("tp=2 pp=1 16bit: one layer takes -")
    assert note.endswith("; measured again")
    assert mended.spent_s == 57.0
    assert estimator_for(mended).estimate(SPLIT, WORK).ttft_s == estimator_for(GOOD).estimate(SPLIT, WORK).ttft_s


@pytest.mark.parametrize("fails", [False, True])
def test_measured_twice_it_is_unusable_and_never_extrapolated(fails: bool, golden: Golden) -> None:
    def again(_: ProfilePlan) -> Profile:
        if fails:
            raise EngineError("its worker died")
        return swapped(2)

    left = consistent(swapped(2), PLAN, again)
    assert (2, 1) not in {(point.tp, point.pp) for point in left.timing}
    assert not left.complete
    golden("controller", estimator_for(left).warnings)
    estimates = estimator_for(left)
    assert estimates.estimate(SPLIT, WORK).ttft_s.source is Source.SCALED
    assert estimates.estimate(WHOLE, WORK) == estimator_for(GOOD).estimate(WHOLE, WORK)


def test_where_nothing_else_is_left_there_is_no_profile(golden: Golden) -> None:
    alone = replace(swapped(1), timing=tuple(p for p in swapped(1).timing if (p.tp, p.pp) == (1, 1)))
    with golden.raises("controller", NotMeasuredError):
        consistent(alone, replace(PLAN, degrees=((1, 1),)), lambda _: alone)


@pytest.mark.parametrize("complete", [False, True])
def test_what_tells_nothing_is_refused_and_more_time_is_advised_where_it_helps(
    complete: bool, golden: Golden
) -> None:
    """More time is of no use to a profile that has measured all that was planned."""
    _check_usable(GOOD, WORK)
    empty = replace(GOOD, timing=(), spent_s=41.0, complete=complete)
    with golden.raises("controller", UnmeasurableError if complete else TooLittleTimeError):
        _check_usable(empty, WORK)
