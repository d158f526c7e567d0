"""LoRA of the PyTorch backend: options, the cache's size, ``lora_request`` and what it makes of an answer.

Without ``lora_config`` a request's adapter is left out, and nothing says so. What was read with a number stays.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from pathlib import Path

from .refusal import RefusedError

_DEFAULTS = {"lora_dir": [], "max_lora_rank": 64, "lora_target_modules": [], "max_loras": None}
_MODULES = {
    "attn_q": "q_proj",
    "attn_k": "k_proj",
    "attn_v": "v_proj",
    "attn_dense": "o_proj",
    "mlp_h_to_4h": "gate_proj",
    "mlp_4h_to_h": "down_proj",
    "mlp_gate": "up_proj",
}
_MAX_ADAPTER_SIZE = 64  # of peft_cache_config, whatever the rank
_FIELDS = {"lora_name": str, "lora_int_id": int, "lora_path": str, "lora_ckpt_source": str}


class BadAdapterError(Exception):
    """A ``lora_request`` that its fields' checks refuse."""


class Adapters:
    """Contents by number. The first content of a number is the one that it has."""

    def __init__(self, options: dict[str, object], config: dict[str, int]) -> None:
        given = options["lora_config"]
        self.is_on = given is not None
        self.read: dict[int, str] = {}
        if not isinstance(given, dict):
            return
        lora = _DEFAULTS | given
        self._max_rank: int = lora["max_lora_rank"]
        if not lora["lora_dir"] and not lora["lora_target_modules"]:
            lora["lora_target_modules"] = list(_MODULES)
        if unknown := sorted(set(lora["lora_target_modules"]) - _MODULES.keys()):
            raise RefusedError(f"KeyError: {unknown[0]!r}")
        if options["cuda_graph_config"] is not None:
            raise RefusedError("the stand-in has no CUDA graphs with adapters, of which 1.2 was not read")
        self._targets = {_MODULES[name] for name in lora["lora_target_modules"]}
        peft = options["peft_cache_config"] or {}
        assert isinstance(peft, dict)
        _check_room(lora, peft.get("max_adapter_size", _MAX_ADAPTER_SIZE), config, options)

    def content(self, asked: object) -> str:
        """Return what the answer depends on: empty for the base, and for every adapter where LoRA is off."""
        if asked is None:
            return ""
        path, number = _checked(asked)
        if not self.is_on:
            return ""
        if number not in self.read:
            self.read[number] = ""  # a reading that fails leaves a part, which is not read again
            self.read[number] = self._read(Path(path))
        return self.read[number]

    def _read(self, folder: Path) -> str:
        try:
            config = json.loads((folder / "adapter_config.json").read_text())
            weights = (folder / "adapter_model.safetensors").read_bytes()
        except (OSError, ValueError) as error:  # not caught there
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            print("RuntimeError: Executor worker returned error", file=sys.stderr, flush=True)
            os._exit(1)
        if config["r"] > self._max_rank:
            raise BadAdapterError(f"rank {config['r']} is above max_lora_rank {self._max_rank}")
        left_out = set(config["target_modules"]) - self._targets
        if left_out:
            print(f"LoRA module {left_out} not in target modules, skipping.", file=sys.stderr, flush=True)
        return hashlib.sha256(weights).hexdigest()[:8]


def _checked(asked: object) -> tuple[str, int]:
    """Return folder and number of a ``lora_request``."""
    if not isinstance(asked, dict):
        raise BadAdapterError("body.lora_request: Input should be a valid dictionary")
    for key in asked.keys() - _FIELDS.keys():
        raise BadAdapterError(f"body.lora_request.{key}: Unexpected keyword argument")
    for key in ("lora_name", "lora_int_id"):
        if key not in asked:
            raise BadAdapterError(f"body.lora_request.{key}: Field required")
    for key, value in asked.items():
        if type(value) is not _FIELDS[key]:
            raise BadAdapterError(f"body.lora_request.{key}: Input should be a valid {_FIELDS[key].__name__}")
    path = asked.get("lora_path", "")
    if not os.path.exists(path):
        raise BadAdapterError(f"lora_path ({path}) does not exist.")
    if asked.get("lora_ckpt_source", "hf") not in ("hf", "nemo"):
        raise BadAdapterError("lora_ckpt_source must be 'hf' or 'nemo'")
    return path, asked["lora_int_id"]


def _check_room(lora: dict, largest: int, config: dict[str, int], options: dict[str, object]) -> None:
    """Refuse a device or host cache that does not hold one adapter of the largest size."""
    tp = int(options["tensor_parallel_size"])  # type: ignore[call-overload]
    layers, hidden, inner = config["num_hidden_layers"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head_dim
    widths = {"attn_q": heads * head_dim, "attn_k": kv, "attn_v": kv, "attn_dense": heads * head_dim}
    sizes = [hidden + widths.get(name, inner) // tp for name in lora["lora_target_modules"]]
    width = min(sizes)
    needed = math.ceil(largest * sum(sizes) * layers / width)
    for kind, number in (("host", lora.get("max_cpu_loras")), ("device", lora["max_loras"])):
        room = (number or math.inf) * lora["max_lora_rank"] * layers * len(sizes) * math.ceil(max(sizes) / width)
        if room < needed:
            raise RefusedError(
                f"RuntimeError: [TensorRT-LLM][ERROR] Assertion failed: Not enough space allocated to {kind} LoRA "
                f"cache to hold 1 max sized LoRA {room} < {needed}"
            )
