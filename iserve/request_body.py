"""Common parts of REST bodies: refusal of unknown fields by name, and the use of a model."""

from __future__ import annotations

from collections.abc import Container
from difflib import get_close_matches

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from fingerprint.model_use import MAX_IMAGE_TOKENS, MAX_IMAGES, ModelUse
from iserve import request_help as h

__all__ = ["FORMER_FIELDS", "Body", "ModelUseBody"]

# Former names of fields, accepted for one release in a body that has the field by its present name.
FORMER_FIELDS = {
    "expect": "expected_deployments",
    "rates": "relative_rates",
    "refuse_late": "reject_late",
}


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_fields(cls, given: object) -> object:
        """Replace former names; in an error list the fields that exist, which pydantic's own error does not."""
        if isinstance(given, dict):
            given = {cls._present_name(name, given): value for name, value in given.items()}
        unknown = sorted(set(given) - set(cls.model_fields)) if isinstance(given, dict) else []
        if unknown:
            near = get_close_matches(unknown[0], cls.model_fields, n=1)
            hint = f", did you mean {near[0]!r}?" if near else ";"
            known = ", ".join(cls.model_fields)
            raise PydanticCustomError(
                "unknown_field",
                "{text}",
                {"text": f"there is no field {unknown[0][:80]!r}{hint} the fields are {known}"},
            )
        return given

    @classmethod
    def _present_name(cls, name: str, given: Container[str]) -> str:
        present = FORMER_FIELDS.get(name)
        return present if present in cls.model_fields and present not in given else name


class ModelUseBody(Body):
    """Use of a model: its parts, images of its prompts, and permission to run its code."""

    text_only: bool = Field(default=False, description=h.TEXT_ONLY)
    images: int = Field(default=0, ge=0, le=MAX_IMAGES, description=h.IMAGES)
    image_tokens: int | None = Field(default=None, ge=1, le=MAX_IMAGE_TOKENS, description=h.IMAGE_TOKENS)
    trust_remote_code: bool = Field(default=False, description=h.TRUST_REMOTE_CODE)

    @property
    def use(self) -> ModelUse:
        """The core's type.

        Raises:
            ConfigError: fields that contradict each other.
        """
        return ModelUse(
            text_only=self.text_only,
            images=self.images,
            image_tokens=self.image_tokens,
            trust_remote_code=self.trust_remote_code,
        )
