"""Names and shapes of a model's tensors from its config alone, by transformers' class on torch's meta device.

The class is built without memory behind its tensors. Only classes that ship with transformers are used: code that
a checkpoint brings is never run, nothing is downloaded. torch is imported when the first is built.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any

from fingerprint.checkpoint import StoredTensor
from fingerprint.config_json import show
from fingerprint.description.facts import text_config
from fingerprint.description.spec import spec_and_stack
from fingerprint.description.stored import quantization_of, stored_by_rule
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.extras import need_extra
from fingerprint.model_spec import ModelSpec
from fingerprint.other_tasks import ask_for_text, generates_no_text, task_by_transformers

__all__ = [
    "MAX_BUILT_LAYERS",
    "NOT_TAKEN",
    "check_buildable",
    "class_defaults",
    "described_config",
    "without_advice",
]

MAX_BUILT_LAYERS = 512  # each is a module of its own, built in milliseconds
_MOST_LISTED = 4096
_PATTERNS = ("hybrid_override_pattern", "layers_block_type", "layer_types")  # an entry for each layer
_GENERATING = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
NOT_TAKEN = ("auto_map", "attn_implementation", "experts_implementation", "quantization_config")


def described_config(config: Mapping[str, object]) -> ModelSpec:
    """The model that transformers' class makes of ``config``.

    Raises:
        ConfigError: the class refuses the sizes, or they are out of bounds.
        UnsupportedModelError: transformers has no class that generates text for it, or as ``describe``.
        MissingExtraError: transformers or torch is not installed.
    """
    return _described(json.dumps(config, sort_keys=True))


@lru_cache(maxsize=64)
def _described(text: str) -> ModelSpec:
    config = json.loads(text)
    name = config.get("model_type")
    need_extra("torch", f"model_type {show(name)}, of which there is a config alone,")
    check_buildable(config)
    quantization = quantization_of(config)
    built, architecture = _built(_without(config), str(name))
    tensors = {key: StoredTensor("BF16", tuple(value.shape)) for key, value in _saved(built).items()}
    filled = built.config.to_dict() | {"model_type": name}
    spec, stack = spec_and_stack(_without(filled), tensors, architecture)
    return replace(spec, stored=stored_by_rule(quantization, stack, spec)) if quantization else spec


def _saved(model: Any) -> dict[str, Any]:
    """Parameters, tied ones once, and the buffers that a checkpoint has, such as a router's correction."""
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in kept}


def _without(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without what would have transformers load code or kernels, or swap layers for quantized ones."""
    kept = {key: value for key, value in config.items() if key not in NOT_TAKEN and not str(key).startswith("_")}
    return {key: _plain(value) for key, value in kept.items()}


def _plain(value: Any) -> Any:
    """Infinite numbers, which JSON has not, as transformers saves them: ``{"__float__": "Infinity"}``."""
    if isinstance(value, dict):
        named = value.get("__float__")
        return float(named) if named in ("Infinity", "-Infinity", "NaN") else _without(value)
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _built(config: Mapping[str, Any], name: str) -> tuple[Any, str]:
    """The model on the meta device, and its architecture's name."""
    import torch
    import transformers
    from transformers import AutoConfig

    named = [entry for entry in config.get("architectures") or [] if isinstance(entry, str)]
    if not _classes(name) and named:  # a name of its own for another's class, as Kimi K2's
        name = _owner_of(named[0]) or name
        config = {**config, "model_type": name}
    classes = _classes(name)
    chosen = next((entry for entry in named or classes if entry in classes), None)
    if chosen is None and named and named[0].endswith(_GENERATING):  # a name of the checkpoint's own
        chosen = next(iter(classes), None)
    if chosen is None:
        raise _no_class(name, next(iter(named), None), classes)
    try:
        with without_advice():
            filled = AutoConfig.for_model(**_tied_as_text(config))
        with torch.device("meta"), without_advice():
            model = getattr(transformers, chosen)._from_config(filled, dtype=torch.bfloat16)
    except Exception as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{chosen} of transformers makes no model of this config.json: {line[:200]}") from error
    return model, named[0] if named else chosen


def _no_class(name: str, architecture: str | None, classes: list[str]) -> UnsupportedModelError:
    """Return the refusal of a config whose ``architecture`` is none of the text-generating ``classes``."""
    import transformers

    if classes and architecture is not None and hasattr(transformers, architecture):
        return UnsupportedModelError(
            f"architecture {show(architecture)} does not generate text; of {name}, {classes[0]} is supported"
        )
    if not classes and name in transformers.CONFIG_MAPPING:
        if (task := task_by_transformers(name)) is not None:
            return generates_no_text(name, task)
        return UnsupportedModelError(
            f"transformers {transformers.__version__} has no class that generates text for {show(name)}, "
            f"which may be a part of another model; {ask_for_text()}"
        )
    of_these = f"{architecture} is none of its" if architecture is not None and classes else "it has no"
    return UnsupportedModelError(
        f"transformers {transformers.__version__} describes no {show(name)} by config.json alone: {of_these} "
        "classes that generate text; give a folder with the checkpoint's safetensors files, which need none"
    )


def _tied_as_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A multimodal model that does not say whether its embeddings are tied, as its text model's class has it."""
    text = text_config(config)
    name = next((text[key] for key in ("model_type",) if isinstance(text.get(key), str)), "")
    if text is config or config.get("tie_word_embeddings") is not None or name == config.get("model_type"):
        return config
    tied = text.get("tie_word_embeddings")
    return {
        **config,
        "tie_word_embeddings": class_defaults({"model_type": name}).get("tie_word_embeddings", False)
        if tied is None
        else tied,
    }


def class_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with what transformers' config class has where it says nothing; empty where there is none.

    It needs transformers and no torch.
    """
    try:
        from transformers import AutoConfig
    except ImportError:
        return {}
    try:
        with without_advice():
            return dict(AutoConfig.for_model(**_without(config)).to_dict())
    except Exception:  # noqa: BLE001  # whatever a class objects to: its defaults are not had
        return {}


def _classes(name: str) -> list[str]:
    """Classes of transformers that generate text for ``name``, those of text alone first."""
    from transformers.models.auto import modeling_auto as auto

    mappings = (
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,  # speech next to one stack; the rest is refused later
    )
    found = [mapping[name] for mapping in mappings if name in mapping]
    return [entry for each in found for entry in ((each,) if isinstance(each, str) else each)]


def _owner_of(architecture: str) -> str | None:
    """The model_type whose class for text generation is called so."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    return next((name for name, entry in CLASSES.items() if entry == architecture), None)


def check_buildable(values: Mapping[str, object]) -> None:
    """Refuse more layers, under whatever name, than a class is built of here: each is a module.

    Raises:
        ConfigError: more, or a list or pattern of more.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            check_buildable(value)
        elif isinstance(value, str | list) and len(value) > _MOST_LISTED:
            raise ConfigError(
                f"{name} may have {_MOST_LISTED} entries at most for a config alone, has {len(value)}"
            )
        elif name in _PATTERNS and isinstance(value, str | list) and len(value) > MAX_BUILT_LAYERS:
            raise ConfigError(f"{name} may name {MAX_BUILT_LAYERS} layers at most for a config alone")
        elif isinstance(value, int) and value > MAX_BUILT_LAYERS and _counts_modules(name):
            raise ConfigError(f"{name} may be {MAX_BUILT_LAYERS} at most for a config alone, got {show(value)}")


def _counts_modules(name: str) -> bool:
    counts = any(word in name for word in ("layer", "expert", "depth", "blocks"))
    return counts and "size" not in name and "dim" not in name


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep transformers from printing advice on keys, token ids and faster kernels."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.set_verbosity(before)
