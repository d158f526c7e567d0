"""Routes that load and unload adapters and deltas, as vLLM has them, and the list of models with those loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from daemon.adapter_requests import (
    LOAD_PATH,
    UNLOAD_PATH,
    AdapterBodyError,
    LoadBody,
    UnloadBody,
    parse_body,
    variant_folder,
)
from daemon.torch_engine.api.openai_api import ApiError, bad_request
from daemon.torch_engine.runtime.engine import Engine
from daemon.worker_spec import WorkerSpec
from fingerprint.delta import is_delta, open_delta
from fingerprint.errors import BadInputError, ConflictError, NotFoundError
from fingerprint.lora import check_values, read_adapter, require_supported

__all__ = ["adapter_routes", "check_variant", "model_list"]

T = TypeVar("T", bound=UnloadBody)


def adapter_routes(
    spec: WorkerSpec, engine: Engine, read_body: Callable[[web.Request], Awaitable[bytes]]
) -> Iterable[web.RouteDef]:
    """Return the routes of a worker whose configuration has adapter slots."""

    async def load(request: web.Request) -> web.Response:
        body = _parse(await read_body(request), LoadBody)
        if body.lora_name == spec.served_model:
            raise bad_request(
                f"{spec.served_model!r} is the base itself; give the adapter another name", "lora_name"
            )
        try:
            folder = variant_folder(body.lora_path, "lora_path")
            await asyncio.to_thread(check_variant, folder, spec.config.adapter_rank)
            # A client that leaves cancels the wait, not the load, which has its place in the engine.
            await asyncio.shield(asyncio.wrap_future(engine.load_adapter(body.lora_name, folder)))
        except ConflictError as error:
            raise bad_request(str(error), "lora_name") from error
        except BadInputError as error:
            raise bad_request(str(error), "lora_path") from error
        return _done(f"the adapter {body.lora_name!r} is loaded")

    async def unload(request: web.Request) -> web.Response:
        body = _parse(await read_body(request), UnloadBody)
        try:
            engine.unload_adapter(body.lora_name)
        except NotFoundError as error:
            raise ApiError(404, str(error), "invalid_request_error", "lora_name", "model_not_found") from error
        return _done(f"the adapter {body.lora_name!r} is unloaded")

    return web.post(LOAD_PATH, load), web.post(UNLOAD_PATH, unload)


def model_list(spec: WorkerSpec, engine: Engine, created: int) -> list[dict[str, Any]]:
    """Return the base and the adapters that requests may name."""
    shared = {"object": "model", "owned_by": "iserve", "max_model_len": spec.limits.max_context_tokens}
    return [
        {"id": spec.served_model, "created": created} | shared,
        *(
            {"id": each.name, "created": each.created, "root": each.folder, "parent": spec.served_model} | shared
            for each in engine.adapters
        ),
    ]


def _parse(raw: bytes, kind: type[T]) -> T:
    try:
        return parse_body(raw, kind)
    except AdapterBodyError as error:
        raise bad_request(str(error), error.field) from error


def check_variant(folder: Path, max_rank: int) -> None:
    """Refuse a variant that no rank needs to look at: outside the engine's thread, which steps meanwhile.

    Of a delta that is its manifest and headers: a rank reads its tensors once, and checks them then.
    """
    if is_delta(folder):
        open_delta(folder)
        return
    adapter = read_adapter(folder, max_rank=max_rank)
    require_supported(adapter)
    check_values(adapter)


def _done(text: str) -> web.Response:
    return web.Response(text=text)
