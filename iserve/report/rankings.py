"""The ranked table of every intent, and the one table that holds every configuration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from iserve.report.markup import Child, Markup, el, join
from iserve.report.tables import bullets, fold, quantity, table, verdict
from iserve.report.text import gib, label, number
from iserve.report.values import Configuration, RankedRow, Ranking, Report

__all__ = ["ROWS", "all_configurations", "per_intent"]

ROWS = 12
_REASONS = 6


def per_intent(report: Report) -> Markup | None:
    """Return a table per intent, the first one open."""
    if not report.rankings:
        return None
    folds = [_ranking(report, ranking, is_open=i == 0) for i, ranking in enumerate(report.rankings)]
    return join(
        el("p", "Best first among the configurations that would work; the marked one is what the intent chooses."),
        folds,
    )


def _ranking(report: Report, ranking: Ranking, *, is_open: bool) -> Markup:
    feasible = [row for row in ranking.rows if row.feasible]
    refused = [row for row in ranking.rows if not row.feasible]
    said = ranking.verdict
    best = "nothing is feasible"
    if said is not None:
        best = said.sentence
    elif feasible:
        best = label(report.configurations[feasible[0].configuration].config)
    parts: list[Child] = [] if said is None else [verdict(said)]
    parts.append(el("p", f"Optimises {ranking.objective}.", class_="soft"))
    if ranking.limit:
        parts.append(el("p", ranking.limit))
    if feasible:
        parts.append(_table(report, feasible[:ROWS], chosen=True))
    if len(feasible) > ROWS:
        parts.append(
            el(
                "p",
                f"{len(feasible) - ROWS} more would work; the table of all configurations has them.",
                class_="soft",
            )
        )
    if ranking.remarks:
        parts += [el("h3", "Why not"), bullets(ranking.remarks)]
    if refused:
        counted = f"{len(refused)} refused, by reason" if said is None else said.refused
        parts.append(fold(counted, _reasons(refused)))
    return fold([el("b", ranking.intent), f": {best}"], parts, is_open=is_open, class_="card")


def _reasons(refused: Sequence[RankedRow]) -> Markup:
    counted = Counter(row.reason or "no reason was given" for row in refused).most_common()
    lines = [f"{count} × {reason}" for reason, count in counted[:_REASONS]]
    left = sum(count for _, count in counted[_REASONS:])
    return bullets(
        lines + ([f"{left} for other reasons; the table of all configurations has each"] if left else [])
    )


def _table(report: Report, rows: Sequence[RankedRow], *, chosen: bool) -> Markup:
    made = []
    for position, row in enumerate(rows, start=1):
        found = report.configurations[row.configuration]
        objective = "unknown" if row.objective is None else number(row.objective)
        made.append(
            el(
                "tr",
                el("td", str(position)),
                _name(found),
                el("td", objective, class_="n"),
                _figures(found),
                class_="chosen" if chosen and position == 1 else None,
            )
        )
    names = (
        "",
        "configuration",
        "objective",
        "memory per GPU",
        "TTFT",
        "TPOT",
        "E2E",
        f"cost, {report.cost_unit}",
    )
    return table(names, made, left=(0, 1))


def _name(found: Configuration) -> Markup:
    split = found.layers_per_stage
    stages = f", layers {'+'.join(map(str, split))}" if split and len(split) > 1 else ""
    return el("td", label(found.config), el("small", f"{found.config.engine}{stages}"), class_="l")


def _figures(found: Configuration) -> list[Markup]:
    stage, estimate = found.fullest_stage, found.estimate
    if stage is None or estimate is None:
        return [el("td", "not predicted", colspan=5, class_="n")]
    return [
        el(
            "td",
            gib(stage.total_bytes),
            el("small", f"± {estimate.memory.relative_error:.1%}"),
            el("small", str(estimate.memory.source)),
            class_="n",
        ),
        quantity(estimate.ttft_s),
        quantity(estimate.tpot_s),
        quantity(estimate.e2e_s),
        el("td", "unknown" if found.cost is None else number(found.cost), class_="n"),
    ]


def all_configurations(report: Report) -> Markup:
    """Return every configuration of the space, the refused ones with their reason."""
    rows = [
        el(
            "tr",
            _name(found),
            _figures(found),
            el("td", "would work" if found.feasible else found.reason or "refused", class_="why"),
            class_=None if found.feasible else "refused",
        )
        for found in report.configurations
    ]
    names = ("configuration", "memory per GPU", "TTFT", "TPOT", "E2E", f"cost, {report.cost_unit}", "verdict")
    return join(
        el(
            "p",
            f"{len(rows)} configurations: the whole space on {report.hardware}, with no limit but the quality.",
        ),
        fold("Show all", table(names, rows, left=(0, 6)), is_open=len(rows) <= 40),
    )
