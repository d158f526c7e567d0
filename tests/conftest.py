"""Settings of all tests.

Hypothesis without a clock, for on a busy machine a slow example is no finding, and with the same examples in every
run, for a change is judged by what it breaks; ``make test-long`` draws new ones. A collector that looks at what
the tests of one file make, not at the million objects that modules are and that other files leave. One thread for
torch and NumPy, whose models are tiny here and whose threads in two test processes on two cores wait for each
other; processes that tests start choose their own number."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.golden_words import REWRITES, Golden, remove_stale
from tests.tiers import (
    GOLDEN_CASES,
    pytest_collection_modifyitems,
    pytest_runtest_call,
    pytest_runtest_setup,
)

__all__ = ["pytest_collection_modifyitems", "pytest_runtest_call", "pytest_runtest_setup"]  # hooks

settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_EXAMPLES", "same"))

# Where the tests run in a shell's background it is ignored, and would be in every process that they start.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until all is imported: half of what that takes would be the collector's

# Read once, where Triton's own functions are defined: before torch imports it for any other test. On a GPU kernels
# are compiled.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

_THREADS = "OMP_NUM_THREADS"  # read once by OpenMP, OpenBLAS and MKL, as each is loaded
_threads_given = os.environ.get(_THREADS)
os.environ.setdefault(_THREADS, "1")


@pytest.hookimpl(tryfirst=True)  # before it starts those that run tests
def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("dist", "no") != "no" and not hasattr(session.config, "workerinput"):
        gc.enable()  # this process hands tests out and collects none
        _pass_threads_on()


def pytest_collection_finish(session: pytest.Session) -> None:
    if REWRITES:
        remove_stale(session.config.stash.get(GOLDEN_CASES, {}).keys())
    _pass_threads_on()
    gc.freeze()
    gc.enable()


def _pass_threads_on() -> None:
    """Let the processes that this one starts have the number of threads that it was given, if any."""
    if _threads_given is None:
        os.environ.pop(_THREADS, None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()  # what a file leaves behind stays, and no collection of the next files looks at it


@pytest.fixture(scope="session")
def engine_sources(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Folder, of all processes of a run, of what iServe read in the sources of installed engines.

    In a home of its own each daemon, controller and worker would read the 1,600 files of transformers again. Its
    parent is a home for a process that needs none of its own.
    """
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "sources-home" / "engine-sources"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@pytest.fixture
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Golden:
    """``golden("cli-errors", said)``: the words of this test are those of its section in ``tests/golden``."""
    return Golden(request.node.name, {str(tmp_path): "TMP", str(tmp_path.parent): "TMP"})
