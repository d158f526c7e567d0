"""Points of a profile, one per run: a fingerprint in its formats, and the shape of a burst."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fingerprint.config import KvFormat, WeightFormat
from fingerprint.model_spec import ModelSpec

__all__ = ["Shape", "Visit"]


@dataclass(frozen=True, slots=True)
class Visit:
    """A fingerprint loaded in one pair of formats."""

    layers: tuple[int, ...]  # of the model
    weights: WeightFormat
    kv: KvFormat

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def kinds(self, spec: ModelSpec) -> tuple[int, ...]:
        """Layers of each kind; empty where all of the model are alike."""
        if not spec.several_kinds:
            return ()
        counts = Counter(spec.kind_indexes[layer] for layer in self.layers)
        return tuple(counts[kind] for kind in range(len(spec.kinds)))


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    input_tokens: int
    output_tokens: int

    @property
    def cost(self) -> int:
        """Tokens computed: what a run's time grows with at most."""
        return self.batch * (self.input_tokens + self.output_tokens)
