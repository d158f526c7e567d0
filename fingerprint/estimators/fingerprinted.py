"""The default estimator: fingerprints where they reach, the roofline's ratios where they do not.

Memory is M2's and latency L2's. What neither reaches (a weight or KV format, a degree, a batch or length that was
not run) is the nearest measured point times ``roofline(asked) / roofline(nearest)``, source ``scaled``, with the
measurement's and the roofline's intervals combined. So no number of a ranking is the roofline's alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate, Quantity, Source
from fingerprint.estimators.base import LatencyFit, LatencyStrategy, MemoryStrategy
from fingerprint.estimators.l2 import Latency, LayerEffect
from fingerprint.estimators.linear import Interval
from fingerprint.estimators.measured_variants import measured_cost
from fingerprint.estimators.registry import Predicts, estimator_class
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost
from fingerprint.measurements import Profile, key_of

__all__ = ["FingerprintedEstimator", "ProfileEstimator", "distance", "nearest", "scaled"]


def distance(a: DeploymentConfig, b: DeploymentConfig) -> float:
    """Return how unlike two configurations run: the kernels' format first, then how the model is cut.

    8 for another weight format, 4 for another KV format, 2 for another pruning, ``|log2(tp / tp')|`` and
    ``|log2(pp / pp')|``. A symmetric sum, so a metric; formats come first because a kernel's efficiency, which the
    roofline knows least, is the format's, while degrees change what the roofline does count.
    """
    return (
        8.0 * (a.weights != b.weights)
        + 4.0 * (a.kv != b.kv)
        + 2.0 * (a.pruning != b.pruning)
        + abs(math.log2(a.tp) - math.log2(b.tp))
        + abs(math.log2(a.pp) - math.log2(b.pp))
    )


def nearest(config: DeploymentConfig, measured: Iterable[DeploymentConfig]) -> DeploymentConfig:
    """The measured configuration of the smallest :func:`distance`; ties go to the smaller one, whatever the order.

    Of one with expert parallelism that is the same one alone, and one without is never near one with it.

    Raises:
        NotMeasuredError: nothing was measured.
    """
    alike = (other for other in measured if other.expert_parallel == config.expert_parallel)
    if config.expert_parallel:
        alike = (other for other in alike if key_of(other) == key_of(config))
    found = min(alike, key=lambda other: (distance(config, other), other), default=None)
    if found is None and config.expert_parallel:
        raise NotMeasuredError(
            f"{config} was not measured, and expert parallelism is predicted only where it was: measure it by "
            "`iserve profile --expert-parallel`, or leave experts=parallel out"
        )
    if found is None:
        raise NotMeasuredError(f"nothing was measured that {config} could be scaled from; profile the model first")
    return found


class ProfileEstimator(ABC):
    """Predicts every configuration of the profiled model on the profiled machine and engine.

    Args:
        roofline: an estimator for the same model and device; only ratios of its numbers are used.
    """

    def __init__(self, profile: Profile, roofline: Estimator) -> None:
        self.profile = profile
        self._roofline = roofline
        self._estimates: dict[tuple[DeploymentConfig, Workload], Estimate] = {}
        self._variant_costs: dict[DeploymentConfig, VariantCost | None] = {}

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict ``config`` under ``workload``.

        Raises:
            NotMeasuredError: another engine than the profile's, a profile without any usable point, or expert
                parallelism that was not measured.
            ConfigError: more stages than layers.
        """
        found = self._estimates.get((config, workload))
        if found is None:
            found = self._estimates[config, workload] = self._estimate(config, workload)
        return found

    def _estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if config.engine != self.profile.engine:
            raise NotMeasuredError(
                f"{self.profile.model} was profiled on {self.profile.engine}, {config.engine} is asked; "
                f"profile it with --engine {config.engine}"
            )
        if config.expert_parallel:
            nearest(config, {point.key.config(self.profile.engine) for point in self.profile.timing})
        memory = self._memory(config, workload)
        latency, measured_config = self._times(config, workload)
        power = self._power(config, workload)
        if power is None:
            power = self._roofline.estimate(config.without_expert_parallel, workload).power_w_per_gpu
        return Estimate(
            config=config,
            workload=workload,
            memory=memory,
            ttft_s=latency.ttft_s,
            tpot_s=latency.tpot_s,
            power_w_per_gpu=power,
            measured_config=measured_config,
            links_measured=self.profile.machine.device.measured_links(config.tp) is not None,
        )

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return what variants take by the profile's own measurements, else what its engine's kernels say
        (``variant_cost.TellsVariantCost``).
        """
        if config not in self._variant_costs:
            found: VariantCost | None = measured_cost(self.profile.variants, self.profile.spec.num_layers, config)
            if found is None and isinstance(self._roofline, TellsVariantCost):
                found = self._roofline.variant_cost(config)
            self._variant_costs[config] = found
        return self._variant_costs[config]

    @abstractmethod
    def _memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate: ...

    @abstractmethod
    def _times(self, config: DeploymentConfig, workload: Workload) -> tuple[Latency, DeploymentConfig | None]:
        """Return the times, and the configuration whose measured times they are from."""

    @abstractmethod
    def _power(self, config: DeploymentConfig, workload: Workload) -> Quantity | None:
        """Mean power read during the nearest configuration's runs; None when none was."""

    def _scaled_times(
        self,
        measured: Latency,
        asked: tuple[DeploymentConfig, Workload],
        there: tuple[DeploymentConfig, Workload],
    ) -> Latency:
        """Return what was ``measured`` ``there``, as it would be for what is ``asked``."""
        by_peaks, by_peaks_there = self._roofline.estimate(*asked), self._roofline.estimate(*there)
        return Latency(
            scaled(measured.ttft_s, by_peaks.ttft_s, by_peaks_there.ttft_s),
            scaled(measured.tpot_s, by_peaks.tpot_s, by_peaks_there.tpot_s),
        )

    def _scaled_memory(
        self, measured: MemoryEstimate, config: DeploymentConfig, near: DeploymentConfig, workload: Workload
    ) -> MemoryEstimate:
        """Return what was ``measured`` of ``near``, as it would be for ``config``."""
        asked, there = (self._roofline.estimate(each, workload).memory for each in (config, near))
        return scaled_memory(measured, asked, there)


class FingerprintedEstimator(ProfileEstimator):
    """Predicts every configuration of the profiled model on the profiled machine and engine.

    Args:
        profile: at least fingerprints of two depths at tp = pp = 1, in one format.
        roofline: an estimator for the same model and device; only ratios of its numbers are used.
        max_batched_tokens: largest prefill step the engine will be started with.
        memory, latency: strategies by their names in the registry: M1, M2 or M3, and L1, L2 or L2-device.

    Raises:
        NotFoundError: no such strategy.
    """

    name = "fingerprinted"

    def __init__(
        self,
        profile: Profile,
        roofline: Estimator,
        *,
        max_batched_tokens: int = 8192,
        memory: str = "M2",
        latency: str = "L2",
    ) -> None:
        super().__init__(profile, roofline)
        by_name = estimator_class(memory, Predicts.MEMORY)
        self.memory: MemoryStrategy = by_name(profile, max_batched_tokens=max_batched_tokens)
        self.latency: LatencyStrategy = estimator_class(latency, Predicts.LATENCY)(profile)
        self._anchors: dict[tuple[DeploymentConfig, Workload], tuple[Workload, Latency]] = {}

    @property
    def layer_effects(self) -> tuple[LayerEffect, ...]:
        """Measured time of one layer in every configuration that was run."""
        return self.latency.layer_effects

    @property
    def warnings(self) -> tuple[str, ...]:
        """Caveats of the estimates: unresolved layers, KV that is not the spec's, gaps in the profile."""
        said = []
        for effect in self.layer_effects:
            if effect.below_resolution:
                taken = _taken(effect, effect.below_resolution)
                said.append(f"below resolution: {taken}: these runs do not tell it from zero")
            if effect.below_zero:
                taken = _taken(effect, effect.below_zero)
                said.append(
                    f"below zero: {taken}: less than nothing, so something else changed between the depths that "
                    "were run; profile it again while nothing else is at work"
                )
        return (*said, *self.memory.warnings, *self.profile.notes)

    def _memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        try:
            return self.memory.memory(config, workload)
        except NotMeasuredError:
            measured, near = self._memory_anchor(config, workload)
        found = self._scaled_memory(measured, config, near, workload)
        return replace(found, layer_kv_bytes=math.ceil(self.memory.layer_kv_bytes(config, workload)))

    def _times(self, config: DeploymentConfig, workload: Workload) -> tuple[Latency, DeploymentConfig | None]:
        try:
            found = self.latency.latency(config, workload)
        except NotMeasuredError:
            near, at, measured = self._anchor(config, workload)
            return self._scaled_times(measured, (config, workload), (near, at)), near
        # itself was run, or pp = 1, plus further stages' hand-overs
        return found, config if key_of(config) in self.latency.fits else replace(config, pp=1)

    def _usable(self) -> dict[DeploymentConfig, LatencyFit]:
        full, engine = self.profile.spec.num_layers, self.profile.engine
        fits = self.latency.fits.items()
        deep = {key.config(engine): fit for key, fit in fits if len(fit.depths) > 1 or fit.depths == (full,)}
        return {config: fit for config, fit in deep.items() if fit.is_determined}

    def _anchor(self, config: DeploymentConfig, workload: Workload) -> tuple[DeploymentConfig, Workload, Latency]:
        """Return the measured point to scale from: its configuration, workload and times."""
        usable = self._usable()
        near = nearest(config, usable)
        if (near, workload) not in self._anchors:
            fit = usable[near]
            at = workload if fit.reaches(workload) else fit.nearest_workload(workload)
            self._anchors[near, workload] = at, fit.latency(at)
        return near, *self._anchors[near, workload]

    def _memory_anchor(
        self, config: DeploymentConfig, workload: Workload
    ) -> tuple[MemoryEstimate, DeploymentConfig]:
        """The nearest configuration that was loaded or follows: same degree in a measured format, if there is one.

        A strategy that does not tell one KV format from another has it in 16 bits.
        """
        dense = replace(config, pruning=Pruning.NONE)
        candidates = {
            replace(dense, weights=weights, tp=tp, pp=pp, kv=kv)
            for weights, *measured in self.memory.measured
            for tp, pp in ((config.tp, config.pp), tuple(measured))
            for kv in (config.kv, KvFormat.BITS16)
        }
        while candidates:
            near = nearest(config, candidates)
            try:
                return self.memory.memory(near, workload), near
            except NotMeasuredError:
                candidates.discard(near)
        raise NotMeasuredError(
            f"no memory was measured that {config} could be scaled from; profile the model first"
        )

    def _power(self, config: DeploymentConfig, workload: Workload) -> Quantity | None:
        usable = self._usable()
        near = nearest(config, usable)
        points = [p for p in usable[near].points if p.num_layers == usable[near].depths[-1]]
        read = [run.power_w for point in points for run in point.runs if run.power_w is not None]
        if not read:
            return None
        low, high = np.quantile(read, (0.05, 0.95))
        mean = float(np.mean(read))
        source = Source.EXTRAPOLATED if near == config else Source.SCALED
        return Quantity(mean, min(float(low), mean), max(float(high), mean), source)


def _taken(effect: LayerEffect, parts: Iterable[tuple[str, Interval]]) -> str:
    key = effect.key
    at = f"at tp={key.tp} pp={key.pp}, {key.weights}, batch {effect.batch}, {effect.input_tokens} in"
    times = " and ".join(f"{_ms(layer)} of {of_what}" for of_what, layer in parts)
    return f"{at}, one layer takes {times}"


def _ms(interval: Interval) -> str:
    value, low, high = (1e3 * second for second in (interval.value, interval.low, interval.high))
    return f"{value:.3g} ms ({low:.3g} to {high:.3g})"


def scaled(measured: Quantity, asked: Quantity, there: Quantity) -> Quantity:
    """``measured * asked / there``, with the measurement's and the asked roofline's intervals.

    Both are relative and independent, so their squares add, in logarithms (a factor of two either way is one
    width). A low end of zero stays zero. That the roofline errs alike at both points is not counted on.
    """
    value = measured.value * asked.value / there.value

    def side(end: Callable[[Quantity], float]) -> float:
        ends = [end(q) / q.value for q in (measured, asked)]
        return math.inf if min(ends) <= 0 else math.hypot(*(math.log(e) for e in ends))

    low = value * math.exp(-side(lambda q: q.low))
    high = value * math.exp(side(lambda q: q.high))
    return Quantity(value, low, high, Source.SCALED)


def scaled_memory(measured: MemoryEstimate, asked: MemoryEstimate, there: MemoryEstimate) -> MemoryEstimate:
    """``measured * asked / there``, item by item; an item that the roofline has not ``there`` is ``asked``'s."""

    def item(of: Callable[[MemoryEstimate], int]) -> int:
        return math.ceil(of(measured) * of(asked) / of(there)) if of(there) else of(asked)

    return MemoryEstimate(
        tp=asked.tp,
        pp=asked.pp,
        num_layers=asked.num_layers,
        layer_weight_bytes=item(lambda m: m.layer_weight_bytes),
        layer_kv_bytes=item(lambda m: m.layer_kv_bytes),
        first_stage_bytes=item(lambda m: m.first_stage_bytes),
        last_stage_bytes=item(lambda m: m.last_stage_bytes),
        activation_bytes=item(lambda m: m.activation_bytes),
        pp_buffer_bytes=item(lambda m: m.pp_buffer_bytes),
        runtime_bytes=item(lambda m: m.runtime_bytes),
        relative_error=math.hypot(measured.relative_error, asked.relative_error),
        source=Source.SCALED,
    )
