"""Command of a TensorRT-LLM worker, and what is refused before it is started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml

from daemon.engines.registry import get_engine
from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.errors import CheckpointError, ConfigError, EngineError
from tests.daemon.engines.tensorrt_environment import (
    VARIABLE,
    config,
    devices,
    make_checkpoint,
    make_spec,
    make_tensorrt_llm,
)
from tests.golden_words import Golden


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tensorrt_llm(tmp_path_factory.mktemp("tensorrt-llm"))


@pytest.fixture
def engine(environment: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRtLlmEngine:
    monkeypatch.setenv(VARIABLE, str(environment))
    return TensorRtLlmEngine()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "Tiny-Llama")


def test_it_is_started_from_the_environment_that_the_setting_names(engine, environment, checkpoint, tmp_path):
    command = engine.command(make_spec(checkpoint, port=8123), tmp_path, devices())
    proxy = command.argv[command.argv.index("--") + 1 :]
    assert proxy[:4] == (sys.executable, "-m", "daemon.engines.tensorrt_llm.proxy", str(tmp_path / "spec.json"))
    assert proxy[4:] == (
        str(environment),
        str(environment.parent / "trtllm-serve"),
        "serve",
        "{model}",
        *("--backend", "pytorch"),
        *("--extra_llm_api_options", str(tmp_path / "llm_options.yaml")),
    )
    env = dict(command.env)
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["PATH"].split(os.pathsep)[0] == str(environment.parent)
    ((name, text),) = command.files
    assert name == "llm_options.yaml"
    assert yaml.safe_load(text)["max_batch_size"] == 8


def test_versions_are_those_of_that_environment(engine):
    assert engine.versions() == (
        ("engine", "tensorrt-llm 1.2.1"),
        ("torch", "2.9.1"),
        ("transformers", "4.57.3"),
    )
    assert engine.capabilities().deployable
    assert not engine.capabilities().verified


def test_without_the_setting_it_is_planned_for_and_not_started(monkeypatch, checkpoint, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    engine = get_engine("tensorrt-llm")
    assert engine.versions() == ()
    assert VARIABLE in engine.capabilities().unavailable
    with pytest.raises(EngineError, match=f"not installed: set {VARIABLE}"):
        engine.command(make_spec(checkpoint), tmp_path, devices())


@pytest.mark.parametrize("version", ["1.1.0", "1.2.0rc2", "1.3.0", "0.20.0", "1.20.0"])
def test_a_release_that_it_was_not_written_for_is_refused(
    tmp_path, monkeypatch, checkpoint, version, golden: Golden
):
    monkeypatch.setenv(VARIABLE, str(make_tensorrt_llm(tmp_path / "env", version)))
    with golden.raises("engines", EngineError):
        TensorRtLlmEngine().command(make_spec(checkpoint), tmp_path, devices())


def test_an_environment_without_its_program_is_refused(tmp_path, monkeypatch, checkpoint):
    python = make_tensorrt_llm(tmp_path / "env")
    (python.parent / "trtllm-serve").unlink()
    monkeypatch.setenv(VARIABLE, str(python))
    with pytest.raises(EngineError, match="no trtllm-serve beside"):
        TensorRtLlmEngine().command(make_spec(checkpoint), tmp_path, devices())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"config": config(weights=WeightFormat.GPTQ4)}, id="gptq"),
        pytest.param({"config": config(kv=KvFormat.INT8)}, id="int8-kv"),
        pytest.param({"config": config(pruning=Pruning.WANDA_2_4)}, id="2:4"),
        pytest.param({"config": config(kv=KvFormat.FP8)}, id="fp8-kv-on-ampere"),
        pytest.param({"profiling": True, "layers": (3, 3)}, id="profiling-pp"),
    ],
)
def test_what_it_cannot_keep_is_refused_before_a_start(engine, checkpoint, tmp_path, changes, golden: Golden):
    with golden.raises("engines", ConfigError):
        engine.command(make_spec(checkpoint, **changes), tmp_path, devices())


@pytest.mark.parametrize(
    ("family", "architecture"), [("falcon", "FalconForCausalLM"), ("gptj", "GPTJForCausalLM")]
)
def test_an_architecture_of_the_older_flow_is_refused_before_a_start(
    engine, tmp_path, family, architecture, golden: Golden
):
    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 6, "n_positions": 1024, "rotary_dim": 16}
    folder = make_checkpoint(tmp_path / family, model_type=family, architectures=[architecture], **sizes)
    with golden.raises("engines", ConfigError):
        engine.command(make_spec(folder), tmp_path, devices())


def test_a_16_bit_checkpoint_is_not_served_as_fp8(engine, checkpoint, tmp_path):
    with pytest.raises(CheckpointError, match=r"weights=fp8.*stored as 16bit"):
        engine.command(
            make_spec(checkpoint, config=config(weights=WeightFormat.FP8)), tmp_path, devices("NVIDIA L40S")
        )
