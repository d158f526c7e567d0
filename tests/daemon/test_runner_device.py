"""The device under a rank: cores, clock, and what it is measured to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from daemon import gpu_bench
from daemon.torch_engine.api.profile_api import measure_device
from daemon.torch_engine.parallel.rank_device import cores_of
from daemon.torch_engine.parallel.stage import ActivationMeter
from fingerprint.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "device_id", "cores"),
    [
        ("cpu:0=0;cpu:1=1", "cpu:1", (1,)),
        ("cpu:0=0,2 ; cpu:1=1,3;", "cpu:0", (0, 2)),
        ('{"cpu:0": [0, 1], "cpu:1": [2]}', "cpu:0", (0, 1)),
        ("cpu:0=0", "cpu:7", ()),
        ("", "cpu:0", ()),
    ],
)
def test_cores_of_a_device(text: str, device_id: str, cores: tuple[int, ...]) -> None:
    assert cores_of(device_id, text) == cores


@pytest.mark.parametrize("text", ["cpu:0", "cpu:0=a", "{", '{"cpu:0": 3}', '{"cpu:0": [null]}', "cpu:0=-1"])
def test_cores_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ISERVE_DEVICE_CORES"):
        cores_of("cpu:0", text)


@pytest.mark.slow
def test_a_rank_runs_on_its_cores_with_a_thread_for_each() -> None:
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, threading, torch\n"
        "started = threading.Event(); threading.Thread(target=started.wait, daemon=True).start()\n"
        "from daemon.torch_engine.parallel.rank_device import RankDevice\n"
        "RankDevice('cpu:0', 0, threads=None)\n"
        "print({tuple(os.sched_getaffinity(int(task))) for task in os.listdir('/proc/self/task')})\n"
        "print(torch.get_num_threads())\n"
    )
    root = str(Path(__file__).parents[2])
    env = os.environ | {"PYTHONPATH": root, "ISERVE_DEVICE_CORES": f"cpu:0={core}"}
    out = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout
    assert out.splitlines() == [f"{{({core},)}}", "1"]


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's figures come from its datasheet")


@no_gpu
def test_the_cpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 MiB are read and two matrices of 1024 multiplied, each in 20 ms by this clock."""
    monkeypatch.setattr(gpu_bench, "best_s", lambda kind, seconds, work: 0.02)
    device = measure_device(memory_bytes=3 * 2**30)
    assert (device.name, device.memory_bytes, device.compute_capability) == ("cpu", 3 * 2**30, None)
    assert device.memory_bytes_per_s == 256 * 2**20 / 0.02
    assert device.flops_16bit_per_s == 2 * 1024**3 / 0.02
    assert device.slowest_link_bytes_per_s(2) == device.memory_bytes_per_s / 2


@pytest.mark.long
@no_gpu
def test_what_this_cpu_reaches_is_of_a_cpu_s_size() -> None:
    """Orders of magnitude: no CPU streams below 100 MB/s or beyond 10 TB/s, nor multiplies below 1 GFLOP/s."""
    device = measure_device(memory_bytes=3 * 2**30)
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert 1e9 < device.flops_16bit_per_s < 1e16


class TestActivationMeter:
    def test_counts_what_is_alive_together(self) -> None:
        """1000 + 2000 numbers, the first freed, then 500: the peak is 3000 numbers of 4 bytes."""
        with ActivationMeter(()) as meter:
            first = torch.zeros(1000)
            second = torch.ones(2000)
            del first
            third = second[:500] + 1
        assert meter.peak_bytes == 4 * 3000
        assert third.numel() == 500

    def test_a_view_is_not_counted_again_and_known_tensors_not_at_all(self) -> None:
        weights = torch.zeros(5000)
        with ActivationMeter((weights,)) as meter:
            weights.add_(1)
            view = weights[10:20]
            made = torch.zeros(100)
            made.view(10, 10).t()
        assert meter.peak_bytes == 4 * 100
        assert view.numel() == 10
