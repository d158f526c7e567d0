"""Costs of variants, from fingerprints with slots filled, on a machine whose true costs are known."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.errors import BadInputError, ConfigError, EngineError, NotMeasuredError
from fingerprint.estimates import Source
from fingerprint.estimators.adapter_slots import WithAdapterSlots, load_s, variant_cost
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.measured_variants import MeasuredVariantCost, measured_cost
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.estimators.towers import WithTowers
from fingerprint.measurements import Profile
from fingerprint.variant_measurements import VariantKind, VariantMeasurement, asked_kind, kind_of
from fingerprint.variant_profile import variant_plan
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, llama, take_profile
from tests.fingerprint.variant_machine import (
    INT2,
    RANK_8,
    WORK,
    VariantMachine,
    VariantMachineSession,
    VariantTruth,
)
from tests.golden_words import Golden

LAYERS = 32
SLOTS = DeploymentConfig(adapter_slots=8, adapter_rank=8)
DELTAS = DeploymentConfig(adapter_slots=8, adapter_rank=8, delta_mib=10)
TRUTH = VariantTruth()


def cost_of(measured: VariantMeasurement, config: DeploymentConfig = SLOTS) -> MeasuredVariantCost:
    found = measured_cost([measured], LAYERS, config)
    assert found is not None
    return found


def slow_machine(slowness: float) -> VariantMachine:
    """Return a machine whose bursts take ``slowness`` times as long."""
    base, step, prompt = (
        tuple(slowness * part for part in parts) for parts in (TRUTH.base_s, TRUTH.step, TRUTH.prompt)
    )
    return VariantMachine(truth=replace(TRUTH, base_s=base, step=step, prompt=prompt))


@pytest.fixture(scope="module")
def measured() -> VariantMeasurement:
    return VariantMachine().measure()


class TestLaw:
    @pytest.mark.parametrize(("rows", "active"), [(1, 1), (8, 1), (8, 8), (3, 2), (32, 16)])
    def test_the_whole_model_follows_from_one_and_two_layers(
        self, measured: VariantMeasurement, rows: int, active: int
    ) -> None:
        """32 layers, more rows and more variants than any burst had."""
        found = cost_of(measured)
        assert found.step_s(rows, active).value == pytest.approx(TRUTH.added_step_s(LAYERS, rows, active))
        work = Workload(batch=rows, input_tokens=100, output_tokens=2)
        prompts = found.prompts_s(work, 0.0, 0.0, float(active))
        assert prompts.value == pytest.approx(TRUTH.added_prompts_s(LAYERS, rows * 100, active))
        assert prompts.source is Source.EXTRAPOLATED

    def test_loaded_variants_lengthen_steps_of_the_base(self, measured: VariantMeasurement) -> None:
        assert cost_of(measured).step_s(8, 0).value == pytest.approx(TRUTH.loaded_s(LAYERS))

    def test_fewer_than_one_variant_is_a_share_of_the_steps(self, measured: VariantMeasurement) -> None:
        found = cost_of(measured)
        none, one, half = (found.step_s(8, active).value for active in (0, 1, 0.5))
        assert half == pytest.approx((none + one) / 2)

    def test_loads_and_bytes_go_by_layers_without_the_first_load(self, measured: VariantMeasurement) -> None:
        found = cost_of(measured)
        assert found.load_s(0) == pytest.approx(LAYERS * TRUTH.load[0] + TRUTH.load[1])
        assert found.held_bytes == pytest.approx(LAYERS * TRUTH.layer_bytes + TRUTH.other_bytes)

    def test_loads_of_an_engine_without_a_step_timer_may_be_faster_than_the_recording(self) -> None:
        found = cost_of(VariantMachine(truth=replace(TRUTH, load=(1e-5, 1e-4))).measure())
        assert found.load.value == pytest.approx(LAYERS * 1e-5 + 1e-4)
        assert found.load.source is Source.EXTRAPOLATED
        num_bytes = round(found.file_bytes)
        assert found.load_s(num_bytes) == pytest.approx(found.load.value)
        assert found.load.value < load_s(num_bytes)

    def test_loads_are_in_proportion_to_their_bytes(self, measured: VariantMeasurement) -> None:
        found, num_bytes = cost_of(measured), LAYERS * TRUTH.layer_bytes + TRUTH.other_bytes
        for times in (0.5, 1.0, 1000.0):
            assert found.load_s(round(times * num_bytes)) == pytest.approx(times * found.load_s(0))

    def test_intervals_hold_the_truth_of_noisy_runs(self) -> None:
        """At least 80 of 100 times and rows are within their 90% intervals; each is wider than nothing."""
        within = total = 0
        for seed in range(25):
            found = cost_of(VariantMachine(noise=0.03, seed=seed).measure())
            for rows, active in ((8, 1), (8, 4), (8, 8), (1, 1)):
                step = found.step_s(rows, active)
                assert step.low < step.high
                within += step.low <= TRUTH.added_step_s(LAYERS, rows, active) <= step.high
                total += 1
        assert within / total >= 0.8

    def test_a_model_of_one_layer_is_its_only_fingerprint(self) -> None:
        found = VariantMachine(spec=llama(1)).measure()
        cost = measured_cost([found], 1, SLOTS)
        assert cost is not None
        assert cost.step_s(8, 4).value == pytest.approx(TRUTH.added_step_s(1, 8, 4))


class TestKinds:
    def test_another_rank_lies_between_no_change_and_proportion(self, measured: VariantMeasurement) -> None:
        same = cost_of(measured).step_s(8, 4)
        found = cost_of(measured, replace(SLOTS, adapter_rank=32))
        assert not found.is_exact
        other = found.step_s(8, 4)
        assert other.value == pytest.approx(2.5 * same.value)
        assert other.low == pytest.approx(same.low)
        assert other.high == pytest.approx(4 * same.high)
        assert other.source is Source.SCALED

    def test_another_degree_lies_between_all_and_its_part(self, measured: VariantMeasurement) -> None:
        same, other = (cost_of(measured, replace(SLOTS, tp=tp)).step_s(8, 4) for tp in (1, 2))
        assert (other.low, other.high) == pytest.approx((same.low / 2, same.high))

    def test_the_nearest_rank_counts(self, measured: VariantMeasurement) -> None:
        far = replace(measured, kind=VariantKind(64))
        found = measured_cost([far, measured], LAYERS, replace(SLOTS, adapter_rank=16))
        assert found is not None
        assert found.measured == measured

    def test_deltas_of_another_format_lie_between_no_change_and_proportion(
        self, measured: VariantMeasurement
    ) -> None:
        found = replace(measured, kind=VariantKind(delta_format=SlotFormat.INT4))
        asked = replace(SLOTS, adapter_rank=0, delta_format=SlotFormat.INT4)
        same, other = cost_of(found, asked), cost_of(found, DELTAS)
        assert (same.is_exact, other.is_exact) == (True, False)
        proportion = (2 + 1 / 8) / (4 + 1 / 8)  # of bits per weight, a scale for 128 included
        assert other.step_s(8, 4).low == pytest.approx(proportion * same.step_s(8, 4).low)
        assert other.step_s(8, 4).high == pytest.approx(same.step_s(8, 4).high)
        assert other.step_s(8, 4).source is Source.SCALED
        both = measured_cost([found, replace(measured, kind=INT2)], LAYERS, DELTAS)
        assert both is not None
        assert both.is_exact

    def test_adapters_tell_nothing_of_deltas_nor_deltas_of_adapters(self, measured: VariantMeasurement) -> None:
        deltas = replace(measured, kind=INT2)
        assert measured_cost([measured], LAYERS, DELTAS) is None
        assert measured_cost([deltas], LAYERS, SLOTS) is None
        assert measured_cost([deltas], LAYERS, DELTAS) is not None

    def test_without_slots_there_is_no_kind(self) -> None:
        assert kind_of(DeploymentConfig()) is None
        assert kind_of(SLOTS) == RANK_8
        assert kind_of(DELTAS) == INT2

    def test_a_rank_is_measured_as_the_slots_that_hold_it(self) -> None:
        assert asked_kind(12, SlotFormat.NONE) == VariantKind(16)
        assert asked_kind(0, SlotFormat.INT2) == INT2
        assert asked_kind(0, SlotFormat.NONE) is None
        with pytest.raises(ConfigError):
            asked_kind(8, SlotFormat.INT2)

    def test_deltas_are_loaded_into_slots_of_their_size(self) -> None:
        machine = VariantMachine(truth=VariantTruth(layer_bytes=3 << 20))
        machine.measure(INT2)
        loads = [entry for entry in machine.log if entry[0] == "load"]
        assert all(int(str(delta_mib)) > 3 * int(str(layers)) for _, layers, _, delta_mib in loads)


class TestDriver:
    def test_every_burst_of_variants_has_one_of_the_base_in_its_round(self, measured: VariantMeasurement) -> None:
        assert {(one.num_layers, one.batch, one.active) for one in measured.runs} == {
            (layers, batch, active)
            for layers in (1, 2)
            for batch, active in ((1, 0), (8, 0), (1, 1), (8, 1), (8, 4))
        }
        assert all(len(one.runs_s) == len(one.base_runs_s) >= 3 for one in measured.runs)

    def test_a_spent_budget_ends_it_after_one_visit_of_each_fingerprint(self) -> None:
        short, long = VariantMachine(), VariantMachine()
        assert len(short.measure(budget_s=1e-3).runs) == len(long.measure(budget_s=60.0).runs)
        visits = [[entry[1] for entry in machine.log if entry[0] == "load"] for machine in (short, long)]
        assert visits == [[1, 2], [1, 2, 2, 1]]
        assert long.clock.now - short.clock.now > 10

    @pytest.mark.parametrize("slowness", [1, 3, 6, 9, 10, 15, 30, 100, 200])
    def test_it_ends_within_twice_its_budget_on_a_slow_machine(self, slowness: float) -> None:
        """Measured, in fewer rounds if need be, or refused before it is."""
        machine = slow_machine(slowness)
        begun_s = machine.clock.now
        with suppress(NotMeasuredError):
            machine.measure(budget_s=30.0)
        assert machine.clock.now - begun_s <= 60.0
        assert machine.session is not None
        assert machine.session.closed

    def test_fewer_rounds_are_run_where_more_do_not_fit(self) -> None:
        rounds = {len(one.runs_s) for one in slow_machine(10).measure(budget_s=30.0).runs}
        assert min(rounds) == 2

    def test_a_second_visit_that_has_no_time_leaves_what_the_first_one_read(self) -> None:
        """The machine is a hundred times slower from the second visit of a fingerprint on, by other work."""
        machine = VariantMachine()
        load = VariantMachineSession.load_with_slots

        def load_on_a_busy_machine(session: VariantMachineSession, *arguments: Any, **order: Any) -> None:
            load(session, *arguments, **order)
            if sum(entry[0] == "load" for entry in machine.log) == 3:
                machine.truth = replace(TRUTH, base_s=tuple(100 * part for part in TRUTH.base_s))

        with patch.object(VariantMachineSession, "load_with_slots", load_on_a_busy_machine):
            found = machine.measure(budget_s=60.0)
        assert [entry[1] for entry in machine.log if entry[0] == "load"] == [1, 2, 2]
        quick = VariantMachine().measure(budget_s=1e-3)
        read = [
            [replace(one, runs_s=one.runs_s[:1], base_runs_s=one.base_runs_s[:1]) for one in each.runs]
            for each in (found, quick)
        ]
        assert read[0] == read[1]
        assert max(max(one.base_runs_s) for one in found.runs) == max(max(one.base_runs_s) for one in quick.runs)

    def test_what_does_not_fit_is_refused_before_variants_are_loaded(self, golden: Golden) -> None:
        machine = slow_machine(100)
        with golden.raises("fingerprint", NotMeasuredError):
            machine.measure(budget_s=30.0)
        assert not [entry for entry in machine.log if entry[0] == "variants"]

    def test_variants_of_a_fingerprint_are_given_up_after_its_last_visit(self) -> None:
        machine = VariantMachine()
        machine.measure()
        assert [entry[1] for entry in machine.log if entry[0] in {"load", "forget"}] == [1, 2, 2, 2, 1, 1]

    def test_what_fails_is_recorded_and_no_estimate(self) -> None:
        machine = VariantMachine(failing=BadInputError("no room for adapters"))
        found = machine.measure()
        assert (found.runs, found.failure) == ((), str(machine.failing))
        assert machine.session is not None
        assert machine.session.closed
        assert measured_cost([found], LAYERS, SLOTS) is None

    def test_what_may_be_gone_the_next_time_is_no_measurement(self) -> None:
        machine = VariantMachine(failing=EngineError("killed"))
        with pytest.raises(EngineError, match="killed"):
            machine.measure()
        assert machine.session is not None
        assert machine.session.closed

    def test_a_measurement_is_stored_as_it_is(self, measured: VariantMeasurement) -> None:
        assert from_json(to_json(measured), VariantMeasurement) == measured

    def test_a_short_context_bounds_the_bursts(self) -> None:
        plan = variant_plan(llama(max_context_tokens=16), WORK, RANK_8, budget_s=1.0)
        assert plan.input_tokens + plan.output_tokens[1] <= 16
        with pytest.raises(ConfigError):
            variant_plan(llama(max_context_tokens=2), WORK, RANK_8, budget_s=1.0)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return take_profile(SyntheticMachine())


class TestEstimates:
    def test_a_profile_without_variants_predicts_what_it_did(
        self, profile: Profile, measured: VariantMeasurement
    ) -> None:
        """To the last bit, also where variants were measured and the configuration has no slots."""
        roofline = RooflineEstimator(profile.spec, CPU)
        before = FingerprintedEstimator(profile, roofline).estimate(DeploymentConfig(), WORK)
        with_variants = FingerprintedEstimator(replace(profile, variants=(measured,)), roofline)
        assert with_variants.estimate(DeploymentConfig(), WORK) == before
        in_traffic = WithAdapterSlots(with_variants, profile.spec, lambda requests: 4.0)
        assert in_traffic.estimate(DeploymentConfig(), WORK) == before

    def test_slots_add_what_was_measured_through_every_wrapper(
        self, profile: Profile, measured: VariantMeasurement
    ) -> None:
        base = FingerprintedEstimator(replace(profile, variants=(measured,)), RooflineEstimator(profile.spec, CPU))
        plain = base.estimate(DeploymentConfig(), WORK)
        for estimator in (base, WithTowers(base, 0)):
            found = WithAdapterSlots(estimator, profile.spec, lambda requests: 4.0).estimate(SLOTS, WORK)
            layers = profile.spec.num_layers
            assert found.tpot_s.value - plain.tpot_s.value == pytest.approx(TRUTH.added_step_s(layers, 8, 4))
            assert found.ttft_s.value - plain.ttft_s.value == pytest.approx(
                TRUTH.added_prompts_s(layers, 8 * 64, 4)
            )
            assert found.tpot_s.source is Source.EXTRAPOLATED

    def test_what_was_not_measured_is_not_known_on_the_embedded_engine(self, profile: Profile) -> None:
        base = FingerprintedEstimator(profile, RooflineEstimator(profile.spec, CPU))
        assert variant_cost(base, profile.spec, SLOTS) is None
        assert variant_cost(base, profile.spec, replace(SLOTS, engine="vllm")) is not None  # scaled from an H200
