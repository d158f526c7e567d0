"""Who may ask. Decides on the request path and the Authorization header; never looks at ``Host``."""

from __future__ import annotations

from collections.abc import Iterable

from iserve.gateway.errors import ApiError
from iserve.keys import find_key
from iserve.routes import RouteTable

__all__ = ["OPEN_PATHS", "check_access"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # everything else is closed by default, paths not known included


def check_access(path: str, headers: Iterable[tuple[bytes, bytes]], table: RouteTable) -> None:
    """Return if the request may go on. Both scopes may do all that the gateway offers.

    Raises:
        ApiError: 401, without saying whether the key ever existed.
    """
    if not table.auth_required or path in OPEN_PATHS:
        return
    presented = [value for name, value in headers if name == b"authorization"]
    if not presented:
        raise ApiError(
            401, "this gateway needs an API key: send 'Authorization: Bearer isk-...'", "invalid_api_key"
        )
    kind, _, key = presented[0].decode("latin-1").partition(" ")
    if len(presented) != 1 or kind.lower() != "bearer" or find_key(key.strip(), table.keys) is None:
        raise ApiError(401, "the API key is not valid; make one with the deployment's operator", "invalid_api_key")
