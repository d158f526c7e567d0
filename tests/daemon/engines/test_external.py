"""The Python that an engine is installed for is found without importing the engine."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest

from daemon.engines import external
from daemon.engines.external import ExternalEngine, Installation, Interpreter
from daemon.engines.lookup import look
from fingerprint.architectures import Architectures, Listed
from fingerprint.capability import EngineCapabilities
from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.errors import EngineError, InfeasibleError, SilentEngineError
from tests.daemon.engines.standin import make_environment, set_version
from tests.golden_words import Golden

VARIABLE = "ISERVE_ABACUS_PYTHON"


@pytest.fixture
def python(tmp_path):
    """An environment with abacus 1.2.3, whose module must never be imported."""
    poison = tmp_path / "poison.py"
    poison.write_text("raise SystemExit('imported')\n")
    return make_environment(tmp_path / "env", {"abacus.main": poison}, "abacus", "1.2.3")


def packages_of(python: Path) -> Path:
    (found,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return found


def test_versions_come_from_the_interpreter_that_is_set(monkeypatch, python):
    set_version(packages_of(python), "beads", "7")
    monkeypatch.setenv(VARIABLE, str(python))
    found = Interpreter(VARIABLE, "abacus", beside=("beads", "absent")).find()
    assert found.python == str(python)
    assert found.versions == (("abacus", "1.2.3"), ("beads", "7"))
    assert found.version("abacus") == "1.2.3"
    assert found.version("absent") == ""


def test_a_version_is_that_of_the_distribution_wherever_it_is_written(tmp_path, monkeypatch):
    """Also of an ``egg-info``, as older installers leave it, and not what a README says behind the headers."""
    names = sorted({found.name for found in metadata.distributions()})
    assert look(names)["versions"] == {name: metadata.version(name) for name in names}
    written = {
        "late.dist-info/METADATA": "Metadata-Version: 2.1\nName: late\nVersion: 2.0\n\nVersion: 9\n",
        "none.dist-info/METADATA": "Metadata-Version: 2.1\nName: none\nversion: 3.0\n",
        "old.egg-info/PKG-INFO": "Metadata-Version: 1.2\nName: old\nVersion: 0.9\n",
    }
    for file, text in written.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert look(["late", "none", "old"])["versions"] == {"late": "2.0", "none": "3.0", "old": "0.9"}


def test_without_a_setting_it_is_the_running_interpreter(monkeypatch, golden: Golden):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert Interpreter(VARIABLE, "pytest").find().python == sys.executable
    with golden.raises("engines", EngineError):
        Interpreter(VARIABLE, "abacus").find()


def test_an_interpreter_without_it_is_named(monkeypatch, python, golden: Golden):
    monkeypatch.setenv(VARIABLE, str(python))
    with golden.raises("engines", EngineError):
        Interpreter(VARIABLE, "beads").find()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: None, id="nothing-there"),
        pytest.param(lambda path: path.mkdir(), id="a-folder"),
        pytest.param(lambda path: path.write_text("#!/bin/sh\n"), id="not-executable"),
        pytest.param(lambda path: script(path, "echo hello"), id="not-a-python"),
        pytest.param(lambda path: script(path, "echo '[1]'"), id="another-answer"),
        pytest.param(lambda path: script(path, "echo broken >&2; exit 3"), id="fails"),
        pytest.param(lambda path: script(path, "exec sleep 60"), id="hangs"),
    ],
)
def test_a_setting_that_is_no_python_is_one_clear_error(monkeypatch, tmp_path, make, golden: Golden):
    make(tmp_path / "python")
    monkeypatch.setattr(external, "_ANSWER_S", 1.0)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with golden.raises("engines", EngineError) as caught:
        Interpreter(VARIABLE, "abacus").find()
    assert f"{VARIABLE}={tmp_path / 'python'}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_relative_path_is_refused(monkeypatch, golden: Golden):
    monkeypatch.setenv(VARIABLE, "env/bin/python")
    with golden.raises("engines", EngineError):
        Interpreter(VARIABLE, "abacus").find()


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_it_is_asked_once_until_something_is_installed(monkeypatch, python):
    monkeypatch.setenv(VARIABLE, str(python))
    asked = []
    run = external.subprocess.run
    monkeypatch.setattr(
        external.subprocess, "run", lambda *args, **kwargs: asked.append(1) or run(*args, **kwargs)
    )
    interpreter = Interpreter(VARIABLE, "abacus")
    assert [interpreter.find().version("abacus") for _ in range(3)] == ["1.2.3"] * 3
    assert len(asked) == 1
    packages = packages_of(python)
    before = os.stat(packages).st_mtime_ns
    set_version(packages, "abacus", "1.3.0")
    os.utime(packages, ns=(before + 10**6, before + 10**6))  # clocks of file systems are coarse
    assert interpreter.find().version("abacus") == "1.3.0"
    assert len(asked) == 2


def test_our_own_python_path_is_not_the_engines(monkeypatch, python, tmp_path):
    """Without this, an abacus next to iServe would count as installed there."""
    ours = tmp_path / "ours"
    ours.mkdir()
    set_version(ours, "beads", "9")
    monkeypatch.setenv("PYTHONPATH", str(ours))
    monkeypatch.setenv(VARIABLE, str(python))
    assert Interpreter(VARIABLE, "abacus", beside=("beads",)).find().version("beads") == ""


class Abacus(ExternalEngine):
    """Knows release 1 of the abacus only."""

    def __init__(self) -> None:
        table = EngineCapabilities(
            engine="abacus-engine",
            architectures=Architectures(
                source="abacus 1", listed={"LlamaForCausalLM": Listed()}, otherwise="it has no other"
            ),
            weights=dict.fromkeys(WeightFormat),
            kv=dict.fromkeys(KvFormat),
            pruning={Pruning.NONE: None},
            max_tp=1,
            max_pp=1,
        )
        super().__init__(table, Interpreter(VARIABLE, "abacus", beside=("beads", "absent")))

    def check(self, found: Installation) -> None:
        if not found.version("abacus").startswith("1."):
            raise EngineError("install abacus 1")


def test_an_installed_engine_has_its_table_and_its_version_first(monkeypatch, python):
    set_version(packages_of(python), "beads", "7")
    monkeypatch.setenv(VARIABLE, str(python))
    engine = Abacus()
    assert engine.name == "abacus-engine"
    assert engine.capabilities().unavailable is None
    assert engine.versions() == (("engine", "abacus-engine 1.2.3"), ("beads", "7"))


@pytest.mark.parametrize("version", [None, "2.0"], ids=["absent", "another-release"])
def test_an_engine_that_is_not_there_keeps_its_table_and_says_what_to_install(monkeypatch, python, version):
    """Plans name what could run on it; no profile is recorded with versions of what cannot be started."""
    if version is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        set_version(packages_of(python), "abacus", version)
        monkeypatch.setenv(VARIABLE, str(python))
    engine = Abacus()
    table = engine.capabilities()
    assert set(table.architectures.listed) == {"LlamaForCausalLM"}
    assert "install" in (table.unavailable or "")
    assert engine.versions() == ()
    with pytest.raises(EngineError, match="install"):
        engine.installed()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_python_that_does_not_answer_is_not_one_without_the_engine(monkeypatch, tmp_path, hangs):
    if hangs:
        script(tmp_path / "python", "exec sleep 60")
    monkeypatch.setattr(external, "_ANSWER_S", 0.2)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "python"))
    with pytest.raises(SilentEngineError, match=rf"abacus 1\.2\.3 .* {VARIABLE}={tmp_path}/python "):
        Abacus().pinned("1.2.3")
    assert f"{VARIABLE}={tmp_path}/python" in (Abacus().capabilities().unavailable or "")
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(InfeasibleError):
        Abacus().pinned("1.2.3")
