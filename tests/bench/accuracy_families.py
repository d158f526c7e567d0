"""Errors of predictions by family of models, each judged without the measured errors of its own family.

Run: ``python -m tests.bench.accuracy_families [--json FILE] [--write-errors]``. With ``--write-errors`` it renews
``fingerprint/data/depth_tied_errors.json``, which the intervals of users' models come from.

Over every recording in ``tests/bench/results`` that was made with the step timer. Fitted on recordings are the
calibration's middles and intervals (``fingerprint.estimators.calibration``): for each family they are taken from
all recordings but those of its models. The same for all families, and so not left out, are the roofline's
constants, fitted to public tables of Llama, Mistral, Mixtral and Qwen models, and constants and rules that were
chosen by hand after some family had been seen, which docs/accuracy.md lists with those families. What was recorded
after the last of these rules has a row of its own. ``tests.bench.accuracy_goals`` judges whether a row keeps its
goals.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from fingerprint.codec import to_json
from fingerprint.estimators.calibration import Calibration, MeasuredError
from tests.bench.accuracy import (
    RESULTS,
    by_other_methods,
    cost_row,
    load,
    measured_errors,
    memory_row,
    predict_l3,
)
from tests.bench.accuracy_goals import family_table, summary_table
from tests.bench.accuracy_measure import Recorded
from tests.bench.accuracy_rows import SHORT_S, FamilyRow, Row
from tests.bench.accuracy_tables import others_table
from tests.bench.fidelity_anew import SERVED, anew
from tests.bench.fidelity_served import read_played
from tests.bench.fidelity_table import within_by_model

__all__ = [
    "ALL_RULES",
    "FOLDERS",
    "LAST_RULE",
    "NEWEST",
    "calibration_without",
    "family_of",
    "family_rows",
    "frozen_row",
    "goals_table",
    "held_out_row",
    "others_tables",
    "pooled_row",
    "predicted_rows",
    "recordings_of",
    "size_table",
    "table",
]

FOLDERS = (
    "families-h200-vllm-0.33",
    "h200-vllm-0.33",
    "degrees-h200-vllm-0.33",
    "h100-vllm-0.33",
    "graphs-512-h200-vllm-0.33",
    "h200-vllm-0.26",
    "h200",
)
_ERRORS = Path(__file__).parents[2] / "fingerprint/data/depth_tied_errors.json"
EARLIER_GRAPHS = FOLDERS[4]
NEWEST = FOLDERS[:4]  # of the release that goals are of
PUBLISHED_WITH = {
    "L2 by the wall's clock (paper)": "the paper's method, taken literally",
    "AIConfigurator 0.12.0": "AIConfigurator 0.12.0",
}
LAST_RULE = "2026-11-27T07:38"  # but for decisions 57 to 59, the last that moved a number of ``NEWEST``
ALL_RULES = "2026-11-29T17:00"  # but for decision 59
_SIZES = ((0, 1024, "up to 1,024"), (1025, 16_384, "1,025 to 16,384"), (16_385, 10**9, "more"))


def family_of(recorded: Recorded) -> str:
    return recorded.profile.spec.family


def family_rows(folders: Iterable[str] = FOLDERS) -> list[FamilyRow]:
    """A row for each family of a folder, one release on one kind of GPU, then one for all of it.

    What was recorded with expert parallelism has a row of its own.
    """
    return [row for folder in folders for row in _rows_of(folder)]


@cache
def _rows_of(folder: str) -> tuple[FamilyRow, ...]:
    predicted, found = predicted_rows(folder), []
    groups: dict[tuple[str, bool], list[tuple[Recorded, tuple[Row, ...]]]] = {}
    for pair in predicted:
        groups.setdefault((family_of(pair[0]), pair[0].expert_parallel), []).append(pair)
    for family, group in (*((family, group) for (family, _), group in groups.items()), ("all", predicted)):
        row = _row(family, [one for one, _ in group], [row for _, rows in group for row in rows])
        found.append(replace(row, has_earlier_graphs=folder == EARLIER_GRAPHS))
        assert " and " not in found[-1].gpu, f"{folder}: a folder is of one kind of GPU, not {found[-1].gpu}"
    return tuple(found)


@cache
def predicted_rows(folder: str) -> tuple[tuple[Recorded, tuple[Row, ...]], ...]:
    """Every recording of ``folder`` with its predictions, made without its own family."""
    return tuple(
        (one, tuple(predict_l3(one, calibration_without(family_of(one))))) for one in recordings_of(folder)
    )


@cache
def recordings_of(folder: str) -> tuple[Recorded, ...]:
    """Return the kept recordings of a folder, but those that were made anew since."""
    return tuple(one for one in load(RESULTS / folder) if one.measured_at == _newest_of_each()[_what(one)])


@cache
def _newest_of_each() -> dict[tuple[object, ...], str]:
    newest: dict[tuple[object, ...], str] = {}
    for one in (one for folder in FOLDERS for one in load(RESULTS / folder)):
        newest[_what(one)] = max(one.measured_at, newest.get(_what(one), ""))
    return newest


def _what(one: Recorded) -> tuple[object, ...]:
    machine = one.profile.machine
    engine = dict(machine.versions)["engine"]
    return one.model, one.config, one.profile.graph_tokens, engine, machine.device.name


@cache
def calibration_without(family: str) -> Calibration:
    """Return what all recordings of other families were off by."""
    return Calibration(tuple(error for of, errors in _errors() if of != family for error in errors))


@cache
def _errors() -> tuple[tuple[str, tuple[MeasuredError, ...]], ...]:
    """Return of each recording its family, and what predictions of it were off by."""
    return tuple((family_of(one), measured_errors([one])) for folder in FOLDERS for one in recordings_of(folder))


def _errors_text() -> str:
    """Return what ships: the errors of all recordings as JSON, one a line."""
    rows = json.loads(to_json([error for _, errors in _errors() for error in errors]))
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


@cache
def pooled_row(name: str = "all of vLLM 0.33", *, since: str = "") -> FamilyRow:
    """Return a row over all recordings of ``NEWEST`` made from ``since`` on."""
    found = [pair for folder in NEWEST for pair in predicted_rows(folder) if pair[0].measured_at >= since]
    return _row(name, [one for one, _ in found], [row for _, rows in found for row in rows])


def held_out_row() -> FamilyRow:
    """Return a row of what was recorded after ``LAST_RULE``, as predicted today."""
    return pooled_row(
        "of these, recorded after all rules but decisions 57 to 59 and errors by graphs", since=LAST_RULE
    )


def frozen_row() -> FamilyRow:
    """Return a row of what was recorded after ``ALL_RULES``, as predicted today."""
    return pooled_row("of these, recorded after all rules but decision 59 and errors by graphs", since=ALL_RULES)


def _row(family: str, group: Sequence[Recorded], rows: Sequence[Row]) -> FamilyRow:
    tpot, ttft = ([row for row in rows if row.metric == metric] for metric in ("tpot", "ttft"))
    memory = [memory_row(one) for one in group]
    engines = {dict(one.profile.machine.versions)["engine"] for one in group}
    assert len(engines) == 1, f"{family}: a row is of one release, not {engines}"
    days = sorted(one.measured_at[:10] for one in group)
    return FamilyRow(
        family=family,
        mixture=any(one.profile.spec.num_experts for one in group),
        engine=engines.pop(),
        gpu=" and ".join(sorted({one.profile.machine.device.name for one in group})),
        measured=(days[0], days[-1]),
        models=tuple(dict.fromkeys(" ".join((one.model, *_degrees(one))) for one in group)),
        points=len(tpot),
        tpot=_median_and_worst([abs(row.error) for row in tpot]),
        ttft=_median_and_worst([abs(row.error) for row in ttft if row.truth_s >= SHORT_S]),
        short_ttft_s=max((abs(r.predicted_s - r.truth_s) for r in ttft if r.truth_s < SHORT_S), default=0.0),
        ttft_bias=statistics.median(row.error for row in ttft),
        inside=(_share_inside(tpot), _share_inside(ttft)),
        half_width=(_half_width(tpot), _half_width(ttft)),
        weights=max(abs(m.weights_predicted / m.weights_bytes - 1) for m in memory),
        non_kv=max(abs(m.non_kv_predicted / m.non_kv_bytes - 1) for m in memory),
        blocks=max(abs(m.blocks_predicted / m.blocks - 1) for m in memory),
        graph_tokens=min(one.profile.graph_tokens for one in group),
        profile_s=max(cost_row(one).profile_s * one.tp * one.pp for one in group),
    )


def _degrees(one: Recorded) -> list[str]:
    degrees = [f"{name} {n}" for name, n in (("TP", one.tp), ("PP", one.pp)) if n > 1]
    return [*degrees, *(["expert parallel"] if one.expert_parallel else [])]


def _median_and_worst(errors: Sequence[float]) -> tuple[float, float]:
    return (statistics.median(errors), max(errors)) if errors else (float("nan"), float("nan"))


def _share_inside(rows: Sequence[Row]) -> float:
    return sum(row.inside for row in rows) / len(rows)


def _half_width(rows: Sequence[Row]) -> float:
    return statistics.median((row.high_s - row.low_s) / 2 / row.predicted_s for row in rows)


def table() -> str:
    """Return the errors of every family, as Markdown."""
    return family_table(family_rows(), pooled_row(), [held_out_row(), frozen_row()])


def goals_table() -> str:
    """Return the goals with what was measured on the newest release, as Markdown."""
    rows = [row for row in family_rows(NEWEST) if row.family != "all"]
    pooled = pooled_row()
    answered = Counter(row.method for row in _by_others() if row.metric == "tpot")
    counts = (f"{answered[method]} of {pooled.points} by {method}" for method in PUBLISHED_WITH.values())
    served = within_by_model(read_played(SERVED))
    return summary_table(rows, pooled, served, "; ".join(counts), within_by_model(anew()))


def others_tables() -> tuple[str, str]:
    """Return the errors of other methods on the newest release, next to ours: by kind of model, and by model."""
    recorded = [one for folder in NEWEST for one in recordings_of(folder)]
    ours = [row for folder in NEWEST for _, rows in predicted_rows(folder) for row in rows]
    mixtures = {one.model for one in recorded if one.profile.spec.num_experts}
    kinds: dict[str, Callable[[Row], bool]] = {
        "dense models": lambda row: row.model not in mixtures,
        "mixtures of experts": lambda row: row.model in mixtures,
        "all": lambda _: True,
    }
    named = dict.fromkeys(f"{row.model} {row.variant}" for row in ours)
    models = {name: partial(_is_of, name) for name in named}
    return others_table(ours, _by_others(), kinds), others_table(ours, _by_others(), models)


def _is_of(name: str, row: Row) -> bool:
    return f"{row.model} {row.variant}" == name


@cache
def _by_others() -> tuple[Row, ...]:
    rows = by_other_methods([one for folder in NEWEST for one in recordings_of(folder)])
    return tuple(
        replace(row, method=named)
        for method, named in PUBLISHED_WITH.items()
        for row in rows
        if row.method == method
    )


def size_table(folders: Iterable[str] = FOLDERS) -> str:
    """Return the errors by prompt tokens of the whole batch, dense models and mixtures apart, as Markdown."""
    lines = [
        "| prompt tokens in all | points | TPOT median / worst | TTFT median / worst | inside |",
        "|---|--:|--:|--:|--:|",
    ]
    predicted = [pair for folder in folders for pair in predicted_rows(folder)]
    for kind, mixtures in (("dense", False), ("mixtures of experts", True)):
        rows = [r for one, rows in predicted if one.profile.spec.is_mixture == mixtures for r in rows]
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
    print(goals_table(), table(), *others_tables(), size_table(), sep="\n\n")
    if options.json:
        options.json.write_bytes(to_json([pooled_row(), held_out_row(), frozen_row(), *family_rows()], indent=1))
    if options.write_errors:
        _ERRORS.write_text(_errors_text())


if __name__ == "__main__":
    main()
