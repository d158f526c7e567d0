"""Prints what is predicted of one model in each quantized format, against what vLLM took on a GPU.

    python -m tests.bench.format_table [FOLDER]

FOLDER holds what ``tests.bench.format_runs`` recorded. Of each format: its weights as counted from config.json
alone, from its fingerprints, and by vLLM; KV blocks; errors of TPOT and TTFT, with intervals and middles that were
calibrated on other families, in 16 bits and fp8. Then, point by point, which format an intent for least latency
chooses: by datasheets (nothing measured), by fingerprints, and by the whole models' own times, with how much
longer than the fastest the chosen one takes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from planner.costs import Prices, figures, objective_of
from planner.intent import Intent, IntentKind
from tests.bench.accuracy import RESULTS, load, memory_row, predict_l3, truths
from tests.bench.accuracy_families import calibration_without, family_of
from tests.bench.accuracy_measure import OUTPUT, Recorded
from tests.bench.accuracy_rows import MemoryRow, Row
from tests.bench.format_configs import FORMATS

__all__ = ["Choice", "FormatRow", "choices", "format_rows", "markdown"]

FOLDER = RESULTS / "formats-h200-vllm-0.33"
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatRow:
    """Predictions of one format against its whole model."""

    model: str
    name: str
    counted_bytes: int  # weights, from config.json alone
    memory: MemoryRow
    rows: tuple[Row, ...]
    left_out: int  # points of the whole model whose calls did not agree

    def errors(self, metric: str) -> tuple[float, float]:
        """Return the median and the worst of the absolute relative errors."""
        found = [abs(row.error) for row in self.rows if row.metric == metric]
        return statistics.median(found), max(found)

    def inside(self, metric: str) -> float:
        """Return the share of the truths in their 90% interval."""
        return statistics.fmean(row.inside for row in self.rows if row.metric == metric)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Format that was chosen at a point, by what is known, and what the best would have been."""

    batch: int
    input_tokens: int
    by_datasheets: str
    by_fingerprints: str
    fastest: str
    measured_s: dict[str, float]  # by format: the whole batch, ``OUTPUT`` tokens

    def loss(self, name: str) -> float:
        """Return by what share ``name`` takes longer than the fastest."""
        return self.measured_s[name] / self.measured_s[self.fastest] - 1


def format_rows(recorded: Sequence[Recorded]) -> list[FormatRow]:
    return [
        FormatRow(
            model=_model(one),
            name=_name(one),
            counted_bytes=_whole_bytes(_roofline(one).estimate(one.config, Workload())),
            memory=memory_row(one),
            rows=tuple(predict_l3(one, calibration_without(family_of(one)))),
            left_out=len(one.left_out),
        )
        for one in recorded
    ]


def choices(recorded: Sequence[Recorded], kind: IntentKind = IntentKind.MIN_LATENCY) -> list[Choice]:
    """Return the choices of an intent at every point at which all formats were measured, of one model."""
    measured = {
        _name(one): {(t.batch, t.input_tokens): t.ttft_s + (OUTPUT - 1) * t.tpot_s for t in truths(one)}
        for one in recorded
    }
    everywhere = set.intersection(*(set(times) for times in measured.values())) if measured else set()
    by_datasheets = {_name(one): (_roofline(one), one.config) for one in recorded}
    by_fingerprints = {_name(one): (_fitted(one), one.config) for one in recorded}
    found = []
    for batch, input_tokens in sorted(everywhere):
        workload = Workload(batch=batch, input_tokens=input_tokens, output_tokens=OUTPUT)
        here = {name: times[batch, input_tokens] for name, times in measured.items()}
        found.append(
            Choice(
                batch=batch,
                input_tokens=input_tokens,
                by_datasheets=_best(by_datasheets, workload, kind),
                by_fingerprints=_best(by_fingerprints, workload, kind),
                fastest=min(here, key=lambda name: here[name]),
                measured_s=here,
            )
        )
    return found


def _best(known: Mapping[str, tuple[Estimator, DeploymentConfig]], workload: Workload, kind: IntentKind) -> str:
    """Return the format whose estimate is best for the intent; each is a checkpoint, and so a plan, of its own."""
    objective = objective_of(Intent(kind=kind))
    estimates = [estimator.estimate(config, workload) for estimator, config in known.values()]
    values = dict(zip(known, objective.of(figures(estimates), Prices()), strict=True))
    return (max if objective.maximize else min)(values, key=lambda name: values[name])


def _name(recorded: Recorded) -> str:
    """Return the format's name: the end of the folder's."""
    return max((name for name in FORMATS if recorded.model.endswith(f"-{name}")), key=len, default=recorded.model)


def _model(recorded: Recorded) -> str:
    return recorded.model.removesuffix(f"-{_name(recorded)}")


def _roofline(recorded: Recorded) -> RooflineEstimator:
    return RooflineEstimator(recorded.profile.spec, recorded.profile.machine.device)


def _fitted(recorded: Recorded) -> DepthTiedEstimator:
    return DepthTiedEstimator(recorded.profile, _roofline(recorded), calibration_without(family_of(recorded)))


def _whole_bytes(estimate: Estimate) -> int:
    return estimate.memory.stage(0, estimate.memory.num_layers).weights_bytes


def markdown(recorded: Sequence[Recorded]) -> str:
    """Return the table of formats, and one of choices for each model, as Markdown."""
    lines = [
        "| format | weights | from config.json | from fingerprints | KV blocks | TPOT median / worst "
        "| TTFT median / worst | inside | points |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in format_rows(recorded):
        memory = row.memory
        times = " | ".join("{:.1%} / {:.1%}".format(*row.errors(metric)) for metric in ("tpot", "ttft"))
        lines.append(
            f"| {row.model} {row.name} | {memory.weights_bytes / _GIB:.3f} GiB "
            f"| {row.counted_bytes / memory.weights_bytes - 1:+.2%} "
            f"| {memory.weights_predicted / memory.weights_bytes - 1:+.2%} "
            f"| {memory.blocks:,} ({memory.blocks_predicted / memory.blocks - 1:+.2%}) | {times} "
            f"| {row.inside('tpot'):.0%}, {row.inside('ttft'):.0%} "
            f"| {len(row.rows) // 2}{f', {row.left_out} left out' if row.left_out else ''} |"
        )
    models = dict.fromkeys(map(_model, recorded))
    return "\n\n".join(["\n".join(lines), *(_choices_text(model, recorded) for model in models)])


def _choices_text(model: str, recorded: Sequence[Recorded]) -> str:
    """Return the table of one model's choices, with a sentence on all of them."""
    own = [one for one in recorded if _model(one) == model]
    found, names = choices(own), [_name(one) for one in own]
    lines = [
        f"**{model}**",
        "",
        f"| batch x prompt | {' | '.join(names)} | fastest | by fingerprints | by datasheets |",
        f"|---|{'--:|' * len(names)}---|---|---|",
    ]
    for choice in found:
        times = " | ".join(f"{1e3 * choice.measured_s[name]:.0f}" for name in names)
        chosen = " | ".join(f"{n} (+{choice.loss(n):.1%})" for n in (choice.by_fingerprints, choice.by_datasheets))
        lines.append(f"| {choice.batch} x {choice.input_tokens} | {times} | {choice.fastest} | {chosen} |")
    if found:
        worst = [
            f"{how}: within 1% of the fastest at {sum(loss < 0.01 for loss in losses)} of {len(losses)} points, "
            f"{statistics.fmean(losses):.1%} longer in the mean, {max(losses):.1%} at worst"
            for how, losses in (
                ("by fingerprints", [choice.loss(choice.by_fingerprints) for choice in found]),
                ("by datasheets", [choice.loss(choice.by_datasheets) for choice in found]),
            )
        ]
        lines += ["", "Milliseconds of the whole batch. Chosen " + "; ".join(worst) + "."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    recorded = load(folder)
    if not recorded:
        raise SystemExit(f"no recordings in {folder}; make some with tests.bench.format_runs")
    print(markdown(recorded))


if __name__ == "__main__":
    main()
