"""Adapters on one rank: tokens of the merged model, whatever else is in the batch."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from daemon.torch_engine.model import capabilities
from daemon.torch_engine.model.adapters import Part, read_into, route
from daemon.torch_engine.model.batch import Span
from daemon.torch_engine.model.formats.int8 import quantize_int8
from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import BadInputError, CheckpointError, EngineError, UnsupportedAdapterError
from fingerprint.families import read_config, read_spec
from fingerprint.lora import LoraModule, merge_adapter, read_adapter, reserved_bytes
from fingerprint.lora.adapter import WEIGHTS_FILE, open_weights
from tests.daemon.tiny_adapters import greedy, linears, load_adapter, write_tiny_adapter
from tests.daemon.tiny_models import generate, runner_fixture
from tests.golden_words import Golden

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "phi3"]
FAMILIES += ["gpt_neox", "gemma2", "gemma3_text", "gpt_oss", "internlm3", "iquestcoder"]
FAMILIES += sorted(capabilities.ONE_STAGE.keys() - capabilities.NO_LORA.keys())
PROMPT = [3, 80, 0, 41, 17, 5, 66, 9, 90, 12]
NEW_TOKENS = 12
RANKS = (1, 3, 8, 5)
CONFIG = DeploymentConfig(adapter_slots=4, adapter_rank=8)


make_runner = runner_fixture(CONFIG)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_transformers_with_merged_weights(
    family: str, make_runner, tiny_checkpoint, tmp_path: Path
) -> None:
    """Next to the base in one batch. An adapter of the full rank on all linears of the layers fits into a slot."""
    checkpoint = tiny_checkpoint(family)
    folder = write_tiny_adapter(tmp_path / "adapter", linears(checkpoint), rank=8, seed=1)
    merge_adapter(checkpoint, read_adapter(folder), tmp_path / "merged")
    runner = make_runner(family)
    load_adapter(runner, 1, folder)
    of_adapter, of_base = greedy(runner, [(1, PROMPT), (None, PROMPT)], NEW_TOKENS)
    assert of_adapter == generate(tmp_path / "merged", PROMPT, NEW_TOKENS)
    assert of_base == generate(checkpoint, PROMPT, NEW_TOKENS)
    assert of_adapter != of_base


@pytest.fixture(scope="module")
def runner(tiny_checkpoint, tiny_stages, tiny_limits, tmp_path_factory) -> Iterator[LocalRunner]:
    """A runner with adapters of different ranks, on different linears: numbers 1 to 4."""
    checkpoint = tiny_checkpoint("llama")
    runner = LocalRunner(dtype=torch.float32)
    runner.load(checkpoint, CONFIG, tiny_stages(4), tiny_limits)
    shapes = linears(checkpoint)
    for number, rank in enumerate(RANKS, start=1):
        own = {name: shape for place, (name, shape) in enumerate(shapes.items()) if place % number == 0}
        folder = tmp_path_factory.mktemp("adapters") / str(number)
        load_adapter(runner, number, write_tiny_adapter(folder, own, rank, seed=number))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def alone(runner) -> Callable[[int | None, tuple[int, ...]], list[int]]:
    """Tokens of a request that has the engine for itself."""
    known: dict[tuple, list[int]] = {}

    def tokens(adapter: int | None, prompt: tuple[int, ...]) -> list[int]:
        if (adapter, prompt) not in known:
            known[adapter, prompt] = greedy(runner, [(adapter, prompt)], NEW_TOKENS)[0]
        return known[adapter, prompt]

    return tokens


class TestBatches:
    def test_the_adapters_differ(self, alone) -> None:
        assert len({tuple(alone(adapter, tuple(PROMPT))) for adapter in (None, 1, 2, 3, 4)}) == 5

    @pytest.mark.slow
    @given(
        st.lists(
            st.tuples(
                st.sampled_from([None, 1, 2, 3, 4]),
                st.lists(st.integers(0, 95), min_size=1, max_size=12).map(tuple),
            ),
            min_size=2,
            max_size=4,
        )
    )
    def test_every_request_of_a_mix_gets_the_tokens_that_it_gets_alone(self, runner, alone, requests) -> None:
        assert greedy(runner, requests, NEW_TOKENS) == [alone(*request) for request in requests]

    def test_rows_of_the_base_are_those_of_an_engine_without_adapters_to_the_bit(
        self, runner, make_runner
    ) -> None:
        plain = make_runner("llama", DeploymentConfig())
        prompts = [tuple(PROMPT), (7, 9), (50, 1, 88)]
        mixed = tuple(StepItem(slot, 0, prompt, (None, 2, None)[slot]) for slot, prompt in enumerate(prompts))
        of_base = tuple(StepItem(slot, 0, prompt) for slot, prompt in enumerate(prompts))
        with_adapters, without = runner.step(StepPlan(mixed)).logits, plain.step(StepPlan(of_base)).logits
        assert torch.equal(with_adapters[[0, 2]], without[[0, 2]])
        assert not torch.equal(with_adapters[1], without[1])

    def test_a_step_of_an_adapter_that_is_not_loaded_is_a_bug(self, make_runner) -> None:
        with pytest.raises(ValueError, match="not loaded"):
            make_runner("llama").step(StepPlan((StepItem(0, 0, (1,), 9),)))

    def test_a_step_of_more_adapters_than_slots_is_a_bug(self, make_runner) -> None:
        runner = make_runner("llama", DeploymentConfig(adapter_slots=1, adapter_rank=8))
        with pytest.raises(ValueError, match="at most 1"):
            runner.step(StepPlan((StepItem(0, 0, (1,), 1), StepItem(1, 0, (1,), 2))))


def test_an_update_of_int8_weights_is_added_to_their_rounded_values(
    make_runner, tiny_checkpoint, tmp_path
) -> None:
    """Equal to transformers with weights that were rounded to int8 and then updated."""
    checkpoint = tiny_checkpoint("llama")
    shapes = linears(checkpoint)
    folder = write_tiny_adapter(tmp_path / "adapter", shapes, rank=3, seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name in shapes:
        weight = model.get_submodule(name).weight
        quantized, scale = quantize_int8(weight.data)
        weight.data = quantized * scale[:, None]
    model.save_pretrained(tmp_path / "rounded")
    merge_adapter(tmp_path / "rounded", read_adapter(folder), tmp_path / "merged")
    runner = make_runner("llama", replace(CONFIG, weights=WeightFormat.INT8))
    load_adapter(runner, 1, folder)
    of_adapter, of_base = greedy(runner, [(1, PROMPT), (None, PROMPT)], NEW_TOKENS)
    assert of_adapter == generate(tmp_path / "merged", PROMPT, NEW_TOKENS)
    assert of_base == generate(tmp_path / "rounded", PROMPT, NEW_TOKENS)


def test_factors_have_the_type_of_the_base_and_are_freed(make_runner, tiny_checkpoint, tmp_path) -> None:
    """An adapter of the full rank on every linear takes exactly the bytes that are reserved for it."""
    checkpoint = tiny_checkpoint("llama")
    folder = write_tiny_adapter(tmp_path / "adapter", linears(checkpoint), rank=8, seed=1)
    runner = make_runner("llama", dtype=torch.bfloat16)
    before = runner.memory()[0].weights_bytes
    for number in (1, 2):
        load_adapter(runner, number, folder)
        reserved = reserved_bytes(read_spec(read_config(checkpoint)), CONFIG, 4)
        assert runner.memory()[0].weights_bytes - before == number * reserved // CONFIG.loaded_adapters
    for number in (1, 2, 2, 77):
        runner.unload_adapter(number)
    assert runner.memory()[0].weights_bytes == before


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_factors_are_read_as_they_are_stored_without_a_detour(stored: torch.dtype, tmp_path: Path) -> None:
    """A load takes as much memory as three copies and no more, and requests wait for it."""
    module = LoraModule("m", rank=16, scale=1.0, in_features=2**16, out_features=8)
    a, b = torch.randn(16, 2**16).to(stored), torch.randn(8, 16).to(stored)
    save_file(dict(zip(module.factors, (a, b), strict=True)), tmp_path / WEIGHTS_FILE)
    weights = open_weights(tmp_path)
    tracemalloc.start()
    part = Part(module, None)
    read = part.empty(torch.bfloat16, "cpu")
    read_into(read, part, weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert torch.equal(read.a, a.to(torch.bfloat16))
    assert torch.equal(read.b, b.to(torch.bfloat16))
    assert peak < 3.5 * a.nbytes


def test_a_promise_that_has_no_room_for_the_adapters_is_refused(tiny_checkpoint, tiny_stages, tiny_limits) -> None:
    checkpoint, runner = tiny_checkpoint("llama"), LocalRunner(dtype=torch.float32)
    runner.load(checkpoint, DeploymentConfig(), tiny_stages(4), tiny_limits)
    memory = runner.memory()[0]
    room = memory.weights_bytes + memory.kv_bytes
    adapters = 2 * reserved_bytes(read_spec(read_config(checkpoint)), CONFIG, 4)  # of 16 bits, held in float32
    for short in (1, 0):
        limits = replace(tiny_limits, memory_bytes_per_device=room + adapters - short)
        if short:
            with pytest.raises(EngineError, match=f"{adapters:,} of 16 adapters"):
                runner.load(checkpoint, CONFIG, tiny_stages(4), limits)
        else:
            runner.load(checkpoint, CONFIG, tiny_stages(4), limits)
    runner.close()


@pytest.mark.parametrize("family", sorted(capabilities.NO_LORA))
def test_a_family_that_takes_no_adapters_has_no_linears(family: str, make_runner, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no linear"):
        load_adapter(
            make_runner(family),
            1,
            write_tiny_adapter(tmp_path / "bad", {"transformer.h.0.attn.c_attn": (96, 32)}, 2, seed=1),
        )


class TestRefusals:
    """A refused adapter leaves nothing, and the runner goes on."""

    @pytest.mark.parametrize(
        ("shapes", "changes", "error"),
        [
            ({"model.layers.0.self_attn.q_proj": (32, 48)}, {}, CheckpointError),
            ({"model.layers.4.self_attn.q_proj": (32, 32)}, {}, CheckpointError),
            ({"model.layers.00.self_attn.q_proj": (32, 32)}, {}, CheckpointError),
            ({"other.layers.0.self_attn.q_proj": (32, 32)}, {}, CheckpointError),
            ({"lm_head": (96, 32)}, {}, CheckpointError),
            ({"model.layers.1.self_attn.qkv_proj": (64, 32)}, {}, CheckpointError),
            ({"model.layers.1.input_layernorm": (32, 32)}, {}, CheckpointError),
            ({"model.layers.1.self_attn.q_proj": (32, 32)}, {"rank": 9}, UnsupportedAdapterError),
            ({"model.layers.1.self_attn.q_proj": (32, 32)}, {"size": float("nan")}, CheckpointError),
        ],
    )
    def test_refused(self, shapes, changes, error, make_runner, tmp_path: Path, golden: Golden) -> None:
        runner = make_runner("llama")
        before, memory = greedy(runner, [(None, PROMPT)], 3), runner.memory()[0].weights_bytes
        folder = write_tiny_adapter(tmp_path / "bad", shapes, **({"rank": 2, "seed": 1} | changes))
        with golden.raises("daemon", error):
            load_adapter(runner, 1, folder)
        assert runner.memory()[0].weights_bytes == memory
        with pytest.raises(BadInputError):
            load_adapter(runner, 1, tmp_path / "nothing")
        assert greedy(runner, [(None, PROMPT)], 3) == before

    def test_what_is_more_than_a_plain_lora_is_refused(self, make_runner, tmp_path: Path) -> None:
        folder = write_tiny_adapter(tmp_path / "dora", {"model.layers.0.self_attn.q_proj": (32, 32)}, 2, seed=1)
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
        with pytest.raises(UnsupportedAdapterError, match="DoRA"):
            load_adapter(make_runner("llama"), 1, folder)

    def test_values_beyond_the_type_of_the_base_are_refused(self, make_runner, tmp_path: Path) -> None:
        shapes = {"model.layers.0.self_attn.q_proj": (32, 32)}
        folder = write_tiny_adapter(tmp_path / "large", shapes, 2, seed=1, size=1e6)
        with pytest.raises(CheckpointError, match=r"not finite in torch\.float16"):
            load_adapter(make_runner("llama", dtype=torch.float16), 1, folder)


@given(st.lists(st.tuples(st.sampled_from([None, 1, 2]), st.integers(1, 5)), max_size=8))
def test_a_route_has_each_token_of_an_adapter_once_and_none_of_the_base(items) -> None:
    spans, owners = [], []
    for adapter_id, num_tokens in items:
        spans.append(Span(len(spans), 0, len(owners), num_tokens, adapter_id))
        owners += [adapter_id] * num_tokens
    rows = route(spans)
    routed: list[int | None] = [None] * len(owners)
    for each in rows:
        assert routed[each.first : each.end] == [None] * (each.end - each.first)
        routed[each.first : each.end] = [each.adapter_id] * (each.end - each.first)
    assert routed == owners
    assert not any(a.end == b.first and a.adapter_id == b.adapter_id for a, b in pairwise(rows))
