"""The embedded engine's real worker keeps the engine protocol."""

from __future__ import annotations

from tests.daemon.engines.engine_conformance import EngineConformance


class TestTorch(EngineConformance):
    engine = "torch"
