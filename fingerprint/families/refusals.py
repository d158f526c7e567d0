"""What is no model that iServe serves, told by its config.json, each with what it is instead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fingerprint.config_json import show
from fingerprint.errors import ConfigError, UnsupportedModelError

__all__ = ["family_name", "refuse_other_tasks", "supported"]

# Families people ask for, so that the refusal can say what the model is; all others are refused as unknown.
_ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2", "modernbert"}
_VISION = {
    "clip",
    "siglip",
    "vit",
    "llava",
    "llava_next",
    "mllama",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "blip-2",
}
_PART_CONFIGS = ("vision_config", "audio_config", "text_config", "speech_config")


def supported(families: Iterable[str]) -> str:
    """The end of every refusal: what is served."""
    return "supported are decoder-only " + ", ".join(families) + ", and others that transformers has"


def family_name(config: Mapping[str, object], families: Iterable[str]) -> str:
    """The model's family, be it one of ``families`` or none.

    Raises:
        ConfigError: no model_type.
        UnsupportedModelError: another kind of model than ``families`` are.
    """
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(
            f"model_type must be a string that names the family, got {show(name)}; {supported(families)}"
        )
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise UnsupportedModelError(f"model_type {show(name)} is an encoder-decoder model; {supported(families)}")
    if name in _VISION or any(config.get(key) for key in _PART_CONFIGS):
        raise UnsupportedModelError(
            f"model_type {show(name)} is a vision or multimodal model; {supported(families)}"
        )
    if name in _ENCODERS:
        raise UnsupportedModelError(
            f"model_type {show(name)} is an encoder that generates no text; {supported(families)}"
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
        if architectures and not set(architectures) & set(of_family):
            raise UnsupportedModelError(
                f"architecture {show(architectures[0])} does not generate text; of {name}, "
                f"{of_family[0]} is supported"
            )
