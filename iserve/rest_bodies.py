"""Bodies of the REST API that only the controller makes values of; unknown fields are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from fingerprint.config import ADAPTER_RANKS, MAX_DELTA_MIB, SlotFormat, Workload
from fingerprint.errors import ConfigError
from fingerprint.model_use import MAX_IMAGE_TOKENS, MAX_IMAGES
from fingerprint.profile_plan import Shards
from fingerprint.sanitize import UNPRINTABLE
from fingerprint.variant_measurements import VariantKind, asked_kind
from iserve.api_types import MAX_LABEL, MAX_TEXT, DeployBody, check_label
from planner.intent import MAX_REPLICAS, MAX_VARIANTS, IntentKind, Quality, Slo

__all__ = ["Body", "KeyBody", "ModelBody", "ProfileBody", "UpdateBody", "VariantBody", "VariantPinBody"]

_Text = Annotated[str, StringConstraints(min_length=1, max_length=MAX_TEXT)]


class Body(BaseModel):
    """Body whose fields without a text of their own are described as those of a deployment."""

    model_config = ConfigDict(extra="forbid")


_NEVER_NULL = (
    *("model", "intent", "replicas", "input_tokens", "output_tokens", "engine_args"),
    *("text_only", "images", "trust_remote_code", "variants", "variant_rank", "delta_mib", "variant_popularity"),
    *("base_share", "delta_format"),
)


class UpdateBody(Body):
    """``PATCH /api/v1/deployments/{name}``: changes of a deployment; what is left out stays as it is."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name."""
    intent: IntentKind | None = None
    slo: Slo | None = None
    """Latency limits; None removes them."""
    replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    batch: int | None = None
    """Most requests at once; None: as many as memory allows."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the longest request, prompt and answer together; None: as many as memory allows."""
    input_tokens: int | None = None
    output_tokens: int | None = None
    variants: int | None = Field(default=None, ge=0, le=MAX_VARIANTS)
    variant_rank: int | None = Field(default=None, ge=0, le=ADAPTER_RANKS[-1])
    delta_mib: int | None = Field(default=None, ge=0, le=MAX_DELTA_MIB)
    delta_format: SlotFormat | None = None
    variant_popularity: str | None = Field(default=None, max_length=40)
    base_share: float | None = None
    engine_version: _Text | None = None
    """Installed release of the engine; None: the one that workers start with."""
    engine_args: dict[str, str | None] | None = Field(default=None, max_length=64)
    """Options of the engine's own server, which replace all former ones."""
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    text_only: bool | None = None
    images: int | None = Field(default=None, ge=0, le=MAX_IMAGES)
    image_tokens: int | None = Field(default=None, ge=1, le=MAX_IMAGE_TOKENS)
    trust_remote_code: bool | None = None
    """Permission to run Python code of the model; another `model` ends it, unless it is given with that."""
    stop_first: bool = False
    """Whether the former workers end before the new ones start; requests wait meanwhile."""

    def applied_to(self, request: DeployBody) -> tuple[DeployBody, tuple[str, ...]]:
        """Return ``request`` with the changes, and the names of what changes.

        Raises:
            ConfigError: nothing is given, or null where a value is needed.
        """
        given = sorted(self.model_fields_set - {"stop_first"})
        if not given:
            known = sorted(set(type(self).model_fields) - {"stop_first"})
            raise ConfigError(f"nothing is changed; give at least one of {', '.join(known)}")
        for name in _NEVER_NULL:
            if name in given and getattr(self, name) is None:
                raise ConfigError(f"{name} must have a value; leave it out to keep what it is")
        changes = {name: getattr(self, name) for name in given}
        if changes.get("images") == 0:
            changes.setdefault("image_tokens", None)
        if changes.get("model", request.model) != request.model:
            changes.setdefault("trust_remote_code", False)  # it was given for the code of the former model
            changes.setdefault("image_tokens", None)  # they were those of the former model's images
        return replace(request, **changes), tuple(given)


class ProfileBody(Body):
    """``POST /api/v1/profiles``: what to measure, and for how long."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name; None: the bundled demo model."""
    engine: str = "auto"
    max_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Time budget of the profile in seconds."""
    quality: Quality = Quality.NEAR
    """Change of answers to measure for: an engine that starts anew for each format measures what it allows."""
    trust_remote_code: bool = False
    shards: Shards = Shards.AUTO
    """Tensor-parallel degrees that are measured as one rank alone on one GPU."""
    expert_parallel: bool = False
    """Whether to measure a mixture with expert parallelism as well, at tensor-parallel degrees above 1."""
    input_tokens: int = Workload().input_tokens
    output_tokens: int = Workload().output_tokens
    batch: int = Workload().batch
    """Largest batch to measure."""
    variant_rank: int = Field(default=0, ge=0, le=ADAPTER_RANKS[-1])
    """Rank of adapters whose memory, times and loads are measured as well; 0: none are."""
    delta_format: SlotFormat = SlotFormat.NONE
    """Format of deltas whose memory, times and loads are measured as well; `none`: none are."""

    def variant_kind(self) -> VariantKind | None:
        """Return the kind of variants to measure; None: none is.

        Raises:
            ConfigError: adapters and deltas are asked for, which are measured one after the other.
        """
        return asked_kind(self.variant_rank, self.delta_format)


class ModelBody(Body):
    """``POST /api/v1/models``: give a checkpoint folder a name."""

    name: _Text
    """Name to register: 1 to 63 letters, digits, `.`, `_` or `-`."""
    directory: _Text
    """Folder of the checkpoint or of its config.json, on the controller's machine."""


class VariantBody(Body):
    """``POST /api/v1/variants``: give a LoRA adapter a name that clients use next to its base."""

    name: _Text
    """Name to register: 1 to 63 letters, digits, `.`, `_` or `-`."""
    base: _Text
    """Base model of the adapter: folder, Hugging Face id, registered name, or name of a deployment of it."""
    path: _Text
    """Folder of the PEFT adapter on the controller's machine; its tensors are copied."""
    replace: bool = False
    """Whether the name, where it has other content already, is given this one."""
    pinned: bool = False
    """Whether workers load it at once and keep it loaded."""


class VariantPinBody(Body):
    """``PATCH /api/v1/variants/{name}``: change of a variant."""

    pinned: bool
    """Whether workers load it at once and keep it loaded."""


class KeyBody(Body):
    """``POST /api/v1/keys``: label and scope of a new API key."""

    label: Annotated[
        str,
        Field(json_schema_extra={"minLength": 1, "maxLength": MAX_LABEL, "pattern": f"^[^\\t\\n{UNPRINTABLE}]+$"}),
        AfterValidator(check_label),
    ] = "unnamed"
    """Label by which people recognise the key."""
    scope: Annotated[str, StringConstraints(pattern="^(admin|inference)$")] = "inference"
    """Permission of the key: `admin` for the REST API and models, `inference` for models alone."""
