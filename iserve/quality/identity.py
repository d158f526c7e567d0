"""Identity of a result: the contents that were measured, and by what. A newer one of the same replaces it."""

from __future__ import annotations

import hashlib

from fingerprint.codec import to_json
from iserve.quality.document import ModelFacts, QualityDocument

__all__ = ["identity_of"]


def identity_of(result: QualityDocument) -> str:
    """Return a hash of the tensors of model and reference, of the text, and of engines and configurations.

    A side whose tensors are not known is known by its name alone.
    """
    sides = [None if side is None else _side(side) for side in (result.model, result.against)]
    return hashlib.sha256(to_json([*sides, result.text.sha256])).hexdigest()


def _side(facts: ModelFacts) -> list[str | None]:
    config = None if facts.config is None else f"{facts.config.engine}:{facts.config}"
    tensors = f"named {facts.name}" if facts.sha256 is None else facts.sha256
    return [tensors, facts.variant_hash, config, facts.engine_version]
