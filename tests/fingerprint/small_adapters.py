"""Small bases and PEFT adapters on disk, with values that a formula gives: the same on every machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fingerprint.float_bytes import encode_floats
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.safetensors_writer import OutputTensor, write_safetensors

HIDDEN, INNER, VOCAB, LAYERS, KV_WIDTH = 16, 24, 32, 2, 8
BASE_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
DTYPE_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "example/base",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "inference_mode": True,
}
IA3: dict[str, Any] = {
    "peft_type": "IA3",
    "task_type": "CAUSAL_LM",
    "target_modules": ["k_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
Tensors = dict[str, tuple[int, ...]]
Floats = npt.NDArray[np.float32]
_LAYER: Tensors = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (KV_WIDTH, HIDDEN),
    "self_attn.v_proj.weight": (KV_WIDTH, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}
SHAPES: Tensors = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    **{f"model.layers.{layer}.{name}": shape for layer in range(LAYERS) for name, shape in _LAYER.items()},
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
BIASED: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}  # fields of a base with biases
BIAS_SHAPES: Tensors = {
    f"model.layers.{layer}.{name.removesuffix('weight')}bias": shape[:1]
    for layer in range(LAYERS)
    for name, shape in _LAYER.items()
    if name.endswith("_proj.weight")
}
Q0, V1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def values(shape: tuple[int, ...], seed: int, scale: float = 0.5) -> npt.NDArray[np.float32]:
    """Return numbers between -``scale`` and ``scale`` that are exact in float32."""
    numbers = (np.arange(np.prod(shape), dtype=np.int64) * 7919 + seed * 10_473) % 2003 - 1001
    return (numbers.astype(np.float32) * np.float32(scale / 1024)).reshape(shape)


def write_tensors(file: Path, tensors: Mapping[str, npt.NDArray[np.float32]], dtype: str = "F32") -> None:
    outputs = []
    for name, array in tensors.items():
        raw = encode_floats(array, dtype)
        outputs.append(OutputTensor(name, dtype, array.shape, len(raw), lambda raw=raw: [raw]))
    write_safetensors(file, outputs)


def base_tensors(*, has_biases: bool = False, has_head: bool = True) -> dict[str, npt.NDArray[np.float32]]:
    shapes = SHAPES | (BIAS_SHAPES if has_biases else {})
    found = {name: values(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    if not has_head:
        del found["lm_head.weight"]
    return found


def write_base(folder: Path, dtype: str = "F32", files: int = 1, *, has_head: bool = True, **config: Any) -> Path:
    """Write a Llama of two layers in ``files`` safetensors files, with a tokenizer file that is not read."""
    folder.mkdir(parents=True)
    content = BASE_CONFIG | {"dtype": DTYPE_NAMES[dtype]} | config
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text("{}\n")
    tensors = base_tensors(has_biases=config.get("attention_bias", False), has_head=has_head)
    if files == 1:
        write_tensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        own = names[number::files]
        write_tensors(folder / file, {name: tensors[name] for name in own}, dtype)
        weight_map |= dict.fromkeys(own, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def module_names(suffixes: Iterable[str], layers: Iterable[int] = range(LAYERS)) -> list[str]:
    """Return the modules of ``layers`` whose names end in one of ``suffixes``."""
    wanted = tuple(suffixes)
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    names = (name.removesuffix(".weight") for name in SHAPES if name.startswith(prefixes))
    return [name for name in names if name.endswith(wanted)]


def factors(ranks: Mapping[str, int], seed: int = 1000) -> dict[str, npt.NDArray[np.float32]]:
    """Return A and B of each module, by the names that PEFT stores them under."""
    made = {}
    for number, (module, rank) in enumerate(ranks.items()):
        rows, columns = SHAPES[f"{module}.weight"]
        made[f"base_model.model.{module}.lora_A.weight"] = values((rank, columns), seed + 2 * number)
        made[f"base_model.model.{module}.lora_B.weight"] = values((rows, rank), seed + 2 * number + 1)
    return made


def write_adapter(
    folder: Path,
    tensors: Mapping[str, npt.NDArray[np.float32]] | None = None,
    dtype: str = "F32",
    **config: Any,
) -> Path:
    """Write an adapter; without ``tensors`` one of rank 4 on queries and values. A field of None is left out."""
    folder.mkdir(parents=True)
    content = {name: value for name, value in (LORA | config).items() if value is not None}
    (folder / CONFIG_FILE).write_text(json.dumps(content))
    ranks = dict.fromkeys(module_names(["q_proj", "v_proj"]), 4)
    write_tensors(folder / WEIGHTS_FILE, factors(ranks) if tensors is None else tensors, dtype)
    return folder


def token_rows(rows: Floats, module: str = "model.embed_tokens") -> dict[str, Floats]:
    """Return a plain LoRA with trained rows of embeddings."""
    return factors({Q0: 4}) | {f"base_model.model.{module}.token_adapter.trainable_tokens_delta": rows}


def ia3_vectors(*, ones: bool = False) -> dict[str, Floats]:
    """Return the vectors of an IA3 adapter of keys (outputs) and down projections (inputs)."""
    shapes = dict.fromkeys(module_names(["k_proj"]), (KV_WIDTH, 1)) | {
        name: (1, SHAPES[f"{name}.weight"][1]) for name in module_names(["down_proj"])
    }
    return {
        f"base_model.model.{name}.ia3_l": np.ones(shape, np.float32) if ones else values(shape, seed) + 1
        for seed, (name, shape) in enumerate(shapes.items())
    }


def write_ia3(
    folder: Path, tensors: dict[str, Floats] | None = None, *, ones: bool = False, **fields: Any
) -> Path:
    folder.mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(json.dumps(IA3 | fields))
    write_tensors(folder / WEIGHTS_FILE, ia3_vectors(ones=ones) if tensors is None else tensors)
    return folder
