"""Table of formats, from what was recorded of two formats of one model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from tests.bench.accuracy import RESULTS, load, memory_row, truths
from tests.bench.accuracy_measure import Recorded
from tests.bench.format_table import choices, format_rows, markdown

pytestmark = pytest.mark.slow


@cache
def recorded() -> tuple[Recorded, ...]:
    """Llama-3.1-8B in 16 bits and online fp8, of vLLM 0.24, each named as a run of formats would name it."""
    found = [one for one in load(RESULTS / "h200") if one.model == "Llama-3.1-8B" and one.tp == one.pp == 1]
    return tuple(replace(one, model=f"{one.model}-{one.weights}") for one in found)


def test_each_format_is_a_row_of_its_whole_model() -> None:
    rows = {row.name: row for row in format_rows(recorded())}
    assert set(rows) == {"16bit", "fp8"}
    for one in recorded():
        row = rows[str(one.weights)]
        assert row.memory == memory_row(one)
        assert len(row.rows) == 2 * len(truths(one))
        assert row.counted_bytes == pytest.approx(row.memory.weights_bytes, rel=0.01)
        median, worst = row.errors("tpot")
        assert 0 <= median <= worst < 0.1


def test_a_choice_is_no_faster_than_the_fastest() -> None:
    found = choices(recorded())
    assert {(one.batch, one.input_tokens) for one in found} == {
        (t.batch, t.input_tokens) for t in truths(recorded()[0])
    }
    for one in found:
        assert one.fastest == min(one.measured_s, key=lambda name: one.measured_s[name])
        assert one.loss(one.fastest) == 0
        assert min(one.loss(one.by_datasheets), one.loss(one.by_fingerprints)) >= 0
    assert {one.fastest for one in found} == {"fp8"}


def test_the_page_has_both_tables() -> None:
    other = [replace(one, model=one.model.replace("Llama-3.1-8B", "Other-8B")) for one in recorded()]
    text = markdown([*recorded(), *other])
    assert "| Llama-3.1-8B fp8 |" in text
    assert [line for line in text.splitlines() if line.startswith("**")] == ["**Llama-3.1-8B**", "**Other-8B**"]
    assert "| batch x prompt | 16bit | fp8 | fastest |" in text
    assert "Chosen by fingerprints: within 1% of the fastest at" in text
