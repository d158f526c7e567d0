"""Costs of variants on running deployments, and advice to merge hot ones by the rates that gateways counted."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from daemon.engines.registry import get_engine
from daemon.status import NodeStatus
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.errors import IserveError
from fingerprint.estimates import Estimator
from fingerprint.measurements import Profile
from iserve.api_documents import MergeAdviceDocument, VariantCostDocument, VariantDocument
from iserve.controller.deployer import Deployer
from iserve.controller.profiling import Profiler
from iserve.controller.stored_values import recorded_request, recorded_workers
from iserve.model_source import ModelSource
from iserve.planning.merge_advice import merge_advice
from iserve.planning.model_use import used, with_images
from iserve.planning.pipeline import PlanOptions
from iserve.planning.variant_costs import variant_cost_document
from iserve.route_table import VariantDemand
from iserve.state.store import Store
from planner.adapter_slots import VariantShares

__all__ = ["VariantAdvisor"]

_KEPT_S = 5.0  # a profile takes tens of milliseconds to read
_FEWEST_REQUESTS = 30  # of a deployment: the shares of fewer are chance, and merging takes minutes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Deployed:
    """Deployment with adapter slots, as it is planned anew."""

    source: ModelSource
    config: DeploymentConfig
    options: PlanOptions
    profile: Profile | None  # None: there is none, or the daemon is away
    estimator: Estimator | None  # likewise
    table: EngineCapabilities


class VariantAdvisor:
    """Advice on the variants of deployments that were profiled. Thread-safe.

    Args:
        observe: the node now; None: its daemon is away.
        resolve: the model that a name leads to.
        demand: of the deployments and their variants, as the gateway counted it.
    """

    def __init__(
        self,
        store: Store,
        profiler: Profiler,
        deployer: Deployer,
        observe: Callable[[], NodeStatus | None],
        resolve: Callable[..., ModelSource],
        demand: Callable[[], tuple[VariantDemand, ...]],
    ) -> None:
        self._store, self._profiler, self._deployer = store, profiler, deployer
        self._observe, self._resolve, self._demand = observe, resolve, demand
        self._kept: dict[str, tuple[float, bytes | str | None, _Deployed | None]] = {}

    def of(self, variant: VariantDocument) -> MergeAdviceDocument | None:
        """Return the advice on the deployment that serves ``variant``; None: there is none."""
        if not variant.deployments:
            return None
        with contextlib.suppress(IserveError):
            return self._of_deployment(variant.deployments[0])
        return None

    def costs(self, variant: VariantDocument) -> tuple[VariantCostDocument, ...]:
        """Return what ``variant`` takes on each of the deployments that can serve it in a slot."""
        found = []
        for name in variant.deployments:
            with contextlib.suppress(IserveError):
                deployed = self._lately(name)
                if deployed is not None and deployed.config.adapter_slots:  # else it is its own, merged
                    found.append(
                        variant_cost_document(
                            variant,
                            name,
                            deployed.source.spec,
                            deployed.config,
                            with_images(deployed.options.workload, deployed.source),
                            deployed.estimator,
                            deployed.table,
                        )
                    )
        return tuple(found)

    def _lately(self, name: str) -> _Deployed | None:
        """Return the deployment as it is, or was within ``_KEPT_S``: many variants may be added at once."""
        row, now_s = self._store.deployment(name), time.monotonic()
        until_s, workers, kept = self._kept.get(name, (0.0, None, None))
        if now_s >= until_s or workers != row.workers:
            kept = self._deployed(name)
            self._kept[name] = now_s + _KEPT_S, row.workers, kept
        return kept

    def _deployed(self, name: str) -> _Deployed | None:
        """Return the deployment ``name``; None: it has no workers.

        Raises:
            IserveError: it has gone, or cannot be read.
        """
        row = self._store.deployment(name)
        workers = recorded_workers(row)
        if not workers:
            return None
        spec, request = workers[0], recorded_request(row)
        source = used(self._resolve(spec.checkpoint, need_weights=False), spec.options.use)
        options = self._deployer.options(request)
        node, engine = self._observe(), get_engine(spec.config.engine).pinned(spec.engine_version)
        batch = with_images(options.workload, source).batch
        profile = None if node is None else self._profiler.stored(source, engine, node, batch=batch)
        estimator = None
        if node is not None and profile is not None:
            estimator = self._profiler.estimator(profile, engine, node)
        return _Deployed(
            source=source,
            config=spec.config,
            options=options,
            profile=profile,
            estimator=estimator,
            table=engine.capabilities(),
        )

    def _of_deployment(self, name: str) -> MergeAdviceDocument | None:
        """Return the advice on the deployment ``name``.

        Raises:
            IserveError: it has gone, or cannot be read.
        """
        self._store.deployment(name)
        demand = next((one for one in self._demand() if one.deployment == name), None)
        if demand is not None:
            demand = registered_only(demand, {row.name for row in self._store.variants.all()})
        if demand is None or not demand.requests_per_s or not demand.of_variants:
            return None
        if demand.requests < _FEWEST_REQUESTS:
            return None
        deployed = self._deployed(name)
        if deployed is None or deployed.profile is None or deployed.estimator is None:
            return None
        return merge_advice(
            deployed.source.argument,
            deployed.source.spec,
            deployed.profile.machine.device,
            deployed.estimator,
            deployed.options,
            deployed.config,
            load_of(demand),
            demand.requests_per_s,
            names=tuple(name for name, _ in demand.of_variants),
            keeps_slots=True,
        )


def registered_only(demand: VariantDemand, names: Collection[str]) -> VariantDemand:
    """Return ``demand`` without that for variants that were removed since: none of it will follow.

    Args:
        names: of the variants that are registered.
    """
    kept = tuple((name, requests) for name, requests in demand.of_variants if name in names)
    gone = sum(requests for name, requests in demand.of_variants if name not in names)
    if not gone:
        return demand
    left, rate_per_s = max(0, demand.requests - gone), demand.requests_per_s
    if rate_per_s is not None:
        rate_per_s *= left / max(1, demand.requests)
    return replace(demand, requests_per_s=rate_per_s, requests=left, of_variants=kept)


def load_of(demand: VariantDemand) -> VariantShares:
    """Return how often each variant was asked for, as a share of the requests of its deployment."""
    number = max(demand.requests, sum(requests for _, requests in demand.of_variants), 1)
    return VariantShares(tuple(requests / number for _, requests in demand.of_variants))
