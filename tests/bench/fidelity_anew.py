"""Kept replays to vLLM 0.33, simulated by the simulator of today with the newest profile of each model.

    python -m tests.bench.fidelity_anew

Requests and measured figures are those that were played. That a figure is nearer here than when it was played
shows what a change does, not that it is right: its author had seen the replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from fingerprint.measurements import Profile
from tests.bench.accuracy import RESULTS
from tests.bench.fidelity import read_profile, served_by
from tests.bench.fidelity_compare import (
    PERCENTS,
    Metric,
    Served,
    relative_error,
    simulated_requests,
    token_gaps_s,
)
from tests.bench.fidelity_served import Launch, Played, read_played
from tests.bench.fidelity_table import JUDGED, Figure, figures
from traces.outcomes import Floats, Outcomes

__all__ = ["SERVED", "anew", "table"]

SERVED = RESULTS / "fidelity/h200-vllm-0.33"
_PROFILES = {
    "Llama-3.1-8B": "h200-vllm-0.33",
    "Qwen3-30B-A3B": "graphs-512-h200-vllm-0.33",  # as the servers that were replayed
    "gemma-2-9b": "families-h200-vllm-0.33",
}
_VALUES: Mapping[str, Callable[[Outcomes], Floats]] = {
    "TTFT": lambda outcomes: outcomes.ttft_from_send_s,
    "TPOT": lambda outcomes: outcomes.tpot_s,
    "E2E": lambda outcomes: outcomes.e2e_from_send_s,
    "ITL": token_gaps_s,
}


@cache
def anew(out: Path = SERVED) -> tuple[tuple[Launch, tuple[Played, ...]], ...]:
    """Return every server with its replays, each with the prediction of today in place of its own."""
    found = []
    for launch, played in read_played(out):
        served = served_by(launch.target, _profile(launch.asked.model), None, launch.lone)
        served = replace(served, prefix_cache=launch.asked.prefix_cache)
        found.append((launch, tuple(_simulated(one, served) for one in played)))
    return tuple(found)


def _profile(model: str) -> Profile:
    return read_profile(RESULTS / _PROFILES[model] / f"{model}-16bit-tp1-pp1.json.xz")


def _simulated(played: Played, served: Served) -> Played:
    outcomes = simulated_requests(played.requests.requests(), served)
    (then,) = played.found.predictions
    metrics = tuple(_metric(metric, outcomes) for metric in then.metrics)
    now = replace(then, completed=int(outcomes.completed.sum()), metrics=metrics)
    return replace(played, found=replace(played.found, predictions=(now,)))


def _metric(measured: Metric, outcomes: Outcomes) -> Metric:
    values = _VALUES[measured.name](outcomes)
    simulated_s = tuple(float(value) for value in np.nanpercentile(values, PERCENTS))
    return replace(
        measured,
        simulated_s=simulated_s,
        errors=tuple(map(relative_error, simulated_s, measured.real_s)),
        median_request_error=float("nan"),  # the measured requests are not kept one by one
        simulated_curve=(),
    )


def table(out: Path = SERVED) -> str:
    """Return the errors of today as a table, a line for each load of each server."""
    lines = ["| model | cache | load | TTFT P50 / P90 / P99 | ITL | E2E |", "|---|---|---|---|---|---|"]
    judged: list[Figure] = []
    for launch, played in anew(out):
        for load in sorted({one.turn.load for one in played}):
            found = figures([one for one in played if one.turn.load == load])
            judged += [figure for figure in found if figure.judged]
            cells = (" / ".join(_cell(one) for one in found if one.metric == name) for name in JUDGED)
            kind = "on" if launch.asked.prefix_cache else "off"
            lines.append(f"| {launch.asked.model} | {kind} | {load:g} | {' | '.join(cells)} |")
    within = sum(figure.within for figure in judged)
    lines += ["", f"{within} of {len(judged)} judged figures are within; bold ones are not."]
    return "\n".join(lines)


def _cell(figure: Figure) -> str:
    text = f"{figure.error:+.0%}"
    return f"**{text}**" if figure.judged and not figure.within else text


if __name__ == "__main__":
    print(table())
