"""Contention of workers on one GPU: the one place to put another model of it.

Processor sharing: a GPU's time is divided evenly among what runs on it, at a cost. A stage that executes a share d
of its worker's step meets the other workers on its GPU for their shares of the time, of sum o, so its part takes
``1 + o + (overhead - 1) (o + min(1, o))`` times as long: k workers that are busy without a pause take ``overhead x
k`` times as long each, and a worker whose co-tenants are idle is not slowed. A TP group is as slow as its slowest
GPU; stages follow one another, so their parts add up. Workers are processes without MPS, whose turns are of the
whole GPU: that a step leaves arithmetic or bandwidth unused does not matter. Not modelled: the length of a turn
(about 2 ms, so that short steps may suffer more next to long ones), caches and power caps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from fingerprint.errors import ConfigError

__all__ = ["MEASURED_OVERHEAD", "Contention", "ProcessorSharing", "processor_sharing"]

# (share of the step, shares of other workers on each GPU of it) of every stage -> speed, 1 without other workers
Contention: TypeAlias = Callable[[Sequence[tuple[float, Sequence[float]]]], float]

MEASURED_OVERHEAD = 1.1


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorSharing:
    """Processor sharing by the module docstring.

    ``overhead`` is 1.1 by a measurement of 2026-11-22: vLLM 0.24, one H200, an 8B shape in bf16, one process for
    each engine. Next to one busy engine decode steps at batch 1, 8 and 32 took 2.16 to 2.24 times as long as
    alone, next to two 3.28 to 3.34 times; prompts 1.92 to 2.13 and about 3.3 times. More than three engines, MPS
    and steps of unequal length were not measured.

    Raises:
        ConfigError: an overhead below 1, or one that is not finite.
    """

    overhead: float = MEASURED_OVERHEAD

    def __post_init__(self) -> None:
        if not 1 <= self.overhead < math.inf:
            raise ConfigError(
                f"the overhead of sharing a GPU is a factor of at least 1, got {self.overhead}; 1 shares its time "
                "without a loss"
            )

    def __call__(self, stages: Sequence[tuple[float, Sequence[float]]]) -> float:
        """Return the speed; stages' shares add up to 1, but for rounding."""
        more, slowed = self.overhead - 1.0, 0.0
        for share, others in stages:
            most = max(others)
            slowed += share * (1.0 + most + more * (most + min(1.0, most)))
        return min(1.0, 1.0 / slowed)


processor_sharing = ProcessorSharing(overhead=1.0)  # without a loss
