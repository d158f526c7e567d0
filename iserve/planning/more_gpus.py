"""Advice to take more GPUs, of a plan that nothing is feasible for: as few as were found to suffice."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

from fingerprint.config import DeploymentConfig
from planner.plan import LimitKind, Relaxation

__all__ = ["least_more_gpus", "more_gpus_advice"]

_MOST_GPUS = 64  # in all, or twice as many as there are
_P = TypeVar("_P")


def least_more_gpus(num_gpus: int, plan_with: Callable[[int], _P | None]) -> tuple[int, _P] | None:
    """Return the fewest more GPUs that were found to suffice, and what is planned with them; None: none were.

    One more is tried, then twice as many in all as there are, and so on up to 64; at last, by halves, those
    between the first that suffice and the last that do not.

    Args:
        plan_with: returns what is planned with so many more GPUs; None: nothing.
    """
    most, few = max(_MOST_GPUS, 2 * num_gpus), 0
    doubled = itertools.takewhile(lambda wide: wide <= most, (num_gpus << times for times in itertools.count(1)))
    for more in sorted({1, *(wide - num_gpus for wide in doubled)}):
        if (planned := plan_with(more)) is not None:
            break
        few = more
    else:
        return None
    while more - few > 1:
        middle = (more + few) // 2
        if (found := plan_with(middle)) is None:
            few = middle
        else:
            more, planned = middle, found
    return more, planned


def more_gpus_advice(num_gpus: int, more: int, config: DeploymentConfig, objective: float | None) -> Relaxation:
    """Return the advice to take ``more`` GPUs than ``num_gpus``."""
    idle = "one more idle GPU" if more == 1 else f"{more} more idle GPUs"
    return Relaxation(LimitKind.GPUS, num_gpus, num_gpus + more, config, objective, f"{idle} would admit {config}")
