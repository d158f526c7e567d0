"""Cache of each layer that vLLM 0.33 kept on an H200, against what the same config.json is planned with."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.families import load_spec
from fingerprint.model_spec import ModelSpec
from iserve.planning.estimator_factory import estimator_for
from tests.bench.family_runs import FamilyRun
from tests.bench.kept import read_kept

RECORDED = Path(__file__).parent / "results/families_h200.json.xz"


@cache
def runs() -> dict[str, FamilyRun]:
    return {run.name: run for run in from_json(read_kept(RECORDED), tuple[FamilyRun, ...], what="runs")}


@pytest.fixture(params=sorted(runs()))
def run(request: pytest.FixtureRequest) -> FamilyRun:
    return runs()[request.param]


@pytest.fixture
def spec(run: FamilyRun, tmp_path: Path) -> ModelSpec:
    """Return the model as it is described today, from the config.json that the run had."""
    (tmp_path / "config.json").write_text(run.config)
    return load_spec(tmp_path)


def test_each_layer_keeps_on_the_gpu_what_is_planned(run, spec) -> None:
    assert run.profile is not None
    for point in run.profile.memory:
        (rank,) = point.ranks
        assert [kept.layer for kept in rank.layer_caches] == list(range(point.num_layers))
        for kept in rank.layer_caches:
            kind = spec.kinds[spec.kind_indexes[kept.layer]]
            planned_bytes = 2 * kind.kv_share * spec.kv_elements
            state_bytes = kind.shape.state_bytes if kind.shape else 0
            assert (kept.token_bytes, kept.state_bytes, kept.window) == (planned_bytes, state_bytes, kind.window)


def test_the_log_says_the_same_room_as_the_answer() -> None:
    """``GPU KV cache size: N tokens`` is of whole blocks; where all layers keep alike nothing else enters it."""
    compared = 0
    for run in runs().values():
        if run.profile is None or len(set(run.profile.spec.kept_by_layer)) > 1:
            continue  # vLLM shares its blocks among kinds of layers before it says the tokens
        said = re.findall(r"cache size: ([\d,]+) tok", "\n".join(run.cache_lines))
        told = [int(size.replace(",", "")) for size in said]
        assert told == [point.ranks[0].kv_room_tokens for point in run.profile.memory][: len(told)]
        compared += len(told)
    assert compared == 8


def test_its_fingerprints_come_to_an_estimate_of_the_whole(run) -> None:
    """Also where bursts of one point differ by a step, as those on a shared GPU did."""
    estimator = estimator_for(run.profile)
    config = DeploymentConfig(tp=1, pp=1, engine="vllm")
    estimate = estimator.estimate(config, Workload(batch=4, input_tokens=128, output_tokens=64))
    assert 0 < estimate.tpot_s.value < 1
    assert estimate.memory.num_layers == run.profile.spec.num_layers
