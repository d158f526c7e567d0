"""The embedded engine's real worker keeps the engine protocol."""

from __future__ import annotations

from typing import ClassVar

from tests.daemon.engines.engine_conformance import EngineConformance


class TestTorch(EngineConformance):
    engine = "torch"
    token_fields: ClassVar = {"return_token_ids": True}  # the tiny model has no tokenizer
