"""Profiling strategies compared on CPU models: how near each is, and what it costs.

Run: ``python -m tests.bench.strategies [--model demo|llama|both] [--json FILE] [--seconds S] [--repeats N]``.

The paper's Figure 9 on the models of ``full_model_accuracy``, each through the real worker, with this machine's
cores as two devices. Three recordings of a model, each in launches and loads of its own: its fingerprints; the
whole model under every configuration, which is the truth; a profile of the whole model, of which M1 and L1 are
made. So no strategy is judged on readings that it was made of. The truth is the second: neither profile is nearer.

Both profiles follow the default plan of a deployment, with at most N runs of a point, as many as the truth has.
A strategy is given the degrees that it needs and nothing else, and costs what those took: launches, loads, runs,
and the memory of all ranks meanwhile. Memory needs every load and every run once, times need all of them. Beside
each cost is the part that it is of measuring the whole grid, for the same quantity by the same rule.
A ``--seconds`` that ends a profile early makes its strategies cheaper and reach less; the notes say so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from daemon.server import find_devices
from fingerprint.codec import to_json
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Quantity
from fingerprint.estimators.registry import Predicts, estimator_class, estimator_names
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS
from fingerprint.families import load_spec
from fingerprint.measurements import MachineInfo, Profile
from fingerprint.model_spec import ModelSpec
from iserve.report.accuracy import AccuracyRow
from tests.bench.accuracy import on_the_wall
from tests.bench.full_model_accuracy import compared, predicted_memory
from tests.bench.profiling_cost import Activity, Cost, RecordingTarget, cost_of, each_once
from tests.bench.whole_models import (
    Case,
    Options,
    Whole,
    cases,
    measure_whole,
    note,
    plan_of,
    take_profile,
    worker_target,
)

Degree = tuple[int, int]  # tp, pp

TITLES = {
    "memory_bytes_per_gpu": "memory",
    "engine_bytes_per_gpu": "memory, the engine's count",
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
}
BYTES, TIMES = ("memory_bytes_per_gpu", "engine_bytes_per_gpu"), ("ttft_s", "tpot_s")


def three_degrees(degree: Degree) -> bool:
    """Return whether a degree is one that the paper's equations of memory are solved from."""
    return degree in {(1, 1), (2, 1), (1, 2)}


def every_degree(degree: Degree) -> bool:
    return True


def one_stage(degree: Degree) -> bool:
    return degree[1] == 1


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """Row of the registry, and what it needs."""

    name: str
    predicts: Predicts
    quantities: tuple[str, ...]
    needs: Callable[[Degree], bool]
    whole: bool = False  # made of the whole model
    on_the_wall: bool = False  # as the paper has it, without device and host apart
    title: str = ""

    @property
    def shown(self) -> str:
        return self.title or self.name

    def sees(self, profile: Profile) -> Profile:
        """Return what it needs of ``profile``."""
        timing = tuple(p for p in profile.timing if self.needs((p.tp, p.pp)))
        return replace(
            profile,
            memory=tuple(p for p in profile.memory if self.needs((p.tp, p.pp))),
            timing=tuple(map(on_the_wall, timing)) if self.on_the_wall else timing,
        )

    def needed(self, activities: Iterable[Activity]) -> list[Activity]:
        return for_quantity(self.predicts, [a for a in activities if self.needs((a.tp, a.pp))])

    def answers(self, profile: Profile) -> Callable[[Whole], dict[str, Quantity]]:
        """Return what it says of a configuration, which may be that it was NotMeasured."""
        found = estimator_class(self.name, self.predicts)
        if self.predicts is Predicts.MEMORY:
            memory = found(self.sees(profile), max_batched_tokens=DEFAULT_MAX_BATCHED_TOKENS).memory
            return lambda whole: predicted_memory(memory(whole.config, whole.workload))
        latency = found(self.sees(profile)).latency

        def times(whole: Whole) -> dict[str, Quantity]:
            told = latency(whole.config, whole.workload)
            return {"ttft_s": told.ttft_s, "tpot_s": told.tpot_s}

        return times


MEMORY, LATENCY = Predicts.MEMORY, Predicts.LATENCY
STRATEGIES = (
    Strategy(name="M1", predicts=MEMORY, quantities=BYTES, needs=three_degrees, whole=True),
    Strategy(name="M2", predicts=MEMORY, quantities=BYTES, needs=three_degrees),
    Strategy(name="M2-blocks", predicts=MEMORY, quantities=BYTES[:1], needs=three_degrees),  # one sum, no items
    Strategy(name="M3", predicts=MEMORY, quantities=BYTES, needs=every_degree),
    Strategy(name="L1", predicts=LATENCY, quantities=TIMES, needs=one_stage, whole=True),
    Strategy(name="L2", predicts=LATENCY, quantities=TIMES, needs=every_degree),
    Strategy(
        name="L2",
        predicts=LATENCY,
        quantities=TIMES,
        needs=every_degree,
        on_the_wall=True,
        title="L2 by the wall's clock (paper)",
    ),
)


def left_out() -> tuple[str, ...]:
    """Registered strategies that need the step timer, which the embedded engine does not have."""
    named = {strategy.name for strategy in STRATEGIES}
    return tuple(n for predicts in (MEMORY, LATENCY) for n in estimator_names(predicts) if n not in named)


def for_quantity(predicts: Predicts, activities: Iterable[Activity]) -> list[Activity]:
    return list(each_once(activities) if predicts is Predicts.MEMORY else activities)


# Judging, from recordings alone


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Everything measured of one model."""

    model: str
    spec: ModelSpec
    fingerprints: Profile
    whole: Profile
    truth: tuple[Whole, ...]
    fingerprints_took: tuple[Activity, ...]
    whole_took: tuple[Activity, ...]
    truth_took: tuple[Activity, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRow:
    """Result of one strategy on one quantity of one model.

    Errors are relative, without sign; None: nothing reached.
    """

    model: str
    strategy: str
    quantity: str
    asked: int  # configurations and batches
    reached: int
    median_error: float | None
    worst_error: float | None
    inside: int  # of those reached, truths in the 90% interval
    cost: Cost
    of_grid: Cost | None  # the part that ``cost`` is of the grid's; None: the truth's own row


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Answer of one strategy on one configuration."""

    strategy: str
    row: AccuracyRow


def answered(recording: Recording, strategy: Strategy) -> tuple[list[AccuracyRow], list[str]]:
    """Return what it says next to the truth, and why it says nothing where it does not."""
    answers = strategy.answers(recording.whole if strategy.whole else recording.fingerprints)
    rows: list[AccuracyRow] = []
    refused: list[str] = []
    for whole in recording.truth:
        try:
            told = answers(whole)
        except NotMeasuredError as reason:
            refused.append(f"{recording.model}, {strategy.shown}, {whole.config}: {reason}")
            continue
        asked = {quantity: told[quantity] for quantity in strategy.quantities}
        rows += compared(recording.model, recording.spec, whole, asked)
    return rows, refused


def judged(recording: Recording, strategy: Strategy, rows: Sequence[AccuracyRow]) -> list[StrategyRow]:
    took = recording.whole_took if strategy.whole else recording.fingerprints_took
    cost = cost_of(strategy.needed(took))
    grid = cost_of(for_quantity(strategy.predicts, recording.truth_took))
    found = []
    for quantity in strategy.quantities:
        own = [row for row in rows if row.quantity == quantity]
        errors = [abs(row.relative_error) for row in own]
        found.append(
            StrategyRow(
                model=recording.model,
                strategy=strategy.shown,
                quantity=quantity,
                asked=len(recording.truth),
                reached=len(own),
                median_error=float(np.median(errors)) if errors else None,
                worst_error=max(errors, default=None),
                inside=sum(row.inside for row in own),
                cost=cost,
                of_grid=Cost(cost.seconds / grid.seconds, cost.gib_s / grid.gib_s),
            )
        )
    return found


def grid_row(recording: Recording, predicts: Predicts) -> StrategyRow:
    """Return the row to compare with: the whole model under every configuration.

    It is the truth, without error.
    """
    count = len(recording.truth)
    return StrategyRow(
        model=recording.model,
        strategy="whole grid, measured",
        quantity="times" if predicts is Predicts.LATENCY else "memory",
        asked=count,
        reached=count,
        median_error=None,
        worst_error=None,
        inside=count,
        cost=cost_of(for_quantity(predicts, recording.truth_took)),
        of_grid=None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class StrategyRecord:
    """The comparison, with what is needed to judge it."""

    created_at: str  # ISO 8601, UTC
    command: str
    machine: MachineInfo
    load_average_before: float  # over one minute; above 0 other programs ran too
    load_average_after: float
    rows: tuple[StrategyRow, ...]
    answers: tuple[Answer, ...]
    refused: tuple[str, ...]
    took: tuple[tuple[str, tuple[Activity, ...]], ...]  # "MODEL fingerprints", "MODEL truth", "MODEL whole"
    notes: tuple[str, ...]


def record_of(
    recordings: Sequence[Recording], command: str, before: float, notes: Sequence[str]
) -> StrategyRecord:
    rows: list[StrategyRow] = []
    answers: list[Answer] = []
    refused: list[str] = []
    for recording in recordings:
        for predicts in (MEMORY, LATENCY):
            for strategy in (s for s in STRATEGIES if s.predicts is predicts):
                found, missing = answered(recording, strategy)
                rows += judged(recording, strategy, found)
                answers += (Answer(strategy=strategy.shown, row=row) for row in found)
                refused += missing
            rows.append(grid_row(recording, predicts))
    return StrategyRecord(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        machine=recordings[0].fingerprints.machine,
        load_average_before=before,
        load_average_after=os.getloadavg()[0],
        rows=tuple(rows),
        answers=tuple(answers),
        refused=tuple(refused),
        took=tuple(
            (f"{r.model} {name}", activities)
            for r in recordings
            for name, activities in (
                ("fingerprints", r.fingerprints_took),
                ("truth", r.truth_took),
                ("whole", r.whole_took),
            )
        ),
        notes=tuple(notes),
    )


# Measuring


def record(case: Case, folder: Path, options: Options, notes: list[str]) -> Recording:
    """Fingerprints, truth, whole: each in launches of its own, all of which are counted alike."""
    spec = load_spec(case.directory)
    plan = replace(plan_of(case, spec, options), max_repeats=options.repeats)
    with worker_target(case.directory, folder, options.devices) as target:
        target.machine()  # asked once, by a worker that is in no recording
        target.close()
        parts = fingerprints, truth, whole = tuple(RecordingTarget(target) for _ in range(3))
        cut = take_profile(case, spec, fingerprints, folder, plan)
        measured = tuple(measure_whole(case, spec, truth, folder, options))
        full = take_profile(case, spec, whole, folder, replace(plan, whole=True))
    for name, found in (("fingerprints", cut), ("whole", full)):
        notes += [f"{case.name}, profile of {name}: {said}" for said in found.notes]
    for name, part in zip(("fingerprints", "truth", "whole"), parts, strict=True):
        cost = cost_of(part.activities)
        notes.append(f"{case.name}, {name}: {cost.seconds:.0f} s, {len(part.activities)} launches, loads and runs")
    return Recording(
        model=case.name,
        spec=spec,
        fingerprints=cut,
        whole=full,
        truth=measured,
        fingerprints_took=tuple(fingerprints.activities),
        whole_took=tuple(whole.activities),
        truth_took=tuple(truth.activities),
    )


# Output

HEAD = (
    "strategy",
    "quantity",
    "reached",
    "median error",
    "worst",
    "inside",
    "s",
    "GiB s",
    "of the grid's s",
    "of its GiB s",
)
RULE = ("---", "---", *("--:" for _ in HEAD[2:]))


def markdown(found: StrategyRecord) -> str:
    """The table of docs/accuracy.md, a part for each model."""
    lines = []
    for model in dict.fromkeys(row.model for row in found.rows):
        lines += [f"### {model}\n", *map(_line, (HEAD, RULE))]
        lines += [_line(cells(row)) for row in found.rows if row.model == model]
        lines.append("")
    lines.append(f"{', '.join(left_out())}: need the step timer, which the embedded engine does not have.")
    return "\n".join(lines)


def cells(row: StrategyRow) -> tuple[str, ...]:
    title, reached = TITLES.get(row.quantity, row.quantity), f"{row.reached} of {row.asked}"
    cost = f"{row.cost.seconds:.1f}", f"{row.cost.gib_s:.1f}"
    if row.of_grid is None:
        return row.strategy, title, reached, "the truth", "", "", *cost, "1", "1"
    errors = _percent(row.median_error), _percent(row.worst_error), f"{row.inside} of {row.reached}"
    return row.strategy, title, reached, *errors, *cost, f"{row.of_grid.seconds:.2f}", f"{row.of_grid.gib_s:.2f}"


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _percent(error: float | None) -> str:
    return "-" if error is None else f"{error:.1%}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.strategies", description=__doc__)
    parser.add_argument("--model", choices=("demo", "llama", "both"), default="both")
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--seconds", type=float, default=600.0, help="budget of each of a model's two profiles")
    parser.add_argument(
        "--repeats", type=int, default=7, help="runs of a point: of the truth, and at most of a profile"
    )
    given = sys.argv[1:] if argv is None else argv
    chosen = parser.parse_args(given)
    if chosen.repeats < 3 or chosen.seconds <= 0:
        parser.error("--repeats must be at least 3 and --seconds above 0")
    started, before = time.monotonic(), os.getloadavg()[0]
    options = Options(profile_s=chosen.seconds, repeats=chosen.repeats, devices=tuple(find_devices(2).devices))
    notes: list[str] = []
    recordings = []
    with tempfile.TemporaryDirectory(prefix="iserve-strategies-") as root:
        for case in cases(Path(root), chosen.model):
            folder = Path(root) / f"{case.name}-work"
            folder.mkdir()
            recordings.append(record(case, folder, options, notes))
    found = record_of(recordings, " ".join(["python -m tests.bench.strategies", *given]), before, notes)
    print(markdown(found))
    for said in found.notes:
        note(said)
    note(
        f"{time.monotonic() - started:.0f} s; load average {found.load_average_before:.2f} before, "
        f"{found.load_average_after:.2f} after"
    )
    if chosen.json is not None:
        chosen.json.write_bytes(to_json(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
