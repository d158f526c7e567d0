"""The REST intent API: typed body in, one call of the controller, typed body out; one table of error statuses."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, generate_latest

from fingerprint import errors
from fingerprint.measurements import Profile
from iserve import __version__
from iserve.api_types import (
    DeployBody,
    DeploymentDocument,
    EventDocument,
    KeyBody,
    KeyDocument,
    ModelBody,
    ModelDocument,
    NewKeyDocument,
    NodeDocument,
    PlanBody,
    ProfileBody,
    ProfileJobDocument,
)
from iserve.controller.service import Controller
from iserve.keys import find_key
from iserve.plan_document import PlanDocument
from iserve.routes import ApiKeyRecord

__all__ = ["create_app"]

MAX_BODY_BYTES = 1 << 20

STATUS: dict[type[errors.IserveError], int] = {
    errors.NotFoundError: 404,
    errors.BadInputError: 400,
    errors.ConflictError: 409,
    errors.InfeasibleError: 422,
    errors.NotMeasuredError: 409,
    errors.UnavailableError: 503,
    errors.EngineError: 502,
    errors.IserveError: 500,
}


class _Unauthorized(Exception):
    pass


def create_app(controller: Controller, token: str) -> FastAPI:
    """The application of one controller.

    Args:
        token: of run/controller.json; the command line reads it there. API keys of scope ``admin`` work as well.
    """
    app = FastAPI(title="iServe", version=__version__, docs_url=None, redoc_url=None)
    metrics = _Metrics(controller)

    def authorize(authorization: Annotated[str | None, Header()] = None) -> None:
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() == "bearer" and presented:
            if hmac.compare_digest(presented.encode(), token.encode()):
                return
            records = [
                ApiKeyRecord(key_id=k.key_id, sha256=k.sha256, scope=k.scope)
                for k in controller.store.api_keys()
                if not k.revoked and k.scope == "admin"
            ]
            if find_key(presented, records) is not None:
                return
        raise _Unauthorized

    api = APIRouter(prefix="/api/v1", dependencies=[Depends(authorize)])
    _model_routes(api, controller)
    _plan_routes(api, controller)
    _deployment_routes(api, controller)
    _operator_routes(api, controller)
    app.include_router(api)

    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse)
    def readyz(response: Response) -> str:
        """200 once the daemon answers and the gateway lives."""
        if controller.observe() is None or controller.gateway_process.record() is None:
            response.status_code = 503
            return "starting"
        return "ready"

    @app.get("/metrics", dependencies=[Depends(authorize)])
    def read_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    _error_handlers(app)
    _bound_bodies(app, metrics)
    return app


def _model_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/models")
    def models() -> tuple[ModelDocument, ...]:
        return controller.models()

    @api.post("/models", status_code=201)
    def register(body: ModelBody) -> ModelDocument:
        return controller.register(body.name, body.directory)

    @api.delete("/models/{name}", status_code=204)
    def unregister(name: str) -> None:
        controller.store.remove_model(name)

    @api.get("/profiles")
    def profiles() -> tuple[Profile, ...]:
        return controller.profiles()

    @api.post("/profiles", status_code=202)
    def start_profile(body: ProfileBody) -> ProfileJobDocument:
        return controller.start_profile(body)

    @api.get("/profiles/jobs/{job_id}")
    def profile_job(job_id: str) -> ProfileJobDocument:
        return controller.profile_job(job_id)


def _plan_routes(api: APIRouter, controller: Controller) -> None:
    @api.post("/plans", status_code=201)
    def create_plan(body: PlanBody) -> PlanDocument:
        """Choose a configuration; start nothing."""
        return controller.plan(body)


def _deployment_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/deployments")
    def deployments() -> tuple[DeploymentDocument, ...]:
        return controller.deployments()

    @api.post("/deployments", status_code=202)
    def deploy(body: DeployBody) -> DeploymentDocument:
        """Accept an intent; it is carried out in the background and survives a restart."""
        return controller.deploy(body)

    @api.get("/deployments/{name}")
    def deployment(name: str) -> DeploymentDocument:
        return controller.deployment(name)

    @api.get("/deployments/{name}/plan")
    def deployment_plan(name: str) -> PlanDocument:
        return controller.deployment_plan(name)

    @api.get("/deployments/{name}/log", response_class=PlainTextResponse)
    def logs(name: str, lines: Annotated[int, Query(ge=1, le=10_000)] = 200) -> str:
        return controller.logs(name, lines)

    @api.delete("/deployments/{name}", status_code=202)
    def remove(name: str) -> DeploymentDocument:
        return controller.remove(name)


def _operator_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/nodes")
    def nodes() -> tuple[NodeDocument, ...]:
        return controller.nodes()

    @api.get("/events")
    def events(
        after: Annotated[int, Query(ge=0)] = 0,
        deployment: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> tuple[EventDocument, ...]:
        rows = controller.events(after=after, name=deployment, limit=limit)
        return tuple(EventDocument(id=e.id, at=e.at, kind=e.kind, message=e.message) for e in rows)

    @api.get("/keys")
    def keys() -> tuple[KeyDocument, ...]:
        return controller.keys()

    @api.post("/keys", status_code=201)
    def create_key(body: KeyBody) -> NewKeyDocument:
        return controller.create_key(body.label, body.scope)

    @api.delete("/keys/{key_id}", status_code=204)
    def revoke_key(key_id: str) -> None:
        controller.store.revoke_key(key_id)


def _error_body(name: str, message: str, status: int) -> JSONResponse:
    headers = {"Retry-After": "1"} if status == 503 else None
    return JSONResponse({"error": name, "message": message}, status, headers=headers)


def _error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.IserveError)
    def expected(_request: Request, error: errors.IserveError) -> JSONResponse:
        status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        return _error_body(type(error).__name__, str(error), status)

    @app.exception_handler(RequestValidationError)
    def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()[:10]
        )
        return _error_body("BadInputError", faults, 400)

    @app.exception_handler(_Unauthorized)
    def unauthorized(_request: Request, _error: _Unauthorized) -> JSONResponse:
        body = _error_body("Unauthorized", "give `Authorization: Bearer KEY` with an API key of scope admin", 401)
        body.headers["WWW-Authenticate"] = "Bearer"
        return body


def _bound_bodies(app: FastAPI, metrics: _Metrics) -> None:
    @app.middleware("http")
    async def bound(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        """Refuse bodies over 1 MiB by their declared length, and any that declares none."""
        if request.method in {"POST", "PUT", "PATCH"}:
            declared = request.headers.get("content-length", "")
            if not declared.isdigit():
                return _error_body("BadInputError", "a body needs a Content-Length", 411)
            if int(declared) > MAX_BODY_BYTES:
                return _error_body("BadInputError", f"the body is over {MAX_BODY_BYTES} bytes", 413)
        response = await call_next(request)
        metrics.requests.labels(request.method, str(response.status_code)).inc()
        return response


class _Metrics:
    """Counted as it happens, or read from the controller when asked."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "iserve_controller_requests", "REST requests", ["method", "status"], registry=self._registry
        )
        self._deployments = Gauge(
            "iserve_deployments", "Deployments by status now", ["status"], registry=self._registry
        )
        self._free = Gauge(
            "iserve_device_free_bytes", "Free memory of a device", ["device"], registry=self._registry
        )
        self._load = Gauge(
            "iserve_device_load_ratio", "Busy fraction of a device over 120 s", ["device"], registry=self._registry
        )

    def render(self) -> bytes:
        self._deployments.clear()
        for document in self._controller.deployments():
            self._deployments.labels(document.status).inc()
        for node in self._controller.nodes():
            for device in node.devices:
                self._free.labels(device.device_id).set(device.free_bytes)
                self._load.labels(device.device_id).set(device.load_fraction)
        return generate_latest(self._registry)
