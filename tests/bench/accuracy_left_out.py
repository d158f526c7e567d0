"""Predictions where the profile has no point: the judged point left out, or all points but those of a plan.

    python -m tests.bench.accuracy_left_out table | later | choose

``table``: TTFT and TPOT of the recordings of vLLM 0.33 against whole models, calibrated without the judged
model's family. ``accuracy_families`` judges at points that the profile ran; here a prediction rests on other ones.
``later``: the same of recordings that decision 58 was made without. ``choose``: the constants of L3's Gaussian
process over prompts (``estimators.l3``), by the likelihood of each measured point of a profile under the rest of
its points, for all profiles and without each family. No whole model takes part.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import numpy.typing as npt

from fingerprint.config import Workload
from fingerprint.estimates import Source
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.l3 import L3
from fingerprint.measurements import key_of
from tests.bench.accuracy import RESULTS, Recorded, Row, Truth, _roofline, _rows, load, truths
from tests.bench.accuracy_families import calibration_without, family_of

__all__ = ["FOLDERS", "Constants", "choose", "left_out_rows", "log_likelihood", "table"]

FOLDERS = ("families-h200-vllm-0.33", "graphs-512-h200-vllm-0.33", "h200-vllm-0.33", "h100-vllm-0.33")
UNTIL = "2026-11-29"  # recordings from then on had no part in decision 58
LATER = ("families-h200-vllm-0.33", "degrees-h200-vllm-0.33")  # where such are
Point = tuple[int, int]  # batch, input tokens
Array = npt.NDArray[np.float64]
Constants = tuple[float, float, float, float]  # octaves of tokens and of shape, launched apart, spread
GRID: tuple[Constants, ...] = tuple(
    itertools.product((1.0, 1.5, 2.0, 2.5, 3.0), (2.0, 3.0, 4.0, 6.0), (0.5, 0.7, 1.0, 1.5), (0.3, 0.4, 0.5, 0.6))
)
PLAN = frozenset((batch, tokens) for batch in (1, 8, 32) for tokens in (128, 1024))  # as of 32 x 1,024
SMALL = frozenset((batch, tokens) for batch in (1, 8, 32) for tokens in (128, 512, 1024))


@dataclass(frozen=True, slots=True)
class Case:
    """Points that a prediction may rest on, and truths that it is judged by."""

    name: str
    rests_on: Callable[[Point, Point], bool]  # of a measured point and the judged one
    judges: Callable[[Point], bool]


CASES = (
    Case("all points", lambda point, judged: True, lambda judged: True),
    Case("all but the judged one", lambda point, judged: point != judged, lambda judged: True),
    Case(
        "1, 8 and 32 x 128 and 1,024; the rest judged",
        lambda point, judged: point in PLAN,
        lambda judged: judged not in PLAN,
    ),
    Case(
        "1, 8 and 32 x 128, 512 and 1,024; 128 requests and 2,048 tokens judged",
        lambda point, judged: point in SMALL,
        lambda judged: judged[0] == 128 or judged[1] == 2048,
    ),
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Prediction of one number."""

    is_mixture: bool
    is_between: bool  # in the hull of the points that it rests on
    row: Row


def _recordings(folder: str, *, later: bool = False) -> list[Recorded]:
    return [one for one in load(RESULTS / folder) if (one.measured_at >= UNTIL) == later]


def left_out_rows(case: Case, folders: Sequence[str] = FOLDERS, *, later: bool = False) -> tuple[LeftOut, ...]:
    """Return all predictions of a case, for recordings before ``UNTIL`` or for later ones."""
    found = []
    for folder in folders:
        for one in _recordings(folder, later=later):
            calibration = calibration_without(family_of(one))
            for truth in truths(one):
                judged = truth.batch, truth.input_tokens
                if case.judges(judged):
                    profile = replace(
                        one.profile,
                        timing=tuple(
                            p for p in one.profile.timing if case.rests_on((p.batch, p.input_tokens), judged)
                        ),
                    )
                    estimator = DepthTiedEstimator(profile, _roofline(one), calibration)
                    found += _predicted(one, truth, estimator)
    return tuple(found)


def _predicted(one: Recorded, truth: Truth, estimator: DepthTiedEstimator) -> Iterator[LeftOut]:
    estimate = estimator.estimate(one.config, truth.workload)
    is_between = estimate.ttft_s.source is Source.EXTRAPOLATED
    for row in _rows(one, "L3", truth, estimate.ttft_s, estimate.tpot_s):
        yield LeftOut(one.profile.spec.is_mixture, is_between, row)


def table(folders: Sequence[str] = FOLDERS, *, later: bool = False) -> str:
    """Return errors and intervals of every case as Markdown."""
    lines = [
        "| the prediction rests on | models | judged points | TPOT median / worst | TTFT median / worst "
        "| inside | half-width |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in CASES:
        rows = left_out_rows(case, folders, later=later)
        for is_mixture, is_between in itertools.product((False, True), (True, False)):
            these = [r.row for r in rows if (r.is_mixture, r.is_between) == (is_mixture, is_between)]
            if these:
                kind = "mixtures" if is_mixture else "dense"
                where = "between" if is_between else "beyond"
                lines.append(f"| {case.name} | {kind}, {where} | {_cells(these)} |")
    return "\n".join(lines)


def _cells(rows: Sequence[Row]) -> str:
    tpot, ttft = ([row for row in rows if row.metric == metric] for metric in ("tpot", "ttft"))

    def errors(of: Sequence[Row]) -> str:
        found = [abs(row.error) for row in of]
        return f"{statistics.median(found):.1%} / {max(found):.1%}"

    inside = [sum(row.inside for row in of) / len(of) for of in (tpot, ttft)]
    widths = [statistics.median((r.high_s - r.low_s) / 2 / r.predicted_s for r in of) for of in (tpot, ttft)]
    cells = (
        str(len(tpot)),
        errors(tpot),
        errors(ttft),
        *(", ".join(f"{x:.0%}" for x in of) for of in (inside, widths)),
    )
    return " | ".join(cells)


@dataclass(frozen=True, slots=True)
class Measured:
    """Measured points of one profile."""

    family: str
    batch_and_input: Array  # [points, 2], log2
    log_ratios: Array  # [points], of TTFT to the roofline's
    noise: Array  # [points], variances


@cache
def measured(folders: tuple[str, ...] = FOLDERS) -> tuple[Measured, ...]:
    """Return the points of every profile in ``folders``."""
    found = []
    for one in (one for folder in folders for one in _recordings(folder)):
        roofline, config = _roofline(one), one.config
        points = L3(one.profile, roofline, calibration_without(family_of(one))).points[key_of(config)]
        ratios = []
        for point in points:
            at = Workload(batch=point.batch, input_tokens=point.input_tokens, output_tokens=2)
            ratios.append(math.log(point.ttft_s / roofline.estimate(config, at).ttft_s.value))
        found.append(
            Measured(
                family_of(one),
                np.log2([[p.batch, p.input_tokens] for p in points]),
                np.array(ratios),
                np.array([max(0.003, p.relative_spread / 1.6449) ** 2 for p in points]),
            )
        )
    return tuple(found)


def log_likelihood(profiles: Sequence[Measured], constants: Constants) -> float:
    """Return the log-likelihood of all points, each under the rest of its profile's; a constant is left out."""
    octaves_of_tokens, octaves_of_shape, launched_apart, spread = constants
    total = 0.0
    for one in profiles:
        batch, tokens = one.batch_and_input.T
        at = np.stack(
            [
                (batch + tokens) / octaves_of_tokens,
                (batch - tokens) / 2 / octaves_of_shape,
                (batch + tokens > 9) / launched_apart,
            ],
            axis=1,
        )
        alike = spread**2 * np.exp(-((at[:, None] - at[None]) ** 2).sum(-1) / 2)
        for index in range(len(at)):
            rest = np.arange(len(at)) != index
            mean = one.log_ratios[rest].mean()
            known = alike[np.ix_(rest, rest)] + np.diag(one.noise[rest])
            there = alike[rest, index]
            values, weights = np.linalg.solve(known, np.stack([one.log_ratios[rest] - mean, there], 1)).T
            variance = max(1e-9, spread**2 - float(there @ weights) + one.noise[index])
            apart = one.log_ratios[index] - mean - float(there @ values)
            total -= (apart**2 / variance + math.log(variance)) / 2
    return total


def choose(without: str = "") -> Constants:
    """Return the most likely constants of the grid, without the profiles of one family."""
    profiles = [one for one in measured() if one.family != without]
    return max(GRID, key=lambda constants: log_likelihood(profiles, constants))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("order", choices=("table", "later", "choose"))
    order = parser.parse_args().order
    if order != "choose":
        print(table(LATER, later=True) if order == "later" else table())
        return
    print("all:", choose())
    for family in dict.fromkeys(one.family for one in measured()):
        print(f"without {family}:", choose(family))


if __name__ == "__main__":
    main()
