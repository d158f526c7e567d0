"""Preparing an adapter next to steps, and switching to it between two, on one rank."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from daemon.torch_engine.model.adapters import Factors, Part
from daemon.torch_engine.parallel import stage
from daemon.torch_engine.parallel.runner import LocalRunner
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig
from fingerprint.errors import CheckpointError
from tests.daemon.tiny_adapters import greedy, linears, load_adapter, write_tiny_adapter
from tests.waiting import PATIENCE_S

CONFIG = DeploymentConfig(adapter_slots=2, adapter_rank=8)
BASE, NEW, FIRST = (None, (3, 80, 0, 41)), (2, (3, 80, 0, 41)), (1, (50, 1, 88))


@pytest.fixture
def runner(tiny_checkpoint, tiny_stages, tiny_limits, tmp_path: Path) -> Iterator[LocalRunner]:
    """A runner that has an adapter under number 1."""
    made = LocalRunner(dtype=torch.float32)
    made.load(tiny_checkpoint("llama"), CONFIG, tiny_stages(4), tiny_limits)
    load_adapter(made, 1, write_tiny_adapter(tmp_path / "first", linears(tiny_checkpoint("llama")), 4, seed=1))
    yield made
    made.close()


@pytest.fixture
def folder(tiny_checkpoint, tmp_path: Path) -> Path:
    return write_tiny_adapter(tmp_path / "new", linears(tiny_checkpoint("llama")), 8, seed=2)


class Hold:
    """Readings of adapters' values that stop after ``at`` matrices until ``go_on`` is set.

    ``prepare`` prepares an adapter in another thread.
    """

    def __init__(
        self, read: Callable[[Factors, Part, Checkpoint], None], at: int, prepare: Callable[..., Future[None]]
    ) -> None:
        self._read, self._left, self.prepare = read, at, prepare
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None  # raised then

    def __call__(self, factors: Factors, part: Part, weights: Checkpoint) -> None:
        if not self._left:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
            if self.error is not None:
                raise self.error
        self._left -= 1
        self._read(factors, part, weights)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, runner: LocalRunner) -> Iterator[Hold]:
    other = ThreadPoolExecutor(1)
    held = Hold(stage.read_into, 5, partial(other.submit, runner.prepare_adapter))
    monkeypatch.setattr(stage, "read_into", held)
    yield held
    held.go_on.set()
    other.shutdown()


def test_steps_run_as_before_while_an_adapter_is_prepared(runner: LocalRunner, folder: Path, hold: Hold) -> None:
    before, held_bytes = greedy(runner, [BASE, FIRST], 6), runner.memory()[0].weights_bytes
    preparing = hold.prepare(2, folder)
    assert hold.reached.wait(PATIENCE_S)
    assert greedy(runner, [BASE, FIRST], 6) == before
    held_now = runner.memory()[0].weights_bytes
    assert not preparing.done()
    hold.go_on.set()
    preparing.result(PATIENCE_S)
    assert greedy(runner, [BASE, FIRST], 6) == before
    runner.switch_adapter(2)
    assert held_now == runner.memory()[0].weights_bytes > held_bytes  # all of it is held from the start
    tokens = greedy(runner, [BASE, FIRST, NEW], 6)
    assert tokens[:2] == before
    assert tokens[2] != before[0]


def test_a_preparation_that_fails_in_the_middle_leaves_nothing(
    runner: LocalRunner, folder: Path, hold: Hold
) -> None:
    before, held_bytes = greedy(runner, [BASE, FIRST], 6), runner.memory()[0].weights_bytes
    hold.error = CheckpointError("changed while read")
    preparing = hold.prepare(2, folder)
    assert hold.reached.wait(PATIENCE_S)
    assert greedy(runner, [BASE, FIRST], 6) == before
    hold.go_on.set()
    with pytest.raises(CheckpointError, match="changed while read"):
        preparing.result(PATIENCE_S)
    assert runner.memory()[0].weights_bytes == held_bytes
    with pytest.raises(ValueError, match="not prepared"):
        runner.switch_adapter(2)
    assert greedy(runner, [BASE, FIRST], 6) == before


class _NoOperator(TorchDispatchMode):
    """Fails at any operator of torch: a reading, a conversion, an allocation or a copy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is called")


def test_a_switch_reads_and_moves_nothing(runner: LocalRunner, folder: Path) -> None:
    """The folder is gone by then, and no operator of torch runs."""
    runner.prepare_adapter(2, folder)
    shutil.rmtree(folder)
    with _NoOperator():
        runner.switch_adapter(2)
    assert greedy(runner, [NEW], 6) != greedy(runner, [BASE], 6)


def test_an_adapter_that_was_prepared_in_vain_is_freed(runner: LocalRunner, folder: Path) -> None:
    held_bytes = runner.memory()[0].weights_bytes
    runner.prepare_adapter(2, folder)
    assert runner.memory()[0].weights_bytes > held_bytes
    runner.unload_adapter(2)
    assert runner.memory()[0].weights_bytes == held_bytes
