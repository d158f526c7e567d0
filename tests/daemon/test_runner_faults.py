"""The ranks of a model when one of them, or rank 0, goes."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import psutil
import pytest
import torch

from daemon.exit_codes import is_out_of_memory
from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.config import DeploymentConfig
from fingerprint.errors import CheckpointError, EngineError
from tests.daemon.tiny_models import rank_processes
from tests.golden_words import Golden

pytestmark = pytest.mark.process

FIRST = StepPlan((StepItem(1, 0, (3, 80, 0, 41, 17, 5, 66)), StepItem(3, 0, (50, 1, 88))))
SECOND = StepPlan((StepItem(1, 7, (9, 90, 12)), StepItem(3, 3, (23,)), StepItem(0, 0, (61,))))


@pytest.fixture(scope="module")
def start(tiny_checkpoint, tiny_stages, tiny_limits):
    """``start(tp=2)``: a runner that has done a step and whose ranks live; the one before is closed.

    Starting ranks takes seconds.
    """
    runners: dict[tuple[int, int], LocalRunner] = {}

    def make(*, tp: int = 1, pp: int = 1) -> LocalRunner:
        if (tp, pp) not in runners or len(rank_processes()) != tp * pp - 1:
            close()
            runner = runners[tp, pp] = LocalRunner(dtype=torch.float32)
            stages = tiny_stages(4, tp=tp, pp=pp)
            runner.load(tiny_checkpoint("llama"), DeploymentConfig(tp=tp, pp=pp), stages, tiny_limits)
            runner.step(FIRST)
        return runners[tp, pp]

    def close() -> None:
        while runners:
            runners.popitem()[1].close()

    yield make
    close()


def test_a_load_that_is_refused_leaves_the_ranks_fit(
    start, tiny_checkpoint, tiny_stages, tiny_limits, tmp_path
) -> None:
    runner = start(tp=2)
    [before] = rank_processes()
    config = DeploymentConfig(tp=2)
    (tmp_path / "config.json").write_bytes((tiny_checkpoint("llama") / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="neither"):
        runner.load(tmp_path, config, tiny_stages(4, tp=2), tiny_limits)
    runner.load(tiny_checkpoint("qwen3"), config, tiny_stages(3, tp=2), tiny_limits)
    runner.step(FIRST)
    assert rank_processes() == [before]


def test_a_second_group_in_one_process_is_refused(
    start, tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden
) -> None:
    start(tp=2)
    with golden.raises("daemon", EngineError):
        LocalRunner().load(tiny_checkpoint("llama"), DeploymentConfig(tp=2), tiny_stages(4, tp=2), tiny_limits)


def test_a_rank_without_memory_is_told_as_that(start, tiny_checkpoint, tiny_stages, tiny_limits) -> None:
    """The error is the rank's own, not the broken connection that rank 0 sees. 4,000 tokens x 32 numbers do not
    fit.
    """
    runner = start(tp=2)
    limits = dataclasses.replace(
        tiny_limits, max_batch=1, max_batched_tokens=4000, max_context_tokens=4000, kv_tokens=4000
    )
    runner.load(tiny_checkpoint("llama"), DeploymentConfig(tp=2), tiny_stages(4, tp=2), limits)
    runner.step(StepPlan((StepItem(0, 0, (3,)),)))
    [child] = rank_processes()
    child.rlimit(psutil.RLIMIT_AS, (child.memory_info().vms,) * 2)
    with pytest.raises(EngineError, match=r"rank 1: (MemoryError|.*can't allocate memory)") as told:
        runner.step(StepPlan((StepItem(0, 0, (3,) * 4000),)))
    assert told.value.__cause__ is not None
    assert is_out_of_memory(told.value.__cause__)
    assert not rank_processes()


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_killed_rank_is_an_error_and_nothing_is_left(
    tp: int, pp: int, start, tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden
) -> None:
    runner = start(tp=tp, pp=pp)
    [child] = rank_processes()
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineError) as caught:
        runner.step(SECOND)
    golden("daemon", str(caught.value).partition(";")[0])  # what follows are torch's words
    assert not rank_processes()
    with golden.raises("daemon", EngineError):
        runner.step(SECOND)
    runner.load(tiny_checkpoint("llama"), DeploymentConfig(), tiny_stages(4), tiny_limits)
    runner.step(FIRST)


def test_ranks_end_with_a_killed_rank_0(tiny_checkpoint, until, tmp_path) -> None:
    """Whichever way it goes: here with -9, from a thread that is long gone."""
    script = textwrap.dedent("""
        import sys, threading, time
        from pathlib import Path
        from daemon.worker_spec import StageAssignment, WorkerLimits
        from daemon.torch_engine.parallel.runner import LocalRunner
        from fingerprint.config import DeploymentConfig
        stages = (StageAssignment(device_ids=("cpu:0", "cpu:1"), num_layers=4),)
        limits = WorkerLimits(max_batch=1, max_batched_tokens=8, max_context_tokens=8, kv_tokens=8,
                              memory_bytes_per_device=2**30)
        runner = LocalRunner()
        args = (Path(sys.argv[1]), DeploymentConfig(tp=2), stages, limits)
        thread = threading.Thread(target=runner.load, args=args)
        thread.start(); thread.join()
        print("loaded", flush=True)
        time.sleep(60)
    """)
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tiny_checkpoint("llama"))],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(root), "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loaded\n"
        [rank] = psutil.Process(process.pid).children()
        assert os.getpgid(rank.pid) == os.getpgid(process.pid)
        assert list(tmp_path.iterdir()) != []
        process.kill()
    until(lambda: not rank.is_running(), "the rank outlived rank 0")
    assert list(tmp_path.iterdir()) == []


def test_a_refused_load_leaves_nothing_on_the_other_ranks(tiny_checkpoint, tiny_stages, tiny_limits) -> None:
    """Stage 0 holds three layers and does not fit, stage 1 holds one and does: 32 MiB of KV cache a layer."""
    roomy = dataclasses.replace(
        tiny_limits, max_batch=1, max_context_tokens=2**19, kv_tokens=2**19, memory_bytes_per_device=2**30
    )
    tight = dataclasses.replace(roomy, memory_bytes_per_device=80 * 2**20)
    config, stages = DeploymentConfig(pp=2), tiny_stages(4, pp=2, layers=(3, 1))
    runner = LocalRunner()
    runner.load(tiny_checkpoint("llama"), config, stages, tiny_limits)
    [child] = rank_processes()
    before = child.memory_info().rss
    with pytest.raises(EngineError, match="stage 0 needs"):
        runner.load(tiny_checkpoint("llama"), config, stages, tight)
    assert child.memory_info().rss - before < 16 * 2**20
    runner.load(tiny_checkpoint("llama"), config, stages, roomy)
    assert child.memory_info().rss - before > 24 * 2**20, "the measure sees a layer's cache"
    runner.close()


def test_each_stage_has_a_limit_of_its_own(tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden) -> None:
    """The largest stage's limit is no promise of the other stages: their devices were chosen for less."""
    checkpoint, config = tiny_checkpoint("llama"), DeploymentConfig(pp=2)
    first, second = tiny_stages(4, pp=2, layers=(3, 1))
    tight = dataclasses.replace(second, memory_bytes_per_device=10_000)
    roomy = tuple(dataclasses.replace(stage, memory_bytes_per_device=2**26) for stage in (first, second))
    with contextlib.closing(LocalRunner()) as runner:
        with golden.raises("daemon", EngineError):
            runner.load(checkpoint, config, (first, tight), tiny_limits)
        runner.load(checkpoint, config, roomy, dataclasses.replace(tiny_limits, memory_bytes_per_device=10_000))


def test_ranks_that_cannot_be_started_leave_nothing(
    start, tiny_checkpoint, tiny_stages, tiny_limits, tmp_path, monkeypatch, golden: Golden
) -> None:
    start().close()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-python"))
    with golden.raises("daemon", EngineError):
        LocalRunner().load(tiny_checkpoint("llama"), DeploymentConfig(tp=2), tiny_stages(4, tp=2), tiny_limits)
    assert list(tmp_path.iterdir()) == []
    assert not torch.distributed.is_initialized()
