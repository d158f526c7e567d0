"""A profile that had no room for a part of its plan says so, and the part is measured once there is room."""

from __future__ import annotations

from dataclasses import replace

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import EngineError, IserveError, TooLittleTimeError, UnavailableError
from fingerprint.measurements import Lack, Profile
from fingerprint.profile_plan import Shards
from iserve.controller.profiling_gaps import fillable
from iserve.controller.profiling_scope import lacking
from iserve.planning.notes import plan_notes
from planner.intent import IntentKind, Quality
from tests.fingerprint.step_timed_machine import Cut, StepTimedMachine
from tests.golden_words import Golden
from tests.iserve.test_profiling_run import (
    EXACT,
    FP8,
    NEAR,
    NODE,
    RUNS,
    _nothing_known_of_other_models,  # noqa: F401
    options_of,
    plan_of,
    points,
    profiled,
    with_free,
)

ONE = DeploymentConfig(engine="vllm")
LARGE = replace(EXACT, workload=replace(EXACT.workload, batch=256))
FAST = options_of(IntentKind.MIN_LATENCY, quality=Quality.EXACT)


def notes_of(profile: Profile) -> tuple[str, ...]:
    return plan_notes(plan_of(profile, EXACT), profile, 1)


def gaps(profile: Profile, lacked: Lack) -> dict[DeploymentConfig, set[tuple[int, int]]]:
    return {gap.config: set(gap.points) for gap in profile.unreached if gap.lacked is lacked}


def test_points_without_room_are_lacking_once_there_is_room_and_not_before(golden: Golden) -> None:
    """Plans say so; what is measured of them later is what an idle GPU would have had from the first."""
    busy = with_free(6, 6)
    whole = profiled(StepTimedMachine(), plan_options=LARGE)
    some = profiled(StepTimedMachine(), plan_options=LARGE, node=busy)
    dropped = points(whole) - points(some)
    assert (256, 512) in dropped
    assert gaps(some, Lack.MEMORY)[ONE] == dropped
    assert not some.complete
    golden("controller", notes_of(some))
    assert from_json(to_json(some), Profile) == some

    again = StepTimedMachine()
    assert lacking(some, busy, RUNS, LARGE) == ()
    assert profiled(again, plan_options=LARGE, node=busy, known=some) == some
    assert again.log == [], "it has no more room than it had"

    assert ONE in lacking(some, NODE, RUNS, LARGE)
    both = profiled(StepTimedMachine(), plan_options=LARGE, known=some)
    assert points(both) == points(whole)
    assert len(both.timing) == len(whole.timing), "no point is there twice"
    assert len(both.memory) == len(whole.memory)
    assert both.unreached == ()
    assert notes_of(both) == ()
    assert lacking(both, NODE, RUNS, LARGE) == ()


def test_points_of_an_earlier_request_are_measured_for_a_smaller_one_too() -> None:
    some = profiled(StepTimedMachine(), plan_options=LARGE, node=with_free(6, 6))
    both = profiled(StepTimedMachine(), plan_options=EXACT, known=some)
    assert points(some) | gaps(some, Lack.MEMORY)[ONE] <= points(both)
    assert max(point.max_batch for point in both.memory) == max(point.max_batch for point in some.memory)


def test_room_for_one_point_more_is_what_a_new_measurement_waits_for() -> None:
    """Neither point with 256 sequences has room in 3.5 GiB that are free, and one has in 6 GiB."""
    some = profiled(StepTimedMachine(), plan_options=LARGE, node=with_free(3.5, 3.5))
    assert gaps(some, Lack.MEMORY)[ONE] == {(256, 128), (256, 512)}
    assert fillable(some, with_free(3.5, 3.5).devices) == ()
    assert ONE in fillable(some, with_free(3.5, 6).devices)


def test_degrees_whose_second_gpu_was_held_are_measured_once_it_is_free() -> None:
    held = with_free(2, 139)
    some = profiled(StepTimedMachine(), plan_options=FAST, node=held, shards=Shards.NEVER)
    assert {point.tp * point.pp for point in some.timing} == {1}
    left_out = {*some.skipped, *gaps(some, Lack.MEMORY)}
    assert {replace(ONE, tp=2), replace(ONE, pp=2)} <= left_out
    assert replace(ONE, tp=2) in lacking(some, NODE, RUNS, FAST)
    both = profiled(StepTimedMachine(), plan_options=FAST, known=some)
    assert (2, 1) in {(point.tp, point.pp) for point in both.timing}
    assert lacking(both, NODE, RUNS, FAST) == ()


def test_a_profile_for_no_request_says_which_degrees_had_no_room(golden: Golden) -> None:
    some = profiled(StepTimedMachine(), quality=Quality.EXACT, node=with_free(2, 139), shards=Shards.NEVER)
    assert set(gaps(some, Lack.MEMORY)) == {replace(ONE, tp=2), replace(ONE, pp=2)}
    assert not some.complete
    golden("controller", notes_of(some))


def test_points_at_which_the_engine_died_are_said_and_not_tried_again(golden: Golden) -> None:
    def dies(cut: Cut, batch: int, input_tokens: int, output_tokens: int) -> IserveError | None:
        return EngineError("out of memory") if (batch, input_tokens) == (8, 512) else None

    profile = profiled(StepTimedMachine(broken=dies), plan_options=EXACT)
    assert gaps(profile, Lack.FAILURE)[ONE] == {(8, 512)}
    assert not profile.complete
    assert ONE not in lacking(profile, NODE, RUNS, EXACT)
    golden("controller", notes_of(profile))


def test_a_configuration_that_fails_when_it_is_added_is_said() -> None:
    exact = profiled(StepTimedMachine(), plan_options=EXACT)
    both = profiled(StepTimedMachine(broken=lambda *_: EngineError("no kernel")), plan_options=NEAR, known=exact)
    assert replace(ONE, weights=FP8) in gaps(both, Lack.FAILURE)
    assert not both.complete
    assert any("fp8" in note for note in notes_of(both))


def test_what_the_daemon_was_away_for_is_lacking_still() -> None:
    exact = profiled(StepTimedMachine(), plan_options=EXACT)
    away = StepTimedMachine(refuses_to_open=lambda *_: UnavailableError("the daemon is away"))
    assert profiled(away, plan_options=NEAR, known=exact) == exact
    assert [entry[0] for entry in away.log] == ["open"]


def test_a_degree_that_the_daemon_was_away_for_at_first_is_lacking() -> None:
    def away(tp: int, pp: int) -> IserveError | None:
        return UnavailableError("the daemon is away") if tp == 2 else None

    some = profiled(StepTimedMachine(refuses_to_open=away), plan_options=FAST)
    assert replace(ONE, tp=2) in gaps(some, Lack.AVAILABILITY)
    assert replace(ONE, tp=2) in lacking(some, NODE, RUNS, FAST)
    both = profiled(StepTimedMachine(), plan_options=FAST, known=some)
    assert gaps(both, Lack.AVAILABILITY) == {}
    assert any(point.tp == 2 for point in both.timing)


def test_a_lack_of_time_is_tried_once_more() -> None:
    """A machine that is slow each time is not measured at every deploy, as it is with variants."""
    exact = profiled(StepTimedMachine(), plan_options=EXACT)

    def slow() -> StepTimedMachine:
        return StepTimedMachine(broken=lambda *_: TooLittleTimeError("no answer"))

    once = profiled(slow(), plan_options=NEAR, known=exact)
    assert (once.timing, once.skipped) == (exact.timing, exact.skipped)
    config = lacking(once, NODE, RUNS, NEAR)[0]
    assert config.weights is WeightFormat.FP8
    twice = profiled(slow(), plan_options=NEAR, known=once)
    assert config in gaps(twice, Lack.BUDGET)
    assert config not in lacking(twice, NODE, RUNS, NEAR)
