"""Step times as the simulator has them: the planner's estimates, with the factors that a world's truth states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, Quantity
from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants, RooflineEstimator, all_reduce_s
from fingerprint.gpu_spec import GpuSpec
from fingerprint.interconnect import MeasuredLinks
from fingerprint.model_spec import ModelSpec
from iserve.evaluation.world import Truth
from traces.simulator.step_model import Limits, StepModel, tabulate

__all__ = ["ScaledEstimator", "TrueSteps", "true_estimator", "true_links"]

_LINK_SIZES = (8 * 2**10, 32 * 2**20)  # two are enough: the truth is a latency and a bandwidth


class ScaledEstimator:
    """Estimator whose times are those of another one, times a factor (implements ``Estimator``)."""

    def __init__(self, estimator: Estimator, factor: float) -> None:
        self.name = f"{estimator.name} x {factor:g}"
        self._estimator, self._factor = estimator, factor

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        found = self._estimator.estimate(config, workload)
        return replace(found, ttft_s=self._scaled(found.ttft_s), tpot_s=self._scaled(found.tpot_s))

    def _scaled(self, of: Quantity) -> Quantity:
        return Quantity(of.value * self._factor, of.low * self._factor, of.high * self._factor, of.source)


def true_estimator(
    spec: ModelSpec, gpu: GpuSpec, engines: Sequence[EngineCapabilities], truth: Truth
) -> Estimator:
    """Return the estimator of ``truth``: communication takes ``all_reduce``, every step ``step_times`` as long.

    Communication is the all-reduces of tensor parallelism and the transfers between pipeline stages.
    """
    constants = _constants(truth)
    eager = frozenset(table.engine for table in engines if table.eager)
    roofline = RooflineEstimator(spec, gpu, constants=constants, eager=eager)
    return roofline if truth.step_times == 1 else ScaledEstimator(roofline, truth.step_times)


def _constants(truth: Truth) -> RooflineConstants:
    factor = truth.all_reduce
    return replace(
        CALIBRATED,
        link_efficiency=CALIBRATED.link_efficiency / factor,
        all_reduce_latency_s=CALIBRATED.all_reduce_latency_s * factor,
        all_reduce_hop_s=CALIBRATED.all_reduce_hop_s * factor,
        handover_latency_s=CALIBRATED.handover_latency_s * factor,
    )


def true_links(gpu: GpuSpec, most: int, truth: Truth) -> tuple[MeasuredLinks, ...]:
    """Return the links of groups of up to ``most`` GPUs, as a daemon would measure them in this truth."""
    constants = _constants(truth)

    def send_s(group: int, size: int) -> float:
        link = gpu.slowest_link_bytes_per_s(group) * constants.link_efficiency
        return constants.handover_latency_s + size / link

    return tuple(
        MeasuredLinks(
            gpus=group,
            sizes_bytes=_LINK_SIZES,
            all_reduce_s=tuple(all_reduce_s(gpu, size // 2, group, 1, constants) for size in _LINK_SIZES),
            send_s=tuple(send_s(group, size) for size in _LINK_SIZES),
        )
        for group in (2, 4, 8)
        if group <= most
    )


class TrueSteps:
    """Step tables of one model under the truth, without variants, made once for each configuration and limits."""

    def __init__(self, estimator: Estimator) -> None:
        self._estimator = estimator
        self._made: dict[tuple[DeploymentConfig, Limits], StepModel] = {}

    def __call__(self, config: DeploymentConfig, limits: Limits) -> StepModel:
        plain = config.without_slots
        key = (plain, limits)
        if key not in self._made:
            self._made[key] = tabulate(self._estimator, plain, limits)
        return self._made[key]
