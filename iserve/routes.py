"""The route table that the controller publishes and the gateway serves from."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ApiKeyRecord", "GatewayLimits", "Route", "RouteTable", "WorkerTarget"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerTarget:
    worker_id: str
    url: str  # http://127.0.0.1:PORT
    ready: bool
    max_outstanding: int = (
        256  # requests sent to it at once; the rest wait in the gateway, first come first served
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """One deployment: what clients put in ``model``, and who answers."""

    name: str
    model: str
    created: int  # seconds since the epoch, for /v1/models
    max_context_tokens: int
    workers: tuple[WorkerTarget, ...]


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
