"""The REST intent API: typed body in, one call of the controller, typed body out; one table of error statuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Header, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from fingerprint import errors
from fingerprint.measurements import Profile
from iserve import __version__
from iserve.api_types import (
    IDEMPOTENCY_KEY,
    DeployBody,
    DeploymentDocument,
    EngineDocument,
    EventDocument,
    KeyBody,
    KeyDocument,
    LaunchBody,
    LogDocument,
    ModelBody,
    ModelDocument,
    NewKeyDocument,
    NodeDocument,
    PlanBody,
    ProfileBody,
    ProfileJobDocument,
    UpdateBody,
    VerifyBody,
)
from iserve.controller.door import Door, problem
from iserve.controller.metrics import Metrics
from iserve.controller.reach import Reach
from iserve.controller.service import Controller
from iserve.planning.document import PlanDocument
from iserve.planning.launching import LaunchDocument
from iserve.planning.making import MAX_REPLICAS
from iserve.verify.documents import StoredVerification, VerificationJobDocument
from placement.types import DeploymentState

__all__ = ["create_app"]

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

IdempotencyKey = Annotated[str | None, Header(pattern=IDEMPOTENCY_KEY)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Every error: its class, and one line that says what was asked, what is true and what to change."""

    error: str
    message: str


def _reach(request: Request) -> Reach:
    """Return the reach of the caller, as the door found it."""
    reach: Reach = request.state.reach
    return reach


Caller = Annotated[Reach, Depends(_reach)]


class _ReadOnce(Request):
    async def json(self) -> Any:
        return json.loads(await self.body(), object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a name that is given twice: JSON takes the last, which may not be the one that was meant."""
    if len(found := dict(pairs)) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise HTTPException(400, f"the body gives {twice[:80]!r} twice")
    return found


class _Route(APIRoute):
    """Route whose body, if it takes any, is JSON that gives each name once."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def checked(request: Request) -> Response:
            if self.body_field is not None and request.headers.get("content-length", "0") != "0":
                kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
                if kind != "application/json":
                    what = f"of type {kind[:80]!r}" if kind else "of no type"
                    raise HTTPException(415, f"the body is {what}; send it as 'Content-Type: application/json'")
            return await handle(_ReadOnce(request.scope, request.receive))

        return checked


def _known_query(request: Request) -> None:
    """Refuse a query parameter that the route does not have, or has twice: it is a slip of the client, as in a
    body.
    """
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    if unknown := sorted(set(request.query_params) - known):
        raise errors.BadInputError(
            f"query.{unknown[0][:80]}: not a parameter of this route ({', '.join(sorted(known)) or 'it has none'})"
        )
    times = Counter(name for name, _ in request.query_params.multi_items())
    if twice := [name for name in times if times[name] > 1]:
        raise errors.BadInputError(f"query.{twice[0]}: given {times[twice[0]]} times, give it once")


# Further answers of every route: FastAPI's own 422 for a bad body is never sent, ours is InfeasibleError.
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": words}
    for status, words in {
        400: "BadInputError: change the request",
        401: "no key, or none that may",
        404: "NotFoundError",
        409: "ConflictError or NotMeasuredError",
        411: "a body needs a Content-Length",
        413: "the body is too large",
        415: "the body is not application/json",
        422: "InfeasibleError: relax a limit or add GPUs",
        502: "EngineError",
        503: "UnavailableError: try again",
    }.items()
}

# Where the answer itself is text, which the framework then takes for the problems' type too.
_PROBLEMS_BESIDE_TEXT: dict[int | str, dict[str, Any]] = {
    status: {
        "description": problem["description"],
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }
    for status, problem in _PROBLEMS.items()
}


def create_app(controller: Controller, token: str) -> FastAPI:
    """The application of one controller.

    Args:
        token: of run/controller.json; the command line reads it there. API keys of scope ``admin`` work as well.
    """
    app = FastAPI(title="iServe", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(controller)

    api = APIRouter(
        prefix="/api/v1", responses=_PROBLEMS, dependencies=[Depends(_known_query)], route_class=_Route
    )
    _model_routes(api, controller)
    _plan_routes(api, controller)
    _deployment_routes(api, controller)
    _verification_routes(api, controller)
    _operator_routes(api, controller)
    app.include_router(api)

    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        return "ok"

    @app.get("/readyz", response_class=PlainTextResponse, responses={503: {"description": "starting"}})
    def readyz(response: Response) -> str:
        """200 once the daemon answers and the gateway lives."""
        if controller.observe() is None or controller.gateway_process.record() is None:
            response.status_code = 503
            return "starting"
        return "ready"

    @app.get("/metrics", response_class=PlainTextResponse, responses=_PROBLEMS_BESIDE_TEXT)
    def read_metrics() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    _error_handlers(app)
    reach = Reach(controller.settings.model_folders or ())
    app.add_middleware(Door, store=controller.store, token=token, reach=reach, count=metrics.count)
    return app


def _model_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/models")
    def models() -> tuple[ModelDocument, ...]:
        return controller.models()

    @api.post("/models", status_code=201)
    def register(body: ModelBody, caller: Caller) -> ModelDocument:
        caller.check(body.directory)
        return controller.register(body.name, body.directory)

    @api.delete("/models/{name}", status_code=204)
    def unregister(name: str) -> None:
        controller.store.remove_model(name)

    @api.get("/profiles")
    def profiles() -> tuple[Profile, ...]:
        return controller.profiles()

    @api.post("/profiles", status_code=202)
    def start_profile(body: ProfileBody, caller: Caller) -> ProfileJobDocument:
        caller.check(body.model, controller.registered())
        return controller.plans.start_profile(body)

    @api.get("/profiles/jobs/{job_id}")
    def profile_job(job_id: str) -> ProfileJobDocument:
        return controller.plans.profile_job(job_id)


def _plan_routes(api: APIRouter, controller: Controller) -> None:
    @api.post("/plans", status_code=201)
    def create_plan(body: PlanBody, caller: Caller) -> PlanDocument:
        """Choose a configuration; start nothing."""
        caller.check(body.model, controller.registered())
        return controller.plans.plan(body)

    @api.post("/plans/launch", status_code=201)
    def plan_launch(body: LaunchBody, caller: Caller) -> LaunchDocument:
        """The worker that a deploy of this wish would start now, with its limits and devices; start nothing."""
        caller.check(body.model, controller.registered())
        return controller.plans.launch(body)


def _deployment_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/deployments")
    def deployments() -> tuple[DeploymentDocument, ...]:
        return controller.deployments()

    @api.post("/deployments", status_code=202)
    def deploy(
        body: DeployBody, caller: Caller, idempotency_key: IdempotencyKey = None, attach: bool = False
    ) -> DeploymentDocument:
        """Accept an intent; it is carried out in the background and survives a restart.

        With the header `Idempotency-Key` (1 to 200 visible ASCII characters) it can be asked again when its answer
        was lost: for 24 hours the same key and body get the same answer and start nothing, the same key and
        another body 409, with what was asked before. A request that was refused may come again with its key.

        A name in use gets 409. With `attach=true` the request that made the deployment of that name gets the
        deployment as it is now, and another request 409 with what differs.
        """
        caller.check(body.model, controller.registered())
        return controller.deploy(body, idempotency_key, attach=attach)

    @api.get("/deployments/{name}")
    def deployment(name: str) -> DeploymentDocument:
        return controller.deployment(name)

    @api.patch("/deployments/{name}", status_code=202)
    def update(name: str, body: UpdateBody, caller: Caller) -> DeploymentDocument:
        """Change a deployment that serves; what is left out stays as it is.

        New workers are started beside the former ones, which serve until then and end when they have no request
        left. If the new ones do not come up, all stays as it was and `error` says why. `updating` is true until
        then.
        """
        caller.check(body.model, controller.registered())
        return controller.update(name, body)

    @api.get("/deployments/{name}/plan")
    def deployment_plan(name: str) -> PlanDocument:
        return controller.deployment_plan(name)

    @api.get("/deployments/{name}/log", response_class=PlainTextResponse, responses=_PROBLEMS_BESIDE_TEXT)
    def logs(
        name: str,
        lines: Annotated[int, Query(ge=1, le=10_000)] = 200,
        replica: Annotated[int, Query(ge=1, le=MAX_REPLICAS)] = 1,
    ) -> str:
        """The end of a worker's log, of several replicas that of one."""
        return controller.logs(name, lines, replica)

    @api.get("/deployments/{name}/log/part")
    def log_part(
        name: str,
        lines: Annotated[int, Query(ge=1, le=10_000)] = 200,
        replica: Annotated[int, Query(ge=1, le=MAX_REPLICAS)] = 1,
        position: Annotated[str | None, Query(max_length=200)] = None,
    ) -> LogDocument:
        """The end of a worker's log and the position behind it; with that `position`, what was added since."""
        return controller.log_part(name, lines, replica, position)

    @api.delete("/deployments/{name}", status_code=202)
    def remove(name: str, created_at: float | None = None) -> DeploymentDocument:
        """End a deployment; with `created_at`, as its document says it, not one that has the name since."""
        return controller.remove(name, created_at)


def _verification_routes(api: APIRouter, controller: Controller) -> None:
    verifier = controller.verifier

    @api.get("/verifications")
    def verifications() -> tuple[StoredVerification, ...]:
        """The checks that are kept; those in force correct estimates."""
        return verifier.stored()

    @api.post("/verifications", status_code=202)
    def start_verification(body: VerifyBody, caller: Caller) -> VerificationJobDocument:
        """Check a running configuration in the background, and correct the estimates of its model by it."""
        caller.check(body.model, controller.registered())
        return verifier.start(body)

    @api.get("/verifications/jobs/{job_id}")
    def verification_job(job_id: str) -> VerificationJobDocument:
        return verifier.job(job_id)

    @api.delete("/verifications", status_code=204)
    def forget_verifications(model: Annotated[str, Query(min_length=1, max_length=4096)], caller: Caller) -> None:
        """Estimates of this model, and of those of its shape, are no longer corrected."""
        caller.check(model, controller.registered())
        verifier.forget(model)


def _operator_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/nodes")
    def nodes() -> tuple[NodeDocument, ...]:
        return controller.nodes()

    @api.get("/engines")
    def engines() -> tuple[EngineDocument, ...]:
        return controller.engines()

    @api.get("/serving")
    def serving() -> tuple[DeploymentState, ...]:
        return controller.serving()

    @api.get("/events")
    def events(
        after: Annotated[int, Query(ge=0, lt=1 << 63)] = 0,
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


def _error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.IserveError)
    def expected(_request: Request, error: errors.IserveError) -> JSONResponse:
        status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        return problem(type(error).__name__, str(error), status)

    @app.exception_handler(RequestValidationError)
    def invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        faults = "; ".join(
            f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}" for fault in error.errors()[:10]
        )
        return problem("BadInputError", faults, 400)

    @app.exception_handler(HTTPException)
    def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        name = "NotFoundError" if error.status_code == 404 else "BadInputError"
        return problem(name, f"{request.method} {request.url.path[:200]}: {error.detail}", error.status_code)

    @app.exception_handler(Exception)
    def bug(_request: Request, error: Exception) -> JSONResponse:
        """Answer 500 for a bug; the traceback goes to the log, not to the client."""
        return problem("IserveError", f"internal error: {type(error).__name__}; the controller's log has it", 500)
