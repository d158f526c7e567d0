"""How far depth-tied predictions were off on whole models that were measured, and the intervals that follow.

``fingerprint/data/depth_tied_errors.json`` is written by ``tests/bench/accuracy.py`` on a GPU. A model's own
errors never widen or narrow its own interval: they are left out by the model's shape.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import numpy as np

from fingerprint.codec import from_json

__all__ = ["Calibration", "MeasuredError", "shipped_calibration"]

_INTERVAL = 0.90
_FEWEST_MODELS = 2
_ROUNDING = 1e-9  # of a sum of shares: in whatever order errors come, the same one is at the edge
# A burst of few prompt tokens waits for the host, one of many for the GPU's arithmetic: errors differ by ten times.
_NEAR_OCTAVES = 1.5  # standard deviation of the weight over log2 of the prompt tokens
_UNCALIBRATED = 0.15  # of the logarithm, on both sides: an assumption, until two other models were measured


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredError:
    """One predicted number of one model, against the whole model."""

    model: str
    shape_hash: str
    engine: str  # "vllm 0.24.0"
    gpu: str
    weights: str
    metric: str  # "ttft" | "tpot"
    batch: int
    input_tokens: int
    log_error: float  # ln(measured / predicted)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Errors of predictions, all models."""

    errors: tuple[MeasuredError, ...] = ()

    def bounds(self, metric: str, *, prompt_tokens: int, exclude_shape: str) -> tuple[float, float]:
        """(below, above): between value * exp(-below) and value * exp(above) lie 90% of the other models' truths.

        Points with about as many prompt tokens in all (batch times input) count most, and each model alike,
        however many points of it were measured. With fewer than two other models both are 0.15, which is an
        assumption.
        """
        by_model: dict[str, list[MeasuredError]] = {}
        for error in self.errors:
            if error.metric == metric and error.shape_hash != exclude_shape:
                by_model.setdefault(error.shape_hash, []).append(error)
        if len(by_model) < _FEWEST_MODELS:
            return _UNCALIBRATED, _UNCALIBRATED
        others = [error for errors in by_model.values() for error in errors]
        values = np.array([error.log_error for error in others])
        octaves = np.log2([error.batch * error.input_tokens / prompt_tokens for error in others])
        far = (octaves**2 - (octaves**2).min()) / (2 * _NEAR_OCTAVES**2)  # the nearest has weight 1
        weights = np.exp(-far) / [len(by_model[error.shape_hash]) for error in others]
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        tail = (1 - _INTERVAL) / 2
        at = np.searchsorted(share, np.array([tail, 1 - tail]) - _ROUNDING)
        low, high = (float(value) for value in values[order][at])
        return max(0.0, -low), max(0.0, high)


@cache
def shipped_calibration() -> Calibration:
    """The errors that were measured and come with the package; none when the file is not there."""
    file = resources.files("fingerprint").joinpath("data/depth_tied_errors.json")
    if not file.is_file():
        return Calibration()
    return Calibration(from_json(file.read_bytes(), tuple[MeasuredError, ...], what="depth_tied_errors.json"))
