"""Plans, estimates and lists as people read them in a terminal. Numbers get their units here, not before."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from iserve.cli.terminal import HarmlessConsole

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod

    from fingerprint.config import DeploymentConfig, Workload
    from fingerprint.estimates import Correction, Quantity
    from iserve.planning.document import CandidateDocument, EstimateDocument, PlanDocument, ServedDocument
    from iserve.planning.hypothetical import OneEstimateDocument

__all__ = [
    "console",
    "correction_words",
    "gib",
    "print_estimate",
    "print_plan",
    "print_rows",
    "seconds",
    "short",
    "workload_words",
]

_ROWS = 12
_REASONS = 8
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SOURCE_MARKS = {"measured": "m", "extrapolated": "x", "sharded": "t", "scaled": "s", "roofline": "r"}
_SOURCE_WORDS = {"sharded": "shard on one GPU + modelled all-reduce"}


def console(*, at_least: int = 0) -> Console:
    """Standard output; width 120 where it is not a terminal, so that logs keep whole rows.

    Lines of up to ``at_least`` characters are a narrower terminal's to wrap. What is printed is plain text: names
    of models, folders and errors may hold what rich takes for markup.
    """
    out = HarmlessConsole(highlight=False, markup=False, emoji=False)
    out.width = max(out.width if out.is_terminal else 120, at_least)
    return out


def gib(size_bytes: float) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """Seconds for people: ms below one second."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _interval(quantity: Quantity) -> str:
    return f"{seconds(quantity.value)} [{seconds(quantity.low)}, {seconds(quantity.high)}]"


def workload_words(work: Workload) -> str:
    """A workload in a sentence."""
    longest = f", requests of up to {work.longest_tokens}" if work.longest_tokens else ""
    return f"batch {work.batch}, {work.input_tokens} input and {work.output_tokens} output tokens{longest}"


def short(config: DeploymentConfig) -> str:
    """A configuration without what is usual, its engine left out."""
    parts = [f"tp={config.tp} pp={config.pp}", f"weights={config.weights}", f"kv={config.kv}"]
    if config.pruning != "none":
        parts.append(f"pruning={config.pruning}")
    return " ".join(parts)


def print_plan(document: PlanDocument, *, rows: int = _ROWS) -> None:
    """The choice, the ranked table, and why the others were refused."""
    out = console()
    work = document.workload
    out.print(
        Text.assemble(
            (document.model, "bold"),
            f" on {document.hardware}: intent ",
            (document.intent, "bold"),
            f", {workload_words(work)}",
        )
    )
    feasible = [c for c in document.candidates if c.feasible]
    refused = [c for c in document.candidates if not c.feasible]
    if feasible:
        table, width = _candidate_table(feasible[:rows], document, out.width)
        console(at_least=width).print(table)
        out.print(f"cost in {document.cost_unit} per request; {_legend(feasible[:rows])}")
        _print_indented(out, _corrections(feasible[:rows]))
        if len(feasible) > rows:
            out.print(f"... and {len(feasible) - rows} more that would work (--json lists all)")
    _print_refused(out, refused)
    _print_why_not(out, document)
    if document.chosen is not None:
        chosen = document.candidates[document.chosen]
        layers = "" if chosen.layers_per_stage is None else f", layers per stage {list(chosen.layers_per_stage)}"
        times = f", {document.replicas} replicas" if document.replicas > 1 else ""
        words = f": {short(chosen.config)} on {chosen.config.engine}{layers}{times}"
        out.print(Text.assemble(("chosen", "bold green"), words))
        _print_indented(out, chosen.conditions)
    else:
        out.print("nothing is feasible", style="bold red")
    if document.served is not None:
        _print_indented(out, _served_words(document.served))
    if document.queueing is not None:
        out.print(f"under load by {document.queueing}, the estimates' intervals included")
    for note in document.notes:
        out.print(f"note: {note}")


def _served_words(served: ServedDocument) -> list[str]:
    """Under which load, what a request gets, and how often it misses a limit."""
    gaps = "Poisson" if served.burstiness == 1 else f"gaps' deviation {served.burstiness:.3g} times their mean"
    if served.rate_levels:
        moves = [level.times for level in served.rate_levels]
        gaps += f", the rate moving between {min(moves):.2g} and {max(moves):.2g} times its mean"
    times = [("TTFT", served.ttft), ("TPOT", served.tpot), ("E2E", served.e2e)]
    told = ", ".join(f"{name} {_quantile(time.quantile_s)}" for name, time in times)
    missed = [
        f"{name} of {time.limit_s:g} s: {time.miss_probability:.2g}"
        for name, time in times
        if time.limit_s is not None and time.miss_probability is not None
    ]
    what = "keeps the SLO" if missed else "is served"
    return [
        f"at {served.rate_per_s:g} requests/s ({gaps}): utilisation {served.utilisation:.0%}; "
        f"up to {served.highest_rate_per_s:.3g} requests/s {what}",
        f"p{served.percentile:g}: {told}",
        *([f"probability of missing {', '.join(missed)}"] if missed else []),
    ]


def _quantile(value_s: float | None) -> str:
    return "without end" if value_s is None else seconds(value_s)


def _candidate_table(
    candidates: Sequence[CandidateDocument], document: PlanDocument, width: int
) -> tuple[Table, int]:
    """The table and its width, at most ``width`` if it can be.

    Never a figure cut short: what a narrow terminal has no room for is left out, the least needed first, and what
    still does not fit is the terminal's to wrap.
    """
    columns, gap = _candidate_columns(candidates, document), 2
    for spare in ("", "total", document.cost_unit, "E2E"):
        if _width(columns, gap) > width and spare != document.objective_unit:
            columns, gap = [column for column in columns if not spare or column[0] != spare], 1
    return _table(columns, gap), _width(columns, gap)


def _candidate_columns(
    candidates: Sequence[CandidateDocument], document: PlanDocument
) -> list[tuple[str, JustifyMethod, list[str]]]:
    """Name, side and cells of each column."""
    configs = [candidate.config for candidate in candidates]
    estimates = [candidate.estimate for candidate in candidates if candidate.estimate is not None]
    assert len(estimates) == len(candidates), "a feasible candidate has an estimate"
    columns: list[tuple[str, JustifyMethod, list[str]]] = [
        ("#", "left", [str(number) for number, _ in enumerate(candidates, start=1)]),
        ("tp", "left", [str(config.tp) for config in configs]),
        ("pp", "left", [str(config.pp) for config in configs]),
        ("weights", "left", [str(config.weights) for config in configs]),
        ("kv", "left", [str(config.kv) for config in configs]),
    ]
    if any(config.pruning != "none" for config in configs):
        columns.append(("pruning", "left", [str(config.pruning) for config in configs]))
    columns.append(("engine", "left", [config.engine for config in configs]))
    if document.objective_unit != document.cost_unit:
        columns.append((document.objective_unit, "right", [_figure(c.objective) for c in candidates]))
    return [
        *columns,
        (document.cost_unit, "right", [_figure(estimate.cost) for estimate in estimates]),
        ("per GPU", "right", [gib(estimate.memory_bytes_per_gpu) for estimate in estimates]),
        ("total", "right", [gib(estimate.memory_bytes_total) for estimate in estimates]),
        ("TTFT", "right", [seconds(estimate.ttft_s.value) for estimate in estimates]),
        ("TPOT", "right", [seconds(estimate.tpot_s.value) for estimate in estimates]),
        ("E2E", "right", [seconds(estimate.e2e_s.value) for estimate in estimates]),
        ("", "left", [_mark(estimate) for estimate in estimates]),
    ]


def _width(columns: Sequence[tuple[str, JustifyMethod, list[str]]], gap: int) -> int:
    return sum(max(map(len, (name, *cells))) + gap for name, _, cells in columns) - gap


def _table(columns: Sequence[tuple[str, JustifyMethod, list[str]]], gap: int) -> Table:
    """As wide as its cells, the first row in green."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, gap, 0, 0))
    for name, side, cells in columns:
        table.add_column(name, justify=side, no_wrap=True, min_width=max(map(len, (name, *cells))))
    for number, row in enumerate(zip(*(cells for _, _, cells in columns), strict=True)):
        table.add_row(*row, style=None if number else "green")
    return table


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _print_refused(out: Console, refused: Sequence[CandidateDocument]) -> None:
    if not refused:
        return
    # Reasons that differ in their numbers only, or beyond what is shown, are one line: that of the best-ranked.
    reasons = [candidate.reason or "" for candidate in refused]
    examples: dict[str, str] = {}
    kinds = Counter(_cut(_NUMBER.sub("#", reason)) for reason in reasons)
    for reason in reasons:
        examples.setdefault(_cut(_NUMBER.sub("#", reason)), reason)
    out.print(f"refused: {len(refused)} configurations")
    rows = [
        (str(count), ("such as: " if count > 1 and kind != examples[kind] else "") + _cut(examples[kind]))
        for kind, count in kinds.most_common(_REASONS)
    ]
    if len(kinds) > _REASONS:
        rows.append(("", f"... and {len(kinds) - _REASONS} other reasons (--json lists all)"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right", min_width=6)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    out.print(table)


def _cut(text: str, width: int = 150) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _legend(candidates: Iterable[CandidateDocument]) -> str:
    sources = dict.fromkeys(c.estimate.tpot_s.source for c in candidates if c.estimate is not None)
    return "times are " + ", ".join(f"{_SOURCE_MARKS[s]} {_SOURCE_WORDS.get(s, s)}" for s in sources)


def _mark(estimate: EstimateDocument) -> str:
    checked = "" if estimate.correction is None else "c" if estimate.correction.exact else "(c)"
    return _SOURCE_MARKS[estimate.tpot_s.source] + checked


def _corrections(candidates: Iterable[CandidateDocument]) -> list[str]:
    """What ``iserve verify`` changed in these estimates, each check once."""
    estimates = [c.estimate for c in candidates if c.estimate is not None and c.estimate.correction is not None]
    found = {(e.correction.config, e.correction.workload): e.correction for e in estimates if e.correction}
    carried = any(not e.correction.exact for e in estimates if e.correction)
    beside = ["(c) carried over from the nearest check, the uncorrected interval included"] if carried else []
    return [f"c corrected {correction_words(correction)}" for correction in found.values()] + beside


def correction_words(correction: Correction) -> str:
    """By which check, and by how much."""
    more = correction.memory_bytes
    return (
        f"by the check of {short(correction.config)}, {workload_words(correction.workload)}, "
        f"at {correction.measured_at[:16].replace('T', ' ')}: TTFT x{math.exp(correction.ttft_log_ratio):.3g}, "
        f"TPOT x{math.exp(correction.tpot_log_ratio):.3g}, memory {'-' if more < 0 else '+'}{gib(abs(more))} a GPU"
    )


def _print_why_not(out: Console, document: PlanDocument) -> None:
    why = document.why_not
    if why.better:
        out.print("better by the intent alone, but refused:")
        first_of_reason = {_NUMBER.sub("#", better.reason): better for better in reversed(why.better)}
        _print_indented(
            out,
            (
                f"{short(better.config)}: {_figure(better.objective)} {document.objective_unit}; "
                f"{_cut(better.reason)}"
                for better in reversed(first_of_reason.values())
            ),
        )
    if why.nearest is not None:
        out.print(f"nearest: {why.nearest.text}", overflow="fold")
    _print_indented(out, (f"relax: {advice}" for advice in why.advice))


def _print_indented(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        out.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False))


def print_estimate(document: OneEstimateDocument) -> None:
    """One configuration, itemised."""
    out = console()
    work, estimate, memory = document.workload, document.estimate, document.memory
    what = f" on {document.config.num_gpus} x {document.gpu}, {short(document.config)}, {workload_words(work)}"
    out.print(Text.assemble((document.model, "bold"), what))
    rows = [
        ("TTFT", _interval(estimate.ttft_s), str(estimate.ttft_s.source)),
        ("TPOT", _interval(estimate.tpot_s), str(estimate.tpot_s.source)),
        ("E2E", _interval(estimate.e2e_s), str(estimate.e2e_s.source)),
        (f"cost ({document.cost_unit})", _figure(estimate.cost), ""),
        ("memory, fullest GPU", gib(estimate.memory_bytes_per_gpu), f"within {memory.relative_error:.0%}"),
        ("memory, all GPUs", gib(estimate.memory_bytes_total), str(memory.source)),
        ("  one layer's weights", gib(memory.layer_weight_bytes), "per GPU"),
        ("  one layer's KV cache", gib(memory.layer_kv_bytes), "per GPU"),
        ("  embedding, head", f"{gib(memory.first_stage_bytes)}, {gib(memory.last_stage_bytes)}", "per GPU"),
        ("  activations", gib(memory.activation_bytes), "per GPU"),
        ("  pipeline buffers", gib(memory.pp_buffer_bytes), "per GPU"),
        ("  runtime", gib(memory.runtime_bytes), "per GPU"),
    ]
    print_rows(("", "", ""), rows)
    out.print(f"runs on {document.config.engine}" if document.runnable else f"not runnable: {document.reason}")
    _print_indented(out, document.conditions)


def print_rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain aligned table."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(header))
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)
