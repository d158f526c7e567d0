"""Plans and estimates for GPUs that need not be here, from a config.json and a datasheet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from daemon.engines.registry import capabilities_for
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import MemoryEstimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.model_source import resolve
from iserve.plan_document import EstimateDocument, PlanDocument, estimate_document, plan_document
from iserve.planning import PlanOptions, hypothetical_hardware, make_plan
from planner.costs import COSTS, Prices, figures
from planner.intent import CostModel
from planner.space import shape_refusal

__all__ = ["OneEstimateDocument", "estimate_for_gpu", "plan_for_gpus"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OneEstimateDocument:
    """``iserve estimate --json``."""

    model: str
    gpu: str
    config: DeploymentConfig
    workload: Workload
    estimate: EstimateDocument
    cost_unit: str
    memory: MemoryEstimate
    runnable: bool
    reason: str | None  # why no engine runs it, or why it does not fit


def plan_for_gpus(
    model: str,
    gpu: GpuSpec,
    count: int,
    options: PlanOptions,
    engine: str,
    *,
    registered: Mapping[str, Path] | None = None,
) -> PlanDocument:
    """A plan on ``count`` idle ``gpu``, by the roofline."""
    source = resolve(model, registered or {}, need_weights=False)
    hardware = hypothetical_hardware(gpu, count)
    estimator = RooflineEstimator(source.spec, gpu)
    plan = make_plan(source.spec, hardware, estimator, capabilities_for(engine), options)
    return plan_document(plan, model=source.name, hardware=hardware.label, workload=options.workload)


def estimate_for_gpu(
    model: str,
    gpu: GpuSpec,
    config: DeploymentConfig,
    workload: Workload,
    cost: CostModel,
    *,
    registered: Mapping[str, Path] | None = None,
) -> OneEstimateDocument:
    """One configuration on as many ``gpu`` as it takes, by the roofline.

    Raises:
        ConfigError: the model cannot be cut that way.
    """
    source = resolve(model, registered or {}, need_weights=False)
    engines = capabilities_for(config.engine)
    able = [e.engine for e in engines if e.refusal(source.spec, config, gpu) is None]
    settled = replace(config, engine=able[0] if able else engines[0].engine)
    estimate = RooflineEstimator(source.spec, gpu).estimate(settled, workload)
    prices = Prices(usd_per_gpu_hour=gpu.price_usd_per_gpu_hour)
    price = float(COSTS[cost].of(figures([estimate]), prices)[0])
    document = estimate_document(estimate, cost=None if math.isnan(price) else price)
    reason = _refusal(source.spec, settled, gpu, engines)
    if reason is None and document.memory_bytes_per_gpu > gpu.memory_bytes:
        reason = (
            f"needs {document.memory_bytes_per_gpu / 2**30:.1f} GiB on the fullest GPU, "
            f"a {gpu.name} has {gpu.memory_bytes / 2**30:.1f} GiB"
        )
    return OneEstimateDocument(
        model=source.name,
        gpu=gpu.name,
        config=settled,
        workload=workload,
        estimate=document,
        cost_unit=COSTS[cost].unit,
        memory=estimate.memory,
        runnable=reason is None,
        reason=reason,
    )


def _refusal(
    spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec, engines: Sequence[EngineCapabilities]
) -> str | None:
    shape = shape_refusal(spec, config, config.num_gpus)
    reasons = [engine.refusal(spec, config, gpu) for engine in engines]
    if shape is not None or any(reason is None for reason in reasons):
        return shape
    return "; ".join(dict.fromkeys(str(reason) for reason in reasons))
