"""L3 on a pipeline that keeps a batch in flight for each stage: a schedule of two stages, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import KvFormat, WeightFormat
from fingerprint.estimators.repeat_overhead import ending, together
from fingerprint.estimators.whole_points import whole_points
from fingerprint.measurements import RunReading, StepReading, TimingPoint

LAYERS, BATCH, INPUT, OUTPUT = 32, 64, 128, 33
PROMPT_S, PROMPT_ONCE_S = 2e-3, 4e-4  # of half the batch on one stage: a layer, what a repeat costs in addition
TOKEN_S, TOKEN_ONCE_S = 2e-4, 5e-5


def reading(seconds: float, busy_s: float, prefill: bool) -> StepReading:
    return StepReading(
        tokens=BATCH // 2 * (INPUT if prefill else 1),
        sequences=BATCH // 2,
        prefill_tokens=BATCH // 2 * INPUT if prefill else 0,
        context_tokens=0,
        attention_pairs=0,
        gap_s=seconds - busy_s,
        lead_s=0.0,
        forward_s=busy_s,
        tail_s=0.0,
    )


def stage_s(layers: int, prefill: bool) -> float:
    """Return the time of a step on one of two stages, over all repeats of so many layers in all."""
    layer_s, once_s = (PROMPT_S, PROMPT_ONCE_S) if prefill else (TOKEN_S, TOKEN_ONCE_S)
    return LAYERS // layers * once_s + LAYERS // 2 * layer_s


def point(layers: int, output: int) -> TimingPoint:
    """Return what is measured with ``layers`` of 32, repeated to as many.

    The halves of the batch follow one another through the stages. The first half's first token is made behind the
    second half's prompts; from then on both stages are busy all the time.
    """
    prompt_s, token_s = stage_s(layers, prefill=True), stage_s(layers, prefill=False)
    steps = [reading(prompt_s, prompt_s, prefill=True)] * 2
    if output > 1:
        steps += [reading(token_s, token_s, prefill=False), reading(prompt_s, token_s, prefill=False)]
        steps += [reading(token_s, token_s, prefill=False)] * (2 * (output - 2))
    e2e_s = 3 * prompt_s + 2 * token_s * (output - 1)
    busy_s = sum(step.forward_s for step in steps)
    run = RunReading(
        e2e_s=e2e_s,
        device_s=busy_s,
        host_s=e2e_s - busy_s,
        sm_clock_mhz=1900.0,
        power_w=600.0,
        steps=tuple(steps),
    )
    return TimingPoint(
        num_layers=layers,
        tp=1,
        pp=2,
        weights=WeightFormat.BITS16,
        kv=KvFormat.BITS16,
        batch=BATCH,
        input_tokens=INPUT,
        output_tokens=output,
        runs=(run,),
        repeat=LAYERS // layers,
    )


def test_steps_of_both_halves_are_one_round() -> None:
    long = point(4, OUTPUT)
    rounds = together(long, long.runs[0])
    assert len(rounds) == OUTPUT - 1
    assert {(len(one.steps), one.sequences) for one in rounds} == {(2, BATCH)}


def test_the_whole_model_takes_what_its_stages_take_at_once() -> None:
    (found,) = whole_points(tuple(point(layers, output) for layers in (2, 4) for output in (1, OUTPUT)), LAYERS)
    assert found.ttft_s == pytest.approx(3 * stage_s(LAYERS, prefill=True), rel=1e-9)
    assert found.steady_s == pytest.approx(2 * stage_s(LAYERS, prefill=False), rel=1e-9)
    assert found.tpot_s(OUTPUT) == pytest.approx(2 * stage_s(LAYERS, prefill=False), rel=0.03)


def test_a_first_stage_that_waits_for_the_last_prompts_decodes_no_slower() -> None:
    """Long prompts are called with long answers alone, where that wait is no step's time."""
    (found,) = whole_points(tuple(point(layers, OUTPUT) for layers in (2, 4)), LAYERS)
    once_s = (LAYERS // 4 - 1) * PROMPT_ONCE_S  # that two depths of long answers do not tell of prompts
    assert found.tpot_s(OUTPUT) == pytest.approx(2 * stage_s(LAYERS, prefill=False), rel=1e-9)
    assert found.ttft_s == pytest.approx(3 * (stage_s(LAYERS, prefill=True) + once_s), rel=1e-9)


def test_what_sequences_that_ended_leave_is_in_rounds_too() -> None:
    """Eight of the first half were computed early, and end two tokens before the rest."""
    long = point(4, OUTPUT)
    (run,) = long.runs
    left = tuple(replace(step, sequences=BATCH // 2 - 8) for step in run.steps[-4::2])
    steps = (*run.steps[:-4], left[0], run.steps[-3], left[1], run.steps[-1])
    ended = replace(long, runs=(replace(run, steps=steps),))
    assert [round_.sequences for round_ in ending(ended, ended.runs[0])] == [BATCH - 8] * 2
    assert len(together(ended, ended.runs[0])) == OUTPUT - 3
