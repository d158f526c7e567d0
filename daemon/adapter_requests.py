"""Requests that load and unload adapters at a worker, as vLLM has them, for every engine that iServe speaks for.

POST /v1/load_lora_adapter    {"lora_name", "lora_path"}: an absolute folder of this machine
POST /v1/unload_lora_adapter  {"lora_name"}
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from fingerprint.errors import BadInputError

__all__ = [
    "LOAD_PATH",
    "UNLOAD_PATH",
    "AdapterBodyError",
    "LoadBody",
    "UnloadBody",
    "parse_body",
    "variant_folder",
]

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_MAX_NAME_CHARS = 512
_MAX_PATH_CHARS = 4096


class AdapterBodyError(BadInputError):
    """A body that is not valid; ``field``: of it, where one is to blame."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class UnloadBody(msgspec.Struct):
    """Body of an unload."""

    lora_name: str


class LoadBody(UnloadBody):
    """Body of a load."""

    lora_path: str


T = TypeVar("T", bound=UnloadBody)


def parse_body(raw: bytes, kind: type[T]) -> T:
    """Return the body of a load or an unload.

    Raises:
        AdapterBodyError: it is none, or its name is empty, too long or not printable.
    """
    try:
        body = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise AdapterBodyError(f"the body is not valid: {error}") from error
    name = body.lora_name
    if not 1 <= len(name) <= _MAX_NAME_CHARS or not name.isprintable():
        raise AdapterBodyError(f"lora_name must have 1 to {_MAX_NAME_CHARS} printable characters", "lora_name")
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
