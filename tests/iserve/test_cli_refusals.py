"""Refusals of the command line: one line on stderr, exit code 1 or 2, and nothing left behind."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden_words import Golden
from tests.iserve.command_line import MODELS, Done, iserve, model

__all__ = ["iserve", "model"]  # fixtures


@pytest.fixture(scope="module")
def running_home(shared_home: Any) -> Any:
    shared_home.run("up")
    return shared_home


_PLAN = ("plan", "{}", "--gpus", "a6000:8")
_ESTIMATE = ("estimate", "{}", "--gpu", "h200", "--config")


@pytest.mark.parametrize(
    "arguments",
    [
        (*_PLAN, "--intent", "cheapest"),
        (*_PLAN, "--cost", "euros"),
        (*_PLAN, "--quality", "best"),
        (*_PLAN, "--policy", "best"),
        (*_PLAN, "--slo", "ttft"),
        (*_PLAN, "--slo", "ttft=fast"),
        (*_PLAN, "--slo", "ttft=0"),
        (*_PLAN, "--slo", "ttft=nan"),
        (*_PLAN, "--slo", "ttft=-1"),
        (*_PLAN, "--slo", "ttft=1,ttft=2"),
        (*_PLAN, "--slo", "p99=1"),
        (*_PLAN, "--slo", ""),
        (*_PLAN, "--percentile", "0"),
        (*_PLAN, "--percentile", "100"),
        (*_PLAN, "--percentile", "nan"),
        (*_PLAN, "--batch", "0"),
        (*_PLAN, "--batch", "-1"),
        (*_PLAN, "--batch", "1.5"),
        (*_PLAN, "--input-tokens", "0"),
        (*_PLAN, "--output-tokens", "0"),
        (*_PLAN, "--rate", "0"),
        (*_PLAN, "--rate", "nan"),
        (*_PLAN, "--rate", "inf"),
        (*_PLAN, "--budget", "-1"),
        (*_PLAN, "--budget", "nan"),
        (*_PLAN, "--intent", "latency-slo"),
        (*_PLAN, "--intent", "cost-slo"),
        (*_PLAN, "--engine", "no-such"),
        (*_PLAN, "--no-such-option"),
        ("plan", "{}", "--gpus", "a6000:0"),
        ("plan", "{}", "--gpus", "a6000:-1"),
        ("plan", "{}", "--gpus", "a6000:1000000000"),
        ("plan", "{}", "--gpus", "no-such:1"),
        ("plan", "{}", "--gpus", ""),
        ("plan",),
        (*_ESTIMATE, "tp=0"),
        (*_ESTIMATE, "tp=x"),
        (*_ESTIMATE, "tp"),
        (*_ESTIMATE, "tp=1,tp=2"),
        (*_ESTIMATE, "weights=3bit"),
        (*_ESTIMATE, "tp=1", "--engine", "no-such"),
        ("estimate", "{}", "--gpu", "no-such"),
        ("estimate", "{}"),
        ("plan", "", "--gpus", "a6000:8"),
        ("estimate", " ", "--gpu", "h200"),
        ("report", ""),
        ("profile", ""),
        ("deploy", ""),
        ("deploy", "--name", ""),
        ("deploy", "--name", "a b"),
        ("deploy", "--name", "x" * 64),
        ("deploy", "--slo", "p99=1"),
        ("deploy", "--intent", "cost-slo"),
        ("deploy", "--batch", "0"),
        ("deploy", "--engine", "no-such"),
        ("deploy", "--policy", "best"),
        ("deploy", "--policy", "look-ahead"),  # without a load
        ("deploy", "--replicas", "0"),
        ("deploy", "--replicas", "-1"),
        ("deploy", "--replicas", "65"),
        ("deploy", "--replicas", "1.5"),
        ("deploy", "--replicas", "2", "--export", "compose"),
        ("deploy", "--scale-to-zero", "0"),
        ("deploy", "--scale-to-zero", "nan"),
        ("deploy", "--reject-late"),
        ("profile", "--max-seconds", "0"),
        ("profile", "--max-seconds", "nan"),
        ("profile", "--engine", "no-such"),
        ("logs", "a", "--lines", "0"),
        ("chat", "a", "b", "--temperature", "-1"),
        ("keys", "create", "--scope", "root"),
        ("keys", "create", "--label", ""),
        ("keys", "create", "--label", "x" * 5000),
        ("no-such-command",),
    ],
    ids=" ".join,
)
def test_a_bad_option_value_is_a_usage_error(
    iserve: Callable[..., Done],
    model: Callable[[str], Path],
    tmp_path: Path,
    golden: Golden,
    arguments: tuple[str, ...],
) -> None:
    done = iserve(*(a.format(model("Llama-2-7b")) for a in arguments))
    assert (done.code, done.out) == (2, "")
    assert "Traceback" not in done.err
    golden("cli-usage-errors", done.err[done.err.index("Error:") :])
    assert not (tmp_path / "home").exists()  # nothing was started to find that out


def test_a_workload_beyond_the_models_context_is_refused(
    iserve: Callable[..., Done], model: Callable[[str], Path], golden: Golden
) -> None:
    work = ("--input-tokens", "4000", "--output-tokens", "97")
    golden("cli-errors", iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *work).line, "plan")
    golden("cli-errors", iserve("estimate", model("Llama-2-7b"), "--gpu", "h200", *work).line, "estimate")


def test_a_model_that_cannot_be_cut_so_is_refused(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    """71 heads divide by no tensor parallel degree but 1; 33 stages are more than the layers."""
    for name, config in (("falcon-7b", "tp=2"), ("Llama-2-7b", "pp=33")):
        done = iserve("estimate", model(name), "--gpu", "h200", "--config", config, "--json")
        if not done.out:
            assert done.line
            continue
        found = json.loads(done.out)
        assert (done.code, found["runnable"]) == (1, False)
        assert done.err == f"iserve: not runnable: {found['reason']}\n"


BAD_CONFIGS: dict[str, Any] = {
    "no-json": b"{",
    "not-utf8": b"\xff\xfe\x00",
    "a-list": b"[]",
    "deep": b"[" * 100_000,
    "huge": b" " * (64 << 20),
    "empty": b"",
    "no-model-type": {},
    "unknown-model": {"model_type": "no-such-model"},
    "encoder-decoder": {
        "model_type": "t5",
        "is_encoder_decoder": True,
        "architectures": ["T5ForConditionalGeneration"],
    },
    "encoder": {"model_type": "bert", "architectures": ["BertModel"]},
    "image-and-text-encoder": {"model_type": "clip", "architectures": ["CLIPModel"], "vision_config": {}},
    "image-encoder": {"model_type": "vit", "architectures": ["ViTModel"]},
    "image-classifier": {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
    "speech-encoder": {"model_type": "wav2vec2", "architectures": ["Wav2Vec2ForCTC"]},
    "speech-encoder-decoder": {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"]},
    "text-encoder-of-a-pair": {"model_type": "t5", "architectures": ["T5EncoderModel"]},
    "part-of-a-model": {"model_type": "clip_text_model", "architectures": ["CLIPTextModel"]},
    "depth-estimator": {"model_type": "depth_anything", "architectures": ["DepthAnythingForDepthEstimation"]},
    "no-head": {"model_type": "olmo2", "architectures": ["Olmo2Model"]},
    "negative": MODELS["Llama-2-7b"] | {"hidden_size": -4096},
    "zero": MODELS["Llama-2-7b"] | {"num_hidden_layers": 0},
    "absurd": MODELS["Llama-2-7b"] | {"num_hidden_layers": 10**12},
    "absurd-vocab": MODELS["Llama-2-7b"] | {"vocab_size": 10**30},
    "a-text": MODELS["Llama-2-7b"] | {"hidden_size": "4096"},
    "a-fraction": MODELS["Llama-2-7b"] | {"num_attention_heads": 31.5},
    "not-divisible": MODELS["Llama-2-7b"] | {"num_key_value_heads": 7},
    "true": MODELS["Llama-2-7b"] | {"num_hidden_layers": True},
    "code": {"model_type": "custom", "auto_map": {"AutoModelForCausalLM": "modeling.Evil"}},
}


@pytest.mark.parametrize("fault", BAD_CONFIGS)
def test_a_config_that_cannot_be_used_is_one_line(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden, fault: str
) -> None:
    content = BAD_CONFIGS[fault]
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    lines = {
        iserve("plan", folder, "--gpus", "a6000:8", "--json").line,
        iserve("estimate", folder, "--gpu", "h200").line,
    }
    (line,) = lines
    assert len(line) < 1000
    if fault not in ("deep", "not-utf8"):  # whose messages are Python's
        golden("cli-errors", line)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("name", ["no/such/folder", "no-such-model", "a\x00b", "x" * 5000, "~no-such-user/x", "-"])
def test_a_model_that_is_not_there_is_one_line(
    running_home: Any, iserve: Callable[..., Done], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert len(iserve("plan", "--gpus", "a6000:8", "--", name).line) < 1000
    assert len(iserve("report", "--gpus", "a6000:8", "--", name).line) < 1000
    for variable, value in running_home.environment.items():
        monkeypatch.setenv(variable, value)
    for command in ("plan", "deploy", "profile", "report"):
        assert len(iserve(command, "--", name).line) < 1000
    assert iserve("ps", "--json").document == []


def test_an_empty_folder_and_a_file_are_one_line(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden
) -> None:
    golden("cli-errors", iserve("plan", tmp_path, "--gpus", "a6000:8").line, "folder")
    file = tmp_path / "weights.bin"
    file.write_bytes(b"\x80\x04")
    golden("cli-errors", iserve("plan", file, "--gpus", "a6000:8").line, "file")


def _header(tensors: dict[str, Any]) -> bytes:
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


_ONE_TENSOR = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
BAD_WEIGHTS: dict[str, dict[str, bytes]] = {
    "none": {},
    "pickle": {"pytorch_model.bin": b"\x80\x04."},
    "truncated": {"model.safetensors": _header(_ONE_TENSOR) + b"\0" * 15},
    "header-cut": {"model.safetensors": _header(_ONE_TENSOR)[:20]},
    "empty": {"model.safetensors": b""},
    "absurd-header": {"model.safetensors": struct.pack("<Q", 2**62)},
    "lfs": {"model.safetensors": b"version https://git-lfs.github.com/spec/v1\n"},
    "index-names-missing": {"model.safetensors.index.json": b'{"weight_map": {"a": "model-00001.safetensors"}}'},
    "index-leads-out": {"model.safetensors.index.json": b'{"weight_map": {"a": "../../etc/passwd"}}'},
    "not-this-models": {"model.safetensors": _header(_ONE_TENSOR) + b"\0" * 16},
}


@pytest.mark.parametrize("fault", BAD_WEIGHTS)
def test_weights_that_cannot_be_served_are_one_line_and_leave_nothing(
    running_home: Any, iserve: Callable[..., Done], tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a running installation: refused on deploy, and on register where there is something to refuse."""
    for name, value in running_home.environment.items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "bad"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS["Llama-2-7b"]))
    for name, content in BAD_WEIGHTS[fault].items():
        (folder / name).write_bytes(content)
    if fault == "not-this-models":  # only cutting a fingerprint finds out, which reads the tensors that it needs
        assert iserve("profile", folder, "--json").line
    elif fault != "none":
        assert iserve("register", "bad", folder, "--json").line
    refused = iserve("deploy", folder, "--json", "--name", "bad").line
    assert {"none": "no weights", "pickle": "only pickle", "truncated": "truncated"}.get(fault, "") in refused
    assert iserve("ps", "--json").document == []
    assert [m["name"] for m in running_home.get("/api/v1/models")] == ["iserve-demo"]
    assert running_home.worker_pids() == {}
    assert not list(running_home.home.glob("fingerprints/*"))
