"""Blocks of vLLM's cache against vLLM's own planning, as recorded by ``record_cache_blocks``; and their laws."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint import description
from fingerprint.cache_blocks import CacheRoom, block_bytes, cache_blocks, cache_bytes, layer_kept_bytes
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.families import read_spec
from fingerprint.model_spec import LayerShape, ModelSpec
from tests.fingerprint import family_truths
from tests.fingerprint.synthetic_machine import llama

RECORDED: dict[str, Any] = json.loads(
    (Path(__file__).parent / "recorded" / "cache_blocks.json").read_text(encoding="utf-8")
)
MODELS = RECORDED["models"]
CASES = [(name, int(tp)) for name, by_degree in MODELS.items() for tp in by_degree]


@cache
def model_of(name: str) -> ModelSpec:
    if name in family_truths.public_models():
        return read_spec(family_truths.public(name).config)
    return description.described_config(family_truths.default(name).config)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_a_block_is_as_large_as_vllm_makes_it(name: str, tp: int) -> None:
    model, config = model_of(name), DeploymentConfig(engine="vllm", tp=tp)
    assert block_bytes(model, config, 0, model.num_layers) == MODELS[name][str(tp)]["block_bytes"]


@pytest.mark.parametrize(("name", "tp"), CASES)
@pytest.mark.parametrize("length", [640, 131_072])
def test_vllm_starts_with_the_cache_of_one_request(name: str, tp: int, length: int) -> None:
    """It refuses less than one takes (``_check_enough_kv_cache_memory``); an eighth more is enough for us."""
    model, config = model_of(name), DeploymentConfig(engine="vllm", tp=tp)
    tokens = min(length, model.max_context_tokens)
    room = CacheRoom(sequences=1, kv_tokens=tokens, step_tokens=min(tokens, RECORDED["step_tokens"]))
    least = MODELS[name][str(tp)][f"least_{length}"]
    assert least <= cache_bytes(model, config, [model.num_layers], room) <= least * 1.125


SHAPE = LayerShape(mixer="attention", params=1, linear_params=1, kv_elements=2048)
SHAPES = (
    SHAPE,
    replace(SHAPE, kv_elements=1024),
    replace(SHAPE, mixer="mamba2", kv_elements=0, state_bytes=533_504),
    replace(SHAPE, mixer="mamba2 and attention", state_bytes=70_000),
)
models = st.builds(
    lambda order, windows: replace(
        llama(len(order)),
        layer_shapes=SHAPES,
        layer_shape_indexes=tuple(order),
        layer_windows=tuple(64 if at % 3 in windows else None for at in range(len(order))),
    ),
    st.lists(st.integers(0, 3), min_size=1, max_size=12),
    st.sets(st.integers(0, 2)),
)
rooms = st.builds(
    CacheRoom, sequences=st.integers(1, 64), kv_tokens=st.integers(64, 9000), step_tokens=st.integers(1, 512)
)
degrees = st.sampled_from([1, 2, 4])
CONFIG = DeploymentConfig(engine="vllm")


@given(models, rooms, degrees, st.integers(0, 64), st.integers(0, 9000))
def test_more_requests_and_more_tokens_never_take_less(
    model: ModelSpec, room: CacheRoom, tp: int, requests: int, tokens: int
) -> None:
    more = replace(room, sequences=room.sequences + requests, kv_tokens=room.kv_tokens + tokens)
    config, stages = replace(CONFIG, tp=tp), [model.num_layers]
    assert cache_bytes(model, config, stages, more) >= cache_bytes(model, config, stages, room)
    assert cache_blocks(model, config, stages, more) >= cache_blocks(model, config, stages, room)


@given(models, rooms)
def test_bytes_are_blocks_of_one_stage(model: ModelSpec, room: CacheRoom) -> None:
    stages = [model.num_layers]
    block = block_bytes(model, CONFIG, 0, model.num_layers)
    assert cache_bytes(model, CONFIG, stages, room) == cache_blocks(model, CONFIG, stages, room) * block


@given(models, rooms)
def test_the_cache_holds_what_the_layers_keep(model: ModelSpec, room: CacheRoom) -> None:
    """Never less than the sum over the layers of their tokens and states."""
    held = sum(
        2 * (shape.kv_elements * (room.kv_tokens if window is None else min(room.kv_tokens, window)))
        + shape.state_bytes * room.sequences
        for window, shape in (
            (model.windows[at], model.layer_shapes[kind]) for at, kind in enumerate(model.layer_shape_indexes)
        )
    )
    assert cache_bytes(model, CONFIG, [model.num_layers], room) >= held


@given(models, st.integers(1, 32), st.integers(1, 3000))
def test_an_estimate_with_states_is_the_cache_that_is_launched(model: ModelSpec, batch: int, tokens: int) -> None:
    workload = Workload(batch, tokens, 100)
    kept = layer_kept_bytes(model, CONFIG, workload, 512, token_bytes=4096.0)
    room = CacheRoom(sequences=batch, kv_tokens=workload.kv_tokens("vllm"), step_tokens=512)
    if model.keeps_state:
        assert kept * model.num_layers == pytest.approx(cache_bytes(model, CONFIG, [model.num_layers], room))


@given(st.integers(1, 64), st.integers(1, 100_000), st.integers(1, 100_000))
def test_states_alone_take_as_much_whatever_the_length(batch: int, tokens: int, others: int) -> None:
    model = replace(llama(4), layer_shapes=(SHAPES[2],), layer_shape_indexes=(0,) * 4)
    one, other = (
        cache_bytes(model, CONFIG, [4], CacheRoom(sequences=batch, kv_tokens=n, step_tokens=1))
        for n in (tokens, others)
    )
    assert one == other == (1 + batch) * 4 * 533_504
