"""Decision regret: what iServe picks, what a rule of thumb and AIConfigurator pick, and what would have been best.

    ISERVE_REFERENCE_DATA=... PYTHONPATH=. python tests/bench/decisions.py --json FILE \
        [--aiconfigurator PYTHON] [--grid FILE ...] [--keep FOLDER] [--details FILE]

``--aiconfigurator`` is the interpreter of an environment with aiconfigurator 0.12.0 (no dependency of iServe);
without it, its column and its package's own grid are left out. ``--grid`` adds measurements of this project
(``decision_grids.Grid``). ``--keep`` keeps the held-out constants and AIConfigurator's answers, which take most of
the time, for another run over the same cells; start with an empty folder when a table, a fit or a grid changes.
iServe decides by the roofline estimator with constants fitted without the cell's model. Deterministic; CPU only.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants, RooflineEstimator
from iserve.planning import FitsOn, PlanOptions, hypothetical_hardware
from planner.intent import IntentKind
from planner.plan import NoRoom
from tests.bench.calibrate_roofline import calibrate
from tests.bench.decision_grids import (
    NOT_ASKED,
    bench_cells,
    format_cells,
    own_cells,
    sample_cells,
    splitwise_cells,
    trtllm_cells,
)
from tests.bench.decision_rules import (
    NOISE,
    Cell,
    Chooser,
    Measured,
    PlannerChooser,
    Summary,
    Verdict,
    Wish,
    judge,
    other_end,
    predicted_chooser,
    rule,
    summarize,
    wishes,
)
from tests.bench.rank import machine
from tests.bench.roofline_tables import SHAPES, Tables

AIC_SCRIPT = Path(__file__).with_name("aiconfigurator_static.py")
AIC_SYSTEMS = {
    "a100-40gb-sxm": "a100_sxm",  # the same chip; what fits is judged by the card's own memory
    "a100-80gb-sxm": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200-sxm": "h200_sxm",
    "b200-sxm": "b200_sxm",
    "l40s": "l40s",
}
AIC_BACKENDS = {"TensorRT-LLM": "trtllm", "vLLM": "vllm", "SGLang": "sglang", "Splitwise": "vllm"}
SATURATED_BATCHES = tuple(sorted({n for k in range(12) for n in (2**k, 3 * 2**k // 2) if n <= 2048}))
ISERVE, AT_VALUE, RULE, OTHER, AIC = (
    "iServe",
    "iServe, limits at the value",
    "rule",
    "rule, other end",
    "AIConfigurator",
)


def held_out(tables: Tables, cells: Iterable[Cell], kept: Path) -> dict[str, RooflineConstants]:
    """Constants per model of ``cells``, fitted without any row of that model; the published ones for a model that
    no fitted row is of. Read from ``kept`` where that exists, else written there."""
    if kept.exists():
        return from_json(kept.read_bytes(), dict[str, RooflineConstants], what=str(kept))
    found = {}
    for model in sorted({cell.model for cell in cells}):
        found[model] = CALIBRATED
        if model in SHAPES.values():
            print(f"fitting without {model}", file=sys.stderr)
            with redirect_stdout(io.StringIO()):
                found[model], _ = calibrate(tables, leave_out=model)
    kept.write_bytes(to_json(found, indent=2))
    return found


class Roofline:
    """What iServe predicts of a configuration in a cell, with constants that never saw the cell's model."""

    def __init__(self, constants: dict[str, RooflineConstants]) -> None:
        self._constants = constants
        self._estimators: dict[tuple[str, str], RooflineEstimator] = {}

    def __call__(self, cell: Cell, config: DeploymentConfig) -> Estimate | None:
        if cell.estimates is not None:
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
    for batch in reversed(SATURATED_BATCHES):
        found = estimator.estimate(config, replace(cell.workload, batch=batch))
        if not isinstance(fits(found), NoRoom):
            return found
    return None


# --- AIConfigurator

AicKey = tuple[str, str, str, DeploymentConfig, Workload]  # model, system, backend


def _aic_key(cell: Cell, config: DeploymentConfig, workload: Workload) -> AicKey | None:
    system, backend = AIC_SYSTEMS.get(cell.gpu.name), AIC_BACKENDS.get(cell.engine)
    return None if system is None or backend is None else (cell.model, system, backend, config, workload)


def _workloads(cell: Cell) -> list[Workload]:
    return [replace(cell.workload, batch=b) for b in SATURATED_BATCHES] if cell.saturated else [cell.workload]


class Aiconfigurator:
    """Its answers for every alternative of the cells, asked in one process of its own environment."""

    def __init__(self, answers: dict[tuple[str, AicKey], dict]) -> None:
        self._answers = answers

    def knows(self, cell: Cell) -> bool:
        """Whether it predicts at least one of the alternatives."""
        return any(self._seen(cell, a.config) for a in cell.alternatives)

    def __call__(self, cell: Cell, config: DeploymentConfig) -> Measured | None:
        """Its figures as if measured; None where it has none or, by its own memory figures, it does not fit."""
        room = cell.gpu.memory_bytes / 2**30
        fitting = [(w, a) for w, a in self._seen(cell, config) if a["memory_gib"]["total"] <= room]
        if not fitting:
            return None
        if cell.saturated:
            best = max(answer["output_tokens_per_s"] for _, answer in fitting)
            return Measured(config=config, tokens_per_s=best)
        workload, answer = fitting[0]
        e2e_s = answer["ttft_s"] + (workload.output_tokens - 1) * answer["tpot_s"]
        return Measured(config=config, e2e_s=e2e_s, ttft_s=answer["ttft_s"], tpot_s=answer["tpot_s"])

    def _seen(self, cell: Cell, config: DeploymentConfig) -> list[tuple[Workload, dict]]:
        found = []
        for workload in _workloads(cell):
            key = _aic_key(cell, config, workload)
            answer = None if key is None else self._answers.get((_mode(cell), key))
            if answer is not None and "reason" not in answer:
                found.append((workload, answer))
        return found


def _mode(cell: Cell) -> str:
    return "agg" if cell.saturated or cell.served else "static"


def ask_aiconfigurator(
    python: Path, cells: Sequence[Cell], configs: Path, keep: Path
) -> tuple[Aiconfigurator, dict[str, str]]:
    """Every alternative of ``cells`` put to the AIConfigurator of ``python``; and which versions answered.

    Questions and answers lie in ``keep``; answers already there are taken where the questions are the same.
    """
    asked = {
        (_mode(cell), key): None
        for cell in cells
        for alternative in cell.alternatives
        for workload in _workloads(cell)
        if (key := _aic_key(cell, alternative.config, workload)) is not None
    }
    points = [_point(mode, key) for mode, key in asked]
    questions, answers = keep / "points.json", keep / "answers.json"
    text = json.dumps(points)
    if not (answers.exists() and questions.exists() and questions.read_text() == text):
        questions.write_text(text)
        answers.unlink(missing_ok=True)
        command = [python, AIC_SCRIPT, "--configs", configs, "--points", questions, "--json", answers]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    document = json.loads(answers.read_text())
    versions = {"aiconfigurator": document["aiconfigurator"]}
    for answer in document["answers"]:
        point = answer["point"]
        versions[f"{point['backend']} on {point['system']}"] = answer.get("version", "no data")
    return Aiconfigurator(dict(zip(asked, document["answers"], strict=True))), versions


def _point(mode: str, key: AicKey) -> dict[str, object]:
    model, system, backend, config, workload = key
    point = {"model": model, "system": system, "backend": backend, "mode": mode, "tp": config.tp, "pp": config.pp}
    return point | {"weights": config.weights, "kv": config.kv} | asdict(workload)


def sample_path(python: Path) -> Path:
    """The measured points that come with AIConfigurator's package."""
    code = "import aiconfigurator_core as a, pathlib; print(pathlib.Path(a.__file__).parent)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "systems" / "silicon_sample.csv"


# --- the comparison


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One question to one cell, and what every chooser made of it. A chooser that has no say is absent."""

    cell: Cell
    wish: Wish
    cause: str | None  # why iServe's pick is not within the noise of the best; None where it is
    picks: dict[str, DeploymentConfig | None]
    verdicts: dict[str, Verdict]


@dataclass(frozen=True, kw_only=True)
class Group:
    """Decisions of one table (or all) under one intent; ``supported``: those that AIConfigurator has a say in."""

    table: str
    intent: str
    supported: bool
    choosers: dict[str, Summary]
    causes: dict[str, int]  # of what iServe did not get within the noise of the best


def decide(
    cells: Iterable[Cell], planner: PlannerChooser, choosers: dict[str, Chooser], aic: Aiconfigurator | None
) -> list[Decision]:
    """Every question that the cells can answer, put to every chooser; ``planner`` is the one called iServe."""
    found = []
    for cell in cells:
        knows = aic is not None and aic.knows(cell)
        for wish in wishes(cell):
            plain = wish.limited is None
            own = {
                name: choose(cell, wish)
                for name, choose in choosers.items()
                if not (plain and name == OTHER)
                and not (wish.kind is not IntentKind.LATENCY_SLO and name == AT_VALUE)
                and (name != AIC or _answerable(knows, wish))
            }
            verdicts = {name: judge(cell, wish, pick) for name, pick in own.items()}
            regret = verdicts[ISERVE].regret
            cause = planner.cause(cell, wish) if regret is None or regret > NOISE else None
            found.append(Decision(cell=cell, wish=wish, cause=cause, picks=own, verdicts=verdicts))
    return found


def _answerable(knows: bool, wish: Wish) -> bool:
    return knows and wish.metric not in ("energy", "GiB", "GiB*s")


def grouped(decisions: Sequence[Decision]) -> list[Group]:
    """Per table and intent, then over all tables."""
    buckets: dict[tuple[str, str, bool], list[Decision]] = defaultdict(list)
    for decision in decisions:
        for table in (decision.cell.table, "all tables"):
            buckets[table, decision.wish.name, False].append(decision)
            if AIC in decision.verdicts:
                buckets[table, decision.wish.name, True].append(decision)
    groups = []
    for (table, intent, supported), own in sorted(buckets.items(), key=lambda item: item[0][0] == "all tables"):
        names = [name for name in (ISERVE, AT_VALUE, RULE, OTHER, AIC) if all(name in d.verdicts for d in own)]
        if not supported:
            names = [name for name in names if name != AIC]
        choosers = {name: summarize([d.verdicts[name] for d in own]) for name in names}
        causes = Counter(d.cause for d in own if d.cause is not None)
        groups.append(Group(table=table, intent=intent, supported=supported, choosers=choosers, causes=causes))
    return groups


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def as_markdown(groups: Iterable[Group]) -> str:
    """One line per table, intent and chooser."""
    titles = ("table", "intent", "chooser", "decisions", "refused", "missed", "best", "within 2%")
    titles += ("median", "mean", "p90", "worst")
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for group in groups:
        for name, s in group.choosers.items():
            shares = [f"{s.best:.0%}", f"{s.near_best:.0%}"]
            regrets = [percent(value) for value in (s.median, s.mean, s.p90, s.worst)]
            columns = [group.table, group.intent, name, s.count, s.refused, s.missed, *shares, *regrets]
            lines.append("| " + " | ".join(map(str, columns)) + " |")
    return "\n".join(lines)


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
    parser.add_argument("--grid", type=Path, action="append", default=[])
    parser.add_argument("--keep", type=Path, metavar="FOLDER")
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
        cells, decisions, versions = compare(options, Path(folder) / "reference", keep)
    groups = grouped(decisions)
    for supported, title in ((False, "All cells"), (True, "Cells that AIConfigurator has a say in")):
        print(f"\n{title}\n\n{as_markdown(group for group in groups if group.supported is supported)}")
    if options.details:
        write_details(options.details, decisions)
    if options.json:
        report = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine(),
            "versions": versions,
            "not_asked": NOT_ASKED,
            "cells": len(cells),
            "groups": groups,
        }
        options.json.write_bytes(to_json(report, indent=1))


def compare(
    options: argparse.Namespace, reference: Path, keep: Path
) -> tuple[list[Cell], list[Decision], dict[str, str]]:
    """All cells, all decisions on them, and the versions of AIConfigurator that had a say."""
    configs_path = reference / "model-configs.json"
    tables, configs = Tables(reference), json.loads(configs_path.read_text())
    cells = bench_cells(tables) + format_cells(tables) + splitwise_cells(tables) + trtllm_cells(tables, configs)
    cells += [cell for path in options.grid for cell in own_cells(path, configs)]
    aic, versions = None, {}
    if options.aiconfigurator:
        cells += sample_cells(sample_path(options.aiconfigurator), configs)
        aic, versions = ask_aiconfigurator(options.aiconfigurator, cells, configs_path, keep)
    roofline = Roofline(held_out(tables, cells, keep / "constants.json"))
    planner = PlannerChooser(roofline)
    choosers: dict[str, Chooser] = {
        ISERVE: planner,
        AT_VALUE: PlannerChooser(roofline, at_value=True),
        RULE: rule,
        OTHER: other_end,
    }
    if aic is not None:
        choosers[AIC] = predicted_chooser(aic)
    return cells, decide(cells, planner, choosers, aic), versions


if __name__ == "__main__":
    main(sys.argv[1:])
