"""The estimator of engines that carry our step timer: L3 and the engine's own memory counts where they reach.

What neither reaches (another degree or format) is the nearest measured configuration times
``roofline(asked) / roofline(nearest)``, source ``scaled``; so no number of a ranking is the roofline's alone, but
where the result is below what the GPU's peaks allow, or every point that was run is: then it is.
"""

from __future__ import annotations

import math

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate, Quantity, Source
from fingerprint.estimators.calibration import Calibration, shipped_calibration
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.fingerprinted import nearest, scaled, scaled_memory
from fingerprint.estimators.host_overlap import hidden_time_s
from fingerprint.estimators.l2 import Latency
from fingerprint.estimators.l3 import L3
from fingerprint.estimators.physical_floor import PhysicalFloor
from fingerprint.measurements import MeasuredKey, Profile, key_of
from fingerprint.profile_checks import routing_caveat

__all__ = ["DepthTiedEstimator"]


class DepthTiedEstimator:
    """Predicts every configuration of the profiled model on the profiled machine and engine.

    Args:
        profile: taken by ``fingerprint.depth_tied_profile``.
        roofline: an estimator for the same model and device; only ratios of its numbers are used.
        calibration: measured errors of other models.
    """

    name = "depth-tied"

    def __init__(self, profile: Profile, roofline: Estimator, calibration: Calibration | None = None) -> None:
        self.profile = profile
        self.l3 = L3(profile, roofline, shipped_calibration() if calibration is None else calibration)
        self.memory = CountedMemory(profile)
        self._roofline = roofline
        self._floor = PhysicalFloor(profile.spec, profile.machine.device)
        self._estimates: dict[tuple[DeploymentConfig, Workload], Estimate] = {}

    @property
    def warnings(self) -> tuple[str, ...]:
        """Caveats of the estimates."""
        routing = routing_caveat(self.profile)
        return (*self.profile.notes, *self.l3.unusable, *((routing,) if routing else ()))

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict ``config`` under ``workload``.

        Raises:
            NotMeasuredError: another engine than the profile's, or a profile without any usable point.
        """
        found = self._estimates.get((config, workload))
        if found is None:
            found = self._estimates[config, workload] = self._estimate(config, workload)
        return found

    def hidden_s(self, config: DeploymentConfig) -> float:
        """Return the hidden time of the nearest configuration run (``estimates.TellsHiddenTime``)."""
        near = key_of(self._nearest(config) or config)
        return hidden_time_s([point for point in self.profile.timing if point.key == near])

    def _estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if config.engine != self.profile.engine:
            raise NotMeasuredError(
                f"{self.profile.model} was profiled on {self.profile.engine}, {config.engine} is asked; "
                f"profile it with --engine {config.engine}"
            )
        near = config if self.l3.reaches(config) else self._nearest(config)
        latency = None if near is None else self._latency(config, near, workload)
        if latency is None:
            near, by_peaks = None, self._roofline.estimate(config, workload)
            latency = Latency(by_peaks.ttft_s, by_peaks.tpot_s)
        return Estimate(
            config=config,
            workload=workload,
            memory=self._memory(config, workload),
            ttft_s=latency.ttft_s,
            tpot_s=latency.tpot_s,
            power_w_per_gpu=self._power(config, workload),
            measured_config=near,
            links_measured=self.profile.machine.device.measured_links(config.tp) is not None,
        )

    def _nearest(self, config: DeploymentConfig) -> DeploymentConfig | None:
        """Return the nearest configuration whose times are known; None where no point has a possible one."""
        if not self.l3.points and self.l3.impossible:
            return None
        return nearest(config, (self._config(key) for key in self.l3.points))

    def _latency(self, config: DeploymentConfig, near: DeploymentConfig, workload: Workload) -> Latency | None:
        """Return the times that those of ``near`` tell; None where the GPU cannot keep them."""
        found = self.l3.latency(near, workload)
        if near != config:
            asked, there = self._roofline.estimate(config, workload), self._roofline.estimate(near, workload)
            found = Latency(
                scaled(found.ttft_s, asked.ttft_s, there.ttft_s), scaled(found.tpot_s, asked.tpot_s, there.tpot_s)
            )
        possible = self._floor.allows(config, workload, ttft_s=found.ttft_s.value, tpot_s=found.tpot_s.value)
        return found if possible else None

    def _memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        try:
            return self.memory.memory(config, workload)
        except NotMeasuredError:
            near = nearest(config, (self._config(key) for key in self.memory.keys))
        measured = self.memory.memory(near, workload)
        asked = self._roofline.estimate(config, workload).memory
        there = self._roofline.estimate(near, workload).memory
        return scaled_memory(measured, asked, there)

    def _power(self, config: DeploymentConfig, workload: Workload) -> Quantity | None:
        """Mean power read at the nearest point of the nearest configuration; the roofline's when none was."""
        near = self._nearest(config)
        if near is None:
            return self._roofline.estimate(config, workload).power_w_per_gpu
        read = [
            (abs(math.log2(p.batch / workload.batch)) + abs(math.log2(p.input_tokens / workload.input_tokens)), w)
            for p in self.profile.timing
            if p.key == key_of(near) and p.output_tokens > 1
            for w in (run.power_w for run in p.runs)
            if w is not None
        ]
        if not read:
            return self._roofline.estimate(config, workload).power_w_per_gpu
        closest = min(distance for distance, _ in read)
        watts = [w for distance, w in read if distance == closest]
        mean = sum(watts) / len(watts)
        alike = near == config and key_of(config) not in self.l3.shards  # a rank alone does not wait for its group
        source = Source.EXTRAPOLATED if alike else Source.SCALED
        return Quantity(mean, min(watts), max(watts), source)

    def _config(self, key: MeasuredKey) -> DeploymentConfig:
        return DeploymentConfig(tp=key.tp, pp=key.pp, weights=key.weights, kv=key.kv, engine=self.profile.engine)
