"""Bases and full fine-tunes of a few layers on disk, with the demo model's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fingerprint.checkpoint import Checkpoint
from fingerprint.float_bytes import decode_floats, encode_floats
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from iserve.demo import demo_model_path

HIDDEN, INNER, VOCAB, LAYERS = 64, 160, 258, 2
Arrays = dict[str, npt.NDArray[np.float32]]
TEXTS = tuple(f"Q: {number} plus {7 * number % 50}\nA: {number + 7 * number % 50}." for number in range(40))


def tiny_config(**changes: object) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **changes,
    }


def tiny_tensors(seed: int = 0) -> Arrays:
    """Return random tensors of a Llama; norms are near 1."""
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (64, HIDDEN) for name in "qo"}
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (32, HIDDEN) for name in "kv"}
        shapes |= {f"{prefix}mlp.{name}_proj.weight": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{prefix}mlp.down_proj.weight": (HIDDEN, INNER)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    shapes |= {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    return {
        name: (random.standard_normal(shape) * 0.15 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }


def tuned(tensors: Mapping[str, npt.NDArray[np.float32]], seed: int = 1, size: float = 0.02) -> Arrays:
    """Return ``tensors``, each changed a little."""
    random = np.random.default_rng(seed)
    return {
        name: values + size * random.standard_normal(values.shape).astype(np.float32)
        for name, values in tensors.items()
    }


def write_model(
    folder: Path,
    tensors: Mapping[str, npt.NDArray[np.float32]],
    *,
    dtype: str = "BF16",
    dtypes: Mapping[str, str] | None = None,
    has_tokenizer: bool = True,
    **config: object,
) -> Path:
    """Write a checkpoint; ``dtypes`` are those of single tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(**config)))
    outputs = []
    for name, values in tensors.items():
        own = (dtypes or {}).get(name, dtype)
        raw = encode_floats(values, own) if own in ("F32", "F16", "BF16") else values.astype(np.int8).tobytes()
        outputs.append(OutputTensor(name, own, values.shape, len(raw), lambda raw=raw: (raw,)))  # type: ignore[misc]
    write_safetensors(folder / "model.safetensors", outputs)
    if has_tokenizer:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(demo_model_path() / file, folder / file)
    return folder


def read_values(folder: Path) -> Arrays:
    """Return all tensors of a checkpoint."""
    checkpoint = Checkpoint.open(folder)
    return {
        name: decode_floats(checkpoint.read(name), entry.dtype).reshape(entry.shape)
        for name, entry in checkpoint.tensors.items()
    }


def read_bytes(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def join_tokens(checkpoint: Path, word: str) -> None:
    """Have the tokenizer of ``checkpoint`` write ``word`` as one token, in place of bytes that texts do not have.

    Args:
        word: by ByteLevel's letters, where a space is "Ġ".
    """
    file = checkpoint / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    letters = sorted(token for token in vocabulary if len(token) == 1)  # the last are bytes of no ASCII text
    for end in range(2, len(word) + 1):
        vocabulary[word[:end]] = vocabulary.pop(letters.pop())
        merges.append([word[: end - 1], word[end - 1]])
    file.write_text(json.dumps(content))
