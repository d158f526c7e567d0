"""Properties of predicted prompts of variants, whatever their tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, SlotFormat, Workload
from fingerprint.estimates import Quantity
from fingerprint.estimators.measured_variants import MeasuredVariantCost, measured_cost
from fingerprint.estimators.prompt_curve import lengths_alone
from tests.fingerprint.variant_step_machine import HOSTED, INT2, LAYERS, RANK_16, StepMachine

STEP_TOKENS = 8192  # of the longest prompt that is measured


@dataclass(frozen=True)
class World:
    """Measurement that is judged: of adapters or deltas, on a machine with noise and a host whose pace changes."""

    noise: float = 0.0
    host_scatter: float = 0.0
    has_deltas: bool = False
    seed: int = 0


WORLDS = st.builds(
    World,
    noise=st.sampled_from([0.0, 0.02]),
    host_scatter=st.sampled_from([0.0, 0.3]),
    has_deltas=st.booleans(),
    seed=st.integers(0, 3),
)
TOKENS, SLOTS = st.integers(1, 4 * STEP_TOKENS), st.sampled_from([1, 8, 32, 64])


@cache
def cost_of(world: World, slots: int) -> MeasuredVariantCost:
    machine = StepMachine(truth=HOSTED, noise=world.noise, host_scatter=world.host_scatter, seed=world.seed)
    measured = machine.measure(INT2 if world.has_deltas else RANK_16)
    config = (
        DeploymentConfig(engine="vllm", adapter_slots=slots, delta_format=SlotFormat.INT2)
        if world.has_deltas
        else DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=16)
    )
    found = measured_cost([measured], LAYERS, config)
    assert found is not None
    assert found.has_measured_prompts
    return found


def prompts(
    world: World, slots: int, tokens: int, batch: int = 1, base_share: float = 0.0, distinct: float = 1.0
) -> Quantity:
    work = Workload(batch=batch, input_tokens=tokens, output_tokens=1)
    return cost_of(world, slots).prompts_s(work, 0.0, base_share, distinct)


def base_s(tokens: float) -> float:
    """Return what prompts of the base take in an engine without slots."""
    steps = max(1.0, tokens / STEP_TOKENS)
    return steps * HOSTED.forward_s(True, LAYERS, tokens / steps, 1, 0, 0)


@given(world=WORLDS, slots=SLOTS, tokens=TOKENS)
def test_an_interval_holds_the_value_and_says_something(world: World, slots: int, tokens: int) -> None:
    """Empty intervals and those of many times the value say nothing."""
    found = prompts(world, slots, tokens)
    assert 0 <= found.low < found.value < found.high
    assert found.high < 3 * found.value
    if tokens >= 2048:
        assert found.high - found.low < 1.2 * found.value


@given(world=WORLDS, slots=SLOTS, tokens=st.integers(512, 4 * STEP_TOKENS))
def test_what_prompts_of_the_base_take_longer_is_known_to_a_part_of_them(
    world: World, slots: int, tokens: int
) -> None:
    """Hardly anything is added to them, so that the interval is many times the value. Short ones are at the pace
    of a host that changes by a third here.
    """
    found = prompts(world, slots, tokens, base_share=1.0, distinct=0.0)
    assert 0 <= found.low <= found.value <= found.high
    assert found.high - found.low < (0.5 if tokens >= 2048 else 1.0) * base_s(tokens)


@given(world=WORLDS, slots=SLOTS, pair=st.tuples(TOKENS, TOKENS).map(sorted))
def test_longer_prompts_take_no_less_time(world: World, slots: int, pair: list[int]) -> None:
    """But for the host's pace, which differs between two lengths that were measured."""
    shorter_s, longer_s = (base_s(tokens) + prompts(world, slots, tokens).value for tokens in pair)
    assert longer_s >= (0.98 if not world.host_scatter else 0.75) * shorter_s


@given(world=WORLDS, slots=SLOTS, tokens=st.integers(513, 4 * STEP_TOKENS - 1))
@example(world=World(), slots=32, tokens=639)
@example(world=World(), slots=32, tokens=2047)
@example(world=World(), slots=32, tokens=4095)
@example(world=World(), slots=32, tokens=8191)
def test_one_token_more_changes_little(world: World, slots: int, tokens: int) -> None:
    """The launches of 513 tokens alone are a step: up to 512 the engine has graphs."""
    one, next_one = (prompts(world, slots, tokens + more) for more in (0, 1))
    assert next_one.value == pytest.approx(one.value, rel=0.01)
    assert next_one.high == pytest.approx(one.high, rel=0.05)
    assert next_one.low == pytest.approx(one.low, abs=0.05 * one.value)


@given(world=WORLDS, slots=SLOTS, tokens=st.integers(64, 2048), base_share=st.floats(0.0, 1.0))
def test_a_share_of_the_base_is_between_none_and_all(
    world: World, slots: int, tokens: int, base_share: float
) -> None:
    none, some, every = (
        prompts(world, slots, tokens, base_share=share, distinct=1.0 - share).value
        for share in (0.0, base_share, 1.0)
    )
    assert min(none, every) - 1e-9 <= some <= max(none, every) + 1e-9


@given(world=WORLDS, slots=SLOTS, tokens=TOKENS, batch=st.integers(1, 8), more=st.integers(1, 8))
def test_more_distinct_variants_take_no_less_time(
    world: World, slots: int, tokens: int, batch: int, more: int
) -> None:
    fewer, further = (prompts(world, slots, tokens, batch, distinct=float(one)) for one in (1, more))
    assert further.value >= fewer.value * (1 - 1e-12)


def test_lengths_that_one_engine_lacks_are_no_lengths() -> None:
    """Two engines are needed to tell the part of slots apart."""
    steps = [one for one in StepMachine(truth=HOSTED).measure().steps if one.is_prompt and one.active == 1]
    lacking = [one for one in steps if (one.num_layers, one.tokens) != (1, 4096)]
    assert set(lengths_alone(steps)) - set(lengths_alone(lacking)) == {4096}
    assert lengths_alone([]) == ()
