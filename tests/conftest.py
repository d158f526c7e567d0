"""Hypothesis without a clock: on a busy machine a slow example is no finding. A collector that looks at what tests
make, not at the million objects that their modules are."""

from __future__ import annotations

import gc
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.golden_words import Golden
from tests.tiers import pytest_collection_modifyitems, pytest_runtest_call, pytest_runtest_setup

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_call", "pytest_runtest_setup"]  # hooks

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")

# Where the tests run in a shell's background it is ignored, and would be in every process that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported: half of what that takes would be the collector's


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        gc.enable()  # this process hands tests out and collects none


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """``golden("cli-errors", said)``: the words of this test are those of its section in ``tests/golden``."""
    return Golden(request.node.name, {str(tmp_path): "TMP", str(tmp_path.parent): "TMP"})
