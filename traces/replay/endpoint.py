"""Where an OpenAI API answers: a URL taken apart and looked up once, so that no request waits for that."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from fingerprint.errors import ConfigError, UnavailableError

__all__ = ["Endpoint", "resolve_endpoint"]


@dataclass(frozen=True, slots=True)
class Endpoint:
    url: str  # as shown
    tls: bool
    host: str
    address: str  # the host's
    port: int
    base_path: str  # ends in /v1

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


def resolve_endpoint(url: str) -> Endpoint:
    """The endpoint of ``http://host:port``, with or without ``/v1``.

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
    return Endpoint(url, tls, parts.hostname, str(found[0][4][0]), port, base_path)
