"""The secret that a worker's clients send: random for each worker, in a file of its folder, on no command line.

Gateway, controller and daemon know it. Other clients that reach a worker's port (a web page in a browser of this
machine, a client without an API key) are refused there. A worker outside a daemon (an exported one) has no token.
"""

from __future__ import annotations

import hmac
import secrets
from pathlib import Path

__all__ = ["OPEN_PATHS", "TOKEN_FILE", "authorization", "carries", "new_token", "read_token"]

TOKEN_FILE = "token"  # next to spec.json; mode 0600
OPEN_PATHS = frozenset({"/health"})
_MAX_BYTES = 200


def new_token() -> str:
    return secrets.token_urlsafe(32)


def read_token(folder: Path) -> str | None:
    """Return the token in a worker's folder; None where none was given to it.

    Raises:
        OSError: there is one and it cannot be read.
    """
    try:
        with (folder / TOKEN_FILE).open("rb") as file:
            return file.read(_MAX_BYTES).decode("ascii", "replace").strip() or None
    except FileNotFoundError:
        return None


def authorization(token: str | None) -> dict[str, str]:
    """Return headers of a request to a worker that has ``token``."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def carries(header: str | None, token: str) -> bool:
    """Return whether an Authorization header has the token."""
    given = (header or "").encode("utf-8", "surrogateescape")
    return hmac.compare_digest(given, f"Bearer {token}".encode())
