"""Adapters in PEFT's format: what a folder holds, whether it fits a base, and the merged checkpoint.

Reads bytes and writes bytes; knows no engine, and loads neither torch nor peft.
"""

from __future__ import annotations

from fingerprint.lora.adapter import (
    LoraAdapter,
    LoraModule,
    check_values,
    content_sha256,
    read_adapter,
    require_mergeable,
    require_supported,
)
from fingerprint.lora.adapter_config import MergedPart
from fingerprint.lora.base_fit import BaseTensors, check_fit
from fingerprint.lora.merge import MergeResult, merge_adapter
from fingerprint.lora.slot_bytes import reserved_bytes, slot_bytes

__all__ = [
    "BaseTensors",
    "LoraAdapter",
    "LoraModule",
    "MergeResult",
    "MergedPart",
    "check_fit",
    "check_values",
    "content_sha256",
    "merge_adapter",
    "read_adapter",
    "require_mergeable",
    "require_supported",
    "reserved_bytes",
    "slot_bytes",
]
