"""Folders of fingerprints and of random variants of them, for one profile."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fingerprint.random_variants import base_hashes, write_random_variant
from fingerprint.truncate import generate, generate_dummy, generate_shape
from fingerprint.variant_measurements import VariantKind
from iserve.model_source import ModelSource

__all__ = ["Fingerprints"]


class Fingerprints:
    """Cuts each fingerprint when it is first asked for."""

    def __init__(self, source: ModelSource, folder: Path, *, weights: bool) -> None:
        self._source, self._folder, self._weights = source, folder, weights
        self._variant_bytes: dict[Path, dict[Path, int]] = {}  # of each fingerprint's, by folder
        self._hashes = cache(base_hashes)

    def __call__(self, layers: int | Sequence[int], tp: int = 1) -> Path:
        """Return a fingerprint of these layers, or the first so many; above ``tp`` 1 one rank's shape, without
        weights.
        """
        chosen = tuple(range(layers)) if isinstance(layers, int) else tuple(layers)
        name = "layers-" + "-".join(map(str, chosen))
        target = self._folder / (name if tp == 1 else f"{name}-of-{tp}")
        if not target.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            if tp > 1 or not self._weights:  # the engine makes random ones
                code = bool(self._source.spec.own_code) and self._source.use.trust_remote_code
                generate_shape(self._source.directory, target, chosen, tp=tp, code=code)
            elif self._source.has_weights:
                generate(self._source.directory, target, chosen)
            else:
                generate_dummy(self._source.directory, target, chosen, seed=0)
        return target

    def variant(self, layers: Sequence[int], kind: VariantKind, number: int) -> tuple[Path, int]:
        """Return the folder of a random variant of the fingerprint of ``layers``, and its tensors' bytes."""
        base = self(layers)
        target = base.with_name(f"{base.name}-{kind.rank or kind.delta_format}-{number}")
        written = self._variant_bytes.setdefault(base, {})
        if target not in written:
            written[target] = write_random_variant(base, target, kind, number, hashes=self._hashes)
        return target, written[target]

    def forget_variants(self, layers: Sequence[int]) -> None:
        """Delete the variants of the fingerprint of ``layers``."""
        for target in self._variant_bytes.pop(self(layers), {}):
            shutil.rmtree(target, ignore_errors=True)
