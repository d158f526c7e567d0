"""The driver of depth-tied profiles, against a machine that refuses what the protocol forbids."""

from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, KvFormat, Workload
from fingerprint.depth_tied_plan import DepthTiedPlan, depth_tied_plan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import ConfigError, EngineError, NotMeasuredError
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.l2 import MeasuredKey
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.whole_points import whole_points
from fingerprint.measurements import Profile, TimingPoint
from fingerprint.profile_checks import contradiction
from tests.fingerprint.depth_tied_runs import BITS16, FP8, WHOLE, all_of, loads, measured
from tests.fingerprint.step_timed_machine import (
    PLAN,
    Cut,
    StepTimedMachine,
    StepTruth,
    llama_7b,
    take_depth_tied,
)
from tests.golden_words import Golden


class TestWhatIsRun:
    def test_each_fingerprint_is_started_once_and_repeated_to_the_model_s_depth(self) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine)
        assert loads(machine) == [(1, 1, 2, BITS16), (1, 1, 1, BITS16)]
        assert {(t.num_layers, t.repeat) for t in profile.timing} == {(2, 16), (1, 32)}
        assert measured(profile) == WHOLE
        assert (profile.complete, profile.notes) == (True, ())
        assert [point.num_layers for point in profile.memory] == [2, 1]
        assert all(session.closed for session in machine.sessions)

    @pytest.mark.parametrize(
        ("num_layers", "pp", "expected"),
        [
            pytest.param(1, 1, {1: 1}, id="one-layer"),
            pytest.param(2, 1, {2: 1, 1: 2}, id="two"),
            pytest.param(33, 1, {2: 16, 1: 33}, id="odd"),
            pytest.param(32, 2, {4: 8, 2: 16}, id="two-stages"),
            pytest.param(3, 2, {2: 1}, id="three-in-two-stages"),
        ],
    )
    def test_repeats_never_make_it_deeper_than_the_model(self, num_layers, pp, expected) -> None:
        machine = StepTimedMachine(spec=llama_7b(num_layers))
        profile = take_depth_tied(machine, degrees=((1, pp),))
        assert {t.num_layers: t.repeat for t in profile.timing} == expected
        deepest = max(expected)
        assert measured(profile) >= all_of(deepest, PLAN.points)

    def test_a_model_with_fewer_layers_than_stages_is_left_out(self, golden: Golden) -> None:
        profile = take_depth_tied(StepTimedMachine(spec=llama_7b(1)), degrees=((1, 1), (1, 2)))
        golden("fingerprint", profile.notes)

    def test_one_session_per_degree_serves_all_formats(self) -> None:
        machine = StepTimedMachine()
        take_depth_tied(
            machine, degrees=((1, 1), (2, 1)), weights=(BITS16, FP8), kv=(KvFormat.BITS16, KvFormat.FP8)
        )
        assert [entry[1:] for entry in machine.log if entry[0] == "open"] == [(1, 1), (2, 1)]
        assert len(loads(machine)) == 2 * 2 * 2 * 2

    def test_bursts_go_on_until_they_have_settled_and_the_later_half_is_kept(self) -> None:
        profile = take_depth_tied(StepTimedMachine(), settle_s=0.5, most_bursts=12, long_s=0.7)
        for point in profile.timing:
            each_s = point.runs[0].e2e_s  # without noise all are alike
            if point.output_tokens == 1:
                ran = min(12, math.ceil(0.5 / each_s))
                assert len(point.runs) == ran - ran // 2
            else:
                assert len(point.runs) == min(PLAN.long_bursts, math.ceil(0.7 / each_s))

    def test_what_is_not_settled_does_not_count(self) -> None:
        """Prefills of a cool GPU are 5% faster, half as much with every burst."""
        machine = StepTimedMachine(truth=StepTruth(cool=0.05))
        profile = take_depth_tied(machine, settle_s=1e6, most_bursts=30)
        kept = [p.runs for p in profile.timing if p.output_tokens == 1]
        assert all(len(runs) == 15 for runs in kept)
        assert all(max(r.e2e_s for r in runs) / min(r.e2e_s for r in runs) < 1.0001 for runs in kept)

    def test_short_prompts_are_visited_again_once_the_others_were_run(self) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine, visits=3, short_tokens=1024, most_bursts=8, settle_s=1e6)
        short = {p for p in PLAN.points if p[0] * p[1] <= 1024}
        assert short == {(1, 128), (1, 1024), (8, 128)}
        for point in profile.timing:
            if point.output_tokens == 1:
                visits = 3 if point.num_layers == 2 and (point.batch, point.input_tokens) in short else 1
                assert len(point.runs) == 4 * visits
        bursts = [e for e in machine.log if e[0] == "bursts" and e[1].layers == 2]
        first = 2 * len(PLAN.points)
        assert [e[2:] for e in bursts[first:]] == 2 * [(*at, 1) for at in sorted(short, key=lambda p: p[0] * p[1])]
        assert len(profile.timing) == len(take_depth_tied(StepTimedMachine()).timing)

    def test_a_visit_that_fails_leaves_what_was_measured(self, golden: Golden) -> None:
        seen = []

        def dies_at_the_second_visit(cut, batch, n, m):
            if cut.layers == 2 and (batch, n, m) == (1, 128, 1):
                seen.append(cut)
                return EngineError("gone") if len(seen) == 2 else None
            return None

        profile = take_depth_tied(StepTimedMachine(broken=dies_at_the_second_visit), visits=3)
        assert not profile.complete
        golden("fingerprint", profile.notes)
        undisturbed = take_depth_tied(StepTimedMachine())
        assert [(p.num_layers, p.batch, p.input_tokens) for p in profile.timing] == [
            (p.num_layers, p.batch, p.input_tokens) for p in undisturbed.timing
        ]

    def test_long_prompts_are_run_once(self) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine, once_tokens=8191)
        once = {p for p in PLAN.points if p[0] * p[1] > 8191}
        assert once == {(8, 1024), (32, 512)}
        for point in profile.timing:
            if (point.batch, point.input_tokens) in once:
                assert (point.output_tokens, len(point.runs)) == (PLAN.long_output, 1)
        whole = {(p.batch, p.input_tokens): p for p in whole_points(profile.timing, 32)}
        assert whole.keys() == set(PLAN.points)
        for at in once:
            # What decodes with the last prompts is in it.
            assert whole[at].ttft_s == pytest.approx(machine.ttft_s(*at), rel=0.02)

    def test_points_called_once_are_called_again_where_the_budget_has_room(self) -> None:
        once = take_depth_tied(StepTimedMachine(), once_tokens=8191)
        again = take_depth_tied(StepTimedMachine(), once_tokens=8191, second_calls=True)
        deeper = [(p, q) for p, q in zip(once.timing, again.timing, strict=True) if p.num_layers == 2]
        assert {len(p.runs) for p, _ in deeper if (p.batch, p.input_tokens) in {(8, 1024), (32, 512)}} == {1}
        assert all(len(q.runs) == max(2, len(p.runs)) and q.runs[0] == p.runs[0] for p, q in deeper)

    def test_second_calls_that_do_not_agree_leave_the_profile_whole(self) -> None:
        asked: set[tuple[int, ...]] = set()

        def broken(cut: Cut, *burst: int) -> NotMeasuredError | None:
            once_more = cut.layers == 2 and (cut.repeat, *burst) in asked
            asked.add((cut.repeat, *burst))
            return NotMeasuredError(f"calls of {burst} do not agree") if once_more else None

        once = take_depth_tied(StepTimedMachine(), once_tokens=8191)
        again = take_depth_tied(StepTimedMachine(broken=broken), once_tokens=8191, second_calls=True)
        assert again.complete
        assert again.timing == once.timing
        assert any("do not agree" in note for note in again.notes)

    @given(budget_s=st.floats(0.1, 40.0))
    def test_second_calls_take_nothing_from_the_other_depth(self, budget_s: float) -> None:
        once = take_depth_tied(StepTimedMachine(), once_tokens=4095, budget_s=budget_s)
        machine = StepTimedMachine()
        again = take_depth_tied(machine, once_tokens=4095, budget_s=budget_s, second_calls=True)
        assert [replace(p, runs=()) for p in again.timing] == [replace(p, runs=()) for p in once.timing]
        first = machine.ran_s[2, 1, 128] + machine.ran_s[1, 1, 128]
        assert again.spent_s <= max(budget_s + machine.ran_s[1, 1, 128], first) * (1 + 1e-9)

    def test_plain_points_run_both_depths_as_they_are(self) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine, plain_points=((1, 128),))
        plain = [(t.num_layers, t.output_tokens, len(t.runs)) for t in profile.timing if t.repeat == 1]
        assert sorted(plain) == [(1, 1, 3), (1, 33, 3), (2, 1, 3), (2, 33, 3)]
        repeated = whole_points(profile.timing, 32)
        assert repeated == whole_points(take_depth_tied(StepTimedMachine()).timing, 32)

    def test_progress_counts_up_to_all_there_is(self, golden: Golden) -> None:
        machine, told = StepTimedMachine(), []
        depth_tied_profile(
            "m", machine.spec, machine, machine.fingerprint, PLAN, clock=machine.clock, progress=told.append
        )
        assert [p.done for p in told] == sorted(p.done for p in told)
        assert {p.total for p in told} == {2 * (len(PLAN.points) + len(PLAN.shallow_points))}
        assert told[-1].done == told[-1].total - 1
        golden("fingerprint", told[0].running)

    @settings(max_examples=30, deadline=None)
    @given(
        visits=st.integers(1, 3),
        once_tokens=st.sampled_from([None, 127, 1024, 8191]),
        num_layers=st.sampled_from([1, 2, 3, 32]),
        points=st.sampled_from([((1, 128),), ((8, 128), (1, 128)), PLAN.points]),
        shallow=st.booleans(),
        plain=st.booleans(),
        pp=st.sampled_from([1, 2]),
    )
    def test_progress_ends_one_before_all_that_was_foreseen(
        self, visits, once_tokens, num_layers, points, shallow, plain, pp
    ) -> None:
        machine, told = StepTimedMachine(spec=llama_7b(num_layers)), []
        plan = replace(
            PLAN,
            visits=visits,
            once_tokens=once_tokens,
            points=points,
            shallow_points=points[:1] if shallow else (),
            plain_points=((1, 128),) if plain and num_layers == 32 else (),  # of 2 layers they are the same
            degrees=((1, 1), (1, pp)),
        )
        with contextlib.suppress(NotMeasuredError):
            depth_tied_profile(
                "m", machine.spec, machine, machine.fingerprint, plan, clock=machine.clock, progress=told.append
            )
        assert {p.total for p in told} == {told[-1].done + 1}

    @pytest.mark.parametrize(("num_experts", "largest"), [(0, 512), (8, 4096)])
    def test_a_profile_says_which_graphs_its_engine_had(self, num_experts: int, largest: int) -> None:
        machine = StepTimedMachine()
        machine.engine = "vllm"
        machine.spec = replace(machine.spec, num_experts=num_experts, experts_per_token=min(2, num_experts))
        assert take_depth_tied(machine).graph_tokens == largest

    def test_a_profile_travels_as_json(self) -> None:
        profile = take_depth_tied(StepTimedMachine())
        assert from_json(to_json(profile), Profile) == profile


class TestTheBudget:
    def test_it_counts_the_gpu_s_time_after_engine_starts(self) -> None:
        machine = StepTimedMachine(load_s=1000.0)
        profile = take_depth_tied(machine, budget_s=90.0)
        assert profile.spent_s == pytest.approx(sum(machine.ran_s.values()))
        assert profile.complete

    @pytest.mark.parametrize("degrees", [(2, 1), (1, 2), (2, 2)])
    def test_every_gpu_that_is_held_counts(self, degrees: tuple[int, int]) -> None:
        machine = StepTimedMachine(num_devices=4)
        profile = take_depth_tied(machine, degrees=(degrees,))
        assert profile.spent_s == pytest.approx(degrees[0] * degrees[1] * sum(machine.ran_s.values()))

    @pytest.mark.slow
    @settings(max_examples=40, deadline=None)
    @given(budget_s=st.floats(0.1, 30.0))
    def test_points_beyond_it_are_noted_and_it_is_kept_but_for_the_cheapest_ones(self, budget_s) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine, budget_s=budget_s)
        cost = machine.ran_s
        assert cost.keys() == {(t.num_layers, t.batch, t.input_tokens) for t in profile.timing}
        assert profile.spent_s == pytest.approx(sum(cost.values()))
        first = cost[2, 1, 128] + cost[1, 1, 128]
        assert profile.spent_s <= max(budget_s + cost[1, 1, 128], first) * (1 + 1e-9)
        left_out = [note for note in profile.notes if "left out, the budget of" in note]
        deep = {(b, n) for layers, b, n in cost if layers == 2}
        wanted = len(PLAN.points) + len(deep & set(PLAN.shallow_points))  # one layer runs only what two did
        assert len(left_out) == wanted - len(cost)
        assert sum(gap.missing_points for gap in profile.unreached) <= len(left_out)
        assert bool(profile.unreached) == bool(left_out)
        assert profile.complete == (not left_out)
        assert whole_points(profile.timing, 32)  # even of the smallest budget

    @settings(max_examples=40, deadline=None)
    @given(budget_s=st.floats(0.1, 40.0))
    def test_visits_take_nothing_from_the_other_depth(self, budget_s) -> None:
        """The runs of one layer are those without visits, and the budget holds."""
        machine, without = StepTimedMachine(), StepTimedMachine()
        visited = take_depth_tied(machine, budget_s=budget_s, visits=3)
        once = take_depth_tied(without, budget_s=budget_s, visits=1)
        assert measured(visited) == measured(once)
        first = machine.ran_s[2, 1, 128] + machine.ran_s[1, 1, 128]
        assert visited.spent_s <= max(budget_s + machine.ran_s[1, 1, 128], first) * (1 + 1e-9)
        again = [len(p.runs) for p in visited.timing] != [len(p.runs) for p in once.timing]
        told = any("further visits to short prompts left out" in note for note in visited.notes)
        assert again or told

    def test_a_note_names_the_point(self, golden: Golden) -> None:
        golden("fingerprint", take_depth_tied(StepTimedMachine(), budget_s=3.0).notes)

    def test_no_engine_is_started_for_a_configuration_without_any_left(self, golden: Golden) -> None:
        machine = StepTimedMachine()
        profile = take_depth_tied(machine, weights=(BITS16, FP8), budget_s=0.1)
        assert {weights for *_, weights in loads(machine)} == {BITS16}
        golden("fingerprint", profile.notes[-1])
        gap = next(gap for gap in profile.unreached if gap.config.weights is FP8)
        assert gap.missing_points == gap.planned_points == len(PLAN.points)


class TestContradiction:
    @staticmethod
    def slow(bad_loads: int) -> StepTimedMachine:
        """Let one layer take what three should, in the first loads of it."""
        seen = [bad_loads]

        def slower(_load: int, layers: int) -> float:
            if layers == 1 and seen[0]:
                seen[0] -= 1
                return 3.0
            return 1.0

        return StepTimedMachine(slower=slower)

    def test_it_is_measured_again(self, golden: Golden) -> None:
        machine = self.slow(1)
        profile = take_depth_tied(machine)
        assert [layers for _, _, layers, _ in loads(machine)] == [2, 1, 2, 1]
        (note,) = profile.notes
        golden("fingerprint", note)
        assert profile.complete
        assert len(profile.memory) == 2
        fine = take_depth_tied(StepTimedMachine())
        assert whole_points(profile.timing, 32) == whole_points(fine.timing, 32)

    def test_twice_it_is_reported_as_unusable_and_never_extrapolated(self, golden: Golden) -> None:
        machine = self.slow(2)
        with golden.raises("fingerprint", NotMeasuredError):
            take_depth_tied(machine)
        assert all(session.closed for session in machine.sessions)

    def test_another_format_is_used_all_the_same(self) -> None:
        machine = self.slow(2)
        profile = take_depth_tied(machine, weights=(BITS16, FP8))
        assert not profile.complete
        assert {t.weights for t in profile.timing} == {FP8}
        l3 = L3(profile, RooflineEstimator(machine.spec, profile.machine.device), Calibration())
        assert list(l3.points) == [MeasuredKey(1, 1, FP8, KvFormat.BITS16)]
        estimator = DepthTiedEstimator(profile, RooflineEstimator(machine.spec, profile.machine.device))
        assert any("unusable" in warning for warning in estimator.warnings)
        estimator.estimate(DeploymentConfig(engine="vllm"), Workload())  # scaled from fp8

    def test_equal_times_contradict_too_and_prefill_alone_says_nothing(self) -> None:
        timing = take_depth_tied(StepTimedMachine()).timing
        assert contradiction(list(timing)) is None
        deep = [t for t in timing if t.num_layers == 2]
        equal = [*deep, *(replace(t, num_layers=1) for t in deep)]
        assert contradiction(equal) is not None
        assert contradiction([t for t in equal if t.output_tokens == 1]) is None

    def test_ranks_that_wait_for_each_other_in_a_short_step_contradict_nothing(self) -> None:
        """The host reached the second of two ranks up to 2 ms later, as observed, in steps of 0.3 ms."""
        timing = take_depth_tied(StepTimedMachine(), plain_points=((1, 128), (32, 512))).timing
        waited = [_waiting(t, 2e-3) if (t.num_layers, t.repeat) == (1, 1) else t for t in timing]
        assert waited != list(timing)
        assert contradiction([t for t in waited if t.repeat == 1]) is not None
        lone = [t for t in timing if (t.num_layers, t.repeat) != (1, 32)]  # one depth's repeats all failed
        assert {t.repeat for t in lone} == {1, 16}
        assert contradiction(lone) is None
        assert contradiction(waited) is None


def _waiting(point: TimingPoint, seconds: float) -> TimingPoint:
    return replace(
        point,
        runs=tuple(
            replace(run, steps=tuple(replace(s, forward_s=s.forward_s + seconds) for s in run.steps))
            for run in point.runs
        ),
    )


class TestThePlan:
    @settings(max_examples=100, deadline=None)
    @given(
        batch=st.integers(1, 4096),
        input_tokens=st.integers(1, 100_000),
        output_tokens=st.integers(1, 4096),
        context=st.integers(8, 131_072),
        max_batch=st.integers(1, 512),
    )
    def test_one_for_any_workload_can_be_run(self, batch, input_tokens, output_tokens, context, max_batch) -> None:
        spec = replace(llama_7b(), max_context_tokens=context)
        plan = depth_tied_plan(spec, Workload(batch, input_tokens, output_tokens), max_batch=max_batch)
        assert plan.max_context_tokens <= context
        assert max(b * n for b, n in plan.points) <= 131_072
        assert {b for b, _ in plan.points} >= {1}
        assert 1 <= len(plan.shallow_points) <= len(plan.points) <= 8
        machine = StepTimedMachine(spec=spec)
        if plan.kv_tokens < 40_000:
            assert take_depth_tied(machine, plan).complete

    @pytest.mark.parametrize(
        ("workload", "longest"),
        [
            pytest.param(Workload(16, 512, 128), set(), id="answers that add little"),
            pytest.param(Workload(16, 512, 1024), {(1, 1503), (16, 1503)}, id="long answers"),
            pytest.param(Workload(128, 1024, 4096), {(1, 5087), (25, 5087)}, id="a batch too large for one burst"),
            pytest.param(Workload(4, 512, 100_000), {(1, 4063), (4, 4063)}, id="beyond the model's context"),
        ],
    )
    def test_long_answers_have_points_at_their_longest_context(self, workload, longest) -> None:
        spec = replace(llama_7b(), max_context_tokens=8192 if workload.output_tokens < 10_000 else 4096)
        plan = depth_tied_plan(spec, workload, max_batch=128)
        top = min(workload.batch, 131_072 // workload.input_tokens)
        assert {(1, workload.input_tokens), (top, workload.input_tokens), (1, workload.input_tokens // 4)} <= {
            *plan.points
        }
        assert {(b, n) for b, n in plan.points if n > workload.input_tokens} == longest
        assert len(plan.points) <= 8

    def test_the_workload_itself_is_a_point(self) -> None:
        plan = depth_tied_plan(llama_7b(), Workload(16, 512, 128), max_batch=64)
        assert (16, 512) in plan.points
        assert (plan.max_batch, plan.max_context_tokens) == (64, 640)

    @pytest.mark.parametrize(
        "changes",
        [
            {"points": ()},
            {"shallow_points": ((2, 128),)},
            {"max_batch": 8},
            {"points": ((0, 128),), "shallow_points": ()},
            {"max_context_tokens": 1056},
            {"long_output": 2},
        ],
        ids=repr,
    )
    def test_one_that_cannot_be_run_is_refused(self, changes, golden: Golden) -> None:
        with golden.raises("fingerprint", ConfigError):
            replace(PLAN, **changes)

    def test_the_cache_holds_the_largest_point(self) -> None:
        plan = DepthTiedPlan(
            points=((4, 100), (1, 300)), shallow_points=(), max_batch=4, max_context_tokens=400, long_output=17
        )
        assert plan.kv_tokens == 4 * 117
