"""Fingerprints whose steps are timed with slots for variants: what is run, for how long, and what is kept."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import Workload
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    EngineError,
    NotMeasuredError,
    TooLittleTimeError,
    UnmeasurableError,
)
from fingerprint.estimators.measured_variants import measured_cost
from fingerprint.variant_measurements import VariantMeasurement
from fingerprint.variant_step_plan import step_plan
from tests.fingerprint.synthetic_machine import llama
from tests.fingerprint.variant_step_machine import (
    INT2,
    LAYERS,
    LENGTHS,
    RANK_16,
    START_S,
    WORK,
    StepMachine,
    StepTruth,
    cost_of,
    slots_of,
)
from tests.golden_words import Golden

TRUTH = StepTruth()


@pytest.fixture(scope="module")
def measured() -> VariantMeasurement:
    return StepMachine().measure()


class TestDriver:
    def test_engines_are_started_without_slots_with_many_and_with_few(self) -> None:
        machine = StepMachine()
        machine.measure()
        starts = [entry[1:] for entry in machine.log if entry[0] == "start"]
        assert starts == [(2, 0, 0, "none"), (2, 32, 16, "none"), (1, 8, 16, "none")]
        assert machine.session is not None
        assert machine.session.closed

    def test_engines_for_deltas_have_slots_of_their_format(self) -> None:
        machine = StepMachine()
        machine.measure(INT2)
        starts = [entry[1:] for entry in machine.log if entry[0] == "start"]
        assert starts == [(2, 0, 0, "none"), (2, 4, 0, "int2"), (1, 4, 0, "int2")]

    def test_forwards_are_repeated_to_the_depth_of_the_model(self) -> None:
        machine = StepMachine()
        machine.measure()
        bursts = {(entry[1], entry[-1]) for entry in machine.log if entry[0] == "burst"}
        assert bursts == {(2, 16), (1, 32)}

    def test_steps_of_each_composition_have_one_of_the_base(self, measured: VariantMeasurement) -> None:
        of_decode = {(one.num_layers, one.slots, one.active) for one in measured.steps if not one.is_prompt}
        assert of_decode == {(2, 32, active) for active in (0, 1, 4, 8)} | {(1, 8, active) for active in (1, 4, 8)}
        of_several = {32, 31 * 32 + 1, 256, 3 * 256 + 1}
        assert {one.tokens for one in measured.steps if one.is_prompt} == {64, *LENGTHS} | of_several
        alone = [one for one in measured.steps if one.tokens in LENGTHS]
        assert {(one.num_layers, one.slots, one.active) for one in alone} == {(2, 32, 0), (2, 32, 1), (1, 8, 1)}
        assert all(len(one.forwards_s) == len(one.base_forwards_s) >= 2 for one in measured.steps)

    def test_prompts_that_are_divided_otherwise_are_not_compared(self) -> None:
        """Requests arrive one by one: which of them a first step holds is the host's pace."""
        found = StepMachine(alone_first=lambda burst: 1 + burst % 3).measure()
        cost = cost_of(found, slots_of(32))
        assert cost.step_s(32, 8).value == pytest.approx(TRUTH.added_step_s(LAYERS, 32, 8, 32))
        work = Workload(batch=1, input_tokens=2048, output_tokens=2)
        assert cost.prompts_s(work, 0.0, 0.0, 1.0).value == pytest.approx(
            TRUTH.added_prompts_s(LAYERS, 2048, 1, 1, 32), rel=0.05
        )

    def test_a_forward_in_which_a_kernel_was_compiled_is_left_out(self) -> None:
        machine = StepMachine()
        machine.slowed = {24, 40}  # the first burst for 8 adapters after those that warm up, and another
        found = cost_of(machine.measure(), slots_of(32))
        assert found.step_s(32, 8).value == pytest.approx(TRUTH.added_step_s(LAYERS, 32, 8, 32))

    @pytest.mark.parametrize("batch", [2, 3, 5])
    def test_small_batches_are_measured(self, batch: int) -> None:
        found = StepMachine().measure(work=Workload(batch=batch, input_tokens=300, output_tokens=9))
        truth_s = TRUTH.added_step_s(LAYERS, batch, batch, 8)
        assert cost_of(found, slots_of(8)).step_s(batch, batch).value == pytest.approx(truth_s)

    def test_its_budget_counts_what_follows_the_starts(self) -> None:
        machine = StepMachine()
        begun_s = machine.clock.now
        found = machine.measure()
        assert found.spent_s - found.warm_up_s <= 30.0
        assert found.spent_s <= 45.0
        assert machine.clock.now - begun_s == pytest.approx(found.spent_s + 3 * START_S)

    @pytest.mark.parametrize("slowness", [1, 2, 4, 8, 30])
    def test_it_ends_within_twice_its_budget_on_a_slow_machine(self, slowness: float) -> None:
        base_s, token_s, once_s = TRUTH.base_s
        truth = replace(TRUTH, base_s=(slowness * base_s, slowness * token_s, once_s))
        machine = StepMachine(truth=truth)
        begun_s = machine.clock.now
        try:
            machine.measure()
        except NotMeasuredError:
            assert slowness > 2
        starts = sum(entry[0] == "start" for entry in machine.log)
        assert machine.clock.now - begun_s - START_S * starts <= 60.0
        assert machine.session is not None
        assert machine.session.closed

    def test_kernels_that_are_compiled_once_take_nothing_of_the_budget(self) -> None:
        """The first burst of each kind takes 5 s longer, in each of three engines: 105 s of a budget of 30."""
        quick, machine = StepMachine().measure(), StepMachine(compile_s=5.0)
        found = machine.measure()
        assert found.warm_up_s == pytest.approx(quick.warm_up_s + 5.0 * (3 + 9 + 9))
        assert found.spent_s - found.warm_up_s == pytest.approx(quick.spent_s - quick.warm_up_s)
        assert found.steps == quick.steps

    def test_an_engine_that_compiles_for_minutes_is_ended(self, golden: Golden) -> None:
        """The bursts that warm up end after two minutes, and the one under way."""
        machine = StepMachine(compile_s=50.0)
        begun_s = machine.clock.now
        with golden.raises("fingerprint", NotMeasuredError) as ended:
            machine.measure()
        assert isinstance(ended.value, TooLittleTimeError)
        starts = sum(entry[0] == "start" for entry in machine.log)
        assert 120.0 < machine.clock.now - begun_s - START_S * starts < 120.0 + 60.0 + 30.0
        assert machine.session is not None
        assert machine.session.closed

    def test_progress_says_what_warms_up_and_the_seconds_since_the_measurement_began(self) -> None:
        """Starts and compiling are most of what a deploy waits for, and none of the budget."""
        machine = StepMachine(compile_s=5.0)
        begun_s = machine.clock.now
        found = machine.measure()
        bursts = sum(entry[0] == "burst" for entry in machine.log)
        is_warm_up = ["warming up" in one.running for one in machine.progress]
        plan = step_plan(machine.spec, WORK, RANK_16)
        assert is_warm_up.count(True) == len(plan.base_bursts) + 2 * len(plan.bursts), "each engine's first round"
        elapsed_s = [one.elapsed_s for one in machine.progress]
        assert elapsed_s == sorted(elapsed_s)
        assert found.spent_s + 3 * START_S - 1.0 < elapsed_s[-1] < machine.clock.now - begun_s
        assert [one.done for one in machine.progress] == sorted(one.done for one in machine.progress)
        assert machine.progress[-1].done == bursts - 1

    def test_no_further_engine_is_started_where_the_fewest_rounds_would_take_too_long(self) -> None:
        base_s, token_s, once_s = TRUTH.base_s
        machine = StepMachine(truth=replace(TRUTH, base_s=(8 * base_s, 8 * token_s, once_s)))
        with pytest.raises(NotMeasuredError):
            machine.measure()
        assert [entry[0] for entry in machine.log].count("start") == 1

    def test_variants_are_given_up_after_the_last_engine_with_their_fingerprint(self) -> None:
        machine = StepMachine()
        machine.measure()
        assert [entry[1] for entry in machine.log if entry[0] in {"start", "forget"}] == [2, 2, 2, 1, 1]

    def test_what_an_engine_refuses_is_kept_as_no_measurement(self) -> None:
        machine = StepMachine(failing=BadInputError("no such adapter"))
        found = machine.measure()
        assert (found.steps, found.failure) == ((), "no such adapter")
        assert measured_cost([found], LAYERS, slots_of(8)) is None

    def test_what_may_be_gone_the_next_time_is_raised(self) -> None:
        machine = StepMachine(failing=EngineError("killed"))
        with pytest.raises(EngineError, match="killed"):
            machine.measure()
        assert machine.session is not None
        assert machine.session.closed

    def test_a_model_that_cannot_be_repeated_is_not_measured(self) -> None:
        spec = llama(5, layer_windows=(None, None, None, 64, None))
        with pytest.raises(NotMeasuredError):
            StepMachine(spec=spec).measure()

    @pytest.mark.parametrize(("budget_s", "slowness"), [(30.0, 8), (20.0, 8), (20.0, 6)])
    def test_advice_is_more_seconds_only_where_a_profile_can_give_them(
        self, budget_s: float, slowness: int, golden: Golden
    ) -> None:
        """Variants get a budget of 30 s at most of any profile on an engine with our step timer."""
        base_s, token_s, once_s = TRUTH.base_s
        machine = StepMachine(truth=replace(TRUTH, base_s=(slowness * base_s, slowness * token_s, once_s)))
        with golden.raises("fingerprint", TooLittleTimeError):
            machine.measure(budget_s=budget_s)

    def test_no_time_is_advised_for_what_cannot_be_measured(self, golden: Golden) -> None:
        spec = llama(5, layer_windows=(None, None, None, 64, None))
        with golden.raises("fingerprint", UnmeasurableError):
            StepMachine(spec=spec).measure()

    def test_a_model_of_one_layer_is_measured(self) -> None:
        found = StepMachine(spec=llama(1, max_context_tokens=8192)).measure()
        assert {one.num_layers for one in found.steps} == {1}

    def test_a_measurement_is_stored_as_it_is(self, measured: VariantMeasurement) -> None:
        assert from_json(to_json(measured), VariantMeasurement) == measured

    def test_plans_are_bounded_by_context_and_batch(self) -> None:
        plan = step_plan(llama(max_context_tokens=16), WORK, RANK_16)
        assert plan.max_context_tokens <= 16
        few = step_plan(llama(), Workload(batch=2, input_tokens=8, output_tokens=8), RANK_16)
        assert few.active == (1, 2)
        assert max(active for _, active in few.bursts) == 2
        with pytest.raises(ConfigError):
            step_plan(llama(max_context_tokens=5), WORK, RANK_16)
