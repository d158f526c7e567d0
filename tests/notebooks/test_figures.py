"""The figures' code: laws that hold whatever the numbers, and what is committed of them."""

from __future__ import annotations

import csv
import gzip
import json
import os
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.estimators.roofline import CALIBRATED, RooflineEstimator
from fingerprint.families import read_spec
from notebooks.figures.charts import svg
from notebooks.figures.effects import figure_3, figure_4, figure_5, point
from notebooks.figures.figure import Chart, Figure, Finding, Table, shown
from notebooks.figures.pairs import ALL_REDUCE_4_S, hop_of, turning_hop_s
from notebooks.figures.record import FIGURES, NOTEBOOKS, RESULTS, main, read
from notebooks.figures.setting import (
    DEGREES,
    GPU,
    MODELS,
    NUM_GPUS,
    PAPER_ENGINE,
    WORKLOAD,
    config_of,
    spec_of,
)
from planner.space import configuration_space
from tests.golden_words import Golden

REFERENCE = os.environ.get("ISERVE_REFERENCE_DATA")
with_reference = pytest.mark.skipif(not REFERENCE, reason="ISERVE_REFERENCE_DATA does not name the reference data")
SLOW = {
    "16",
    "16-load",
    "11",
    "12",
    "13",
    "14",
    "20",
    "h200",
}  # simulations; test_fleet and test_committed_cells recompute a part


@with_reference
@pytest.mark.parametrize("model", MODELS)
def test_shapes_are_the_published_ones(model: str) -> None:
    published = json.loads((Path(REFERENCE or "") / "reference/model-configs.json").read_text())
    (name,) = (name for name in published if name.rpartition("/")[2] == model)
    assert spec_of(model) == read_spec(published[name])


@with_reference
@pytest.mark.parametrize("node", ALL_REDUCE_4_S)
def test_all_reduces_over_pairs_are_the_published_ones(node: str) -> None:
    with gzip.open(Path(REFERENCE or "") / "reference/vidur/all_reduce_median.csv.gz", "rt") as lines:
        found = [
            float(row["median_ms"]) / 1e3
            for row in csv.DictReader(lines)
            if row["network_device"] == f"{node.split()[0].lower()}_pairwise_nvlink"
            and (row["num_workers"], row["size"]) == ("4", "10240")
        ]
    assert found == [pytest.approx(ALL_REDUCE_4_S[node])]


def test_the_paper_counts_180_configurations_of_its_largest_model() -> None:
    space = configuration_space(spec_of("Llama-2-70b-hf"), GPU, NUM_GPUS, lambda config: PAPER_ENGINE.engine)
    able = [c for c in space if PAPER_ENGINE.refusal(spec_of("Llama-2-70b-hf"), c, GPU) is None]
    assert len(able) == 180


@pytest.mark.parametrize("model", MODELS)
def test_a_points_metrics_are_of_one_estimate(model: str) -> None:
    p = point(model, config_of(1, 4))
    assert p.gpu_s == pytest.approx(4 * p.latency_s)
    assert p.cost_gib_s == pytest.approx(p.total_gib * p.latency_s)
    assert p.total_gib / 4 <= p.gpu_gib <= p.total_gib


def test_where_tp_4_and_8_take_as_long_they_do() -> None:
    constants = replace(CALIBRATED, all_reduce_hop_s=turning_hop_s("Llama-2-7b-hf"))
    estimator = RooflineEstimator(spec_of("Llama-2-7b-hf"), GPU, constants=constants)
    four, eight = (estimator.estimate(config_of(tp), WORKLOAD).e2e_s.value for tp in (4, 8))
    assert four == pytest.approx(eight, rel=1e-3)


def test_a_hop_makes_four_gpus_take_what_was_measured() -> None:
    assert CALIBRATED.all_reduce_latency_s + 2 * hop_of(59e-6) == pytest.approx(59e-6)


@pytest.mark.parametrize("make", [figure_3, figure_4, figure_5])
def test_no_model_or_degree_is_left_out(make: object) -> None:
    figure = make()  # type: ignore[operator]
    named = {str(row[0]).split()[0] for table in figure.tables for row in table.rows}
    if figure.number == "3":
        assert named >= {f"({tp},{pp})" for tp, pp in DEGREES}
    if figure.number == "4":
        assert named == set(MODELS)


def test_a_figure_is_shown_with_what_is_not_known_said() -> None:
    table = Table("what", ("name", "value"), (("a", 1.23456), ("b", None)))
    figure = Figure(
        number="0", title="T", source="S", tables=(table,), findings=(Finding("x", "not given", "1 s"),)
    )
    assert shown(figure).splitlines() == [
        "Figure 0. T",
        "ours: S",
        "",
        "what",
        "name  value",
        "a     1.235",
        "b         -",
        "",
        f"{'':38}  {'the paper':40}  ours",
        f"{'x':38}  {'not given':40}  1 s",
    ]


@pytest.mark.parametrize("values", [(1.0, 2.0), (0.001, 500.0), (0.0, 0.0), (None, 3.0)])
def test_charts_draw_a_bar_for_every_known_value(values: tuple[float | None, ...]) -> None:
    chart = Chart("c", "s", ("a <b>", "b"), (("one", values),))
    figure = Figure(number="0", title="T & U", source="S", tables=(), findings=(), charts=(chart, chart))
    bars = [
        rect
        for rect in ET.fromstring(svg(figure)).iter("{http://www.w3.org/2000/svg}rect")
        if rect.find("{http://www.w3.org/2000/svg}title") is not None
    ]
    assert len(bars) == 2 * sum(value is not None for value in values)
    assert all(float(bar.attrib["height"]) >= 0 for bar in bars)


@pytest.mark.parametrize("number", FIGURES)
def test_every_figure_is_committed_with_date_and_machine(number: str) -> None:
    record = read(number)
    assert record.created_at.startswith("20")
    assert record.machine
    assert record.figure.number == number
    assert all(finding.paper and finding.ours for finding in record.figure.findings)
    assert (RESULTS / f"figure_{number}.svg").read_text() == svg(record.figure)


@pytest.mark.parametrize("number", [number for number in FIGURES if number not in SLOW])
def test_what_is_committed_is_what_comes_out(number: str) -> None:
    assert shown(read(number).figure) == shown(FIGURES[number]()), "run `make evaluation`"


def test_every_figure_is_in_a_notebook() -> None:
    cells = [
        "".join(cell["source"])
        for path in NOTEBOOKS.glob("evaluation_*.ipynb")
        for cell in json.loads(path.read_text())["cells"]
    ]
    for number in FIGURES:
        assert any(f"](results/figure_{number}.svg)" in cell for cell in cells), number


def test_beside_every_figure_is_why_ours_is_not_the_papers() -> None:
    for path in NOTEBOOKS.glob("evaluation_*.ipynb"):
        text = "".join(
            "".join(cell["source"]) + "\n"
            for cell in json.loads(path.read_text())["cells"]
            if cell["cell_type"] == "markdown"
        )
        for beside in text.split("](results/figure_")[1:]:
            assert "**Why they differ**" in beside or "**No number of the paper's**" in beside, beside[:20]


def test_an_unknown_figure_is_said_to_be(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr("sys.argv", ["record", "99"])
    with pytest.raises(SystemExit):
        main()
    golden("reports", capsys.readouterr().err.splitlines()[-1])
