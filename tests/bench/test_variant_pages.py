"""Figures of docs/variants.md, docs/accuracy.md and decision 54 on adapters, held to what H200s recorded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fingerprint.variant_measurements import VariantKind
from tests.bench import variant_costs_vllm as costs
from tests.bench import variant_pages as bench
from tests.bench.accuracy import RESULTS
from tests.bench.variant_contest import DIRECT, OURS

DOCS = Path(__file__).parents[2] / "docs"
TABLES = (
    bench.contest_table,
    bench.steps_table,
    bench.loads_table,
    bench.slots_table,
    bench.goals_table,
    bench.words_table,
    bench.cold_table,
)


def words(page: str) -> str:
    """Return a page without its line ends."""
    return " ".join((DOCS / page).read_text().split())


@pytest.mark.parametrize("table", TABLES)
def test_tables_are_on_the_page(table: Callable[[], str]) -> None:
    assert table() in (DOCS / "variants.md").read_text()


def test_recordings_are_of_the_day_that_the_page_says() -> None:
    found = re.search(r"measured on (\S+) and with the code of that day", words("variants.md"))
    assert found is not None
    assert {found[1]} == {bench.kept_contest().date, bench.kept_steps().date}


def test_goals_that_are_missed_are_called_so() -> None:
    """Tokens, and the P99 of cold adapters; all else is met."""
    rows = bench.goals_table().splitlines()[2:]
    assert [number for number, row in enumerate(rows) if "**missed**" in row] == [2, 4]
    assert {"1.283 s", "1.472 s", "28%"} <= set(re.findall(r"[\d.]+ s|\d+%", rows[4]))


def test_the_surplus_is_as_the_page_says() -> None:
    """The text below the table has its figure again."""
    found = re.search(r"up to ([\d.]+%) faster than vLLM", words("variants.md"))
    assert found is not None
    assert f" to {found[1]} higher" in bench.goals_table()


def test_neither_side_repeats_itself() -> None:
    found = bench.agreements()
    assert [found[sides].median for sides in ((DIRECT, DIRECT), (OURS, OURS), (OURS, DIRECT))] == [15, 11, 15]
    assert not found[DIRECT, DIRECT].whole + found[OURS, OURS].whole


def test_steps_as_deployments_have_them() -> None:
    decision = (DOCS / "decisions/0054-adapter-kernels.md").read_text()
    section = decision[decision.index("## As deployments have them") : decision.index("## The first contest")]
    rows = [*bench.deployed_rows()]
    assert sorted(row.split()[1] for row in rows) == ["`base`,", "`default`", "`own`"]
    assert all(row in section for row in rows)


def table_of(folder: str) -> dict[tuple[str, str], list[str]]:
    """Return cells of what was judged on Qwen3-8B, by kind of step and distinct adapters."""
    lines = costs.table(RESULTS / "variant_costs_h200" / folder, VariantKind(rank=16))
    rows = [
        [cell.strip() for cell in line.split("|")] for line in lines if line.startswith(("| step", "| prompts"))
    ]
    return {(row[1], row[2]): row for row in rows}


def short(row: list[str]) -> float:
    """Return how far what is predicted is below the measured, as a share of the whole time."""
    return (float(row[5]) - float(row[6])) / float(row[3])


def test_what_is_said_of_predictions() -> None:
    vllms, ours = table_of("qwen3-8b"), table_of("own_kernels/qwen3-8b")
    prompts = [row[7] for (what, _), row in vllms.items() if what.startswith("prompts")]
    line = r"1,024 tokens (\d+%) low .*? steps of 32 ([\d.]+%); (\d+) of (\d+) prompts .*? kernels (\d+%) low"
    said = re.search(line, words("accuracy.md"))
    assert said is not None
    assert list(said.groups()) == [
        f"{short(vllms['prompts of 1 x 1024', '1']):.0%}",
        f"{short(vllms['step of 32', '32']):.1%}",
        str(sum(cell.endswith("within") for cell in prompts)),
        str(len(prompts)),
        f"{short(ours['prompts of 1 x 1024', '1']):.0%}",
    ]
