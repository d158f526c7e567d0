"""Engine environments under the home: versions, which are complete, and which one is used."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from daemon.engines.environments import environment_of, environments, exact_version, is_version
from daemon.engines.external import Interpreter
from fingerprint.errors import ConfigError, EngineError, SilentEngineError
from tests.daemon.engines.standin import make_environment
from tests.golden_words import Golden

VARIABLE = "ISERVE_ABACUS_PYTHON"


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Interpreter:
    """The interpreter of an engine that is not installed in iServe's own Python, in a home of its own."""
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return Interpreter(VARIABLE, "abacus", installable=True)


def install(home: Path, version: str, *, complete: bool = True) -> str:
    """Make the environment that the installer leaves, and return its Python."""
    environment = environment_of(home, "abacus", version)
    make_environment(environment.folder, {}, "abacus", version)
    if complete:
        environment.marker.write_text("{}")
    return str(environment.python)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.33", "0.33.0"),
        ("0.33.0", "0.33.0"),
        ("1.2.3.post1", "1.2.3.post1"),
        ("0.33.0+cu130", "0.33.0+cu130"),
        ("0.33rc1", "0.33.0rc1"),
        ("v0.33.0-RC1", "0.33.0rc1"),
        ("0.33.1.dev5+G1a2b", "0.33.1.dev5+g1a2b"),
    ],
)
def test_a_version_is_exact(text: str, version: str) -> None:
    assert exact_version(text) == version


@pytest.mark.parametrize("text", ["", "latest", "0.33.*", ">=0.33", "../0.33", "0.33 ", "0.33.0; rm", "1" * 61])
def test_anything_else_is_refused(text: str, golden: Golden) -> None:
    with golden.raises("engines", ConfigError):
        exact_version(text)


def test_versions_are_ordered_as_numbers_and_candidates_behind_their_release(tmp_path: Path) -> None:
    ordered = ["0.100.0", "0.33.0.post1", "0.33.0+cu130", "0.33.0", "0.33.0rc10", "0.33.0rc9", "0.33.0a1"]
    ordered += ["0.33.0.dev5", "0.24.2", "0.9.0"]
    for version in sorted(ordered):
        install(tmp_path, version)
    assert [one.version for one in environments(tmp_path, "abacus")] == ordered


@pytest.mark.parametrize(
    ("installed", "asked", "same"),
    [
        ("0.33.0", "0.33.0", True),
        ("0.33.0", "0.33", True),
        ("0.33.0+cu130", "0.33.0", True),
        ("0.33.0+cu130", "0.33.0+cu130", True),
        ("0.33.0+cu130", "0.33.0+cu128", False),
        ("0.33.0", "0.33.0+cu130", False),
        ("0.33.0rc1", "0.33.0", False),
        ("0.33.0rc1", "0.33.0-rc.1", True),
        ("0.33.0.post1", "0.33.0", False),
        ("broken", "broken", True),
        ("broken", "0.33.0", False),
    ],
)
def test_an_installed_version_is_the_one_asked_for(installed: str, asked: str, *, same: bool) -> None:
    assert is_version(installed, asked) is same


def test_an_installation_is_found_by_a_process_that_runs_already(
    interpreter: Interpreter, tmp_path: Path, golden: Golden
) -> None:
    with golden.raises("engines", EngineError):
        interpreter.find()
    python = install(tmp_path, "0.9.0")
    found = interpreter.find()
    assert (found.python, found.version("abacus"), found.source) == (python, "0.9.0", "environment")


def test_the_newest_complete_one_is_used(interpreter: Interpreter, tmp_path: Path) -> None:
    install(tmp_path, "0.9.0")
    newest = install(tmp_path, "0.24.0")
    install(tmp_path, "0.33.0", complete=False)
    (tmp_path / "engines" / "abacus-notes").mkdir()
    assert interpreter.find().python == newest
    assert [one.version for one in environments(tmp_path, "abacus")] == ["0.33.0", "0.24.0", "0.9.0"]


def test_the_setting_comes_first(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "0.24.0")
    other = make_environment(tmp_path / "other", {}, "abacus", "0.9.0")
    monkeypatch.setenv(VARIABLE, str(other))
    assert interpreter.find().python == str(other)
    assert [(found.version("abacus"), found.source) for found in interpreter.installations()] == [
        ("0.9.0", "setting"),
        ("0.24.0", "environment"),
    ]


def test_a_version_that_is_asked_for_is_found_wherever_it_is(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    older = install(tmp_path, "0.9.0")
    install(tmp_path, "0.24.0")
    monkeypatch.setenv(VARIABLE, str(make_environment(tmp_path / "other", {}, "abacus", "0.30.0+cu130")))
    assert interpreter.find("0.9.0").python == older
    assert interpreter.find("0.30.0").source == "setting"
    with golden.raises("engines", EngineError):
        interpreter.find("0.33.0")


def test_an_environment_whose_python_is_gone_says_what_to_do(
    interpreter: Interpreter, tmp_path: Path, golden: Golden
) -> None:
    python = install(tmp_path, "0.9.0")
    os.unlink(python)
    with golden.raises("engines", EngineError):
        interpreter.find()


def test_an_engine_that_is_installed_by_hand_has_no_environments(
    tmp_path: Path, monkeypatch, golden: Golden
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    install(tmp_path, "0.9.0")
    with golden.raises("engines", EngineError):
        Interpreter(VARIABLE, "abacus").find()
    assert Interpreter(VARIABLE, "pytest").find().python == sys.executable


def test_a_release_is_found_though_another_place_does_not_answer(interpreter, monkeypatch, tmp_path):
    python = install(tmp_path, "1.0.0")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "not-mounted"))
    assert interpreter.find("1.0.0").python == python
    with pytest.raises(SilentEngineError):
        interpreter.find("2.0.0")
    found, (silent,) = interpreter.survey()
    assert [one.python for one in found] == [python]
    assert "not-mounted" in str(silent)
