"""Plans, estimates and lists as people read them in a terminal. Numbers get their units here, not before."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from fingerprint.config import DeploymentConfig, Workload
    from fingerprint.estimates import Quantity
    from iserve.plan_document import CandidateDocument, PlanDocument
    from iserve.plan_service import OneEstimateDocument

__all__ = ["console", "gib", "print_estimate", "print_plan", "print_rows", "seconds"]

_ROWS = 12
_REASONS = 8
_NUMBER = re.compile(r"\d+(\.\d+)?(e[+-]?\d+)?")
_SOURCE_MARKS = {"measured": "m", "extrapolated": "x", "scaled": "s", "roofline": "r"}


def console() -> Console:
    """Standard output; width 120 where it is not a terminal, so that logs keep whole rows.

    What is printed is plain text: names of models, folders and errors may hold what rich takes for markup.
    """
    out = Console(highlight=False, markup=False, emoji=False)
    return out if out.is_terminal else Console(highlight=False, markup=False, emoji=False, width=120)


def gib(size_bytes: float) -> str:
    """Bytes for people: MiB below one GiB."""
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"


def seconds(value: float) -> str:
    """Seconds for people: ms below one second."""
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _interval(quantity: Quantity) -> str:
    return f"{seconds(quantity.value)} [{seconds(quantity.low)}, {seconds(quantity.high)}]"


def _workload(work: Workload) -> str:
    return f"batch {work.batch}, {work.input_tokens} input and {work.output_tokens} output tokens"


def _short(config: DeploymentConfig) -> str:
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
            f", {_workload(work)}",
        )
    )
    feasible = [c for c in document.candidates if c.feasible]
    refused = [c for c in document.candidates if not c.feasible]
    if feasible:
        out.print(_candidate_table(feasible[:rows], document))
        out.print(f"cost in {document.cost_unit} per request; {_legend(feasible[:rows])}")
        if len(feasible) > rows:
            out.print(f"... and {len(feasible) - rows} more that would work (--json lists all)")
    _print_refused(out, refused)
    _print_why_not(out, document)
    if document.chosen is not None:
        chosen = document.candidates[document.chosen]
        layers = "" if chosen.layers_per_stage is None else f", layers per stage {list(chosen.layers_per_stage)}"
        words = f": {_short(chosen.config)} on {chosen.config.engine}{layers}"
        out.print(Text.assemble(("chosen", "bold green"), words))
        _print_indented(out, chosen.conditions)
    else:
        out.print("nothing is feasible", style="bold red")
    if document.queueing is not None:
        out.print(f"waiting time by {document.queueing}")


def _candidate_table(candidates: Sequence[CandidateDocument], document: PlanDocument) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    pruned = any(candidate.config.pruning != "none" for candidate in candidates)
    objective_is_cost = document.objective_unit == document.cost_unit
    for name in ("#", "tp", "pp", "weights", "kv", *(["pruning"] if pruned else []), "engine"):
        table.add_column(name, no_wrap=True)
    costs = [] if objective_is_cost else [document.objective_unit]
    for name in (*costs, document.cost_unit, "per GPU", "total", "TTFT", "TPOT", "E2E"):
        table.add_column(name, justify="right", no_wrap=True)
    for number, candidate in enumerate(candidates, start=1):
        estimate, config = candidate.estimate, candidate.config
        assert estimate is not None, "a feasible candidate has an estimate"
        cells = [str(number), str(config.tp), str(config.pp), str(config.weights), str(config.kv)]
        if pruned:
            cells.append(str(config.pruning))
        cells.append(config.engine)
        if not objective_is_cost:
            cells.append(_figure(candidate.objective))
        cells += [
            _figure(estimate.cost),
            gib(estimate.memory_bytes_per_gpu),
            gib(estimate.memory_bytes_total),
            seconds(estimate.ttft_s.value),
            seconds(estimate.tpot_s.value),
            f"{seconds(estimate.e2e_s.value)} {_SOURCE_MARKS[estimate.tpot_s.source]}",
        ]
        table.add_row(*cells, style="green" if number == 1 else None)
    return table


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"


def _print_refused(out: Console, refused: Sequence[CandidateDocument]) -> None:
    if not refused:
        return
    # Reasons that differ in their numbers only are one line, with the numbers of the best-ranked.
    examples: dict[str, str] = {}
    kinds = Counter(_NUMBER.sub("#", candidate.reason or "") for candidate in refused)
    for candidate in refused:
        examples.setdefault(_NUMBER.sub("#", candidate.reason or ""), candidate.reason or "")
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
    return "times are " + ", ".join(f"{_SOURCE_MARKS[source]} {source}" for source in sources)


def _print_why_not(out: Console, document: PlanDocument) -> None:
    why = document.why_not
    if why.better:
        out.print("better by the intent alone, but refused:")
        first_of_reason = {_NUMBER.sub("#", better.reason): better for better in reversed(why.better)}
        _print_indented(
            out,
            (
                f"{_short(better.config)}: {_figure(better.objective)} {document.objective_unit}; "
                f"{_cut(better.reason)}"
                for better in reversed(first_of_reason.values())
            ),
        )
    if why.nearest is not None:
        out.print(f"nearest: {why.nearest.text}", overflow="fold")
    _print_indented(out, (f"relax: {relaxation.text}" for relaxation in why.relax))


def _print_indented(out: Console, lines: Iterable[str]) -> None:
    for line in lines:
        out.print(Padding(Text(line, overflow="fold"), (0, 0, 0, 2), expand=False))


def print_estimate(document: OneEstimateDocument) -> None:
    """One configuration, itemised."""
    out = console()
    work, estimate, memory = document.workload, document.estimate, document.memory
    what = f" on {document.config.num_gpus} x {document.gpu}, {_short(document.config)}, {_workload(work)}"
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
        table.add_column(name, no_wrap=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)
