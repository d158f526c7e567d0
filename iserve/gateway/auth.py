"""Authorisation: a valid API key or, where none is required, any client except cross-origin web pages.

The requested path is read from the request line, never from ``Host``. That header can only refuse: a web page
whose own name was made to lead to this machine (DNS rebinding) may send us anything and read the answer, but its
browser says the page's name there.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

from iserve.gateway.errors import ApiError
from iserve.keys import find_key
from iserve.route_table import RouteTable

__all__ = ["OPEN_PATHS", "check_access", "check_token"]

OPEN_PATHS = frozenset({"/healthz", "/readyz"})  # everything else is closed by default, paths not known included


def check_access(
    path: str, headers: Iterable[tuple[bytes, bytes]], table: RouteTable, *, local_address: str
) -> None:
    """Return if the request may go on. Both scopes may do all that the gateway offers.

    Args:
        local_address: our end of the connection.

    Raises:
        ApiError: 401, without saying whether the key ever existed; 403 over loopback, without keys, for a ``Host``
            that is a domain of the internet.
    """
    if path in OPEN_PATHS:
        return
    if not table.auth_required:
        if _is_loopback(local_address):
            for name, value in headers:
                if name == b"host" and _is_foreign(host := value.decode("latin-1")):
                    raise ApiError(
                        403,
                        f"without API keys this gateway answers to localhost and to IP addresses, not to "
                        f"{host[:100]!r}; ask so, or have keys required (ISERVE_REQUIRE_KEYS=1)",
                        "host_not_allowed",
                    )
        return
    presented = [value for name, value in headers if name == b"authorization"]
    if not presented:
        raise ApiError(
            401,
            "this gateway needs an API key: send 'Authorization: Bearer isk-...'; `iserve keys create` on the "
            "gateway's machine makes one",
            "invalid_api_key",
        )
    kind, _, key = presented[0].decode("latin-1").partition(" ")
    if len(presented) != 1 or kind.lower() != "bearer" or find_key(key.strip(), table.keys) is None:
        raise ApiError(
            401,
            "the API key is not valid; `iserve keys create` on the gateway's machine makes one",
            "invalid_api_key",
        )


def check_token(headers: Iterable[tuple[bytes, bytes]], token: bytes) -> None:
    """Return if ``token``, which is in this process's record, is presented.

    Raises:
        ApiError: 401.
    """
    presented = [value for name, value in headers if name == b"authorization"]
    if not token or len(presented) != 1 or not hmac.compare_digest(presented[0], b"Bearer " + token):
        raise ApiError(401, "only this installation's controller may ask that", "invalid_api_key")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_foreign(host: str) -> bool:
    """Return whether ``Host`` names what a stranger could own: no IP address, not localhost, not a bare name."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # brackets that do not match
        return True
    name = name.rstrip(".")
    if "." not in name or name.endswith(".localhost"):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return True
    return False
