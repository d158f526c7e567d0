"""Accuracy of L2 and M2 against real full models on this machine: its CPU as two devices, or its GPUs.

Run: ``python -m tests.bench.full_model_accuracy [--json FILE] [--seconds S] [--repeats N] [--model NAME]
[--gpu]``.

Two models: the bundled demo, and a random-weight Llama of 16 layers of 25 MB, where the effect of a layer is far
above the noise; ``wide``, for GPUs, is of Llama-2-7B's width and 16 layers; ``kinds`` are a Gemma 3 and a
GPT-OSS of random weights, whose layers look back differently. Each is profiled by its fingerprints
through the real worker, as a deployment would do it; then the whole model is loaded into the same worker and timed
at every (tp, pp, format, batch). TTFT is the time of one token, TPOT the difference of two output lengths over the
tokens between. The prediction is for a longer output than the fingerprints were run with. Fingerprint and
full-model runs do not interleave: a machine that changes its speed between them shows as error, so run it when
nothing else does; the load average is recorded.

The record is kept in iServe's home (``ISERVE_HOME``), where ``iserve report MODEL`` finds it by the model's shape
and the machine; ``--json`` writes it to a file as well, which ``iserve report MODEL --measurements FILE`` takes
anywhere.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from daemon.server import find_devices
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, even_split
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.l2 import key_of
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import load_spec
from fingerprint.model_spec import ModelSpec
from iserve.report.accuracy import AccuracyRecord, AccuracyRow, store_accuracy
from iserve.settings import load_settings
from tests.bench.whole_models import (
    Options,
    Whole,
    cases,
    measure_whole,
    note,
    plan_of,
    take_profile,
    worker_target,
)


def predicted_memory(memory: MemoryEstimate) -> dict[str, Quantity]:
    """Return the fullest GPU of an even split; the estimate's relative error applies to the engine's part too."""
    stages = memory.stages(even_split(memory.num_layers, memory.pp))
    values = {
        "memory_bytes_per_gpu": max(s.total_bytes for s in stages),
        "engine_bytes_per_gpu": max(s.total_bytes - s.runtime_bytes for s in stages),
    }
    error = memory.relative_error
    return {
        name: Quantity(float(value), max(0.0, value * (1 - error)), value * (1 + error), memory.source)
        for name, value in values.items()
    }


def predicted(estimate: Estimate) -> dict[str, Quantity]:
    return {"ttft_s": estimate.ttft_s, "tpot_s": estimate.tpot_s} | predicted_memory(estimate.memory)


def compared(
    model: str, spec: ModelSpec, whole: Whole, quantities: Mapping[str, Quantity], *, unresolved: bool = False
) -> Iterator[AccuracyRow]:
    """Yield predictions with measurements; ``unresolved``: the layers' times are below resolution."""
    for quantity, value in quantities.items():
        measured, low, high = whole.measured[quantity]
        yield AccuracyRow(
            model=model,
            shape_hash=spec.shape_hash,
            num_layers=spec.num_layers,
            config=whole.config,
            workload=whole.workload,
            quantity=quantity,
            predicted=value,
            measured=measured,
            measured_low=low,
            measured_high=high,
            repeats=whole.repeats,
            below_resolution=unresolved and quantity.endswith("_s"),
        )


def below_resolution(estimator: FingerprintedEstimator, config: DeploymentConfig) -> bool:
    """Or below zero: that tells no more of a layer."""
    return any(
        effect.below_resolution or effect.below_zero
        for effect in estimator.layer_effects
        if effect.key == key_of(config)
    )


def run(which: str, options: Options, command: str) -> AccuracyRecord:
    rows: list[AccuracyRow] = []
    notes: list[str] = []
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="iserve-accuracy-") as root:
        for case in cases(Path(root), which):
            folder = Path(root) / f"{case.name}-work"
            folder.mkdir()
            with worker_target(case.directory, folder, options.devices) as target:
                spec = load_spec(case.directory)
                found = take_profile(case, spec, target, folder, plan_of(case, spec, options))
                machine = found.machine
                notes += [f"{case.name}: {said}" for said in found.notes]
                notes.append(
                    f"{case.name}: profiled in {found.spent_s:.0f} s, "
                    f"{sum(len(p.runs) for p in found.timing)} runs of {len(found.timing)} points"
                )
                estimator = FingerprintedEstimator(found, RooflineEstimator(spec, machine.device))
                for whole in measure_whole(case, spec, target, folder, options):
                    values = predicted(estimator.estimate(whole.config, whole.workload))
                    unresolved = below_resolution(estimator, whole.config)
                    rows += compared(case.name, spec, whole, values, unresolved=unresolved)
    return AccuracyRecord(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        machine=machine,
        load_average_before=before,
        load_average_after=os.getloadavg()[0],
        rows=tuple(rows),
        notes=tuple(notes),
    )


def shown(row: AccuracyRow) -> tuple[str, ...]:
    """The cells of one line: times in ms, memory in MiB."""
    scale, unit = (1e-3, "ms") if row.is_time else (2.0**20, "MiB")
    predicted, config = row.predicted, row.config

    def text(value: float) -> str:
        return f"{value / scale:.4g}"

    verdict = ("inside" if row.inside else "outside") + (", below resolution" if row.below_resolution else "")
    return (
        f"tp={config.tp} pp={config.pp} {config.weights}",
        str(row.workload.batch),
        row.quantity.removesuffix("_s").removesuffix("_bytes_per_gpu"),
        f"{text(predicted.value)} [{text(predicted.low)}, {text(predicted.high)}] {unit}",
        f"{text(row.measured)} {unit}",
        f"{row.relative_error:+.1%}",
        verdict,
    )


def markdown(record: AccuracyRecord) -> str:
    """The tables of docs/accuracy.md."""
    lines = []
    for model in dict.fromkeys(row.model for row in record.rows):
        rows = [row for row in record.rows if row.model == model]
        work = rows[0].workload
        lines.append(f"### {model}: {work.input_tokens} tokens in, {work.output_tokens} out\n")
        lines.append("| configuration | batch | quantity | predicted [90%] | measured | error | interval |")
        lines.append("|---|---|---|---|---|---|---|")
        lines += ["| " + " | ".join(shown(row)) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines) + "\n" + summary(record)


def summary(record: AccuracyRecord) -> str:
    lines = []
    for model in dict.fromkeys(row.model for row in record.rows):
        for quantity in dict.fromkeys(row.quantity for row in record.rows):
            rows = [r for r in record.rows if (r.model, r.quantity) == (model, quantity)]
            errors = sorted(abs(r.relative_error) for r in rows)
            inside = sum(r.inside for r in rows)
            lines.append(
                f"- {model}, {quantity}: {inside} of {len(rows)} inside, median error "
                f"{np.median(errors):.1%}, largest {errors[-1]:.1%}"
            )
    return "\n".join(lines)


def main(argv: list[str] | None = None, clock: Callable[[], float] = time.monotonic) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.full_model_accuracy", description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the record here")
    parser.add_argument("--seconds", type=float, default=120.0, help="budget of each model's profile")
    parser.add_argument("--repeats", type=int, default=7, help="of every point of the full models, at least 2")
    parser.add_argument("--model", choices=("demo", "llama", "both", "wide", "kinds"), default="both")
    parser.add_argument("--gpu", action="store_true", help="on this machine's GPUs, not its CPU")
    given = sys.argv[1:] if argv is None else argv
    chosen = parser.parse_args(given)
    if chosen.repeats < 2 or chosen.seconds <= 0:
        parser.error("--repeats must be at least 2 and --seconds above 0")
    started = clock()
    devices = find_devices(None if chosen.gpu else 2).devices
    if chosen.gpu and devices[0].kind != "cuda":
        parser.error("--gpu: there is no GPU here")
    options = Options(profile_s=chosen.seconds, repeats=chosen.repeats, devices=tuple(devices))
    record = run(chosen.model, options, " ".join(["python -m tests.bench.full_model_accuracy", *given]))
    print(markdown(record))
    note(
        f"{clock() - started:.0f} s; load average {record.load_average_before:.2f} before, "
        f"{record.load_average_after:.2f} after"
    )
    for said in record.notes:
        note(said)
    for path in store_accuracy(load_settings().home, record):
        note(f"kept in {path}; `iserve report` shows it with this machine's profile of that model")
    if chosen.json is not None:
        chosen.json.write_bytes(to_json(record, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
