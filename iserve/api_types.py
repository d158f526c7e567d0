"""Requests for plans, deployments and checks: one value from command line and REST API to planner and store.

A field is an option of the command line and a field of the REST body, both described by the field's own text; a
text that is made of a registry is the ``description`` in the field's metadata.
Imported for every ``--help``, so what is heavy is imported only when it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from fingerprint.config import ADAPTER_RANKS, MAX_DELTA_MIB, SlotFormat, Workload
from fingerprint.engines import TRAITS
from fingerprint.errors import ConfigError
from fingerprint.model_use import MAX_IMAGE_TOKENS, MAX_IMAGES, ModelUse
from fingerprint.sanitize import is_plain
from placement.policies import ILP, JOINT, POLICIES
from placement.scaling import MIN_IDLE_S
from planner.intent import (
    MAX_REPLICAS,
    MAX_VARIANTS,
    MOST_WINDOWS,
    CostModel,
    Intent,
    IntentKind,
    Quality,
    Slo,
    Traffic,
)

if TYPE_CHECKING:
    from daemon.engine_options import EngineOptions
    from iserve.planning.pipeline import PlanOptions

__all__ = [
    "FORMER_FIELDS",
    "IDEMPOTENCY_KEY",
    "MAX_LABEL",
    "MAX_TEXT",
    "DeployBody",
    "ExpectedDeployment",
    "LaunchBody",
    "PlanBody",
    "PlanRequest",
    "ReplicatedRequest",
    "VerifyBody",
    "check_idempotency_key",
    "check_label",
    "check_name",
    "check_reject_late",
]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
IDEMPOTENCY_KEY = "^[!-~]{1,200}$"  # pattern of the header
MAX_TEXT = 4096
# Former names of fields, accepted for one release in a body that has the field by its present name.
FORMER_FIELDS = {
    "expect": "expected_deployments",
    "rates": "relative_rates",
    "refuse_late": "reject_late",
}
_TEXT = {"min_length": 1, "max_length": MAX_TEXT}  # as pydantic reads it
_POLICY = (
    f"Placement policy: {JOINT} (configuration, replicas and devices together, by the load), "
    f"{', '.join(POLICIES)} or {ILP}; else that of ISERVE_POLICY."
)


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


@dataclass(frozen=True, kw_only=True)
class ExpectedDeployment:
    """Deployment that is to follow: its model, and its rate where that is known."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - no field

    model: str = field(metadata=_TEXT)
    """Model folder, Hugging Face id or registered name."""
    rate_per_s: float | None = None
    """Requests per second; None: not known."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("an expected deployment needs the name of its model")
        if self.rate_per_s is not None and not 0 < self.rate_per_s < math.inf:
            raise ConfigError(f"the rate of {self.model} must be a positive, finite number, got {self.rate_per_s}")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Intent with its limits, and the requests that are planned for."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - no field

    intent: IntentKind = Intent().kind
    """Goal of the choice."""
    cost: CostModel = Intent().cost_model
    """Cost model: what a request costs."""
    slo: Slo | None = None
    """Latency limits; None: none."""
    percentile: float = Intent().percentile
    """Percentage of the requests that must keep each limit of the SLO, when a rate is given."""
    rate_per_s: float | None = None
    """Requests per second to be served. Policy joint plans replicas, GPUs and memory for it; with another policy
    give a batch, else 1 at once is planned for and served."""
    burstiness: float = Traffic().burstiness
    """Coefficient of variation of the gaps between requests; 1: Poisson."""
    input_cv: float = Traffic().input_cv
    """Coefficient of variation of the prompts' lengths."""
    output_cv: float = Traffic().output_cv
    """Coefficient of variation of the answers' lengths."""
    relative_rates: tuple[float, ...] = field(default=(), metadata={"max_length": MOST_WINDOWS})
    """Rate of each window over the mean of all, which is 1; empty: the rate is constant."""
    rate_window_s: float = Traffic().window_s
    """Length of a window of `relative_rates` in seconds."""
    prefix_hits: float = Traffic().prefix_hits
    """Share of the prompts' tokens that the engine's prefix cache holds, from 0 to below 1."""
    draft_acceptance: float = Traffic().draft_acceptance
    """Share of n-gram drafts that are accepted, of those whose predecessors were, from 0 to below 1; with it
    speculative decoding by n-grams is part of the choice. 0: not known, and it is not used."""
    quality: Quality = Intent().quality
    """Change of answers that is allowed: exact (16 bits only), near (int8 and fp8 too), any (everything)."""
    budget: float | None = None
    """Most a request may cost, in the cost's unit."""
    input_tokens: int = Workload().input_tokens
    """Prompt length to plan for, in tokens."""
    output_tokens: int = Workload().output_tokens
    """Answer length to plan for, in tokens."""
    context_tokens: int | None = field(default=None, metadata={"ge": 1})
    """Tokens of the longest request that is taken, prompt and answer together; else the model's most, or what
    memory holds."""
    batch: int | None = None
    """Requests at once, planned for and served at most; else 1 is planned for, and as many are served as memory
    holds, up to 256 (with a rate and another policy than joint: 1)."""
    expected_deployments: int = field(default=0, metadata={"ge": 0})
    """Deployments that the cluster is to hold in all, this one among them, for which policy joint leaves GPUs and
    memory; another policy refuses it. 0: no more than there are."""
    expected_models: tuple[ExpectedDeployment, ...] = field(default=(), metadata={"max_length": 64})
    """Deployments that are to follow, by model, with this one's lengths: policy joint leaves them the GPUs and
    memory that suit all best."""
    engine: str = field(
        default="auto", metadata={"description": f"Inference engine: {', '.join(TRAITS)} or auto."}
    )
    policy: str | None = field(default=None, metadata={"description": _POLICY})

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Callable[[Any], Any]) -> Any:
        from pydantic_core.core_schema import no_info_before_validator_function

        return no_info_before_validator_function(cls._by_present_names, handler(source))

    @classmethod
    def _by_present_names(cls, given: object) -> object:
        if not isinstance(given, dict):
            return given
        free = {one.name for one in fields(cls)} - given.keys()
        return {FORMER_FIELDS[n] if FORMER_FIELDS.get(n) in free else n: value for n, value in given.items()}

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON has them."""
        from fingerprint.codec import to_builtins

        default = to_builtins(type(self)())
        return {name: value for name, value in to_builtins(self).items() if value != default[name]}

    def options(self, *, default_policy: str, load_threshold: float, sees_load: bool = False) -> PlanOptions:
        """Return the planner's options, checked.

        Args:
            sees_load: the placer is given what is deployed and its load, which look-ahead needs.

        Raises:
            ConfigError: a value out of its range.
        """
        from iserve.planning.pipeline import ExpectedSpec, PlanOptions
        from placement.placer_registry import check_placement

        policy = self.policy or default_policy
        check_placement(policy, sees_load=sees_load)
        return PlanOptions(
            intent=Intent(
                kind=self.intent,
                cost_model=self.cost,
                slo=self.slo,
                percentile=self.percentile,
                rate_per_s=self.rate_per_s,
                traffic=Traffic(
                    burstiness=self.burstiness,
                    input_cv=self.input_cv,
                    output_cv=self.output_cv,
                    relative_rates=self.relative_rates,
                    window_s=self.rate_window_s,
                    prefix_hits=self.prefix_hits,
                    draft_acceptance=self.draft_acceptance,
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
            policy=policy,
            load_threshold=load_threshold,
            expect=self.expected_deployments,
            expected_models=tuple(ExpectedSpec(one.model, one.rate_per_s) for one in self.expected_models),
            more_requests=self.batch is None,
            longer_requests=self.context_tokens is None,
        )


def _skew(popularity: str) -> float:
    """Return the exponent of Zipf's law that ``zipf:1.5`` or ``even``, also called ``uniform``, names.

    Raises:
        ConfigError: it is neither.
    """
    law, separator, exponent = popularity.partition(":")
    try:
        if law == "zipf" and separator:
            return float(exponent)
    except ValueError:
        pass
    if popularity in ("even", "uniform"):
        return 0.0
    raise ConfigError(
        f"the popularity of variants is zipf:EXPONENT, such as zipf:1.5, or even, got {popularity!r}"
    )


@dataclass(frozen=True, kw_only=True)
class ReplicatedRequest(PlanRequest):
    """Request for one or more replicas of a model, and the use of the model."""

    model: str | None = field(default=None, metadata=_TEXT)
    """Model folder, Hugging Face id or registered name; None: the bundled demo model."""
    replicas: int | None = field(default=None, metadata={"ge": 1, "le": MAX_REPLICAS})
    """Workers of the configuration, each on devices of its own; the rate is that of all together. Else as many as
    the load is worth where policy joint knows the rate or the expected deployments, or 1."""
    variants: int = field(default=0, metadata={"ge": 0, "le": MAX_VARIANTS})
    """LoRA variants of the model that clients will ask for, for which the engine is started with adapter slots;
    0: the base alone is served."""
    variant_rank: int = field(default=Traffic().variant_rank, metadata={"ge": 0, "le": ADAPTER_RANKS[-1]})
    """Largest rank of a LoRA adapter among them; 0 with a delta format: there is none."""
    delta_mib: int = field(default=0, metadata={"ge": 0, "le": MAX_DELTA_MIB})
    """Embedded engine: MiB of the largest delta of a full fine-tune among the variants, for which each slot has
    room then; 0: all are LoRA adapters."""
    delta_format: SlotFormat = SlotFormat.NONE
    """vLLM: format of the deltas of full fine-tunes among the variants, of which each slot then holds one."""
    variant_popularity: str = field(default="zipf:1", metadata={"max_length": 40})
    """Popularity of the variants: zipf:EXPONENT (the i-th is asked for i^-EXPONENT times as often as the first) or
    even."""
    base_share: float = Traffic().base_share
    """Requests for the base itself as a share of all, where it has variants: they need no adapter slot."""
    text_only: bool = False
    """vLLM: leave out a multimodal model's towers for images, video and sound."""
    images: int = field(default=0, metadata={"ge": 0, "le": MAX_IMAGES})
    """Images in each planned prompt, added to its text."""
    image_tokens: int | None = field(default=None, metadata={"ge": 1, "le": MAX_IMAGE_TOKENS})
    """Tokens of an image; else as config.json has it."""
    trust_remote_code: bool = False
    """vLLM: run Python code of the model's repository (auto_map) as the daemon's user. Read it first."""

    def __post_init__(self) -> None:
        _ = self.use  # checked

    @property
    def use(self) -> ModelUse:
        """Use of the model.

        Raises:
            ConfigError: fields that contradict each other.
        """
        return ModelUse(
            text_only=self.text_only,
            images=self.images,
            image_tokens=self.image_tokens,
            trust_remote_code=self.trust_remote_code,
        )

    def options(self, *, default_policy: str, load_threshold: float, sees_load: bool = False) -> PlanOptions:
        found = super().options(default_policy=default_policy, load_threshold=load_threshold, sees_load=sees_load)
        traffic = replace(
            found.intent.traffic,
            variants=self.variants,
            variant_rank=self.variant_rank or (0 if self.variants else Traffic().variant_rank),
            delta_mib=self.delta_mib if self.variants else 0,
            delta_format=self.delta_format if self.variants else SlotFormat.NONE,
            variant_skew=_skew(self.variant_popularity),
            base_share=self.base_share,
        )
        intent = replace(found.intent, traffic=traffic)
        return replace(found, intent=intent, replicas=self.replicas or 1, more_replicas=self.replicas is None)


@dataclass(frozen=True, kw_only=True)
class PlanBody(ReplicatedRequest):
    """``POST /api/v1/plans``: choose, start nothing."""

    gpus: str | None = field(default=None, metadata=_TEXT)
    """Devices to plan for, such as `a6000:8`; None: those that are free here."""


@dataclass(frozen=True, kw_only=True)
class _EngineOptions(ReplicatedRequest):
    """Options that a deployment gives to the engine itself."""

    name: str | None = field(default=None, metadata=_TEXT)
    """Name that clients give as `model`; else the model's own name."""
    engine_args: dict[str, str | None] = field(default_factory=dict, metadata={"max_length": 64})
    """Options of the engine's own server, name to value; a value of None makes a flag."""
    tool_call_parser: str | None = None
    """vLLM: format in which the model writes tool calls, such as hermes."""
    reasoning_parser: str | None = None
    """vLLM: format in which the model marks its reasoning, such as qwen3."""

    @property
    def engine_options(self) -> EngineOptions:
        """The daemon's type.

        Raises:
            ConfigError: a name or value that cannot be one.
        """
        from daemon.engine_options import EngineOptions

        return EngineOptions(
            arguments=tuple(self.engine_args.items()),
            tool_call_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            use=self.use,
        )


@dataclass(frozen=True, kw_only=True)
class LaunchBody(_EngineOptions, PlanBody):
    """``POST /api/v1/plans/launch``: what a deploy would start; nothing is started."""


@dataclass(frozen=True, kw_only=True)
class DeployBody(_EngineOptions):
    """``POST /api/v1/deployments``: the model, the intent and the limits of a deployment."""

    scale_to_zero_s: float | None = field(default=None, metadata={"ge": MIN_IDLE_S, "le": 31_536_000})
    """Idle seconds after which the workers end; the next request starts them again. Left out: they stay."""
    reject_late: bool = False
    """Answer 503 at once to a request that would miss the SLO, in place of a late answer."""
    engine_version: str | None = field(default=None, metadata=_TEXT)
    """Installed release of the engine, such as 0.33.0; None: the one that workers start with."""

    def options(self, *, default_policy: str, load_threshold: float, sees_load: bool = False) -> PlanOptions:
        found = super().options(default_policy=default_policy, load_threshold=load_threshold, sees_load=sees_load)
        check_reject_late(self.reject_late, found.intent.slo)
        # Lateness is forecast with the plan's times, which are of the planned number of requests at once.
        return replace(found, more_requests=found.more_requests and not self.reject_late)

    @property
    def launch(self) -> LaunchBody:
        """The same request for what a deploy would start."""
        shared = {one.name for one in fields(LaunchBody)} & {one.name for one in fields(self)}
        return LaunchBody(**{name: getattr(self, name) for name in shared})


@dataclass(frozen=True, kw_only=True)
class VerifyBody(PlanRequest):
    """``POST /api/v1/verifications``: check a deployment that runs, or ``model`` in one that is launched for it.

    A deployment is checked under what it was planned for; nothing that differs from that may be given.
    """

    model: str | None = field(default=None, metadata=_TEXT)
    """Model to launch for the check: folder, Hugging Face id or registered name; None: that of `deployment`, else
    the bundled demo model."""
    deployment: str | None = field(default=None, metadata=_TEXT)
    """Running deployment to check; None: a worker of `model` is launched for it."""
    trust_remote_code: bool = False
    """vLLM: run Python code of the model's repository (auto_map) as the daemon's user. Read it first."""
    max_seconds: float = field(default=60.0, metadata={"gt": 0, "le": 3600})
    """Time budget of the check in seconds."""

    def options(self, *, default_policy: str, load_threshold: float, sees_load: bool = False) -> PlanOptions:
        found = super().options(default_policy=default_policy, load_threshold=load_threshold, sees_load=sees_load)
        return replace(found, more_requests=False, longer_requests=False)  # what is predicted is what is checked
