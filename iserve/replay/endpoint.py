"""Endpoint of an OpenAI API: a URL taken apart and looked up once, so that no request waits for that."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from daemon.http_exchange import EXCHANGE_ERRORS, exchange
from fingerprint.errors import ConfigError, NotFoundError, UnavailableError
from iserve.http_stream import Origin

__all__ = ["Endpoint", "check_models", "resolve_endpoint"]

_PATIENCE_S = 10.0
_MAX_LIST_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str  # as shown
    origin: Origin
    base_path: str  # ends in /v1


def resolve_endpoint(url: str) -> Endpoint:
    """Return the endpoint of ``http://host:port``, with or without ``/v1``.

    Raises:
        ConfigError: not such a URL.
        UnavailableError: the host's name is not known.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url!r} is no URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the URL of an endpoint, such as http://127.0.0.1:8000/v1")
    path = parts.path.rstrip("/")
    if any(c.isspace() or not c.isascii() for c in path + parts.hostname):
        raise ConfigError(f"{url!r} holds characters that no URL has")
    tls = parts.scheme == "https"
    port = port or (443 if tls else 80)
    try:
        found = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UnavailableError(f"the host of {url} is not known: {error.strerror or error}") from error
    base_path = path if path.endswith("/v1") else f"{path}/v1"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    context = ssl.create_default_context() if tls else None
    origin = Origin(str(found[0][4][0]), port, f"{host}:{port}", context, parts.hostname if tls else None)
    return Endpoint(url, origin, base_path)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def check_models(endpoint: Endpoint, names: Sequence[str], key: str | None) -> None:
    """Ask the endpoint for its models, before a run finds out a thousand times. One that lists none passes.

    Raises:
        UnavailableError: nothing answers.
        NotFoundError: it lists its models, and one of ``names`` is not among them.
    """
    status, answer = _get_models(endpoint, key)
    if status in (401, 403):
        raise UnavailableError(
            f"{endpoint.url} wants another API key (--key, OPENAI_API_KEY): it answered {status}; for iServe's "
            "gateway `iserve keys create` makes one"
        )
    if status != 200:
        return
    try:
        known = [model.id for model in msgspec.json.decode(answer, type=_Models).data]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    for name in names:
        if name not in known:
            raise NotFoundError(f"{endpoint.url} serves no {name!r}; it serves {', '.join(known) or 'nothing'}")


def _get_models(endpoint: Endpoint, key: str | None) -> tuple[int, bytes]:
    try:
        return exchange(
            endpoint.url,
            "GET",
            f"{endpoint.base_path}/models",
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout_s=_PATIENCE_S,
            max_bytes=_MAX_LIST_BYTES,
        )
    except EXCHANGE_ERRORS as error:
        raise UnavailableError(f"{endpoint.url} does not answer: {error}") from error
