"""Time of prompts of which the engine's prefix cache holds a part, from an estimate of whole prompts."""

from __future__ import annotations

import math
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engines import traits_of
from fingerprint.estimates import Estimate, Estimator, Quantity, Source, SteadyState, TellsSteadyState
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost

__all__ = ["WithPrefixHits"]


class WithPrefixHits:
    """``base`` for prompts whose first tokens, a share ``hits``, are in the cache of an engine that has one.

    The rest takes what the whole prompt takes beyond its first part, attention to that part included, and no less
    than as many tokens by themselves. Steps and memory are those of whole prompts: which requests share their
    blocks is not known. The interval is as wide in proportion, though it is a difference that is estimated.
    """

    def __init__(self, base: Estimator, hits: float) -> None:
        self.name = f"{base.name}, {hits:.0%} of prompts cached"
        self.base, self._hits = base, hits

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, but for TTFT, which is measured of whole prompts only."""
        whole = self.base.estimate(config, workload)
        if not traits_of(config.engine).caches_prefixes:
            return whole
        new_tokens = max(1, math.ceil(workload.input_tokens * (1 - self._hits)))
        if new_tokens >= workload.input_tokens:
            return whole
        alone_s, first_s = (
            self.base.estimate(config, replace(workload, input_tokens=tokens)).ttft_s.value
            for tokens in (new_tokens, workload.input_tokens - new_tokens)
        )
        ttft = whole.ttft_s
        part = min(1.0, max(alone_s, ttft.value - first_s) / ttft.value)
        source = Source.EXTRAPOLATED if ttft.source is Source.MEASURED else ttft.source
        return replace(whole, ttft_s=Quantity(part * ttft.value, part * ttft.low, part * ttft.high, source))

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return that of ``base``, where it has one (``estimates.TellsSteadyState``)."""
        return self.base.steady_state(config) if isinstance(self.base, TellsSteadyState) else SteadyState()

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None
