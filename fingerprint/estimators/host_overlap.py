"""Host time of a lone step, which engines that prepare steps ahead hide behind the step before.

A lone prompt finds the device idle: it waits while the host schedules, makes the step's inputs and launches its
first kernels, and sampling follows at the host's pace. All of that is ``RunReading.host_s`` of a burst of one step
and one token. In a row of steps only logits and sampling are left around a forward.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fingerprint.estimators.repeat_overhead import decoding
from fingerprint.measurements import TimingPoint

__all__ = ["hidden_time_s"]


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
