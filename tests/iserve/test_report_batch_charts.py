"""Charts over the batch: every mark inside its drawing, labels apart, values where they belong."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.estimates import Quantity, Source
from iserve.report.charts import STEP_PARTS, BatchCurve, batch_chart, step_bar
from iserve.report.full_model import DecodeStep

WIDTH, HEIGHT = 340.0, 280.0
COLORS = ("s-0", "s-1", "s-2", "s-3", "s-4", "s-5")


def curve(index: int, batches: list[int], values: list[float], truth: float | None = None) -> BatchCurve:
    estimated = tuple(
        (batch, Quantity(value, 0.8 * value, 1.3 * value, Source.EXTRAPOLATED))
        for batch, value in zip(sorted(batches), sorted(values), strict=True)
    )
    truths = () if truth is None else ((estimated[0][0], truth),)
    return BatchCurve(
        input_tokens=128 * 2**index,
        color=COLORS[index],
        estimated=estimated,
        ran=tuple(batch for batch, _ in estimated),
        truths=truths,
    )


def drawn(curves: list[BatchCurve], *, logarithmic: bool) -> ElementTree.Element:
    chart = batch_chart(curves, name="a chart", logarithmic=logarithmic, width=WIDTH, height=HEIGHT)
    return ElementTree.fromstring(chart)


@st.composite
def some_curves(draw: st.DrawFn) -> list[BatchCurve]:
    found = []
    for index in range(draw(st.integers(1, 6))):
        batches = draw(st.lists(st.integers(1, 512), min_size=1, max_size=6, unique=True))
        size = len(batches)
        values = draw(st.lists(st.floats(1e-5, 1e3), min_size=size, max_size=size))
        truth = draw(st.none() | st.floats(1e-5, 1e3))
        found.append(curve(index, batches, values, truth))
    return found


@given(curves=some_curves(), logarithmic=st.booleans())
def test_every_mark_is_inside_the_drawing(curves: list[BatchCurve], logarithmic: bool) -> None:
    chart = drawn(curves, logarithmic=logarithmic)
    for mark in chart.iter():
        for name in ("x", "x1", "x2", "cx"):
            assert 0 <= float(mark.get(name, 0)) <= WIDTH
        for name in ("y", "y1", "y2", "cy"):
            assert 0 <= float(mark.get(name, 0)) <= HEIGHT
        for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", mark.get("points", "")):
            assert 0 <= float(x) <= WIDTH
            assert 0 <= float(y) <= HEIGHT
    labels = [mark for mark in chart.iter("text") if "end-label" in mark.get("class", "")]
    assert len(labels) == len(curves)
    for one, other in combinations(labels, 2):
        beside = abs(float(one.get("x", 0)) - float(other.get("x", 0))) < 44
        assert not beside or abs(float(one.get("y", 0)) - float(other.get("y", 0))) > 10.5
    assert len(list(chart.iter("circle"))) == sum(len(c.ran) for c in curves)
    assert len([m for m in chart.iter("polygon") if "truth" in m.get("class", "")]) == sum(
        len(c.truths) for c in curves
    )


def test_larger_times_are_higher_and_larger_batches_further_right() -> None:
    for logarithmic in (False, True):
        marks = list(drawn([curve(0, [1, 8, 32], [0.01, 0.02, 0.5])], logarithmic=logarithmic).iter("circle"))
        across = [float(mark.get("cx", 0)) for mark in marks]
        up = [float(mark.get("cy", 0)) for mark in marks]
        assert across == sorted(across)
        assert up == sorted(up, reverse=True)
        assert across[1] - across[0] == pytest.approx(1.5 * (across[2] - across[1]), rel=0.01)  # 3 octaves and 2


def test_only_batches_that_were_run_have_dots_and_ticks() -> None:
    whole = curve(0, [1, 2, 4, 8], [0.01, 0.02, 0.03, 0.04])
    some = BatchCurve(input_tokens=128, color="s-0", estimated=whole.estimated, ran=(1, 8))
    chart = drawn([some], logarithmic=False)
    assert len(list(chart.iter("circle"))) == 2
    texts = [mark.text for mark in chart.iter("text")]
    assert "1" in texts
    assert "8" in texts
    assert "4" not in texts
    assert "0" in texts  # a linear axis begins at nothing
    assert any("batch 8, 128 in: 40.0 ms" in "".join(mark.itertext()) for mark in chart.iter("circle"))


def test_a_steps_bar_is_as_long_as_the_step() -> None:
    step = DecodeStep(gap_s=1e-4, lead_s=2e-4, forward_s=4e-3, tail_s=7e-4, repeats_s=1e-3, num_steps=8)
    bar = ElementTree.fromstring(step_bar(step, 10e-3, "batch 1"))
    parts = list(bar.iter("rect"))
    widths = [float(part.get("width", 0)) for part in parts]
    assert widths == pytest.approx([10, 20, 300, 100, 70])
    assert [part.get("class") for part in parts] == [f"p-{name}" for name, _, _ in STEP_PARTS]
    ends = [float(part.get("x", 0)) + width for part, width in zip(parts, widths, strict=True)]
    assert ends == pytest.approx([10, 30, 330, 430, 500])
