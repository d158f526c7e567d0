"""Kept results of ``variant_costs`` are those that the pages cite, and today's code predicts them."""

from __future__ import annotations

import re
from pathlib import Path

from fingerprint.codec import from_json
from tests.bench.kept import read_kept
from tests.bench.variant_costs import CASES, Document, compared, summary

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "tests/bench/results/variant_costs_cpu.json.gz"
PAGE = " ".join((ROOT / "docs/variants.md").read_text().split())


def test_what_the_page_cites_is_what_was_kept() -> None:
    document = from_json(read_kept(KEPT), Document)
    rows = [row for judged in document.judged for row in compared(judged)]
    assert len(rows) == 2 * len(document.judged) * sum(len(actives) for _, actives in CASES)
    for quantity, name in (("step", "steps"), ("prompts", "prompts")):
        found = summary([row for row in rows if row.quantity == quantity])
        cited = re.search(
            rf"(?i){name}: (\d+) of (\d+) within their intervals, median error (\d+)%; of the added time alone "
            r"(\d+) of (\d+), (\d+)%",
            PAGE,
        )
        assert cited is not None
        assert [int(one) for one in cited.groups()] == [
            found.within,
            found.number,
            round(100 * found.error),
            found.added_within,
            found.added_number,
            round(100 * found.added_error),
        ]
