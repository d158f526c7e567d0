"""Search for a crossing on ladders."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.crossing import crossing


@given(
    steps=st.sampled_from([4, 8, 16]),
    where=st.lists(st.floats(-0.5, 16.5), min_size=1, max_size=5),
    start=st.floats(-30.0, 30.0),
)
def test_a_crossing_is_found_on_any_ladder(steps: int, where: list[float], start: float) -> None:
    """Each row ends to be fine at a place of its own: within a 65,536th of a step from below."""
    ladder = start + np.arange(steps, dtype=float)[:, None] + np.zeros(len(where))
    ends = start + np.array(where)
    found = crossing(lambda x, rows: x <= ends[rows], ladder)
    for end, one in zip(ends.tolist(), found.tolist(), strict=True):
        if end < start or end >= start + steps - 1:
            assert one == (-math.inf if end < start else math.inf)
        else:
            assert 0 <= end - one <= 2.0**-16 * (1 + 1e-6)
