"""`iserve engines`: installing into an environment of its own, the list, and removing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from daemon.engines.environments import environment_of
from daemon.engines.registry import get_engine
from daemon.procfs import start_time_ticks
from fingerprint.codec import to_json
from fingerprint.errors import EngineError
from iserve.engine_inventory import engine_documents
from iserve.state.store import Store
from tests.daemon.engines.standin import make_vllm, set_version
from tests.daemon.engines.vllm_worker_spec import worker
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.forked_programs import COMMAND
from tests.waiting import wait_until

__all__ = ["iserve"]  # a fixture

VERSION = "0.24.0"


@pytest.fixture
def home(iserve: Callable[..., Done], tmp_path: Path) -> Path:
    """The home of ``iserve``, where nothing is installed."""
    return tmp_path / "home"


def made(home: Path, version: str = VERSION, *, complete: bool = True) -> Path:
    """Leave what an installation leaves, and return its folder."""
    environment = environment_of(home, "vllm", version)
    make_vllm(environment.folder, version)
    if complete:
        environment.marker.write_text("{}")
    return environment.folder


def make_wheel(folder: Path, version: str, needs: str = "") -> None:
    """Write a wheel of a distribution ``vllm`` that holds nothing but its name, version and what it ``needs``."""
    info = f"vllm-{version}.dist-info"
    with zipfile.ZipFile(folder / f"vllm-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("vllm/__init__.py", "")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n{needs}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


_UV = """\
#!{python}
import os, sys, venv
from pathlib import Path
folder = Path({folder!r})
arguments = sys.argv[1:]
with open(folder / "calls", "a") as calls:
    print(*arguments, file=calls)
if arguments[0] == "venv":
    venv.create(arguments[-1])
    sys.exit()
if (folder / "hold").exists():
    (folder / "pid.new").write_text(str(os.getpid()))
    (folder / "pid.new").rename(folder / "pid")
    (folder / "hold").read_text()  # a pipe that nobody writes to
(packages,) = Path(arguments[-2]).parents[1].glob("lib/python*/site-packages")
name, _, version = arguments[-1].partition("==")
info = packages / f"{{name}}-{{version}}.dist-info"
info.mkdir()
(info / "METADATA").write_text(f"Name: {{name}}\\nVersion: {{version}}\\n")
print(f"Installed {{name}} {{version}}")
"""


@pytest.fixture
def uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for uv on the path, and its folder: ``calls`` is what it was asked for. While a pipe ``hold`` is
    there it installs without end."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "uv").write_text(_UV.format(python=sys.executable, folder=str(folder)))
    (folder / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.mark.slow
def test_pip_installs_it_and_every_process_finds_it_at_once(
    iserve: Callable[..., Done], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """A real pip with a folder of wheels for an index; nothing is asked over the network."""
    make_wheel(tmp_path, VERSION)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no uv
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "ours"))  # is not the engine's
    with golden.raises("cli", EngineError):
        get_engine("vllm").interpreter.find()
    done = iserve("engines", "install", "vllm", "--version", VERSION)
    folder = environment_of(home, "vllm", VERSION).folder
    assert done.code == 0
    golden("cli", done.out)
    assert f"Successfully installed vllm-{VERSION}" in done.err
    found = get_engine("vllm").interpreter.find()
    assert (found.python, found.version("vllm")) == (str(folder / "bin" / "python"), VERSION)
    assert [path.stat().st_mode & 0o777 for path in (home, folder.parent)] == [0o700, 0o700]
    again = iserve("engines", "install", "vllm", "--version", VERSION)
    golden("cli", again.line)
    refused = iserve("engines", "install", "vllm", "--version", "9.9")
    assert refused.code == 1
    (line,) = [text for text in refused.err.splitlines() if text.startswith("iserve: ")]
    golden("cli", line)
    assert not environment_of(home, "vllm", "9.9.0").folder.exists()


def test_a_dependency_that_the_index_lacks_is_named_with_what_to_do(
    iserve: Callable[..., Done], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    make_wheel(tmp_path, VERSION, needs="Requires-Dist: certifi>=9999\n")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # no uv
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    done = iserve("engines", "install", "vllm", "--version", VERSION)
    (line,) = [text for text in done.err.splitlines() if text.startswith("iserve: ")]
    golden("cli", line)


def test_what_uv_says_is_quoted_with_its_cause(
    iserve: Callable[..., Done], home: Path, uv: Path, golden: Golden
) -> None:
    program = (uv / "uv").read_text()
    (uv / "uv").write_text(
        program + "print('error: No solution found')\nprint('  cause: there is no vllm==9.9')\nsys.exit(1)\n"
    )
    done = iserve("engines", "install", "vllm", "--version", "9.9")
    assert done.code == 1
    golden("cli", done.err)
    assert json.loads(iserve("engines", "--json").out)[1]["version"] is None


@pytest.mark.process
def test_killed_in_the_middle_nothing_counts_as_installed_and_the_same_command_goes_on(
    iserve: Callable[..., Done], home: Path, uv: Path, golden: Golden
) -> None:
    """The command is killed with -9 while uv fills the environment: uv ends too, and all is begun anew."""
    os.mkfifo(uv / "hold")
    environment = environment_of(home, "vllm", VERSION)
    install = ("engines", "install", "vllm", "--version", VERSION)
    process = subprocess.Popen([COMMAND, *install], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until((uv / "pid").exists, "uv installs")
        golden("cli", iserve(*install).line)
        golden("cli", iserve("engines", "rm", "vllm", VERSION).line)
    finally:
        process.kill()
        process.wait()
    pid = int((uv / "pid").read_text())
    wait_until(lambda: start_time_ticks(pid) is None, "uv has ended with it")
    set_version(next(environment.folder.glob("lib/python*/site-packages")), "vllm", VERSION)  # nearly done
    with golden.raises("cli", EngineError):
        get_engine("vllm").interpreter.find()
    (listed,) = [row for row in json.loads(iserve("engines", "--json").out) if row["version"] == VERSION]
    golden("cli", listed["problem"])
    assert not listed["is_used"]
    (uv / "hold").unlink()
    (uv / "calls").unlink()
    done = iserve(*install)
    assert done.code == 0
    golden("cli", done.out)
    golden("cli", done.err)
    assert (uv / "calls").read_text().splitlines() == [
        f"venv --python {sys.executable} {environment.folder}",
        f"pip install --python {environment.python} vllm=={VERSION}",
    ]
    assert get_engine("vllm").interpreter.find().python == str(environment.python)


def test_the_list_tells_version_python_source_and_verification(
    iserve: Callable[..., Done], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    newest, older = made(home, "0.24.0"), made(home, "0.23.1")
    other = make_vllm(tmp_path / "other", "0.19.0")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(other))
    rows = [row for row in json.loads(iserve("engines", "--json").out) if row["engine"] == "vllm"]
    assert [(row["version"], row["python"], row["source"], row["is_used"]) for row in rows] == [
        ("0.19.0", str(other), "setting", True),
        ("0.24.0", str(newest / "bin" / "python"), "environment", False),
        ("0.23.1", str(older / "bin" / "python"), "environment", False),
    ]
    assert [row["verified"] for row in rows][:2] == ["unknown", "run"]
    text = iserve("engines").out
    golden("cli", text)


def test_the_list_has_what_answers_and_names_what_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.delenv("ISERVE_VLLM_PYTHON", raising=False)
    for version in ("0.24.0", "0.24.1"):
        environment = environment_of(tmp_path, "vllm", version)
        make_vllm(environment.folder, version)
        environment.marker.write_text("{}")
    environment_of(tmp_path, "vllm", "0.24.0").python.unlink()  # its disk is not mounted
    listed = [document for document in engine_documents(tmp_path) if document.engine == "vllm"]
    assert {document.version: document.is_used for document in listed} == {"0.24.1": True, None: False}
    (reason,) = (document.problem for document in listed if document.version is None)
    assert "0.24.0 cannot be run" in (reason or "")


def test_removing_is_refused_while_a_deployment_uses_it(
    iserve: Callable[..., Done], home: Path, golden: Golden
) -> None:
    older, newest = made(home, "0.23.1"), made(home, "0.24.0")
    store = Store.open(home / "state.db")
    row = store.add_deployment("chat", b"{}")
    store.update_deployment(row.id, phase="scaled-to-zero", workers=to_json([worker(home)]))
    refused = iserve("engines", "rm", "vllm", "0.24.0").line
    golden("cli", refused)
    store.update_deployment(row.id, workers=to_json([replace(worker(home), engine_version="0.23.1")]))
    golden("cli", iserve("engines", "rm", "vllm", "0.23.1").line)
    store.update_deployment(row.id, workers=to_json([worker(home)]))
    with running(older / "bin" / "python"):  # what it was started with before the newer one
        golden("cli", iserve("engines", "rm", "vllm", "0.23.1").line)
    golden("cli", iserve("engines", "rm", "vllm", "0.23.1").out)
    store.update_deployment(row.id, desired="removed")
    store.close()
    assert iserve("engines", "rm", "vllm", "0.24").code == 0
    assert not older.exists()
    assert not newest.exists()
    golden("cli", iserve("engines", "rm", "vllm", "0.24.0").line)


@contextmanager
def running(python: Path) -> Iterator[None]:
    """A process of an environment, for as long as the block runs."""
    with subprocess.Popen([python, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.communicate(b"\n")


def test_an_interrupted_removal_is_unfinished_and_can_be_ended(iserve: Callable[..., Done], home: Path) -> None:
    folder = made(home, complete=False)
    assert iserve("engines", "rm", "vllm", VERSION).code == 0
    assert not folder.exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("vllm", "--version", "latest"),
        ("torch",),
        ("tensorrt-llm",),
        ("nope",),
    ],
    ids=repr,
)
def test_what_cannot_be_installed_so_is_a_usage_error(
    iserve: Callable[..., Done], arguments: tuple[str, ...], golden: Golden
) -> None:
    done = iserve("engines", "install", *arguments)
    assert done.code == 2
    golden("cli", done.err)
