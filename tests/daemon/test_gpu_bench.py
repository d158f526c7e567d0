"""The benchmark of a GPU, on the CPU's tensors: its arithmetic, and what it says where there is no GPU."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from daemon import gpu_bench


def test_rates_are_bytes_and_flops_over_the_shortest_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_bench, "best_s", lambda kind, seconds, work: 2.0)
    assert gpu_bench.bytes_per_s("cpu", 1.0, 2**20) == 2**20 / 2
    assert gpu_bench.flops_per_s("cpu", 1.0, 64) == 2 * 64**3 / 2


def test_the_work_is_the_whole_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[torch.Tensor] = []

    def run(kind: str, seconds: float, work: object) -> float:
        done.append(work())  # type: ignore[operator]
        return 1.0

    monkeypatch.setattr(gpu_bench, "best_s", run)
    gpu_bench.bytes_per_s("cpu", 1.0, 2**20)
    gpu_bench.flops_per_s("cpu", 1.0, 64)
    weights = gpu_bench.random_matrix("cpu", 2**20 // 2 // 4096, 4096).double()
    vector, square = (gpu_bench.random_matrix("cpu", *shape).double() for shape in ((1, 4096), (64, 64)))
    for output, reference in zip(done, (vector @ weights.T, square @ square), strict=True):
        assert output.shape == reference.shape
        error = (output.double() - reference).abs().max() / reference.abs().max()
        assert error < 2**-8  # bfloat16 keeps eight bits


@pytest.mark.parametrize(("rows", "columns"), [(1, 4096), (64, 64), (1030, 1024)])
def test_matrices_are_of_random_numbers_and_always_the_same(rows: int, columns: int) -> None:
    """The last one has more rows than are drawn: its rows begin anew."""
    matrix = gpu_bench.random_matrix("cpu", rows, columns)
    assert (matrix.shape, matrix.dtype) == ((rows, columns), torch.bfloat16)
    assert torch.equal(matrix, gpu_bench.random_matrix("cpu", rows, columns))
    assert matrix.is_contiguous()
    assert matrix.float().std().item() == pytest.approx(1, abs=0.05)
    assert matrix.float().mean().item() == pytest.approx(0, abs=0.05)
    drawn = min(rows, 2**20 // columns)
    assert len(torch.unique(matrix[:drawn].float(), dim=0)) == drawn  # no two rows alike
    assert torch.equal(matrix[drawn:], matrix[: rows - drawn])


def test_the_shortest_of_at_least_three_runs_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock goes 10 s on at each look: every run takes that, and the time is up before the first ends."""
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr(gpu_bench.time, "perf_counter", lambda: next(clock))
    runs: list[None] = []
    assert gpu_bench.best_s("cpu", 1.0, lambda: runs.append(None)) == 10.0
    assert len(runs) == 4  # one warms up


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-I", gpu_bench.__file__, "5"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "sees no GPU" in done.stderr
