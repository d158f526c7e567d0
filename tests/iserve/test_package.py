"""The wheel: all that the packages need is in it, nothing else is, and it works away from the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]


def run(*command: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={k: v for k, v in os.environ.items() if not k.startswith(("ISERVE_", "PYTHON"))} | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with what is installed, from this tree; no index is asked."""
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    (made,) = folder.glob("iserve-*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds iServe alone; what it depends on comes from the environment of the tests."""
    target = wheel.parent / "target"
    run("-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", target, wheel)
    return target


def test_every_file_of_the_packages_is_in_it_and_nothing_else(wheel: Path) -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    expected = {
        str(path.relative_to(ROOT))
        for package in packages["packages"]
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith("iserve-")}  # its own metadata
    assert names == expected


@pytest.mark.slow
def test_its_command_works_where_there_is_no_checkout(installed: Path, tmp_path: Path) -> None:
    """The report needs the GPU table, the demo model and the page's style; the state needs its migrations."""
    code = f"""
import sys
from pathlib import Path
import fingerprint, iserve
from iserve.cli import main
from iserve.demo import demo_delta_path, demo_model_path
from iserve.state.store import Store

for package in (fingerprint, iserve):
    assert Path(package.__file__).is_relative_to({str(installed)!r}), package.__file__
assert (demo_model_path() / "model.safetensors").stat().st_size > 1_000_000
assert (demo_delta_path("symbols") / "delta.json").is_file()
store = Store.open(Path("home/state.db"))
assert store.models() == ()
store.close()
sys.argv = ["iserve", "report", "iserve-demo", "--gpus", "h200:2", "-o", "page.html"]
main()
"""
    program = tmp_path / "program.py"
    program.write_text(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    told = run(program, PYTHONPATH=str(installed), ISERVE_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="1")
    assert told.startswith("page.html: iserve-demo on 2 x h200")
    page = (tmp_path / "page.html").read_text()
    assert "<style>" in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_it_brings_the_command_and_the_licence(installed: Path) -> None:
    assert "from iserve.cli import main" in (installed / "bin" / "iserve").read_text()
    assert list(installed.glob("iserve-*.dist-info/licenses/LICENSE"))
