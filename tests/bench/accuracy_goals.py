"""Goals of predictions, and which of the measured rows miss them: tables of ``docs/accuracy.md``, as Markdown."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.bench.accuracy_rows import FamilyRow

__all__ = ["MISSED", "OF_A_FAMILY", "POOLED", "Goal", "family_table", "summary_table"]

MISSED = "†"
PROTOCOL_SINCE = "2026-11-26"  # days before, calls in which kernels were compiled counted


def _percent(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:.{digits}%}"


def _ms(value: float) -> str:
    return f"{1e3 * value:.1f} ms"


def _s(value: float) -> str:
    return f"{value:.0f} s"


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """Bounds on one number of a row."""

    name: str
    said: str  # the bounds, as the goal has them
    value: Callable[[FamilyRow], float]
    text: Callable[[float], str]
    least: float = -math.inf
    most: float = math.inf
    most_of_mixtures: float | None = None

    def met(self, row: FamilyRow) -> bool:
        """Return whether the row keeps the goal, before rounding; a number that it does not have keeps it."""
        most = self.most if self.most_of_mixtures is None or not row.mixture else self.most_of_mixtures
        value = self.value(row)
        return not (value < self.least or value > most)

    def cell(self, row: FamilyRow) -> str:
        return self.text(self.value(row))


OF_A_FAMILY: Mapping[str, Goal] = {
    "tpot": Goal(name="TPOT, median", said="2.5%", value=lambda r: r.tpot[0], text=_percent(1), most=0.025),
    "tpot worst": Goal(name="TPOT, worst", said="8%", value=lambda r: r.tpot[1], text=_percent(1), most=0.08),
    "ttft": Goal(name="TTFT, median", said="5%", value=lambda r: r.ttft[0], text=_percent(1), most=0.05),
    "ttft worst": Goal(name="TTFT, worst", said="15%", value=lambda r: r.ttft[1], text=_percent(1), most=0.15),
    "short": Goal(
        name="TTFT under 15 ms, worst", said="2 ms", value=lambda r: r.short_ttft_s, text=_ms, most=0.002
    ),
    "inside tpot": Goal(
        name="TPOT inside", said="75% or more", value=lambda r: r.inside[0], text=_percent(0), least=0.75
    ),
    "inside ttft": Goal(
        name="TTFT inside", said="75% or more", value=lambda r: r.inside[1], text=_percent(0), least=0.75
    ),
    "weights": Goal(name="weights", said="0.1%", value=lambda r: r.weights, text=_percent(2), most=0.001),
    "non-KV": Goal(name="non-KV memory", said="3%", value=lambda r: r.non_kv, text=_percent(2), most=0.03),
    "blocks": Goal(name="KV blocks", said="1%", value=lambda r: r.blocks, text=_percent(2), most=0.01),
    "profile": Goal(
        name="GPU-seconds of a profile",
        said="45; mixtures 90",
        value=lambda r: r.profile_s,
        text=_s,
        most=45,
        most_of_mixtures=90,
    ),
}
POOLED: Mapping[str, Goal] = {
    "inside tpot": Goal(
        name="TPOT inside, pooled",
        said="87 to 93%",
        value=lambda r: r.inside[0],
        text=_percent(1),
        least=0.87,
        most=0.93,
    ),
    "inside ttft": Goal(
        name="TTFT inside, pooled",
        said="87 to 93%",
        value=lambda r: r.inside[1],
        text=_percent(1),
        least=0.87,
        most=0.93,
    ),
    "half-width tpot": Goal(
        name="half-width of TPOT, median", said="6%", value=lambda r: r.half_width[0], text=_percent(1), most=0.06
    ),
    "half-width ttft": Goal(
        name="half-width of TTFT, median", said="12%", value=lambda r: r.half_width[1], text=_percent(1), most=0.12
    ),
}
_FULL_TTFT = ("ttft", "ttft worst", "short")


def family_table(rows: Iterable[FamilyRow], pooled: FamilyRow, parts: Iterable[FamilyRow]) -> str:
    """Return the rows below their goals; ``MISSED`` marks each number that misses its goal.

    Args:
        rows: those named ``all`` are of several families, for which no goal is.
        pooled: everything that pooled goals are of.
        parts: rows of parts of it, for which no goal is.
    """
    lines = [
        "| family | points | TPOT median / worst | TTFT median / worst | TTFT under 15 ms, worst | TTFT bias "
        "| inside | half-width | weights, non-KV, KV blocks | profile |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
        "| *goal of a family* | | 2.5% / 8% | 5% / 15% | 2 ms | | 75%, 75% | | 0.1%, 3%, 1% "
        "| 45 s, mixtures 90 s |",
        "| *goal, pooled* | | | | | | 87 to 93% | 6%, 12% | | |",
        _line(pooled, POOLED),
        *(_line(row, {}) for row in parts),
    ]
    under = ""
    for row in rows:
        if (here := _heading(row)) != under:
            under = here
            lines.append(f"| **{here}** |{' |' * 9}")
        lines.append(_line(row, {} if row.family == "all" else OF_A_FAMILY))
    return "\n".join(lines)


def _heading(row: FamilyRow) -> str:
    earlier = ", calls with compilations counted" if row.measured[1] < PROTOCOL_SINCE else ""
    several = ", on two of them" if all(model.endswith((" TP 2", " PP 2")) for model in row.models) else ""
    graphs = ", before their graphs were larger" if row.has_earlier_graphs else ""
    return f"{row.engine}, {row.gpu}{several}{graphs}{earlier}"


def _line(row: FamilyRow, goals: Mapping[str, Goal]) -> str:
    """Return a line of the table, in which each number is judged that has a goal in ``goals``."""

    def cell(name: str) -> str:
        text = (OF_A_FAMILY.get(name) or POOLED[name]).cell(row)
        return text if name not in goals or goals[name].met(row) else text + MISSED

    graphs = f"; graphs to {row.graph_tokens}" if row.mixture else ""
    models = f" ({', '.join(row.models)}{graphs})" if goals is OF_A_FAMILY else ""
    return (
        f"| {row.family}{models} | {row.points} | {cell('tpot')} / {cell('tpot worst')} "
        f"| {cell('ttft')} / {cell('ttft worst')} | {cell('short')} | {row.ttft_bias:+.1%} "
        f"| {cell('inside tpot')}, {cell('inside ttft')} | {cell('half-width tpot')}, {cell('half-width ttft')} "
        f"| {cell('weights')}, {cell('non-KV')}, {cell('blocks')} | {cell('profile')} |"
    )


def summary_table(
    rows: Sequence[FamilyRow],
    pooled: FamilyRow,
    served: Mapping[str, tuple[int, int]],
    answered: str,
    anew: Mapping[str, tuple[int, int]] | None = None,
) -> str:
    """Return each goal, what was measured, and which rows miss it.

    Args:
        rows: one for each family and kind of GPU.
        pooled: all of them together.
        served: of each model that was served, how many percentiles are within their goals, and of how many.
        answered: at how many points the other methods answer.
        anew: as ``served``, of the same replays simulated again once they were known.
    """
    lines = ["| goal | measured | met, or missed by |", "|---|---|---|"]
    for name, goal in OF_A_FAMILY.items():
        values = sorted(goal.value(row) for row in rows if not math.isnan(goal.value(row)))
        measured = f"{goal.text(values[0])} to {goal.text(values[-1])}"
        lines.append(f"| {goal.name}: {goal.said} | {measured} | {_misses(goal, rows)} |")
        if name == _FULL_TTFT[-1]:
            kept = [row for row in rows if all(OF_A_FAMILY[each].met(row) for each in _FULL_TTFT)]
            named = ", ".join(", ".join(row.models) for row in kept)
            lines.append(f"| all three of TTFT | | met by {len(kept)} of {len(rows)}: {named} |")
    for goal in POOLED.values():
        verdict = "met" if goal.met(pooled) else "**missed**"
        lines.append(f"| {goal.name}: {goal.said} | {goal.cell(pooled)} | {verdict} |")
    lines.append("| 45 GPU-seconds for the second profile of a machine | not measured | not known |")
    within = _within(served) + (f"; simulated anew, the replays known, {_within(anew)}" if anew else "")
    kept = "met" if all(met == count for met, count in served.values()) else "**missed**"
    kept = kept if served else "not known"
    lines.append(
        f"| served steady state: P50 8%, P90 10%, P99 15% | [percentiles](fidelity.md) within: {within} | {kept} |"
    )
    lines.append(
        f"| AIConfigurator and the paper's literal method, on the same points | {answered} | published below |"
    )
    return "\n".join(lines)


def _within(served: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{model} {met} of {count}" for model, (met, count) in served.items())


def _misses(goal: Goal, rows: Sequence[FamilyRow]) -> str:
    """Return the rows that miss the goal, the farthest first, or ``met``."""
    missed = [row for row in rows if not goal.met(row)]
    if not missed:
        return "met"
    missed.sort(key=goal.value, reverse=goal.least == -math.inf)
    return f"**{len(missed)} of {len(rows)}**: " + ", ".join(
        f"{', '.join(r.models)} {goal.cell(r)}" for r in missed
    )
