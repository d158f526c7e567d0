"""Errors on vLLM that pages cite and that are shipped: those of the recordings, as predictions are made today.

Predictions of all recordings take 15 s of a core, and are kept in the process: what needs them is in this file.
"""

from __future__ import annotations

import importlib.util
import re
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.estimators.calibration import Calibration, shipped_calibration
from tests.bench.accuracy import RESULTS, load, measured_errors, memory_row, predict_l3
from tests.bench.accuracy_families import (
    ALL_RULES,
    FOLDERS,
    LAST_RULE,
    NEWEST,
    _degrees,
    calibration_without,
    family_of,
    family_rows,
    held_out_row,
    predicted_rows,
    recordings_of,
)
from tests.bench.accuracy_rows import Row
from tests.bench.accuracy_tables import summary
from tests.bench.format_table import FOLDER as FORMATS
from tests.bench.format_table import format_rows

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
    rows = [row for row in rows_of("graphs-512-h200-vllm-0.33", calibrated=False) if row.model == model]
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


def _figures(rows: Sequence[Row]) -> dict[str, float]:
    """Return medians and worst errors of TPOT and TTFT, and the shares inside, in percent."""
    named = ("", "worst_", "inside_")
    found = summary(rows, lambda _: "all")
    return {f"{name}{row[1]}": 100 * value for row in found for name, value in zip(named, row[3:], strict=True)}


def _numbers(text: str, after: str, before: str) -> list[str]:
    """Return the numbers of a text between two of its phrases."""
    _, found, rest = " ".join(text.split()).partition(after)
    assert found, after
    return re.findall(r"\d+(?:\.\d+)?", rest.partition(before)[0])


def _rounded(figures: dict[str, float], digits: int) -> list[str]:
    """Return the figures as README.md has them: medians to a tenth, the rest to ``digits``."""
    medians = [f"{figures[name]:.1f}" for name in ("tpot", "ttft")]
    worst = [f"{figures[name]:.{digits}f}" for name in ("worst_tpot", "worst_ttft")]
    return [*medians, *worst, *(f"{figures[name]:.0f}" for name in ("inside_tpot", "inside_ttft"))]


@pytest.mark.slow
def test_readme_cites_all_of_033_and_what_was_recorded_after_the_last_rule() -> None:
    predicted = [pair for folder in NEWEST for pair in predicted_rows(folder)]
    later = [pair for pair in predicted if pair[0].measured_at >= LAST_RULE]
    everything, held_out = ([row for _, rows in of for row in rows] for of in (predicted, later))
    assert _numbers(README, "All of 0.33, ", "points") == [str(len(everything) // 2)]
    assert _numbers(README, "corrected by other families: ", "Of its") == _rounded(_figures(everything), 0)
    assert _numbers(README, "Of its ", " rows") == [str(len(predicted))]
    assert len(later) == 11
    assert _numbers(README, "decisions 57 to 59: ", "(") == _rounded(_figures(held_out), 0)
    tpot, ttft, *others = _rounded(_figures(held_out), 1)
    short_ms = f"{1e3 * held_out_row().short_ttft_s:.1f}"
    assert _numbers(ACCURACY, "Together, ", "The next family") == [
        str(len(held_out) // 2),
        *(tpot, others[0], ttft, others[1]),
        short_ms,
        *others[2:],
    ]


@pytest.mark.slow
def test_families_recorded_after_the_last_rule() -> None:
    recorded = [one for folder in NEWEST for one, _ in predicted_rows(folder)]
    dates = {(one.model, one.tp, one.pp, one.profile.machine.device.name): one.measured_at for one in recorded}
    after_all = {
        ("Qwen3-30B-A3B", 1, 1, "h200-sxm"),
        ("Qwen3-30B-A3B", 2, 1, "h200-sxm"),
        ("Llama-3.1-8B", 2, 1, "h200-sxm"),
        ("gemma-2-9b", 1, 2, "h200-sxm"),
        ("OLMoE-1B-7B-0924", 1, 1, "h200-sxm"),
        ("DeepSeek-V2-Lite", 1, 1, "h200-sxm"),
        ("gpt-oss-20b", 1, 1, "h200-sxm"),
    }
    assert {what for what, date in dates.items() if date >= ALL_RULES} == after_all
    assert {what[0] for what, date in dates.items() if LAST_RULE <= date < ALL_RULES} == {
        "Mixtral-8x7B-v0.1",
        "OLMo-2-1124-7B",
        "gemma-3-27b-it",
    }
    before = {what: date for what, date in dates.items() if date < ALL_RULES}
    assert max(before, key=lambda what: before[what])[0] == "gemma-3-27b-it"


@pytest.mark.slow
def test_formats_are_judged_without_their_family_and_cited_with_it() -> None:
    recorded = load(FORMATS)
    without = _figures([row for one in format_rows(recorded) for row in one.rows])
    shipped = _figures([row for one in recorded for row in predict_l3(one, shipped_calibration())])
    assert _numbers(ACCURACY, "intervals then hold ", "With") == [
        f"{without['inside_tpot']:.0f}",
        f"{without['inside_ttft']:.0f}",
    ]
    assert _numbers(ACCURACY, "narrower and hold ", "(") == [
        f"{shipped['inside_tpot']:.0f}",
        f"{shipped['inside_ttft']:.0f}",
    ]


@pytest.mark.slow
def test_what_to_trust_is_what_the_rows_say() -> None:
    """Lines 1 to 4, rounded."""
    rows = [row for row in family_rows() if row.family != "all"]
    dense = [
        (one.pp > 1, own) for f in FOLDERS for one, own in predicted_rows(f) if not one.profile.spec.num_experts
    ]

    def errors(of: Iterable[Row], metric: str, least: int = 0, most: int = 10**9) -> list[float]:
        these = (row for row in of if row.metric == metric and least <= row.batch * row.input_tokens <= most)
        return [100 * abs(row.error) for row in these]

    assert max(row.weights for row in rows) < 0.002
    assert max(row.blocks for row in rows) < 0.005
    assert _numbers(ACCURACY, "Weights ", ", in every") == [
        f"{100 * max(getattr(row, part) for row in rows):.1f}" for part in ("weights", "blocks", "non_kv")
    ]
    tpot = [(staged, errors(own, "tpot")) for staged, own in dense]
    alone, pipelines = ([of for staged, of in tpot if staged == wanted] for wanted in (False, True))
    medians = [statistics.median(of) for of in alone]
    assert _numbers(ACCURACY, "**TPOT of a dense model**: ", "3. **") == [
        f"{min(medians):.1f}",
        f"{max(medians):.1f}",
        f"{max(max(of) for of in alone):.0f}",
        f"{max(statistics.median(of) for of in pipelines):.0f}",
        f"{max(max(of) for of in pipelines):.0f}",
    ]
    ttft = [(staged, errors(own, "ttft", least=1025)) for staged, own in dense]
    assert _numbers(ACCURACY, "1,025 prompt tokens**: ", "4. **")[2:] == [
        f"{max(error for staged, of in ttft if staged == wanted for error in of):.0f}" for wanted in (False, True)
    ]
    short = [error for _, own in dense for error in errors(own, "ttft", most=1024)]
    assert _numbers(ACCURACY, "**TTFT of a short prompt**: ", "It waits") == [
        f"{statistics.median(short):.0f}",
        f"{max(short):.0f}",
    ]


@pytest.mark.slow
def test_a_calibration_without_a_family_knows_every_other_model_and_none_of_it() -> None:
    """Leave one family out: what is fitted on a family never judges it."""
    recorded = [one for folder in FOLDERS for one in recordings_of(folder)]
    shapes = {family: set[str]() for family in sorted(map(family_of, recorded))}
    for one in recorded:
        shapes[family_of(one)].add(one.profile.spec.shape_hash)
    assert len(shapes) > 5
    for family in shapes:
        left = {error.shape_hash for error in calibration_without(family).errors}
        assert left == set().union(*(of for name, of in shapes.items() if name != family)), family


@pytest.mark.slow
def test_every_recording_is_in_a_row_of_its_family_and_in_that_of_its_release() -> None:
    rows = family_rows()
    for folder in FOLDERS:
        named = {" ".join((one.model, *_degrees(one))) for one in recordings_of(folder)}
        assert any(set(row.models) == named and row.family == "all" for row in rows)
        assert all(any(m in row.models and row.family != "all" for row in rows) for m in named)
    totals = sum(row.points for row in rows if row.family == "all")
    assert totals == sum(row.points for row in rows if row.family != "all")


@pytest.mark.slow
def test_what_is_shipped_is_what_the_recordings_say_each_under_the_shape_it_has_today() -> None:
    """A hash of yesterday's shape would leave no model's own errors out of its own prediction."""
    recorded = [error for folder in FOLDERS for error in measured_errors(recordings_of(folder))]
    shipped = shipped_calibration().errors
    assert [replace(e, log_error=0.0) for e in shipped] == [replace(e, log_error=0.0) for e in recorded]
    assert [e.log_error for e in shipped] == pytest.approx([e.log_error for e in recorded], abs=2e-4)


@pytest.mark.slow
def test_tables_of_recorded_results_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.stale(module.RESULTS) == []
