"""Contexts of the cases of served_steps have the tokens of their like; the table names each case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json
from fingerprint.estimators.steady_state import LONGEST_SHARE
from tests.bench.accuracy import RESULTS
from tests.bench.served_steps import (
    DECODE_STEPS,
    MAX_CONTEXT,
    ServedStep,
    ServedSteps,
    contexts_of,
    share_of_longest,
    summary,
    table,
)


@given(batch=st.integers(8, 64), mean=st.integers(256, 1100))
@pytest.mark.parametrize("kind", ["equal", "spread", "one long"])
def test_a_batch_has_the_same_tokens_in_all_and_the_engine_holds_it(kind: str, batch: int, mean: int) -> None:
    contexts = contexts_of(kind, batch, mean)
    assert len(contexts) == batch
    assert sum(contexts) == batch * mean
    assert min(contexts) >= 1
    assert max(contexts) + DECODE_STEPS < MAX_CONTEXT
    assert (kind == "equal") == (min(contexts) == max(contexts))


def test_a_row_is_over_the_like_of_it() -> None:
    step = ServedStep(
        part="decode", case="spread", batch=8, tokens=512, cached_tokens=0, seconds=(0.011, 0.012), plain_s=0.010
    )
    text = table(ServedSteps(model="m", date="2026-11-29", machine="x", versions="y", steps=(step,)))
    cells = [cell.strip() for cell in text.splitlines()[-1].split("|")[1:-1]]
    assert cells[:5] == ["decode", "spread", "8", "512", "0"]
    assert cells[5:] == ["11.00 / 12.00 ms", "10.00 ms, +10% / +20%"]


def test_a_summary_has_a_column_for_each_model_and_no_arrivals() -> None:
    def step(part: str, case: str, seconds: tuple[float, ...]) -> ServedStep:
        return ServedStep(
            part=part, case=case, batch=9, tokens=512, cached_tokens=0, seconds=seconds, plain_s=0.010
        )

    padded, arrival = step("padded", "graph of 16", (0.012, 0.010)), step("arrival", "among decoders", (0.03,) * 3)
    spread = step("decode", "spread", (0.0125,))
    one, other = (
        ServedSteps(model=name, date="2026-11-29", machine="x", versions="y", steps=steps)
        for name, steps in (("a", (padded, arrival)), ("b", (padded, spread)))
    )
    assert summary([replace(one, graph_tokens=4096)]).startswith("| | a, graphs to 4,096 |")
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in summary([one, other]).splitlines()
    )
    assert head[1:] == ["a", "b"]
    assert [row[1:] for row in rows] == [["11.00 ms +10%"] * 2, ["-", "12.50 ms +25%"]]


KEPT = [from_json(file.read_bytes(), ServedSteps) for file in (RESULTS / "served_steps_h200").glob("*.json")]


def test_the_share_of_the_longest_context_is_that_of_the_recorded_steps() -> None:
    """Without each of the three models as well, within a fifth."""
    assert round(share_of_longest(KEPT), 2) == LONGEST_SHARE
    models = {one.model for one in KEPT}
    assert len(models) == 3
    for model in models:
        rest = share_of_longest([one for one in KEPT if one.model != model])
        assert rest == pytest.approx(LONGEST_SHARE, rel=0.2)
