"""The estimator of engines that carry our step timer: L3 and the engine's own memory counts where they reach.

What neither reaches (another degree or format) is the nearest measured configuration times
``roofline(asked) / roofline(nearest)``, source ``scaled``; so no number of a ranking is the roofline's alone, but
where the result is below what the GPU's peaks allow, or every point that was run is: then it is.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator, MemoryEstimate, Quantity, Source, SteadyState
from fingerprint.estimators.calibration import Calibration, shipped_calibration
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.fingerprinted import ProfileEstimator, nearest
from fingerprint.estimators.l2 import Latency
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.physical_floor import PhysicalFloor
from fingerprint.estimators.steady_state import hidden_time_s, longest_share
from fingerprint.measurements import Profile, key_of
from fingerprint.profile_checks import routing_caveat

__all__ = ["DepthTiedEstimator"]


class DepthTiedEstimator(ProfileEstimator):
    """Predicts every configuration of the profiled model on the profiled machine and engine.

    Args:
        profile: taken by ``fingerprint.depth_tied_profile``.
        calibration: measured errors of other models.
    """

    name = "depth-tied"

    def __init__(self, profile: Profile, roofline: Estimator, calibration: Calibration | None = None) -> None:
        super().__init__(profile, roofline)
        self.l3 = L3(profile, roofline, shipped_calibration() if calibration is None else calibration)
        self.memory = CountedMemory(profile)
        self._floor = PhysicalFloor(profile.spec, profile.machine.device)

    def with_calibration(self, calibration: Calibration) -> DepthTiedEstimator:
        """Return the same with another calibration; reading a profile takes longer than asking what it says."""
        made = copy(self)
        made.l3 = copy(self.l3)
        made.l3.calibration = calibration
        made._estimates = {}
        return made

    @property
    def warnings(self) -> tuple[str, ...]:
        """Caveats of the estimates."""
        routing = routing_caveat(self.profile)
        return (*self.profile.notes, *self.l3.unusable, *((routing,) if routing else ()))

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return what the nearest configuration run tells, and the engine's release."""
        near = key_of(self._nearest(config) or config)
        return SteadyState(
            hidden_time_s([point for point in self.profile.timing if point.key == near]),
            longest_share(dict(self.profile.machine.versions)["engine"]) if config.pp == 1 else 0.0,
        )

    def _times(self, config: DeploymentConfig, workload: Workload) -> tuple[Latency, DeploymentConfig | None]:
        near = config if self.l3.reaches(config) else self._nearest(config)
        if near is not None:
            found = self.l3.latency(near, workload)
            if config.pp == near.pp == 1:
                found = self._padded(near, workload, found)
            if near != config:
                found = self._scaled_times(found, (config, workload), (near, workload))
            ttft_s, tpot_s = found.ttft_s.value, found.tpot_s.value
            if self._floor.allows(config, workload, ttft_s=ttft_s, tpot_s=tpot_s):
                return found, near
        # The GPU cannot keep those times; that experts lie on it as wholes changes none of its peaks.
        by_peaks = self._roofline.estimate(config.without_expert_parallel, workload)
        return Latency(by_peaks.ttft_s, by_peaks.tpot_s), None

    def _padded(self, config: DeploymentConfig, workload: Workload, found: Latency) -> Latency:
        """Return the times of one stage, a mixture's decode step with the rows of its graph.

        What pads a step chooses experts as the rest does, but reads no KV: that much less it takes at peak
        bandwidth. A batch that was measured was padded then; beyond the largest one no graph's rows were measured.
        """
        if not self.profile.spec.is_mixture:
            return found
        batches = {point.batch for point in self.l3.points[key_of(config)]}
        rows = traits_of(self.profile.engine).rows_of_graph(workload.batch, largest=self.profile.graph_tokens)
        if workload.batch in batches or not workload.batch < rows <= max(batches):
            return found
        whole = replace(workload, batch=rows)
        kv_s = self._floor.tpot_s(config, whole) - self._floor.tpot_s(config, workload)
        step_s = self.l3.latency(config, whole).tpot_s
        less = 1 - kv_s / step_s.value
        own = Quantity(less * step_s.value, less * step_s.low, less * step_s.high, step_s.source)
        return replace(found, tpot_s=own)

    def _nearest(self, config: DeploymentConfig) -> DeploymentConfig | None:
        """Return the nearest configuration whose times are known; None where no point has a possible one."""
        if not self.l3.points and self.l3.impossible:
            return None
        return nearest(config, (key.config(self.profile.engine) for key in self.l3.points))

    def _memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        try:
            return self.memory.memory(config, workload)
        except NotMeasuredError:
            near = nearest(config, (key.config(self.profile.engine) for key in self.memory.keys))
        return self._scaled_memory(self.memory.memory(near, workload), config, near, workload)

    def _power(self, config: DeploymentConfig, workload: Workload) -> Quantity | None:
        near = self._nearest(config)
        if near is None:
            return None
        read = [
            (abs(math.log2(p.batch / workload.batch)) + abs(math.log2(p.input_tokens / workload.input_tokens)), w)
            for p in self.profile.timing
            if p.key == key_of(near) and p.output_tokens > 1
            for w in (run.power_w for run in p.runs)
            if w is not None
        ]
        if not read:
            return None
        closest = min(distance for distance, _ in read)
        watts = [w for distance, w in read if distance == closest]
        mean = sum(watts) / len(watts)
        alike = near == config and key_of(config) not in self.l3.shards  # a rank alone does not wait for its group
        source = Source.EXTRAPOLATED if alike else Source.SCALED
        return Quantity(mean, min(watts), max(watts), source)
