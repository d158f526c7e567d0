"""Comparison of the configurations of a base and its fine-tune: a delta has weights alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from daemon.torch_engine.model.stage_model import ModelSource
from fingerprint.config_json import read_json_object
from fingerprint.errors import CheckpointError

__all__ = ["check_configs"]

# Fields of a configuration that may differ: names and defaults of a release; of tokens, _check_tokens says which.
_MAY_DIFFER = frozenset(
    {
        "_name_or_path",
        "dtype",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")
_GENERATION_FILE = "generation_config.json"
_MAX_SHOWN = 200


def check_configs(base: ModelSource, finetuned: ModelSource) -> None:
    """Raise CheckpointError where two configurations compute otherwise, or an export would have other tokens."""
    before, after = base.config.to_dict(), finetuned.config.to_dict()
    for name in sorted((before.keys() | after.keys()) - _MAY_DIFFER - {*_TOKENS}):
        if before.get(name) != after.get(name):
            raise CheckpointError(
                f"{name} in the config.json of {finetuned.checkpoint} is {str(after.get(name))[:_MAX_SHOWN]}, in "
                f"the base's {str(before.get(name))[:_MAX_SHOWN]}; a delta has weights alone: deploy the "
                "fine-tune as a model of its own"
            )
    _check_tokens(base, finetuned)


def _check_tokens(base: ModelSource, finetuned: ModelSource) -> None:
    """Raise CheckpointError unless base + delta has the special tokens of the fine-tune.

    It has the base's config.json, whose tokens count where generation_config.json names none; the latter is the
    fine-tune's, or the base's where that has none.
    """
    own = _generation_settings(finetuned.checkpoint)
    exported = _generation_settings(base.checkpoint) if own is None else own
    for name in _TOKENS:
        wanted, found = _token(name, own, finetuned.config), _token(name, exported, base.config)
        if wanted != found:
            raise CheckpointError(
                f"{name} of {finetuned.checkpoint} is {str(wanted)[:_MAX_SHOWN]}, and base and delta would have "
                f"{str(found)[:_MAX_SHOWN]}, the base's; say it in a {_GENERATION_FILE} of the fine-tune, which a "
                "delta keeps, or deploy the fine-tune as a model of its own"
            )


def _generation_settings(folder: Path) -> Mapping[str, object] | None:
    file = folder / _GENERATION_FILE
    return read_json_object(file, f"{folder} has no {file.name}", f"a {file.name}") if file.is_file() else None


def _token(name: str, settings: Mapping[str, object] | None, config: Any) -> object:
    """Return the number or numbers of a special token, as engines take it."""
    found = (settings or {}).get(name)
    found = getattr(config, name, None) if found is None else found
    return found[0] if isinstance(found, list) and len(found) == 1 else found
