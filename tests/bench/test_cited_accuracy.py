"""Errors on vLLM that pages cite: those of the recordings, as predictions are made today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fingerprint.estimators.calibration import Calibration
from tests.bench.accuracy import RESULTS, load, measured_errors, memory_row, predict_l3
from tests.bench.accuracy_families import FOLDERS, predicted_rows
from tests.bench.accuracy_rows import Row
from tests.bench.accuracy_tables import summary

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
DECISION = (ROOT / "docs/decisions/0025-vllm-releases.md").read_text()
TRUSTED_TIMES = (ROOT / "docs/decisions/0040-trusted-times.md").read_text()
ACCURACY = (ROOT / "docs/accuracy.md").read_text()


def rows_of(folder: str, *, calibrated: bool = True) -> list[Row]:
    recorded = load(RESULTS / folder)
    calibration = Calibration(measured_errors(recorded) if calibrated else ())
    return [row for one in recorded for row in predict_l3(one, calibration)]


def _second_worst_short() -> float:
    """Second worst error of a TPOT of mixtures, batches of up to 1,024 prompt tokens."""
    recorded = [pair for folder in FOLDERS for pair in predicted_rows(folder) if pair[0].profile.spec.num_experts]
    short = [row for _, rows in recorded for row in rows if row.batch * row.input_tokens <= 1024]
    return sorted(abs(row.error) for row in short if row.metric == "tpot")[-2]


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
            "{count} points, intervals from one another's errors: {tpot:.1f} and {ttft:.1f}%, "
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


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            "DeepSeek-V2-Lite",
            "Recorded again with all points of both: TPOT {tpot} median, {worst_tpot} worst; "
            "TTFT {ttft} median, {worst_ttft} worst",
        ),
        ("gpt-oss-20b", "calls with a compilation do not count: {tpot} median, {worst_tpot} worst"),
    ],
)
def test_decision_40_cites_errors_without_a_calibration(model: str, said: str) -> None:
    rows = [row for row in rows_of("families-h200-vllm-0.33", calibrated=False) if row.model == model]
    figures: dict[str, str] = {}
    for _, metric, _, median, worst, _ in summary(rows, lambda _: "all"):
        figures |= {metric: f"{median:.1%}", f"worst_{metric}": f"{worst:.1%}"}
    assert said.format(**figures) in TRUSTED_TIMES


@pytest.mark.slow
def test_what_to_trust_of_mixtures_is_what_the_table_of_prompt_tokens_says() -> None:
    """Medians and worst errors of TPOT and TTFT."""
    text = " ".join(ACCURACY.split())
    cells = re.findall(r"\| mixtures of experts, ([^|]+) \| \d+ ((?:\| [\d.]+% / [\d.]+% ){2})", text)
    errors = {tokens: [float(error) for error in re.findall(r"[\d.]+", both)] for tokens, both in cells}
    short, middle, long = (errors[tokens] for tokens in ("up to 1,024", "1,025 to 16,384", "more"))
    tpot, ttft = (sorted((middle[at], long[at])) for at in (0, 2))
    worst = [max(middle[at], long[at]) for at in (1, 3)]
    assert (
        f"from 1,025 prompt tokens on TPOT is {tpot[0]} to {tpot[1]}% and TTFT {ttft[0]} to {ttft[1]}% off in the "
        f"median, {worst[0]}% and {worst[1]}% at worst; up to 1,024 tokens {short[0]}% and {short[2]}% in the "
        f"median, {short[1]}% ({_second_worst_short():.1%} the next) and {short[3]}% at worst."
    ) in text
