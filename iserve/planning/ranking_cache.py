"""A model's configurations ranked once, for a cluster that decides often: only what fits depends on what is free.

``make_plan`` estimates and ranks hundreds of configurations to explain every one of them. Here the order is kept;
a decision asks placement until no later configuration can be better, and is the same
(tests/iserve/test_ranking_cache.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from planner.costs import objective_of
from planner.plan import Candidate, Layout, NoRoom, Ranked
from planner.rank import best_of, rivals_of
from planner.space import MAX_PP, TP_DEGREES

__all__ = ["Chosen", "RankedModel"]


class Chosen(NamedTuple):
    """The best configuration that fits, and where."""

    config: DeploymentConfig
    estimate: Estimate
    placement: Placement


# Once a place is known, more are looked at while GPUs of the cluster times GPUs of the place add up to this: on
# 1,000 GPUs places of sixteen together, on eight 2,000.
_LOOKS = 16_000
_AT_ONCE = 16  # ranked together, which takes hardly longer than one


class _Weighed(NamedTuple):
    """A candidate by what it is ranked by on idle GPUs."""

    candidate: Candidate
    value: float
    worst: float  # the worse end of its interval

    @property
    def is_measured(self) -> bool:
        estimate = self.candidate.estimate
        return estimate is not None and estimate.is_measured


class _Order(NamedTuple):
    """Candidates that nothing but memory refuses on idle GPUs, the best value first."""

    weighed: list[_Weighed]
    measured: list[_Weighed]  # empty where ``is_mixed`` is false
    predicted: list[_Weighed]  # those that were not measured, likewise
    rivals: dict[DeploymentConfig, list[Candidate]]  # of each measured one that was asked for (``rivals_of``)

    @classmethod
    def of(cls, weighed: list[_Weighed]) -> _Order:
        measured = [one for one in weighed if one.is_measured]
        if len(measured) in (0, len(weighed)):
            return cls(weighed, [], [], {})
        return cls(weighed, measured, [one for one in weighed if not one.is_measured], {})

    @property
    def is_mixed(self) -> bool:
        """True when only some are measured: the first that fits may be passed over (``planner.evidence``)."""
        return bool(self.measured)

    def slowed(self, times: Callable[[Estimate], float]) -> _Order:
        """Return the same candidates in the order of as many times their values."""
        weighed = []
        for candidate, value, worst in self.weighed:
            assert candidate.estimate is not None, "what is ranked has an estimate"
            slower = times(candidate.estimate)
            weighed.append(_Weighed(candidate, value * slower, worst * slower))
        return _Order.of(sorted(weighed, key=lambda one: one.value))


class _BestBeside:
    """The best of the candidates that were looked at so far; each is asked for its place once."""

    def __init__(self, options: PlanOptions, hardware: Hardware, fits: FitsOn) -> None:
        self._options, self._gpu, self._fits = options, hardware.gpu, fits
        self._maximize = objective_of(options.intent).maximize
        self._places: dict[DeploymentConfig, Layout | NoRoom] = {}
        self._leader: list[Candidate] = []  # at most one
        self._measured: list[Candidate] = []  # the best of all measured ones, once it is known
        self._looks, self._num_gpus = _LOOKS, len(hardware.snapshot.gpus)
        self.best: Ranked | None = None

    def search(self, weighed: Sequence[_Weighed]) -> None:
        """Look at those of ``weighed`` that may be better than the best so far.

        Other deployments make no configuration faster, so the search ends where the next one is behind even on
        idle GPUs.
        """
        chunk, most = list[Candidate](), 1 if self.best is None else _AT_ONCE
        for candidate, value, worst in weighed:
            if self.best is not None:
                if self._is_ahead_of(value):
                    break
                if self._measured and self._is_ahead_of(worst):
                    continue
                cost = self._num_gpus * candidate.config.num_gpus
                if cost > self._looks:
                    continue
                self._looks -= cost
            chunk.append(candidate)
            if len(chunk) == most:
                self._look_at(chunk)
                chunk, most = [], _AT_ONCE
        if chunk:
            self._look_at(chunk)

    def keep_measured(self) -> None:
        """Take the best so far as the best measured one, which those that follow have to be wholly better than."""
        self._measured, self._leader = self._leader, []

    def _is_ahead_of(self, objective: float) -> bool:
        own = None if self.best is None else self.best.weight
        assert own is not None, "asked once there is one"
        return own > objective if self._maximize else own < objective

    def _look_at(self, candidates: list[Candidate]) -> None:
        among = [*self._measured, *self._leader, *candidates]
        self.best = best = best_of(
            among,
            self._options.intent,
            fits=self._place,
            prices=prices_of(self._gpu),
            neighbours=self._fits.neighbours,
        )
        if best is not None and all(one.config != best.config for one in self._measured):
            self._leader = [one for one in among if one.config == best.config]

    def _place(self, estimate: Estimate) -> Layout | NoRoom:
        if estimate.config not in self._places:
            self._places[estimate.config] = self._fits(estimate)
        return self._places[estimate.config]


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
        found = (one.candidate.estimate for one in self._order(num_gpus).weighed)
        return [estimate for estimate in found if estimate is not None]

    def choose(self, snapshot: ClusterSnapshot) -> Chosen | None:
        """Return what ``make_plan`` would choose on ``snapshot``; None: nothing.

        Of a joint plan it is what one batch would choose; see ``feasible``.

        On a large shared cluster only part of what may be better is looked at (``_LOOKS``).
        """
        if not snapshot.gpus:
            return None
        hardware = Hardware(label="", gpu=self._gpu, snapshot=snapshot)
        fits = FitsOn(hardware, self.options)
        order = self._order(len(snapshot.gpus))
        if self.options.expect:
            fits.expect([one.candidate for one in order.weighed])
        if fits.neighbours is None:
            return self._best_idle(order, fits)
        best = self._best_beside(order, hardware, fits)
        return None if best is None else _chosen(best)

    def _best_beside(self, order: _Order, hardware: Hardware, fits: FitsOn) -> Ranked | None:
        """Return the best where each would go; of a latency, which is all that those who are expected are for, as
        many times its own as they make it.
        """
        if fits.expected is not None:
            order = order.slowed(fits.expected.slowest)
        found = _BestBeside(self.options, hardware, fits)
        if not order.is_mixed:
            found.search(order.weighed)
            return found.best
        found.search(order.measured)
        found.keep_measured()
        found.search(order.predicted)
        return found.best

    def _best_idle(self, order: _Order, fits: FitsOn) -> Chosen | None:
        """Return the best that fits on idle GPUs, each where the policy would put it."""
        if not order.is_mixed:
            return _first_that_fits([one.candidate for one in order.weighed], fits)
        measured = _first_that_fits([one.candidate for one in order.measured], fits)
        if measured is None:
            return _first_that_fits([one.candidate for one in order.predicted], fits)
        return _first_that_fits(self._rivals(order, measured.config), fits) or measured

    def _rivals(self, order: _Order, config: DeploymentConfig) -> list[Candidate]:
        if config not in order.rivals:
            measured = next(one.candidate for one in order.measured if one.candidate.config == config)
            predicted = [one.candidate for one in order.predicted]
            order.rivals[config] = rivals_of(measured, predicted, self.options.intent, prices_of(self._gpu))
        return order.rivals[config]

    def _order(self, num_gpus: int) -> _Order:
        num_gpus = min(num_gpus, max(TP_DEGREES) * MAX_PP)
        if num_gpus not in self._orders:
            made = space(self._spec, self._gpu, num_gpus, self._estimator, self._engines, self.options)
            by_config = {candidate.config: candidate for candidate in made}
            plan = ranked_anywhere(made, self.options, self._gpu)
            feasible = sorted((one for one in plan.candidates if one.feasible), key=lambda one: one.row)
            self._orders[num_gpus] = _Order.of(
                [
                    _Weighed(by_config[one.config], one.objective, _worst(one, one.objective, plan.maximize))
                    for one in feasible
                    if one.objective is not None
                ]
            )
        return self._orders[num_gpus]


def _worst(ranked: Ranked, value: float, maximize: bool) -> float:
    """Return the worse end of the interval of ``ranked``; without one ``value``, which excludes nothing."""
    if ranked.interval is None:
        return value
    low, high = ranked.interval
    return low if maximize else high


def _first_that_fits(candidates: Sequence[Candidate], fits: FitsOn) -> Chosen | None:
    for config, estimate, *_ in candidates:
        assert estimate is not None, "what is ranked has an estimate"
        answer = fits(estimate)
        if isinstance(answer, Placement):
            return Chosen(config, estimate, answer)
    return None


def _chosen(ranked: Ranked) -> Chosen:
    assert ranked.estimate is not None, "what is feasible has an estimate"
    assert isinstance(ranked.layout, Placement), "every place is one of placement's"
    return Chosen(ranked.config, ranked.estimate, ranked.layout)
