"""Agreement of an adapter with the checkpoint that it is to be applied to: names, shapes and types of matrices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fingerprint.config_json import show
from fingerprint.errors import CheckpointError, UnsupportedAdapterError
from fingerprint.float_bytes import FLOAT_DTYPES
from fingerprint.lora.adapter import LoraAdapter, LoraModule
from fingerprint.safetensors_header import StoredTensor

__all__ = ["BaseTensors", "check_fit"]

_TRANSPOSED = ("gpt2", "openai-gpt")  # model types whose matrices are [inputs, outputs]
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """Model that an adapter may be applied to, as far as its config and headers tell."""

    name: str  # for messages
    config: Mapping[str, object]  # its config.json
    tensors: Mapping[str, StoredTensor]


def check_fit(adapter: LoraAdapter, base: BaseTensors) -> None:
    """Raise unless every update of ``adapter`` is of a matrix of ``base`` whose values can be added to.

    Raises:
        CheckpointError: ``base`` has no such matrix, or one of another shape; the first by name is in the message.
        UnsupportedAdapterError: the matrix is quantized, transposed, or tied to another one.
    """
    config = base.config
    texts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    quantized = next((part["quantization_config"] for part in texts if part.get("quantization_config")), None)
    if quantized is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise UnsupportedAdapterError(
            f"the weights in {base.name} are quantized{f' ({show(method)})' if method else ''}, a form that "
            "holds no exact sum with an update; give the 16-bit model that they were made of"
        )
    if config.get("model_type") in _TRANSPOSED:
        raise UnsupportedAdapterError(
            f"the model in {base.name} keeps its matrices transposed (Conv1D, {show(config['model_type'])}); "
            "merge the adapter with PEFT (merge_and_unload) and deploy the result"
        )
    is_tied = any(part.get("tie_word_embeddings") is True for part in texts)
    for module in adapter.modules:
        _check_module(module, adapter, base, is_tied=is_tied)


def _check_module(module: LoraModule, adapter: LoraAdapter, base: BaseTensors, *, is_tied: bool) -> None:
    entry = base.tensors.get(module.weight)
    of_base = (
        f", which was trained on {adapter.config.base_model[:_MAX_SHOWN]!r}" if adapter.config.base_model else ""
    )
    if module.weight in _HEADS and (is_tied or entry is None):
        raise UnsupportedAdapterError(
            f"{adapter.folder} updates {module.weight}, which the model in {base.name} shares with its input "
            "embeddings, so that both would change; train the adapter without it"
        )
    if entry is None:
        raise CheckpointError(
            f"{adapter.folder} updates {module.weight[:_MAX_SHOWN]!r}, and the model in {base.name} has no "
            f"such tensor: give the base of this adapter{of_base}"
        )
    shape = (module.out_features, module.in_features)
    if entry.shape != shape:
        raise CheckpointError(
            f"{adapter.folder} updates a {module.weight[:_MAX_SHOWN]!r} of {list(shape)}, and that of the model "
            f"in {base.name} is {list(entry.shape)}: give the base of this adapter{of_base}"
        )
    if entry.dtype not in FLOAT_DTYPES:
        raise UnsupportedAdapterError(
            f"{module.weight[:_MAX_SHOWN]!r} of the model in {base.name} is of {entry.dtype}; an update is "
            f"added to {', '.join(FLOAT_DTYPES)} only: give the 16-bit model"
        )
