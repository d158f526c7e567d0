"""Settings of all tests.

Hypothesis without a clock, for on a busy machine a slow example is no finding, and with the same examples in every
run, for a change is judged by what it breaks; ``make test-long`` draws new ones. A collector that looks at what
tests make, not at the million objects that their modules are."""

from __future__ import annotations

import gc
import os
import signal
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.golden_words import Golden
from tests.tiers import pytest_collection_modifyitems, pytest_runtest_call, pytest_runtest_setup

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_call", "pytest_runtest_setup"]  # hooks

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_EXAMPLES", "same"))

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
