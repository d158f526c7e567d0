"""The page: self-contained, escaped, complete; every drawing well-formed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.linear import Interval
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.profile import ProfilePlan
from iserve.report.accuracy import AccuracyRecord, AccuracyRow
from iserve.report.latency_fit import time_panels
from iserve.report.page import render_report
from iserve.report.text import label
from iserve.report.values import Configuration, RankedRow, Ranking, Report, Verdict
from tests.fingerprint.synthetic_machine import CPU, SyntheticMachine, take_profile
from tests.golden_words import Golden

HOSTILE = "<script>alert('x')</script>\"><img src=x onerror=y>&amp;"
WORKLOAD = Workload(1, 512, 17)
CONFIGS = [
    DeploymentConfig(tp=tp, pp=pp, weights=weights, kv=kv)
    for tp, pp in ((1, 1), (2, 1), (1, 2))
    for weights in (WeightFormat.BITS16, WeightFormat.INT8)
    for kv in (KvFormat.BITS16, KvFormat.INT8)
]


@pytest.fixture(scope="module")
def report() -> Report:
    plan = ProfilePlan(budget_s=1e6, max_repeats=5, weights=(WeightFormat.BITS16, WeightFormat.INT8))
    profile = take_profile(SyntheticMachine(noise=0.03, seed=1), plan)
    estimator = FingerprintedEstimator(profile, RooflineEstimator(profile.spec, CPU))
    configurations = [
        Configuration(
            config=config,
            estimate=estimator.estimate(config, WORKLOAD),
            layers_per_stage=None,
            cost=float(index + 1),
            feasible=config.kv is KvFormat.BITS16,
            reason=None if config.kv is KvFormat.BITS16 else "no kv=int8 here",
        )
        for index, config in enumerate(CONFIGS)
    ]
    blank = DeploymentConfig(tp=8, weights=WeightFormat.FP8)
    configurations.append(
        Configuration(
            config=blank, estimate=None, layers_per_stage=None, cost=None, feasible=False, reason="too wide"
        )
    )
    rows = tuple(
        RankedRow(configuration=i, objective=c.cost, feasible=c.feasible, reason=c.reason)
        for i, c in enumerate(configurations)
    )
    return Report(
        model="a-model",
        spec=profile.spec,
        created_at="2026-01-02T03:04:05+00:00",
        hardware="2 x cpu",
        device=CPU,
        workload=WORKLOAD,
        cost_model="memory-latency",
        cost_unit="GiB*s",
        configurations=tuple(configurations),
        rankings=(Ranking(intent="min-cost", limit=None, objective="cost, less is better", rows=rows),),
        profile=profile,
        panels=time_panels(profile),
        layer_effects=estimator.layer_effects,
    )


@pytest.fixture(scope="module")
def record(report: Report) -> AccuracyRecord:
    row = AccuracyRow(
        model="a-model",
        shape_hash=report.spec.shape_hash,
        num_layers=report.spec.num_layers,
        config=CONFIGS[0],
        workload=WORKLOAD,
        quantity="ttft_s",
        predicted=Quantity(0.110, 0.090, 0.130, Source.EXTRAPOLATED),
        measured=0.100,
        measured_low=0.099,
        measured_high=0.101,
        repeats=5,
    )
    outside = replace(row, quantity="engine_bytes_per_gpu", measured=2.0**30, below_resolution=True)
    assert report.profile is not None
    return AccuracyRecord(
        created_at="2026-01-02T03:04:05+00:00",
        command="bench",
        machine=report.profile.machine,
        load_average_before=0.25,
        load_average_after=1.5,
        rows=(
            row,
            replace(outside, predicted=Quantity(1.25 * 2**30, 1.2 * 2**30, 1.3 * 2**30, Source.EXTRAPOLATED)),
        ),
    )


class Seen(HTMLParser):
    """Tags and their attributes, the text, and whether every tag was closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def section(page: str, anchor: str) -> str:
    """Return the section's text."""
    (found,) = re.findall(rf'<section id="{anchor}">.*?</section>', page, re.DOTALL)
    return Seen(found).text


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_needs_nothing_else(report: Report, record: AccuracyRecord) -> None:
    page = render_report(replace(report, accuracy=record))
    assert not re.findall(r"(?i)\b(?:https?:)?//[a-z0-9]", page)
    seen = Seen(page)
    assert seen.open == []
    assert not {"script", "link", "iframe", "img", "object", "embed"} & {tag for tag, _ in seen.tags}
    assert "@import" not in page
    assert "url(" not in page
    anchors = {attributes["id"] for _, attributes in seen.tags if attributes.get("id")}
    links = {str(attributes["href"]) for tag, attributes in seen.tags if tag == "a"}
    assert links == {f"#{anchor}" for anchor in anchors}
    assert "prefers-color-scheme: dark" in page


def test_every_drawing_is_xml_with_a_name(report: Report, record: AccuracyRecord) -> None:
    drawn = svgs(render_report(replace(report, accuracy=record)))
    # 12 bursts of 2 quantities, 2 whiskers per fit, at least a bar per estimate, Pareto twice
    assert len(drawn) >= 24 + 2 * 6 + len(CONFIGS) + 2
    for svg in drawn:
        assert svg.attrib["role"] == "img"
        assert svg[0].tag == "title"
        assert svg[0].text == svg.attrib["aria-label"]


def test_every_configuration_appears_with_its_reason(report: Report) -> None:
    page = render_report(report)
    everything = section(page, "all")
    assert f"{len(report.configurations)} configurations" in everything
    for found in report.configurations:
        assert label(found.config) in everything
    assert everything.count("no kv=int8 here") == sum(c.reason == "no kv=int8 here" for c in report.configurations)
    assert "too wide" in everything


HOSTILE_VERDICT: Any = {"sentence": HOSTILE, "lines": ((HOSTILE, HOSTILE), ("", HOSTILE)), "refused": HOSTILE}
HOSTILE_PLACES: dict[str, Callable[[Report, AccuracyRecord], Report]] = {
    "model": lambda r, _: replace(r, model=HOSTILE),
    "hardware": lambda r, _: replace(r, hardware=HOSTILE),
    "family": lambda r, _: replace(r, spec=replace(r.spec, family=HOSTILE)),
    "reason": lambda r, _: replace(
        r, configurations=tuple(replace(c, feasible=False, reason=HOSTILE) for c in r.configurations)
    ),
    "note": lambda r, _: replace(r, profile=replace(r.profile, notes=(HOSTILE,))) if r.profile else r,
    "cpu": lambda r, _: replace(
        r, profile=replace(r.profile, machine=replace(r.profile.machine, cpu_model=HOSTILE)) if r.profile else None
    ),
    "ranking": lambda r, _: replace(r, rankings=tuple(replace(k, remarks=(HOSTILE,)) for k in r.rankings)),
    "verdict": lambda r, _: replace(
        r, rankings=tuple(replace(k, verdict=Verdict(**HOSTILE_VERDICT)) for k in r.rankings)
    ),
    "record": lambda r, a: replace(r, accuracy=replace(a, rows=tuple(replace(x, model=HOSTILE) for x in a.rows))),
}


@pytest.mark.parametrize("place", HOSTILE_PLACES)
def test_hostile_text_stays_text(report: Report, record: AccuracyRecord, place: str) -> None:
    page = render_report(HOSTILE_PLACES[place](report, record))
    seen = Seen(page)
    assert not {"script", "img"} & {tag for tag, _ in seen.tags}
    assert not any(name.startswith("on") for _, attributes in seen.tags for name in attributes)
    assert HOSTILE in seen.text
    svgs(page)


def test_without_a_profile_nothing_is_said_to_be_measured(report: Report) -> None:
    page = render_report(replace(report, profile=None, panels=(), layer_effects=()))
    assert "nothing was measured" in page
    assert 'id="times"' not in page
    assert 'id="layer"' not in page


def test_errors_are_signed_and_judged(report: Report, record: AccuracyRecord, golden: Golden) -> None:
    assert [row.relative_error for row in record.rows] == pytest.approx([0.10, 0.25])
    assert [row.inside for row in record.rows] == [True, False]
    page = render_report(replace(report, accuracy=record))
    text = section(page, "errors")
    for told in (
        "This model: a-model",
        "+10.0%",
        "+25.0%",
        "inside",
        "outside",
        "below resolution",
        "0.25 before",
    ):
        assert told in text
    drawn = [
        svg for svg in svgs(page) if svg.attrib["class"] == "whiskers" and svg.attrib["aria-label"].endswith("%")
    ]
    assert [svg[2].attrib["class"] for svg in drawn] == ["resolved", "unresolved"]
    assert "truth c-16bit" in {svg.get("class") for drawing in svgs(page) for svg in drawing.iter("polygon")}
    golden("reports", section(render_report(report), "errors"))


def test_a_layer_that_noise_hides_is_called_so(report: Report) -> None:
    effect = report.layer_effects[0]
    hidden = replace(effect, next_s=replace(effect.next_s, low=-1e-6))
    page = render_report(replace(report, layer_effects=(hidden,)))
    text = section(page, "layer")
    assert text.count("resolved") == 1
    assert text.count("below resolution") == 2  # once explained, once found


def test_a_layer_that_takes_less_than_nothing_is_not_called_hidden(report: Report) -> None:
    effect = report.layer_effects[0]
    impossible = replace(effect, next_s=Interval(-2e-6, -3e-6, -1e-6))
    text = section(render_report(replace(report, layer_effects=(impossible,))), "layer")
    assert (text.count("resolved"), text.count("below resolution")) == (1, 1)  # the other part; in words above
    assert text.count("below zero") == 2  # once explained, once found


def test_the_same_report_is_the_same_page(report: Report) -> None:
    assert render_report(report) == render_report(report)
