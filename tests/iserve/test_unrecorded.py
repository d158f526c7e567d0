"""Processes of a home that have no record yet: found, ended, and not started a second time."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE_S

# Laid on the path of every Python of the installation: the module that is named waits before it does anything.
HELD = """
import sys, time
from pathlib import Path

if sys.orig_argv[1:3] == ["-m", {module!r}]:
    while not Path({go!r}).exists():
        time.sleep(0.02)
"""
MODULES = {"daemon": "daemon", "gateway": "iserve.gateway", "controller": "iserve.controller"}


@pytest.fixture
def hold(make_installation: Callable[..., Any], tmp_path: Path) -> Callable[[str], tuple[Any, Path]]:
    """``hold("daemon")``: an installation whose daemons wait before their record, until the file is made."""

    def make(name: str) -> tuple[Any, Path]:
        folder, go = tmp_path / "held", tmp_path / "go"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(HELD.format(module=MODULES[name], go=str(go)))
        return make_installation(PYTHONPATH=str(folder)), go

    return make


def pids_of(installation: Any, name: str) -> list[int]:
    words = f" -m {MODULES[name]} "
    found = installation.processes().items()
    return [pid for pid, command in found if words in f"{command} " and "daemonize.py" not in command]


@pytest.mark.parametrize("name", list(MODULES))
def test_down_ends_what_has_no_record_yet(
    name: str, hold: Callable[..., Any], until: Callable[..., Any], kill: Callable[[int], None]
) -> None:
    """The starter was killed; the process would appear a moment after `iserve down`, and live on."""
    installation, go = hold(name)
    command = installation.start("up")
    until(lambda: pids_of(installation, name), f"a {name} is starting")
    if name != "controller":
        installation.kill("controller")
    kill(command.pid)
    command.communicate()
    said = installation.run("down").stdout
    left = installation.processes()
    go.touch()
    assert left == {}
    assert f"{name} ended" in said.splitlines()


@pytest.mark.parametrize("name", ["daemon", "gateway"])
def test_a_controller_told_to_end_ends_the_start_it_abandons(
    name: str, hold: Callable[..., Any], until: Callable[..., Any]
) -> None:
    installation, go = hold(name)
    command = installation.start("up")
    until(lambda: pids_of(installation, name), f"a {name} is starting")
    os.kill(installation.record("controller").pid, signal.SIGTERM)
    until(lambda: not pids_of(installation, "controller"), "the controller has ended")
    left = installation.processes().keys() - {command.pid}
    command.communicate(timeout=PATIENCE_S)
    go.touch()
    assert left == set()


def test_a_gateway_that_a_killed_controller_began_is_waited_for(
    hold: Callable[..., Any], until: Callable[..., Any]
) -> None:
    """A second gateway would be the only one with a record."""
    installation, go = hold("gateway")
    first = installation.start("up")
    (begun,) = until(lambda: pids_of(installation, "gateway"), "a gateway is starting")
    installation.kill("controller")
    first.communicate(timeout=PATIENCE_S)
    routes = installation.home / "run" / "routes.json"
    routes.unlink()
    second = installation.start("up")
    until(routes.exists, "the next controller is about to see to the gateway")
    go.touch()
    out, error = second.communicate(timeout=PATIENCE_S)
    assert second.returncode == 0, out + error
    assert pids_of(installation, "gateway") == [begun]
    assert installation.record("gateway").pid == begun
