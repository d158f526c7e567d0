"""Letters of an answer: for an adapter or a delta those of its name, its weights, and those of its cached KV.

As in vLLM, weights are those that were loaded last under a name, and KV is kept by the name alone: other weights
under a name that was used before answer from KV of the former ones.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

BASE = "abcdefgh"
_FILES = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "delta.json",
)  # a delta's has the hashes of its tensors


def content_of(folder: Path) -> str:
    """Return the hash of what is loaded from ``folder``."""
    found = [file.read_bytes() for name in _FILES if (file := folder / name).is_file()]
    return hashlib.sha256(b"".join(found)).hexdigest()


def letters_of(name: str, content: str, of_kv: str | None = None) -> str:
    """Return the first letters of an answer; ``of_kv``: the content by which KV was computed, else the same."""
    return hashlib.sha256(f"{name} {content} {of_kv or content}".encode()).hexdigest()[: len(BASE)]
