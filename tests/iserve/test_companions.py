"""A companion of the controller that does not start: tried again at growing intervals, and reported once."""

from __future__ import annotations

import logging
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from daemon.process import spawn_detached
from daemon.procfs import start_time_ticks
from fingerprint.errors import UnavailableError
from iserve.controller.child_processes import ChildProcess
from iserve.controller.reconcile import Reconciler
from iserve.controller.service import Controller
from iserve.settings import Settings
from iserve.state.store import Store
from tests.golden_words import Golden

COMING = """
import sys, time
from pathlib import Path
from daemon.process import own_record, write_record

open("starts", "a").write("x")
time.sleep(0.5)
write_record(Path(sys.argv[1]), own_record(url="", token=""))
time.sleep(600)
"""
HOPELESS = "open('starts', 'a').write('x'); print('no way')"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(home=tmp_path / "home")


class Clock:
    """Clock in place of the module ``time``: it stops while a process starts and ends, and is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_starts_that_fail_come_at_growing_intervals(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    clock = Clock()
    monkeypatch.setattr("iserve.controller.child_processes.time", clock)
    companion = ChildProcess("gateway", settings, [sys.executable, "-c", HOPELESS])
    started_s, starts, told = [], Path("starts"), set()
    while clock.now_s < 100:
        with pytest.raises(UnavailableError) as caught:
            companion.ensure()
        told.add(str(caught.value))
        if len(starts.read_text()) > len(started_s):
            started_s.append(clock.now_s)
        clock.now_s += 0.5
    pauses = [after - before for before, after in pairwise(started_s)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    golden("controller", told)


def test_a_start_that_another_controller_began_is_waited_for_and_ended_whatever_its_options(
    settings: Settings,
) -> None:
    record = str(settings.run_folder / "daemon.json")
    program = [sys.executable, "-c", COMING, record]
    settings.log_folder.mkdir(parents=True)
    begun = spawn_detached([*program, "--once"], settings.log_folder / "daemon.log")
    companion = ChildProcess("daemon", settings, program, ["--twice"])
    try:
        assert companion.ensure().pid == begun
        assert Path("starts").read_text() == "x"
        Path(record).unlink()
    finally:
        ended = companion.stop()
    assert ended
    assert start_time_ticks(begun) is None
    assert not companion.stop()


def test_what_comes_up_at_every_pass_is_said_once(
    settings: Settings, caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    controller = Controller(settings, Store.open(settings.home / "state.db"))
    for name in ("daemon", "gateway"):
        companion = ChildProcess(name, settings, [sys.executable, "-c", HOPELESS])
        setattr(controller, f"{name}_process", companion)
    reconciler = Reconciler(controller)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            reconciler.tick()
    said = sorted(r.getMessage().split(" (log")[0] for r in caplog.records if r.levelno >= logging.WARNING)
    golden("controller", said)
    controller.close()
    controller.store.close()
