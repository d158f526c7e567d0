"""The embedded engine's real worker keeps the engine protocol."""

from __future__ import annotations

import pytest

from tests.daemon.engines.engine_conformance import EngineConformance


@pytest.mark.smoke
class TestTorch(EngineConformance):
    engine = "torch"
