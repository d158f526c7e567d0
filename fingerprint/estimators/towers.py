"""Memory of a model's towers on top of an estimate of its text alone, of which profiles are."""

from __future__ import annotations

import math
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, SteadyState, TellsSteadyState
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost

__all__ = ["TOWER_ELEMENT_BYTES", "WithTowers"]

TOWER_ELEMENT_BYTES = 2  # they are left in 16 bits


class WithTowers:
    """``base`` with the weights of towers on the first and on the last stage, divided over the GPUs of each.

    vLLM's older model runner makes them on every stage of a pipeline, the newer one (all models from 0.29 on) on
    the first alone (``SupportsMultiModal._mark_tower_model``): there the last stage is promised too much.
    What towers take on an image is not counted.
    """

    name = "with towers"

    def __init__(self, base: Estimator, tower_params: int) -> None:
        self.base, self._tower_params = base, tower_params

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, with the towers in memory."""
        text = self.base.estimate(config, workload)
        more_bytes = math.ceil(TOWER_ELEMENT_BYTES * self._tower_params / config.tp)
        last_bytes = more_bytes if config.pp > 1 else 0
        memory = replace(
            text.memory,
            first_stage_bytes=text.memory.first_stage_bytes + more_bytes,
            last_stage_bytes=text.memory.last_stage_bytes + last_bytes,
        )
        return replace(text, memory=memory)

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return that of ``base``, where it has one (``estimates.TellsSteadyState``)."""
        return self.base.steady_state(config) if isinstance(self.base, TellsSteadyState) else SteadyState()

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None
