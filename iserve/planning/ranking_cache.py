"""A model's configurations ranked once, for a cluster that decides often: only what fits depends on what is free.

``make_plan`` estimates and ranks hundreds of configurations to explain every one of them. Here the order is kept;
a decision asks placement until no later configuration can be better, and is the same
(tests/iserve/test_ranking_cache.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, Estimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.planning.pipeline import (
    FitsOn,
    Hardware,
    PlanOptions,
    check_context,
    prices_of,
    ranked_anywhere,
    space,
)
from placement.types import ClusterSnapshot, Placement
from planner.plan import Candidate
from planner.rank import rivals_of
from planner.space import MAX_PP, TP_DEGREES

__all__ = ["Chosen", "RankedModel"]


class Chosen(NamedTuple):
    """The best configuration that fits, and where."""

    config: DeploymentConfig
    estimate: Estimate
    placement: Placement


class _Order(NamedTuple):
    """Candidates that nothing but memory refuses, the best objective first."""

    candidates: list[Candidate]
    rivals: dict[DeploymentConfig, list[Candidate]]  # of each measured one that was asked for (``rivals_of``)

    def those(self, *, measured: bool) -> list[Candidate]:
        return [one for one in self.candidates if one.estimate and one.estimate.is_measured == measured]


class RankedModel:
    """Ranking of one model under one intent.

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
        self.options = options.of_one_batch if options.is_joint(engines, gpu) else options
        self._orders: dict[int, _Order] = {}

    def feasible(self, num_gpus: int) -> list[Estimate]:
        """Return the estimates of the configurations that keep every limit on idle GPUs, the best first."""
        found = (one.estimate for one in self._order(num_gpus).candidates)
        return [estimate for estimate in found if estimate is not None]

    def choose(self, snapshot: ClusterSnapshot) -> Chosen | None:
        """Return what ``make_plan`` would choose on ``snapshot``; None: nothing.

        Of a joint plan it is what one batch would choose; see ``feasible``. Where only some are measured the first
        that fits may be passed over (``planner.evidence``).
        """
        if not snapshot.gpus:
            return None
        fits = FitsOn(Hardware(label="", gpu=self._gpu, snapshot=snapshot), self.options)
        order = self._order(len(snapshot.gpus))
        measured = _first_that_fits(order.those(measured=True), fits)
        if measured is None:
            return _first_that_fits(order.candidates, fits)
        return _first_that_fits(self._rivals(order, measured.config), fits) or measured

    def _rivals(self, order: _Order, config: DeploymentConfig) -> list[Candidate]:
        if config not in order.rivals:
            measured = next(one for one in order.candidates if one.config == config)
            predicted = order.those(measured=False)
            order.rivals[config] = rivals_of(measured, predicted, self.options.intent, prices_of(self._gpu))
        return order.rivals[config]

    def _order(self, num_gpus: int) -> _Order:
        num_gpus = min(num_gpus, max(TP_DEGREES) * MAX_PP)
        if num_gpus not in self._orders:
            made = space(self._spec, self._gpu, num_gpus, self._estimator, self._engines, self.options)
            by_config = {candidate.config: candidate for candidate in made}
            plan = ranked_anywhere(made, self.options, self._gpu)
            feasible = sorted((one for one in plan.candidates if one.feasible), key=lambda one: one.row)
            candidates = [by_config[one.config] for one in feasible if one.objective is not None]
            self._orders[num_gpus] = _Order(candidates, {})
        return self._orders[num_gpus]


def _first_that_fits(candidates: Sequence[Candidate], fits: FitsOn) -> Chosen | None:
    for config, estimate, *_ in candidates:
        assert estimate is not None, "what is ranked has an estimate"
        answer = fits(estimate)
        if isinstance(answer, Placement):
            return Chosen(config, estimate, answer)
    return None
