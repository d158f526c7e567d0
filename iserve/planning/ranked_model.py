"""A model's configurations ranked once, for a cluster that decides often: only what fits depends on what is free.

``make_plan`` estimates and ranks hundreds of configurations to explain every one of them. Here the order is kept;
a decision asks placement until no later configuration can be better, and is the same
(tests/iserve/test_ranked_model.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate, Estimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from iserve.planning.expecting import Expected
from iserve.planning.making import FitsOn, Hardware, PlanOptions, check_context, prices_of, ranked_anywhere, space
from placement.types import ClusterSnapshot, Placement
from planner.costs import objective_of
from planner.plan import Candidate, Layout, NoRoom, Ranked
from planner.rank import best_of
from planner.space import MAX_PP, TP_DEGREES

__all__ = ["Chosen", "RankedModel"]


class Chosen(NamedTuple):
    """The best configuration that fits, and where."""

    config: DeploymentConfig
    estimate: Estimate
    placement: Placement


# Once a place is known, others are looked at while GPUs of the cluster times GPUs of the place add up to this: on
# 1,000 GPUs places of sixteen together, on eight 2,000.
_LOOKS = 16_000
_AT_ONCE = 16  # ranked together, which takes hardly longer than one


class _BestBeside:
    """The best of the candidates that were looked at so far; each is asked for its place once."""

    def __init__(self, options: PlanOptions, gpu: GpuSpec, fits: FitsOn) -> None:
        self._options, self._gpu, self._fits = options, gpu, fits
        self._maximize = objective_of(options.intent).maximize
        self._places: dict[DeploymentConfig, Layout | NoRoom] = {}
        self._leader: list[Candidate] = []  # at most one
        self.best: Ranked | None = None

    def is_ahead_of(self, objective: float) -> bool:
        own = None if self.best is None else self.best.weight
        assert own is not None, "asked once there is one"
        return own > objective if self._maximize else own < objective

    def look_at(self, candidates: list[Candidate]) -> None:
        among = [*self._leader, *candidates]
        self.best = best = best_of(
            among,
            self._options.intent,
            fits=self._place,
            prices=prices_of(self._gpu),
            neighbours=self._fits.neighbours,
        )
        self._leader = [one for one in among if best is not None and one.config == best.config]

    def _place(self, estimate: Estimate) -> Layout | NoRoom:
        if estimate.config not in self._places:
            self._places[estimate.config] = self._fits(estimate)
        return self._places[estimate.config]


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
        self._orders: dict[int, list[tuple[Candidate, float]]] = {}

    def choose(self, snapshot: ClusterSnapshot) -> Chosen | None:
        """What ``make_plan`` would choose on ``snapshot``; None: nothing. On a large cluster where others run only
        part of what may be better is looked at (``_LOOKS``)."""
        if not snapshot.gpus:
            return None
        fits = FitsOn(Hardware(label="", gpu=self._gpu, snapshot=snapshot), self.options)
        if self.options.expect:
            fits.expect([candidate for candidate, _ in self._order(len(snapshot.gpus))])
        if fits.neighbours is None:
            return self._first_that_fits(len(snapshot.gpus), fits)
        best = self._best_beside(snapshot, fits)
        return None if best is None else _chosen(best)

    def _best_beside(self, snapshot: ClusterSnapshot, fits: FitsOn) -> Ranked | None:
        """The best where each would go. Others make nobody faster, so the search ends where the next one is behind
        even on idle GPUs, those who are expected counted."""
        num_gpus, looks, most = len(snapshot.gpus), _LOOKS, 1
        found, chunk = _BestBeside(self.options, self._gpu, fits), list[Candidate]()
        for candidate, on_idle in self._on_idle(num_gpus, fits.expected):
            if found.best is not None:
                if found.is_ahead_of(on_idle):
                    break
                cost = num_gpus * candidate.config.num_gpus
                if cost > looks:
                    continue
                looks -= cost
            chunk.append(candidate)
            if len(chunk) == most:
                found.look_at(chunk)
                chunk, most = [], _AT_ONCE
        found.look_at(chunk)
        return found.best

    def _first_that_fits(self, num_gpus: int, fits: FitsOn) -> Chosen | None:
        """Best on idle GPUs first, each where the policy would put it."""
        for (config, estimate, *_), _ in self._order(num_gpus):
            assert estimate is not None, "what is ranked has an estimate"
            answer = fits(estimate)
            if isinstance(answer, Placement):
                return Chosen(config, estimate, answer)
        return None

    def _on_idle(self, num_gpus: int, expected: Expected | None) -> list[tuple[Candidate, float]]:
        """What each is ranked by on idle GPUs, the best first: of a latency, which is all that ``expected`` is
        for, as many times its own as they make it."""
        order = self._order(num_gpus)
        if expected is None:
            return order
        later = [(one, own * expected.slowest(one.estimate)) for one, own in order if one.estimate is not None]
        return sorted(later, key=lambda weighed: weighed[1])

    def _order(self, num_gpus: int) -> list[tuple[Candidate, float]]:
        """What nothing but memory refuses on idle GPUs, best first, and the objective there."""
        num_gpus = min(num_gpus, max(TP_DEGREES) * MAX_PP)
        if num_gpus not in self._orders:
            made = space(self._spec, self._gpu, num_gpus, self._estimator, self._engines, self.options)
            by_config = {candidate.config: candidate for candidate in made}
            plan = ranked_anywhere(made, self.options, self._gpu)
            self._orders[num_gpus] = [
                (by_config[one.config], one.objective)
                for one in plan.candidates
                if one.feasible and one.objective is not None
            ]
        return self._orders[num_gpus]


def _chosen(ranked: Ranked) -> Chosen:
    assert ranked.estimate is not None, "what is feasible has an estimate"
    assert isinstance(ranked.layout, Placement), "every place is one of placement's"
    return Chosen(ranked.config, ranked.estimate, ranked.layout)
