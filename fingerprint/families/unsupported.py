"""Model types that iServe does not serve, recognised by config.json, each with what it is instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from fingerprint.config_json import show
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.other_tasks import ask_for_text, generates_no_text, known_task

__all__ = ["family_name", "is_multimodal", "refuse_other_kinds", "refuse_other_tasks", "supported"]

# Families people ask for, so that the refusal can say what the model is; every other one is refused as unknown.
_ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"}
_MULTIMODAL = {"llava", "llava_next", "mllama", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "blip-2"}
_OTHER_TASKS = re.compile(
    r"For(\w*Classification|\w*Detection|\w*Segmentation|MaskedLM|QuestionAnswering|MultipleChoice|CTC|Retrieval)$"
)
_PART_CONFIGS = ("vision_config", "audio_config", "text_config", "speech_config")


def supported(families: Iterable[str]) -> str:
    """Return the end of every refusal: what is served."""
    return "supported are decoder-only " + ", ".join(families) + ", and others that transformers has"


def is_multimodal(config: Mapping[str, object]) -> bool:
    """Return whether the model has towers for images or sound, or its text model in a part of its own."""
    name = config.get("model_type")
    return (isinstance(name, str) and name in _MULTIMODAL) or any(config.get(key) for key in _PART_CONFIGS)


def refuse_other_kinds(config: Mapping[str, object]) -> None:
    """Refuse what generates no text from one stack of layers.

    Raises:
        ConfigError: no model_type.
        UnsupportedModelError: an encoder-decoder model, or a model for another task than text.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(f"model_type must be a string that names the family, got {show(name)}")
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise UnsupportedModelError(
            f"model_type {show(name)} is an encoder-decoder model; models with one stack of layers are supported"
        )
    if (task := known_task(name)) is not None:
        raise generates_no_text(name, task)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(entry, str) for entry in architectures):
        raise ConfigError(f"architectures must be a list of class names, got {show(architectures)}")
    if architectures and _OTHER_TASKS.search(architectures[0]):
        raise UnsupportedModelError(
            f"architecture {show(architectures[0])} does not generate text; {ask_for_text()}"
        )


def family_name(config: Mapping[str, object], families: Iterable[str]) -> str:
    """Return the model's family, be it one of ``families`` or none.

    Raises:
        ConfigError: no model_type.
        UnsupportedModelError: another kind of model than ``families`` are.
    """
    refuse_other_kinds(config)
    name = str(config["model_type"])
    if is_multimodal(config):
        raise UnsupportedModelError(
            f"model_type {show(name)} is a vision or multimodal model; {supported(families)}"
        )
    return name


def refuse_other_tasks(config: Mapping[str, object], name: str, of_family: tuple[str, ...]) -> None:
    """Refuse a model of the family ``name`` whose class is none of ``of_family``.

    Raises:
        ConfigError: architectures is not a list of names.
        UnsupportedModelError: as above.
    """
    architectures = config.get("architectures")
    if architectures is not None:
        if not isinstance(architectures, list) or not all(isinstance(entry, str) for entry in architectures):
            raise ConfigError(f"architectures must be a list of class names, got {show(architectures)}")
        named = {name.lower() for name in architectures}  # LLaMAForCausalLM of early checkpoints
        if architectures and not named & {name.lower() for name in of_family}:
            raise UnsupportedModelError(
                f"architecture {show(architectures[0])} does not generate text; of {name}, "
                f"{of_family[0]} is supported"
            )
