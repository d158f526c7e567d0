"""Hypothesis without a clock: on a busy machine a slow example is no finding. A collector that looks at what tests
make, not at the million objects that their modules are."""

from __future__ import annotations

import gc

from hypothesis import HealthCheck, settings

settings.register_profile("no-clock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no-clock")

gc.disable()  # until all is imported: half of what that takes would be the collector's


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
