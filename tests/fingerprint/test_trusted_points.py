"""Points of a profile that other calls contradict are no measured source."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Source
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.trusted_points import trusted_points
from fingerprint.measurements import Profile, RunReading, TimingPoint
from tests.fingerprint.step_timed_machine import PLAN, StepTimedMachine, take_depth_tied
from tests.golden_words import Golden

VLLM = DeploymentConfig(engine="vllm")
COMPILED_S = 0.6  # of a kernel at its first use; 0.4 to 1.4 were recorded
SOUND = take_depth_tied(StepTimedMachine(noise=0.01))
REPEATED = tuple(point for point in SOUND.timing if point.repeat > 1)


def estimator(profile: Profile) -> DepthTiedEstimator:
    roofline = RooflineEstimator(profile.spec, profile.machine.device)
    return DepthTiedEstimator(profile, roofline, Calibration())


def disturbed(run: RunReading, seconds: float, *, decoding: bool = False) -> RunReading:
    """Return the run with ``seconds`` more in its first step, or in the last that decodes the whole batch."""
    steps = list(run.steps)
    most = max(step.sequences for step in steps)
    at = max((i for i, step in enumerate(steps) if step.sequences == most), default=0) if decoding else 0
    steps[at] = replace(steps[at], gap_s=steps[at].gap_s + seconds)
    return replace(run, e2e_s=run.e2e_s + seconds, steps=tuple(steps))


def with_calls(point: TimingPoint, runs: tuple[RunReading, ...]) -> Profile:
    """Return the sound profile with other calls at one point."""
    timing = tuple(replace(p, runs=runs) if p == point else p for p in SOUND.timing)
    return replace(SOUND, timing=timing)


def left_out(profile: Profile) -> set[tuple[int, int, int, int]]:
    found = trusted_points([p for p in profile.timing if p.repeat > 1]).distrusts
    return {(d.point.num_layers, d.point.batch, d.point.input_tokens, d.point.output_tokens) for d in found}


def at_of(point: TimingPoint) -> tuple[int, int, int, int]:
    return point.num_layers, point.batch, point.input_tokens, point.output_tokens


points = st.sampled_from(REPEATED)
longer = st.sampled_from([point for point in REPEATED if point.output_tokens > 1])


def test_a_sound_profile_is_trusted() -> None:
    assert left_out(SOUND) == set()
    assert trusted_points(REPEATED).points == REPEATED
    assert estimator(SOUND).warnings == SOUND.notes


@given(points, st.floats(COMPILED_S, 2.0))
def test_one_wild_call_of_two_is_not_trusted(point: TimingPoint, seconds: float) -> None:
    calls = (point.runs[0], disturbed(point.runs[0], seconds))
    assert left_out(with_calls(point, calls)) == {at_of(point)}


@given(points, st.floats(COMPILED_S, 2.0))
def test_a_lone_wild_call_is_contradicted_by_what_did_more(point: TimingPoint, seconds: float) -> None:
    """But for the largest burst, of which nothing did more; and calls of a millisecond, which are not long."""
    runs = (disturbed(point.runs[0], seconds),)
    assert left_out(with_calls(point, runs)) <= {at_of(point)}
    others = [
        p for p in REPEATED if p != point and p.batch >= point.batch and p.input_tokens >= point.input_tokens
    ]
    if any(p.num_layers == point.num_layers for p in others):
        assert left_out(with_calls(point, runs)) == {at_of(point)}


@given(longer, st.floats(COMPILED_S, 2.0))
def test_a_kernel_compiled_in_a_decode_step_is_seen(point: TimingPoint, seconds: float) -> None:
    calls = tuple(disturbed(run, seconds, decoding=True) for run in point.runs[:2])
    assert left_out(with_calls(point, calls)) == {at_of(point)}


@given(points, st.floats(COMPILED_S, 2.0))
def test_one_wild_call_of_three_moves_no_time_and_is_no_reason(point: TimingPoint, seconds: float) -> None:
    calls = (point.runs[0], disturbed(point.runs[0], seconds), point.runs[0])
    assert left_out(with_calls(point, calls)) == set()


@given(st.randoms(), points, st.floats(0, 2.0))
def test_the_order_of_calls_and_of_points_changes_nothing(random, point: TimingPoint, seconds: float) -> None:  # type: ignore[no-untyped-def]
    profile = with_calls(point, (disturbed(point.runs[0], seconds), *point.runs[1:3]))
    mixed = [replace(p, runs=tuple(random.sample(p.runs, len(p.runs)))) for p in profile.timing]
    random.shuffle(mixed)
    again = replace(profile, timing=tuple(mixed))
    assert left_out(again) == left_out(profile)


@given(points, st.integers(1, 6), st.integers(1, 6))
@settings(deadline=None)
def test_more_calls_that_agree_never_widen(point: TimingPoint, fewer: int, more: int) -> None:
    fewer, more = sorted((fewer, more))
    work = Workload(point.batch, point.input_tokens, PLAN.long_output)

    def found(calls: int):  # type: ignore[no-untyped-def]
        timing = (
            replace(p, runs=p.runs[:1] * calls) if p.batch == point.batch else p
            for p in SOUND.timing
            if p.runs[0].e2e_s >= 0.2 or p.batch != point.batch
        )
        return estimator(replace(SOUND, timing=tuple(timing))).estimate(VLLM, work)

    few, many = found(fewer), found(more)
    for one, other in ((few.ttft_s, many.ttft_s), (few.tpot_s, many.tpot_s)):
        assert other.high / other.value <= one.high / one.value * (1 + 1e-9)


def test_a_lone_short_call_is_not_trusted_and_named(golden: Golden) -> None:
    point = min(REPEATED, key=lambda p: p.runs[0].e2e_s)
    told = estimator(with_calls(point, point.runs[:1]))
    assert left_out(with_calls(point, point.runs[:1])) == {at_of(point)}
    golden("fingerprint", told.warnings)


def test_a_point_whose_prompts_alone_were_disturbed_keeps_its_decode_steps(golden: Golden) -> None:
    point = next(p for p in REPEATED if p.output_tokens > 1 and p.num_layers == 2)
    told = estimator(with_calls(point, tuple(disturbed(run, COMPILED_S) for run in point.runs)))
    work = Workload(point.batch, point.input_tokens, PLAN.long_output)
    sound, found = estimator(SOUND).estimate(VLLM, work), told.estimate(VLLM, work)
    assert found.tpot_s.value == pytest.approx(sound.tpot_s.value, rel=0.02)
    assert found.ttft_s == sound.ttft_s
    golden("fingerprint", told.warnings)


def test_where_most_points_are_not_trusted_the_datasheet_answers(golden: Golden) -> None:
    generating = [p for p in REPEATED if p.output_tokens > 1 and p.num_layers == 2]
    wild = set(map(at_of, generating[: len(generating) // 2 + 1]))
    timing = (
        replace(p, runs=(p.runs[0], disturbed(p.runs[0], COMPILED_S))) if at_of(p) in wild else p
        for p in SOUND.timing
    )
    told = estimator(replace(SOUND, timing=tuple(timing)))
    found = told.estimate(VLLM, Workload(8, 1024, 33))
    assert {found.ttft_s.source, found.tpot_s.source} == {Source.ROOFLINE}
    assert found.memory == estimator(SOUND).estimate(VLLM, Workload(8, 1024, 33)).memory
    golden("fingerprint", told.warnings)
