"""Answers of the REST API: what the controller says of models, deployments, nodes, engines, events and keys."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.status import DeviceStatus
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Quantity
from fingerprint.interconnect import MeasuredLinks
from iserve.quality.document import QualityDocument

__all__ = [
    "DeploymentDocument",
    "EngineDocument",
    "EventDocument",
    "KeyDocument",
    "LogDocument",
    "MergeAdviceDocument",
    "ModelDocument",
    "NewKeyDocument",
    "NodeDocument",
    "Problem",
    "ProfileJobDocument",
    "ProgressDocument",
    "ReplicaDocument",
    "VariantCostDocument",
    "VariantDocument",
    "VariantPlaceDocument",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressDocument:
    """Progress of a running step; ``done`` of ``total`` pieces."""

    step: str
    """Step that runs now, in words."""
    done: int
    """Pieces of the step that are done."""
    total: int
    """Pieces of the step in all."""
    elapsed_s: float
    """Seconds since the step began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaDocument:
    """Worker of a deployment as it is now."""

    worker_id: str
    """Identifier of the worker."""
    status: str
    """State of the worker; `lost`: the daemon does not know it; `unreachable`: the daemon does not answer."""
    device_ids: tuple[str, ...]
    """Devices of the worker."""
    layers_per_stage: tuple[int, ...]
    """Hidden layers of each pipeline stage."""
    url: str | None
    """Worker's own address; None: not started yet."""
    restarts: int
    """Times that the worker was started again."""
    error: str | None
    """Reason why the worker does not serve; None: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineDocument:
    """Installation of an engine on the controller's machine, or an engine that has none there.

    ``source``: ``setting`` (the Python that a setting names), ``environment`` (made by `iserve engines install`)
    or ``here`` (iServe's own Python). ``verified``: ``run`` (on a GPU; torch on a CPU as well), ``read`` (in the
    release's sources) or ``unknown``.
    """

    engine: str
    """Engine's name: `torch`, `vllm` or `tensorrt-llm`."""
    version: str | None = None
    """Release that is installed; None: none."""
    python: str | None = None
    """Python interpreter of the installation; None: none."""
    source: str | None = None
    """Origin of the installation: `setting`, `environment` or `here`; None: none."""
    verified: str | None = None
    """Degree to which this release was checked: `run`, `read` or `unknown`; None: not installed."""
    is_used: bool = False
    """Whether workers start with this installation where a deployment asks for no version."""
    problem: str | None = None
    """Reason why no worker can start with it, and what to do; None: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentDocument:
    """Deployment as it is now.

    ``status``: ``accepted``, ``resolving``, ``profiling``, ``planning``, ``launching`` (the steps of a deploy);
    ``ready`` (a worker serves, of several replicas at least one: ``num_ready`` of ``num_replicas``),
    ``restarting``, ``unreachable`` (observed of its workers); ``scaled-to-zero`` (no request for
    ``scale_to_zero_s``: its workers have ended; ``error``: why the last try to start them again failed),
    ``scaling-up`` (they start again); ``draining``, ``replacing`` (the steps of an update that stops first),
    ``restoring`` (its new workers did not start, the former ones start again); ``refused`` (nothing is
    feasible), ``failed`` (``error`` says why), ``removing``.
    """

    name: str
    """Deployment's name, which clients give as `model`."""
    model: str
    """Model that is served, as it was given."""
    intent: str
    """Intent that the configuration was chosen for."""
    status: str
    """State of the deployment; the values are listed in the description of DeploymentDocument."""
    error: str | None
    """Reason of a failure; None: none."""
    base_url: str | None
    """Address of the OpenAI API; None: the gateway is not up yet."""
    config: DeploymentConfig | None
    """Configuration that was chosen; None: not chosen yet."""
    layers_per_stage: tuple[int, ...]
    """Hidden layers of each pipeline stage of the first replica."""
    device_ids: tuple[str, ...]
    """Devices of all replicas."""
    worker_url: str | None
    """Address of the first replica's worker; None: not started yet."""
    restarts: int
    """Times that workers were started again, over all replicas."""
    created_at: float
    """Time of the request, in seconds since the epoch; tells this deployment from former ones of its name."""
    progress: ProgressDocument | None = None
    """Step that is under way; None: none."""
    scale_to_zero_s: float | None = None
    """Idle seconds after which the workers end; None: they stay."""
    num_replicas: int = 1
    """Number of replicas asked for."""
    num_ready: int = 0
    """Number of replicas that serve."""
    rejects_late: bool = False
    """Whether the gateway answers 503 to a request that would miss the SLO."""
    replicas: tuple[ReplicaDocument, ...] = ()
    """Replicas that were chosen, one worker each."""
    updating: bool = False
    """Whether new workers are being prepared; the present ones serve until then."""
    variant: str | None = None
    """Variant whose merged checkpoint is served; None: `model` is served as it was given."""
    base: str | None = None
    """Model that the variant is merged into, as it was named; None: no variant is, or it was removed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileJobDocument:
    """A profile that is being taken, or was."""

    job_id: str
    """Identifier of the job."""
    model: str
    """Model that is profiled."""
    status: str
    """State of the job: `running`, `done` or `failed`."""
    error: str | None
    """Reason of a failure; None: none."""
    progress: ProgressDocument | None
    """Step that is under way; None: none."""
    engine: str | None = None
    """Engine that is profiled; None: not chosen yet."""
    notes: tuple[str, ...] = ()
    """Reasons for the choice of the engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeDocument:
    """State of one machine as its daemon reports it."""

    node_id: str
    """Identifier of the node."""
    reachable: bool
    """Whether the node's daemon answers."""
    observed_at: float
    """Time of the observation, in seconds since the epoch."""
    devices: tuple[DeviceStatus, ...]
    """Devices of the node, with their free memory and load."""
    num_workers: int
    """Number of workers on the node."""
    driver: str | None = None
    """Version of the GPUs' driver; None: no GPU."""
    interconnect: tuple[MeasuredLinks, ...] = ()
    """Measured times of groups of 2, 4 and 8 of the GPUs; empty: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDocument:
    """Model that is bundled or registered."""

    name: str
    """Name under which the model is registered."""
    directory: str
    """Folder of the checkpoint or of its config.json."""
    family: str
    """Value of `model_type` in config.json, such as `llama`."""
    num_layers: int
    """Number of hidden layers."""
    num_params: int
    """Number of parameters."""
    has_weights: bool
    """Whether the folder has weights; without them the model can be planned, not deployed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeAdviceDocument:
    """Advice to merge the hottest variants of a base into models with deployments of their own."""

    variants: int
    """Number of variants to merge, the most popular ones."""
    names: tuple[str, ...]
    """Names of these variants; empty of a plan, whose variants have none."""
    request_share: float
    """Share of the requests that are theirs."""
    rate_per_s: float
    """Requests per second of base and variants together."""
    gpus_held_on_slots: float | None
    """GPUs held with all variants on adapter slots, each by the larger of its memory and its busy share, in
    replicas for 1.5 times the rate; of use next to the next one only: a plan holds more, for up to 2.5 times.
    None: no number of replicas serves the rate."""
    gpus_held_merged: float
    """GPUs held with these variants merged and the rest on slots, counted alike."""
    gpu_s_per_request_on_slots: float | None
    """GPU-seconds that are held for each completed request, with all variants on adapter slots; None as before."""
    gpu_s_per_request_merged: float
    """GPU-seconds that are held for each completed request, with these variants merged."""
    commands: tuple[str, ...]
    """Commands that merge and deploy each of them; of a plan, ADAPTER and OUT are folders."""
    text: str
    """Advice in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantCostDocument:
    """Costs of a variant on a deployment that can serve it, against the base on an engine without slots."""

    deployment: str
    """Name of the deployment."""
    engine: str
    """Engine of the deployment."""
    requests: int
    """Requests of a decode step, all of this variant: as many as the deployment was planned for."""
    prompt_tokens: int
    """Tokens of a prompt, as the deployment was planned for."""
    step_s: Quantity | None
    """Seconds that are added to such a decode step; None: not known before `iserve profile --rank`."""
    prompt_s: Quantity | None
    """Seconds that are added to such a prompt by itself; None: likewise."""
    slot_bytes: int
    """Bytes of its slot on each GPU, which the deployment reserved; those of the largest stage."""
    host_bytes: int
    """Bytes of the host's memory at each worker that has it loaded; 0: it is kept on the GPUs."""
    disk_bytes: int
    """Bytes of its tensors' files."""
    load_s: float | None
    """Seconds of a load from the page cache; None: not known."""
    load_stops_steps: bool
    """Whether its worker decodes nothing during a load."""
    text: str
    """Costs in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantPlaceDocument:
    """Place of a variant at a worker."""

    deployment: str
    """Name of the deployment."""
    worker_id: str
    """Identifier of the worker."""
    place: str
    """`gpu`; `host`: in the worker's memory, and copied to the GPU when it is asked for; `loading`: on the way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantDocument:
    """LoRA adapter or delta of a full fine-tune that is registered as a variant of a base model."""

    name: str
    """Variant's name, which clients give as `model`."""
    base: str
    """Base model, as it was named."""
    base_directory: str
    """Folder of the base model."""
    content_hash: str
    """Hash of all that changes answers: names and values of the tensors, and their scale."""
    engine_name: str
    """Name of the variant at the engines, which changes with its content."""
    rank: int
    """Largest rank of its updates; 0: it is a delta."""
    num_modules: int
    """Number of matrices that it updates, of a delta of tensors that differ from the base's."""
    size_bytes: int
    """Bytes of its tensors."""
    new_bytes: int | None
    """Bytes of the tensors that no variant had before; None: not asked when it was added."""
    disk_bytes: int
    """Bytes of its tensors' files, of a delta packed where that saves; one that variants share counts for each."""
    trained_on: str | None
    """Base model that the adapter's configuration names; not checked."""
    pinned: bool
    """Whether workers load it at once and keep it loaded."""
    created_at: float
    """Time of its registration, in seconds since the epoch."""
    deployments: tuple[str, ...]
    """Deployments that can serve it, the oldest first; the first one does. One of its name serves it merged."""
    why_not_served: str | None
    """Reason why no deployment serves it, with the way out; None: one does."""
    in_force: bool | None = None
    """Whether the gateway has this change, for which 10 s are waited; None: no change, or no deployment for it."""
    quality: tuple[QualityDocument, ...] = ()
    """Results of `iserve quality` on its present content and base, newest first; empty of a list."""
    made_of: str | None = None
    """Method of the adapter that its delta was made of, and what no engine serves of it; None: none, or a list."""
    places: tuple[VariantPlaceDocument, ...] = ()
    """Workers that have it now, as the gateway counts; empty of an answer to a change."""
    on_disk: bool = True
    """Whether this home has its tensors; else it has to be added again."""
    costs: tuple[VariantCostDocument, ...] = ()
    """Costs on each of its deployments, the one that serves it first; empty of a list."""
    base_warning: str | None = None
    """Warning that the adapter's configuration names another base than the one it fits; None: none, or a list."""
    merge_advice: MergeAdviceDocument | None = None
    """Advice on its deployment's variants, by the last 120 s; None: none, or a list was asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogDocument:
    """A part of a worker's log; the next part is behind ``position``."""

    text: str
    """Part of the log."""
    position: str | None
    """Position behind this part, to be given with the next request; None: no worker has printed anything yet."""
    created_at: float
    """Time at which the deployment was requested: another deployment may have its name by the next part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventDocument:
    """Event of the installation."""

    id: int
    """Number of the event, which grows."""
    at: float
    """Time of the event, in seconds since the epoch."""
    kind: str
    """Kind of event, such as `accepted`, `ready` or `failed`."""
    message: str
    """Event in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyDocument:
    """API key as it is listed, without its secret."""

    key_id: str
    """Identifier of the key, which is no secret."""
    label: str
    """Label that was given to the key."""
    scope: str
    """Scope of the key: `admin` or `inference`."""
    created_at: float
    """Time of creation, in seconds since the epoch."""
    revoked: bool
    """Whether the key was revoked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewKeyDocument:
    """Returned once; the key itself is never stored."""

    key_id: str
    """Identifier of the key, which is no secret."""
    key: str
    """API key itself, reported here and never again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Error: its class, and one line that says what was asked, what is true and what to change."""

    error: str
    """Class of the error, such as `NotFoundError`."""
    message: str
    """One line to show to a person."""
    is_busy: bool = False
    """Whether too many requests wait already: the same request can succeed after a pause. Left out where not."""
