"""Names of the merged checkpoints of variants: each tells apart all that its tensors are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

from fingerprint.codec import to_json
from fingerprint.errors import CheckpointError
from iserve.quality.facts import weights_stamp

__all__ = ["is_merged", "is_merged_of", "merged_key", "merged_keys", "model_of"]


def merged_key(content_hash: str, base_directory: str) -> str:
    """Return a name for the merge of a content into a base: of its folder and names, sizes and times of its files.

    Raises:
        CheckpointError: the base cannot be read.
    """
    base = os.path.realpath(base_directory)
    return _key(content_hash, base, weights_stamp(Path(base)))


def merged_keys(variants: Iterable[tuple[str, str]]) -> Iterator[str | None]:
    """Yield :func:`merged_key` of each content and base; None: the base cannot be read. Each is looked at once."""

    @cache
    def stamp_of(base: str) -> str | None:
        with suppress(CheckpointError):
            return weights_stamp(Path(base))
        return None

    real = cache(os.path.realpath)
    for content_hash, directory in variants:
        stamp = stamp_of(real(directory))
        yield None if stamp is None else _key(content_hash, real(directory), stamp)


def _key(content_hash: str, base: str, stamp: str) -> str:
    return sha256(to_json([content_hash, base, stamp])).hexdigest()


def model_of(request: str) -> str | None:
    """Return the model that a deployment's request, as JSON, asks for, its links followed; None: the demo."""
    model = json.loads(request).get("model")
    return os.path.realpath(model) if isinstance(model, str) and "\0" not in model else None


def is_merged(request: str, folder: Path | None) -> bool:
    """Return whether a deployment's request is for a merged checkpoint in ``folder``."""
    model = model_of(request)
    return folder is not None and model is not None and os.path.dirname(model) == os.path.realpath(folder)


def is_merged_of(request: str, folder: Path | None, content_hash: str, base_directory: str) -> bool:
    """Return whether a deployment's request is for the merge, in ``folder``, of a content into a base as it is."""
    model = model_of(request)
    if model is None or not is_merged(request, folder):
        return False
    try:
        return os.path.basename(model) == merged_key(content_hash, base_directory)
    except CheckpointError:  # it is gone, and nothing is known to be of it
        return False
