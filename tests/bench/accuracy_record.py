"""Accuracy records for ``iserve report``: each prediction on a GPU next to the whole model's measurement.

Run: ``python -m tests.bench.accuracy_record [RESULTS_DIR] [--json FILE]``.

Reads what ``tests.bench.accuracy_measure`` recorded and puts it into iServe's home, a record for each machine, as
``make accuracy`` does for the embedded engine; ``--json`` writes the newest too, for ``iserve report
--measurements``.
Predictions are those a user gets: shipped calibration, of which a model's own errors are left out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from fingerprint.codec import to_json
from fingerprint.config import Workload
from fingerprint.estimates import Quantity, Source
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.trimmed_mean import locate
from iserve.report.accuracy import AccuracyRecord, AccuracyRow, machine_key, store_accuracy
from iserve.settings import load_settings
from tests.bench.accuracy import RESULTS, budget_bytes, load, memory_row, truths
from tests.bench.accuracy_measure import OUTPUT, Recorded

__all__ = ["accuracy_records"]


def accuracy_records(recorded: Sequence[Recorded]) -> tuple[AccuracyRecord, ...]:
    """Return one record of each machine, oldest first, with every model that was measured there."""
    machines: dict[str, list[Recorded]] = {}
    for one in recorded:
        machines.setdefault(machine_key(one.profile.machine), []).append(one)
    found = (_record(group) for group in machines.values())
    return tuple(sorted(found, key=lambda record: record.created_at))


def _record(group: Sequence[Recorded]) -> AccuracyRecord:
    return AccuracyRecord(
        created_at=max(one.measured_at for one in group),
        command="python -m tests.bench.accuracy_measure",
        machine=group[0].profile.machine,
        load_average_before=None,
        load_average_after=None,
        rows=tuple(row for one in group for row in _rows(one)),
        notes=tuple(note for one in group for note in _notes(one)),
    )


def _rows(one: Recorded) -> Iterator[AccuracyRow]:
    estimator, config = _estimator(one), one.config

    def row(
        name: str,
        predicted: Quantity,
        measured: float,
        *,
        workload: Workload | None = None,
        half: float = 0.0,
        repeats: int = 1,
    ) -> AccuracyRow:
        return AccuracyRow(
            model=one.model,
            shape_hash=one.profile.spec.shape_hash,
            num_layers=one.profile.spec.num_layers,
            config=config,
            workload=workload,
            quantity=name,
            predicted=predicted,
            measured=measured,
            measured_low=measured - half,
            measured_high=measured + half,
            repeats=repeats,
        )

    runs = {(p.batch, p.input_tokens, p.output_tokens): [run.e2e_s for run in p.runs] for p in one.whole}
    for truth in truths(one):
        work = truth.workload
        found = estimator.estimate(config, work)
        short, long = (runs[truth.batch, truth.input_tokens, output] for output in (1, OUTPUT))
        half, repeats = _half(short), min(len(short), len(long))
        yield row("ttft_s", found.ttft_s, truth.ttft_s, workload=work, half=half, repeats=repeats)
        half = float(np.hypot(half, _half(long))) / (OUTPUT - 1)
        yield row("tpot_s", found.tpot_s, truth.tpot_s, workload=work, half=half, repeats=repeats)
    for name, predicted, measured in _memory_rows(one):
        yield row(name, predicted, measured)


def _half(times: Sequence[float]) -> float:
    """Return half of the 90% interval of their mean; of one run it is unknown, and 0 is returned."""
    return float(locate(list(times)).half_width) if len(times) > 1 else 0.0


def _memory_rows(one: Recorded) -> Iterator[tuple[str, Quantity, float]]:
    """(quantity, predicted, what the engine counted of the whole model), of the fullest GPU."""
    row, estimator, config = memory_row(one), _estimator(one).memory, one.config
    relative = estimator.memory(config, Workload()).relative_error

    def about(value: float) -> Quantity:
        return Quantity(value, value * (1 - relative), value * (1 + relative), Source.EXTRAPOLATED)

    yield "weights_bytes_per_gpu", about(row.weights_predicted), row.weights_bytes
    yield "non_kv_bytes_per_gpu", about(row.non_kv_predicted), row.non_kv_bytes
    slack = round(relative * row.non_kv_predicted)
    fewest, most = (estimator.kv_blocks(config, budget_bytes(one) + sign * slack) for sign in (-1, 1))
    yield "kv_blocks", Quantity(row.blocks_predicted, fewest, most, Source.EXTRAPOLATED), row.blocks


def _estimator(one: Recorded) -> DepthTiedEstimator:
    return DepthTiedEstimator(one.profile, RooflineEstimator(one.profile.spec, one.profile.machine.device))


def _notes(one: Recorded) -> Iterator[str]:
    name = f"{one.model} {one.weights}"
    yield f"{name}: KV blocks are of an engine that might take {budget_bytes(one) / 2**30:.1f} GiB of each GPU"
    yield from (f"{name}, profile: {note}" for note in one.profile.notes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy_record", description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "h200")
    parser.add_argument("--json", type=Path, help="also write the newest record here")
    given = parser.parse_args(argv)
    records = accuracy_records(load(given.results))
    if not records:
        parser.error(f"no recordings in {given.results}; make some with tests.bench.accuracy_measure")
    for record in records:
        for path in store_accuracy(load_settings().home, record):
            print(f"kept in {path}; `iserve report` shows it with such a machine's profile of that model")
    if given.json is not None:
        given.json.write_bytes(to_json(records[-1], indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
