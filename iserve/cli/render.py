"""Plans, estimates and lists as people read them in a terminal. Numbers get their units here, not before."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from iserve.cli.sanitized_console import SanitizedConsole
from iserve.planning.words import device_kind, ends, figure, gib, seconds, short, with_interval, workload_words

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

    from fingerprint.estimates import Correction
    from iserve.api_documents import DeploymentDocument
    from iserve.planning.document import CandidateDocument, EstimateDocument, PlanDocument
    from iserve.planning.offline import OneEstimateDocument
    from iserve.planning.verdict import VerdictDocument

__all__ = [
    "console",
    "correction_words",
    "gib",
    "model_words",
    "print_estimate",
    "print_plan",
    "print_rows",
    "print_verdict",
    "seconds",
    "short",
    "workload_words",
]

_ROWS = 12
_LEAST_TEXT = 20
_MOST_UNFOLDED = 40  # characters of a name
_NO_BREAK = "\u00a0"
_UNIT = re.compile(r"(?<=\d) (?=(?:s|ms|GiB|MiB|requests/s|tokens)\b)")  # no line ends between number and unit
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SOURCE_MARKS = {"measured": "m", "extrapolated": "x", "sharded": "t", "scaled": "s", "roofline": "r"}
_SOURCE_WORDS = {"sharded": "shard on one GPU + modelled all-reduce"}


def console(*, at_least: int = 0) -> Console:
    """Return standard output; width 120 where it is not a terminal, so that logs keep whole rows.

    Lines of up to ``at_least`` characters are a narrower terminal's to wrap. What is printed is plain text: names
    of models, folders and errors may hold what rich takes for markup.
    """
    out = SanitizedConsole(highlight=False, markup=False, emoji=False)
    out.width = max(out.width if out.is_terminal else 120, at_least)
    return out


def model_words(deployment: DeploymentDocument) -> str:
    """Return the model that is served, a merged checkpoint by its variant."""
    if deployment.variant is None:
        return deployment.model
    return f"{deployment.variant}, merged" + ("" if deployment.base is None else f" into {deployment.base}")


def print_plan(
    document: PlanDocument, *, rows: int = _ROWS, refused: bool = False, deployed: bool = False
) -> None:
    """Print the verdict, the ranked table, and the refusals.

    Args:
        refused: list each refused configuration; else they are counted.
        deployed: it runs already, so that nothing is said of whether it could.
    """
    # With the planner, which a list does not need.
    from iserve.planning.verdict_text import HERE, alike_words, note_lines, plan_lines, refused_words

    out = console()
    feasible = [candidate for candidate in document.candidates if candidate.feasible]
    if document.verdict is not None:
        print_verdict(
            document.verdict, [line for line in plan_lines(document) if not (deployed and line[0] == HERE)]
        )
        out.print()
    count = f"{len(feasible)} of {len(document.candidates)} configurations would work"
    out.print(f"{document.intent}, {workload_words(document.workload)}, on {document.hardware}: {count}")
    if feasible:
        table, width = _candidate_table(feasible[:rows], document, out.width)
        console(at_least=width).print(table)
        out.print(f"[a-b] is a 90% interval; {document.cost_unit} is per request; {_legend(feasible[:rows])}")
        if _is_chosen_by_load(document, feasible):
            out.print("row 1 is chosen for the load above; the rest are ranked by one batch on one replica")
        if document.indistinguishable:
            out.print(alike_words(document, min(rows, len(feasible))))
        _print_indented(out, _corrections(feasible[:rows]))
        if len(feasible) > rows:
            out.print(f"... and {len(feasible) - rows} more that would work (--json lists all)")
    if refused:
        _print_refused(out, document)
    elif document.verdict is not None and document.verdict.refusals:
        out.print(f"{refused_words(document.verdict)}; list them with --refused")
    if document.chosen is not None:
        _print_better(out, document)
    for note in note_lines(document):
        out.print(f"note: {note}")


def print_verdict(verdict: VerdictDocument, lines: Sequence[tuple[str, str]]) -> None:
    """Print the sentence, and under it the lines with their labels."""
    out = console()
    out.print(Text(verdict.sentence, style="bold red" if verdict.figures is None else "bold green"))
    margin = 2 + max((len(label) for label, _ in lines), default=0) + 2
    for label, text in lines:
        first, *rest = textwrap.wrap(_UNIT.sub(_NO_BREAK, text), max(out.width - margin, _LEAST_TEXT))
        out.print(Text.assemble((f"  {label}".ljust(margin), "bold"), first.replace(_NO_BREAK, " ")))
        for line in rest:
            out.print(Text(" " * margin + line.replace(_NO_BREAK, " ")))


def _candidate_table(
    candidates: Sequence[CandidateDocument], document: PlanDocument, width: int
) -> tuple[Table, int]:
    """Return the table and its width, at most ``width`` if it can be.

    Never a figure cut short: what a narrow terminal has no room for is left out, the least needed first, and what
    still does not fit is the terminal's to wrap.
    """
    columns, gap = _candidate_columns(candidates, document), 2
    objective = document.objective_unit
    spares = ("total", "", "E2E", document.cost_unit, "TTFT interval", f"{objective} interval", "TPOT interval")
    for spare in spares:
        if _width(columns, gap) <= width or spare == document.objective_unit:
            continue
        if not spare:
            gap = 1
        columns = [column for column in map(partial(_without, spare), columns) if column is not None]
    return _table(columns, gap), _width(columns, gap)


Column = tuple[str, "JustifyMethod", list[str]]  # name, side and cells


def _without(spare: str, column: Column) -> Column | None:
    """Return ``column`` without what ``spare`` names: all of it, or the intervals in its cells."""
    name, side, cells = column
    if spare == f"{name} interval":
        return name, side, [cell.partition(" [")[0] for cell in cells]
    return None if spare and spare == name else column


def _candidate_columns(candidates: Sequence[CandidateDocument], document: PlanDocument) -> list[Column]:
    configs = [candidate.config for candidate in candidates]
    estimates = [candidate.estimate for candidate in candidates if candidate.estimate is not None]
    assert len(estimates) == len(candidates), "a feasible candidate has an estimate"
    columns: list[Column] = [
        ("#", "left", [str(number) for number, _ in enumerate(candidates, start=1)]),
        ("tp", "left", [str(config.tp) for config in configs]),
        ("pp", "left", [str(config.pp) for config in configs]),
        ("weights", "left", [str(config.weights) for config in configs]),
        ("kv", "left", [str(config.kv) for config in configs]),
    ]
    if any(config.pruning != "none" for config in configs):
        columns.append(("pruning", "left", [str(config.pruning) for config in configs]))
    if any(config.expert_parallel for config in configs):
        columns.append(("experts", "left", ["parallel" if config.expert_parallel else "" for config in configs]))
    if any(config.draft_tokens for config in configs):
        columns.append(("drafts", "left", [str(config.draft_tokens) for config in configs]))
    if any(config.adapter_slots for config in configs):
        columns.append(("adapters", "left", [str(config.adapter_slots) for config in configs]))
    columns.append(("engine", "left", [config.engine for config in configs]))
    columns.append((document.objective_unit, "left", list(map(_objective, candidates))))
    if document.objective_unit != document.cost_unit:
        columns.append((document.cost_unit, "right", [figure(estimate.cost) for estimate in estimates]))
    return [
        *columns,
        (
            "per GPU" if device_kind(document.hardware) == "GPU" else "per device",
            "right",
            [gib(one.memory_bytes_per_gpu) for one in estimates],
        ),
        ("total", "right", [gib(estimate.memory_bytes_total) for estimate in estimates]),
        ("TTFT", "left", [with_interval(estimate.ttft_s) for estimate in estimates]),
        ("TPOT", "left", [with_interval(estimate.tpot_s) for estimate in estimates]),
        ("E2E", "right", [seconds(estimate.e2e_s.value) for estimate in estimates]),
        ("", "left", [_mark(estimate) for estimate in estimates]),
    ]


def _objective(candidate: CandidateDocument) -> str:
    """Return the value with its interval, where that is known."""
    low, high = candidate.objective_low, candidate.objective_high
    within = "" if low is None or high is None else f" {ends(low, high)}"
    return f"{figure(candidate.objective)}{within}"


def _width(columns: Sequence[Column], gap: int) -> int:
    return sum(max(map(len, (name, *cells))) + gap for name, _, cells in columns) - gap


def _table(columns: Sequence[Column], gap: int) -> Table:
    """Return a table as wide as its cells, the first row in green."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for name, side, cells in columns:
        table.add_column(name, justify=side, no_wrap=True, min_width=max(map(len, (name, *cells))))
    for number, row in enumerate(zip(*(cells for _, _, cells in columns), strict=True)):
        table.add_row(*row, style=None if number else "green")
    return table


def _print_refused(out: Console, document: PlanDocument) -> None:
    """Print every refused configuration with its whole reason, those of one kind together."""
    from iserve.planning.verdict_text import REFUSED_FOR

    verdict = document.verdict
    for refusal in () if verdict is None else verdict.refusals:
        out.print(f"refused, {REFUSED_FOR[refusal.reason]}: {refusal.count}", style="bold")
        for candidate in document.candidates:
            if candidate.refused_for is refusal.reason:
                _print_indented(
                    out, [f"{short(candidate.config)} on {candidate.config.engine}: {candidate.reason}"]
                )


def _cut(text: str, width: int = 150) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _is_chosen_by_load(document: PlanDocument, feasible: Sequence[CandidateDocument]) -> bool:
    """Return whether the first row is worse than the second by what the rows are ranked by."""
    if document.joint is None or len(feasible) < 2:
        return False
    first, second = (one.objective for one in feasible[:2])
    return first is not None and second is not None and first > second


def _legend(candidates: Iterable[CandidateDocument]) -> str:
    sources = dict.fromkeys(c.estimate.tpot_s.source for c in candidates if c.estimate is not None)
    return "times are " + ", ".join(f"{_SOURCE_MARKS[s]} {_SOURCE_WORDS.get(s, s)}" for s in sources)


def _mark(estimate: EstimateDocument) -> str:
    checked = "" if estimate.correction is None else "c" if estimate.correction.exact else "(c)"
    return _SOURCE_MARKS[estimate.tpot_s.source] + checked


def _corrections(candidates: Iterable[CandidateDocument]) -> list[str]:
    """Return what ``iserve verify`` changed in these estimates, each check once."""
    estimates = [c.estimate for c in candidates if c.estimate is not None and c.estimate.correction is not None]
    found = {(e.correction.config, e.correction.workload): e.correction for e in estimates if e.correction}
    carried = any(not e.correction.exact for e in estimates if e.correction)
    beside = ["(c) carried over from the nearest check, the uncorrected interval included"] if carried else []
    return [f"c corrected {correction_words(correction)}" for correction in found.values()] + beside


def correction_words(correction: Correction) -> str:
    """Return by which check, and by how much."""
    more = correction.memory_bytes
    return (
        f"by the check of {short(correction.config)}, {workload_words(correction.workload)}, "
        f"at {correction.measured_at[:16].replace('T', ' ')}: TTFT x{math.exp(correction.ttft_log_ratio):.3g}, "
        f"TPOT x{math.exp(correction.tpot_log_ratio):.3g}, memory {'-' if more < 0 else '+'}{gib(abs(more))} a GPU"
    )


def _print_better(out: Console, document: PlanDocument) -> None:
    """Print what the intent alone would prefer, the first of each reason."""
    if not document.why_not.better:
        return
    first_of_reason = {_NUMBER.sub("#", better.reason): better for better in reversed(document.why_not.better)}
    out.print("better by the intent alone, but refused:")
    _print_indented(
        out,
        (
            f"{short(better.config)}: {figure(better.objective)} {document.objective_unit}; {_cut(better.reason)}"
            for better in reversed(first_of_reason.values())
        ),
    )


def _print_indented(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        out.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False))


def print_estimate(document: OneEstimateDocument) -> None:
    """The verdict on one configuration, then the configuration itemised."""
    from iserve.planning.verdict_text import conditions_left, estimate_lines, state_sizes

    out = console()
    work, estimate, memory = document.workload, document.estimate, document.memory
    if document.verdict is not None:
        print_verdict(document.verdict, estimate_lines(work, document.verdict, estimate, document.config))
        out.print()
    what = f" on {document.config.num_gpus} x {document.gpu}, {short(document.config)}, {workload_words(work)}"
    out.print(Text.assemble((document.model, "bold"), what))
    states = state_sizes(document.cache_sizes)
    rows = [
        ("TTFT", with_interval(estimate.ttft_s), str(estimate.ttft_s.source)),
        ("TPOT", with_interval(estimate.tpot_s), str(estimate.tpot_s.source)),
        ("E2E", with_interval(estimate.e2e_s), str(estimate.e2e_s.source)),
        (f"cost ({document.cost_unit})", figure(estimate.cost), ""),
        ("memory, fullest GPU", gib(estimate.memory_bytes_per_gpu), f"within {memory.relative_error:.0%}"),
        ("memory, all GPUs", gib(estimate.memory_bytes_total), str(memory.source)),
        ("  one layer's weights", gib(memory.layer_weight_bytes), "per GPU"),
        (f"  one layer's KV{' and states' if states else ' cache'}", gib(memory.layer_kv_bytes), "per GPU"),
        *((f"    {name}", size, "all GPUs, all layers") for name, size in states),
        ("  embedding, head", f"{gib(memory.first_stage_bytes)}, {gib(memory.last_stage_bytes)}", "per GPU"),
        ("  activations", gib(memory.activation_bytes), "per GPU"),
        ("  pipeline buffers", gib(memory.pp_buffer_bytes), "per GPU"),
        ("  runtime", gib(memory.runtime_bytes), "per GPU"),
    ]
    print_rows(("", "", ""), rows)
    for note in (*conditions_left(document.conditions, document.verdict), *document.notes):
        out.print(f"note: {note}")


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a plain aligned table, whose first column has names that are copied, whole but for long ones."""
    table, rows = Table(box=None, pad_edge=False, header_style="bold", show_header=any(header)), list(rows)
    is_short = max((len(row[0]) for row in rows), default=0) <= _MOST_UNFOLDED
    for column, name in enumerate(header):
        table.add_column(name, overflow="fold", no_wrap=is_short and not column)
    for row in rows:
        table.add_row(*row)
    console().print(table)
