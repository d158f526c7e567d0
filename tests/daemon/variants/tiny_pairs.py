"""Tiny bases with a fine-tune next to them, and orders of their deltas."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from daemon.variants.compress import CalibrationTexts, CompressOrder
from fingerprint.delta import FORMATS, export_delta, read_delta
from tests.fingerprint.small_fine_tunes import (
    TEXTS,
    Arrays,
    read_values,
    tiny_tensors,
    tuned,
    write_model,
)

__all__ = ["DOWN1", "NORM", "Q0", "exported", "only", "order", "write_pair"]

CALIBRATION = CalibrationTexts(sha256="0" * 64, texts=TEXTS)
Q0, DOWN1 = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"


def order(folder: Path, **changes: Any) -> CompressOrder:
    made = CompressOrder(
        base=folder / "base",
        finetuned=folder / "tuned",
        target=folder / "delta",
        format=FORMATS["int2"],
        calibration=CALIBRATION,
        max_error=None,
        base_name="base",
        finetuned_name="tuned",
    )
    return replace(made, **changes)


def write_pair(folder: Path, change: Callable[[Arrays], Arrays] = tuned, **config: object) -> Arrays:
    """Write a base and a fine-tune, and return the tensors of the base."""
    tensors = tiny_tensors()
    write_model(folder / "base", tensors, **config)  # type: ignore[arg-type]
    write_model(folder / "tuned", change(tensors), **config)  # type: ignore[arg-type]
    return tensors


def only(*names: str) -> Callable[[Arrays], Arrays]:
    """Return a fine-tuning of the tensors of ``names`` alone."""

    def change(tensors: Arrays) -> Arrays:
        changed = tuned(tensors)
        return {name: changed[name] if name in names else values for name, values in tensors.items()}

    return change


def exported(folder: Path) -> Arrays:
    export_delta(folder / "base", read_delta(folder / "delta"), folder / "exported")
    return read_values(folder / "exported")
