"""Random models and deltas for ``delta_served``, written by blocks that repeat."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from fingerprint.tensor_hash import tensor_hash
from tests.bench.lora_adapters import checkpoint_shapes, matrices, write_adapter, write_checkpoint

# As in an engine's interpreter, where this folder is on PYTHONPATH.
VARIANTS = str(Path(__file__).parents[2] / "daemon/engines/vllm/variants")

__all__ = ["LLAMA_8B", "VARIANTS", "Files", "write_all", "write_delta", "write_merged"]

LLAMA_8B: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_BLOCK = (1 << 24) + 9973  # values, no multiple of a row
_SCALE = 0.004  # of codes -1.5 to 1.5, where weights have a deviation of 0.02
_EMBEDDINGS = ("model.embed_tokens.weight",)
FEW_LAYERS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Files:
    """Folders of a bench."""

    root: Path

    @property
    def shape(self) -> Path:
        """Whole model's config alone, for dummy weights."""
        return self.root / "shape"

    @property
    def small(self) -> Path:
        """Few layers with random weights."""
        return self.root / "small"

    @property
    def merged(self) -> Path:
        """Few layers with the first small delta in their weights."""
        return self.root / "small-merged"

    def delta(self, number: int, *, small: bool = False) -> Path:
        """Folder of delta ``number`` from 1 on."""
        return self.root / f"{'small-' if small else ''}delta-{number}"

    def adapter(self, number: int, *, small: bool = False) -> Path:
        """Folder of adapter ``number`` from 1 on, of rank 16."""
        return self.root / f"{'small-' if small else ''}adapter-{number}"


def write_all(files: Files, *, deltas: int, contents: int, parts: tuple[str, ...]) -> None:
    """Write what the parts need.

    Args:
        deltas: folders of deltas of the whole model.
        contents: of those that differ; folders share files, but each slot has codes of its own.
        parts: ``large`` (shape, deltas of its linears, adapters), ``small`` (few layers with all that slots take).
    """
    small = {**LLAMA_8B, "num_hidden_layers": FEW_LAYERS}
    if "large" in parts:
        _write_config(files.shape, LLAMA_8B)
        for number in range(1, deltas + 1):
            first = files.delta((number - 1) % contents + 1)
            if number <= contents:
                write_delta(first, LLAMA_8B, number, whole=False)
            else:
                _share(first, files.delta(number))
        for number in range(1, 3):
            write_adapter(files.adapter(number), LLAMA_8B, 16, seed=number)
    if "small" in parts:
        _write_config(files.small, small)
        write_checkpoint(files.small, small)
        for number in range(1, 5):
            write_delta(files.delta(number, small=True), small, number, whole=True)
        for number in range(1, 3):
            write_adapter(files.adapter(number, small=True), small, 16, seed=number, deviation=0.02)
        write_merged(files.small, files.delta(1, small=True), files.merged)


def write_delta(folder: Path, config: Mapping[str, Any], seed: int, *, whole: bool) -> None:
    """Write a random delta with codes of 2 bits.

    Args:
        folder: made here.
        config: of the base.
        seed: of its values.
        whole: whether it has norms, embeddings (4 bits) and the output layer too.
    """
    formats = _formats()
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**16, _BLOCK, dtype=np.uint16).tobytes()
    scales = _bfloat16(_SCALE * (0.5 + rng.random(_BLOCK, dtype=np.float32)))
    norms = _bfloat16(1 + 0.05 * rng.standard_normal(config["hidden_size"], dtype=np.float32))
    layered = tuple(f".{name}.weight" for name in matrices(config))
    tensors, packed, exact = [], [], []
    for name, shape in checkpoint_shapes(config).items():
        if not whole and not name.endswith(layered):
            continue
        if len(shape) == 1:
            tensors.append(OutputTensor(name, "BF16", shape, len(norms), lambda: [memoryview(norms)]))
            facts = {"name": name, "shape": list(shape), "dtype": "BF16", "file": _FILE}
            exact.append(facts | {"sha256": _hash(tensors[-1])})
            continue
        format_name = "int4" if name in _EMBEDDINGS else "int2"
        format_ = formats[format_name]
        skipped = int(rng.integers(1 << 20))
        tensors.append(_repeated(f"{name}.codes", "I16", format_.codes_shape(*shape), words, skipped))
        tensors.append(_repeated(f"{name}.scales", "BF16", format_.scales_shape(*shape), scales, skipped))
        facts = {"name": name, "shape": list(shape), "format": format_name, "file": _FILE}
        codes, of_scales = (_hash(one) for one in tensors[-2:])
        packed.append(facts | {"codes": codes, "scales": of_scales})
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / _FILE, tensors)
    (folder / "delta.json").write_text(json.dumps({"version": 1, "matrices": packed, "exact": exact}))


def write_merged(base: Path, delta: Path, out: Path) -> None:
    """Write the base with the delta in its weights."""
    import torch
    from safetensors.torch import load_file, save_file

    _formats()
    from iserve_variants.folder import read_folder
    from iserve_variants.reference import dequantize

    device = "cuda" if torch.cuda.is_available() else "cpu"
    found, weights = read_folder(delta, pin=False), load_file(str(base / "model.safetensors"))
    for name, matrix in found.matrices.items():
        change = dequantize(matrix.codes.to(device), matrix.scales.to(device), matrix.format)
        change = change[: matrix.shape[0], : matrix.shape[1]]
        weights[name] = (weights[name].to(device).float() + change).bfloat16().cpu()
    weights |= found.exact
    _write_config(out, json.loads((base / "config.json").read_text()))
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})


_FILE = "delta.safetensors"


def _formats() -> Mapping[str, Any]:
    if VARIANTS not in sys.path:
        sys.path.insert(0, VARIANTS)
    from iserve_variants.formats import FORMATS

    return FORMATS


def _bfloat16(values: np.ndarray) -> bytes:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()


def _repeated(name: str, dtype: str, shape: tuple[int, ...], values: bytes, skipped: int) -> OutputTensor:
    """Return a tensor of ``values``, repeated, from number ``skipped`` on; two bytes each."""
    num_bytes = 2 * int(np.prod(shape))

    def pieces() -> Iterator[memoryview]:
        left, start = num_bytes, 2 * skipped % len(values)
        while left:
            piece = memoryview(values)[start : start + left]
            yield piece
            left, start = left - len(piece), 0

    return OutputTensor(name, dtype, shape, num_bytes, lambda: list(pieces()))


def _hash(tensor: OutputTensor) -> str:
    return tensor_hash(tensor.dtype, tensor.shape, (bytes(piece) for piece in tensor.pieces()))


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))


def _share(first: Path, other: Path) -> None:
    other.mkdir(parents=True, exist_ok=True)
    for name in (_FILE, "delta.json"):
        if not (other / name).exists():
            os.link(first / name, other / name)
