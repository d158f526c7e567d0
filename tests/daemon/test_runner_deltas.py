"""Deltas on one rank: logits of the exported checkpoint, and in a mix the tokens of each request alone."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.torch_engine.model.formats.int8 import quantize_int8
from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.delta import FORMATS, read_delta
from fingerprint.errors import CheckpointError, UnsupportedAdapterError
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from tests.daemon.tiny_adapters import greedy, linears, load_adapter, write_tiny_adapter
from tests.daemon.tiny_deltas import write_export, write_fine_tune, write_tiny_delta
from tests.daemon.tiny_models import runner_fixture
from tests.golden_words import Golden

CONFIG = DeploymentConfig(adapter_slots=4, adapter_rank=256)
NEW_TOKENS = 8
PROMPT = (3, 80, 0, 41, 17, 5, 66, 9, 90, 12)
# All that run layer by layer, as the compressor runs them, and have no experts.
FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox", "gemma2", "gemma3_text"]
FAMILIES += ["internlm3", "iquestcoder"]
TOLERANCE = 2e-4  # of logits of size 1: float32, summed in another order


make_runner = runner_fixture(CONFIG)


def logits(checkpoint: Path) -> torch.Tensor:
    """Return what transformers says of the token after the prompt, without our code."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT])).logits[0, -1]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_exported_checkpoint_next_to_the_base(
    family: str, make_runner, tiny_checkpoint, tmp_path: Path
) -> None:
    checkpoint = tiny_checkpoint(family)
    delta = write_tiny_delta(checkpoint, tmp_path, "int3", seed=1)
    runner = make_runner(family)
    load_adapter(runner, 1, delta)
    plan = StepPlan((StepItem(0, 0, PROMPT[:3]), StepItem(1, 0, PROMPT, 1), StepItem(2, 0, PROMPT)))
    of_delta, of_base = runner.step(plan).logits[1:]
    expected = logits(write_export(checkpoint, delta, tmp_path / "exported"))
    torch.testing.assert_close(of_delta, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))
    base = logits(checkpoint)
    torch.testing.assert_close(of_base, base, rtol=TOLERANCE, atol=TOLERANCE * float(base.abs().max()))
    assert (expected - base).abs().max() > 100 * TOLERANCE * float(expected.abs().max())


def test_a_stored_output_layer_that_is_tied_is_served_as_the_embeddings(
    tiny_checkpoint, tmp_path: Path, tiny_stages, tiny_limits
) -> None:
    """The export stores it, too, and is served so by this engine and vLLM."""
    base, tied = tmp_path / "base", Checkpoint.open(tiny_checkpoint("llama-tied"))
    shutil.copytree(tied.directory, base)
    of = {name: (entry, name) for name, entry in tied.tensors.items()}
    of["lm_head.weight"] = of["model.embed_tokens.weight"]
    outputs = [
        OutputTensor(name, entry.dtype, entry.shape, entry.num_bytes, partial(tied.chunks, source))
        for name, (entry, source) in of.items()
    ]
    write_safetensors(base / "model.safetensors", outputs)
    delta = write_tiny_delta(base, tmp_path, "int3", seed=1)
    runner, alone = LocalRunner(dtype=torch.float32), LocalRunner(dtype=torch.float32)
    runner.load(base, CONFIG, tiny_stages(2), tiny_limits)
    alone.load(write_export(base, delta, tmp_path / "exported"), CONFIG, tiny_stages(2), tiny_limits)
    load_adapter(runner, 1, delta)
    of_delta = runner.step(StepPlan((StepItem(0, 0, PROMPT, 1),))).logits
    expected = alone.step(StepPlan((StepItem(0, 0, PROMPT),))).logits
    runner.close()
    alone.close()
    assert "lm_head.weight" in {matrix.name for matrix in read_delta(delta).manifest.matrices}
    torch.testing.assert_close(of_delta, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def test_a_delta_of_norms_alone_has_the_logits_of_its_export_to_the_bit(
    make_runner, tiny_checkpoint, tmp_path: Path, tiny_stages, tiny_limits
) -> None:
    """The norms are those of the fine-tune, and no value is approximated."""
    checkpoint = tiny_checkpoint("qwen3")
    delta = write_tiny_delta(checkpoint, tmp_path, "int2", seed=1, is_changed=lambda name: "norm" in name)
    runner, alone = make_runner("qwen3"), LocalRunner(dtype=torch.float32)
    load_adapter(runner, 1, delta)
    alone.load(write_export(checkpoint, delta, tmp_path / "exported"), CONFIG, tiny_stages(3), tiny_limits)
    of_delta = runner.step(StepPlan((StepItem(0, 0, PROMPT, 1),))).logits
    of_export = alone.step(StepPlan((StepItem(0, 0, PROMPT),))).logits
    of_base = runner.step(StepPlan((StepItem(1, 0, PROMPT),))).logits
    alone.close()
    assert torch.equal(of_delta, of_export)
    assert not torch.equal(of_delta, of_base)


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory) -> list[Path]:
    checkpoint, folder = tiny_checkpoint("llama-tied"), tmp_path_factory.mktemp("variants")
    adapter = write_tiny_adapter(folder / "adapter", linears(checkpoint), 8, seed=1)
    formats = ("int1", "int2", "int3", "int4", "sparse24-int4", "sparse24-int2")
    return [
        adapter,
        *(write_tiny_delta(checkpoint, folder / name, name, seed) for seed, name in enumerate(formats)),
    ]


@pytest.fixture(scope="module")
def runner(tiny_checkpoint, tiny_stages, tiny_limits) -> Iterator[LocalRunner]:
    runner = LocalRunner(dtype=torch.float32)
    layers = transformers.AutoConfig.from_pretrained(tiny_checkpoint("llama-tied")).num_hidden_layers
    runner.load(tiny_checkpoint("llama-tied"), CONFIG, tiny_stages(layers), tiny_limits)
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def alone(runner, folders) -> list[list[int]]:
    """Tokens of the base and of each variant, which is loaded alone."""
    tokens = [greedy(runner, [(None, PROMPT)], NEW_TOKENS)[0]]
    for number, folder in enumerate(folders, start=1000):
        load_adapter(runner, number, folder)
        tokens.append(greedy(runner, [(number, PROMPT)], NEW_TOKENS)[0])
        runner.unload_adapter(number)
    return tokens


class TestMixes:
    """Base, adapters and deltas of several formats in one batch."""

    def test_the_variants_differ(self, alone) -> None:
        assert len(set(map(tuple, alone))) == len(alone)

    @pytest.mark.slow
    @settings(max_examples=20)
    @given(data=st.data())
    def test_each_request_has_its_tokens_whatever_is_loaded_and_unloaded_in_between(
        self, data, runner, folders, alone
    ) -> None:
        loaded: dict[int, int] = {}  # number at the runner by variant
        numbers = itertools.count(1)
        for _ in range(data.draw(st.integers(1, 3))):
            kinds = data.draw(st.lists(st.integers(0, len(folders)), min_size=1, max_size=4))
            for kind in sorted(set(kinds) - {0} - loaded.keys()):
                loaded[kind] = next(numbers)
                load_adapter(runner, loaded[kind], folders[kind - 1])
            requests = [(loaded.get(kind), PROMPT) for kind in kinds]
            assert greedy(runner, requests, NEW_TOKENS) == [alone[kind] for kind in kinds]
            for kind in data.draw(st.lists(st.sampled_from(sorted(loaded) or [0]), unique=True)):
                runner.unload_adapter(loaded.pop(kind, 0))
        for number in loaded.values():
            runner.unload_adapter(number)

    def test_rows_of_the_base_are_those_of_an_engine_without_variants_to_the_bit(
        self, runner, folders, make_runner
    ) -> None:
        plain, prompts = make_runner("llama-tied", DeploymentConfig()), [PROMPT, (7, 9), (50, 1, 88)]
        load_adapter(runner, 5000, folders[2])
        mixed = tuple(StepItem(slot, 0, prompt, (None, 5000, None)[slot]) for slot, prompt in enumerate(prompts))
        of_base = tuple(StepItem(slot, 0, prompt) for slot, prompt in enumerate(prompts))
        with_delta, without = runner.step(StepPlan(mixed)).logits, plain.step(StepPlan(of_base)).logits
        runner.unload_adapter(5000)
        assert torch.equal(with_delta[[0, 2]], without[[0, 2]])
        assert not torch.equal(with_delta[1], without[1])


def test_a_delta_stays_packed_and_is_freed(make_runner, tiny_checkpoint, tmp_path: Path) -> None:
    """Codes and scales as they are in the files; norms in the type of the base."""
    checkpoint = tiny_checkpoint("llama")
    delta = read_delta(write_tiny_delta(checkpoint, tmp_path, "int2", seed=1))
    runner = make_runner("llama", dtype=torch.bfloat16)
    before = runner.memory()[0].weights_bytes
    load_adapter(runner, 1, delta.folder)
    stored = sum(FORMATS[each.format].matrix_bytes(each.shape) for each in delta.manifest.matrices)
    norms = sum(prod(each.shape) * 2 for each in delta.manifest.exact)
    assert runner.memory()[0].weights_bytes - before == stored + norms
    runner.unload_adapter(1)
    assert runner.memory()[0].weights_bytes == before


def test_a_delta_on_int8_weights_is_added_to_their_rounded_values(make_runner, tiny_checkpoint, tmp_path) -> None:
    """Equal to transformers with weights that were rounded to int8 and then changed."""
    checkpoint = tiny_checkpoint("llama")
    delta = write_tiny_delta(checkpoint, tmp_path, "int3", seed=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        write_export(checkpoint, delta, tmp_path / "exported"), dtype=torch.float32
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for name in linears(checkpoint):
        weight = base.get_submodule(name).weight
        quantized, scale = quantize_int8(weight.data)
        model.get_submodule(name).weight.data += quantized * scale[:, None] - weight.data
    runner = make_runner("llama", replace(CONFIG, weights=WeightFormat.INT8))
    load_adapter(runner, 1, delta)
    found = runner.step(StepPlan((StepItem(0, 0, PROMPT, 1),))).logits[0]
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE * float(expected.abs().max()))


def write_wide_llama(folder: Path) -> Path:
    """Write a random model whose matrices have some hundred KiB each."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=128,
        intermediate_size=512,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def delta(tiny_checkpoint, tmp_path_factory) -> Path:
    return write_tiny_delta(tiny_checkpoint("llama"), tmp_path_factory.mktemp("delta"), "int2", seed=1)


class TestRefusals:
    """A refused delta leaves nothing, and the runner goes on."""

    def refuse(self, runner: LocalRunner, folder: Path, error: type[Exception], golden: Golden) -> None:
        before, memory = greedy(runner, [(None, PROMPT)], 3), runner.memory()[0].weights_bytes
        with golden.raises("daemon", error):
            load_adapter(runner, 1, folder)
        assert runner.memory()[0].weights_bytes == memory
        assert greedy(runner, [(None, PROMPT)], 3) == before

    def test_of_another_base(self, make_runner, tiny_checkpoint, tmp_path: Path, golden: Golden) -> None:
        """Names and shapes are the same, values differ: the first tensor is named."""
        other = write_fine_tune(tiny_checkpoint("llama"), tmp_path / "other", seed=5)
        self.refuse(
            make_runner("llama"), write_tiny_delta(other, tmp_path, "int2", seed=1), CheckpointError, golden
        )

    def test_of_a_base_one_large_matrix_of_which_differs(
        self, tiny_limits, tiny_stages, tmp_path: Path, golden: Golden
    ) -> None:
        """A fine-tune of linears alone, whose norms say nothing of its base."""
        checkpoint, matrix = write_wide_llama(tmp_path / "base"), "layers.1.mlp.up_proj.weight"
        other = write_fine_tune(checkpoint, tmp_path / "other", 5, is_changed=lambda name: name.endswith(matrix))
        delta = write_tiny_delta(other, tmp_path, "int2", seed=1, is_changed=lambda name: "down_proj" in name)
        runner = LocalRunner(dtype=torch.float32)
        runner.load(checkpoint, replace(CONFIG, adapter_rank=64), tiny_stages(2), tiny_limits)
        try:
            self.refuse(runner, delta, CheckpointError, golden)
        finally:
            runner.close()

    def test_of_a_base_with_other_tensors(self, make_runner, tiny_checkpoint, tmp_path: Path, golden) -> None:
        delta = write_tiny_delta(tiny_checkpoint("qwen3"), tmp_path, "int2", seed=1)
        self.refuse(make_runner("llama"), delta, CheckpointError, golden)

    def test_changed_bytes(self, make_runner, delta: Path, tmp_path: Path, golden: Golden) -> None:
        folder = shutil.copytree(delta, tmp_path / "changed")
        file = folder / "delta-00002.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        self.refuse(make_runner("llama"), folder, CheckpointError, golden)

    def test_truncated(self, make_runner, delta: Path, tmp_path: Path, golden: Golden) -> None:
        folder = shutil.copytree(delta, tmp_path / "short")
        file = folder / "delta-00002.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
        self.refuse(make_runner("llama"), folder, CheckpointError, golden)

    def test_larger_than_a_slot(self, make_runner, delta: Path, golden: Golden) -> None:
        runner = make_runner("llama", DeploymentConfig(adapter_slots=1, adapter_rank=8))
        self.refuse(runner, delta, UnsupportedAdapterError, golden)
