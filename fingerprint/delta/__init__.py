"""Deltas: the changes that a full fine-tune made to a base, in a few bits a weight.

What a delta is (formats, packing, manifest), reading one, and writing base + delta out as a checkpoint. Knows no
engine and loads no torch; ``daemon.variants.compress`` makes deltas.
"""

from __future__ import annotations

from fingerprint.delta.base import BaseHashes, check_base
from fingerprint.delta.export import ExportResult, export_delta
from fingerprint.delta.formats import DEFAULT_FORMAT, EMBEDDING_FORMAT, FORMATS, DeltaFormat, delta_bytes
from fingerprint.delta.manifest import AdapterOrigin, DeltaManifest
from fingerprint.delta.reader import Delta, is_delta, open_delta, read_delta

__all__ = [
    "DEFAULT_FORMAT",
    "EMBEDDING_FORMAT",
    "FORMATS",
    "AdapterOrigin",
    "BaseHashes",
    "Delta",
    "DeltaFormat",
    "DeltaManifest",
    "ExportResult",
    "check_base",
    "delta_bytes",
    "export_delta",
    "is_delta",
    "open_delta",
    "read_delta",
]
