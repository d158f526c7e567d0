"""Figures of docs/variants.md, docs/accuracy.md and decision 54 on adapters, held to what H200s recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from fingerprint.variant_measurements import VariantKind
from tests.bench import variant_costs_vllm as costs
from tests.bench import variant_pages as bench
from tests.bench.accuracy import RESULTS
from tests.bench.lora_adapters import matrices
from tests.bench.lora_steps import Load
from tests.bench.variant_contest import DIRECT, OURS
from tests.bench.variant_contest_run import OUTPUT
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B

DOCS = Path(__file__).parents[2] / "docs"
TABLES = (
    bench.contest_table,
    bench.steps_table,
    bench.loads_table,
    bench.ways_table,
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


def part(begin: str, end: str) -> str:
    """Return the text of the variants' page from one mark to the next, without line ends."""
    return words("variants.md").partition(begin)[2].partition(end)[0]


def loads_by_a_thread() -> tuple[list[Load], list[Load]]:
    """Return the loads next to steps of the earlier and the later recording."""
    earlier, later = ([one for one in found.loads if one.in_background] for found in bench.kept_loads())
    assert len(earlier) == len(later) == 12
    return earlier, later


def ends(values: Iterable[float], shown: str) -> tuple[str, str]:
    """Return the least and the most of ``values``, as a page shows them."""
    ordered = sorted(values)
    return format(ordered[0], shown), format(ordered[-1], shown)


def test_the_page_has_how_long_loads_next_to_steps_stopped_them() -> None:
    """Longest gaps in median gaps by day, none of which meets the goal, and when they began."""
    told = part("**Loads next to steps.**", "**Kernels of our own**")
    line = r"goal of ([\d.]+) steps is missed\*\*: .* was ([\d.]+) to ([\d.]+) steps on (\S+) "
    line += r"and ([\d.]+) to (\d+) on (\S+),"
    found = re.search(line, told)
    assert found is not None
    days = [recording.date for recording in bench.kept_loads()]
    steps = [[bench.steps_of(one) for one in loads] for loads in loads_by_a_thread()]
    assert min(map(min, steps)) > float(found[1])
    earlier, later = ends(steps[0], ".1f"), (format(min(steps[1]), ".1f"), format(max(steps[1]), ".0f"))
    assert found.groups()[1:] == (*earlier, days[0], *later, days[1])
    first_ms = [1e3 * one.long_gaps[0][0] for loads in loads_by_a_thread() for one in loads]
    assert re.findall(r"gap, (\d+) to (\d+) ms after", told) == [ends(first_ms, ".0f")]
    assert all(one.long_gaps[0][1] == max(gap_s for _, gap_s in one.long_gaps) for one in loads_by_a_thread()[1])


def test_the_page_has_what_followed_the_first_gap_of_loads_next_to_steps() -> None:
    earlier, later = (
        sorted(bench.further_gap_s(one) / one.median_gap_s for one in loads) for loads in loads_by_a_thread()
    )
    line = r"In (\d+) of those (\d+) loads .*? longer than ([\d.]+) steps "
    line += r"\(one had ([\d.]+)\), for ([\d.]+) to ([\d.]+) "
    found = re.search(line, part("**Loads next to steps.**", "**Kernels of our own**"))
    assert found is not None
    *rest, most = later
    figures = (f"{rest[-1]:.1f}", f"{most:.1f}", *ends(earlier, ".1f"))
    assert found.groups() == (str(len(rest)), str(len(later)), *figures)


def test_the_page_has_how_long_loads_next_to_steps_take() -> None:
    """Pauses are those of a client that asked as the gateway did that day; vLLM's own loads are of both days."""
    line = r"takes ([\d.]+) to ([\d.]+) s, of which ([\d.]+) s are .*? between (\w+) calls, "
    line += r"for ([\d.]+) to ([\d.]+) of vLLM's"
    found = re.search(line, part("**Loads next to steps.**", "**Kernels of our own**"))
    assert found is not None
    _, later = loads_by_a_thread()
    (calls,) = {one.calls for one in later}
    pauses_s = sum(min(2**number * 0.02, 0.2) for number in range(calls - 1))
    stops_s = [one.load_s for one in bench.kept_loads()[1].loads if not one.plug_in]
    own_s = ends((one.load_s for one in later), ".2f")
    assert calls == 6
    assert found.groups() == (*own_s, f"{pauses_s:.1f}", "six", *ends(stops_s, ".2f"))


def test_what_a_megabyte_stops_is_by_the_bytes_of_the_adapter() -> None:
    """The first gap of rank 64, by the values of all matrices in two bytes each."""
    sides = sum(rows + columns for rows, columns in matrices(LLAMA_8B).values())
    megabytes = 2 * 64 * sides * 32 / 1e6
    _, later = loads_by_a_thread()
    spans = ends((1e3 * one.longest_gap_s / megabytes for one in later if one.rank == 64), ".2f")
    decision = " ".join((DOCS / "decisions/0048-delta-plug-in.md").read_text().split())
    assert re.findall(r"([\d.]+) to ([\d.]+) ms a MB", decision) == [spans]
    (rounded,) = re.findall(r"locked, ([\d.]+) ms a MB at rank 64", words("variants.md"))
    assert float(spans[0]) <= float(rounded) <= float(spans[1])


def test_late_cold_adapters_are_a_period_apart() -> None:
    """All that the page concludes from: late requests, times between them, and what a client of the loop takes."""
    late, told = bench.late_cold(), part("The late ones are likely", "All files were")
    apart_s = [after - before for before, after in pairwise(late.ended_s)]
    assert len(late.late) == 4
    assert re.findall(r"over ([\d.]+) to ([\d.]+) s after each", told) == [ends(apart_s, ".1f")]
    line = r"(\d+) tokens at the (\d+) to (\d+) ms .*? of ([\d.]+) to ([\d.]+) s itself, "
    found = re.search(line + r"are ([\d.]+) to ([\d.]+) s", told)
    assert found is not None
    tokens, waited_s = OUTPUT - 1, (min(late.waited_s), max(late.waited_s))
    whole_s = [tokens * token_s + wait_s for token_s, wait_s in zip(late.token_s, waited_s, strict=True)]
    assert found.groups() == (
        str(tokens), *ends((1e3 * token_s for token_s in late.token_s), ".0f"), *ends(late.waited_s, ".1f"),
        *ends(whole_s, ".1f"),
    )  # fmt: skip
    assert whole_s[0] < min(apart_s) < max(apart_s) < whole_s[1]


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
