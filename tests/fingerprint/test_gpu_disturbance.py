"""GPUs that are disturbed while they are measured: by a clock, by another process, by kernels that compile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import TooLittleTimeError
from fingerprint.estimators.whole_points import whole_points
from fingerprint.gpu_disturbance import (
    CLOCK_TOLERANCE,
    COMMON_CLOCK_TOLERANCE,
    LEAST_COMMON_POINTS,
    SLOWDOWNS,
    disturbance,
    disturbance_marks,
)
from fingerprint.measurements import OtherProcess, Profile, TimingPoint
from fingerprint.profile import ProfileProgress
from fingerprint.profile_sessions import CallState
from tests.bench.accuracy import RESULTS, load
from tests.bench.accuracy_families import FOLDERS
from tests.fingerprint.depth_tied_runs import WHOLE, loads, measured
from tests.fingerprint.step_timed_machine import CLOCK_MHZ, PLAN, Cut, StepTimedMachine, take_depth_tied
from tests.golden_words import Golden

BURSTS = 2 * len(PLAN.points) + 2 * len(PLAN.shallow_points)  # visits of the machine when nothing is disturbed
OTHER = OtherProcess(pid=4711, used_bytes=3 * 2**30)
THERMAL = {"slowed_by": ("thermal slowdown",), "sm_clock_mhz": 1500.0}


def during(visits: range, changes: dict[str, Any]) -> Callable[[int, Cut], dict[str, Any]]:
    return lambda number, _cut: changes if number in visits else {}


def whole(profile: Profile) -> list[tuple[int, int, float]]:
    return [(p.batch, p.input_tokens, p.ttft_s) for p in whole_points(profile.timing, 32)]


@cache
def undisturbed() -> Profile:
    return take_depth_tied(StepTimedMachine())


@pytest.fixture
def sound() -> Profile:
    return undisturbed()


def with_clocks(point: TimingPoint, *clocks_mhz: float) -> TimingPoint:
    run = point.runs[0]
    return replace(point, runs=tuple(replace(run, sm_clock_mhz=mhz) for mhz in clocks_mhz))


class TestRecordings:
    @pytest.mark.parametrize("folder", [*FOLDERS, "formats-h200-vllm-0.33"])
    def test_no_kept_recording_is_marked(self, folder: str) -> None:
        recordings = load(RESULTS / folder)
        assert recordings
        assert {one.model: disturbance_marks(one.profile.timing) for one in recordings} == {
            one.model: () for one in recordings
        }


class TestClock:
    @pytest.mark.parametrize(("ratio", "is_marked"), [(0.97, False), (1.03, True)])
    @pytest.mark.parametrize("rises", [False, True])
    def test_halves_of_a_point_differ_by_more_than_the_tolerance(self, sound, ratio, is_marked, rises) -> None:
        clocks = [CLOCK_MHZ, CLOCK_MHZ / (1 + ratio * CLOCK_TOLERANCE)]
        point = with_clocks(sound.timing[0], *sorted(clocks, reverse=not rises))
        assert bool(disturbance([point], ())) == bool(disturbance_marks([point])) == is_marked

    @pytest.mark.parametrize(("ratio", "is_marked"), [(0.97, False), (1.03, True)])
    def test_depths_of_a_point_differ_by_more_than_the_tolerance(self, sound, ratio, is_marked) -> None:
        slow = CLOCK_MHZ / (1 + ratio * CLOCK_TOLERANCE)
        one = next(p for p in sound.timing if p.num_layers == 2)
        other = with_clocks(next(p for p in sound.timing if same(p, one, 1)), slow)
        assert bool(disturbance([other], [one])) == bool(disturbance_marks([one, other])) == is_marked
        unlike = replace(other, input_tokens=other.input_tokens + 1)
        assert disturbance([unlike], [one]) is None, "a clock follows what is computed"

    @pytest.mark.parametrize(("ratio", "is_marked"), [(0.9, False), (1.1, True)])
    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_clock_that_stays_lower_at_one_depth_is_seen_in_the_median_of_many_points(
        self, sound, ratio, is_marked, layers
    ) -> None:
        slow = CLOCK_MHZ / (1 + ratio * COMMON_CLOCK_TOLERANCE)
        changed = [with_clocks(p, slow) if p.num_layers == layers else p for p in sound.timing]
        assert bool(disturbance_marks(changed)) == is_marked
        alone = [p for p in changed if p.output_tokens == 1 and p.batch == 1]
        assert len(alone) < 2 * LEAST_COMMON_POINTS
        assert not disturbance_marks(alone)

    @pytest.mark.parametrize("reason", sorted(SLOWDOWNS))
    def test_heat_and_hardware_mark_at_any_clock_and_a_power_cap_does_not(self, sound, reason) -> None:
        point = sound.timing[0]
        slowed = replace(point, runs=tuple(replace(run, slowed_by=(reason,)) for run in point.runs))
        capped = replace(point, runs=tuple(replace(run, slowed_by=("power cap",)) for run in point.runs))
        assert reason in (disturbance([slowed], ()) or "")
        assert disturbance([capped], ()) is None
        assert disturbance_marks([capped]) == ()

    @given(st.lists(st.floats(min_value=200, max_value=3000), min_size=1, max_size=8), st.floats(0.1, 10))
    def test_marks_do_not_depend_on_the_unit_of_clocks(self, clocks: list[float], unit: float) -> None:
        point = undisturbed().timing[0]
        scaled = [unit * mhz for mhz in clocks]
        one, other = (bool(disturbance_marks([with_clocks(point, *of)])) for of in (clocks, scaled))
        middle = len(clocks) // 2
        close = middle and abs(ratio_of(clocks, middle) - 1 - CLOCK_TOLERANCE) < 1e-9
        assert close or one == other

    def test_clocks_that_are_not_reported_mark_nothing(self, sound) -> None:
        silent = [replace(p, runs=tuple(replace(run, sm_clock_mhz=None) for run in p.runs)) for p in sound.timing]
        assert disturbance_marks(silent) == ()

    def test_a_point_that_was_throttled_for_a_while_is_measured_again(self, sound, golden: Golden) -> None:
        machine = StepTimedMachine(disturbed=during(range(3, 4), THERMAL))
        profile = take_depth_tied(machine)
        assert machine.visits == BURSTS + 2
        assert whole(profile) == whole(sound)
        golden("fingerprint", "\n".join(profile.notes))

    def test_a_clock_that_stays_low_is_marked(self, golden: Golden) -> None:
        """All points of the second depth differ from the first depth's: one is tried three times."""
        machine = StepTimedMachine(disturbed=lambda _, cut: {"sm_clock_mhz": 1400.0} if cut.layers == 1 else {})
        profile = take_depth_tied(machine)
        assert machine.visits == BURSTS + 2 * 2
        assert measured(profile) == WHOLE
        golden("fingerprint", "\n".join(disturbance_marks(profile.timing)))
        assert set(disturbance_marks(profile.timing)) <= set(profile.notes)

    def test_without_time_for_it_nothing_is_measured_again(self) -> None:
        spent_s = take_depth_tied(StepTimedMachine()).spent_s
        machine = StepTimedMachine(disturbed=lambda *_: THERMAL)
        profile = take_depth_tied(machine, budget_s=1.2 * spent_s, visits=1)
        assert profile.spent_s <= 1.5 * spent_s
        assert any("thermal slowdown" in note for note in profile.notes)

    def test_a_further_visit_at_another_clock_is_left_out(self, sound) -> None:
        again = {"sm_clock_mhz": 1000.0}
        machine = StepTimedMachine(disturbed=during(range(2 * len(PLAN.points) + 1, 1000), again))
        profile = take_depth_tied(machine, visits=2, shallow_points=())
        deepest = [p for p in profile.timing if p.num_layers == 2]
        assert {run.sm_clock_mhz for p in deepest for run in p.runs} == {CLOCK_MHZ}
        assert any("not kept" in note for note in profile.notes)


class TestOtherProcess:
    def test_a_visit_next_to_another_process_is_made_again(self, sound, golden: Golden) -> None:
        machine = StepTimedMachine(disturbed=during(range(5, 6), {"others": (OTHER,), "sm_clock_mhz": 1700.0}))
        profile = take_depth_tied(machine)
        assert whole(profile) == whole(sound)
        assert not any(run.others for point in profile.timing for run in point.runs)
        golden("fingerprint", "\n".join(profile.notes))

    @pytest.mark.parametrize(
        "other",
        [OTHER, replace(OTHER, used_bytes=None), replace(OTHER, pid=None)],
        ids=["pid", "no bytes", "bytes"],
    )
    def test_one_that_stays_is_marked_with_what_is_known_of_it(self, other, golden: Golden) -> None:
        grown = None if other.used_bytes is None else 2 * other.used_bytes
        last = (replace(other, used_bytes=grown),)
        machine = StepTimedMachine(disturbed=lambda n, _: {"others": last if n > 9 else (other,)} if n > 4 else {})
        marks = disturbance_marks(take_depth_tied(machine).timing)
        assert len(marks) == 1, "one process, whatever it holds by and by"
        golden("fingerprint", marks[0])


class TestCompiling:
    def test_progress_says_that_kernels_are_compiled_and_their_seconds_are_counted(self, golden: Golden) -> None:
        machine = StepTimedMachine(compiles=lambda number, _: 240.0 if number == 1 else 0.0)
        seen: list[ProfileProgress] = []
        profile = take_depth_tied(machine, progress=seen.append)
        of_compiling = [one for one in seen if ": compiling kernels" in one.running]
        golden("fingerprint", of_compiling[0].running)
        seconds = [one.elapsed_s for one in of_compiling]
        assert seconds == sorted(seconds)
        assert seconds[-1] == pytest.approx(240.0)
        assert profile.compile_s == 240.0
        assert profile.spent_s > 240.0
        assert measured(profile) == WHOLE
        assert any("240 of" in note for note in profile.notes)

    def test_a_call_that_compiles_without_end_is_cut_at_the_budget(self) -> None:
        machine = StepTimedMachine(compiles=lambda *_: 3600.0)
        begun = machine.clock.now
        with pytest.raises(TooLittleTimeError):
            take_depth_tied(machine, budget_s=90.0)
        assert machine.clock.now - begun == pytest.approx(90.0 + machine.launch_s + machine.load_s)
        assert all(session.closed for session in machine.sessions)

    def test_what_was_measured_before_the_cut_is_kept(self) -> None:
        """The fifth visit, the third point's, compiles: two points are there, and the other depth runs one."""
        machine = StepTimedMachine(compiles=lambda number, _: 3600.0 if number == 5 else 0.0)
        profile = take_depth_tied(machine, budget_s=90.0)
        assert 90.0 <= profile.spent_s <= 91.0
        assert measured(profile) == {(2, 1, 128), (2, 1, 1024), (1, 1, 128)}
        assert len(loads(machine)) == 2
        assert profile.unreached[0].missing_points == 4
        assert not profile.complete
        assert all(session.closed for session in machine.sessions)

    def test_with_little_time_left_a_call_is_still_waited_for_a_while(self) -> None:
        machine = StepTimedMachine(compiles=lambda *_: 3600.0)
        begun = machine.clock.now
        with pytest.raises(TooLittleTimeError):
            take_depth_tied(machine, budget_s=0.5)
        waited_s = machine.clock.now - begun - machine.launch_s - machine.load_s
        assert waited_s == pytest.approx(PLAN.least_call_s)

    def test_a_quick_call_says_nothing_of_kernels(self) -> None:
        seen: list[str] = []
        take_depth_tied(StepTimedMachine(), progress=lambda one: seen.append(one.running))
        assert not any("kernels" in words for words in seen)

    def test_a_call_of_which_nothing_is_known_is_not_said_to_compile(self, golden: Golden) -> None:
        machine = StepTimedMachine(compiles=lambda number, _: 20.0 if number == 1 else 0.0)
        seen: list[str] = []
        compile_ = type(machine).open

        def opened(**degrees: int) -> Any:
            session = compile_(machine, **degrees)
            inner = session._compile
            session._compile = lambda s, limit_s, tell: inner(  # type: ignore[method-assign]
                s, limit_s, lambda state: tell(CallState(elapsed_s=state.elapsed_s))
            )
            return session

        machine.open = opened  # type: ignore[method-assign]
        take_depth_tied(machine, progress=lambda one: seen.append(one.running))
        waiting = [words for words in seen if words.endswith("s)")]
        golden("fingerprint", waiting[-1])


def same(point: TimingPoint, one: TimingPoint, layers: int) -> bool:
    alike = (one.batch, one.input_tokens, one.output_tokens, layers)
    return (point.batch, point.input_tokens, point.output_tokens, point.num_layers) == alike


def ratio_of(clocks: list[float], middle: int) -> float:
    one, other = median(clocks[:middle]), median(clocks[middle:])
    return max(one, other) / min(one, other)
