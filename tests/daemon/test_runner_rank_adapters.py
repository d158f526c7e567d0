"""Adapters on several ranks: real processes, over gloo on the CPU."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import CheckpointError, EngineError
from fingerprint.families import read_config, read_spec
from fingerprint.lora import reserved_bytes
from tests.daemon.tiny_adapters import greedy, linears, load_adapter, write_tiny_adapter
from tests.daemon.tiny_models import rank_processes
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.process

LAYERS = {"llama": 4, "gpt_neox": 2, "qwen3_moe": 2}
CONFIG = DeploymentConfig(adapter_slots=2, adapter_rank=8)
REQUESTS = [(1, (3, 80, 0, 41, 17, 5, 66)), (None, (50, 1, 88)), (2, (9, 90, 12)), (1, (61,))]
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
    assert not rank_processes()


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory) -> Callable[[str], list[Path]]:
    """Two adapters of ranks 8 and 3 on all linears."""
    made: dict[str, list[Path]] = {}

    def write(family: str) -> list[Path]:
        if family not in made:
            shapes, folder = linears(tiny_checkpoint(family)), tmp_path_factory.mktemp("adapters")
            made[family] = [write_tiny_adapter(folder / str(rank), shapes, rank, seed=rank) for rank in (8, 3)]
        return made[family]

    return write


@pytest.fixture(scope="module")
def alone(start, folders) -> dict[tuple[str, WeightFormat], list[list[int]]]:
    """Tokens of one rank, each request alone."""
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
        pytest.param("gpt_neox", {"tp": 2}, id="split-fused-qkv"),
        pytest.param("qwen3_moe", {"tp": 2}, id="split-next-to-experts"),
        pytest.param("llama", {"pp": 2, "layers": (3, 1)}, id="stages"),
        pytest.param("llama", {"pp": 2, "layers": (1, 3), "weights": WeightFormat.INT8}, id="stages-int8"),
        pytest.param("llama", {"tp": 2, "pp": 2}, id="both", marks=pytest.mark.long),
    ],
)
def test_tokens_of_a_mix_are_those_of_one_rank_and_one_request(family, config, alone, start, folders) -> None:
    runner = start(family, **config)
    for number, folder in enumerate(folders(family), start=1):
        load_adapter(runner, number, folder)
    weights = config.get("weights", WeightFormat.BITS16)
    assert greedy(runner, REQUESTS, NEW_TOKENS) == alone[family, weights]


@pytest.mark.parametrize("config", [{"tp": 2}, {"pp": 2, "layers": (3, 1)}], ids=["split", "stages"])
def test_each_rank_holds_its_part_of_a_slot(config, start, folders, tiny_checkpoint) -> None:
    runner = start("llama", **config)
    before = [rank.weights_bytes for rank in runner.memory()]
    load_adapter(runner, 1, folders("llama")[0])
    spec, layers = read_spec(read_config(tiny_checkpoint("llama"))), config.pop("layers", (4, 4))
    asked = replace(CONFIG, **config)
    expected = [2 * reserved_bytes(spec, asked, held) // asked.loaded_adapters for held in layers]  # in float32
    assert [rank.weights_bytes - held for rank, held in zip(runner.memory(), before, strict=True)] == expected
    runner.unload_adapter(1)
    assert [rank.weights_bytes for rank in runner.memory()] == before


@pytest.mark.parametrize("layer", [0, 3], ids=["of-the-first-stage", "of-the-last-stage"])
def test_an_adapter_that_one_rank_refuses_is_loaded_on_none(
    layer: int, start, folders, tmp_path: Path, golden: Golden
) -> None:
    """The other rank has nothing of it to refuse; then the runner goes on, under the same number too."""
    runner = start("llama", pp=2, layers=(3, 1))
    before = [rank.weights_bytes for rank in runner.memory()]
    bad = {"model.layers.1.self_attn.q_proj": (32, 32), f"model.layers.{layer}.mlp.up_proj": (64, 31)}
    with golden.raises("daemon", CheckpointError):
        load_adapter(runner, 1, write_tiny_adapter(tmp_path / "bad", bad, 2, seed=1))
    assert [rank.weights_bytes for rank in runner.memory()] == before
    load_adapter(runner, 1, folders("llama")[0])
    assert greedy(runner, REQUESTS[:2], 2)


@pytest.mark.parametrize("loads", [True, False], ids=["load", "unload"])
def test_a_rank_that_was_killed_ends_the_runner_at_the_next_load_or_unload(
    loads: bool, start, folders, golden: Golden
) -> None:
    runner = start("llama", tp=2)
    load_adapter(runner, 1, folders("llama")[0])
    (child,) = rank_processes()
    child.kill()
    other = folders("llama")[1]
    with pytest.raises(EngineError) as caught:
        load_adapter(runner, 2, other) if loads else runner.unload_adapter(1)
    golden("daemon", str(caught.value).partition(";")[0])  # what follows is how its connection ended
    with pytest.raises(EngineError):
        runner.memory()


HOLD = """
import os, sys

def hold(event, arguments, reached=os.environ.get("HELD_REACHED"), go_on=os.environ.get("HELD_GO_ON")):
    if event != "open" or os.path.exists(reached):
        return
    if str(arguments[0]).endswith("/held/adapter_model.safetensors"):
        open(reached, "x").close()
        open(go_on).close()  # a pipe, that the test opens as well

if "HELD_REACHED" in os.environ:
    sys.addaudithook(hold)
"""


@pytest.fixture
def held(start, tiny_checkpoint, tiny_stages, tiny_limits, folders, tmp_path: Path, monkeypatch):
    """A runner on two ranks, of which the second stops when it first opens the tensors of the adapter ``held``.

    ``reached`` appears then, and it goes on once the pipe ``go_on`` is opened.
    """
    start("llama")  # the ranks of other tests end: a process has one group of several
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(HOLD)
    os.mkfifo(tmp_path / "go_on")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("HELD_REACHED", str(tmp_path / "reached"))
    monkeypatch.setenv("HELD_GO_ON", str(tmp_path / "go_on"))
    shutil.copytree(folders("llama")[0], tmp_path / "held")
    runner = LocalRunner(dtype=torch.float32)
    runner.load(tiny_checkpoint("llama"), replace(CONFIG, tp=2), tiny_stages(4, tp=2), tiny_limits)
    load_adapter(runner, 2, folders("llama")[1])
    yield runner
    runner.close()


def test_all_ranks_step_while_one_of_them_prepares_an_adapter_and_switch_at_the_same_step(
    held: LocalRunner, alone, tmp_path: Path
) -> None:
    expected = alone["llama", WeightFormat.BITS16]
    with ThreadPoolExecutor(1) as other:
        preparing = other.submit(held.prepare_adapter, 1, tmp_path / "held")
        wait_until((tmp_path / "reached").exists, "the second rank is about to read the adapter")
        assert greedy(held, REQUESTS[1:3], NEW_TOKENS) == expected[1:3]
        assert not preparing.done()
        (tmp_path / "go_on").open("w").close()
        preparing.result(PATIENCE_S)
    assert greedy(held, REQUESTS[1:3], NEW_TOKENS) == expected[1:3]
    held.switch_adapter(1)
    assert greedy(held, REQUESTS, NEW_TOKENS) == expected


def test_a_rank_that_is_killed_while_it_prepares_an_adapter_fails_the_load_and_ends_the_runner(
    held: LocalRunner, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as other:
        preparing = other.submit(held.prepare_adapter, 1, tmp_path / "held")
        wait_until((tmp_path / "reached").exists, "the second rank is about to read the adapter")
        (child,) = rank_processes()
        child.kill()
        with pytest.raises(EngineError, match=r"rank 1 .* ended with exit code -9"):
            preparing.result(PATIENCE_S)
    with pytest.raises(EngineError, match=r"rank 1 .* ended with exit code -9"):
        held.memory()


def test_a_runner_that_is_closed_while_a_rank_prepares_an_adapter_leaves_no_process(
    held: LocalRunner, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as other:
        preparing = other.submit(held.prepare_adapter, 1, tmp_path / "held")
        wait_until((tmp_path / "reached").exists, "the second rank is about to read the adapter")
        held.close()
        with pytest.raises(EngineError, match="rank 1"):
            preparing.result(PATIENCE_S)
    assert not rank_processes()
