"""Judgement of whether a configuration is worth measuring for a request.

Pure. A configuration that is not measured is estimated from the nearest one that is, so measuring one tells more
of all those to which it would be the nearest: all of them are asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimator
from fingerprint.estimators.fingerprinted import nearest
from fingerprint.model_spec import ModelSpec
from iserve.planning.pipeline import EngineChooser, FitsOn, Hardware, PlanOptions
from planner.costs import Prices
from planner.space import configuration_space, shape_refusal
from planner.worth import cannot_become_best

__all__ = ["cannot_change_plan"]


def cannot_change_plan(
    config: DeploymentConfig,
    measured: Sequence[DeploymentConfig],
    spec: ModelSpec,
    hardware: Hardware,
    estimator: Estimator,
    table: EngineCapabilities,
    options: PlanOptions,
) -> str | None:
    """Return why no measurement of ``config`` changes the plan on ``hardware``; None when one may.

    Args:
        estimator: by what was measured, which is ``measured``.
        table: what the one engine runs.

    Raises:
        NotMeasuredError: there is no estimate yet.
    """
    num_gpus = len(hardware.snapshot.gpus)
    chooser = EngineChooser(spec, hardware.gpu, [table])
    runs = [
        other
        for other in configuration_space(spec, hardware.gpu, num_gpus, chooser.name)
        if shape_refusal(spec, other, num_gpus) is None and chooser.refusal(other) is None
    ]
    told = [other for other in runs if nearest(other, [*measured, config]) == config]
    if not told:
        return "nothing that runs here would be estimated from it"
    fits = FitsOn(hardware, options)
    return cannot_become_best(
        [estimator.estimate(other, options.workload) for other in told],
        [estimator.estimate(other, options.workload) for other in measured],
        options.replica_intent,
        fits=fits,
        neighbours=fits.neighbours,
        prices=Prices(usd_per_gpu_hour=hardware.gpu.price_usd_per_gpu_hour),
    )
