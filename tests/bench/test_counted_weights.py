"""Memory of recorded whole models against what their fingerprints' counts tell."""

from __future__ import annotations

import pytest

from tests.bench.accuracy import RESULTS, load, memory_row
from tests.bench.accuracy_families import FOLDERS


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_are_within_a_thousandth(folder: str) -> None:
    """DeepSeek-V2-Lite's first layer is dense: with a mean layer for all it would be 2.8% off."""
    for one in load(RESULTS / folder):
        found = memory_row(one)
        assert found.weights_predicted == pytest.approx(found.weights_bytes, rel=0.001), one.model
        assert found.non_kv_predicted == pytest.approx(found.non_kv_bytes, rel=0.03), one.model
        assert found.blocks_predicted == pytest.approx(found.blocks, rel=0.015), one.model
