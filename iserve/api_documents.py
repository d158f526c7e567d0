"""Answers of the REST API: what the controller says of models, deployments, nodes, engines, events and keys."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.status import DeviceStatus
from fingerprint.config import DeploymentConfig

__all__ = [
    "DeploymentDocument",
    "EngineDocument",
    "EventDocument",
    "KeyDocument",
    "LogDocument",
    "ModelDocument",
    "NewKeyDocument",
    "NodeDocument",
    "ProfileJobDocument",
    "ProgressDocument",
    "ReplicaDocument",
]


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
