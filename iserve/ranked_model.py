"""A model's configurations ranked once, for a cluster that decides often: only what fits depends on what is free.

``make_plan`` estimates and ranks hundreds of configurations to explain every one of them. Here the order is kept;
a decision asks placement until the first configuration fits, and is the same (tests/iserve/test_ranked_model.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, Estimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.planning import FitsOn, Hardware, PlanOptions, check_context, ranked_space
from placement.load_model import LoadedCluster, Tenant, shares
from placement.types import ClusterSnapshot, Placement
from planner.intent import IntentKind
from planner.space import MAX_PP, TP_DEGREES

__all__ = ["Chosen", "RankedModel"]


class Chosen(NamedTuple):
    """The best configuration that fits, and where."""

    config: DeploymentConfig
    estimate: Estimate
    placement: Placement


@dataclass(frozen=True, slots=True)
class _Everywhere:
    layers_per_stage: tuple[int, ...] = ()


_LOOKED_AT = 8  # configurations: each costs a placement


class RankedModel:
    """One model under one intent.

    Raises:
        ConfigError: the workload is longer than the model's context.
    """

    def __init__(
        self,
        spec: ModelSpec,
        gpu: GpuSpec,
        estimator: Estimator,
        engines: Sequence[EngineCapabilities],
        options: PlanOptions,
    ) -> None:
        check_context(spec, options.workload)
        self._spec, self._gpu, self._estimator, self._engines = spec, gpu, estimator, engines
        self.options = options
        self._orders: dict[int, list[tuple[DeploymentConfig, Estimate]]] = {}

    def choose(self, snapshot: ClusterSnapshot) -> Chosen | None:
        """What ``make_plan`` would choose on ``snapshot``; None: nothing."""
        return next(self._that_fit(snapshot), None)

    def choose_beside(self, snapshot: ClusterSnapshot, requests_per_s: float) -> Chosen | None:
        """The configuration that adds least to the time that *all* requests take, where one that is best alone may
        slow the others more than it gains. For the intent ``min-latency``; any other chooses as ever
        (docs/placement.md says why).

        A deployment's requests take its rate times its E2E, per second, as slowed by those beside it
        (``placement.load_model``). Of every tp and pp the best configuration is looked at, the eight best.
        The own part alone never falls along the order, so the search ends early where it exceeds the best sum.
        """
        if self.options.intent.kind is not IntentKind.MIN_LATENCY:
            return self.choose(snapshot)
        cluster = LoadedCluster.of(snapshot)
        best: Chosen | None = None
        least = float("inf")
        for chosen in islice(self._that_fit(snapshot, one_of_each_degree=True), _LOOKED_AT):
            busy = requests_per_s * chosen.estimate.e2e_s.value / self.options.workload.batch
            if busy >= least:
                break
            added = cluster.cost_of_adding(Tenant(busy, shares(chosen.placement)), 0.0)
            if added < least:
                best, least = chosen, added
        return best

    def _that_fit(self, snapshot: ClusterSnapshot, *, one_of_each_degree: bool = False) -> Iterator[Chosen]:
        """Best first, each where the policy would put it; of each tp and pp all, or the first."""
        seen: set[tuple[int, int]] = set()
        if not snapshot.gpus:
            return
        fits = FitsOn(Hardware(label="", gpu=self._gpu, snapshot=snapshot), self.options)
        for config, estimate in self._order(min(len(snapshot.gpus), max(TP_DEGREES) * MAX_PP)):
            degrees = (config.tp, config.pp)
            if one_of_each_degree and degrees in seen:
                continue
            answer = fits(estimate)
            if isinstance(answer, Placement):
                seen.add(degrees)
                yield Chosen(config, estimate, answer)

    def _order(self, num_gpus: int) -> list[tuple[DeploymentConfig, Estimate]]:
        """What nothing but memory refuses, best first."""
        if num_gpus not in self._orders:
            plan = ranked_space(
                self._spec,
                self._gpu,
                num_gpus,
                self._estimator,
                self._engines,
                self.options,
                fits=lambda estimate: _Everywhere(),
            )
            self._orders[num_gpus] = [
                (one.config, one.estimate) for one in plan.candidates if one.feasible and one.estimate is not None
            ]
        return self._orders[num_gpus]
