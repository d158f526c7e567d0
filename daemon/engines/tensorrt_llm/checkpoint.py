"""In which formats a checkpoint is stored, read from its files as TensorRT-LLM's PyTorch backend reads them.

That backend takes every format from the checkpoint and quantizes nothing while loading: asked for fp8 weights and
given a 16-bit model it would serve 16 bits without an error. So what is there is compared with what is asked.
Order and names: ``tensorrt_llm/_torch/model_config.py``, ``tensorrt_llm/quantization/mode.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.config_json import read_config, show
from fingerprint.errors import CheckpointError
from fingerprint.weight_bytes import GROUP_SIZE

__all__ = ["StoredFormats", "check_formats", "stored_formats"]

_MODELOPT_FILE = "hf_quant_config.json"
_ALGORITHMS = {
    "NO_QUANT": WeightFormat.BITS16,
    "W8A16": WeightFormat.INT8,
    "W4A16": WeightFormat.INT4,
    "W4A16_AWQ": WeightFormat.INT4,
    "FP8": WeightFormat.FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": WeightFormat.FP8,
    "FP8_BLOCK_SCALES": WeightFormat.FP8,
}
_ENGINE_FLOW_ONLY = ("GPTQ", "_SQ_", "QSERVE")
_FP8_BLOCK = [128, 128]


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """Formats in which a checkpoint stores its weights and asks for its KV cache."""

    weights: WeightFormat
    kv: KvFormat | None  # None: it asks for none, and any may be chosen
    algorithm: str  # the engine's name for it


def stored_formats(directory: Path) -> StoredFormats:
    """Return the formats of the checkpoint in ``directory``.

    Raises:
        NotFoundError: no config.json.
        ConfigError: config.json or hf_quant_config.json cannot be read.
        CheckpointError: it is stored in a format that the PyTorch backend does not read, reads as another one, or
            that iServe has no name for.
    """
    config = read_config(directory)
    if config.get("auto_map"):
        raise CheckpointError(
            f"{directory} brings code of its own (auto_map in config.json), which TensorRT-LLM would run whatever "
            "it is told; iServe runs none: remove auto_map, if the model's class is one of transformers"
        )
    if (directory / _MODELOPT_FILE).exists():
        return _of_modelopt(directory, read_config(directory / _MODELOPT_FILE))
    quantization = config.get("quantization_config")
    if not quantization:
        return StoredFormats(WeightFormat.BITS16, None, "NO_QUANT")
    if not isinstance(quantization, Mapping):
        raise CheckpointError(f"{directory}: quantization_config must be an object, got {show(quantization)}")
    return _of_config(directory, quantization)


def _of_modelopt(directory: Path, file: Mapping[str, object]) -> StoredFormats:
    quantization = file.get("quantization")
    if not isinstance(quantization, Mapping) or not isinstance(quantization.get("quant_algo"), str):
        raise CheckpointError(
            f"{directory / _MODELOPT_FILE} names no quantization.quant_algo; TensorRT-LLM needs it"
        )
    algorithm = str(quantization["quant_algo"])
    weights = _ALGORITHMS.get(algorithm)
    if weights is None:
        older = any(part in algorithm for part in _ENGINE_FLOW_ONLY)
        why = "only its older engine flow reads that" if older else "iServe has no name for that format"
        raise CheckpointError(
            f"{directory} is quantized as {algorithm}: {why}; give a model in 16 bits, fp8 or AWQ"
        )
    group_size = quantization.get("group_size")
    if weights is WeightFormat.INT4 and group_size not in (None, GROUP_SIZE):
        raise CheckpointError(
            f"{directory} has 4-bit groups of {show(group_size)}, iServe's int4 has groups of {GROUP_SIZE}; "
            f"quantize with a group size of {GROUP_SIZE}"
        )
    return StoredFormats(weights, _stored_kv(directory, quantization.get("kv_cache_quant_algo")), algorithm)


def _stored_kv(directory: Path, algorithm: object) -> KvFormat | None:
    if algorithm in (None, "NO_QUANT"):
        return None
    if algorithm == "FP8":
        return KvFormat.FP8
    raise CheckpointError(
        f"{directory} asks for a KV cache in {show(algorithm)}; the PyTorch backend and iServe both have fp8 only"
    )


def _of_config(directory: Path, quantization: Mapping[str, object]) -> StoredFormats:
    """Read ``quantization_config``: fp8 in blocks of 128 x 128, compressed-tensors of 8-bit floats."""
    method = quantization.get("quant_method")
    if method == "fp8" and quantization.get("weight_block_size") == _FP8_BLOCK:
        return StoredFormats(WeightFormat.FP8, None, "FP8_BLOCK_SCALES")
    if method == "compressed-tensors":
        kinds = _compressed_kinds(quantization)
        if kinds == {(8, "float")}:
            return StoredFormats(WeightFormat.FP8, None, "compressed-tensors float8")
        if (8, "int") in kinds:
            raise CheckpointError(
                f"{directory} holds int8 weights in compressed-tensors, which TensorRT-LLM would read as fp8 and "
                "answer with nonsense; give the 16-bit model"
            )
    raise CheckpointError(
        f"{directory} is quantized by {show(method)} in a way that TensorRT-LLM's PyTorch backend does not read; "
        "give the 16-bit model, or one quantized with NVIDIA ModelOpt"
    )


def _compressed_kinds(quantization: Mapping[str, object]) -> set[tuple[object, object]]:
    """Return bits and kind of number of each group's weights."""
    groups = quantization.get("config_groups")
    kinds: set[tuple[object, object]] = set()
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            kinds.add((weights.get("num_bits"), weights.get("type")))
    return kinds


def check_formats(stored: StoredFormats, config: DeploymentConfig, directory: Path) -> None:
    """Raise CheckpointError if the checkpoint is not in the formats that ``config`` was planned with."""
    as_stored = config.weights is WeightFormat.STORED and stored.weights is not WeightFormat.BITS16
    if stored.weights is not config.weights and not as_stored:
        raise CheckpointError(
            f"the plan has weights={config.weights}, the checkpoint {directory} is stored as {stored.weights} "
            f"({stored.algorithm}), and TensorRT-LLM quantizes nothing while loading; plan with "
            f"weights={stored.weights}, or quantize the checkpoint beforehand (NVIDIA ModelOpt)"
        )
    if stored.kv is not None and stored.kv is not config.kv:
        raise CheckpointError(
            f"the plan has kv={config.kv}, the checkpoint {directory} asks for {stored.kv}; plan with "
            f"kv={stored.kv}, or remove kv_cache_quant_algo from its {_MODELOPT_FILE}"
        )
