"""The gateway as an ASGI application: which path, whose deployment, which refusal."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from fingerprint.codec import to_json
from iserve.gateway.auth import check_access, check_token
from iserve.gateway.deployments import Dispatcher
from iserve.gateway.dispatch import Deployment
from iserve.gateway.errors import WOULD_BE_LATE, ApiError
from iserve.gateway.metrics import GatewayMetrics
from iserve.gateway.proxy import InferenceRequest, forward
from iserve.gateway.reply import WRITE_NOW, ClientWatch, Incoming, Receive, Reply, Send
from iserve.gateway.request_body import BodyBudget, ClientGoneError, check_headers, parse_head, read_body
from iserve.gateway.routes_file import RoutesFile
from iserve.gateway.variant_loader import VariantFolders, VariantLoader
from iserve.gateway.variant_names import model_span
from iserve.gateway.variant_residency import VariantRequest, VariantResidency
from iserve.http_stream import StreamClient
from iserve.route_table import DEMAND_PATH, VARIANT_DEMAND_PATH, Demand, Route, RouteTable
from placement.variant_routing import DEFAULT_VARIANT_POLICY, make_variant_policy

__all__ = ["POLL_S", "Gateway"]

POLL_S = 0.1  # how soon a new route table, and with it a revoked key, takes effect
_HELD_BODIES = 16  # bodies of the largest size that may be held at once
_INFERENCE = ("/v1/completions", "/v1/chat/completions")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_MODELS = "/v1/models"
_CLIENT_LEFT = 499  # nginx's number, for the metrics only


class Gateway:
    """ASGI 3 application over one routes file.

    Args:
        token: of the controller, which may ask for the demand; empty: no client may.
        folders: of LoRA variants; None: none are served.
        variant_policy: of ``placement.variant_routing.VARIANT_POLICIES``.
    """

    def __init__(
        self,
        routes_path: Path,
        token: str = "",
        folders: VariantFolders | None = None,
        variant_policy: str = DEFAULT_VARIANT_POLICY,
    ) -> None:
        self._token = token.encode()
        self.routes = RoutesFile(routes_path)
        self.dispatcher = Dispatcher()
        self.metrics = GatewayMetrics(self.dispatcher, self.routes)
        self._folders, self._variant_policy = folders, make_variant_policy(variant_policy)
        self._tickets = itertools.count()
        self._budget = BodyBudget(0)
        self._workers: StreamClient | None = None
        self._poller: asyncio.Task[None] | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise NotImplementedError(f"no {scope['type']} here")

    async def start(self) -> None:
        """Read the table once and go on looking. Serves from the moment it returns."""
        self._workers = StreamClient()
        if self._folders is not None:
            loader = VariantLoader(self._workers, self._folders)
            self.dispatcher.new_residency = partial(
                VariantResidency, loader=loader, observer=self.metrics.variants, policy=self._variant_policy
            )
        self.look()
        self._poller = asyncio.create_task(self._poll())

    async def stop(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
            with suppress(asyncio.CancelledError):
                await self._poller
        if self._workers is not None:
            self._workers.close()

    def look(self) -> None:
        """Put a new route table into force, if there is one."""
        if self.routes.poll():
            table = self.routes.table
            assert table is not None
            assert self._workers is not None
            self.dispatcher.update(table)
            self.metrics.drop_gone()
            self._budget.max_bytes = _HELD_BODIES * table.limits.max_body_bytes

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            self.look()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        reply = Reply(send, _request_id(scope["headers"]), scope.get("extensions", {}).get(WRITE_NOW))
        incoming = Incoming(receive, scope["headers"])
        try:
            await self._route(scope, incoming, reply)
        except ApiError as error:
            self.metrics.refused(error.status)
            await _refuse(reply, error, incoming)
        except ClientGoneError:
            pass
        except Exception:
            if not reply.started:
                bug = ApiError(500, "the gateway failed on this request; its log has the reason", "internal_error")
                await _refuse(reply, bug, incoming)
            raise

    async def _route(self, scope: dict[str, Any], incoming: Incoming, reply: Reply) -> None:
        path, method, headers = scope["path"], scope["method"], scope["headers"]
        check_headers(headers)
        if path == "/healthz":
            _need_method(method, "GET", "HEAD")
            await reply.whole(200, b'{"status":"ok"}')
            return
        table = self.routes.table
        if table is None:
            raise ApiError.no_table()
        if path == "/readyz":
            _need_method(method, "GET", "HEAD")
            await reply.whole(200, msgspec.json.encode({"status": "ready", "routes_version": table.version}))
            return
        if path == DEMAND_PATH:
            check_token(headers, self._token)
            demand = Demand(routes_version=table.version, deployments=self.dispatcher.demand())
            await reply.whole(200, to_json(demand))
            return
        if path == VARIANT_DEMAND_PATH:
            check_token(headers, self._token)
            await reply.whole(200, to_json(tuple(d.variant_demand for d in self.dispatcher.deployments.values())))
            return
        check_access(path, headers, table, local_address=(scope.get("server") or ("", 0))[0])
        if path in _INFERENCE:
            _need_method(method, "POST")
            await self._infer(path, table, headers, incoming, reply)
        elif path == _MODELS or path.startswith(_MODELS + "/"):
            _need_method(method, "GET", "HEAD")
            await reply.whole(200, _models_body(table, path))
        elif path == "/metrics":
            _need_method(method, "GET", "HEAD")
            await reply.whole(200, self.metrics.page(), content_type=b"text/plain; version=0.0.4; charset=utf-8")
        else:
            raise ApiError(404, f"there is no {path[:200]!r} here", "unknown_path")

    async def _infer(
        self, path: str, table: RouteTable, headers: list[tuple[bytes, bytes]], incoming: Incoming, reply: Reply
    ) -> None:
        arrived_s = asyncio.get_running_loop().time()
        ticket = next(self._tickets)
        body = await read_body(incoming, headers, max_body_bytes=table.limits.max_body_bytes, budget=self._budget)
        held_bytes = len(body)
        try:
            head = parse_head(body)
            deployment = self.dispatcher.deployments.get(head.model)
            variant, span = None, (0, 0)
            if deployment is None:
                deployment, route = self.dispatcher.find_variant(head.model)
                variant, span = VariantRequest(route, arrived_s), model_span(body)
                self._budget.take(len(body))  # of the copy that names the model as the worker does
                held_bytes *= 2
            request = InferenceRequest(
                endpoint=path,
                model=head.model,
                body=body,
                wants_usage=bool(head.stream and (head.stream_options or {}).get("include_usage")),
                ticket=ticket,
                arrived_s=arrived_s,
                request_id=reply.request_id,
                in_flight=deployment.new_request(len(body), head.longest_answer, is_streamed=bool(head.stream)),
                variant=variant,
                model_span=span,
            )
            await self._forward(request, deployment, incoming, reply)
        finally:
            self._budget.give_back(held_bytes)

    async def _forward(
        self, request: InferenceRequest, deployment: Deployment, incoming: Incoming, reply: Reply
    ) -> None:
        assert self._workers is not None
        name = deployment.route.name
        with ClientWatch(incoming, reply) as watch:
            try:
                await forward(request, deployment, self._workers, reply, self.metrics)
            except ApiError as error:
                if error.code == WOULD_BE_LATE:
                    self.metrics.rejected_late(name)
                await _refuse(reply, error, incoming)
        if watch.left:
            self.metrics.client_left(name)
        status = reply.status or _CLIENT_LEFT
        self.metrics.answered(
            name, request.endpoint, status, asyncio.get_running_loop().time() - request.arrived_s
        )
        if request.variant is not None:
            self.metrics.of_variant(request.variant.route.name).answered()


async def _refuse(reply: Reply, error: ApiError, incoming: Incoming) -> None:
    await reply.whole(error.status, error.body, headers=error.headers, incoming=incoming)


def _need_method(method: str, *allowed: str) -> None:
    if method not in allowed:
        raise ApiError(
            405,
            f"{method[:20]} is not offered here, {allowed[0]} is",
            "method_not_allowed",
            allow=", ".join(allowed),
        )


def _request_id(headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the client's own id if it is a harmless one, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return b"req-" + secrets.token_hex(12).encode()


def _models_body(table: RouteTable, path: str) -> bytes:
    if path == _MODELS:
        entries: dict[str, dict[str, object]] = {}
        for name, entry in _model_entries(table):
            entries.setdefault(name, entry)  # two deployments may serve a variant: requests go to the first
        return msgspec.json.encode({"object": "list", "data": [*entries.values()]})
    wanted = path[len(_MODELS) + 1 :]
    for name, entry in _model_entries(table):
        if name == wanted:
            return msgspec.json.encode(entry)
    raise ApiError.model_not_found(wanted)


def _model_entries(table: RouteTable) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield what clients may put in ``model``: deployments, then their variants."""
    for route in table.routes:
        yield route.name, _model_entry(route, route.name, route.created)
    for route in table.routes:
        for variant in route.variants:
            entry = _model_entry(route, variant.name, variant.created)
            # As vLLM has them, but for the folder, which clients need not know: the content's name at the engines.
            yield variant.name, entry | {"root": variant.engine_name, "parent": route.name}


def _model_entry(route: Route, name: str, created: int) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "iserve",
        "max_model_len": route.max_context_tokens,
    }
