"""Contention of workers on one GPU: the one place to put another model of it.

Processor sharing: a GPU's time is divided evenly among what runs on it. A stage that executes a share d of its
worker's step meets the other workers on its GPU for their shares o of the time, so its part takes ``1 + sum of o``
times as long; a TP group is as slow as its slowest GPU; stages follow one another, so their parts add up. Two
workers on one GPU each go at half speed. Not modelled: bandwidth and compute overlapping (better than half),
caches and power caps (worse).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

__all__ = ["Contention", "processor_sharing"]

# (share of the step, shares of other workers on each GPU of it) of every stage -> speed, 1 without other workers
Contention: TypeAlias = Callable[[Sequence[tuple[float, Sequence[float]]]], float]


def processor_sharing(stages: Sequence[tuple[float, Sequence[float]]]) -> float:
    """Return the speed by the module docstring's model; stages' shares add up to 1, but for rounding."""
    return min(1.0, 1.0 / sum(share * (1.0 + max(others)) for share, others in stages))
