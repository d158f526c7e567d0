"""Costs of variants on an engine with a step timer, on a machine whose true costs are known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators import adapter_slots
from fingerprint.estimators.adapter_slots import variant_cost
from fingerprint.estimators.measured_variants import SPREAD
from fingerprint.model_spec import ModelSpec
from fingerprint.variant_measurements import VariantKind, VariantMeasurement
from fingerprint.variant_step_plan import step_plan
from tests.fingerprint.synthetic_machine import llama
from tests.fingerprint.variant_step_machine import (
    HOSTED,
    INT2,
    LAYERS,
    LENGTHS,
    RANK_16,
    WORK,
    StepMachine,
    StepTruth,
    cost_of,
    delta_slots_of,
    slots_of,
)

TRUTH = StepTruth()
SLOWER = ((1e-4, 1.2e-6, 5e-5), (1e-4, 2.4e-6, 5e-5), (2.5e-4, 1e-5, 5e-5))


@pytest.fixture(scope="module")
def measured() -> VariantMeasurement:
    return StepMachine().measure()


class TestLaw:
    @pytest.mark.parametrize("slots", [4, 8, 32, 64])
    @pytest.mark.parametrize(("rows", "active"), [(1, 1), (32, 1), (32, 8), (32, 32), (3, 2), (128, 16)])
    def test_a_step_of_the_whole_model_follows_from_repeated_fingerprints(
        self, measured: VariantMeasurement, rows: int, active: int, slots: int
    ) -> None:
        """More rows, variants and slots than any fingerprint had, and a forward that runs once."""
        found = cost_of(measured, slots_of(slots)).step_s(rows, active)
        assert found.value == pytest.approx(TRUTH.added_step_s(LAYERS, rows, active, slots))
        assert found.source is Source.EXTRAPOLATED

    @pytest.mark.parametrize("slots", [8, 32])
    @pytest.mark.parametrize(("batch", "tokens", "active"), [(1, 2048, 1), (4, 2048, 4), (8, 100, 3)])
    def test_prompts_of_the_whole_model_do(
        self, measured: VariantMeasurement, batch: int, tokens: int, active: int, slots: int
    ) -> None:
        work = Workload(batch=batch, input_tokens=tokens, output_tokens=2)
        found = cost_of(measured, slots_of(slots)).prompts_s(work, 0.0, 0.0, float(active))
        assert found.value == pytest.approx(TRUTH.added_prompts_s(LAYERS, batch * tokens, batch, active, slots))

    @pytest.mark.parametrize("rows", [1, 32])
    def test_slots_lengthen_steps_of_the_base(self, measured: VariantMeasurement, rows: int) -> None:
        found = cost_of(measured, slots_of(32)).step_s(rows, 0)
        assert found.value == pytest.approx(TRUTH.added_step_s(LAYERS, rows, 0, 32))

    def test_slots_lengthen_prompts_of_the_base(self, measured: VariantMeasurement) -> None:
        work = Workload(batch=2, input_tokens=700, output_tokens=2)
        found = cost_of(measured, slots_of(32)).prompts_s(work, 0.0, 1.0, 0.0)
        assert found.value == pytest.approx(TRUTH.added_prompts_s(LAYERS, 1400, 2, 0, 32))

    def test_a_wall_clock_of_one_forward_would_not_do(self, measured: VariantMeasurement) -> None:
        """The parts of a forward are in each of 16 or 32 repeats, and count once in the whole model."""
        repeated = replace(
            measured,
            steps=tuple(replace(one, repeat=1, num_layers=one.repeat * one.num_layers) for one in measured.steps),
        )
        truth_s = TRUTH.added_step_s(LAYERS, 32, 8, 32)
        assert cost_of(repeated, slots_of(32)).step_s(32, 8).value > 1.05 * truth_s

    def test_loads_go_by_layers_without_the_first_load(self, measured: VariantMeasurement) -> None:
        found = cost_of(measured, slots_of(32))
        assert found.load_s(0) == pytest.approx(LAYERS * TRUTH.load[0] + TRUTH.load[1])

    def test_loads_are_no_faster_than_recorded(self) -> None:
        """On an H200 two depths of deltas took as long, and the whole model's six times as much."""
        machine = StepMachine(truth=replace(TRUTH, load=(0.0, 0.45), layer_bytes=70_000_000))
        found = cost_of(machine.measure(INT2), delta_slots_of(8)).load
        recorded_s = adapter_slots.load_s(70_000_000 * LAYERS)
        assert found.value == recorded_s > 0.45
        assert found.low == pytest.approx(0.45)
        assert found.high == adapter_slots.ADDED_ERROR * recorded_s
        assert found.source is Source.SCALED

    def test_loads_that_are_slower_than_recorded_are_as_measured_from_the_recorded_on(self) -> None:
        found = cost_of(StepMachine(truth=replace(TRUTH, load=(0.0, 0.5))).measure(), slots_of(8))
        recorded_s = adapter_slots.load_s(round(found.file_bytes), 2 * 7 * LAYERS)
        assert found.load.value == pytest.approx(0.5)
        assert found.load.low == recorded_s < 0.5
        assert found.load.high >= found.load.value
        assert found.load.source is Source.EXTRAPOLATED

    @pytest.mark.parametrize("rank", [8, 16, 64])
    def test_loads_of_another_rank_are_no_faster_than_recorded_for_their_bytes(self, rank: int) -> None:
        """In proportion to the bytes a small adapter would have no part that is the same for each load."""
        measured = StepMachine(truth=replace(TRUTH, load=(0.0, 0.03))).measure()
        found = cost_of(measured, replace(slots_of(8), adapter_rank=rank))
        num_bytes = round(found.file_bytes * rank / 16)
        assert found.load_s(num_bytes) >= adapter_slots.load_s(num_bytes)
        assert found.load_s(0) == found.load.value

    @pytest.mark.parametrize("tokens", [3000, 4096, 6000, 8192])
    def test_what_each_forward_does_to_its_rows_counts_once_in_the_whole_model(self, tokens: int) -> None:
        """Embeddings of deltas: two depths tell them from the layers, which a fingerprint repeats with them."""
        deltas = (*TRUTH.prompt_layer[:2], 0.0, 0.0)
        truth = replace(TRUTH, prompt_layer=deltas, rest=(*TRUTH.rest[:3], 0.0), forward_row_s=1e-6)
        found = cost_of(StepMachine(truth=truth).measure(INT2), delta_slots_of(4))
        work = Workload(batch=1, input_tokens=tokens, output_tokens=2)
        truth_s = truth.added_prompts_s(LAYERS, tokens, 1, 1, 4)
        assert found.prompts_s(work, 0.0, 0.0, 1.0).value == pytest.approx(truth_s, rel=0.01)

    def test_deltas_have_no_part_of_slots(self) -> None:
        """Engines with one number of slots are measured, of which their kernels know nothing."""
        truth = replace(TRUTH, step_layer=(*TRUTH.step_layer[:2], 0.0, 0.0), rest=(*TRUTH.rest[:3], 0.0))
        found = StepMachine(truth=truth).measure(INT2)
        config = DeploymentConfig(engine="vllm", adapter_slots=8, delta_format=SlotFormat.INT2)
        assert cost_of(found, config).step_s(32, 8).value == pytest.approx(truth.added_step_s(LAYERS, 32, 8, 8))
        assert {one.slots for one in found.steps} == {4}

    def test_an_interval_holds_what_whole_models_differ_by(self, measured: VariantMeasurement) -> None:
        step = cost_of(measured, slots_of(32)).step_s(32, 8)  # without noise
        assert step.high / step.value - 1 == pytest.approx(SPREAD, rel=1e-3)
        assert 1 - step.low / step.value == pytest.approx(SPREAD, rel=1e-3)

    def test_prompts_of_plans_are_as_recorded(self, measured: VariantMeasurement) -> None:
        """A measurement without long ones gives steps and loads alone (docs/decisions/0053)."""
        measured = replace(measured, steps=tuple(one for one in measured.steps if one.tokens <= 2048))
        config, work = slots_of(32), Workload(batch=1, input_tokens=2048, output_tokens=1)
        estimator = SimpleNamespace(variant_cost=lambda config: cost_of(measured, config))
        planned, recorded = (variant_cost(one, llama(LAYERS), config) for one in (estimator, None))
        assert planned is not None
        assert recorded is not None
        mine = cost_of(measured, config)
        assert planned.step_s(32, 8) == mine.step_s(32, 8) != recorded.step_s(32, 8)
        assert planned.load_s(10**6) == mine.load_s(10**6) != recorded.load_s(10**6)
        assert planned.prompts_s(work, 0.05, 0.0, 1.0) == recorded.prompts_s(work, 0.05, 0.0, 1.0)
        assert planned.prompt_share == recorded.prompt_share
        assert planned.measured == measured
        assert not planned.has_measured_prompts
        with pytest.raises(NotMeasuredError):
            mine.prompts_s(work, 0.05, 0.0, 1.0)

    @pytest.mark.parametrize("kind", [RANK_16, INT2], ids=["adapters", "deltas"])
    def test_prompts_of_plans_are_measured_where_long_ones_were(
        self, kind: VariantKind, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Adapters as they are, deltas where plans take them."""
        monkeypatch.setattr(adapter_slots, "TAKES_DELTA_PROMPTS", True)
        measured = StepMachine().measure(kind)
        config = delta_slots_of(8) if kind.is_delta else slots_of(32)
        work = Workload(batch=1, input_tokens=3000, output_tokens=1)
        estimator = SimpleNamespace(variant_cost=lambda config: cost_of(measured, config))
        planned, mine = variant_cost(estimator, llama(LAYERS), config), cost_of(measured, config)
        assert planned is not None
        assert planned.prompts_s(work, 0.05, 0.0, 1.0) == mine.prompts_s(work, 0.05, 0.0, 1.0)
        assert planned.has_measured_prompts
        assert planned.prompt_s is not None
        assert planned.prompt_s(3000) == mine.prompts_s(work, 0.05, 0.0, 1.0).value

    def test_a_gpu_judged_prompts_of_adapters(self, measured: VariantMeasurement) -> None:
        config, work = slots_of(32), Workload(batch=1, input_tokens=3000, output_tokens=1)
        estimator = SimpleNamespace(variant_cost=lambda config: cost_of(measured, config))
        planned = variant_cost(estimator, llama(LAYERS), config)
        assert planned is not None
        assert planned.has_measured_prompts
        assert planned.prompts_s(work, 0.05, 0.0, 1.0) == cost_of(measured, config).prompts_s(work, 0.05, 0.0, 1.0)

    def test_prompts_of_deltas_are_as_recorded_in_plans(self) -> None:
        """A GPU judged their law not clearly nearer than the recording."""
        measured = StepMachine().measure(INT2)
        config, work = delta_slots_of(8), Workload(batch=1, input_tokens=3000, output_tokens=1)
        estimator = SimpleNamespace(variant_cost=lambda config: cost_of(measured, config))
        planned, recorded = (variant_cost(one, llama(LAYERS), config) for one in (estimator, None))
        assert planned is not None
        assert recorded is not None
        assert planned.prompts_s(work, 0.05, 0.0, 1.0) == recorded.prompts_s(work, 0.05, 0.0, 1.0)
        assert planned.step_s(32, 8) == cost_of(measured, config).step_s(32, 8)
        assert cost_of(measured, config).has_measured_prompts, "a bench judges them all the same"
        assert not planned.has_measured_prompts

    def test_intervals_hold_the_truth_of_noisy_steps(self) -> None:
        within = total = 0
        for seed in range(20):
            found = cost_of(StepMachine(noise=0.02, seed=seed).measure(), slots_of(32))
            for rows, active in ((32, 1), (32, 4), (32, 8), (32, 32), (1, 1)):
                step = found.step_s(rows, active)
                assert step.low < step.high
                within += step.low <= TRUTH.added_step_s(LAYERS, rows, active, 32) <= step.high
                total += 1
        assert within / total >= 0.8


def prompts_of(measured: VariantMeasurement, batch: int, tokens: int, active: int, slots: int = 32) -> Quantity:
    work = Workload(batch=batch, input_tokens=tokens, output_tokens=1)
    return cost_of(measured, slots_of(slots)).prompts_s(work, 0.0, 0.0 if active else 1.0, float(active))


@pytest.fixture(scope="module")
def hosted() -> VariantMeasurement:
    return StepMachine(truth=HOSTED).measure()


class TestPrompts:
    """Prompts take the time of their host or of their device, whichever is longer."""

    def truth_s(self, tokens: int, batch: int, active: int, slots: int = 32) -> float:
        return HOSTED.added_prompts_s(LAYERS, tokens, batch, active, slots)

    def test_the_host_is_slower_than_the_device_up_to_a_length(self) -> None:
        """Beyond 2,048 tokens with variants: the line through that length and the next would be wrong."""

        def is_launched(tokens: int) -> bool:
            return HOSTED.forward_s(True, 32, tokens, 1, 1, 32) == pytest.approx(32 * HOSTED.host_s[2])

        found = {tokens: is_launched(tokens) for tokens in (512, 640, 2048, 2400, 3000)}
        assert found == {512: False, 640: True, 2048: True, 2400: False, 3000: False}

    @pytest.mark.parametrize("slots", [8, 32])
    @pytest.mark.parametrize("tokens", [2048, 3000, 6000, 8192])
    def test_long_prompts_are_not_distorted_by_short_ones(
        self, hosted: VariantMeasurement, tokens: int, slots: int
    ) -> None:
        found, truth_s = prompts_of(hosted, 1, tokens, 1, slots), self.truth_s(tokens, 1, 1, slots)
        assert found.value == pytest.approx(truth_s, rel=0.1)
        assert found.low <= truth_s <= found.high
        assert found.high - found.low < 0.6 * found.value

    @pytest.mark.parametrize("tokens", [512, 700, 1024, 1500, 2200])
    def test_short_ones_take_their_hosts_time(self, hosted: VariantMeasurement, tokens: int) -> None:
        found, truth_s = prompts_of(hosted, 1, tokens, 1), self.truth_s(tokens, 1, 1)
        assert found.value == pytest.approx(truth_s, rel=0.1)
        assert found.low <= truth_s <= found.high

    def test_the_interval_reaches_to_what_the_device_takes(self, hosted: VariantMeasurement) -> None:
        """A host whose pace is another when the whole model runs is within."""
        quick = replace(HOSTED, host_s=(0.0, 0.0, 0.0))
        for tokens in (1024, 1500, 2048):
            found = prompts_of(hosted, 1, tokens, 1)
            assert found.low <= quick.added_prompts_s(LAYERS, tokens, 1, 1, 32) < found.value

    @pytest.mark.parametrize(("batch", "tokens", "active"), [(4, 2048, 1), (4, 2048, 4), (2, 2500, 2)])
    def test_prompts_of_several_requests(
        self, hosted: VariantMeasurement, batch: int, tokens: int, active: int
    ) -> None:
        found, truth_s = prompts_of(hosted, batch, tokens, active), self.truth_s(batch * tokens, batch, active)
        assert found.value == pytest.approx(truth_s, rel=0.1)
        assert found.low <= truth_s <= found.high

    def test_more_tokens_are_so_many_steps_of_the_longest(self, hosted: VariantMeasurement) -> None:
        """Engines take no more in one step, and longer ones were not measured."""
        one, many = (prompts_of(hosted, batch, 8192, 1).value for batch in (1, 4))
        rest_s = sum(HOSTED.rest[2:3]) + HOSTED.rest[3] * 32 + HOSTED.slots[3]
        forward_s = self.truth_s(8192, 1, 1) - HOSTED.parts((0, 0, 0, 0), 0, 0, 1, 1, 32)[1]
        assert many == pytest.approx(one + 3 * (forward_s + rest_s), rel=1e-3)

    def test_a_prompt_below_the_shortest_takes_as_long(self, hosted: VariantMeasurement) -> None:
        """The first one of a burst's was computed alone."""
        assert min(one.tokens for one in hosted.steps if one.is_prompt) == 32
        assert prompts_of(hosted, 1, 1, 1) == prompts_of(hosted, 1, 32, 1)

    @pytest.mark.parametrize("tokens", [640, 2048, 6000])
    def test_slots_lengthen_prompts_of_the_base(self, hosted: VariantMeasurement, tokens: int) -> None:
        found, truth_s = prompts_of(hosted, 1, tokens, 0), self.truth_s(tokens, 1, 0)
        assert found.value == pytest.approx(truth_s, rel=0.1)
        assert found.low <= truth_s <= found.high

    def test_intervals_hold_the_truth_of_noisy_prompts(self) -> None:
        """And say something: an interval is at most as wide as the value."""
        within, widths = [], []
        for seed in range(10):
            found = StepMachine(truth=HOSTED, noise=0.02, seed=seed).measure()
            for tokens in (2048, 3000, 6000):
                prompt, truth_s = prompts_of(found, 1, tokens, 1), self.truth_s(tokens, 1, 1)
                within.append(prompt.low <= truth_s <= prompt.high)
                widths.append((prompt.high - prompt.low) / prompt.value)
        assert sum(within) / len(within) >= 0.8
        assert sorted(widths)[len(widths) // 2] < 0.6
        assert max(widths) < 2.0

    def test_long_prompts_do_not_go_by_the_pace_of_a_host(self) -> None:
        """A third slower or quicker in each step, as on an H200's."""
        for seed in range(10):
            found = StepMachine(truth=HOSTED, host_scatter=0.3, seed=seed).measure()
            for tokens in (3000, 6000, 8192):
                prompt, truth_s = prompts_of(found, 1, tokens, 1), self.truth_s(tokens, 1, 1)
                assert prompt.value == pytest.approx(truth_s, rel=0.1)
                assert prompt.low <= truth_s <= prompt.high
            short = prompts_of(found, 1, 2048, 1)
            assert short.low <= self.truth_s(2048, 1, 1) <= short.high < 3 * short.value

    @pytest.mark.parametrize("tokens", [512, 1024, 2048, 3000, 6000, 8192])
    def test_deltas(self, tokens: int) -> None:
        """Engines with one number of slots: a length has no part for each."""
        truth = replace(
            HOSTED,
            step_layer=(*TRUTH.step_layer[:2], 0.0, 0.0),
            prompt_layer=(2e-5, 7e-7, 0.0, 1.2e-5),
            rest=(*TRUTH.rest[:3], 0.0),
        )
        measured = StepMachine(truth=truth).measure(INT2)
        config = DeploymentConfig(engine="vllm", adapter_slots=8, delta_format=SlotFormat.INT2)
        work = Workload(batch=1, input_tokens=tokens, output_tokens=1)
        found = cost_of(measured, config).prompts_s(work, 0.0, 0.0, 1.0)
        truth_s = truth.added_prompts_s(LAYERS, tokens, 1, 1, 8)
        assert found.value == pytest.approx(truth_s, rel=0.1)
        assert found.low <= truth_s <= found.high

    def test_a_prompt_that_takes_several_steps_is_several_lengths(self) -> None:
        """An engine whose step takes 4,096 tokens."""
        found = StepMachine(truth=HOSTED, step_tokens=4096).measure()
        assert 8192 not in {one.tokens for one in found.steps}
        for tokens in (3000, 4096):
            assert prompts_of(found, 1, tokens, 1).value == pytest.approx(self.truth_s(tokens, 1, 1), rel=0.1)
        two = prompts_of(found, 1, 8192, 1).value
        assert two == pytest.approx(2 * self.truth_s(4096, 1, 1), rel=0.02)


class TestLengths:
    def lengths(self, spec: ModelSpec, work: Workload = WORK, **bound: int) -> list[int]:
        return [shape.input_tokens for shape in step_plan(spec, work, RANK_16, **bound).prompts]

    def test_prompts_reach_what_a_step_takes(self) -> None:
        spec = llama(max_context_tokens=16384)
        assert self.lengths(spec) == [512, 640, 2048, 4096, 8192]
        assert self.lengths(spec, step_tokens=4096) == [512, 640, 2048, 4096]

    def test_they_fit_the_context(self) -> None:
        assert self.lengths(llama(max_context_tokens=8192)) == [512, 640, 2048, 4096, 8191]
        assert self.lengths(llama(max_context_tokens=4096)) == [512, 640, 2048, 4095]

    def test_they_are_no_longer_than_all_prompts_of_the_workload(self) -> None:
        work = Workload(batch=2, input_tokens=2000, output_tokens=8)
        assert self.lengths(llama(max_context_tokens=8192), work) == [512, 640, 2048, 4000]

    def test_the_longest_is_nearly_twice_the_next(self) -> None:
        """Or their line would be noise, and the host of both the slower one."""
        assert self.lengths(llama(max_context_tokens=6001)) == [512, 640, 2048, 6000]

    @pytest.mark.parametrize("context", [6, 1000, 2049, 3000, 3892])
    def test_there_are_none_without_two_long_ones(self, context: int) -> None:
        """A single length says nothing of where the host is no longer slower."""
        assert self.lengths(llama(max_context_tokens=context)) == []

    def test_the_cache_has_the_room_of_the_largest_burst(self) -> None:
        """Bursts of 32 prompts of 8,192 tokens are never asked for."""
        plan = step_plan(llama(max_context_tokens=16384), WORK, RANK_16)
        assert plan.kv_tokens == plan.max_context_tokens == 8193

    def test_those_for_which_there_is_no_time_are_left_out(self) -> None:
        """On a machine that is three times slower steps are measured all the same."""
        measured = [StepMachine(truth=replace(TRUTH, base_s=base_s)).measure() for base_s in SLOWER]
        lengths = [{one.tokens for one in found.steps if one.is_prompt} & set(LENGTHS) for found in measured]
        assert lengths == [set(LENGTHS), {512, 640, 2048, 4096}, set()]
        for found in measured:
            assert {one.active for one in found.steps if not one.is_prompt} == {0, 1, 4, 8}
            assert cost_of(found, slots_of(32)).has_measured_prompts == (
                4096 in {one.tokens for one in found.steps}
            )
