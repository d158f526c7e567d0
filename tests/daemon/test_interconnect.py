"""Links between GPUs: the measurement with real processes, when it is taken, and the file that is kept."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from daemon import interconnect, interconnect_bench
from daemon.interconnect import can_measure_links, kept_links, links_file, measure_links, with_links
from daemon.procfs import pids_with
from daemon.status import DeviceStatus, NodeStatus
from fingerprint.interconnect import MeasuredLinks
from tests.daemon.test_unlisted_gpus import python_that
from tests.fingerprint.step_timed_machine import StepTimedMachine, take_depth_tied
from tests.golden_words import Golden

MARK = "ISERVE_TEST_LINKS"
GIB = 2**30
SIZES = [8192, 131072, 2097152, 33554432]
FOUND = {
    "backend": "nccl",
    "captured": True,
    "torch": "2.14.0",
    "sizes_bytes": SIZES,
    "groups": [{"gpus": 2, "all_reduce_s": [12e-6, 11e-6, 30e-6, 190e-6], "send_s": [8e-6, 8e-6, 15e-6, 100e-6]}],
}
LINKS = MeasuredLinks(
    gpus=2,
    sizes_bytes=tuple(SIZES),
    all_reduce_s=(12e-6, 12e-6, 30e-6, 190e-6),  # a time below that of a smaller message is noise
    send_s=(8e-6, 8e-6, 15e-6, 100e-6),
)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def gpu(index: int, **changed: object) -> DeviceStatus:
    one = DeviceStatus(
        device_id=f"GPU-{index}",
        index=index,
        kind="cuda",
        name="NVIDIA H200",
        total_bytes=141 * GIB,
        free_bytes=140 * GIB,
        load_fraction=0.0,
    )
    return replace(one, **changed)  # type: ignore[arg-type]


def node(*devices: DeviceStatus) -> NodeStatus:
    gpus = devices or (gpu(0), gpu(1))
    return NodeStatus(node_id="n", observed_at=0.0, devices=gpus, workers=(), driver="580.1")


def saying(found: object) -> str:
    return f"print('a warning of torch')\nprint({json.dumps(found)!r})\n"


def test_measured_links_are_kept_for_these_gpus_and_this_driver(tmp_path: Path, golden: Golden) -> None:
    lines = f"import os\nassert os.environ['CUDA_VISIBLE_DEVICES'] == 'GPU-0,GPU-1'\n{saying(FOUND)}"
    measure_links(node(), python_that(tmp_path, lines))
    assert kept_links(node()) == (LINKS,)
    assert kept_links(replace(node(), driver="580.2")) == ()
    assert kept_links(node(gpu(0), gpu(1), gpu(2))) == ()
    assert kept_links(node(gpu(0))) == ()
    golden("daemon", json.loads(links_file().read_text())["source"].rpartition(",")[0])  # its end is the day
    assert not can_measure_links(node())


def test_a_profile_has_the_links_of_its_machine(tmp_path: Path) -> None:
    profile = take_depth_tied(StepTimedMachine())
    assert with_links(profile, node()) == profile
    measure_links(node(), python_that(tmp_path, saying(FOUND)))
    found = with_links(profile, node())
    assert found.machine.device.measured_links(2) == LINKS
    assert with_links(found, node(gpu(0))) == profile


def test_a_file_that_people_edited_holds(tmp_path: Path) -> None:
    measure_links(node(), python_that(tmp_path, saying(FOUND)))
    kept = json.loads(links_file().read_text())
    kept["interconnect"][0]["all_reduce_s"] = [1e-4, 2e-4, 3e-4, 4e-3]
    links_file().write_text(json.dumps(kept))
    assert kept_links(node())[0].all_reduce_s == (1e-4, 2e-4, 3e-4, 4e-3)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"gpus": ["GPU-0", "GPU-1"], "driver": "580.1", "source": "", "interconnect": 3}',
        b'{"gpus": ["GPU-0", "GPU-1"], "driver": "580.1", "source": "", "interconnect": [{"gpus": 2, '
        b'"sizes_bytes": [1, 2], "all_reduce_s": [-1, 2], "send_s": [1, 2]}]}',
        b'{"gpus": [' + b" " * 70_000 + b'], "driver": "580.1", "source": "", "interconnect": []}',
    ],
)
def test_a_file_that_cannot_be_used_is_reported(
    home: Path, content: bytes, caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    home.mkdir()
    links_file().write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert kept_links(node()) == ()
    golden("daemon", caplog.messages)
    assert can_measure_links(node())


@pytest.mark.parametrize(
    "lines",
    [
        "",
        "raise SystemExit('torch sees 1 GPUs')",
        "print('[]')",
        saying({}),
        saying(FOUND | {"groups": [{"gpus": 1, "all_reduce_s": [1] * 4, "send_s": [1] * 4}]}),
        saying(FOUND | {"groups": [{"gpus": 2, "all_reduce_s": [1] * 3, "send_s": [1] * 4}]}),
        saying(FOUND | {"groups": [{"gpus": 2, "all_reduce_s": [0, 1, 1, 1], "send_s": [1] * 4}]}),
        saying(FOUND | {"sizes_bytes": [1, 2, 3, 10**30]}),
        saying(FOUND).replace("1.2e-05", "NaN"),
    ],
)
def test_a_measurement_without_usable_figures_changes_nothing(
    tmp_path: Path, lines: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        measure_links(node(), python_that(tmp_path, lines))
    assert caplog.records
    assert not links_file().exists()


@pytest.mark.parametrize(
    ("devices", "can"),
    [
        pytest.param((gpu(0), gpu(1)), True, id="idle"),
        pytest.param((gpu(0),), False, id="one-gpu"),
        pytest.param((gpu(0), gpu(1, free_bytes=100 * GIB)), False, id="one-holds-memory"),
        pytest.param((gpu(0, kind="cpu"), gpu(1, kind="cpu")), False, id="cpu"),
    ],
)
def test_links_are_measured_between_idle_gpus(devices: tuple[DeviceStatus, ...], can: bool) -> None:
    assert can_measure_links(node(*devices)) is can


# The measurement itself, with processes on the CPU.


@pytest.mark.process
def test_processes_on_the_cpu_are_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interconnect, "_SECONDS", 0.1)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --gloo\n')
    python.chmod(0o755)
    measure_links(node(), str(python))
    (links,) = kept_links(node())
    assert (links.gpus, links.sizes_bytes) == (2, interconnect_bench.SIZES_BYTES)
    assert "gloo" in json.loads(links_file().read_text())["source"]


def _running(tmp_path: Path) -> list[int]:
    return list(pids_with(MARK, str(tmp_path)))


def _started(tmp_path: Path, until: Callable[..., object]) -> subprocess.Popen[bytes]:
    """Return a process that has started a measurement of two ranks, which goes on for long."""
    script = [sys.executable, "-I", interconnect_bench.__file__, "100", "--gloo", "--parent"]
    lines = f"import os, subprocess\nsubprocess.run([*{script!r}, str(os.getpid())])"
    environment = os.environ | {MARK: str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", lines], env=environment, stderr=subprocess.DEVNULL)
    until(lambda: len(_running(tmp_path)) == 4, "it, the measurement and two ranks do not run")
    return parent


@pytest.mark.process
def test_it_ends_with_its_parent(tmp_path: Path, until: Callable[..., object]) -> None:
    parent = _started(tmp_path, until)
    parent.kill()
    parent.wait()
    until(lambda: not _running(tmp_path), "processes of the measurement are left")


@pytest.mark.process
def test_it_ends_with_one_of_its_ranks(tmp_path: Path, until: Callable[..., object]) -> None:
    parent = _started(tmp_path, until)
    ranks = [pid for pid in _running(tmp_path) if b"--rank" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(ranks[0], signal.SIGKILL)
    parent.wait()
    until(lambda: not _running(tmp_path), "processes of the measurement are left")
