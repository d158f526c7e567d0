"""Deltas of full fine-tunes, made layer by layer. Needs torch; ``fingerprint.delta`` reads and exports them."""

from __future__ import annotations

from daemon.variants.compress.calibration import CalibrationTexts
from daemon.variants.compress.compressor import CompressOrder, CompressResult, compress_delta
from daemon.variants.compress.devices import compute_device
from daemon.variants.compress.judgement import JudgedText, JudgementTexts, TextLoss
from daemon.variants.compress.model_parts import check_layers
from daemon.variants.compress.trials import Trial, TrialsResult, compress_within

__all__ = [
    "CalibrationTexts",
    "CompressOrder",
    "CompressResult",
    "JudgedText",
    "JudgementTexts",
    "TextLoss",
    "Trial",
    "TrialsResult",
    "check_layers",
    "compress_delta",
    "compress_within",
    "compute_device",
]
