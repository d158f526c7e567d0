"""Decision regret: what iServe picks, what a rule of thumb and AIConfigurator pick, and what would have been best.

    ISERVE_REFERENCE_DATA=... PYTHONPATH=. python tests/bench/decisions.py --json FILE \
        [--aiconfigurator PYTHON] [--recorded FOLDER] [--keep FOLDER] [--tables]

``--aiconfigurator`` is the interpreter of an environment with aiconfigurator 0.12.0 (no dependency of iServe);
without it, its column and its package's own grid are left out. ``--recorded`` adds what ``accuracy_measure.py``
recorded of whole models. ``--keep`` keeps the held-out constants and AIConfigurator's answers, which take most of
the time, for another run over the same cells; start with an empty folder when a table, a fit or a grid changes.
iServe decides by the roofline estimator with constants fitted without the cell's model, and by fingerprints where
they were measured. Prints grids by family; each table's own figures are in the JSON. Deterministic; CPU only.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants, RooflineEstimator
from iserve.planning.pipeline import FitsOn, PlanOptions, hypothetical_hardware
from planner.plan import NoRoom
from tests.bench.accuracy import load
from tests.bench.aiconfigurator_answers import Aiconfigurator, ask_aiconfigurator, sample_path
from tests.bench.calibrate_roofline import calibrate
from tests.bench.decision_grids import (
    NOT_ASKED,
    bench_cells,
    format_cells,
    sample_cells,
    splitwise_cells,
    trtllm_cells,
)
from tests.bench.decision_own import own_cells
from tests.bench.decision_rules import (
    NOISE,
    Cell,
    Chooser,
    Metric,
    PlannerChooser,
    Summary,
    Verdict,
    Wish,
    judge,
    other_end,
    predicted_chooser,
    roomy_rule,
    rule,
    summarize,
    wishes,
    workloads,
)
from tests.bench.kept import write_kept
from tests.bench.rank import machine
from tests.bench.roofline_tables import SHAPES, Tables

ALL = "all"


class Name(StrEnum):
    """The choosers, in the order of the columns."""

    ISERVE = "iServe"
    AT_VALUE = "iServe, limits at the value"
    RULE = "rule"
    ROOMY = "rule with room"
    OTHER = "rule, other end"
    AIC = "AIConfigurator"


def held_out(tables: Tables, cells: Iterable[Cell], kept: Path) -> dict[str, RooflineConstants]:
    """Constants per model of ``cells``, fitted without any row of that model; the published ones for a model that
    no fitted row is of. Read from ``kept`` where that exists, else written there."""
    if kept.exists():
        return from_json(kept.read_bytes(), dict[str, RooflineConstants], what=str(kept))
    found = {}
    for model in sorted({cell.model for cell in cells if not cell.estimates}):
        found[model] = CALIBRATED
        if model in SHAPES.values():
            print(f"fitting without {model}", file=sys.stderr)
            with redirect_stdout(io.StringIO()):
                found[model], _ = calibrate(tables, leave_out=model)
    kept.write_bytes(to_json(found, indent=2))
    return found


class Roofline:
    """Predictions of iServe for a configuration in a cell, with constants that never saw the cell's model."""

    def __init__(self, constants: dict[str, RooflineConstants]) -> None:
        self._constants = constants
        self._estimators: dict[tuple[str, str], RooflineEstimator] = {}

    def __call__(self, cell: Cell, config: DeploymentConfig) -> Estimate | None:
        if cell.estimates:
            return next(found for found in cell.estimates if found.config == config)
        key = (cell.model, cell.gpu.name)
        if key not in self._estimators:
            constants = self._constants[cell.model]
            self._estimators[key] = RooflineEstimator(cell.spec, cell.gpu, constants=constants)
        if not cell.saturated:
            return self._estimators[key].estimate(config, cell.workload)
        return _largest_that_fits(cell, config, self._estimators[key])


def _largest_that_fits(cell: Cell, config: DeploymentConfig, estimator: RooflineEstimator) -> Estimate | None:
    """The estimate at the largest batch that memory holds; None when it does not even hold one request."""
    fits = FitsOn(hypothetical_hardware(cell.gpu, config.num_gpus), PlanOptions())
    for workload in reversed(workloads(cell)):
        found = estimator.estimate(config, workload)
        if not isinstance(fits(found), NoRoom):
            return found
    return None


# --- the comparison


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Question to one cell, and every chooser's pick. A chooser that has no say is absent."""

    cell: Cell
    wish: Wish
    cause: str | None  # why iServe's pick is not within the noise of the best; None where it is
    picks: dict[Name, DeploymentConfig | None]
    verdicts: dict[Name, Verdict]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Decisions of one table, of a family of tables or of all, under one intent.

    ``supported``: of these, the ones that AIConfigurator has a say in.
    """

    table: str
    intent: str
    supported: bool
    choosers: dict[Name, Summary]
    causes: dict[str, int]  # of what iServe did not get within the noise of the best


def decide(
    cells: Iterable[Cell], planner: PlannerChooser, choosers: dict[Name, Chooser], aic: Aiconfigurator | None
) -> list[Decision]:
    """Every question that the cells can answer, put to every chooser; ``planner`` is the one called iServe."""
    found = []
    for cell in cells:
        knows = aic is not None and aic.knows(cell)
        for wish in wishes(cell):
            own = {name: choose(cell, wish) for name, choose in choosers.items() if _asked(name, wish, knows)}
            verdicts = {name: judge(cell, wish, pick) for name, pick in own.items()}
            regret = verdicts[Name.ISERVE].regret
            cause = planner.cause(cell, wish) if regret is None or regret > NOISE else None
            found.append(Decision(cell=cell, wish=wish, cause=cause, picks=own, verdicts=verdicts))
    return found


def _asked(name: Name, wish: Wish, aic_knows: bool) -> bool:
    """Return whether a chooser has a say in ``wish``, and one that differs from another's."""
    match name:
        case Name.AIC:
            return aic_knows and wish.metric not in (Metric.ENERGY, Metric.MEMORY, Metric.MEMORY_SECONDS)
        case Name.OTHER:
            return wish.limited is not None
        case Name.ROOMY:
            return wish.limited is None
        case Name.AT_VALUE:
            return wish.limited is not None
    return True


def grouped(decisions: Sequence[Decision]) -> list[Group]:
    """Per table and intent, then over each family of tables (named before the comma), then over all."""
    buckets: dict[tuple[str, str, bool], list[Decision]] = defaultdict(list)
    for decision in decisions:
        for table in dict.fromkeys((decision.cell.table, family(decision.cell.table), ALL)):
            buckets[table, decision.wish.name, False].append(decision)
            if Name.AIC in decision.verdicts:
                buckets[table, decision.wish.name, True].append(decision)
    groups = []
    for (table, intent, supported), own in sorted(buckets.items(), key=lambda item: item[0][0] == ALL):
        names = [name for name in Name if all(name in d.verdicts for d in own)]
        if not supported:
            names = [name for name in names if name != Name.AIC]
        choosers = {name: summarize([d.verdicts[name] for d in own]) for name in names}
        causes = Counter(d.cause for d in own if d.cause is not None)
        groups.append(Group(table=table, intent=intent, supported=supported, choosers=choosers, causes=causes))
    return groups


@dataclass(frozen=True, kw_only=True)
class Bias:
    """Median of predicted over measured, over the alternatives of one table: iServe's value, the upper end of its
    interval, and AIConfigurator where it has a figure."""

    table: str
    metric: Metric
    tp: int | None  # None: all of them
    alternatives: int
    iserve: float | None
    iserve_high: float | None  # None: an interval of throughput is not given
    aiconfigurator: float | None


def biases(cells: Iterable[Cell], roofline: Roofline, aic: Aiconfigurator | None) -> list[Bias]:
    """Return how far the predictions were that the decisions rest on."""
    ratios: dict[tuple[str, Metric, int | None], list[tuple[float, float, float]]] = defaultdict(list)
    for cell in cells:
        for truth in cell.alternatives:
            estimate = roofline(cell, truth.config)
            other = None if aic is None else aic(cell, truth.config)
            for metric in (Metric.E2E, Metric.TTFT, Metric.TPOT, Metric.TOKENS):
                measured = truth.value(metric, cell.workload)
                if estimate is None or measured is None:
                    continue
                own, high = _predicted(estimate, metric)
                theirs = math.nan if other is None else other.value(metric, cell.workload)
                for tp in (None, truth.config.tp):
                    row = (own / measured, high / measured, theirs / measured)
                    ratios[cell.table, metric, tp].append(row)

    def middle(column: Iterable[float]) -> float | None:
        known = [value for value in column if not math.isnan(value)]
        return round(statistics.median(known), 3) if known else None

    found = []
    for (table, metric, tp), rows in ratios.items():
        own, high, theirs = (middle(column) for column in zip(*rows, strict=True))
        found.append(
            Bias(
                table=table,
                metric=metric,
                tp=tp,
                alternatives=len(rows),
                iserve=own,
                iserve_high=high,
                aiconfigurator=theirs,
            )
        )
    return found


def _predicted(estimate: Estimate, metric: Metric) -> tuple[float, float]:
    """(value, upper end)."""
    if metric is Metric.TOKENS:
        work = estimate.workload
        return work.batch * work.output_tokens / estimate.e2e_s.value, math.nan
    found = {Metric.E2E: estimate.e2e_s, Metric.TTFT: estimate.ttft_s, Metric.TPOT: estimate.tpot_s}[metric]
    return found.value, found.high


def bias_table(found: Iterable[Bias]) -> str:
    lines = [
        "| table | figure | alternatives | iServe | upper end | AIConfigurator |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for b in (one for one in found if one.tp is None):
        ratios = ["" if v is None else f"{v:.2f}" for v in (b.iserve, b.iserve_high, b.aiconfigurator)]
        lines.append(f"| {b.table} | {b.metric} | {b.alternatives} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def family(table: str) -> str:
    return table.partition(",")[0]


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def as_cell(s: Summary) -> str:
    """Shares of best and near-best picks; median, mean, p90 and worst regret; refusals and misses where any."""
    text = f"{s.best:.0%} ({s.near_best:.0%})"
    if s.mean is not None:
        text += "; " + " / ".join(f"{100 * value:.1f}" for value in (s.median, s.mean, s.p90, s.worst))
    return text + "".join(f"; {n} {what}" for n, what in ((s.refused, "refused"), (s.missed, "missed")) if n)


def as_markdown(groups: Sequence[Group]) -> str:
    """Return one line per table and intent; one column per chooser that has a say in any of ``groups``."""
    present = [name for name in Name if any(name in group.choosers for group in groups)]
    lines = [f"| table | intent | decisions | {' | '.join(present)} |", "|---|---|--:|" + "---|" * len(present)]
    for group in groups:
        cells = [as_cell(group.choosers[name]) if name in group.choosers else "" for name in present]
        count = next(iter(group.choosers.values())).count
        lines.append(f"| {group.table} | {group.intent} | {count} | {' | '.join(cells)} |")
    return "\n".join(lines)


def causes(groups: Sequence[Group]) -> str:
    """Return why iServe's picks were not within the noise of the best."""
    lines = ["| table | intent | decisions | why |", "|---|---|--:|---|"]
    for group in groups:
        lines += [f"| {group.table} | {group.intent} | {n} | {why} |" for why, n in sorted(group.causes.items())]
    return "\n".join(lines)


def report(groups: Sequence[Group]) -> str:
    """Plain intents and limits apart, first over all cells, then over those that AIConfigurator has a say in."""
    texts = []
    for supported, where in ((False, "all cells"), (True, "cells that AIConfigurator has a say in")):
        for limited, what in ((False, "Intents without a limit"), (True, "Intents with a limit")):
            own = [g for g in groups if g.supported is supported and ("slo" in g.intent) is limited]
            texts.append(f"{what}, {where}\n\n{as_markdown(own)}")
    everything = [group for group in groups if not group.supported]
    texts.append(f"Why iServe was not within {NOISE:.0%} of the best, all cells\n\n{causes(everything)}")
    return "\n\n".join(texts)


def write_details(path: Path, decisions: Iterable[Decision]) -> None:
    """Every decision as CSV: what was measured, what each chooser picked, and the regret."""
    titles = ("table", "model", "workload", "intent", "limit", "measured", "chooser", "pick", "outcome", "regret")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(titles)
        for d in decisions:
            work, wish = d.cell.workload, d.wish
            sizes = f"{work.batch}x{work.input_tokens}/{work.output_tokens}"
            truth = "; ".join(f"{short(a.config)}={a.value(wish.metric, work):.4g}" for a in d.cell.alternatives)
            for name, verdict in d.verdicts.items():
                pick = d.picks[name]
                made = ("" if pick is None else short(pick), verdict.outcome, percent(verdict.regret))
                about = (d.cell.table, d.cell.model, sizes, wish.name, f"{wish.limit:.4g}", truth)
                writer.writerow([*about, name, *made])


def short(config: DeploymentConfig) -> str:
    return f"tp{config.tp}pp{config.pp}/{config.weights}/{config.kv}"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--aiconfigurator", type=Path, metavar="PYTHON")
    parser.add_argument("--recorded", type=Path, metavar="FOLDER")
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
    parser.add_argument("--tables", action="store_true", help="print every table's own figures too")
    parser.add_argument("--details", type=Path, help="every decision, as CSV")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    options = parse(arguments)
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        sys.exit("set ISERVE_REFERENCE_DATA to the folder that holds reference/")
    with ExitStack() as stack:
        keep = options.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keep.mkdir(parents=True, exist_ok=True)
        cells, decisions, found, versions = compare(options, Path(folder) / "reference", keep)
    groups = grouped(decisions)
    print(f"Predicted over measured, median\n\n{bias_table(found)}\n")
    print(report([group for group in groups if options.tables or "," not in group.table]))
    if options.details:
        write_details(options.details, decisions)
    if options.json:
        head = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions,
            "not_asked": NOT_ASKED,
            "cells": len(cells),
        }
        write_kept(options.json, written(head, {"biases": found, "groups": groups}))


def written(head: dict[str, object], lists: dict[str, Sequence[object]]) -> str:
    """JSON with one element of the lists per line."""
    text = json.dumps(head, indent=1)[:-2]
    for name, values in lists.items():
        lines = ",\n  ".join(to_json(value).decode() for value in values)
        text += f',\n "{name}": [\n  {lines}\n ]'
    return text + "\n}\n"


def compare(
    options: argparse.Namespace, reference: Path, keep: Path
) -> tuple[list[Cell], list[Decision], list[Bias], dict[str, str]]:
    """All cells, all decisions on them, how far the predictions were, and AIConfigurator's versions."""
    configs_path = reference / "model-configs.json"
    tables, configs = Tables(reference), json.loads(configs_path.read_text())
    cells = bench_cells(tables) + format_cells(tables) + splitwise_cells(tables) + trtllm_cells(tables, configs)
    if options.recorded:
        cells += own_cells(load(options.recorded), configs)
    aic, versions = None, {}
    if options.aiconfigurator:
        cells += sample_cells(sample_path(options.aiconfigurator), configs)
        aic, versions = ask_aiconfigurator(options.aiconfigurator, cells, configs_path, keep)
    roofline = Roofline(held_out(tables, cells, keep / "constants.json"))
    planner = PlannerChooser(roofline)
    choosers: dict[Name, Chooser] = {
        Name.ISERVE: planner,
        Name.AT_VALUE: PlannerChooser(roofline, at_value=True),
        Name.RULE: rule,
        Name.ROOMY: roomy_rule,
        Name.OTHER: other_end,
    }
    if aic is not None:
        choosers[Name.AIC] = predicted_chooser(aic)
    return cells, decide(cells, planner, choosers, aic), biases(cells, roofline, aic), versions


if __name__ == "__main__":
    main(sys.argv[1:])
