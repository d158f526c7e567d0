"""Code that a checkpoint brings is never run: not by reading, cutting, serving or asking for its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from daemon.engines.registry import capabilities_for
from fingerprint.errors import IserveError
from fingerprint.families import load_spec
from fingerprint.truncate import generate
from iserve.demo import demo_model_path
from iserve.model_source import resolve
from tests.bad_input.conftest import Api
from tests.golden_words import Golden

CLASSES = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoModelForCausalLM": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"],
}


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Made by the code, were it run."""
    return tmp_path / "the-code-was-run"


@pytest.fixture
def evil(tmp_path: Path, marker: Path) -> Path:
    """The bundled model with code for each of its parts."""
    folder = tmp_path / "evil-model"
    shutil.copytree(demo_model_path(), folder)
    code = f"open({str(marker)!r}, 'w').close()\nraise SystemExit('run')\n"
    for name in ("evil.py", "modeling_llama.py", "configuration_llama.py", "__init__.py", "sitecustomize.py"):
        (folder / name).write_text(code)
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"auto_map": CLASSES, "trust_remote_code": True}))
    return folder


def test_the_code_would_be_run_by_who_trusts_it(
    evil: Path, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other tests could not fail."""
    from transformers import AutoConfig, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    with pytest.raises(SystemExit):
        AutoConfig.from_pretrained(evil, trust_remote_code=True)
    assert marker.exists()


def test_reading_and_cutting_run_none_of_it_and_leave_it_behind(evil: Path, marker: Path, tmp_path: Path) -> None:
    assert load_spec(evil) == load_spec(demo_model_path())
    generate(evil, tmp_path / "cut", [0])
    left = {path.name for path in (tmp_path / "cut").iterdir()}
    assert not [name for name in left if name.endswith(".py")]
    assert "auto_map" not in json.loads((tmp_path / "cut" / "config.json").read_text())
    assert not marker.exists()


def test_the_embedded_engine_runs_none_of_it(evil: Path, marker: Path) -> None:
    import torch

    from daemon.torch_engine.api.tokenizer import load_text_codec
    from daemon.torch_engine.model.stage_model import read_source

    assert read_source(evil, torch.device("cpu"), None).spec == load_spec(demo_model_path())
    assert load_text_codec(evil) is not None
    assert not marker.exists()


def _known_by_its_code_alone(evil: Path) -> None:
    content = json.loads((evil / "config.json").read_text())
    (evil / "config.json").write_text(json.dumps(content | {"model_type": "evil", "architectures": ["Evil"]}))


def test_a_family_that_only_its_code_knows_is_described_and_run_with_permission_alone(
    evil: Path, marker: Path, golden: Golden
) -> None:
    _known_by_its_code_alone(evil)
    spec, known = resolve(str(evil)).spec, load_spec(demo_model_path())
    assert (spec.num_params, spec.kv_elements) == (known.num_params, known.kv_elements)
    permitted = []
    for table in capabilities_for("auto"):
        never = table.architecture_refusal(spec)
        assert "Evil" in str(never or table.code_refusal(spec, trusted=False)), table.engine
        permitted += [table.engine] * ((never or table.code_refusal(spec, trusted=True)) is None)
    assert permitted == ["vllm"]
    (evil / "model.safetensors").unlink()
    with golden.raises("cli-errors", IserveError):
        resolve(str(evil))
    assert not marker.exists()


def test_no_route_runs_it(api: Api, evil: Path, marker: Path) -> None:
    for path, body in (
        ("/api/v1/models", {"name": "evil", "directory": str(evil)}),
        ("/api/v1/plans", {"model": str(evil), "gpus": "a6000:1"}),
        ("/api/v1/plans/launch", {"model": str(evil), "gpus": "a6000:1"}),
    ):
        assert api.ask("POST", path, body)[0] == 201
    assert not marker.exists()
    assert api.ask("DELETE", "/api/v1/models/evil")[0] == 204


def test_no_route_starts_a_worker_that_would_need_it(api: Api, evil: Path, marker: Path) -> None:
    _known_by_its_code_alone(evil)
    on_vllm = {"model": str(evil), "gpus": "a6000:1", "engine": "vllm"}
    assert api.ask("POST", "/api/v1/plans", on_vllm)[0] == 201
    assert api.ask("POST", "/api/v1/plans/launch", on_vllm)[0] == 400
    for engine in ("torch", "auto"):
        asked = {"model": str(evil), "engine": engine, "trust_remote_code": engine == "torch"}
        assert api.ask("POST", "/api/v1/deployments", asked)[0] == 400
    assert not marker.exists()
