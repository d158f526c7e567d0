"""Deltas on several ranks: real processes, over gloo on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.delta import open_delta
from fingerprint.errors import CheckpointError
from tests.daemon.tiny_adapters import greedy, linears, load_adapter, write_tiny_adapter
from tests.daemon.tiny_deltas import write_fine_tune, write_tiny_delta
from tests.golden_words import Golden

pytestmark = pytest.mark.process

LAYERS = {"llama": 4, "llama-tied": 2, "gpt_neox": 2, "qwen2": 3}
CONFIG = DeploymentConfig(adapter_slots=3, adapter_rank=256)
REQUESTS = [(1, (3, 80, 0, 41, 17, 5, 66)), (None, (50, 1, 88)), (2, (9, 90, 12)), (3, (61,))]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def start(tiny_checkpoint, tiny_stages, tiny_limits):
    """``start("llama", tp=2)``: a runner in float32; ranks are kept while (tp, pp) stay the same."""
    runner = LocalRunner(dtype=torch.float32)

    def load(family: str, *, layers=None, **config) -> LocalRunner:
        asked = replace(CONFIG, **config)
        stages = tiny_stages(LAYERS[family], tp=asked.tp, pp=asked.pp, layers=layers)
        runner.load(tiny_checkpoint(family), asked, stages, tiny_limits)
        return runner

    yield load
    runner.close()


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory) -> Callable[[str], list[Path]]:
    """Two deltas and an adapter."""
    made: dict[str, list[Path]] = {}

    def write(family: str) -> list[Path]:
        if family not in made:
            base, folder = tiny_checkpoint(family), tmp_path_factory.mktemp("variants")
            made[family] = [
                write_tiny_delta(base, folder / "fine", "int3", seed=1),
                write_tiny_delta(base, folder / "coarse", "sparse24-int2", seed=2),
                write_tiny_adapter(folder / "adapter", linears(base), 3, seed=3),
            ]
        return made[family]

    return write


@pytest.fixture(scope="module")
def alone(start, folders) -> dict[tuple[str, WeightFormat], list[list[int]]]:
    """Tokens of one rank, each request alone; all first, so that the ranks of each (tp, pp) are started once."""
    tokens = {}
    for family, weights in [*((family, WeightFormat.BITS16) for family in LAYERS), ("llama", WeightFormat.INT8)]:
        runner = start(family, weights=weights)
        for number, folder in enumerate(folders(family), start=1):
            load_adapter(runner, number, folder)
        tokens[family, weights] = [greedy(runner, [request], NEW_TOKENS)[0] for request in REQUESTS]
    return tokens


@pytest.mark.parametrize(
    ("family", "config"),
    [
        pytest.param("llama", {"tp": 2}, id="split"),
        pytest.param("llama-tied", {"tp": 2}, id="split-tied"),
        pytest.param("gpt_neox", {"tp": 2}, id="split-biases"),
        pytest.param("qwen2", {"pp": 2, "layers": (2, 1)}, id="stages"),
        pytest.param("llama", {"pp": 2, "layers": (1, 3), "weights": WeightFormat.INT8}, id="stages-int8"),
        pytest.param("llama", {"tp": 2, "pp": 2}, id="both", marks=pytest.mark.long),
    ],
)
def test_tokens_of_a_mix_are_those_of_one_rank_and_one_request(family, config, alone, start, folders) -> None:
    runner = start(family, **config)
    for number, folder in enumerate(folders(family), start=1):
        load_adapter(runner, number, folder)
    assert greedy(runner, REQUESTS, NEW_TOKENS) == alone[family, config.get("weights", WeightFormat.BITS16)]


@pytest.mark.parametrize("file", ["delta-00001.safetensors", "delta-00004.safetensors"], ids=["first", "last"])
def test_a_delta_that_one_rank_refuses_is_loaded_on_none(
    file: str, start, tiny_checkpoint, tmp_path: Path, golden: Golden
) -> None:
    """Each stage reads and checks the tensors of its own layers."""
    runner = start("llama", pp=2, layers=(2, 2))
    before = [rank.weights_bytes for rank in runner.memory()]
    folder = write_tiny_delta(tiny_checkpoint("llama"), tmp_path, "int2", seed=1)
    whole = (folder / file).read_bytes()
    (folder / file).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with golden.raises("daemon", CheckpointError):
        load_adapter(runner, 1, folder)
    assert [rank.weights_bytes for rank in runner.memory()] == before
    (folder / file).write_bytes(whole)
    load_adapter(runner, 1, folder)
    assert greedy(runner, REQUESTS[:2], 2)


@pytest.mark.parametrize("split", [{"pp": 2, "layers": (2, 2)}, {"tp": 2}], ids=["stages", "split"])
def test_a_delta_of_another_base_is_loaded_on_no_rank(split, start, tiny_checkpoint, tmp_path: Path) -> None:
    """Rank 0 compares the base for all, a matrix of the last layer too."""
    runner, matrix = start("llama", **split), "model.layers.3.mlp.up_proj.weight"
    before = [rank.weights_bytes for rank in runner.memory()]
    write_fine_tune(tiny_checkpoint("llama"), tmp_path / "other", 5, is_changed=lambda name: name == matrix)
    delta = write_tiny_delta(tmp_path / "other", tmp_path, "int2", 1, is_changed=lambda name: "norm" in name)
    with pytest.raises(CheckpointError, match=f"another base.*{matrix}"):
        load_adapter(runner, 1, delta)
    assert [rank.weights_bytes for rank in runner.memory()] == before
    assert greedy(runner, REQUESTS[1:2], 2)


def test_a_rank_holds_no_more_of_tied_embeddings_than_is_stored(start, tiny_checkpoint, tmp_path: Path) -> None:
    """Slots are as large as a delta's tensors are stored; the output layer's part lies in the embeddings'."""
    runner, base = start("llama-tied", tp=2), tiny_checkpoint("llama-tied")
    delta = write_tiny_delta(base, tmp_path, "int2", 1, is_changed=lambda name: "embed_tokens" in name)
    stored = sum(entry.num_bytes for file in open_delta(delta).files.values() for entry in file.tensors.values())
    before = [rank.weights_bytes for rank in runner.memory()]
    load_adapter(runner, 9, delta)
    held = [rank.weights_bytes - weights for rank, weights in zip(runner.memory(), before, strict=True)]
    runner.unload_adapter(9)
    assert held == [stored, stored]
