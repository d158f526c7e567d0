"""Contention of workers on one GPU: the one place to put another model of it.

Processor sharing, by ``fingerprint.gpu_sharing``: a stage that executes a share d of its worker's step meets the
other workers on its GPU for their shares of the time, of sum o, and its part takes ``slowdown(o)`` times as long.
A TP group is as slow as its slowest GPU, and loses more where o is above 1; stages follow one another, so their
parts add up. Workers are processes without MPS, whose turns are of the whole GPU: that a step leaves arithmetic or
bandwidth unused does not matter. Not modelled: caches and power caps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from fingerprint.errors import ConfigError
from fingerprint.gpu_sharing import GROUP_LOSS, OVERHEAD, crowding_loss, slowdown

__all__ = ["Contention", "ProcessorSharing", "StageDemand", "processor_sharing"]


class StageDemand(NamedTuple):
    """Share of a worker's step that a stage executes, and the shares of other workers on each GPU of it.

    ``is_group``: a TP group, of several GPUs; those with the same co-tenants are given once.
    """

    share: float
    others: Sequence[float]
    is_group: bool = False


Contention: TypeAlias = Callable[[Sequence[StageDemand]], float]  # speed, 1 without other workers


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessorSharing:
    """Processor sharing by the module docstring. ``overhead``: k busy workers take ``overhead x k`` times as long.

    Raises:
        ConfigError: a factor below 1, or one that is not finite.
    """

    overhead: float = OVERHEAD
    group_loss: float = GROUP_LOSS

    def __post_init__(self) -> None:
        for name, factor in (("overhead", self.overhead), ("group loss", self.group_loss)):
            if not 1 <= factor < math.inf:
                raise ConfigError(
                    f"the {name} of sharing a GPU is a factor of at least 1, got {factor}; 1 shares its time "
                    "without a loss"
                )

    def __call__(self, stages: Sequence[StageDemand]) -> float:
        """Return the speed; stages' shares add up to 1, but for rounding."""
        slowed = 0.0
        for share, others, is_group in stages:
            slowed += share * _slowed(max(others), is_group, self.overhead, self.group_loss)
        return min(1.0, 1.0 / slowed)


@lru_cache(maxsize=4096)  # by far most are of whole workers
def _slowed(others: float, is_group: bool, overhead: float, group_loss: float) -> float:
    found = float(slowdown(others, overhead))
    return found * crowding_loss(min(1.0, max(0.0, others - 1.0)), group_loss) if is_group else found


processor_sharing = ProcessorSharing(overhead=1.0, group_loss=1.0)  # without a loss
