"""Deltas of full fine-tunes, made layer by layer. Needs torch; ``fingerprint.delta`` reads and exports them."""

from __future__ import annotations

from daemon.variants.compress.calibration import CalibrationTexts
from daemon.variants.compress.compressor import CompressOrder, CompressResult, compress_delta

__all__ = ["CalibrationTexts", "CompressOrder", "CompressResult", "compress_delta"]
