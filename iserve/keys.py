"""API keys: made, hashed and recognised. A key is shown once, when it is made; only its SHA-256 is ever stored.

A plain hash suffices (no salt, no slow function) because a key is 32 random bytes: nothing can be guessed.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from fingerprint.errors import ConfigError
from iserve.route_table import ApiKeyRecord

__all__ = ["KEY_PREFIX", "SCOPES", "find_key", "hash_key", "new_key"]

KEY_PREFIX = "isk-"
SCOPES = ("admin", "inference")
_RANDOM_BYTES = 32


def new_key(scope: str = "inference") -> tuple[str, ApiKeyRecord]:
    """Return a fresh key and the record to store of it.

    Returns:
        The key itself (47 characters, to be shown once and forgotten), and its record.

    Raises:
        ConfigError: ``scope`` is not one of ``SCOPES``.
    """
    if scope not in SCOPES:
        raise ConfigError(f"a key's scope is one of {', '.join(SCOPES)}, got {scope!r}")
    key = KEY_PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    return key, ApiKeyRecord(key_id=f"key-{secrets.token_hex(6)}", sha256=hash_key(key), scope=scope)


def hash_key(key: str) -> str:
    """Return the SHA-256 of the whole key, in lower-case hexadecimal."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def find_key(presented: str, records: Iterable[ApiKeyRecord]) -> ApiKeyRecord | None:
    """Return the record of a presented key, or None.

    Looks at every record, however early one matches, and compares in constant time: how long it takes tells
    nothing about the keys there are.
    """
    digest = hash_key(presented).encode()
    found = None
    for record in records:
        if hmac.compare_digest(record.sha256.encode(), digest):
            found = record
    return found
