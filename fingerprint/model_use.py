"""Use of a model: with its towers or as text alone, with images in its prompts, with its own code or without."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.errors import ConfigError

__all__ = ["AS_IT_IS", "MAX_IMAGES", "MAX_IMAGE_TOKENS", "ModelUse"]

MAX_IMAGES = 1000  # of one prompt
MAX_IMAGE_TOKENS = 1_000_000  # of one image


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelUse:
    """Parts of a model that are served, images of a planned prompt, and permission to run the model's own code.

    Raises:
        ConfigError: a number out of its range, or two that contradict each other.
    """

    text_only: bool = False
    """Whether the towers for images, video and sound are left out."""
    images: int = 0
    """Number of images in a planned prompt."""
    image_tokens: int | None = None
    """Prompt tokens of each image; None: as config.json has it."""
    trust_remote_code: bool = False
    """Whether the engine may run Python code of the model's repository."""

    def __post_init__(self) -> None:
        if not 0 <= self.images <= MAX_IMAGES:
            raise ConfigError(f"images must be between 0 and {MAX_IMAGES}, got {self.images}")
        if self.image_tokens is not None and not 1 <= self.image_tokens <= MAX_IMAGE_TOKENS:
            raise ConfigError(f"image_tokens must be between 1 and {MAX_IMAGE_TOKENS:,}, got {self.image_tokens}")
        if self.image_tokens is not None and not self.images:
            raise ConfigError(
                "image_tokens says how long an image is, and no prompt has one; give --images as well"
            )
        if self.text_only and self.images:
            raise ConfigError(
                "--text-only leaves out what reads images, and --images plans for some; leave one of them out"
            )


AS_IT_IS = ModelUse()
