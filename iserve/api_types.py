"""Bodies of requests to the REST API; unknown fields are refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from daemon.engine_options import EngineOptions
from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.model_use import MAX_IMAGE_TOKENS, MAX_IMAGES
from fingerprint.profile_plan import Shards
from fingerprint.sanitize import UNPRINTABLE, is_plain
from iserve import request_help as h
from iserve.planning.pipeline import MAX_REPLICAS, PlanOptions
from iserve.request_body import Body, ModelUseBody
from placement.placer_registry import check_placement
from placement.scaling import MIN_IDLE_S
from planner.intent import MOST_WINDOWS, CostModel, Intent, IntentKind, Quality, Slo, Traffic

__all__ = [
    "ARGUMENTS_NOTE",
    "IDEMPOTENCY_KEY",
    "DeployBody",
    "KeyBody",
    "LaunchBody",
    "ModelBody",
    "PlanBody",
    "ProfileBody",
    "UpdateBody",
    "VerifyBody",
    "check_idempotency_key",
    "check_label",
    "check_name",
    "check_reject_late",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
IDEMPOTENCY_KEY = "^[!-~]{1,200}$"  # pattern of the header
_Text = Annotated[str, StringConstraints(min_length=1, max_length=4096)]


def check_name(name: str) -> str:
    """``name`` if it can name a deployment or a model.

    Raises:
        ConfigError: otherwise.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"the name {name[:80]!r} must be 1 to 63 letters, digits, '.', '_' or '-', the first a letter or digit"
        )
    return name


def check_reject_late(reject_late: bool, slo: Slo | None) -> None:
    """Raises ConfigError: nothing says what is late."""
    if reject_late and slo is None:
        raise ConfigError(
            "rejecting late requests needs to know what is late; give the limits in seconds, such as "
            '--slo ttft=1,e2e=8 (slo: {"ttft_s": 1, "e2e_s": 8})'
        )


def check_idempotency_key(key: str) -> str:
    """``key`` if a request can be known by it.

    Raises:
        ConfigError: otherwise.
    """
    if not re.fullmatch(IDEMPOTENCY_KEY.strip("^$"), key):
        raise ConfigError(f"the key {key[:80]!r} must be 1 to 200 visible ASCII characters")
    return key


MAX_LABEL = 200


def check_label(label: str) -> str:
    """``label`` if people can be shown it.

    Raises:
        ConfigError: otherwise.
    """
    if not 1 <= len(label) <= MAX_LABEL or not is_plain(label):
        raise ConfigError(
            f"the label {label[:80]!r} must be one line of 1 to {MAX_LABEL} characters, none of them a control "
            "character or mark of direction"
        )
    return label


class SloBody(Body):
    """Latency limits, of which at least one is given."""

    ttft_s: float | None = None
    """Limit of the time to first token in seconds; None: not limited."""
    tpot_s: float | None = None
    """Limit of the time per output token in seconds; None: not limited."""
    e2e_s: float | None = None
    """Limit of the time of a whole request in seconds; None: not limited."""


class _Wish(Body):
    intent: IntentKind = Field(default=IntentKind.MIN_COST, description=h.INTENT)
    cost: CostModel = Field(default=CostModel.MEMORY_LATENCY, description=h.COST)
    slo: SloBody | None = None
    """Latency limits; None: none."""
    percentile: float = Field(default=Intent().percentile, description=h.PERCENTILE)
    rate_per_s: float | None = Field(default=None, description=h.RATE)
    burstiness: float = Field(default=Traffic().burstiness, description=h.BURSTINESS)
    input_cv: float = Field(default=Traffic().input_cv, description=h.INPUT_CV)
    output_cv: float = Field(default=Traffic().output_cv, description=h.OUTPUT_CV)
    relative_rates: list[float] = Field(default_factory=list, max_length=MOST_WINDOWS)
    """Rate of each window over the mean of all, which is 1; empty: the rate is constant."""
    rate_window_s: float = Traffic().window_s
    """Length of a window of `relative_rates` in seconds."""
    quality: Quality = Field(default=Quality.NEAR, description=h.QUALITY)
    budget: float | None = Field(default=None, description=h.BUDGET)
    input_tokens: int = Field(default=Workload().input_tokens, description=h.INPUT_TOKENS)
    output_tokens: int = Field(default=Workload().output_tokens, description=h.OUTPUT_TOKENS)
    context_tokens: int | None = Field(default=None, ge=1, description=h.CONTEXT)
    batch: int | None = Field(default=None, description=h.BATCH)
    expected_deployments: int = Field(default=0, ge=0, description=h.EXPECTED_DEPLOYMENTS)
    engine: str = Field(default="auto", description=h.ENGINE)
    policy: str | None = Field(default=None, description=h.POLICY)

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        """The core's types.

        Raises:
            ConfigError: a value out of its range.
        """
        slo = self.slo
        check_placement(self.policy or default_policy, sees_load=False)  # the controller does not tell the load
        return PlanOptions(
            intent=Intent(
                kind=self.intent,
                cost_model=self.cost,
                slo=None if slo is None else Slo(ttft_s=slo.ttft_s, tpot_s=slo.tpot_s, e2e_s=slo.e2e_s),
                percentile=self.percentile,
                rate_per_s=self.rate_per_s,
                traffic=Traffic(
                    burstiness=self.burstiness,
                    input_cv=self.input_cv,
                    output_cv=self.output_cv,
                    relative_rates=tuple(self.relative_rates),
                    window_s=self.rate_window_s,
                ),
                quality=self.quality,
                budget=self.budget,
            ),
            workload=Workload(
                batch=Workload().batch if self.batch is None else self.batch,
                input_tokens=self.input_tokens,
                output_tokens=self.output_tokens,
                longest_tokens=self.context_tokens or 0,
            ),
            policy=self.policy or default_policy,
            load_threshold=load_threshold,
            expect=self.expected_deployments,
            more_requests=self.batch is None,
            longer_requests=self.context_tokens is None,
        )


class _ReplicatedWish(_Wish):
    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS, description=h.REPLICAS)

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        return replace(wish, replicas=self.replicas)


ARGUMENTS_NOTE = "what --engine-arg changes is in no figure of this plan"


class _EngineOptions(ModelUseBody):
    """Options that a deployment gives to the engine itself."""

    engine_args: dict[str, str | None] = Field(default_factory=dict, max_length=64)
    """Options of the engine's own server, name to value; a value of None makes a flag."""
    tool_call_parser: str | None = Field(default=None, description=h.TOOL_CALL_PARSER)
    reasoning_parser: str | None = Field(default=None, description=h.REASONING_PARSER)

    @property
    def engine_options(self) -> EngineOptions:
        """The daemon's type.

        Raises:
            ConfigError: a name or value that cannot be one.
        """
        return EngineOptions(
            arguments=tuple(self.engine_args.items()),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            use=self.use,
        )


class PlanBody(_ReplicatedWish, ModelUseBody):
    """``POST /api/v1/plans``: choose, start nothing."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name; None: the bundled demo model."""
    gpus: _Text | None = None
    """Devices to plan for, such as `a6000:8`; None: those that are free here."""


class LaunchBody(PlanBody, _EngineOptions):
    """``POST /api/v1/plans/launch``: what a deploy would start; nothing is started."""

    name: _Text | None = Field(default=None, description=h.NAME)


class DeployBody(_ReplicatedWish, _EngineOptions):
    """``POST /api/v1/deployments``: the model, the intent and the limits of a deployment."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name; None: the bundled demo model."""
    name: _Text | None = Field(default=None, description=h.NAME)
    scale_to_zero_s: float | None = Field(
        default=None, ge=MIN_IDLE_S, le=31_536_000, description=f"{h.SCALE_TO_ZERO} null: they stay."
    )
    reject_late: bool = Field(default=False, description=h.REJECT_LATE)
    engine_version: _Text | None = None
    """Installed release of the engine, such as 0.33.0; None: the one that workers start with."""

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        check_reject_late(self.reject_late, wish.intent.slo)
        # Lateness is forecast with the plan's times, which are of the planned number of requests at once.
        return replace(wish, more_requests=wish.more_requests and not self.reject_late)


_NEVER_NULL = (
    *("model", "intent", "replicas", "input_tokens", "output_tokens", "engine_args"),
    *("text_only", "images", "trust_remote_code"),
)


class UpdateBody(Body):
    """``PATCH /api/v1/deployments/{name}``: changes of a deployment; what is left out stays as it is."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name."""
    intent: IntentKind | None = Field(default=None, description=h.INTENT)
    slo: SloBody | None = None
    """Latency limits; None removes them."""
    replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS, description=h.REPLICAS)
    batch: int | None = None
    """Most requests at once; None: as many as memory allows."""
    context_tokens: int | None = Field(default=None, ge=1)
    """Tokens of the longest request, prompt and answer together; None: as many as memory allows."""
    input_tokens: int | None = Field(default=None, description=h.INPUT_TOKENS)
    output_tokens: int | None = Field(default=None, description=h.OUTPUT_TOKENS)
    engine_version: _Text | None = None
    """Installed release of the engine; None: the one that workers start with."""
    engine_args: dict[str, str | None] | None = Field(default=None, max_length=64)
    """Options of the engine's own server, which replace all former ones."""
    tool_call_parser: str | None = Field(default=None, description=f"{h.TOOL_CALL_PARSER} null: none.")
    reasoning_parser: str | None = Field(default=None, description=f"{h.REASONING_PARSER} null: none.")
    text_only: bool | None = Field(default=None, description=h.TEXT_ONLY)
    images: int | None = Field(default=None, ge=0, le=MAX_IMAGES, description=h.IMAGES)
    image_tokens: int | None = Field(default=None, ge=1, le=MAX_IMAGE_TOKENS, description=h.IMAGE_TOKENS)
    trust_remote_code: bool | None = None
    """Permission to run Python code of the model; another `model` ends it, unless it is given with that."""
    stop_first: bool = False
    """Whether the former workers end before the new ones start; requests wait meanwhile."""

    def applied_to(self, wish: DeployBody) -> tuple[DeployBody, tuple[str, ...]]:
        """``wish`` with the changes, and the names of what changes.

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
        changes = self.model_dump(include=set(given))
        if changes.get("images") == 0:
            changes.setdefault("image_tokens", None)
        if changes.get("model", wish.model) != wish.model:
            changes.setdefault("trust_remote_code", False)  # it was given for the code of the former model
            changes.setdefault("image_tokens", None)  # they were those of the former model's images
        return DeployBody.model_validate(wish.model_dump() | changes), tuple(given)


class ProfileBody(Body):
    """``POST /api/v1/profiles``: what to measure, and for how long."""

    model: _Text | None = None
    """Model folder, Hugging Face id or registered name; None: the bundled demo model."""
    engine: str = Field(default="auto", description=h.ENGINE)
    max_seconds: float = Field(default=60.0, gt=0, le=86_400)
    """Time budget of the profile in seconds."""
    quality: Quality = Quality.NEAR
    """Change of answers to measure for: an engine that starts anew for each format measures what it allows."""
    trust_remote_code: bool = Field(default=False, description=h.TRUST_REMOTE_CODE)
    shards: Shards = Shards.AUTO
    """Tensor-parallel degrees that are measured as one rank alone on one GPU."""
    input_tokens: int = Field(default=Workload().input_tokens, description=h.INPUT_TOKENS)
    output_tokens: int = Field(default=Workload().output_tokens, description=h.OUTPUT_TOKENS)
    batch: int = Workload().batch
    """Largest batch to measure."""


class VerifyBody(_Wish):
    """``POST /api/v1/verifications``: check a deployment that runs, or ``model`` in one that is launched for it.

    A deployment is checked under what it was planned for; nothing that differs from that may be given.
    """

    model: _Text | None = None
    """Model to launch for the check: folder, Hugging Face id or registered name; None: that of `deployment`, else
    the bundled demo model."""
    deployment: _Text | None = None
    """Running deployment to check; None: a worker of `model` is launched for it."""
    trust_remote_code: bool = Field(default=False, description=h.TRUST_REMOTE_CODE)
    max_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Time budget of the check in seconds."""

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        return replace(wish, more_requests=False, longer_requests=False)  # what is predicted is what is checked


class ModelBody(Body):
    """``POST /api/v1/models``: give a checkpoint folder a name."""

    name: _Text
    """Name to register: 1 to 63 letters, digits, `.`, `_` or `-`."""
    directory: _Text
    """Folder of the checkpoint or of its config.json, on the controller's machine."""


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
