"""Time of deltas, by the kernels that were timed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.delta import DEFAULT_FORMAT, delta_bytes
from fingerprint.estimators.delta_slots import (
    MEASURED_DELTA_BYTES,
    added_delta_step_s,
    delta_prompt_s,
)
from tests.fingerprint.test_slot_bytes import SPEC

ROWS, DELTAS = st.floats(1, 300), st.floats(0, 64)


def test_the_scale_is_that_of_the_delta_whose_kernels_were_timed() -> None:
    assert delta_bytes(SPEC, DEFAULT_FORMAT) == pytest.approx(MEASURED_DELTA_BYTES, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "deltas", "added_ms"),
    [(32, 1, 2.57), (32, 4, 3.88), (32, 8, 6.78), (32, 32, 24.56), (128, 1, 5.4), (128, 32, 25.5)],
)
def test_what_was_timed_is_met(rows: float, deltas: float, added_ms: float) -> None:
    """Decision 47: any mix, third run."""
    assert added_delta_step_s(MEASURED_DELTA_BYTES, rows, deltas) == pytest.approx(added_ms * 1e-3)


@pytest.mark.parametrize(
    ("tokens", "base_ms", "times"), [(512, 0.30, 1.88), (1024, 0.57, 1.50), (4096, 2.45, 1.15)]
)
def test_prompts_take_what_merging_took(tokens: float, base_ms: float, times: float) -> None:
    merged_s = 32 * base_ms * (times - 1) * 1e-3
    assert delta_prompt_s(MEASURED_DELTA_BYTES, tokens) == pytest.approx(merged_s, rel=0.02)


@given(rows=ROWS, more=ROWS, deltas=DELTAS, further=DELTAS, share=st.floats(0.1, 4))
def test_more_rows_deltas_and_bytes_take_no_less(
    rows: float, more: float, deltas: float, further: float, share: float
) -> None:
    found = added_delta_step_s(MEASURED_DELTA_BYTES, rows, deltas)
    assert 0 <= found <= added_delta_step_s(MEASURED_DELTA_BYTES, rows + more, deltas + further) + 1e-12
    scaled = added_delta_step_s(share * MEASURED_DELTA_BYTES, rows, deltas)
    assert scaled == pytest.approx(share * found)
    assert added_delta_step_s(MEASURED_DELTA_BYTES, rows, 0) == 0.0
