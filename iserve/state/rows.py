"""Rows of the state as values."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.verification import Verification

__all__ = [
    "DeploymentRow",
    "EventRow",
    "KeptAnswer",
    "KeyRow",
    "ModelRow",
    "QualityRow",
    "VariantRow",
    "VerificationRow",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelRow:
    name: str
    directory: str
    created_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantRow:
    name: str
    base: str  # as it was named
    base_directory: str  # all links followed
    content_hash: str  # of the variant store
    max_rank: int  # 0: a delta of a full fine-tune, which has none
    num_modules: int  # tensors of a delta that differ from the base's
    num_bytes: int
    disk_bytes: int  # of its tensors' files, when it was last added
    trained_on: str | None  # as the adapter's configuration says
    pinned: bool
    created_at: float

    @property
    def is_delta(self) -> bool:
        return self.max_rank == 0

    @property
    def engine_name(self) -> str:
        """Name at the workers: other content is another model there, so that no stale cache entry matches."""
        return f"{self.name}@{self.content_hash[:16]}"


@dataclass(frozen=True, kw_only=True, slots=True)
class QualityRow:
    identity: str  # iserve.quality.identity
    variant_hash: str  # of the variant store; empty: a model of its own
    weights_stamp: str  # of the model's folder, or of the base's
    measured_at: float
    body: str  # iserve.quality.document.QualityDocument as JSON


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentRow:
    id: int
    name: str
    created_at: float
    request: str
    desired: str
    phase: str
    error: str | None
    plan: str | None
    workers: str | None  # one for each replica
    update_request: str | None = None  # of an update under way; None: there is none
    update_plan: str | None = None
    update_workers: str | None = None
    update_stop_first: bool | None = None  # the former workers end before those of the update start
    draining: str | None = None  # workers of before the last update, while they finish what they have


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRow:
    id: int
    at: float
    deployment_id: int | None
    kind: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyRow:
    key_id: str
    sha256: str
    scope: str
    label: str
    created_at: float
    revoked: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VerificationRow:
    model: str
    shape_hash: str
    engine: str
    machine_key: str
    verification: Verification


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptAnswer:
    """Request with an idempotency key, and its answer."""

    key: str
    created_at: float
    request: str
    answer: str
