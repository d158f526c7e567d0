"""Messages between controller and gateway: the route table to serve from, and how much of it is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.admission import AdmissionPolicy

__all__ = [
    "DEMAND_PATH",
    "VARIANT_DEMAND_PATH",
    "ApiKeyRecord",
    "Demand",
    "DeploymentDemand",
    "GatewayLimits",
    "Route",
    "RouteTable",
    "VariantChange",
    "VariantDemand",
    "VariantPlace",
    "VariantRoute",
    "WorkerTarget",
]

DEMAND_PATH = "/internal/demand"  # of the gateway, for clients with the token of its record
VARIANT_DEMAND_PATH = "/internal/variant-demand"  # likewise


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTarget:
    worker_id: str
    url: str  # http://127.0.0.1:PORT
    ready: bool
    token: str | None = field(default=None, repr=False)  # the gateway sends it
    max_outstanding: int = (
        256  # requests sent to it at once; the rest wait in the gateway, first come first served
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRoute:
    """Adapter or delta that a deployment's workers serve next to its base, loaded when it is asked for."""

    name: str  # that clients put in ``model``
    engine_name: str  # at the workers: the name with the content's hash, so that no stale cache entry matches
    content_hash: str  # of the variant store (``daemon.variants.store``), where its folder is found
    created: int  # seconds since the epoch, for /v1/models
    num_bytes: int  # of its tensors: what loading it reads
    num_tensors: int | None = None  # of an adapter, for which a part of its load's time is
    pinned: bool = False  # loaded at once, and never unloaded for another
    place_share: float = 1.0  # of a worker's ``loaded_adapters`` that it takes
    base_directory: str | None = None  # of a delta whose engine checks neither it nor its base: the base's folder


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Route of one deployment: the name that clients put in ``model``, and the workers that answer."""

    name: str
    model: str
    created: int  # seconds since the epoch, for /v1/models
    max_context_tokens: int
    workers: tuple[WorkerTarget, ...]
    ready_wait_s: float | None = None  # for a worker to be started; None: the gateway's own
    refusal: str | None = None  # why no worker can be started now: requests are refused with it at once
    retry_after_s: int = 1  # with ``refusal``
    admission: AdmissionPolicy | None = None  # None: no request is rejected for being late
    adapter_slots: int = 0  # variants that take part in one step of a worker
    loaded_adapters: int = 0  # places of variants that a worker keeps loaded
    variants: tuple[VariantRoute, ...] = ()
    loads_on_gpu: bool = False  # whether all loaded variants lie on the GPUs; else those that have a slot


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKeyRecord:
    key_id: str
    sha256: str  # of the whole key; the key itself is never stored
    scope: str  # "admin" (REST and inference) | "inference"


@dataclass(frozen=True, kw_only=True, slots=True)
class GatewayLimits:
    max_body_bytes: int = 32 * 2**20
    max_queue: int = 256  # waiting requests per deployment; beyond that 429
    upstream_timeout_s: float = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RouteTable:
    version: int
    auth_required: bool
    routes: tuple[Route, ...]
    keys: tuple[ApiKeyRecord, ...]
    limits: GatewayLimits


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentDemand:
    """Demand for one deployment now."""

    name: str
    waiting: int  # requests in the gateway
    outstanding: int  # at workers
    idle_s: float  # since a request was last there; 0 while one is
    requests_per_s: float | None = None  # over the last 120 s; None: it has counted for too short


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Demand as the gateway sees it, by the table in force there."""

    routes_version: int
    deployments: tuple[DeploymentDemand, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantPlace:
    """Place of a variant at a worker."""

    variant: str
    worker_id: str
    place: str  # gpu, host, or loading: the load is under way


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantChange:
    """Load or eviction of a variant that has ended, or was ordered."""

    number: int  # grows, across restarts of the gateway too
    at: float  # seconds since the epoch
    kind: str  # loaded or evicted
    variant: str
    worker_id: str
    took_s: float | None = None  # of a load


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantDemand:
    """Demand for a deployment and its variants over the last 120 s, where they are, and their last changes."""

    deployment: str
    requests_per_s: float | None  # those for the base included; None: it has counted for too short
    requests: int  # likewise
    of_variants: tuple[tuple[str, int], ...]  # those by variant, most first; a variant without one is left out
    places: tuple[VariantPlace, ...] = ()
    changes: tuple[VariantChange, ...] = ()  # the last 500
