"""The numbers of the page's section on repeated fingerprints, against a machine whose true times are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import KvFormat, WeightFormat, Workload
from fingerprint.estimators.calibration import Calibration
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import Profile
from fingerprint.weight_bytes import embedding_bytes
from iserve.report.full_model import WholeModel, whole_models
from tests.fingerprint.step_timed_machine import BLOCK_TOKENS, PLAN, StepTimedMachine, take_depth_tied

OUTPUT = 65
PLAIN = ((1, 128), (8, 1024))


@pytest.fixture(scope="module")
def machine() -> StepTimedMachine:
    return StepTimedMachine(num_devices=2)


@pytest.fixture(scope="module")
def profile(machine: StepTimedMachine) -> Profile:
    return take_depth_tied(machine, degrees=((1, 1), (2, 1)), plain_points=PLAIN, long_s=1e6)


def models_of(profile: Profile, output_tokens: int = OUTPUT) -> tuple[WholeModel, ...]:
    """Without what real models on a real H200 were off by: this machine is exact."""
    estimator = DepthTiedEstimator(profile, RooflineEstimator(profile.spec, profile.machine.device), Calibration())
    return whole_models(estimator, Workload(output_tokens=output_tokens))


@pytest.fixture(scope="module")
def models(profile: Profile) -> tuple[WholeModel, ...]:
    return models_of(profile)


def test_every_configuration_that_was_run_is_there(models: tuple[WholeModel, ...]) -> None:
    assert [(m.tp, m.pp, m.weights, m.kv) for m in models] == [
        (tp, 1, WeightFormat.BITS16, KvFormat.BITS16) for tp in (1, 2)
    ]
    for model in models:
        assert {(p.time.batch, p.time.input_tokens) for p in model.points} == set(PLAN.points)
        assert model.num_layers == 2
        assert {p.run_tokens for p in model.points} == {PLAN.long_output}


def test_times_are_the_whole_models(machine: StepTimedMachine, models: tuple[WholeModel, ...]) -> None:
    for model in models:
        for point in model.points:
            at = (point.time.batch, point.time.input_tokens)
            assert point.time.ttft_s.value == pytest.approx(machine.ttft_s(*at, tp=model.tp), rel=0.02)
            assert point.time.tpot_s.value == pytest.approx(machine.tpot_s(*at, OUTPUT, tp=model.tp), rel=0.02)
            assert point.time.tpot_s.low < point.time.tpot_s.value < point.time.tpot_s.high


def test_lines_pass_through_what_was_run(models: tuple[WholeModel, ...]) -> None:
    for model in models:
        by_input = {line.input_tokens: line.times for line in model.lines}
        assert set(by_input) == {n for _, n in PLAN.points}
        for point in model.points:
            assert point.time in by_input[point.time.input_tokens]
        assert [time.batch for time in by_input[1024]] == [1, 2, 4, 8]
        assert [time.batch for time in by_input[512]] == [32]  # one batch is no line
        for times in by_input.values():
            assert [t.ttft_s.value for t in times] == sorted(t.ttft_s.value for t in times)


def test_a_decode_steps_parts_are_the_gpus(machine: StepTimedMachine, models: tuple[WholeModel, ...]) -> None:
    truth, (model, _) = machine.truth, models
    o0, o1 = truth.decode_repeat_s
    for point in model.points:
        step, batch = point.decode, point.time.batch
        assert (step.gap_s, step.lead_s, step.tail_s) == pytest.approx((truth.gap_s, truth.lead_s, truth.tail_s))
        assert step.repeats_s == pytest.approx((model.repeat - 1) * (o0 + o1 * batch), rel=1e-6)
        assert step.layers_s + step.repeats_s == pytest.approx(step.forward_s)
        assert step.total_s == pytest.approx(step.gap_s + step.lead_s + step.forward_s + step.tail_s)
        steps = PLAN.long_bursts * (PLAN.long_output - 1) / 2  # the later half of each burst
        assert 0.8 * steps <= step.num_steps <= steps + PLAN.long_bursts


def test_the_cost_of_a_repeat_is_the_machines(machine: StepTimedMachine, models: tuple[WholeModel, ...]) -> None:
    cost, truth = models[0].cost, machine.truth
    assert (cost.first_per_pass_s, cost.first_per_token_s) == pytest.approx(truth.prefill_repeat_s, rel=1e-6)
    assert (cost.step_per_pass_s, cost.step_per_token_s) == pytest.approx(truth.decode_repeat_s, rel=1e-6)
    assert cost.depths == (1, 2)


def test_a_rank_that_was_run_alone_is_said_to_be(profile: Profile) -> None:
    assert not any(model.shard for model in models_of(profile))
    real = {point.tp for point in profile.timing}
    assert real == {1, 2}
    alone = tuple(replace(p, shard=p.tp == 2) for p in profile.timing)
    assert [model.shard for model in models_of(replace(profile, timing=alone))] == [False, True]
    both = profile.timing + tuple(p for p in alone if p.shard)  # the real group's points come first
    assert [model.shard for model in models_of(replace(profile, timing=both))] == [False, False]


def test_a_group_holds_more_than_its_rank_alone(profile: Profile) -> None:
    alone = replace(
        profile,
        timing=tuple(replace(p, shard=p.tp == 2) for p in profile.timing),
        memory=tuple(replace(p, shard=p.tp == 2) for p in profile.memory),
    )
    (_, rank), (_, group) = (model.memory for model in models_of(profile)), models_of(alone)
    assert rank is not None
    assert group.memory is not None
    assert group.memory.whole.graph_bytes == rank.whole.graph_bytes
    assert group.memory.whole.context_bytes > rank.whole.context_bytes  # the buffers of its sums, by assumption
    assert group.memory.blocks < rank.blocks


def test_waits_of_plain_fingerprints_are_told_where_they_were_run(
    machine: StepTimedMachine, profile: Profile, models: tuple[WholeModel, ...]
) -> None:
    assert models[0].plain_gap_s == pytest.approx((machine.truth.gap_s, machine.truth.gap_s))
    repeated = replace(profile, timing=tuple(p for p in profile.timing if p.repeat > 1))
    assert models_of(repeated)[0].plain_gap_s is None


def test_readings_are_the_drivers_or_none(models: tuple[WholeModel, ...]) -> None:
    for point in models[0].points:
        assert (point.readings.sm_clock_mhz, point.readings.power_w) == (1900.0, 600.0)
        assert point.readings.held_bytes is None  # this machine does not say


def test_memory_is_counted_and_carried_to_all_layers(
    machine: StepTimedMachine, models: tuple[WholeModel, ...]
) -> None:
    spec, truth = machine.spec, machine.truth
    memory = models[0].memory
    assert memory is not None
    assert [items.num_layers for items in memory.fingerprints] == [1, 2]
    for items in (*memory.fingerprints, memory.whole):
        assert items.activation_bytes == truth.activation_bytes
        assert items.context_bytes == truth.runtime_bytes
        per_token = items.num_layers * spec.kv_bytes_per_token_per_layer(KvFormat.BITS16)
        assert items.kv_bytes_per_token == pytest.approx(per_token)
    assert memory.whole.num_layers == spec.num_layers
    exact = 2 * (spec.num_layers * spec.layer_params + spec.head_params + spec.final_norm_params)
    assert memory.whole.weights_bytes == pytest.approx(exact + embedding_bytes(spec), abs=truth.allocator_bytes)
    held = memory.whole.weights_bytes + truth.activation_bytes + truth.runtime_bytes
    block = memory.block_tokens * memory.whole.kv_bytes_per_token
    assert memory.block_tokens == BLOCK_TOKENS
    assert memory.blocks == pytest.approx((memory.budget_bytes - held) / block, abs=1)


def test_an_engine_that_does_not_count_blocks_has_no_such_table(profile: Profile) -> None:
    silent = tuple(
        replace(point, ranks=tuple(replace(rank, kv_block_tokens=0) for rank in point.ranks))
        for point in profile.memory
    )
    assert models_of(replace(profile, memory=silent))[0].memory is None


def test_times_are_for_the_asked_answers(machine: StepTimedMachine, profile: Profile) -> None:
    short, long = models_of(profile, 2)[0], models_of(profile, 1025)[0]
    for before, after in zip(short.points, long.points, strict=True):
        assert before.time.ttft_s == after.time.ttft_s
        if before.time.input_tokens == 1024:  # the cache grows while it answers
            assert before.time.tpot_s.value < after.time.tpot_s.value
