"""Errors of predictions by family of models, each judged without anything that was fitted on its own family.

Run: ``python -m tests.bench.accuracy_families [--json FILE] [--write-errors]``. With ``--write-errors`` it renews
``fingerprint/data/depth_tied_errors.json``, which the intervals of users' models come from.

Over every recording in ``tests/bench/results`` that was made with the step timer. What is fitted on recordings are
the calibration's middles and intervals (``fingerprint.estimators.calibration``): for each family they are taken
from all recordings but those of its models. Constants that were chosen by hand while looking at the nine models of
vLLM 0.24 (over how many octaves a ratio keeps its value, and how far ratios scatter) are the same for all, as are
the bound and the rules that were built after OLMoE and DeepSeek had been looked at (docs/decisions, 40).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fingerprint.codec import to_json
from fingerprint.estimators.calibration import Calibration, MeasuredError
from tests.bench.accuracy import RESULTS, cost_row, load, measured_errors, memory_row, predict_l3
from tests.bench.accuracy_measure import Recorded
from tests.bench.accuracy_rows import Row

__all__ = ["FOLDERS", "FamilyRow", "family_of", "family_rows", "predicted_rows", "size_table", "table"]

FOLDERS = ("families-h200-vllm-0.33", "h200-vllm-0.33", "h100-vllm-0.33", "h200-vllm-0.26", "h200")
_ERRORS = Path(__file__).parents[2] / "fingerprint/data/depth_tied_errors.json"
SHORT_S = 0.015  # a TTFT below it is judged in milliseconds
_SIZES = ((0, 1024, "up to 1,024"), (1025, 16_384, "1,025 to 16,384"), (16_385, 10**9, "more"))


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyRow:
    """Errors of one family's predictions on one release; absolute fractions, seconds, shares."""

    family: str
    engine: str
    gpu: str
    models: tuple[str, ...]
    points: int
    tpot: tuple[float, float]  # median, worst
    ttft: tuple[float, float]  # of those from ``SHORT_S`` on; nan where there are none
    short_ttft_s: float  # worst error of shorter ones; 0 where there are none
    inside: tuple[float, float]  # share of TPOTs and of TTFTs in the 90% interval
    half_width: tuple[float, float]  # median over the prediction, TPOT and TTFT
    weights: float  # worst errors of memory
    blocks: float
    profile_s: float  # longest, GPU-seconds


def family_of(recorded: Recorded) -> str:
    return recorded.profile.spec.family


def family_rows(folders: Iterable[str] = FOLDERS) -> list[FamilyRow]:
    """A row for each family of a folder, one release on one kind of GPU, then one for all of it."""
    found = []
    for folder in folders:
        predicted = predicted_rows(folder)
        families = dict.fromkeys(family_of(one) for one, _ in predicted)
        groups = [(family, [p for p in predicted if family_of(p[0]) == family]) for family in families]
        for family, group in (*groups, ("all", predicted)):
            found.append(_row(family, [one for one, _ in group], [row for _, rows in group for row in rows]))
    return found


@cache
def predicted_rows(folder: str) -> tuple[tuple[Recorded, tuple[Row, ...]], ...]:
    """Every recording of ``folder`` with its predictions, made without its own family."""
    return tuple((one, tuple(predict_l3(one, _without(family_of(one))))) for one in _loaded(folder))


@cache
def _loaded(folder: str) -> tuple[Recorded, ...]:
    return tuple(load(RESULTS / folder))


@cache
def _without(family: str) -> Calibration:
    """Return what all recordings of other families were off by."""
    return Calibration(tuple(error for of, errors in _errors() if of != family for error in errors))


@cache
def _errors() -> tuple[tuple[str, tuple[MeasuredError, ...]], ...]:
    """Return of each recording its family, and what predictions of it were off by."""
    return tuple((family_of(one), measured_errors([one])) for folder in FOLDERS for one in _loaded(folder))


def _errors_text() -> str:
    """Return what ships: the errors of all recordings as JSON, one a line."""
    rows = json.loads(to_json([error for _, errors in _errors() for error in errors]))
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def _row(family: str, group: Sequence[Recorded], rows: Sequence[Row]) -> FamilyRow:
    tpot, ttft = ([row for row in rows if row.metric == metric] for metric in ("tpot", "ttft"))
    memory = [memory_row(one) for one in group]
    engines = {dict(one.profile.machine.versions)["engine"] for one in group}
    gpus = {one.profile.machine.device.name for one in group}
    assert len(engines) == len(gpus) == 1, (
        f"{family}: a folder holds one release on one GPU, not {engines}, {gpus}"
    )
    return FamilyRow(
        family=family,
        engine=engines.pop(),
        gpu=gpus.pop(),
        models=tuple(dict.fromkeys(" ".join((one.model, *_degrees(one))) for one in group)),
        points=len(tpot),
        tpot=_median_and_worst([abs(row.error) for row in tpot]),
        ttft=_median_and_worst([abs(row.error) for row in ttft if row.truth_s >= SHORT_S]),
        short_ttft_s=max((abs(r.predicted_s - r.truth_s) for r in ttft if r.truth_s < SHORT_S), default=0.0),
        inside=(_share_inside(tpot), _share_inside(ttft)),
        half_width=(_half_width(tpot), _half_width(ttft)),
        weights=max(abs(m.weights_predicted / m.weights_bytes - 1) for m in memory),
        blocks=max(abs(m.blocks_predicted / m.blocks - 1) for m in memory),
        profile_s=max(cost_row(one).profile_s * one.tp * one.pp for one in group),
    )


def _degrees(one: Recorded) -> list[str]:
    return [f"{name} {n}" for name, n in (("TP", one.tp), ("PP", one.pp)) if n > 1]


def _median_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))


def _share_inside(rows: Sequence[Row]) -> float:
    return sum(row.inside for row in rows) / len(rows)


def _half_width(rows: Sequence[Row]) -> float:
    return statistics.median((row.high_s - row.low_s) / 2 / row.predicted_s for row in rows)


def table(rows: Iterable[FamilyRow]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| family | points | TPOT median / worst | TTFT median / worst | TTFT under 15 ms, worst | inside | "
        "half-width | weights, KV blocks | profile |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    here = ("", "")
    for row in rows:
        if (row.engine, row.gpu) != here:
            here = row.engine, row.gpu
            lines.append(f"| **{row.engine}, {row.gpu}** | | | | | | | | |")
        models = f" ({', '.join(row.models)})" if row.family != "all" else ""
        lines.append(
            f"| {row.family}{models} | {row.points} | {row.tpot[0]:.1%} / {row.tpot[1]:.1%} "
            f"| {row.ttft[0]:.1%} / {row.ttft[1]:.1%} | {1e3 * row.short_ttft_s:.1f} ms "
            f"| {row.inside[0]:.0%}, {row.inside[1]:.0%} | {row.half_width[0]:.1%}, {row.half_width[1]:.1%} "
            f"| {row.weights:.2%}, {row.blocks:.2%} | {row.profile_s:.0f} s |"
        )
    return "\n".join(lines)


def size_table(folders: Iterable[str] = FOLDERS) -> str:
    """Return the errors by prompt tokens of the whole batch, dense models and mixtures apart, as Markdown."""
    lines = [
        "| prompt tokens in all | points | TPOT median / worst | TTFT median / worst | inside |",
        "|---|--:|--:|--:|--:|",
    ]
    predicted = [pair for folder in folders for pair in predicted_rows(folder)]
    for kind, mixtures in (("dense", False), ("mixtures of experts", True)):
        rows = [r for one, rows in predicted if bool(one.profile.spec.num_experts) == mixtures for r in rows]
        for low, high, named in _SIZES:
            these = [r for r in rows if low <= r.batch * r.input_tokens <= high]
            tpot, ttft = ([r for r in these if r.metric == metric] for metric in ("tpot", "ttft"))
            (median, worst), (first, longest) = (
                _median_and_worst([abs(r.error) for r in m]) for m in (tpot, ttft)
            )
            lines.append(
                f"| {kind}, {named} | {len(tpot)} | {median:.1%} / {worst:.1%} | {first:.1%} / {longest:.1%} "
                f"| {_share_inside(tpot):.0%}, {_share_inside(ttft):.0%} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write every row here")
    parser.add_argument("--write-errors", action="store_true", help=f"renew {_ERRORS.name}")
    options = parser.parse_args()
    rows = family_rows()
    print(table(rows), size_table(), sep="\n\n")
    if options.json:
        options.json.write_bytes(to_json(rows, indent=1))
    if options.write_errors:
        _ERRORS.write_text(_errors_text())


if __name__ == "__main__":
    main()
