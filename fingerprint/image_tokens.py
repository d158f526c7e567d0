"""Tokens that an image takes of the prompt, by config.json alone.

| kind of config | tokens of an image |
|---|---|
| says so: ``image_seq_length``, ``mm_tokens_per_image``, ``vision_soft_tokens_per_image``, ``num_image_tokens``, \
``num_query_tokens`` | that number |
| one square of patches (LLaVA 1.5, VipLLaVA) | (image_size / patch_size)^2, and 1 where features are "full" |
| one tile (InternVL without ``dynamic_image_size``) | (image_size / patch_size x ``downsample_ratio``)^2 |
| several tiles by the image's shape (LLaVA-NeXT, InternVL, Idefics3, Llama 4) | varies: of one tile |
| patches of the image's own size (Qwen-VL, GLM-V, Pixtral, Mistral 3) | varies: pixels / (patch x merge)^2 |

Markers around an image are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from fingerprint.config_json import MAX_VOCAB, Fields, show
from fingerprint.description.facts import text_config
from fingerprint.errors import ConfigError, UnsupportedModelError

__all__ = ["image_tokens"]

_STATED = (
    "image_seq_length",
    "mm_tokens_per_image",
    "vision_soft_tokens_per_image",
    "num_image_tokens",
    "num_query_tokens",
)
_VISION_PARTS = ("vision_config", "visual", "vit_config", "vision_encoder_config")
_ONE_SQUARE = ("llava", "vipllava")
_TILED = {
    "llava_next",
    "llava_onevision",
    "internvl_chat",
    "internvl",
    "idefics3",
    "smolvlm",
    "llama4",
    "aya_vision",
}
_TILE_KEYS = ("image_grid_pinpoints", "max_dynamic_patch", "pixel_shuffle_ratio", "max_image_tiles")
_MERGES = ("spatial_merge_size", "merge_kernel_size")
_USUAL_PIXELS = 1024


def image_tokens(config: Mapping[str, object]) -> int:
    """Return the tokens that one image takes.

    Raises:
        UnsupportedModelError: config.json names no part that reads images.
        ConfigError: the number depends on the image, or is not in the config.
    """
    vision = next((part for name in _VISION_PARTS if isinstance(part := config.get(name), Mapping)), None)
    family = str(config.get("model_type", "unknown"))
    if vision is None:
        raise UnsupportedModelError(
            f"model_type {show(family)} has no part that reads images (vision_config); leave --images out"
        )
    if family in _TILED or any(config.get(key) is not None for key in _TILE_KEYS):
        return _tiles(config, vision, family)
    for values in (config, vision, text_config(config)):
        for name in _STATED:
            if values.get(name) is not None:
                return Fields({name: values[name]}, family).count(name, most=MAX_VOCAB)
    if family in _ONE_SQUARE:
        full = config.get("vision_feature_select_strategy") == "full"
        return _square(vision, family, 1.0) + full
    raise _untold(family, _by_pixels(vision))


def _tiles(config: Mapping[str, object], vision: Mapping[str, object], family: str) -> int:
    try:
        each = _square(vision, family, _shrunk(config, vision))
    except ConfigError:
        raise _untold(family, "") from None
    if config.get("dynamic_image_size") is False and family.startswith("internvl"):
        return each
    raise _untold(family, f": {each} for each tile, and an image is cut into as many as its shape asks for")


def _shrunk(config: Mapping[str, object], vision: Mapping[str, object]) -> float:
    """Return by how much the side of the square of patches becomes shorter."""
    ratio = (
        config.get("downsample_ratio") or vision.get("pixel_shuffle_ratio") or config.get("pixel_shuffle_ratio")
    )
    if isinstance(ratio, float) and 0 < ratio <= 1:
        return ratio
    factor = config.get("scale_factor") or config.get("downsample_factor")
    return 1 / factor if isinstance(factor, int) and factor > 0 else 1.0


def _square(vision: Mapping[str, object], family: str, shrunk: float) -> int:
    """Return how many places the square of patches has.

    Raises:
        ConfigError: its sizes are not there.
    """
    sizes = {}
    for name in ("image_size", "patch_size"):
        value = vision.get(name)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        sizes[name] = Fields({name: value}, f"{family} vision").count(name)
    return max(1, int(sizes["image_size"] // sizes["patch_size"] * shrunk)) ** 2


def _by_pixels(vision: Mapping[str, object]) -> str:
    """Return what an image of the usual size takes where patches are of the image's own size; empty: not known."""
    patch = vision.get("patch_size") or vision.get("spatial_patch_size")
    merge = next((vision[name] for name in _MERGES if vision.get(name)), None)
    if isinstance(merge, list) and merge:
        merge = merge[0]
    if not (isinstance(patch, int) and isinstance(merge, int) and patch > 0 and merge > 0):
        return ""
    side = round(_USUAL_PIXELS / (patch * merge))
    return f": it is about pixels / {patch * merge}^2, {side**2} for {_USUAL_PIXELS} x {_USUAL_PIXELS}"


def _untold(family: str, why: str) -> ConfigError:
    return ConfigError(
        f"how many tokens an image takes of {show(family)} depends on the image or is not in config.json{why}; "
        "give `--images N --image-tokens T`"
    )
