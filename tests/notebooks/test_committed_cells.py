"""Committed rows of every figure under load, whole, are the results of the real traces.

A figure takes minutes, so that each is caught by what is cheap of it: one trace at one rate, one or two of the
contestants, all its seeds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace

import pytest

from notebooks.figures.attainment import SLO_INTENT
from notebooks.figures.comparison import COST, LATENCY, Place, served
from notebooks.figures.contest import BASELINES, Contestant, iserve
from notebooks.figures.figure import Cell
from notebooks.figures.fleet_load import COLUMNS
from notebooks.figures.fleet_load import SCENE as TWENTY_ONE_MODELS
from notebooks.figures.h200 import ADVISED
from notebooks.figures.h200 import SCENE as FOUR_H200S
from notebooks.figures.harvest import attained
from notebooks.figures.load import SEED, SEEDS
from notebooks.figures.record import read
from notebooks.figures.under_load import FASTEST, FORMER, LARGE, SMALL
from planner.intent import IntentKind, Quality

pytestmark = pytest.mark.skipif(
    not os.environ.get("ISERVE_REFERENCE_DATA"), reason="ISERVE_REFERENCE_DATA does not name the reference data"
)
RECORD_AGAIN = "run `make evaluation` with the reference data"
MAX_TP = BASELINES[0]
SEEDS_OF = {"h200": (SEED,)}
COLUMNS_OF = {"11": LATENCY, "12": LATENCY | COST, "13": COST, "16-load": COLUMNS, "h200": LATENCY | COST}


def committed(number: str, *first: str) -> Mapping[str, Cell]:
    """The cells of every row of the figure's tables that begins so, by column."""
    found: dict[str, Cell] = {}
    for table in read(number).figure.tables:
        for row in table.rows:
            if row[: len(first)] == first:
                found |= dict(zip(table.columns[len(first) :], row[len(first) :], strict=True))
    assert found, f"figure {number} has no row {first}"
    return found


def digits(value: float) -> float | None:
    return float(f"{value:.4g}") if math.isfinite(value) else None


@pytest.mark.parametrize(
    ("number", "place", "who"),
    [
        ("11", Place("code", 0.1, LARGE), FASTEST),
        ("11", Place("code", 0.1, LARGE), FORMER),
        ("11", Place("code", 0.1, LARGE), MAX_TP),
        ("12", Place("code", 0.4, SMALL), FASTEST),
        ("12", Place("code", 0.4, SMALL), iserve(IntentKind.MIN_MEMORY)),
        ("13", Place("code", 0.1, LARGE), iserve(IntentKind.MIN_COST)),
        ("13", Place("code", 0.1, LARGE), iserve(IntentKind.MIN_GPU_HOURS, Quality.EXACT)),
        (
            "16-load",
            Place("code", 0.1, TWENTY_ONE_MODELS),
            replace(iserve(IntentKind.MIN_MEMORY), policy="hybrid"),
        ),
        (
            "h200",
            Place("code", 0.25, FOUR_H200S),
            replace(iserve(IntentKind.MIN_GPU_HOURS, Quality.NEAR), name="min-gpu-hours"),
        ),
        ("h200", Place("code", 0.25, FOUR_H200S), ADVISED[-1]),
    ],
    ids=lambda value: value.name if isinstance(value, Place | Contestant) else value,
)
def test_a_committed_row_is_what_comes_out(number: str, place: Place, who: Contestant) -> None:
    found = served(place, who, seeds=SEEDS_OF.get(number, SEEDS))
    assert found is not None
    live = {name: digits(of(found)) for name, of in COLUMNS_OF[number].items()}
    kept = committed(number, place.name, who.name)  # with the columns of further tables, where it is the best
    assert live == {name: kept[name] for name in live}, RECORD_AGAIN


@pytest.mark.parametrize(
    ("multiple", "who"), [(5.0, SLO_INTENT), (2.5, FASTEST)], ids=["latency-slo", "min-latency"]
)
def test_a_committed_attainment_is_what_comes_out(multiple: float, who: Contestant) -> None:
    found = served(Place("code", 0.1, LARGE), who, multiple)
    assert found is not None
    assert committed("14", f"{multiple:g}x", who.name)["rate 0.1"] == round(1 - found.missed, 4), RECORD_AGAIN


@pytest.mark.parametrize("profiled_gpus", [0, 1])
def test_a_committed_attainment_while_profiling_is_what_comes_out(profiled_gpus: int) -> None:
    met = sum(attained(0.1, profiled_gpus, seed)[0] for seed in SEEDS) / len(SEEDS)
    assert committed("20", "conv 0.1")[f"{profiled_gpus} GPUs profile"] == round(met, 4), RECORD_AGAIN
