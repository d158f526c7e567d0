"""Three recordings that the issue of unseen families brought: vLLM 0.24, calls with compilations counted.

At least three in four of each model's truths lie in the 90% intervals, TTFT and TPOT together; the goal was stated
before it was measured. Before points were checked for agreement it was 29, 20 and 6 of 30.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.estimates import Source
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from tests.bench.accuracy import _config, _roofline, load, predict_l3, truths
from tests.bench.accuracy_families import _without, family_of
from tests.bench.accuracy_measure import OUTPUT, Recorded
from tests.bench.accuracy_rows import Row

MODELS = {"Qwen2.5-14B": Source.EXTRAPOLATED, "gemma-2-9b": Source.EXTRAPOLATED, "gpt-oss-20b": Source.ROOFLINE}
INSIDE = 0.75

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recorded]:
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        pytest.skip("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    return {one.model: one for one in load(Path(folder) / "reference/recordings")}


def estimator(one: Recorded) -> DepthTiedEstimator:
    return DepthTiedEstimator(one.profile, _roofline(one), _without(family_of(one)))


def judged(one: Recorded) -> list[Row]:
    """Rows but the TPOT of batches for which the whole model had no KV room: their requests queued."""
    room = min(rank.kv_room_tokens for rank in one.whole_memory)
    rows = predict_l3(one, _without(family_of(one)))
    return [r for r in rows if r.metric == "ttft" or r.batch * (r.input_tokens + OUTPUT) <= room]


@pytest.mark.parametrize("model", MODELS)
def test_three_in_four_truths_are_inside(recordings: dict[str, Recorded], model: str) -> None:
    rows = judged(recordings[model])
    assert len(rows) == {"gemma-2-9b": 28}.get(model, 30)
    assert sum(row.inside for row in rows) >= INSIDE * len(rows)


@pytest.mark.parametrize("model", MODELS)
def test_each_answer_names_its_source(recordings: dict[str, Recorded], model: str) -> None:
    one = recordings[model]
    found = [estimator(one).estimate(_config(one), truth.workload) for truth in truths(one)]
    assert {quantity.source for e in found for quantity in (e.ttft_s, e.tpot_s)} == {MODELS[model]}


def test_the_profile_in_which_kernels_were_compiled_says_so(recordings: dict[str, Recorded]) -> None:
    found = {model: estimator(one).l3 for model, one in recordings.items()}
    assert {model for model, l3 in found.items() if l3.impossible} == {"gpt-oss-20b"}
    assert {model: len(l3.unusable) for model, l3 in found.items()} == {
        "Qwen2.5-14B": 1,
        "gemma-2-9b": 0,
        "gpt-oss-20b": 12,  # ten of its points of four layers, one of two, and that what is left is too little
    }


@pytest.mark.parametrize("model", MODELS)
def test_the_order_of_calls_changes_nothing(recordings: dict[str, Recorded], model: str) -> None:
    one = recordings[model]
    turned = tuple(replace(point, runs=point.runs[::-1]) for point in one.profile.timing)
    assert (
        estimator(replace(one, profile=replace(one.profile, timing=turned))).l3.unusable
        == estimator(one).l3.unusable
    )
