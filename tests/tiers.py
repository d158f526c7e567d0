"""Tiers of tests: ``process`` is given by fixtures to whatever starts processes of iServe (docs/testing.md)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

__all__ = [
    "GOLDEN_CASES",
    "PROCESS_FIXTURES",
    "pytest_collection_modifyitems",
    "pytest_runtest_call",
    "pytest_runtest_setup",
]

# A test that has one of these, also by way of another fixture, is `process`.
PROCESS_FIXTURES = frozenset(
    {
        "calm_node",
        "gateway_process",
        "launch",
        "make_installation",
        "make_node",
        "node",
        "on_node",
        "own_gateway",
        "postgres",
        "profiled",
        "variant_gateway_process",
    }
)
# Collected tests that compare words with a golden file: node ids by the test's name, which is that of its section.
GOLDEN_CASES = pytest.StashKey[dict[str, list[str]]]()
_PACKAGES = ("daemon", "iserve")
_PROGRAMS = ("iserve", "fake_daemon.py", "postgres")

_started: list[str] = []  # commands of ours that the test which runs has started


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("process")
        if "golden" in getattr(item, "fixturenames", ()):
            item.add_marker("golden")
            item.config.stash.setdefault(GOLDEN_CASES, {}).setdefault(item.name, []).append(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    yield from _refuse_unmarked(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    yield from _refuse_unmarked(item)
    if (golden := getattr(item, "funcargs", {}).get("golden")) is not None:
        golden.finish()


def _refuse_unmarked(item: pytest.Item) -> Iterator[None]:
    """Fail a test that starts a process of iServe unmarked: it would run in the quick tier."""
    _started.clear()
    yield
    if _started and item.get_closest_marker("process") is None:
        pytest.fail(
            f"it starts `{_started[0]}` and is not marked `process`: mark it with @pytest.mark.process, or name "
            "the fixture that starts it in PROCESS_FIXTURES of tests/tiers.py",
            pytrace=False,
        )


def _see(event: str, arguments: tuple[object, ...]) -> None:
    if event == "subprocess.Popen" and isinstance(arguments[1], list | tuple):
        words = [os.fsdecode(word) for word in arguments[1]]
        if _is_ours(words):
            _started.append(" ".join(words))


def _is_ours(words: Sequence[str]) -> bool:
    """Return whether a command is a module or a program of ours; what ``python -c`` runs is neither."""
    modules = {after.split(".")[0] for word, after in pairwise(words) if word == "-m"}
    return not modules.isdisjoint(_PACKAGES) or any(os.path.basename(word) in _PROGRAMS for word in words[:2])


sys.addaudithook(_see)
