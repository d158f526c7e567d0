"""Three recordings that the issue of unseen families brought: vLLM 0.24, calls with compilations counted.

Goal, stated before it was measured: three in four of each model's truths lie in the 90% intervals, TTFT and TPOT
together. Two models of three meet it. gemma-2-9b does not: of its misses two are TPOTs of batches for which the
whole model had no KV room, whose requests queued. Before points were checked for agreement it was 29, 20 and 6.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.estimates import Source
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from tests.bench.accuracy import _roofline, load, predict_l3, truths
from tests.bench.accuracy_families import calibration_without, family_of
from tests.bench.accuracy_measure import Recorded

MODELS = {"Qwen2.5-14B": Source.EXTRAPOLATED, "gemma-2-9b": Source.EXTRAPOLATED, "gpt-oss-20b": Source.ROOFLINE}
INSIDE = {"Qwen2.5-14B": 27, "gemma-2-9b": 21, "gpt-oss-20b": 23}  # of 30

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recorded]:
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        pytest.skip("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    return {one.model: one for one in load(Path(folder) / "reference/recordings")}


def estimator(one: Recorded) -> DepthTiedEstimator:
    return DepthTiedEstimator(one.profile, _roofline(one), calibration_without(family_of(one)))


@pytest.mark.parametrize("model", MODELS)
def test_as_many_truths_are_inside_as_were(recordings: dict[str, Recorded], model: str) -> None:
    one = recordings[model]
    rows = predict_l3(one, calibration_without(family_of(one)))
    assert len(rows) == 30
    assert sum(row.inside for row in rows) >= INSIDE[model]


@pytest.mark.parametrize("model", MODELS)
def test_each_answer_names_its_source(recordings: dict[str, Recorded], model: str) -> None:
    one = recordings[model]
    found = [estimator(one).estimate(one.config, truth.workload) for truth in truths(one)]
    assert {quantity.source for e in found for quantity in (e.ttft_s, e.tpot_s)} == {MODELS[model]}


def test_the_profile_in_which_kernels_were_compiled_says_so(recordings: dict[str, Recorded]) -> None:
    found = {model: estimator(one).l3 for model, one in recordings.items()}
    assert {model for model, l3 in found.items() if l3.impossible} == {"gpt-oss-20b"}
    assert {model: len(l3.unusable) for model, l3 in found.items()} == {
        "Qwen2.5-14B": 2,  # a call of one layer count, and that the host was slower at one of the two depths
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
