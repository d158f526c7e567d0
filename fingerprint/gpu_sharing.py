"""Slowdown of engines that share GPUs without MPS: the one law of it, for planning and simulation.

Processes without MPS take turns of the whole GPU. k engines that are busy without a pause take ``1.1 k`` times as
long each, whatever they do; an idle one costs nothing. For shares of the time ``slowdown`` is the mean over short
requests, each of which meets its neighbours busy or idle; of long ones, which meet both, it is up to 16% too
much. That holds for TP groups too, but only while one of them meets one other engine at a time. With two more the
turns of its GPUs fall apart, and each all-reduce spins until they meet again: between 1 and 35 times as long once
more, by chance (``crowding_loss``).

Measured on H200s with vLLM 0.24 and 0.33: docs/gpu-sharing.md, tests/bench/results/gpu_sharing.json.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["GROUP_LOSS", "OVERHEAD", "crowding_loss", "slowdown"]

OVERHEAD = 1.1
GROUP_LOSS = 5.6  # geometric mean of six scenes on two H200s (tests/bench/test_gpu_sharing.py), 1.0 to 35

_Shares = TypeVar("_Shares", float, npt.NDArray[np.float64])


def slowdown(others: _Shares, overhead: float = OVERHEAD) -> _Shares:
    """Return how many times as long work takes next to engines busy for ``others`` of the time, in sum."""
    found: _Shares = 1.0 + overhead * others + (overhead - 1.0) * np.minimum(1.0, others)
    return found


def crowding_loss(crowded: _Shares, group_loss: float = GROUP_LOSS) -> _Shares:
    """Return how many times as long a TP group takes on top of that.

    Args:
        crowded: share of the time in which two further engines or more are busy on a GPU of it.
    """
    return 1.0 + (group_loss - 1.0) * crowded
