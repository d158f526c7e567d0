"""Result of one measurement of quality as one value: printed as JSON or in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fingerprint.config import DeploymentConfig

__all__ = ["ComparisonDocument", "Interval", "ModelFacts", "QualityDocument", "TextFacts"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Mean over tokens or answers, and its bootstrap interval over texts."""

    value: float
    """Mean over the tokens or the answers."""
    low: float | None
    """Lower end of the 95% interval; null: of one text there is none."""
    high: float | None
    """Upper end of that interval, likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """Model that was measured. What is not known of it is null: facts of a deployment of another home."""

    name: str
    """Name that the endpoint serves it under."""
    checkpoint: str | None = None
    """Folder of its weights; null, too, for an API key that may not name it."""
    sha256: str | None = None
    """Hash of its tensors: names, types, shapes and bytes, however they are divided into files; of a variant those
    of its base."""
    variant_hash: str | None = None
    """Content hash of the variant that was measured; null: a model of its own."""
    weights_stamp: str | None = None
    """Hash of names, sizes and times of the checkpoint's files when its tensors were hashed."""
    config: DeploymentConfig | None = None
    """Configuration that serves it."""
    engine_version: str | None = None
    """Release of its engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TextFacts:
    """Texts that were predicted."""

    file: str
    """File of the texts; for an API key that may not name its folder, without that."""
    sha256: str
    """Hash of the file."""
    num_texts: int
    """Texts that were predicted."""
    num_tokens: int
    """Number of predicted tokens."""
    num_cut: int
    """Texts that were cut to what is read of one, or to the context."""
    num_left_out: int
    """Texts left out: of one token, or prompts with answers that are longer than the context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonDocument:
    """Model against its reference, on the same tokens."""

    nll: Interval
    """Negative log-likelihood of the reference, in nats per token."""
    nll_difference: Interval
    """That of the model less that of the reference; intervals of both together."""
    exact_match: Interval | None
    """Share of answers that the reference gives exactly, likewise; null: no answers."""
    kl: Interval
    """Lower bound of KL(reference || model), in nats per token."""
    shared_mass: float
    """Mean probability, by the reference, of the tokens that both report; near 1 the bound of KL is tight."""
    top1_agreement: Interval
    """Share of tokens where both find the same token likeliest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityDocument:
    """Quality of a model on a text, with 95% bootstrap intervals over the texts."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}  # as a body

    model: ModelFacts
    """Model that was measured."""
    against: ModelFacts | None
    """Reference; null: none was given."""
    url: str
    """Endpoint that served both."""
    started_at: str
    """Start, UTC, ISO 8601."""
    iserve_version: str
    """Release of iServe that measured."""
    text: TextFacts
    """Texts that were predicted."""
    nll: Interval
    """Negative log-likelihood of the model, in nats per token."""
    exact_match: Interval | None
    """Share of answers that the model gives exactly when it decodes greedily, but for blanks around them; those of
    over 511 tokens are left out; null: no answers."""
    comparison: ComparisonDocument | None
    """Comparison with the reference; null: none was given."""
    top: int
    """Likeliest tokens that were asked for at each place."""
    seed: int
    """Seed of the bootstrap."""
    notes: tuple[str, ...]
    """What a reader must know of the numbers."""
