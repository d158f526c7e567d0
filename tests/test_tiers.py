"""Tiers are found by themselves: a test that starts a process of iServe without saying so fails."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.tiers import PROCESS_FIXTURES, _is_ours, _refuse_unmarked


@pytest.mark.parametrize(
    ("command", "is_ours"),
    [
        ("python -m iserve.gateway --home h", True),
        ("python -P -m daemon.torch_engine.parallel.rank_main", True),
        ("/x/bin/iserve replay trace.csv", True),
        ("python tests/daemon/fake_daemon.py h {}", True),
        ("/usr/lib/postgresql/15/bin/postgres -D data", True),
        ("python -c import-daemon", False),
        ("python -m venv daemon", False),
        ("git clone iserve-models", False),
    ],
)
def test_processes_of_ours_are_told_from_others(command: str, is_ours: bool) -> None:
    assert _is_ours(command.split()) is is_ours


@pytest.mark.smoke
@pytest.mark.process
@pytest.mark.parametrize("marker", [None, "process"])
def test_one_that_is_started_unmarked_fails_its_test(marker: str | None) -> None:
    item = SimpleNamespace(get_closest_marker=lambda name: marker)
    steps = _refuse_unmarked(item)  # type: ignore[arg-type]
    next(steps)
    subprocess.run([sys.executable, "-m", "daemon", "--no-such-option"], capture_output=True, check=False)
    if marker is None:
        with pytest.raises(
            pytest.fail.Exception, match=r"-m daemon --no-such-option` and is not marked `process`"
        ):
            next(steps)
    else:
        assert next(steps, "passed") == "passed"


def test_every_fixture_that_is_named_is_there(request: pytest.FixtureRequest) -> None:
    """Each name of the list is that of a fixture of some test; a fixture that is renamed is missed here."""
    sources = "\n".join(path.read_text() for path in (request.config.rootpath / "tests").rglob("*.py"))
    assert {name for name in PROCESS_FIXTURES if f"def {name}(" not in sources} == set()
