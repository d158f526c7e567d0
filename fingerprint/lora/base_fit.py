"""Agreement of an adapter with the checkpoint that it is to be applied to: names, shapes and types of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from fingerprint.config_json import show
from fingerprint.errors import CheckpointError, UnsupportedAdapterError
from fingerprint.float_bytes import FLOAT_DTYPES
from fingerprint.lora.adapter import LoraAdapter, open_weights
from fingerprint.lora.adapter_config import CONFIG_FILE
from fingerprint.lora.changes import BiasUpdate, Change, Scaling, TokenRows
from fingerprint.lora.tensor_kinds import module_of
from fingerprint.safetensors_header import StoredTensor

__all__ = ["BaseTensors", "check_fit", "fitted_changes"]

_TRANSPOSED = ("gpt2", "openai-gpt")  # model types whose matrices are [inputs, outputs]
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_UNTIED = ", or merge it with PEFT (merge_and_unload), which unties the two, and deploy the result"
_ADDED = "; where tokens were added, merge it with PEFT (merge_and_unload) and deploy the result"
_EMBEDDINGS = ("embed_tokens", "embed_in", "tok_embeddings", "wte", "word_embeddings")  # last parts of names
_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class BaseTensors:
    """Model that an adapter may be applied to, as far as its config and headers tell."""

    name: str  # for messages
    config: Mapping[str, object]  # its config.json
    tensors: Mapping[str, StoredTensor]


def check_fit(adapter: LoraAdapter, base: BaseTensors) -> None:
    """Raise unless every change of ``adapter`` is of a tensor of ``base`` whose values can be changed.

    Raises:
        CheckpointError, UnsupportedAdapterError: as :func:`fitted_changes`.
    """
    fitted_changes(adapter, base)


def fitted_changes(adapter: LoraAdapter, base: BaseTensors) -> tuple[Change, ...]:
    """Return the changes of ``adapter`` to the tensors that ``base`` has; errors name the first by its name.

    Scaled outputs (IA3) have their bias scaled as well, and rows of tied embeddings both of their stored tensors.

    Raises:
        CheckpointError: ``base`` has no such tensor, or one of another shape.
        UnsupportedAdapterError: the tensor is quantized, transposed, or tied to another one that would change too.
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
    changes = adapter.changes
    has_head = any(head in base.tensors for head in _HEADS)
    if any(part.get("tie_word_embeddings") is True for part in texts) or not has_head:
        changes = _tied(adapter, base)
    elif any(isinstance(each.update, TokenRows) and each.update.is_for_both for each in changes):
        raise CheckpointError(
            f"{adapter.folder} has rows of embeddings that it names for the output layer too, which the model in "
            f"{base.name} has by itself; give the base of this adapter, which shares the two"
        )
    for change in changes:
        _check_change(change, adapter, base)
    _check_biases(adapter, base)
    return (*changes, *_scaled_biases(changes, base))


def _tied(adapter: LoraAdapter, base: BaseTensors) -> tuple[Change, ...]:
    """Return the changes where embeddings and output layer of ``base`` are one tensor, or two that must be equal.

    PEFT computes with one of them changed, and its merge changes both or unties them, but where the same rows are
    trained or the same values are saved for both.
    """
    changes = {change.target: change for change in adapter.changes}
    shared = [name for name in changes if _is_vocabulary(name)]
    inputs = [name for name in shared if name not in _HEADS]
    if not shared:
        return adapter.changes
    first, change = shared[0], changes[inputs[0]] if inputs else None
    is_saved = any(changes[name].update is None for name in shared)
    if change is None or len(inputs) > 1 or not _is_for_both(adapter, [changes[name] for name in shared]):
        raise UnsupportedAdapterError(
            f"{adapter.folder} updates {first[:_MAX_SHOWN]}, which the model in {base.name} shares "
            f"{'with its input embeddings' if first in _HEADS else 'with its output layer'}, so that both would "
            f"change; train the adapter without it{_UNTIED if is_saved else ''}"
        )
    both = [change, *(replace(change, target=head) for head in _HEADS if head in base.tensors)]
    rest = (each for name, each in changes.items() if name not in shared)
    return tuple(sorted((*rest, *both), key=lambda each: each.target))


def _is_for_both(adapter: LoraAdapter, changes: Sequence[Change]) -> bool:
    """Return whether changes of embeddings and output layer are one change of a tensor that the two share."""
    if len(changes) == 1:
        return isinstance(changes[0].update, TokenRows)
    names = [change.saved for change in changes if change.update is None]
    if len(changes) != 2 or len(names) != 2:
        return False
    weights = open_weights(adapter.folder)
    return all(a == b for a, b in zip_longest(*(weights.chunks(str(name)) for name in names)))


def _is_vocabulary(tensor: str) -> bool:
    """Return whether ``tensor`` has a row for each token: embeddings, or the output layer."""
    return tensor in _HEADS or (module_of(tensor).rpartition(".")[2] in _EMBEDDINGS and tensor.endswith(".weight"))


def _check_biases(adapter: LoraAdapter, base: BaseTensors) -> None:
    """Raise CheckpointError unless each bias that the configuration says was trained is there."""
    trained = {
        "all": [name for name in base.tensors if name.endswith(".bias")],
        "lora_only": [f"{module.name}.bias" for module in adapter.modules],
    }.get(adapter.config.bias, [])
    saved = {change.target for change in adapter.changes if change.saved is not None}
    lacking = sorted(name for name in trained if name in base.tensors and name not in saved)
    if lacking:
        raise CheckpointError(
            f"{adapter.folder} has no {lacking[0][:_MAX_SHOWN]!r}, which was trained by its {CONFIG_FILE} (bias "
            f"is {adapter.config.bias!r}); save the adapter again"
        )


def _scaled_biases(changes: Sequence[Change], base: BaseTensors) -> Iterator[Change]:
    """Yield the scaling of the bias of each linear whose outputs are scaled."""
    for change in changes:
        bias = f"{module_of(change.target)}.bias"
        if isinstance(change.update, Scaling) and not change.update.of_inputs and bias in base.tensors:
            yield Change(bias, change.shape[:1], update=change.update)


def _check_change(change: Change, adapter: LoraAdapter, base: BaseTensors) -> None:
    entry, target = base.tensors.get(change.target), change.target[:_MAX_SHOWN]
    of_base = (
        f", which was trained on {adapter.config.base_model[:_MAX_SHOWN]!r}" if adapter.config.base_model else ""
    )
    if entry is None and isinstance(change.update, BiasUpdate):
        raise UnsupportedAdapterError(
            f"{adapter.folder} has a bias for {target!r}, and the model in {base.name} has none there, so that no "
            f"merged checkpoint computes the same: give the base of this adapter{of_base}"
        )
    if entry is None:
        raise CheckpointError(
            f"{adapter.folder} updates {target!r}, and the model in {base.name} has no "
            f"such tensor: give the base of this adapter{of_base}"
        )
    if len(entry.shape) != len(change.shape) or any(
        needed not in (None, size) for needed, size in zip(change.shape, entry.shape, strict=True)
    ):
        shape = ", ".join("any" if size is None else str(size) for size in change.shape)
        raise CheckpointError(
            f"{adapter.folder} updates a {target!r} of [{shape}], and that of the model "
            f"in {base.name} is {list(entry.shape)}: give the base of this adapter{of_base}"
            f"{_ADDED if change.saved is not None and _is_vocabulary(change.target) else ''}"
        )
    if isinstance(change.update, TokenRows):
        beyond = next((index for index in change.update.indices if index >= entry.shape[0]), None)
        if beyond is not None:
            raise CheckpointError(
                f"{adapter.folder} has a row for token {beyond} of {target!r}, which has "
                f"{entry.shape[0]:,} in {base.name}: give the base of this adapter{of_base}"
            )
    if entry.dtype not in FLOAT_DTYPES:
        raise UnsupportedAdapterError(
            f"{target!r} of the model in {base.name} is of {entry.dtype}; an update is "
            f"added to {', '.join(FLOAT_DTYPES)} only: give the 16-bit model"
        )
