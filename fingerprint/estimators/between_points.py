"""Coordinates of points for the Gaussian processes of L3, and the hull of points.

Decode steps go by batch and input, and so does the TTFT of a dense model; prompts of mixtures by all their tokens
and by how their kernels are launched (docs/decisions/0058). Coordinates are lengths over which a time's ratio to
the roofline keeps its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

__all__ = ["PROMPTS_SPREAD", "STEPS_SPREAD", "Coordinates", "in_hull", "octaves", "of_prompts", "of_steps"]

_LENGTH_OCTAVES = 2.5  # of batch or input, over which a TPOT's ratio to the roofline keeps its value
STEPS_SPREAD = 0.2  # of its logarithm, prior to any measurement
# Likewise of TTFT: octaves of all prompt tokens, and of batch against input; how far apart steps in graphs and
# steps that are launched kernel by kernel lie. Of a grid the most likely for each measured point under the rest
# of its profile: 173 points of 13 profiles, no truth of a whole model (``tests.bench.accuracy_left_out``,
# decision 58).
_TOKENS_OCTAVES, _SHAPE_OCTAVES, _LAUNCHED_APART, PROMPTS_SPREAD = 2.5, 4.0, 1.0, 0.5
_ON_THE_EDGE = 1e-6  # of the hull of points, in octaves: rounding


class At(Protocol):
    """Batch of prompts of one length."""

    @property
    def batch(self) -> int: ...

    @property
    def input_tokens(self) -> int: ...


Coordinates = Callable[[At], tuple[float, ...]]


def of_steps(at: At) -> tuple[float, ...]:
    """Return what decode steps go by, in lengths over which their ratio to the roofline keeps its value."""
    return tuple(each / _LENGTH_OCTAVES for each in octaves(at))


def of_prompts(graph_tokens: int) -> Coordinates:
    """Return what steps of prompts go by: all tokens, batch against input, and whether a graph holds them.

    Args:
        graph_tokens: of the largest graph; the kernels of more are launched one by one.
    """

    def coordinates(at: At) -> tuple[float, ...]:
        batch, tokens = octaves(at)
        is_launched = at.batch * at.input_tokens > graph_tokens
        of_all, of_shape = (batch + tokens) / _TOKENS_OCTAVES, (batch - tokens) / 2 / _SHAPE_OCTAVES
        return of_all, of_shape, is_launched / _LAUNCHED_APART

    return coordinates


def in_hull(points: Sequence[tuple[float, float]], asked: tuple[float, float]) -> bool:
    """Return whether ``asked`` is in the convex hull of ``points``: whether it is their mean under some weights.

    One point or several in a row have a hull too.
    """
    from scipy.optimize import nnls  # half a second to load, and most plans have no such profile

    corners = np.array([(x, y, 1.0) for x, y in points]).T
    wanted = np.array([*asked, 1.0])
    weights, _ = nnls(corners, wanted)
    return bool(np.linalg.norm(corners @ weights - wanted) < _ON_THE_EDGE)


def octaves(at: At) -> tuple[float, float]:
    """Return log2 of the batch and of the input."""
    return math.log2(at.batch), math.log2(at.input_tokens)
