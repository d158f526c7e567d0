"""Judgment of the served steady state: the simulator's percentiles against those of repeated replays.

A percentile is the median over the replays of a load, on either side; its spread is the largest of them less the
smallest, over the median. It is within where the prediction errs by no more than its goal or than twice the
spread; where it is the spread, that is said. TTFT, ITL and E2E are judged. TPOT is reported, as are loads from 0.9
on and replays in which a request failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.bench.fidelity_compare import PERCENTS, relative_error
from tests.bench.fidelity_served import REPORTED_FROM, Launch, Played, read_played

__all__ = ["GOALS", "JUDGED", "Figure", "figures", "table", "within_by_model"]

GOALS = dict(zip(PERCENTS, (0.08, 0.10, 0.15), strict=True))
JUDGED = ("TTFT", "ITL", "E2E")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Percentile of one metric at one load."""

    metric: str
    percent: int
    measured_s: float
    simulated_s: float
    spread: float | None  # of the measured; None: one replay
    judged: bool

    @property
    def error(self) -> float:
        return relative_error(self.simulated_s, self.measured_s)

    @property
    def meets_goal(self) -> bool:
        return abs(self.error) <= GOALS[self.percent]

    @property
    def within(self) -> bool:
        """Return whether the error is within the goal or, where replays differ, within twice what they do."""
        return self.meets_goal or abs(self.error) <= 2 * (self.spread or 0.0)


def figures(replays: Sequence[Played]) -> list[Figure]:
    """Return the percentiles of the replays of one load."""
    judged = replays[0].turn.load < REPORTED_FROM and not any(one.failures for one in replays)
    names = [metric.name for metric in replays[0].found.predictions[0].metrics]
    found = []
    for name in names:
        metrics = [one.found.predictions[0].metric(name) for one in replays]
        for number, percent in enumerate(PERCENTS):
            real_s = np.array([metric.real_s[number] for metric in metrics])
            measured_s = float(np.median(real_s))
            found.append(
                Figure(
                    metric=name,
                    percent=percent,
                    measured_s=measured_s,
                    simulated_s=float(np.median([metric.simulated_s[number] for metric in metrics])),
                    spread=float(np.ptp(real_s)) / measured_s if len(real_s) > 1 and measured_s else None,
                    judged=judged and name in JUDGED,
                )
            )
    return found


def within_by_model(servers: Iterable[tuple[Launch, Sequence[Played]]]) -> dict[str, tuple[int, int]]:
    """Return of each model how many judged figures are within, and of how many."""
    by_model: dict[str, list[Figure]] = {}
    for launch, played in servers:
        found = by_model.setdefault(launch.asked.model, [])
        for load in {one.turn.load for one in played}:
            replays = [one for one in played if one.turn.load == load]
            found += [figure for figure in figures(replays) if figure.judged]
    return {name: (sum(figure.within for figure in found), len(found)) for name, found in sorted(by_model.items())}


def table(out: Path) -> str:
    """Return all that is in a folder as tables, with what is within and what was not played."""
    return "\n".join(_lines(out)) or f"nothing was played in {out}"


def _lines(out: Path) -> Iterator[str]:
    judged: list[Figure] = []
    for launch, played in read_played(out):
        yield from _head(launch, played)
        yield "| load | replays | | P50 | P90 | P99 | |"
        yield "|---|---|---|---|---|---|---|"
        for load in sorted({one.turn.load for one in played}):
            replays = [one for one in played if one.turn.load == load]
            found = figures(replays)
            yield from _rows(load, replays, found)
            judged += [figure for figure in found if figure.judged]
        yield ""
    if judged:
        within = sum(figure.within for figure in judged)
        goals = "8% (P50), 10% (P90), 15% (P99) or twice the spread"
        met = sum(figure.meets_goal for figure in judged)
        yield f"{within} of {len(judged)} judged figures are within {goals}; {met} without the spread."


def _head(launch: Launch, played: Sequence[Played]) -> Iterator[str]:
    asked = launch.asked
    cache = "off"
    if asked.prefix_cache:
        shares = [one.cached_share for one in played if one.cached_share is not None]
        simulated = [one.simulated_cached_share for one in played]
        cache = (
            "on: "
            + (f"{np.mean(shares):.0%}" if shares else "an unknown share")
            + " of the prompts' tokens cached"
        )
        cache += f", simulated {np.mean(simulated):.0%}" if simulated else ""
    by = {"burst": "as a burst of the trace was served", "simulator": "by the simulator", "given": "as given"}
    yield f"### {asked.model}, prefix cache {cache}"
    yield ""
    yield (
        f"{launch.machine}, {launch.versions}, {launch.date}; {asked.trace}, {asked.window_s:g} s a replay; loads "
        f"are shares of {launch.capacity_requests_per_s:.3g} requests/s, {by[asked.capacity_by]} (simulated "
        f"{launch.simulated_capacity_requests_per_s:.3g}). Cells: measured, error of the simulator, spread."
    )
    yield ""
    together = max((one.tokens_in_one_piece for one in played), default=0.0)
    if together > 0.01:
        yield f"Up to {together:.0%} of the tokens of a replay arrived with the one before; their gaps are 0."
        yield ""


def _rows(load: float, replays: Sequence[Played], found: Sequence[Figure]) -> Iterator[str]:
    failed = sum(count for one in replays for _, count in one.failures)
    for name in dict.fromkeys(figure.metric for figure in found):
        row = [figure for figure in found if figure.metric == name]
        if any(not figure.judged for figure in row):
            verdict = f"reported: {failed} failed" if failed else "reported"
        else:
            late = [f"P{figure.percent}" for figure in row if not figure.within]
            noisy = [f"P{figure.percent}" for figure in row if figure.within and not figure.meets_goal]
            verdict = f"**misses {', '.join(late)}**" if late else "within"
            verdict += f", by the spread {', '.join(noisy)}" if noisy else ""
        cells = " | ".join(_cell(figure) for figure in row)
        yield f"| {load:g} | {len(replays)} | {name} | {cells} | {verdict} |"


def _cell(figure: Figure) -> str:
    spread = "" if figure.spread is None else f" ({figure.spread:.1%})"
    measured_ms = figure.measured_s * 1e3
    measured = f"{measured_ms:,.0f}" if measured_ms >= 1000 else f"{measured_ms:.4g}"
    return f"{measured} ms {figure.error:+.1%}{spread}"
