"""Cache of each layer that vLLM 0.33 kept on an H200, against what the same config.json is planned with."""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path

import pytest

from fingerprint.cache_blocks import block_bytes
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.depth_tied_cuts import tied_depths
from fingerprint.engine_caches import caches_of_layers
from fingerprint.families import load_spec
from fingerprint.model_spec import ModelSpec
from fingerprint.truncate import generate_shape
from iserve.planning.estimator_factory import estimator_for
from tests.bench.family_runs import FamilyRun
from tests.bench.kept import read_kept
from tests.golden_words import Golden

RECORDED = Path(__file__).parent / "results/families_h200.json.xz"
FALCON_H1 = "default-falcon-h1"  # attention and states in each layer


@cache
def runs() -> dict[str, FamilyRun]:
    return {run.name: run for run in from_json(read_kept(RECORDED), tuple[FamilyRun, ...], what="runs")}


def spec_of(run: FamilyRun, folder: Path) -> ModelSpec:
    """Return the model as it is described today, from the config.json that the run had."""
    (folder / "config.json").write_text(run.config)
    return load_spec(folder)


def profiled() -> list[FamilyRun]:
    """Return the runs that measured all they had planned; device time ended the rest."""
    return [run for run in runs().values() if run.profile is not None]


def test_nineteen_of_twenty_three_families_were_profiled(golden: Golden) -> None:
    assert (len(runs()), len(profiled())) == (23, 19)
    cut_short = {run.name: run.why_not for run in runs().values() if run.profile is None}
    assert set(cut_short) == {"DeepSeek-V3", "OLMoE-1B-7B", "Qwen1.5-MoE-A2.7B", "Qwen3.5-27B-text"}
    golden("reports", set(cut_short.values()))


@pytest.mark.parametrize("run", profiled(), ids=lambda run: run.name)
def test_each_layer_keeps_on_the_gpu_what_is_planned(run, tmp_path) -> None:
    spec = spec_of(run, tmp_path)
    for point in run.profile.memory:
        caches = caches_of_layers(point)
        assert [kept.layer for kept in caches] == list(range(point.num_layers))
        for kept in caches:
            kind = spec.kinds[spec.kind_indexes[kept.layer]]
            planned_bytes = 2 * kind.kv_share * spec.kv_elements
            state_bytes = kind.shape.state_bytes if kind.shape else 0
            assert (kept.token_bytes, kept.state_bytes, kept.window) == (planned_bytes, state_bytes, kind.window)


def test_the_log_says_the_same_room_as_the_answer() -> None:
    """``GPU KV cache size: N tokens`` is of whole blocks; where all layers keep alike nothing else enters it."""
    compared = 0
    for run in profiled():
        if len(set(run.profile.spec.kept_by_layer)) > 1 or run.name == FALCON_H1:
            continue  # vLLM shares its blocks among kinds of caches before it says the tokens
        said = re.findall(r"cache size: ([\d,]+) tok", "\n".join(run.cache_lines))
        told = [int(size.replace(",", "")) for size in said]
        assert told == [point.ranks[0].kv_room_tokens for point in run.profile.memory][: len(told)]
        compared += len(told)
    assert compared == 18


@pytest.mark.parametrize("name", ["DeepSeek-V3", "OLMoE-1B-7B", "Qwen1.5-MoE-A2.7B"])
def test_the_blocks_of_vllms_log_are_as_large_as_planned(name, tmp_path) -> None:
    """``num_gpu_blocks=N`` is what fits into the available memory, which the log gives to 0.01 GiB."""
    run = runs()[name]
    log, spec = "\n".join(run.cache_lines), spec_of(run, tmp_path)
    (gib,), (blocks,) = re.findall(r"KV cache memory: ([\d.]+) GiB", log), re.findall(r"num_gpu_blocks=(\d+)", log)
    (layers, _) = tied_depths(spec, 1)
    generate_shape(tmp_path, tmp_path / "cut", layers)
    planned = block_bytes(load_spec(tmp_path / "cut"), DeploymentConfig(engine="vllm"), 0, layers)
    least, most = ((float(gib) + rounding) * 2**30 // planned for rounding in (-0.005, 0.005))
    assert least <= int(blocks) <= most
    assert most - least < 0.003 * int(blocks)  # as exact as the log is


def test_blocks_hold_the_tokens_of_a_state_as_the_log_says(tmp_path) -> None:
    """Without cached prefixes, as in profiles: the least multiple of 16 tokens that take no less than a state."""
    compared = []
    for run in runs().values():
        if not (said := re.search(r"attention block size to (\d+) tokens", "\n".join(run.cache_lines))):
            continue
        kinds = spec_of(run, tmp_path).kinds
        state_bytes = max(kind.shape.state_bytes for kind in kinds)
        token_bytes = 2 * max(kind.shape.kv_elements for kind in kinds)
        assert int(said[1]) == 16 * math.ceil(state_bytes / (16 * token_bytes)), run.name
        compared.append(run.name)
    assert set(compared) == {
        "granite-4.0-h-small",
        FALCON_H1,
        "Qwen3-Next-80B-A3B",
        "Qwen3.5-27B-text",
        "JambaForCausalLM",
    }


@pytest.mark.parametrize("run", profiled(), ids=lambda run: run.name)
def test_its_fingerprints_come_to_an_estimate_of_the_whole(run) -> None:
    """Also where bursts of one point differ by a step, as those on a shared GPU did."""
    estimator = estimator_for(run.profile)
    config = DeploymentConfig(tp=1, pp=1, engine="vllm")
    estimate = estimator.estimate(config, Workload(batch=4, input_tokens=128, output_tokens=64))
    assert 0 < estimate.tpot_s.value < 1
    assert estimate.memory.num_layers == run.profile.spec.num_layers
