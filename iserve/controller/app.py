"""The REST intent API: typed body in, one call of the controller, typed body out; one table of error statuses."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_type_hints

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from fingerprint import errors
from fingerprint.measurements import Profile
from iserve import __version__
from iserve.api_documents import (
    DeploymentDocument,
    EngineDocument,
    EventDocument,
    KeyDocument,
    LogDocument,
    ModelDocument,
    NewKeyDocument,
    NodeDocument,
    ProfileJobDocument,
)
from iserve.api_types import IDEMPOTENCY_KEY, DeployBody, LaunchBody, PlanBody, VerifyBody
from iserve.controller.auth import Caller, Door, problem
from iserve.controller.folder_access import Reach
from iserve.controller.metrics import Metrics
from iserve.controller.openapi import BODY, describe, problems
from iserve.controller.quality_api import add_quality_routes
from iserve.controller.service import Controller
from iserve.controller.variant_api import add_variant_routes
from iserve.planning.document import PlanDocument
from iserve.planning.worker_launch import LaunchDocument
from iserve.rest_bodies import KeyBody, ModelBody, ProfileBody, UpdateBody
from iserve.verify.documents import StoredVerification, VerificationJobDocument
from placement.types import DeploymentState
from planner.intent import MAX_REPLICAS

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

# The door has checked the key already; this states it in the OpenAPI document.
API_KEY = Depends(
    HTTPBearer(
        scheme_name="apiKey",
        description="API key of scope `admin`, made by `iserve keys create --scope admin`.",
        auto_error=False,
    )
)

IdempotencyKey = Annotated[
    str | None,
    Header(
        pattern=IDEMPOTENCY_KEY,
        description="Name of this request, 1 to 200 visible ASCII characters, so that it can be sent again.",
    ),
]
DeploymentName = Annotated[str, Path(description="Name of the deployment.")]
LogLines = Annotated[int, Query(ge=1, le=10_000, description="Most lines to return from the end of the log.")]
Replica = Annotated[int, Query(ge=1, le=MAX_REPLICAS, description="Number of the replica, from 1.")]
JobId = Annotated[str, Path(description="Identifier of the job, as its start answered.")]


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


def create_app(controller: Controller, token: str) -> FastAPI:
    """The application of one controller.

    Args:
        token: of run/controller.json; the command line reads it there. API keys of scope ``admin`` work as well.
    """
    app = FastAPI(
        title="iServe",
        description="Takes intents and carries them out: plans, deploys, updates, verifies and removes models.",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        separate_input_output_schemas=False,  # one description of a result that is posted and listed
    )
    metrics = Metrics(controller)

    api = APIRouter(
        prefix="/api/v1",
        responses=problems(400, 401, 503),
        dependencies=[API_KEY, Depends(_known_query)],
        route_class=_Route,
    )
    _model_routes(api, controller)
    add_variant_routes(api, controller)
    add_quality_routes(api, controller)
    _plan_routes(api, controller)
    _deployment_routes(api, controller)
    _deployment_record_routes(api, controller)
    _verification_routes(api, controller)
    _operator_routes(api, controller)
    app.routes.extend(api.routes)  # ``include_router`` would make each a second time, at the first request
    _health_routes(app, controller, metrics)
    describe(app, api.routes)
    _error_handlers(app)
    reach = Reach(controller.settings.model_folders or ())
    app.add_middleware(Door, store=controller.store, token=token, reach=reach, count=metrics.count)
    return app


def _health_routes(app: FastAPI, controller: Controller, metrics: Metrics) -> None:
    @app.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        """Report that the controller lives: 200 whenever it answers."""
        return "ok"

    @app.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses={503: {"description": "The daemon or the gateway is not up."}},
    )
    def readyz(response: Response) -> str:
        """Report readiness: 200 once the daemon answers and the gateway lives, else 503."""
        if controller.observe() is None or controller.gateway_process.record() is None:
            response.status_code = 503
            return "starting"
        return "ready"

    @app.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses=problems(401, 503),
        dependencies=[API_KEY],
    )
    def read_metrics() -> Response:
        """Return the controller's metrics in Prometheus' text format."""
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _model_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/models")
    def models() -> tuple[ModelDocument, ...]:
        """List the bundled and the registered models."""
        return controller.models()

    @api.post("/models", status_code=201, responses=problems(404, *BODY))
    def register(body: ModelBody, caller: Caller) -> ModelDocument:
        """Register a checkpoint folder under a name.

        A name that is registered already is given to the new folder.
        """
        caller.check(body.directory)
        return controller.register(body.name, body.directory)

    @api.delete("/models/{name}", status_code=204, responses=problems(404))
    def unregister(name: Annotated[str, Path(description="Name that was registered.")]) -> None:
        """Forget a registered name; the folder stays."""
        controller.store.remove_model(name)

    @api.get("/profiles")
    def profiles() -> tuple[Profile, ...]:
        """List the profiles that are stored."""
        return controller.profiles()

    @api.post("/profiles", status_code=202, responses=problems(404, 422, *BODY))
    def start_profile(body: ProfileBody, caller: Caller) -> ProfileJobDocument:
        """Profile a model in the background; the answer has the id of the job."""
        caller.check(body.model, controller.registered())
        return controller.plans.start_profile(body)

    @api.get("/profiles/jobs/{job_id}", responses=problems(404))
    def profile_job(job_id: JobId) -> ProfileJobDocument:
        """Return the state of a profile job."""
        return controller.plans.profile_job(job_id)


def _plan_routes(api: APIRouter, controller: Controller) -> None:
    @api.post("/plans", status_code=201, responses=problems(404, 409, 422, *BODY))
    def create_plan(body: PlanBody, caller: Caller) -> PlanDocument:
        """Choose a configuration; start nothing.

        Without `gpus` the plan is for the devices that are free here and rests on a profile taken here: 409 if
        there is none. A plan in which nothing is feasible is an answer too; `chosen` is then null.
        """
        caller.check(body.model, controller.registered())
        return controller.plans.plan(body)

    @api.post("/plans/launch", status_code=201, responses=problems(404, 409, 422, *BODY))
    def plan_launch(body: LaunchBody, caller: Caller) -> LaunchDocument:
        """Return the worker that a deployment of this request would start now; start nothing."""
        caller.check(body.model, controller.registered())
        return controller.plans.launch(body)


def _deployment_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/deployments")
    def deployments() -> tuple[DeploymentDocument, ...]:
        """List all deployments."""
        return controller.deployments()

    @api.post("/deployments", status_code=202, responses=problems(404, 409, 422, *BODY))
    def deploy(
        body: DeployBody,
        caller: Caller,
        idempotency_key: IdempotencyKey = None,
        attach: Annotated[
            bool, Query(description="Whether to return the deployment of this name that the same request made.")
        ] = False,
    ) -> DeploymentDocument:
        """Accept an intent; it is carried out in the background and survives a restart.

        With the header `Idempotency-Key` the request can be sent again when its answer was lost: for 24 hours the
        same key and body get the same answer and start nothing, the same key and another body get 409 with the
        first body. A request that was rejected may be sent again with its key.

        A name in use gets 409. With `attach=true` the request that made the deployment of that name gets the
        deployment as it is now, and another request gets 409 with the differences.
        """
        caller.check(body.model, controller.registered())
        return controller.deploy(body, idempotency_key, attach=attach)

    @api.get("/deployments/{name}", responses=problems(404))
    def deployment(name: DeploymentName) -> DeploymentDocument:
        """Return one deployment as it is now."""
        return controller.deployment(name)

    @api.patch("/deployments/{name}", status_code=202, responses=problems(404, 409, 422, *BODY))
    def update(name: DeploymentName, body: UpdateBody, caller: Caller) -> DeploymentDocument:
        """Change a deployment that serves; a field that is left out stays as it is.

        New workers start next to the former ones, which serve until then and end when they have no request left.
        If the new ones do not become ready, all stays as it was and `error` says why. `updating` is true until
        then.
        """
        caller.check(body.model, controller.registered())
        return controller.update(name, body)

    @api.delete("/deployments/{name}", status_code=202, responses=problems(404))
    def remove(
        name: DeploymentName,
        created_at: Annotated[
            float | None,
            Query(description="`created_at` of the deployment that is meant, not one that has the name since."),
        ] = None,
    ) -> DeploymentDocument:
        """End a deployment; its workers are stopped in the background."""
        return controller.remove(name, created_at)


def _deployment_record_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/deployments/{name}/plan", responses=problems(404))
    def deployment_plan(name: DeploymentName) -> PlanDocument:
        """Return the plan that a deployment was made by."""
        return controller.deployment_plan(name)

    @api.get(
        "/deployments/{name}/log",
        response_class=PlainTextResponse,
        responses=problems(400, 401, 404, 503),
    )
    def logs(
        name: DeploymentName,
        lines: LogLines = 200,
        replica: Replica = 1,
    ) -> str:
        """Return the end of the log of one replica as text."""
        return controller.logs(name, lines, replica)

    @api.get("/deployments/{name}/log/part", responses=problems(404))
    def log_part(
        name: DeploymentName,
        lines: LogLines = 200,
        replica: Replica = 1,
        position: Annotated[
            str | None, Query(max_length=200, description="Position that the last part ended at; none: the end.")
        ] = None,
    ) -> LogDocument:
        """Return the end of a log with the position behind it.

        With that `position` the next request gets what was added since.
        """
        return controller.log_part(name, lines, replica, position)


def _verification_routes(api: APIRouter, controller: Controller) -> None:
    verifier = controller.verifier

    @api.get("/verifications")
    def verifications() -> tuple[StoredVerification, ...]:
        """List the checks that are kept; those in force correct estimates."""
        return verifier.stored()

    @api.post("/verifications", status_code=202, responses=problems(404, 409, 422, *BODY))
    def start_verification(body: VerifyBody, caller: Caller) -> VerificationJobDocument:
        """Check a running configuration in the background, and correct the estimates of its model by it."""
        caller.check(body.model, controller.registered())
        return verifier.start(body)

    @api.get("/verifications/jobs/{job_id}", responses=problems(404))
    def verification_job(job_id: JobId) -> VerificationJobDocument:
        """Return the state of a check, and its findings once it is done."""
        return verifier.job(job_id)

    @api.delete("/verifications", status_code=204, responses=problems(404))
    def forget_verifications(
        model: Annotated[
            str, Query(min_length=1, max_length=4096, description="Folder, Hugging Face id or registered name.")
        ],
        caller: Caller,
    ) -> None:
        """Forget the checks of a model; its estimates, and those of its shape, are no longer corrected."""
        caller.check(model, controller.registered())
        verifier.forget(model)


def _operator_routes(api: APIRouter, controller: Controller) -> None:
    @api.get("/nodes")
    def nodes() -> tuple[NodeDocument, ...]:
        """List the nodes with their devices, free memory and load."""
        return controller.nodes()

    @api.get("/engines")
    def engines() -> tuple[EngineDocument, ...]:
        """List the engines and their installations on this machine."""
        return controller.engines()

    @api.get("/serving")
    def serving() -> tuple[DeploymentState, ...]:
        """List the load and the placement of all deployments."""
        return controller.serving()

    @api.get("/events", responses=problems(404))
    def events(
        after: Annotated[int, Query(ge=0, lt=1 << 63, description="Id of the last event that is known.")] = 0,
        deployment: Annotated[str | None, Query(description="Deployment whose events to list; none: all.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000, description="Most events to return.")] = 200,
    ) -> tuple[EventDocument, ...]:
        """List events, oldest first."""
        rows = controller.events(after=after, name=deployment, limit=limit)
        return tuple(EventDocument(id=e.id, at=e.at, kind=e.kind, message=e.message) for e in rows)

    @api.get("/keys")
    def keys() -> tuple[KeyDocument, ...]:
        """List the API keys, without their secrets."""
        return controller.keys()

    @api.post("/keys", status_code=201, responses=problems(*BODY))
    def create_key(body: KeyBody) -> NewKeyDocument:
        """Create an API key; it is shown in this answer only."""
        return controller.create_key(body.label, body.scope)

    @api.delete("/keys/{key_id}", status_code=204, responses=problems(404))
    def revoke_key(key_id: Annotated[str, Path(description="Identifier of the key.")]) -> None:
        """Revoke an API key; requests with it are rejected from now on."""
        controller.store.revoke_key(key_id)


_WORDS = {"dataclass_type": "Input should be a valid dictionary or object to extract fields from"}


def _fault_words(fault: Mapping[str, Any], body: type | None) -> str:
    """Return one fault of a request; of an unknown field of ``body`` with the fields that there are."""
    *where, last = map(str, fault["loc"])
    if fault["type"] not in ("extra_forbidden", "unexpected_keyword_argument"):
        words = _WORDS.get(fault["type"], fault["msg"]).replace("tuple", "list").replace("Tuple", "List")
        return f"{'.'.join((*where, last))}: {words}"
    kind: Any = body
    for name in where[1:]:
        if name.isdecimal():  # in a list, whose kind of items is known already
            continue
        hint = get_type_hints(kind)[name]
        kind = next(part for part in (*get_args(hint), hint) if hasattr(part, "__annotations__"))
    known = [name for name in get_type_hints(kind) if not name.startswith("_") and name != "model_config"]
    near = get_close_matches(last, known, n=1)
    hint = f", did you mean {near[0]!r}?" if near else ";"
    return f"{'.'.join(where)}: there is no field {last[:80]!r}{hint} the fields are {', '.join(known)}"


def _error_handlers(app: FastAPI) -> None:
    @app.exception_handler(errors.IserveError)
    def expected(_request: Request, error: errors.IserveError) -> JSONResponse:
        status = next(STATUS[kind] for kind in type(error).__mro__ if kind in STATUS)
        if isinstance(error, errors.BusyError):
            return problem("UnavailableError", str(error), status, is_busy=True)
        return problem(type(error).__name__, str(error), status)

    @app.exception_handler(RequestValidationError)
    def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        body = get_type_hints(request.scope["route"].endpoint).get("body")
        faults = "; ".join(_fault_words(fault, body) for fault in error.errors()[:10])
        return problem("BadInputError", faults, 400)

    @app.exception_handler(HTTPException)
    def not_routed(request: Request, error: HTTPException) -> JSONResponse:
        name = "NotFoundError" if error.status_code == 404 else "BadInputError"
        return problem(name, f"{request.method} {request.url.path[:200]}: {error.detail}", error.status_code)

    @app.exception_handler(Exception)
    def bug(_request: Request, error: Exception) -> JSONResponse:
        """Answer 500 for a bug; the traceback goes to the log, not to the client."""
        return problem("IserveError", f"internal error: {type(error).__name__}; the controller's log has it", 500)
