"""An engine's own specification of its caches wins over what config.json says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.engine_caches import cache_differences, caches_of_layers, with_engine_caches
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.measurements import LayerCache, MemoryPoint, Profile
from fingerprint.model_spec import ModelSpec
from tests.bench.test_family_runs import FALCON_H1, profiled, runs
from tests.golden_words import Golden

GRANITE, LATENT = "granite-4.0-h-small", "DeepSeek-V2-Lite"  # states next to KV; latents


def profile_of(name: str) -> Profile:
    profile = runs()[name].profile
    assert profile is not None
    return profile


def with_caches(point: MemoryPoint, **changes: float) -> MemoryPoint:
    """The engine keeps something else of layers that keep any of it."""
    (rank,) = point.ranks
    kept = tuple(
        replace(cache, **{name: value for name, value in changes.items() if getattr(cache, name)})
        for cache in rank.layer_caches
    )
    return replace(point, ranks=(replace(rank, layer_caches=kept),))


def shapes_of(spec: ModelSpec) -> set[tuple[int, int]]:
    return {(shape.kv_elements, shape.state_bytes) for shape in spec.layer_shapes}


@pytest.mark.parametrize("name", [run.name for run in profiled()])
def test_where_both_agree_nothing_changes(name) -> None:
    profile = profile_of(name)
    assert with_engine_caches(profile.spec, profile.memory) == profile.spec
    assert cache_differences(profile.spec, profile.memory) == []


def test_a_layer_with_attention_and_states_has_one_cache_of_both() -> None:
    deep, *_ = sorted(profile_of(FALCON_H1).memory, key=lambda point: -point.num_layers)
    (rank,) = deep.ranks
    assert [cache.layer for cache in rank.layer_caches] == [0, 1, 2, 3]  # of two layers, as vLLM numbers them
    kept = [(cache.layer, cache.token_bytes, cache.state_bytes) for cache in caches_of_layers(deep)]
    assert kept == [(0, 4096.0, 533504), (1, 4096.0, 533504)]


def test_what_the_engine_keeps_of_a_layer_with_both_wins() -> None:
    profile = profile_of(FALCON_H1)
    points = [with_caches(point, state_bytes=1_000_000) for point in profile.memory]
    assert {kind.shape.state_bytes for kind in with_engine_caches(profile.spec, points).kinds} == {1_000_000}


def test_bytes_of_tokens_and_states_are_the_engines(golden: Golden) -> None:
    profile = profile_of(GRANITE)
    points = [with_caches(point, token_bytes=8192.0, state_bytes=1_000_000) for point in profile.memory]
    assert shapes_of(with_engine_caches(profile.spec, points)) == {(4096, 0), (0, 1_000_000)}
    first, second = cache_differences(profile.spec, points)
    golden("fingerprint", first)
    golden("fingerprint", second)


def test_an_estimate_of_memory_takes_the_engines() -> None:
    profile = profile_of(GRANITE)
    config, workload = DeploymentConfig(engine="vllm"), Workload(batch=32, input_tokens=512, output_tokens=128)
    points = tuple(with_caches(point, state_bytes=8_000_000) for point in profile.memory)
    larger = CountedMemory(replace(profile, memory=points)).memory(config, workload)
    assert larger.layer_kv_bytes > 2 * CountedMemory(profile).memory(config, workload).layer_kv_bytes


def test_layers_described_alike_that_the_engine_gives_alike() -> None:
    profile = profile_of("MiniMax-M2.7")
    points = [with_caches(point, token_bytes=2304.0) for point in profile.memory]
    spec = with_engine_caches(profile.spec, points)
    assert spec.kv_bytes_per_token_per_layer(KvFormat.BITS16) == 2304


def test_layers_that_the_engine_gives_differently_stay() -> None:
    profile = profile_of("MiniMax-M2.7")
    (rank,) = profile.memory[0].ranks
    caches = tuple(LayerCache(layer=i, token_bytes=100.0 + i, state_bytes=0, window=None) for i in range(2))
    point = replace(profile.memory[0], ranks=(replace(rank, layer_caches=caches),))
    assert with_engine_caches(profile.spec, [point]) == profile.spec


@pytest.mark.parametrize("changes", [{"tp": 2}, {"kv": KvFormat.FP8}, {"shard": True}])
def test_what_ranks_divide_or_convert_does_not_count(changes) -> None:
    profile = profile_of(LATENT)
    points = [replace(with_caches(point, token_bytes=7.0), **changes) for point in profile.memory]
    assert with_engine_caches(profile.spec, points) == profile.spec
    assert profile.memory[0].weights is WeightFormat.BITS16
