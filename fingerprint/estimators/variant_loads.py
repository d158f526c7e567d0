"""Time of loads of variants in steady state, on top of an estimate of prompts and steps with adapter slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator, Quantity, Source, SteadyState, TellsSteadyState
from fingerprint.estimators.adapter_slots import ADDED_ERROR, later, loads_stop_steps, variant_cost, variant_load_s
from fingerprint.estimators.variant_cost import TellsVariantCost, VariantCost
from fingerprint.load_waits import LoadWaits, OneLoad
from fingerprint.model_spec import ModelSpec

__all__ = ["MOST_REPLICAS", "WithVariantLoads"]

MOST_REPLICAS = 16  # with a number of their own: more spare one another at least as much


class WithVariantLoads:
    """``base`` with the loads that a batch needs, where a load stops its worker; else with the waits for loads.

    Like a prompt, the load that a request needs is before its first token and adds its whole time to that of all
    requests under way, however much of the prompt is in a prefix cache. ``missed`` is an upper bound (replicas
    share variants), so that the interval begins at no load. What replicas spare one another depends on their
    number and on the rate, which are not known here: ``Estimate.spared_loads_s`` has the most that it can be. The
    copy of a loaded variant into a slot was not measured and is left out.

    A load next to the steps delays the requests for its variant alone, by the rate, which is not known here: times
    are those without it, and ``Estimate.load_waits`` has the rest.

    Args:
        missed: returns the share of all requests whose variant is not loaded, by how many a worker keeps loaded.
        waits: returns the waits for loads next to the steps, by the slots, that number and the seconds of a load.
        most_replicas: for which the loads are found that they spare one another; more count as so many.
    """

    def __init__(
        self,
        base: Estimator,
        spec: ModelSpec,
        missed: Callable[[int], float],
        waits: Callable[[int, int, float], LoadWaits | None],
        most_replicas: int = MOST_REPLICAS,
    ) -> None:
        self.name = base.name
        self.base, self._spec, self._missed, self._waits = base, spec, cache(missed), cache(waits)
        self._spared, self._most_replicas = cache(self._shares_spared), most_replicas

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict as ``base``, with loads in TTFT, or the waits for them."""
        found = self.base.estimate(config, workload)
        cost = variant_cost(self.base, self._spec, config)
        if cost is None:
            return found
        load_s = variant_load_s(cost, self._spec, config)
        if not loads_stop_steps(config):
            return replace(found, load_waits=self._waits(config.adapter_slots, config.loaded_adapters, load_s))
        missed = self._missed(config.loaded_adapters)
        if not missed:
            return found
        loads_s = workload.batch * missed * load_s
        of_loads = Quantity(loads_s, 0.0, loads_s * ADDED_ERROR, Source.SCALED)
        spared_s = tuple(share * load_s for share in self._spared(config.loaded_adapters))
        one_load = OneLoad(load_s=load_s, stops_steps=True, counted_s=missed * load_s)
        ttft_s = later(found.ttft_s, of_loads)
        return replace(found, ttft_s=ttft_s, spared_loads_s=spared_s, one_load=one_load)

    def _shares_spared(self, places: int) -> tuple[float, ...]:
        """Return the share of requests that need a load with the places of one replica, but not with those of n.

        For n of 1, 2, ..., until none needs one.
        """
        spared = []
        for replicas in range(1, self._most_replicas + 1):
            left = self._missed(replicas * places)
            spared.append(self._missed(places) - left)
            if not left:
                break
        return tuple(spared)

    def steady_state(self, config: DeploymentConfig) -> SteadyState:
        """Return that of ``base``, where it has one (``estimates.TellsSteadyState``)."""
        return self.base.steady_state(config) if isinstance(self.base, TellsSteadyState) else SteadyState()

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return that of ``base``, where it has one (``variant_cost.TellsVariantCost``)."""
        return self.base.variant_cost(config) if isinstance(self.base, TellsVariantCost) else None
