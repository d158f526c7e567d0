"""The config.json of a model that keeps only some of its layers. Values in, values out.

It changes what speaks of layers (their number, lists with an entry per layer, lists of layer indexes, thresholds)
and nothing else, so that an engine builds for each kept layer what it built for it in the whole model.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence

from fingerprint.config_json import show
from fingerprint.description.facts import TEXT_PARTS
from fingerprint.errors import ConfigError

__all__ = ["cut_config"]

_INDEX_LISTS = (
    "mlp_only_layers",
    "full_attn_idxs",
    "attn_layer_indices",
    "moe_layers",
)  # values are layer indexes
_COUNTED_FROM_ONE = ("linear_attn_config", ("full_attn_layers", "kda_layers"))  # Kimi Linear: a part and its lists
_THRESHOLDS = ("max_window_layers", "first_k_dense_replace")  # "layers from here on", or "the first so many"
_FROM_THE_END = ("num_kv_shared_layers",)  # "the last so many"
_PATTERNS = ("hybrid_override_pattern",)  # a character per layer
_BY_INDEX = "per_layer_config"  # what some layers have otherwise, by their index
_DRAFTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")  # layers behind the last
_LAYER_NUMBER = re.compile(r"(?:^|\.)(?:layers|h)\.([0-9]{1,5})(?=\.|$)")
# Lists as long as there are layers only by accident; every other top-level list of that length is per layer.
_NOT_PER_LAYER = ("architectures",)
_NOT_PER_LAYER_ENDINGS = ("_token_id", "_token_ids", "_tokens")


def cut_config(
    config: Mapping[str, object], layers: Sequence[int], layers_keys: Sequence[str]
) -> dict[str, object]:
    """Return ``config`` with the layers ``layers`` alone, renumbered from 0.

    Args:
        config: parsed config.json of the whole model.
        layers: source layer indexes, strictly increasing, all below the model's number.
        layers_keys: names under which the family gives its number of layers; at least one is in ``config``.

    Raises:
        ConfigError: a list of layer indexes or a pattern holds something else.
    """
    cut = copy.deepcopy(dict(config))
    for part, value in config.items():
        if part in TEXT_PARTS and isinstance(value, dict):
            cut[part] = cut_config(value, layers, layers_keys)
            cut.pop("auto_map", None)
            return cut
    present = [key for key in layers_keys if isinstance(cut.get(key), int)]
    given = cut[present[0]] if present else None
    num_layers = given if isinstance(given, int) else _listed(cut)
    if not num_layers:
        raise ConfigError("config.json does not say how many layers there are; they cannot be cut")
    for key in present:
        cut[key] = len(layers)
    for key, value in cut.items():
        if key in _INDEX_LISTS and isinstance(value, list):
            kept = _indexes(key, value)
            cut[key] = [new for new, old in enumerate(layers) if old in kept]
        elif isinstance(value, list) and len(value) == num_layers and _is_per_layer(key):
            cut[key] = [value[old] for old in layers]
        elif key in _THRESHOLDS and isinstance(value, int):
            cut[key] = sum(old < value for old in layers)
        elif key in _FROM_THE_END and isinstance(value, int):
            cut[key] = sum(old >= num_layers - value for old in layers)
        elif key in _PATTERNS and isinstance(value, str) and len(value) == num_layers:
            cut[key] = "".join(value[old] for old in layers)
        elif key == _BY_INDEX and isinstance(value, dict):
            kept_layers = {str(old): new for new, old in enumerate(layers)}
            each = {str(int(index)): own for index, own in value.items() if str(index).isdigit()}
            cut[key] = {str(kept_layers[index]): own for index, own in each.items() if index in kept_layers}
        elif key in _DRAFTS and isinstance(value, int):
            cut[key] = 0
    _cut_counted_from_one(cut, layers)
    _cut_sparse_step(cut, config, layers)
    if isinstance(quantization := cut.get("quantization_config"), dict):
        _cut_module_names(quantization, layers)
    # Without this key no engine can be led to run code that the checkpoint brings.
    cut.pop("auto_map", None)
    return cut


def _cut_counted_from_one(cut: dict[str, object], layers: Sequence[int]) -> None:
    name, lists = _COUNTED_FROM_ONE
    if isinstance(part := cut.get(name), dict):
        for key in lists:
            if key in part:
                kept = _indexes(f"{name}.{key}", part[key])
                part[key] = [new for new, old in enumerate(layers, 1) if old + 1 in kept]


def _listed(config: Mapping[str, object]) -> int:
    """Return how many layers a config names that does not say their number."""
    lists = (config.get(name) for name in ("layers_block_type", "layer_types", *_PATTERNS))
    return next((len(each) for each in lists if isinstance(each, list | str)), 0)


def _cut_module_names(quantization: dict[str, object], layers: Sequence[int]) -> None:
    """Cut lists of modules that stay in 16 bits, some of which are named by their layer's number."""
    new_of = {old: new for new, old in enumerate(layers)}
    for key, value in quantization.items():
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            found = [(item, None if item.startswith("re:") else _LAYER_NUMBER.search(item)) for item in value]
            quantization[key] = [
                item if at is None else f"{item[: at.start(1)]}{new_of[int(at[1])]}{item[at.end(1) :]}"
                for item, at in found
                if at is None or int(at[1]) in new_of
            ]


def _is_per_layer(key: str) -> bool:
    return key not in _NOT_PER_LAYER and not key.endswith(_NOT_PER_LAYER_ENDINGS)


def _indexes(key: str, value: object) -> set[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ConfigError(f"{key} must be a list of layer indexes, got {show(value)}")
    return set(value)


def _cut_sparse_step(cut: dict[str, object], config: Mapping[str, object], layers: Sequence[int]) -> None:
    """Say layer by layer which have experts, (i + 1) % decoder_sparse_step == 0, for the step is gone."""
    step = config.get("decoder_sparse_step")
    if step is None or step == 1:
        return
    if type(step) is not int or step < 1:
        raise ConfigError(f"decoder_sparse_step must be an integer from 1, got {show(step)}")
    dense = _indexes("mlp_only_layers", config.get("mlp_only_layers") or [])
    cut["mlp_only_layers"] = [new for new, old in enumerate(layers) if old in dense or (old + 1) % step]
    cut["decoder_sparse_step"] = 1
