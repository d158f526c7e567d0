"""The weight formats the embedded engine stores; each is one file."""

from __future__ import annotations

from daemon.torch_engine.model.formats.base import LinearFormat
from daemon.torch_engine.model.formats.bits16 import Bits16Format
from daemon.torch_engine.model.formats.int8 import Int8Format
from fingerprint.config import WeightFormat

__all__ = ["FORMATS", "LinearFormat"]

FORMATS: dict[WeightFormat, LinearFormat] = {
    implementation.name: implementation for implementation in (Bits16Format(), Int8Format())
}
