"""Routes that load and unload adapters and deltas, as vLLM has them, and the list of models with those loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from daemon.torch_engine.api.openai_api import ApiError, bad_request
from daemon.torch_engine.runtime.engine import Engine
from daemon.worker_spec import WorkerSpec
from fingerprint.delta import is_delta, open_delta
from fingerprint.errors import BadInputError, ConflictError, NotFoundError
from fingerprint.lora import check_values, read_adapter, require_supported

__all__ = ["adapter_routes", "check_variant", "model_list", "variant_folder"]

_MAX_NAME_CHARS = 512
_MAX_PATH_CHARS = 4096


class _Unload(msgspec.Struct):
    lora_name: str


class _Load(_Unload):
    lora_path: str


T = TypeVar("T", bound=_Unload)


def adapter_routes(
    spec: WorkerSpec, engine: Engine, read_body: Callable[[web.Request], Awaitable[bytes]]
) -> Iterable[web.RouteDef]:
    """Return the routes of a worker whose configuration has adapter slots."""

    async def load(request: web.Request) -> web.Response:
        body = _parse(await read_body(request), _Load)
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
        body = _parse(await read_body(request), _Unload)
        try:
            engine.unload_adapter(body.lora_name)
        except NotFoundError as error:
            raise ApiError(404, str(error), "invalid_request_error", "lora_name", "model_not_found") from error
        return _done(f"the adapter {body.lora_name!r} is unloaded")

    return web.post("/v1/load_lora_adapter", load), web.post("/v1/unload_lora_adapter", unload)


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
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is not valid: {error}") from error
    name = body.lora_name
    if not 1 <= len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise bad_request(f"lora_name must have 1 to {_MAX_NAME_CHARS} printable characters", "lora_name")
    return body


def variant_folder(path: str, field: str) -> Path:
    """Return the folder that ``path`` names; a path of this machine, not of a hub.

    Args:
        field: of the body, which has ``path``.

    Raises:
        BadInputError: there is none.
    """
    if not 1 <= len(path) <= _MAX_PATH_CHARS or not path.isprintable():
        raise BadInputError(f"{field} must have 1 to {_MAX_PATH_CHARS} printable characters")
    folder = Path(path)
    if not folder.is_absolute():
        raise BadInputError(f"{field} must be absolute, got {path[:200]!r}")
    try:
        is_folder = folder.is_dir()
    except OSError:  # a name that is too long, say
        is_folder = False
    if not is_folder:
        raise BadInputError(f"there is no folder {path[:200]!r}; give that of an adapter")
    return folder


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
