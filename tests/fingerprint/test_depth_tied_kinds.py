"""Models whose layers look back differently, through repeated fingerprints: the cuts, and the whole from them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.depth_tied_cuts import MOST_FIRST_LAYERS, kind_counts, repeats_the_mix, tied_depths
from fingerprint.depth_tied_plan import depth_tied_plan
from fingerprint.errors import NotMeasuredError
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.whole_points import whole_points
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.weight_bytes import layers_per_block
from tests.fingerprint.step_timed_machine import PLAN, StepTimedMachine, StepTruth, llama_7b, take_depth_tied
from tests.golden_words import Golden

BY_TURNS, FIVE_TO_ONE = (100, None), (300,) * 5 + (None,)  # GPT-OSS and Gemma 2; Gemma 3
DEPTHS = {  # layers of the model, its pattern: fingerprints of one stage, of two
    (24, BY_TURNS): ((4, 2), (4, 2)),
    (26, BY_TURNS): ((4, 2), (4, 2)),
    (25, BY_TURNS): ((3, 1), ()),
    (48, FIVE_TO_ONE): ((12, 6), (12, 6)),
    (26, FIVE_TO_ONE): ((8, 2), (7, 1)),
    (34, FIVE_TO_ONE): ((10, 4), ()),
    (46, FIVE_TO_ONE): ((10, 4), ()),
    (62, FIVE_TO_ONE): ((8, 2), (7, 1)),
}
EVERY_POINT = {"shallow_points": PLAN.points}
PATIENT = {"settle_s": 1e6, "most_bursts": 40}
TIMES = st.floats(1e-6, 1e-3)


def of(num_layers: int, pattern: tuple[int | None, ...]) -> ModelSpec:
    windows = (pattern * num_layers)[:num_layers]
    return replace(llama_7b(num_layers), layer_windows=windows if len(set(windows)) > 1 else ())


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """Patterns, some behind layers of their own."""
    kinds = st.sampled_from([None, 100, 300])
    pattern = draw(st.lists(kinds, min_size=1, max_size=6).map(tuple))
    first = draw(st.lists(kinds, max_size=4).map(tuple))
    num_layers = draw(st.integers(2, 70))
    windows = (first + pattern * num_layers)[:num_layers]
    return replace(llama_7b(num_layers), layer_windows=windows if len(set(windows)) > 1 else ())


class TestCuts:
    @pytest.mark.parametrize(("num_layers", "pattern"), DEPTHS)
    def test_of_models_that_exist(self, num_layers: int, pattern: tuple[int | None, ...]) -> None:
        spec = of(num_layers, pattern)
        assert tuple(tied_depths(spec, pp) for pp in (1, 2)) == DEPTHS[num_layers, pattern]

    @given(models(), st.integers(1, 4))
    def test_the_whole_model_is_on_the_line_through_both(self, spec: ModelSpec, pp: int) -> None:
        depths = tied_depths(spec, pp)
        assume(len(depths) == 2)
        deep, shallow = (Counter(spec.windows[: k * pp]) for k in depths)
        assert shallow < deep <= Counter(spec.windows)
        steps = (spec.num_layers - shallow.total()) / (deep.total() - shallow.total())
        for kind in spec.kinds:
            a, b = deep[kind.window], shallow[kind.window]
            assert b + steps * (a - b) == pytest.approx(kind.count)
        for k in depths:
            stages = [Counter(spec.windows[stage * k : (stage + 1) * k]) for stage in range(pp)]
            assert all(stage == stages[0] for stage in stages)

    @given(st.integers(1, 70), st.integers(1, 4))
    def test_of_layers_all_alike_they_are_two_and_one(self, num_layers: int, pp: int) -> None:
        assert tied_depths(llama_7b(num_layers), pp) == tuple(k for k in (2, 1) if k * pp <= num_layers)

    @given(models())
    def test_a_pattern_that_is_seen_twice_is_cut(self, spec: ModelSpec) -> None:
        """Be it behind the first few layers."""
        behind = [spec.windows[first:] for first in range(MOST_FIRST_LAYERS + 1)]
        twice = any(rest[p:] == rest[:-p] for rest in behind for p in range(1, len(rest) // 2 + 1))
        assert bool(tied_depths(spec, 1)) == (twice or not spec.layer_windows)

    def test_no_pattern_no_cut(self) -> None:
        blocks = (None,) * 9 + (64,) * 9
        assert tied_depths(replace(llama_7b(18), layer_windows=blocks), 1) == ()

    @pytest.mark.parametrize(("first", "num_layers", "depths"), [(3, 61, (8, 4)), (1, 46, (6, 2)), (1, 5, (5, 2))])
    def test_first_layers_of_their_own_are_in_both(self, first: int, num_layers: int, depths: object) -> None:
        """DeepSeek V3, GLM-4.5 Air, and one that is too short for four layers more."""
        windows = (None,) * first + (64,) * (num_layers - first)
        spec = replace(llama_7b(num_layers), layer_windows=windows)
        assert tied_depths(spec, 1) == depths
        assert tied_depths(spec, 2) == ()


class TestTimes:
    @pytest.mark.parametrize(("num_layers", "pattern"), DEPTHS)
    @pytest.mark.parametrize("pp", [1, 2])
    def test_the_whole_model_is_recovered(self, num_layers: int, pattern: tuple[int | None, ...], pp: int) -> None:
        machine = StepTimedMachine(spec=of(num_layers, pattern))
        if not tied_depths(machine.spec, pp):
            return
        profile = take_depth_tied(machine, degrees=((1, pp),), **EVERY_POINT)
        assert profile.notes == ()
        points = whole_points(profile.timing, num_layers)
        assert len(points) == len(PLAN.points)
        for point in points:
            at = (point.batch, point.input_tokens)
            assert point.ttft_s == pytest.approx(machine.ttft_s(*at, pp=pp), rel=1e-9)
            assert point.tpot_s(33) == pytest.approx(machine.tpot_s(*at, 33, pp=pp), rel=1e-9)

    @pytest.mark.slow
    @settings(max_examples=25, deadline=None)
    @given(
        spec=models(),
        layer=st.tuples(TIMES, st.floats(0, 1e-6), st.floats(0, 1e-9)),
        sliding=st.floats(0.5, 2.0),
        prefill=st.tuples(st.floats(0, 1e-3), st.floats(0, 1e-7)),
        decode_pass_s=st.floats(0, 1e-4),
        recovery=st.floats(0, 0.3),
        cool=st.floats(0, 0.05),
        room=st.sampled_from([2048, 8192]),
    )
    def test_whatever_the_pattern_and_the_costs_of_each_kind(
        self, spec, layer, sliding, prefill, decode_pass_s, recovery, cool, room
    ) -> None:
        assume(tied_depths(spec, 1))
        truth = StepTruth(
            layer_s=layer,
            sliding_time=sliding,
            prefill_repeat_s=prefill,
            decode_repeat_s=(decode_pass_s, prefill[1]),
            recovery=recovery,
            cool=cool,
            max_batched_tokens=room,
        )
        machine = StepTimedMachine(spec=spec, truth=truth)
        profile = take_depth_tied(machine, **EVERY_POINT, **PATIENT)
        for point in whole_points(profile.timing, spec.num_layers):
            at = (point.batch, point.input_tokens)
            assert point.ttft_s == pytest.approx(machine.ttft_s(*at), rel=1e-6)
            total_s = machine.ttft_s(*at) + 32 * machine.tpot_s(*at, 33)
            assert point.ttft_s + 32 * point.tpot_s(33) == pytest.approx(total_s, rel=1e-6)

    def test_the_mean_of_the_deeper_cut_would_be_wrong(self) -> None:
        """Else these tests could not fail: 4 of 34 layers are no whole pattern."""
        machine = StepTimedMachine(spec=of(34, FIVE_TO_ONE), truth=StepTruth(layer_s=(9e-5, 7e-7, 2e-9)))
        timing = take_depth_tied(machine, **EVERY_POINT).timing
        blind = tuple(replace(point, layer_kinds=()) for point in timing)
        (told,) = (p for p in whole_points(timing, 34) if (p.batch, p.input_tokens) == (8, 1024))
        (mixed,) = (p for p in whole_points(blind, 34) if (p.batch, p.input_tokens) == (8, 1024))
        true_s = machine.ttft_s(8, 1024)
        assert abs(told.ttft_s / true_s - 1) < 1e-9
        assert abs(mixed.ttft_s / true_s - 1) > 0.01

    def test_a_point_of_the_deeper_cut_alone_takes_the_share_of_the_nearest_where_the_mixes_differ(
        self, golden: Golden
    ) -> None:
        """Points of both cuts are exact, and one of the deeper alone is near."""
        machine = StepTimedMachine(spec=of(34, FIVE_TO_ONE))
        profile = take_depth_tied(machine)
        found = {(p.batch, p.input_tokens): p for p in whole_points(profile.timing, 34)}
        assert set(found) == set(PLAN.points) > set(PLAN.shallow_points)
        for at, point in found.items():
            within = 1e-9 if at in PLAN.shallow_points else 0.03
            assert point.ttft_s == pytest.approx(machine.ttft_s(*at), rel=within)
            assert point.tpot_s(PLAN.long_output) == pytest.approx(
                machine.tpot_s(*at, PLAN.long_output), rel=within
            )
        with golden.raises("fingerprint", NotMeasuredError):
            whole_points(tuple(p for p in profile.timing if p.num_layers == 10), 34)


class TestPlan:
    def test_the_shallower_cut_runs_every_point_where_its_mix_is_another(self) -> None:
        def plan(spec: ModelSpec) -> tuple[int, int]:
            made = depth_tied_plan(spec, Workload(32, 512, 128), max_batch=32)
            return len(made.shallow_points), len(made.points)

        assert plan(of(34, FIVE_TO_ONE)) == (6, 6)
        assert plan(of(48, FIVE_TO_ONE)) == plan(llama_7b()) == (3, 6)
        assert repeats_the_mix(of(48, FIVE_TO_ONE), 1)
        assert not repeats_the_mix(of(34, FIVE_TO_ONE), 1)

    @pytest.mark.parametrize("budget_s", [1.0, 5.0, 12.0, 30.0])
    def test_half_of_a_budget_is_left_to_the_shallower_cut(self, budget_s: float) -> None:
        """Whatever the deeper one ran beyond what the other can run too would tell nothing."""
        machine = StepTimedMachine(spec=of(34, FIVE_TO_ONE))
        profile = take_depth_tied(machine, **EVERY_POINT, budget_s=budget_s)
        ran = {k: {(p.batch, p.input_tokens) for p in profile.timing if p.num_layers == k} for k in (10, 4)}
        told = {(p.batch, p.input_tokens) for p in whole_points(profile.timing, 34)}
        assert told == ran[4] == ran[10]
        assert (len(told) == len(PLAN.points)) == (budget_s == 30.0)

    def test_what_two_stages_cannot_share_is_noted(self, golden: Golden) -> None:
        machine = StepTimedMachine(spec=of(34, FIVE_TO_ONE))
        profile = take_depth_tied(machine, degrees=((1, 1), (1, 2)))
        (note,) = (
            note for note in profile.notes if note.startswith("tp=1 pp=2 left out: the model has 34 layers of 2")
        )
        golden("fingerprint", note)

    def test_points_say_of_which_kinds_they_are(self) -> None:
        spec = of(34, FIVE_TO_ONE)
        profile = take_depth_tied(StepTimedMachine(spec=spec))
        assert {p.layer_kinds for p in (*profile.timing, *profile.memory)} == {(9, 1), (4, 0)}
        assert kind_counts(spec, 34) == (29, 5)
        assert from_json(to_json(profile), Profile) == profile


class TestBlocks:
    """Layout of vLLM's KV blocks over layers, by its own examples and rules."""

    @pytest.mark.parametrize(
        ("windows", "shared"),
        [
            ((None,) * 5, 5),
            (BY_TURNS * 12, 12),
            (FIVE_TO_ONE * 8, 8),
            ((None,) * 10 + (64,) * 20, 10),
            ((None,) * 13 + (64,) * 12, 13),  # about as many: the smaller group is filled up
            ((None,) * 2 + (64,) * 3, 2),
        ],
    )
    def test_as_many_layers_share_a_table(self, windows: tuple[int | None, ...], shared: int) -> None:
        assert layers_per_block(windows) == shared

    def test_blocks_of_the_whole_model_are_shared_by_its_groups(self) -> None:
        """A full layer and a sliding one have the same block in turn, so there are twice as many."""
        config = DeploymentConfig(engine="vllm")
        alike, mixed = (
            CountedMemory(take_depth_tied(StepTimedMachine(spec=spec)))
            for spec in (of(32, (None,)), of(32, BY_TURNS))
        )
        budget = 100 * 2**30
        assert mixed.kv_blocks(config, budget) == pytest.approx(2 * alike.kv_blocks(config, budget), rel=1e-3)
