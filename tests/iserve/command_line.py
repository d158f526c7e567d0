"""The command run in the tests' own process, and models that are a config only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from iserve.cli import main

__all__ = ["MODELS", "Done", "iserve", "model"]

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
_FALCON = {
    "architectures": ["FalconForCausalLM"],
    "model_type": "falcon",
    "parallel_attn": True,
    "alibi": False,
    "bias": False,
    "vocab_size": 65024,
    "torch_dtype": "bfloat16",
}


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return _LLAMA | {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


MODELS: dict[str, dict[str, Any]] = {
    "Llama-2-7b": _llama(4096, 11008, 32, 32, 32),
    "Llama-2-13b": _llama(5120, 13824, 40, 40, 40),
    "Llama-2-70b": _llama(8192, 28672, 80, 64, 8),
    "falcon-7b": _FALCON
    | {
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "multi_query": True,
        "new_decoder_architecture": False,
    },
    "falcon-40b": _FALCON
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 60,
        "num_attention_heads": 128,
        "num_kv_heads": 8,
        "new_decoder_architecture": True,
    },
    "gpt-j-6b": {
        "architectures": ["GPTJForCausalLM"],
        "model_type": "gptj",
        "n_embd": 4096,
        "n_inner": None,
        "n_layer": 28,
        "n_head": 16,
        "n_positions": 2048,
        "rotary_dim": 64,
        "activation_function": "gelu_new",
        "vocab_size": 50400,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def line(self) -> str:
        """Line of a refusal: exit code 1, one line on stderr, nothing else."""
        assert (self.code, self.out) == (1, ""), (self.code, self.out, self.err)
        assert self.err.count("\n") == 1
        assert self.err.startswith("iserve: ")
        return self.err.strip()


@pytest.fixture
def iserve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """The command, in this process, with a home where nothing has ever run and nothing can be started."""
    for name in os.environ:
        if name.startswith("ISERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def start(*_: object) -> None:
        raise AssertionError("a controller would be started")

    monkeypatch.setattr("iserve.client.spawn_detached", start)

    def run(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["iserve", *map(str, arguments)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return Done(code, out, err)

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder with only the config of one of ``MODELS``."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(MODELS[name]))
        return folder

    return make
