"""Bodies of the REST API: what comes in (pydantic, unknown fields refused) and what goes out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from daemon.engines.options import EngineOptions
from daemon.status import DeviceStatus
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.model_use import MAX_IMAGE_TOKENS, MAX_IMAGES
from fingerprint.plain_text import UNPRINTABLE, is_plain
from fingerprint.profile_plan import Shards
from iserve.planning.making import MAX_REPLICAS, PlanOptions
from iserve.request_body import Body, ModelUseBody
from placement.placers import check_placement
from placement.scaling import MIN_IDLE_S
from planner.intent import MOST_WINDOWS, CostModel, Intent, IntentKind, Quality, Slo, Traffic

__all__ = [
    "ARGUMENTS_NOTE",
    "IDEMPOTENCY_KEY",
    "DeployBody",
    "DeploymentDocument",
    "EngineDocument",
    "EventDocument",
    "KeyBody",
    "KeyDocument",
    "LaunchBody",
    "LogDocument",
    "ModelBody",
    "ModelDocument",
    "NewKeyDocument",
    "NodeDocument",
    "PlanBody",
    "ProfileBody",
    "ProfileJobDocument",
    "ProgressDocument",
    "ReplicaDocument",
    "UpdateBody",
    "VerifyBody",
    "check_idempotency_key",
    "check_label",
    "check_name",
    "check_refuse_late",
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


def check_refuse_late(refuse_late: bool, slo: Slo | None) -> None:
    """Raises ConfigError: nothing says what is late."""
    if refuse_late and slo is None:
        raise ConfigError(
            "refusing late requests needs to know what is late; give the limits in seconds, such as "
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
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class _Wish(Body):
    intent: IntentKind = IntentKind.MIN_COST
    cost: CostModel = CostModel.MEMORY_LATENCY
    slo: SloBody | None = None
    percentile: float = Intent().percentile
    rate_per_s: float | None = None
    burstiness: float = Traffic().burstiness
    input_cv: float = Traffic().input_cv
    output_cv: float = Traffic().output_cv
    rates: list[float] = Field(default_factory=list, max_length=MOST_WINDOWS)  # over their mean, window by window
    rate_window_s: float = Traffic().window_s
    quality: Quality = Quality.NEAR
    budget: float | None = None
    input_tokens: int = Workload().input_tokens
    output_tokens: int = Workload().output_tokens
    context_tokens: int | None = Field(default=None, ge=1)  # of the longest request taken; None: as memory allows
    batch: int | None = None  # requests at once; None: one is planned for, as many as memory allows are served
    expect: int = Field(default=0, ge=0)  # deployments to be held in all; 0: no more than there are
    engine: str = "auto"
    policy: str | None = None  # None: the installation's

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
                    rates=tuple(self.rates),
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
            expect=self.expect,
            more_requests=self.batch is None,
            longer_requests=self.context_tokens is None,
        )


class _ReplicatedWish(_Wish):
    replicas: int = Field(default=1, ge=1, le=MAX_REPLICAS)  # each on devices of its own; the rate is of all

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        return replace(wish, replicas=self.replicas)


ARGUMENTS_NOTE = "what --engine-arg changes is in no figure of this plan"


class _EngineOptions(ModelUseBody):
    """What a deployment gives to the engine itself."""

    engine_args: dict[str, str | None] = Field(default_factory=dict, max_length=64)  # null: a flag without a value
    tool_call_parser: str | None = None  # of vLLM, such as hermes; answers then have ``tool_calls``
    reasoning_parser: str | None = None  # of vLLM, such as qwen3; answers then have ``reasoning``

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

    model: _Text | None = None  # None: the bundled demo model
    gpus: _Text | None = None  # "a6000:8"; None: the devices that are free here


class LaunchBody(PlanBody, _EngineOptions):
    """``POST /api/v1/plans/launch``: what a deploy would start; nothing is started."""

    name: _Text | None = None  # what clients would put in ``model``; None: the model's own name


class DeployBody(_ReplicatedWish, _EngineOptions):
    """``POST /api/v1/deployments``."""

    model: _Text | None = None
    name: _Text | None = None  # what clients put in ``model``; None: the model's own name
    scale_to_zero_s: float | None = Field(default=None, ge=MIN_IDLE_S, le=31_536_000)  # idle; None: it stays
    refuse_late: bool = False  # the gateway answers 503 at once to a request that would miss the SLO
    engine_version: _Text | None = None  # such as 0.33.0; None: the one that is installed

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        check_refuse_late(self.refuse_late, wish.intent.slo)
        # Who is late is forecast with the plan's times, which are of the planned number of requests at once.
        return replace(wish, more_requests=wish.more_requests and not self.refuse_late)


_NEVER_NULL = (
    *("model", "intent", "replicas", "input_tokens", "output_tokens", "engine_args"),
    *("text_only", "images", "trust_remote_code"),
)


class UpdateBody(Body):
    """``PATCH /api/v1/deployments/{name}``: changes of a deployment; what is left out stays as it is."""

    model: _Text | None = None
    intent: IntentKind | None = None
    slo: SloBody | None = None  # null: none any more
    replicas: int | None = Field(default=None, ge=1, le=MAX_REPLICAS)
    batch: int | None = None  # null: as many as memory allows
    context_tokens: int | None = Field(default=None, ge=1)  # null: as long as memory allows
    input_tokens: int | None = None
    output_tokens: int | None = None
    engine_version: _Text | None = None  # null: the one that is installed
    engine_args: dict[str, str | None] | None = Field(default=None, max_length=64)  # in place of those before
    tool_call_parser: str | None = None  # null: none
    reasoning_parser: str | None = None  # null: none
    text_only: bool | None = None
    images: int | None = Field(default=None, ge=0, le=MAX_IMAGES)
    image_tokens: int | None = Field(default=None, ge=1, le=MAX_IMAGE_TOKENS)  # null: as config.json has it
    trust_remote_code: bool | None = None  # permission ends with another ``model``, unless it is given with it
    stop_first: bool = False  # the former workers end before the new ones start; requests wait meanwhile

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
        return DeployBody.model_validate(wish.model_dump() | changes), tuple(given)


class ProfileBody(Body):
    """``POST /api/v1/profiles``."""

    model: _Text | None = None
    engine: str = "auto"
    max_seconds: float = Field(default=60.0, gt=0, le=86_400)
    quality: Quality = Quality.NEAR  # an engine that starts anew for each format measures only what this allows
    trust_remote_code: bool = False  # the engine may run Python code of the model, as the daemon's user
    shards: Shards = Shards.AUTO  # degrees that are run as one tensor-parallel rank on one GPU
    input_tokens: int = Workload().input_tokens
    output_tokens: int = Workload().output_tokens
    batch: int = Workload().batch


class VerifyBody(_Wish):
    """``POST /api/v1/verifications``: check a deployment that runs, or ``model`` in one that is launched for it.

    A deployment is checked under what it was planned for; nothing that differs from that may be given.
    """

    model: _Text | None = None
    deployment: _Text | None = None
    max_seconds: float = Field(default=60.0, gt=0, le=3600)

    def options(self, *, default_policy: str, load_threshold: float) -> PlanOptions:
        wish = super().options(default_policy=default_policy, load_threshold=load_threshold)
        return replace(wish, more_requests=False, longer_requests=False)  # what is predicted is what is checked


class ModelBody(Body):
    """``POST /api/v1/models``: give a checkpoint folder a name."""

    name: _Text
    directory: _Text


class KeyBody(Body):
    """``POST /api/v1/keys``."""

    label: Annotated[
        str,
        Field(json_schema_extra={"minLength": 1, "maxLength": MAX_LABEL, "pattern": f"^[^\\t\\n{UNPRINTABLE}]+$"}),
        AfterValidator(check_label),
    ] = "unnamed"
    scope: Annotated[str, StringConstraints(pattern="^(admin|inference)$")] = "inference"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressDocument:
    """How far a running step is; ``done`` of ``total`` pieces."""

    step: str
    done: int
    total: int
    elapsed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDocument:
    """One worker of a deployment as it is now."""

    worker_id: str
    status: str  # as its worker is seen; "lost": the daemon does not know it, "unreachable": the daemon is away
    device_ids: tuple[str, ...]
    layers_per_stage: tuple[int, ...]
    url: str | None
    restarts: int
    error: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDocument:
    """One installation of an engine on the controller's machine, or an engine that has none there.

    ``source``: ``setting`` (the Python that a setting names), ``environment`` (made by `iserve engines install`)
    or ``here`` (iServe's own Python). ``verified``: ``run`` (on a GPU; torch on a CPU as well), ``read`` (in the
    release's sources) or ``unknown``.
    """

    engine: str
    version: str | None = None
    python: str | None = None
    source: str | None = None
    verified: str | None = None
    is_used: bool = False  # workers are started with it, where a deployment asks for no version
    problem: str | None = None  # why no worker can be started with it, and what to do


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentDocument:
    """One deployment as it is now.

    ``status``: ``accepted``, ``resolving``, ``profiling``, ``planning``, ``launching`` (the steps of a deploy);
    ``ready`` (a worker serves, of several replicas at least one: ``num_ready`` of ``num_replicas``),
    ``restarting``, ``unreachable`` (observed of its workers); ``asleep`` (nobody called for
    ``scale_to_zero_s`` and its workers have ended; ``error``: why the last try to start them again came to
    nothing), ``waking`` (somebody did); ``draining``, ``replacing`` (the steps of an update that stops first),
    ``restoring`` (its new workers did not come up, the former ones start again); ``refused`` (nothing is
    feasible), ``failed`` (``error`` says why), ``removing``.
    """

    name: str
    model: str
    intent: str
    status: str
    error: str | None
    base_url: str | None  # of the OpenAI API, once there is a gateway
    config: DeploymentConfig | None
    layers_per_stage: tuple[int, ...]  # of the first replica
    device_ids: tuple[str, ...]  # of all replicas
    worker_url: str | None  # of the first replica
    restarts: int  # of all replicas
    created_at: float
    progress: ProgressDocument | None = None
    scale_to_zero_s: float | None = None
    num_replicas: int = 1  # asked for
    num_ready: int = 0
    refuses_late: bool = False  # the gateway answers 503 to who would miss the SLO
    replicas: tuple[ReplicaDocument, ...] = ()  # those that were chosen
    updating: bool = False  # new workers are being prepared; these serve until then


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileJobDocument:
    """A profile that is being taken, or was."""

    job_id: str
    model: str
    status: str  # "running" | "done" | "failed"
    error: str | None
    progress: ProgressDocument | None
    engine: str | None = None  # None: not chosen yet
    notes: tuple[str, ...] = ()  # on the choice of the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDocument:
    node_id: str
    reachable: bool
    observed_at: float
    devices: tuple[DeviceStatus, ...]
    num_workers: int
    driver: str | None = None  # version of the GPUs' driver


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDocument:
    name: str
    directory: str
    family: str
    num_layers: int
    num_params: int
    has_weights: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogDocument:
    """A part of a worker's log; the next part is behind ``position``."""

    text: str
    position: str | None  # None: no worker has printed anything yet
    created_at: float  # of the deployment: another deployment may have its name by the next part


@dataclass(frozen=True, kw_only=True, slots=True)
class EventDocument:
    id: int
    at: float
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyDocument:
    key_id: str
    label: str
    scope: str
    created_at: float
    revoked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKeyDocument:
    """Returned once; the key itself is never stored."""

    key_id: str
    key: str
