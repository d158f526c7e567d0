"""Figures of pages on adapters and of decisions 48 and 54, held to what H200s recorded."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from fingerprint.load_time import recorded_load_s
from fingerprint.variant_measurements import VariantKind
from tests.bench import variant_costs_vllm as costs
from tests.bench import variant_pages as bench
from tests.bench.accuracy import RESULTS
from tests.bench.lora_adapters import matrices
from tests.bench.lora_load_parts import CASES
from tests.bench.lora_steps_table import Load
from tests.bench.variant_contest import DIRECT, OURS
from tests.bench.variant_contest_run import OUTPUT
from tests.daemon.engines.vllm_worker_spec import LLAMA_8B

DOCS = Path(__file__).parents[2] / "docs"
TABLES = (
    bench.contest_table,
    bench.again_table,
    bench.parts_table,
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
    assert table() in (DOCS / "adapters-measured.md").read_text()


def test_recordings_are_of_the_day_that_the_page_says() -> None:
    found = re.search(r"measured on (\S+) and with the code of that day", words("adapters-measured.md"))
    assert found is not None
    assert {found[1]} == {bench.kept_contest().date, bench.kept_steps().date}


def part(begin: str, end: str) -> str:
    """Return the text of the variants' page from one mark to the next, without line ends."""
    return words("adapters-measured.md").partition(begin)[2].partition(end)[0]


DECISION = words("decisions/0048-delta-plug-in.md")


def loads_by_a_thread() -> list[list[Load]]:
    """Return the loads next to steps of each recording, by time."""
    found = [[one for one in kept.loads if one.in_background] for kept in bench.kept_loads()]
    assert [len(loads) for loads in found] == [12] * 4
    return found


def ends(values: Iterable[float], shown: str) -> tuple[str, str]:
    """Return the least and the most of ``values``, as a page shows them."""
    ordered = sorted(values)
    return format(ordered[0], shown), format(ordered[-1], shown)


def test_the_page_has_how_long_loads_next_to_steps_stopped_them() -> None:
    """Longest gaps in median gaps, with and without a load; none was short enough while pages were locked."""
    told = part("**Loads next to steps.**", "**Kernels of our own**")
    line = (
        r"goal of ([\d.]+) steps is met by (\d+) of (\d+) loads\*\*: .* was ([\d.]+) to ([\d.]+) steps at ranks 8 "
    )
    line += r"and 16 and ([\d.]+) to ([\d.]+) at rank 64, .* without a load was ([\d.]+) to ([\d.]+)\."
    found = re.search(line, told)
    assert found is not None
    goal = float(found[1])
    *before, today = loads_by_a_thread()
    met = [one for one in today if bench.steps_of(one) <= goal]
    assert found.groups()[1:] == (
        *(str(len(met)), str(len(today))),
        *ends((bench.steps_of(one) for one in today if one.rank < 64), ".1f"),
        *ends((bench.steps_of(one) for one in today if one.rank == 64), ".1f"),
        *ends((one.usual_gap_s / one.median_gap_s for one in today), ".1f"),
    )
    assert all(bench.steps_of(one) > goal for loads in before for one in loads)


def test_the_page_has_how_long_loads_next_to_steps_take() -> None:
    """VLLM's own loads are of the same day."""
    line = r"takes ([\d.]+) to ([\d.]+) s for ([\d.]+) to ([\d.]+) of vLLM's, .*? asks (\d+) to (\d+) times"
    found = re.search(line, part("**Loads next to steps.**", "**Kernels of our own**"))
    assert found is not None
    today = loads_by_a_thread()[-1]
    stops_s = [one.load_s for one in bench.kept_loads()[1].loads if not one.plug_in]
    calls = ends((one.calls for one in today), "d")
    assert found.groups() == (*ends((one.load_s for one in today), ".2f"), *ends(stops_s, ".2f"), *calls)


def test_decision_48_has_what_loads_by_a_thread_stopped_before_they_locked_nothing() -> None:
    """The first gaps, what followed them, and what a MB of rank 64 stopped: values of two bytes each."""
    assert bench.threads_table() in (DOCS / "decisions/0048-delta-plug-in.md").read_text()
    copies, at_once, *_ = loads_by_a_thread()
    first_ms = [1e3 * one.long_gaps[0][0] for one in (*copies, *at_once)]
    assert re.findall(r"is always the first, (\d+) to (\d+) ms after", DECISION) == [ends(first_ms, ".0f")]
    assert all(one.long_gaps[0][1] == max(gap_s for _, gap_s in one.long_gaps) for one in at_once)
    earlier, later = (
        sorted(bench.further_gap_s(one) / one.median_gap_s for one in loads) for loads in (copies, at_once)
    )
    line = r"in (\d+) of the (\d+) loads none was longer than ([\d.]+) steps, in one ([\d.]+), "
    *rest, most = later
    figures = (str(len(rest)), str(len(later)), f"{rest[-1]:.1f}", f"{most:.2f}", *ends(earlier, ".1f"))
    assert re.findall(line + r"for ([\d.]+) to ([\d.]+),", DECISION) == [figures]
    sides = sum(rows + columns for rows, columns in matrices(LLAMA_8B).values())
    megabytes = 2 * 64 * sides * 32 / 1e6
    spans = ends((1e3 * one.longest_gap_s / megabytes for one in at_once if one.rank == 64), ".2f")
    assert re.findall(r"([\d.]+) to ([\d.]+) ms a MB", DECISION) == [spans]
    calls = ends((one.calls for loads in loads_by_a_thread()[2:] for one in loads), "d")
    assert re.findall(r"pauses between its (\d+) to (\d+) calls", DECISION) == [calls]


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
    found = re.search(r"up to ([\d.]+%) faster than vLLM", words("adapters-measured.md"))
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


def test_loads_that_were_recorded_after_their_law_are_what_decision_50_says() -> None:
    vllm, ours = (
        [statistics.median(one.load_s for one in side.loads if one.case == case) for case in CASES]
        for side in bench.kept_parts()
    )
    layer = matrices(LLAMA_8B)
    law = []
    for rank, modules in CASES.values():
        shapes = [shape for name, shape in layer.items() if not modules or name.rpartition(".")[2] in modules]
        num_bytes = 2 * 32 * rank * sum(map(sum, shapes))
        law.append(recorded_load_s(num_bytes, 2 * 32 * len(shapes)))
    own, said, read = ([f"{1e3 * one:.0f}" for one in each_s] for each_s in (vllm, law, ours))
    page = words("decisions/0050-loads-in-plans.md")
    assert f"| {own[0]} ms | 59 | {said[0]} |" in page
    for each in (own, said, read):
        assert f"{each[1]}, {each[2]} and {each[3]}" in page
    assert f"q and v: {read[0]}" in page
    over = [100 * (one / other - 1) for one, other in zip(law, ours, strict=True)]
    assert f"{min(over):.0f} to {max(over):.0f}% long" in page
