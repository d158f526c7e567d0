"""A companion of the controller that does not come up: tried again at growing intervals, and said so once."""

from __future__ import annotations

import logging
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fingerprint.errors import UnavailableError
from iserve.controller.processes import Companion
from iserve.controller.reconcile import Reconciler
from iserve.controller.service import Controller
from iserve.settings import Settings
from iserve.state.store import Store

HOPELESS = "open('starts', 'a').write('x'); print('no way')"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.chdir(tmp_path)
    return Settings(home=tmp_path / "home")


class Clock:
    """In place of the module ``time``: it stands still while a process starts and ends, and is set by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def test_starts_that_fail_come_at_growing_intervals(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("iserve.controller.processes.time", clock)
    companion = Companion("gateway", settings, [sys.executable, "-c", HOPELESS])
    started_s, starts = [], Path("starts")
    while clock.now_s < 100:
        with pytest.raises(UnavailableError, match="the gateway did not come up: no way"):
            companion.ensure()
        if len(starts.read_text()) > len(started_s):
            started_s.append(clock.now_s)
        clock.now_s += 0.5
    pauses = [after - before for before, after in pairwise(started_s)]
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_what_comes_up_at_every_pass_is_said_once(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    controller = Controller(settings, Store.open(settings.home / "state.db"))
    for name in ("daemon", "gateway"):
        companion = Companion(name, settings, [sys.executable, "-c", HOPELESS])
        setattr(controller, f"{name}_process", companion)
    reconciler = Reconciler(controller)
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            reconciler.tick()
    said = sorted(record.getMessage().split(" (log")[0] for record in caplog.records)
    assert said == ["the daemon did not come up: no way", "the gateway did not come up: no way"]
    controller.close()
    controller.store.close()
