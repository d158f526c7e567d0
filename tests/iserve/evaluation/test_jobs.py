"""Processes that share the work of an evaluation."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from daemon.process_tree import signal_group
from fingerprint.errors import ConfigError
from iserve.evaluation.runner import WorldRun, evaluate
from tests.golden_words import Golden
from tests.iserve.evaluation.worlds import small_world

# Pieces of work that never end; each says on standard output that it runs.
_ENDLESS = """
import os, signal
from iserve.evaluation import runner
from iserve.evaluation.contestants import STRONG_RULE
from pathlib import Path
from tests.iserve.evaluation.worlds import small_world

def endless(piece, report=None):
    os.write(1, b"x")
    signal.pause()

runner._Piece.results = endless
runner.evaluate([runner.WorldRun(small_world(), Path())], contestants=(STRONG_RULE, "first-fit"), jobs=2)
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """Workers hold its standard output, which ends when the last of them has."""
    command, folder = [sys.executable, "-c", _ENDLESS], Path(__file__).parents[3]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=folder, start_new_session=True)
    try:
        assert parent.stdout is not None
        assert parent.stdout.read(2) == b"xx"
        os.kill(parent.pid, signal.SIGKILL)
        assert parent.communicate(timeout=60) == (b"", None)
        assert parent.returncode == -signal.SIGKILL
    finally:
        signal_group(parent.pid, signal.SIGKILL)


@pytest.mark.parametrize("jobs", [0, -1])
def test_no_process_is_refused(jobs: int, golden: Golden) -> None:
    with golden.raises("simulator-errors", ConfigError):
        evaluate([WorldRun(small_world(), Path())], jobs=jobs)
