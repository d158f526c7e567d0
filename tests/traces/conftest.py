"""Shared helpers of the tests of workloads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reference_traces() -> Path:
    """The folder of published traces; their README's statistics are recorded in the tests."""
    folder = os.environ.get("ISERVE_REFERENCE_DATA")
    if not folder:
        pytest.skip("ISERVE_REFERENCE_DATA does not name the folder of reference data")
    return Path(folder) / "traces"
