"""Forecast of a request's first and last token, from the requests before it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from planner.lateness import Asked, Pace, Under, forecast, wait_s

FOUR = Pace(slots=4, input_tokens=100, output_tokens=10, ttft_s=1.0, ttft_full_s=2.5, tpot_s=0.1, tpot_full_s=0.16)
ONE = Pace(slots=1, input_tokens=100, output_tokens=10, ttft_s=1.1, ttft_full_s=1.1, tpot_s=0.1, tpot_full_s=0.1)

TOKENS = st.floats(1, 500)
ASKED = st.builds(Asked, TOKENS, TOKENS)
UNDER = st.builds(Under, st.floats(0, 500), TOKENS)
TIMES = st.floats(0.001, 10)


@st.composite
def paces(draw: st.DrawFn) -> Pace:
    return Pace(
        slots=draw(st.integers(1, 6)),
        input_tokens=draw(st.integers(1, 300)),
        output_tokens=draw(st.integers(1, 300)),
        ttft_s=draw(TIMES),
        ttft_full_s=draw(TIMES),
        tpot_s=draw(TIMES),
        tpot_full_s=draw(TIMES),
    )


def test_alone_it_takes_what_the_plan_says() -> None:
    told = forecast(FOUR, (), Asked(100, 10))
    assert told == pytest.approx((1.0, 0.1, 1.9))
    assert forecast(ONE, (), Asked(100, 10)) == pytest.approx((1.1, 0.1, 2.0))


def test_a_batch_of_prompts_takes_the_batchs_ttft() -> None:
    """1 s for 100 tokens and 2.5 s for 400: half a second fixed, 5 ms a token."""
    assert FOUR.prompt_token_s == pytest.approx(0.005)
    beside = [Under(100, 10)] * 3
    assert forecast(FOUR, beside, Asked(100, 10)).first_s == pytest.approx(2.5)
    assert forecast(FOUR, (), Asked(20, 10)).first_s == pytest.approx(0.6)


def test_of_a_batch_of_one_the_weights_are_read_for_a_prompt_too() -> None:
    """0.1 s of the 1.1 s, whatever its length."""
    assert ONE.prompt_s(50) == pytest.approx(0.6)


def test_beside_others_a_step_takes_longer_and_lets_their_successors_prompts_through() -> None:
    """The step with two more sequences: 0.1 s, two thirds of the way to 0.16 s, and of their prompts' 0.5 s a
    tenth each.
    """
    assert forecast(FOUR, [Under(0, 5)] * 2, Asked(100, 10)).step_s == pytest.approx(0.1 + 0.04 + 0.1)


def test_who_waits_gets_the_slot_that_ends_first() -> None:
    """On one slot, 5 tokens are left of the running request, then the waiting one takes 1.1 s and nine steps."""
    ends_s, empty_s = wait_s(ONE, [[Under(0, 5)]], [Asked(100, 10)])
    assert (ends_s, empty_s) == pytest.approx((2.5, 2.5))
    assert wait_s(ONE, [[Under(0, 5)], [Under(0, 2)]], [])[0] == pytest.approx(0.2)
    assert wait_s(ONE, [[Under(0, 5)], []], [])[0] == 0.0


@given(paces(), st.lists(UNDER, max_size=8), ASKED, UNDER)
def test_more_beside_it_is_never_sooner(pace: Pace, beside: list[Under], asked: Asked, more: Under) -> None:
    fewer, with_more = forecast(pace, beside, asked), forecast(pace, [*beside, more], asked)
    assert all(a <= b + 1e-9 * (1 + b) for a, b in zip(fewer, with_more, strict=True))


@given(
    paces(), st.lists(st.lists(UNDER, max_size=6), min_size=1, max_size=3), st.lists(ASKED, max_size=8), st.data()
)
def test_more_in_front_is_never_sooner(
    pace: Pace, replicas: list[list[Under]], waiting: list[Asked], data: st.DataObject
) -> None:
    replicas = [running[: pace.slots] for running in replicas]
    before = wait_s(pace, replicas, waiting)
    place = data.draw(st.integers(0, len(waiting)))
    longer = wait_s(pace, replicas, [*waiting[:place], data.draw(ASKED), *waiting[place:]])
    assert all(a <= b + 1e-9 * (1 + b) for a, b in zip(before, longer, strict=True))
    one_more = [[*replicas[0], data.draw(UNDER)][: pace.slots], *replicas[1:]]
    assert before[0] <= wait_s(pace, one_more, waiting)[0] + 1e-9 * (1 + before[0])
    assert wait_s(pace, [*replicas, []], waiting)[0] <= before[0] + 1e-9 * (1 + before[0])


@given(paces(), st.lists(UNDER, max_size=5), ASKED, st.floats(1, 5), st.floats(1, 5))
def test_slower_is_never_sooner(
    pace: Pace, beside: list[Under], asked: Asked, prompts: float, steps: float
) -> None:
    usual, slow = forecast(pace, (), asked), forecast(pace.slowed(prompts, prompts), (), asked)
    assert slow == pytest.approx(tuple(prompts * time_s for time_s in usual))
    assert forecast(pace, beside, asked).step_s <= forecast(pace.slowed(1.0, steps), beside, asked).step_s + 1e-9


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"output_tokens": 0}, {"ttft_s": 0.0}, {"tpot_full_s": float("nan")}]
)
def test_a_pace_that_cannot_be(wrong: dict[str, float]) -> None:
    told = {"slots": 1, "input_tokens": 1, "output_tokens": 1, "ttft_s": 1.0, "ttft_full_s": 1.0, "tpot_s": 1.0}
    with pytest.raises(ConfigError):
        Pace(**(told | {"tpot_full_s": 1.0} | wrong))  # type: ignore[arg-type]
