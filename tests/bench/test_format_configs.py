"""Configs of formats: what iServe reads of each, as it is and cut, and that vLLM's table lets each be run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.vllm.capabilities import TABLE
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import ConfigError
from fingerprint.families import load_spec, read_config
from fingerprint.gpus import gpu_spec
from fingerprint.truncate import generate_shape
from tests.bench.format_configs import FORMATS, formats_of, main, model_folder, write_format

PUBLIC = Path(__file__).parents[1] / "fingerprint/recorded/public_models.json"
MODELS = {"Llama-3.1-8B": "meta-llama/Llama-3.1-8B", "gpt-oss-20b": "openai/gpt-oss-20b"}
BITS = {"fp8-dynamic": 8, "w8a8": 8, "w4a16": 4, "gptq": 4, "awq": 4, "mxfp4": 4}


def config_of(name: str) -> dict[str, Any]:
    return dict(json.loads(PUBLIC.read_text())["models"][MODELS[name]]["config"])


CASES = [(model, name) for model in MODELS for name in formats_of(config_of(model))]


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / request.param
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(request.param)))
    return folder


def test_both_models_together_have_every_format() -> None:
    assert {name for _, name in CASES} == set(FORMATS)


@pytest.mark.parametrize(("model", "name"), CASES, indirect=["model"])
def test_a_folder_is_the_model_in_that_format(model: Path, name: str, tmp_path: Path) -> None:
    found, whole = load_spec(write_format(model, name, tmp_path / "out")), load_spec(model)
    assert replace(found, stored=None) == whole
    assert (found.stored and found.stored.bits) == BITS.get(name)
    weights = FORMATS[name].weights
    assert (weights is WeightFormat.STORED) == (found.stored is not None)
    asked = DeploymentConfig(weights=weights, engine="vllm")
    assert TABLE.unprepared().refusal(found, asked, gpu_spec("h200")) is None


@pytest.mark.parametrize(("model", "name"), CASES, indirect=["model"])
def test_its_cuts_are_stored_alike(model: Path, name: str, tmp_path: Path) -> None:
    folder = write_format(model, name, tmp_path / "out")
    generate_shape(folder, tmp_path / "cut", 2)
    cut = read_config(tmp_path / "cut")
    assert cut["num_hidden_layers"] == 2
    assert cut.get("quantization_config") == FORMATS[name].quantization
    assert load_spec(tmp_path / "cut").stored == load_spec(folder).stored


@pytest.mark.parametrize("model", ["Llama-3.1-8B"], indirect=True)
def test_what_cannot_be_made_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Llama-3.1-8B runs in 16bit, fp8, .*, got mxfp4"):
        write_format(model, "mxfp4", tmp_path)
    with pytest.raises(ConfigError, match="quantized already"):
        write_format(write_format(model, "gptq", tmp_path), "awq", tmp_path)


@pytest.mark.parametrize("model", ["Llama-3.1-8B"], indirect=True)
def test_the_command_names_every_folder(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "out"), str(model)])
    told = [Path(line).name for line in capsys.readouterr().out.splitlines()]
    assert told == [f"Llama-3.1-8B-{name}" for name in FORMATS if name != "mxfp4"]


def test_a_recorded_model_is_known_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "out"), MODELS["gpt-oss-20b"]])
    assert capsys.readouterr().out.split() == [
        str(tmp_path / f"out/gpt-oss-20b-{name}") for name in ("16bit", "mxfp4")
    ]
    with pytest.raises(ConfigError, match=r"neither a folder with a config\.json nor"):
        model_folder("someone/Nothing-1B", tmp_path)
