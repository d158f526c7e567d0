"""The recorded law of our adapter kernels: refitted to the kept times, and judged by steps of whole models."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import nnls

from fingerprint.estimators import adapter_slots
from fingerprint.estimators.adapter_slots import MOST_KERNEL_ROWS, kernel_step_s
from tests.bench.kept import read_kept

RESULTS = Path(__file__).parent / "results"
LINEARS, LAYERS = 4, 36  # of Qwen3-8B


def times_us() -> dict[tuple[int, int, int], float]:
    """Return what our kernels add to the linears of a layer, by rows, distinct adapters and rank."""
    kept = json.loads(read_kept(RESULTS / "lora_contest_h200/deployed/kernels.json.xz"))
    found, counted = defaultdict[Any, float](float), defaultdict[Any, int](int)
    for row in kept["rows"]:
        if row["kind"] == "case":
            found[row["rows"], row["active"], 16] = 1e3 * row["ms"]["own"] / LAYERS
        elif row["kind"] == "time" and "rank" in row and row["run"] == "own":
            found[row["rows"], row["active"], row["rank"]] += row["us"]
            counted[row["rows"], row["active"], row["rank"]] += 1
    assert set(counted.values()) == {LINEARS}
    return dict(found)


def test_the_constants_are_the_least_squares_of_relative_errors() -> None:
    kept = times_us()
    rows = np.array([[1, rows, rank / 16, active * rank / 16] for rows, active, rank in kept])
    times = np.array(list(kept.values()))
    fitted, _ = nnls(rows / times[:, None], np.ones(len(times)))
    names = ("_KERNELS_S", "_KERNELS_ROW_S", "_KERNELS_RANK_16_S", "_KERNELS_ADAPTER_OF_RANK_16_S")
    constants = [1e6 * getattr(adapter_slots, name) for name in names]
    assert constants == pytest.approx(fitted, rel=1e-3)


def test_the_kept_times_are_met_within_a_fifth() -> None:
    kept = times_us()
    assert len(kept) == 25
    assert max(rows for rows, _, _ in kept) == MOST_KERNEL_ROWS
    errors = sorted(
        abs(1e6 * kernel_step_s(1, rows, active, rank) / us - 1) for (rows, active, rank), us in kept.items()
    )
    assert errors[-1] < 0.21
    assert errors[len(errors) * 3 // 4 - 1] < 0.09


@pytest.mark.parametrize("active", [1, 4, 8, 32])
def test_steps_of_a_whole_model_that_the_fit_did_not_see_are_met(active: int) -> None:
    """Compare what adapters add to Qwen3-8B in vLLM, 32 rows of rank 16: within 6%, and 0.8% of the step."""
    kept = json.loads(read_kept(RESULTS / "variant_costs_h200/own_kernels/qwen3-8b/whole-16.json.xz"))

    def step_s(slots: int, active: int) -> float:
        found = [
            row["step_s"]
            for row in kept["rows"]
            if row["kind"] == "burst" and "step_s" in row and (row["slots"], row["active"]) == (slots, active)
        ]
        return statistics.median(found[1:])  # the first warms up

    added_s = step_s(32, active) - step_s(0, 0)
    predicted_s = kernel_step_s(LAYERS, 32, active, 16)
    assert predicted_s == pytest.approx(added_s, rel=0.06)
    assert abs(predicted_s - added_s) < 0.008 * step_s(32, active)
