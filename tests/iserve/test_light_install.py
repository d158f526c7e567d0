"""Planning without the optional dependencies: the commands work, and a missing extra is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from fingerprint import extras
from fingerprint.errors import InfeasibleError
from fingerprint.extras import _PACKAGES
from iserve.controller.engine_selection import deployable_engine
from tests.golden_words import Golden
from tests.iserve.command_line import MODELS
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]

# Runs each command of the JSON list on standard input in a process where the extras cannot be imported.
_PROGRAM = """
import contextlib, io, json, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
from iserve.cli import main

def run(command):
    out, err, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["iserve", *command]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException as error:
            code = repr(error)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}

answers = {name: run(command) for name, command in json.load(sys.stdin).items()}
import iserve.controller.__main__, iserve.gateway.__main__, daemon.__main__
from iserve.controller.app import create_app
from iserve.controller.service import Controller
from iserve.settings import load_settings
from iserve.state.store import Store
settings = load_settings()
app = create_app(Controller(settings, Store.open(settings.state)), "token")
answers["routes"] = sorted(app.openapi()["paths"])
answers["loaded"] = sorted(name for name in BLOCKED if name in sys.modules)
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of the commands, by name, of a process in which no extra is installed."""
    folder = tmp_path_factory.mktemp("light")
    other = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
    for name, config in (MODELS | {"gpt2": other}).items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    on_gpus = (str(folder / "Llama-2-7b"), "--gpus", "a6000:2")
    cluster = ("--gpus", "a6000:2", "--models", f"a={folder / 'Llama-2-7b'}", "--limit", "50", "--cap-lengths")
    commands: Mapping[str, tuple[str, ...]] = {
        "plan": ("plan", *on_gpus, "--json"),
        "on-torch": ("plan", *on_gpus, "--engine", "torch", "--json"),
        "ilp": ("plan", *on_gpus, "--policy", "ilp"),
        "simulate-ilp": ("simulate", "no-such-trace", *cluster, "--policy", "ilp"),
        "other-family": ("plan", str(folder / "gpt2"), "--gpus", "a6000:2"),
        "estimate": ("estimate", str(folder / "falcon-7b"), "--gpu", "h200", "--json"),
        "simulate": ("simulate", "synthetic:azure-conv", *cluster),
        "replay": ("replay", "--help"),
        "report": ("report", *on_gpus, "-o", str(folder / "page.html")),
        "deploy-help": ("deploy", "--help"),
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("ISERVE_")}
    blocked = {package for packages in _PACKAGES.values() for package in packages}
    done = subprocess.run(
        [sys.executable, "-c", f"BLOCKED = {sorted(blocked)!r}\n{_PROGRAM}"],
        input=json.dumps(commands),
        env=environment | {"ISERVE_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plan", "estimate", "simulate", "replay", "report", "deploy-help"])
def test_works_without_the_extras(answers: dict[str, Any], name: str) -> None:
    assert answers[name]["code"] == 0, answers[name]
    assert answers[name]["out"]


def test_controller_gateway_and_daemon_load_without_the_extras(answers: dict[str, Any]) -> None:
    assert answers["loaded"] == []
    assert "/api/v1/plans" in answers["routes"]


@pytest.mark.parametrize(
    ("name", "extra", "asked"),
    [
        ("ilp", "exact", "placement policy ilp"),
        ("simulate-ilp", "exact", "placement policy ilp"),  # before the trace is read
        ("other-family", "torch", "'gpt2'"),
    ],
)
def test_a_missing_extra_is_one_line_that_says_what_to_install(
    answers: dict[str, Any], name: str, extra: str, asked: str, golden: Golden
) -> None:
    answer = answers[name]
    assert (answer["code"], answer["out"], answer["err"].count("\n")) == (1, "", 1)
    assert answer["err"].endswith(f"{sys.executable} -m pip install 'iserve[{extra}]'\n")
    assert asked in answer["err"]
    golden("cli", answer["err"])


def test_the_embedded_engine_can_be_planned_for_and_says_what_to_install(
    answers: dict[str, Any], golden: Golden
) -> None:
    document = json.loads(answers["on-torch"]["out"])
    assert document["chosen"] == 0
    (condition,) = document["candidates"][0]["conditions"]
    golden("cli", condition)
    assert condition.endswith(f"{sys.executable} -m pip install 'iserve[torch]'")


def test_a_deployment_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, golden: Golden
) -> None:
    for variable in ("ISERVE_VLLM_PYTHON", "ISERVE_TENSORRT_LLM_PYTHON"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.setattr(extras, "_is_installed", lambda package: package != "transformers")
    with golden.raises("cli", InfeasibleError):
        deployable_engine("torch")
    with golden.raises("cli", InfeasibleError):
        deployable_engine("auto")


def test_the_packages_of_each_extra_are_those_that_pyproject_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {
        extra: {requirement.partition(">")[0] for requirement in project["optional-dependencies"][extra]}
        for extra in _PACKAGES
    }
    assert declared == {extra: set(packages) for extra, packages in _PACKAGES.items()}


def test_planning_takes_less_than_500_mb() -> None:
    """All that iServe without extras brings along, by the files that pip recorded; .pyc files add 40%."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting, brought = list(project["dependencies"]), set[str]()
    while waiting:
        requirement = Requirement(waiting.pop())
        name = canonicalize_name(requirement.name)
        if name not in brought and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            brought.add(name)
            waiting += metadata.requires(name) or []
    sizes = {
        name: sum(file.size or 0 for file in metadata.files(name) or () if file.suffix != ".pyc")
        for name in brought
    }
    assert not brought & {package for packages in _PACKAGES.values() for package in packages}
    assert 1.4 * sum(sizes.values()) < 500e6, sizes
