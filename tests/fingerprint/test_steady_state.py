"""Time that an engine which prepares steps ahead hides, from readings made by hand."""

from __future__ import annotations

import pytest

from fingerprint.config import KvFormat, WeightFormat
from fingerprint.estimators.steady_state import LONGEST_SHARE, hidden_time_s, longest_share
from fingerprint.measurements import RunReading, StepReading, TimingPoint


def step(prefill: int, *, around_s: float, forward_s: float = 0.02) -> StepReading:
    return StepReading(
        tokens=max(1, prefill),
        sequences=1,
        prefill_tokens=prefill,
        context_tokens=0,
        attention_pairs=0,
        gap_s=around_s / 2,
        lead_s=around_s / 4,
        forward_s=forward_s,
        tail_s=around_s / 4,
    )


def point(output_tokens: int, *runs: tuple[float, tuple[StepReading, ...]]) -> TimingPoint:
    """Runs as (host time, steps)."""
    return TimingPoint(
        num_layers=2,
        tp=1,
        pp=1,
        weights=WeightFormat.BITS16,
        kv=KvFormat.BITS16,
        batch=1,
        input_tokens=512,
        output_tokens=output_tokens,
        runs=tuple(
            RunReading(e2e_s=host_s + 0.02, device_s=0.02, host_s=host_s, steps=steps) for host_s, steps in runs
        ),
    )


LONE = tuple((host_s, (step(512, around_s=0.004),)) for host_s in (0.005, 0.006, 0.050))
ROW = (0.02, (step(512, around_s=0.004), *[step(0, around_s=0.0004)] * 3))


def test_is_the_lone_steps_host_time_less_what_is_around_a_step_in_a_row() -> None:
    assert hidden_time_s([point(1, *LONE), point(33, ROW)]) == pytest.approx(0.006 - 0.0004)


def test_bursts_of_several_steps_tell_nothing_of_a_lone_one() -> None:
    several = (0.5, (step(8192, around_s=0.004), step(512, around_s=0.1)))
    points = [point(1, *LONE), point(1, several), point(33, ROW)]
    assert hidden_time_s(points) == pytest.approx(0.0056)


def test_nothing_is_hidden_where_no_run_tells() -> None:
    assert hidden_time_s([]) == hidden_time_s([point(1, *LONE)]) == hidden_time_s([point(33, ROW)]) == 0.0
    assert hidden_time_s([point(1, (0.0001, LONE[0][1])), point(33, ROW)]) == 0.0


@pytest.mark.parametrize(
    ("engine", "has_it"),
    [
        ("vllm 0.33.0", True),
        ("vllm 0.34.1", True),
        ("vllm 0.26.0", False),
        ("vllm 0.33.0rc1", True),
        ("torch 2.13.0", False),
        ("vllm", False),
        ("vllm of today", False),
    ],
)
def test_long_contexts_count_where_steps_with_them_were_measured(engine: str, has_it: bool) -> None:
    assert longest_share(engine) == (LONGEST_SHARE if has_it else 0.0)
