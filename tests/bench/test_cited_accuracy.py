"""Errors on vLLM that README and decision 25 cite: those of the recordings, as predictions are made today."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.estimators.calibration import Calibration
from tests.bench.accuracy import RESULTS, load, measured_errors, memory_row, predict_l3
from tests.bench.accuracy_rows import Row
from tests.bench.accuracy_tables import summary

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
DECISION = (ROOT / "docs/decisions/0025-vllm-releases.md").read_text()


def rows_of(folder: str) -> list[Row]:
    recorded = load(RESULTS / folder)
    calibration = Calibration(measured_errors(recorded))
    return [row for one in recorded for row in predict_l3(one, calibration)]


@pytest.mark.parametrize(
    ("folder", "said"), [("h200-vllm-0.33", "{}"), ("h200-vllm-0.26", "{} on 0.26.0 (`h200-vllm-0.26`)")]
)
def test_each_model_of_the_decision(folder: str, said: str) -> None:
    memory = map(memory_row, load(RESULTS / folder))
    blocks = {one.model: one.blocks_predicted / one.blocks - 1 for one in memory}
    found = summary(rows_of(folder), lambda row: row.model)
    for model, more in blocks.items():
        cells = [
            f"{median:.1%} / {worst:.1%} | {inside:.0%}" for of, *_, median, worst, inside in found if of == model
        ]
        name = f"{model} (mixture)" if folder.endswith("33") and "A3B" in model else said.format(model)
        assert f"| {name} | {cells[0]} | {cells[1]} | {more:+.2%} |" in DECISION


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (
            "h200-vllm-0.33",
            "{count} points, no calibration of that release yet: {tpot:.1f} and {ttft:.1f}%, "
            "worst {worst_tpot:.0f} and {worst_ttft:.0f}%; "
            "inside the 90% intervals {inside_tpot:.0f} and {inside_ttft:.0f}%",
        ),
        ("h200", "within {tpot:.1f} and {ttft:.1f}% (medians of {count} points"),
    ],
)
def test_all_of_them_in_the_readme(folder: str, said: str) -> None:
    tpot, ttft = summary(rows_of(folder), lambda _: "all")
    figures = {
        name: 100 * value
        for row in (tpot, ttft)
        for name, value in zip((row[1], f"worst_{row[1]}", f"inside_{row[1]}"), row[3:], strict=True)
    }
    assert said.format(count=tpot[2], **figures) in README
