"""The glossary: sorted, each term defined once in one or two sentences, and found from the README."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/glossary.md"
ENTRIES = re.findall(r"^\*\*(.+?)\.\*\* (.+?)(?=\n\n|\s*\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
TERMS = [term for term, _ in ENTRIES]
# Terms that a plan, the command line's help or the REST API use without a definition of their own.
NEEDED = """
    admission control, batch, burstiness, candidate, constraint, controller, daemon, decode, drain, E2E,
    engine, estimate, fingerprint, gateway, intent, interference, KV cache, placement, plan, prefill,
    profile, quality, rank, replica, scale to zero, service time, SLO, stage, TPOT, truncation, TTFT,
    utilisation, verdict, worker, workload
"""


def test_it_is_sorted_and_each_term_is_defined_once() -> None:
    assert sorted(TERMS, key=str.casefold) == TERMS
    assert len({term.casefold() for term in TERMS}) == len(TERMS) >= 75
    assert {term.strip().casefold() for term in NEEDED.split(",")} <= {term.casefold() for term in TERMS}


def test_a_definition_is_one_or_two_sentences() -> None:
    for term, text in ENTRIES:
        sentences = re.findall(r"[.](?=\s|$)", text)
        assert 1 <= len(sentences) <= 2, f"{term}: {text}"
        assert text.endswith("."), term
        assert len(text.split()) <= 40, term


def test_nothing_on_the_page_is_left_out_here() -> None:
    assert PAGE.read_text().count("\n**") == len(ENTRIES)


def test_it_is_linked() -> None:
    assert "(docs/glossary.md)" in (ROOT / "README.md").read_text()
    assert "(glossary.md)" in (ROOT / "docs/README.md").read_text()


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)\)", (ROOT / "docs/README.md").read_text()))
    assert linked == {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
