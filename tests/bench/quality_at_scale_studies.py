"""Studies of ``quality_at_scale``, kept as a file for each seed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.errors import ConfigError
from tests.bench.variant_quality import Sizes

__all__ = ["Case", "ScaleOutcome", "SeedStudy", "StudyScale", "begun", "read_studies", "write_study"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyScale:
    """Extent of a study."""

    sizes: Sizes
    pretraining_lr: float
    calibration_rows: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Model that is measured on a task."""

    task: str  # of ``Sizes.steps``, or LEARNED_BEFORE
    method: str  # BASE, FULL, OTHER_BASE, ``lora_name(rank)``, a format, or WHOLE and a format
    calibration: str = ""  # of a format: TEXTS, RANDOM or ROUNDED


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleOutcome:
    """Measured quality of one case.

    Attributes:
        error: mean over the linears, of what their change adds to outputs; bits: of one of their weights, padding
            included. Both are 0 where nothing is compressed.
        kept_bytes: of tensors that are kept for the model next to a base; of whole weights and of models, all.
        model_bytes: of the fine-tune's tensors, in 16 bits.
        seconds: that the case took, training included where it was the first to need it.
    """

    case: Case
    exact_match: float
    nll: float
    trained_params: int
    error: float
    bits: float
    kept_bytes: int
    model_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedStudy:
    """Outcomes of one seed, with what they were made by."""

    date: str
    machine: str
    torch: str
    transformers: str
    seed: int
    model_params: int
    scale: StudyScale
    outcomes: tuple[ScaleOutcome, ...]


def begun(file: Path, empty: SeedStudy) -> SeedStudy:
    """Return the study of ``file``, or an empty one; ConfigError where it was made at another scale or place."""
    if not file.exists():
        return empty
    study = _read(file)
    for what in ("scale", "machine", "torch", "transformers"):
        before, now = getattr(study, what), getattr(empty, what)
        if before != now:
            words = "" if what == "scale" else f", {before} instead of {now}"
            raise ConfigError(f"{file} was made with another {what}{words}; give another OUT")
    return study


def _read(file: Path) -> SeedStudy:
    return from_json(file.read_bytes(), SeedStudy, what=file.name)


def write_study(file: Path, study: SeedStudy) -> None:
    part = file.with_suffix(".part")
    part.write_text(json.dumps(json.loads(to_json(study)), indent=1) + "\n")
    part.replace(file)


def read_studies(folder: Path) -> list[SeedStudy]:
    """Return the studies of a folder by seed; none where it is not there."""
    return [_read(file) for file in sorted(folder.glob("seed-*.json"))]
