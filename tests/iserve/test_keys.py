"""API keys."""

from __future__ import annotations

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import ConfigError
from iserve.keys import find_key, hash_key, new_key


def test_hash_is_sha256_of_the_whole_key() -> None:
    """Recorded with ``printf isk-abc | sha256sum``."""
    assert hash_key("isk-abc") == "bb1730852575c2b96c126087ab99570d23641995ea531e24c9b314ab4af0652f"


def test_a_key_carries_32_random_bytes() -> None:
    keys = {new_key()[0] for _ in range(50)}
    assert len(keys) == 50
    assert all(key.startswith("isk-") and len(key) == 4 + 43 for key in keys)  # 43 base64 characters hold 32 bytes


def test_the_record_does_not_hold_the_key() -> None:
    key, record = new_key("admin")
    assert record.scope == "admin"
    assert key[4:].encode() not in to_json(record)


def test_only_the_very_key_is_found() -> None:
    pairs = [new_key() for _ in range(3)]
    records = [record for _, record in pairs]
    assert [find_key(key, records) for key, _ in pairs] == records
    key = pairs[0][0]
    for wrong in ("", "isk-", key[:-1], key + "x", key.upper(), " " + key, records[0].sha256, "\udc80", "isk-é"):
        assert find_key(wrong, records) is None
    assert find_key(key, []) is None


def test_unknown_scope_is_refused() -> None:
    with pytest.raises(ConfigError, match="root"):
        new_key("root")
