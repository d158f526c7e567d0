"""Times of a server's steps: host time that is hidden behind the step before, and contexts of many lengths.

A lone prompt finds the device idle: it waits while the host schedules, makes the step's inputs and launches its
first kernels, and sampling follows at the host's pace. All of that is ``RunReading.host_s`` of a burst of one step
and one token. In a row of steps only logits and sampling are left around a forward. Engines that prepare steps
ahead hide the rest.

Decode steps of a profile have equal contexts. The longest of a server's keeps some of the GPU's multiprocessors at
work when the rest have ended: the step takes what contexts of the mean and some of the longest's surplus over it
would.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from packaging.version import InvalidVersion, Version

from fingerprint.estimators.repeat_overhead import decoding
from fingerprint.measurements import TimingPoint

__all__ = ["LONGEST_SHARE", "hidden_time_s", "longest_share"]

# By least squares of relative errors of 32 decode steps of three models with contexts of many lengths, on vLLM
# 0.33.0 and an H200 (``tests.bench.served_steps``), each over its like with equal contexts.
LONGEST_SHARE = 0.11
_MEASURED_ON = (0, 33)  # and later releases; on 0.24 replays were not nearer (docs/fidelity.md)


def hidden_time_s(points: Sequence[TimingPoint]) -> float:
    """Seconds around the forward of a lone step, less those around one in a row; 0.0 where no run tells.

    Args:
        points: of one configuration, with step readings.
    """
    lone = [
        statistics.median(run.host_s for run in point.runs)
        for point in points
        if point.output_tokens == 1 and all(len(run.steps) == 1 for run in point.runs)
    ]
    in_a_row = [
        step.cadence_s - step.forward_s for point in points for run in point.runs for step in decoding(point, run)
    ]
    if not (lone and in_a_row):
        return 0.0
    return max(0.0, statistics.median(lone) - statistics.median(in_a_row))


def longest_share(engine: str) -> float:
    """Return the share of the longest context's surplus over the mean by which a decode step's context grows.

    Args:
        engine: with its version, as in a profile's machine: "vllm 0.33.0".
    """
    name, _, version = engine.rpartition(" ")
    try:
        release = Version(version).release
    except InvalidVersion:
        return 0.0
    return LONGEST_SHARE if name == "vllm" and release >= _MEASURED_ON else 0.0
