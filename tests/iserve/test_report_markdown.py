"""The report as Markdown, read back by a Markdown reader: it says what the page says, and never becomes HTML."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from iserve.report.markdown import render_markdown
from iserve.report.page import render_report
from iserve.report.values import Report, Verdict
from tests.iserve.test_report_page import HOSTILE, report

__all__ = ["report"]

markdown_it = pytest.importorskip("markdown_it", reason="markdown-it-py (rich brings it) is not installed")
ODD = "a|b\n# c `d` *e* _f_ [g](h) \\| ~~i~~ &lt; 1. j"


def read(text: str) -> list[Any]:
    return list(markdown_it.MarkdownIt("commonmark", {"html": True}).enable("table").parse(text))


def words(tokens: list[Any]) -> str:
    """All that a reader shows, blanks made one."""
    shown = (child.content for token in tokens if token.type == "inline" for child in (token.children or ()))
    return " ".join(" ".join(shown).split())


def tables(tokens: list[Any]) -> list[list[int]]:
    """Cells of each row of each table."""
    found: list[list[int]] = []
    for token in tokens:
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append(0)
        elif token.type in ("td_open", "th_open"):
            found[-1][-1] += 1
    return found


def body_of(report: Report) -> ElementTree.Element:
    return next(ElementTree.fromstring(render_report(report)).iter("main"))


def plain(node: ElementTree.Element) -> str:
    return " ".join("".join(node.itertext()).split())


def own_words(cell: ElementTree.Element) -> Iterator[str]:
    """Yield the words of a cell, its drawings aside; each small line apart."""
    if cell.tag == "svg":
        return
    yield " ".join((cell.text or "").split())
    for child in cell:
        yield from own_words(child)


def test_it_has_the_pages_headings_and_all_words_of_its_tables(report: Report) -> None:
    body = body_of(report)
    tokens = read(render_markdown(report))
    headings = [words([b]) for a, b in pairwise(tokens) if a.type == "heading_open"]
    named = [plain(node) for node in body.iter() if node.tag in ("h1", "h2")]
    assert [heading for heading in headings if heading in named] == named
    text = words(tokens)
    for cell in (*body.iter("td"), *body.iter("dd"), *body.iter("p")):
        if "class" not in cell.attrib or cell.attrib["class"] != "draw":
            for said in own_words(cell):
                assert said in text
    for table in tables(tokens):
        assert len(set(table)) == 1  # a row with a bar of its own would have more cells


def test_drawings_become_tables_of_their_marks(report: Report) -> None:
    body = body_of(report)
    text = words(read(render_markdown(report)))
    drawings = [svg for figure in body.iter("figure") for svg in figure.iter("svg")]
    marks = [plain(title) for svg in drawings for title in list(svg.iter("title"))[1:]]
    assert len(marks) > 20
    for mark in marks:
        what, _, figures = mark.partition(": ")
        assert what in text
        assert figures in text


@pytest.mark.parametrize("name", [HOSTILE, ODD])
def test_a_hostile_name_stays_text(report: Report, name: str) -> None:
    tokens = read(render_markdown(replace(report, model=name, hardware=name)))
    assert not [token for token in tokens if token.type == "html_block"]
    kinds = {child.type for token in tokens if token.type == "inline" for child in (token.children or ())}
    assert kinds <= {"text", "text_special", "softbreak", "strong_open", "strong_close"}
    assert tables(tokens) == tables(read(render_markdown(report)))
    assert " ".join(name.split()).replace(" ", "") in words(tokens).replace(" ", "")


def test_lines_of_one_label_are_apart(report: Report) -> None:
    notes = (("Notes", "intervals of GiB*s overlap"), ("", "the profile was cut short"), ("Load", "none given"))
    verdict = Verdict(sentence="tp=1", lines=notes, refused="")
    told = tuple(replace(ranking, verdict=verdict) for ranking in report.rankings)
    text = words(read(render_markdown(replace(report, rankings=told))))
    assert "Notes intervals of GiB*s overlap; the profile was cut short Load none given" in text
