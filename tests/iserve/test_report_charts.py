"""Axes, the Pareto front, markup and numbers of the report, by hand and as laws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError
from markupsafe import Markup

from fingerprint.estimates import StageMemory
from fingerprint.sanitize import printable
from iserve.report.charts import ParetoPoint, memory_bar, pareto_chart, pareto_front
from iserve.report.page_frame import environment, render
from iserve.report.svg import element, linear, linear_ticks, log_ticks, spread
from iserve.report.text import gib, number, seconds, tick_label

POSITIVE = st.floats(1e-6, 1e6)


def test_ticks_are_round_and_inside() -> None:
    assert linear_ticks(0.0, 11.0, 5) == [0.0, 5.0, 10.0]
    assert linear_ticks(0.0, 0.9, 4) == [0.0, 0.5]
    assert log_ticks(0.9, 120.0, 9) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1e-3, 1e6, 5) == [1e-3, 1e-1, 10, 1e3, 1e5]


@given(POSITIVE, POSITIVE)
def test_scales_keep_order_and_stay_inside(one: float, other: float) -> None:
    scale = spread([one, other], 10, 200)
    assert 10 <= scale(one) <= 200
    if one < other * (1 - 1e-9):
        assert scale(one) < scale(other)
    assert all(scale.low <= tick <= scale.high * (1 + 1e-9) for tick in scale.ticks())


def test_what_lies_outside_a_scale_is_drawn_at_its_edge() -> None:
    scale = linear(0, 10, 100, 0)
    assert (scale(5), scale(-3), scale(40)) == (50, 100, 0)


def test_front_by_hand() -> None:
    #          cheapest   dominated   tie with 0  fastest    dearer, as fast
    values = [(1.0, 9.0), (2.0, 9.5), (1.0, 9.0), (3.0, 4.0), (4.0, 4.0)]
    assert pareto_front(values) == [0, 3]
    assert pareto_front([]) == []


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30))
def test_front_is_what_nothing_dominates(values: list[tuple[float, float]]) -> None:
    def dominated(a: tuple[float, float]) -> bool:
        return any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in values)

    assert {values[i] for i in pareto_front(values)} == {value for value in values if not dominated(value)}


@given(st.lists(st.tuples(POSITIVE, POSITIVE, st.booleans()), min_size=1, max_size=12))
def test_a_pareto_chart_has_one_named_mark_per_point(rows: list[tuple[float, float, bool]]) -> None:
    points = [ParetoPoint(c, e, e / 2, e * 2, "16bit", f, f"point {i} <&>") for i, (c, e, f) in enumerate(rows)]
    drawn = ElementTree.fromstring(pareto_chart(points, cost_unit="GiB*s", width=340, height=360))
    titles = [title.text for title in drawn.iter("title")]
    assert sorted(t for t in titles if t and t.startswith("point")) == sorted(p.title for p in points)
    assert len(list(drawn.iter("path"))) == sum(not p.feasible for p in points)


def test_a_memory_bar_is_as_long_as_its_bytes() -> None:
    stage = StageMemory(weights_bytes=300, kv_bytes=100, activation_bytes=0, pp_buffer_bytes=50, runtime_bytes=50)
    rects = list(ElementTree.fromstring(memory_bar(stage, 1000, "x")).iter("rect"))
    assert [float(r.attrib["width"]) for r in rects] == [300, 100, 50, 50]
    assert [float(r.attrib["x"]) for r in rects] == [0, 300, 400, 450]
    counted = list(ElementTree.fromstring(memory_bar(stage, 1000, "x", with_runtime=False)).iter("rect"))
    assert [r.attrib["class"] for r in counted] == ["m-weights", "m-kv", "m-pp_buffer"]


def paragraph(text: str) -> str:
    return environment().from_string('<p title="{{ text }}">{{ text }}</p>').render(text=text)


@given(st.text())
def test_text_never_becomes_markup(text: str) -> None:
    clean = "".join(c if c in "\t\n\r" or c >= " " else "\ufffd" for c in text).replace("\ufffe", "\ufffd")
    expected = clean.replace("\uffff", "\ufffd").replace("\r\n", "\n").replace("\r", "\n")
    for made in (element("p", text, title=text), paragraph(text)):
        found = ElementTree.fromstring(made)
        assert (found.text or "") == printable(expected)
        assert len(found) == 0


def test_markup_stays_and_none_is_nothing() -> None:
    assert element("g", "a<b", Markup("<br/>")) == "<g>a&lt;b<br/></g>"
    assert element("rect", class_="n", aria_label="&", x=2.50) == '<rect class="n" aria-label="&amp;" x="2.5"/>'
    shown = environment().from_string("{{ text }}{{ drawn }}{{ nothing }}")
    assert shown.render(text="a<b", drawn=Markup("<br/>"), nothing=None) == "a&lt;b<br/>"


def test_a_template_cannot_show_what_it_was_not_given() -> None:
    with pytest.raises(UndefinedError):
        render(environment().from_string("{{ report.model }}{{ misspelt }}"), report=None)


def test_line_breaks_of_a_template_are_not_the_pages_those_of_a_value_are() -> None:
    template = environment().from_string("<p>\n  <b>{{ value }}</b>\n</p>")
    assert render(template, value=">\n<") == "<!DOCTYPE html>\n<p><b>&gt;\n&lt;</b></p>\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.00342, "3.42 ms"), (2.5, "2.50 s"), (0.1234, "123 ms"), (45e-6, "45.0 µs"), (-0.000408, "-408 µs")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


def test_numbers() -> None:
    assert [number(v) for v in (0, 0.27, 12.34, 1234.5, 2.5e7)] == ["0", "0.27", "12.3", "1,234", "2.5e+07"]
    assert [gib(v) for v in (0, 512, 3 << 20, 9 << 30)] == ["0", "0.5 KiB", "3.00 MiB", "9.00 GiB"]
    assert [tick_label(v) for v in (0.0, 0.30000000000000004, 2000)] == ["0", "0.3", "2,000"]
