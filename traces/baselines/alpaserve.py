"""Placement search of AlpaServe (Li et al., OSDI 2023, arXiv 2302.11665, section 4), for the cluster simulator.

Algorithm 2: for every bucketing of the models and every division of the GPUs over the buckets, for every group
partition and pair of degrees, select models by Algorithm 1 (``selection``); keep the best.

The search is given:

*   the whole trace beforehand, and the very simulator, router and step times by which it will be judged (AlpaServe
    has a simulator of its own, of groups with one queue each; the workers here have a queue for each model, and
    share a GPU's time);
*   all divisions of the GPUs, where the paper drops those far from the buckets' demand: buckets share no GPU, so
    the best division follows exactly from the best of each bucket on each number of GPUs;
*   TP and PP in every combination whose product is the group's size, and for a model that cannot be cut as its
    group is (Falcon-7B has one KV head) the nearest degrees over the same GPUs;
*   ties of attainment decided by latency.

As in the paper: 16 bits, one pair of degrees for all groups of a bucket, replicas until the GPUs are full where
that helps, models dropped where that raises the attainment of all. ``keep_all`` is the iServe paper's AlpaServe*:
every model has a replica. AlpaServe rejects a request that would miss its SLO; here that is an option of the
scenario (``reject_late``), which then holds in the search too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fingerprint.engines import traits_of
from fingerprint.errors import InfeasibleError
from placement.routing import Router
from placement.types import ClusterSnapshot, GpuState, Placement
from planner.intent import Slo
from traces.baselines.fixed_placement import Fixed
from traces.baselines.grouping import bucketings, in_order, partitions, shape
from traces.baselines.model_info import Knowledge, Places, StepTimes, sixteen_bit
from traces.baselines.selection import Judge, Placed, Score, Selected, Selector, Verdict
from traces.request import Request
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deploy, Deployed, Policies, Scenario
from traces.summary import kept

__all__ = ["Plan", "SimulatedTrace", "deployment_of", "search"]

Simulate = Callable[[Iterable[Request], Scenario, Policies], SimulationResult]

_NOTHING = Score(0, 0, 0.0)
_NEVER_STOP = 2**62  # however many wait, the search follows all requests to their end


class Plan(NamedTuple):
    """``simulations``: how many different selections were simulated to find it."""

    score: Score
    replicas: tuple[Placed, ...]
    simulations: int


@dataclass(frozen=True)
class _Part:
    """The best of one bucket on one range of GPUs."""

    score: Score
    replicas: tuple[Placed, ...]


def search(
    models: Mapping[str, Knowledge],
    batch_of: Mapping[str, int],
    cluster: ClusterSnapshot,
    places: Places,
    judge: Judge,
    *,
    keep_all: bool = False,
    beam: int = 0,
) -> Plan:
    """Run Algorithm 2 on the idle ``cluster``.

    Args:
        batch_of: sequences at once that a replica of each model is launched for.
        keep_all: no model may be dropped.
        beam: the width of Algorithm 1, everywhere; 0: its fast heuristic, which the paper found within 2% of its
            attainment, and Algorithm 1 with width 1 on the groups that this finds best for a bucket.

    Raises:
        InfeasibleError: ``keep_all``, and no placement of all models was found, or one is not run in 16 bits.
    """
    other_bits = [name for name, model in models.items() if not sixteen_bit(model.configs)]
    if other_bits and keep_all:
        raise InfeasibleError(f"no engine runs {', '.join(other_bits)} in 16 bits, as AlpaServe does")
    models = {name: model for name, model in models.items() if name not in other_bits}
    if not models:
        return Plan(_NOTHING, (), 0)
    selector = Selector(models, batch_of, places, judge, keep_all=keep_all)
    ranges = _Ranges(models, selector, beam)
    gpus = in_order(cluster)
    best: _Part | None = None
    for buckets in bucketings({name: _latency_s(model) for name, model in models.items()}, len(gpus)):
        found = _best_division(buckets, gpus, ranges)
        if found is not None and (best is None or found.score > best.score):
            best = found
    if best is None:
        raise InfeasibleError(
            f"no placement of all of {', '.join(models)} was found on {len(gpus)} GPUs; add GPUs, "
            "lower --batch, or let AlpaServe drop models"
        )
    return Plan(best.score, best.replicas, selector.simulations)


def _best_division(buckets: Sequence[Sequence[str]], gpus: tuple[GpuState, ...], ranges: _Ranges) -> _Part | None:
    """Return the best over all ways to give each bucket the next so many GPUs; since scores add, from the best
    before.
    """
    until: dict[int, _Part] = {0: _Part(_NOTHING, ())}
    for number, bucket in enumerate(buckets, start=1):
        still = len(buckets) - number  # each needs a GPU
        following: dict[int, _Part] = {}
        for begin, before in until.items():
            for end in range(begin + 1, len(gpus) - still + 1):
                part = ranges.best(bucket, gpus[begin:end])
                if part is None:
                    continue
                score = before.score.plus(part.score)
                if end not in following or score > following[end].score:
                    following[end] = _Part(score, (*before.replicas, *part.replicas))
        until = following
    return max(until.values(), key=lambda part: part.score, default=None)


class _Ranges:
    """The best group partition, degrees and selection of a bucket on a range of GPUs; once for equal ranges."""

    def __init__(self, models: Mapping[str, Knowledge], selector: Selector, beam: int) -> None:
        self._models, self._selector, self._beam = models, selector, beam
        self._found: dict[object, tuple[tuple[GpuState, ...], _Part | None]] = {}

    def best(self, bucket: Sequence[str], gpus: tuple[GpuState, ...]) -> _Part | None:
        key = (tuple(bucket), shape(gpus))
        if key not in self._found:
            self._found[key] = gpus, self._search(bucket, gpus)
        where, part = self._found[key]
        if part is None or where == gpus:
            return part
        return _Part(part.score, tuple(_moved(placed, where, gpus) for placed in part.replicas))

    def _search(self, bucket: Sequence[str], gpus: tuple[GpuState, ...]) -> _Part | None:
        degrees = {(c.tp, c.pp) for name in bucket for c in sixteen_bit(self._models[name].configs)}
        best: tuple[Score, Selected] | None = None
        for groups in partitions(gpus, degrees):
            found = self._selector(bucket, groups, beam=self._beam)
            if found is not None and (best is None or found[0] > best[0]):
                best = found
        if best is None:
            return None
        refined = None if self._beam else self._selector(bucket, best[1].groups, beam=1)
        score, selected = refined if refined is not None and refined[0] > best[0] else best
        return _Part(score, selected.replicas)


def _moved(placed: Placed, old: Sequence[GpuState], new: Sequence[GpuState]) -> Placed:
    """Return the same on other GPUs of the same shape."""
    to = {(a.node_id, a.device_id): b for a, b in zip(old, new, strict=True)}
    stages = tuple(
        replace(
            stage,
            node_id=to[stage.node_id, stage.device_ids[0]].node_id,
            device_ids=tuple(to[stage.node_id, device].device_id for device in stage.device_ids),
        )
        for stage in placed.placement.stages
    )
    return placed._replace(placement=Placement(stages))


def _latency_s(model: Knowledge) -> float:
    """Return the latency of one request on the fewest GPUs: AlpaServe calls models similar by this number."""
    fewest = min(sixteen_bit(model.configs), key=lambda c: (c.num_gpus, c))
    return model.estimator.estimate(fewest, replace(model.workload, batch=1)).e2e_s.value


class SimulatedTrace:
    """Values of selections of replicas: the trace, simulated for each (implements ``Judge``).

    Args:
        models: by the deployment's name, which requests call.
        requests: the whole trace, by time.
        scenario: the cluster and how it serves; of its actions only the deployments count.
    """

    def __init__(
        self,
        models: Mapping[str, Knowledge],
        batch_of: Mapping[str, int],
        requests: Sequence[Request],
        scenario: Scenario,
        slos: Mapping[str, Slo],
        *,
        router: Router,
        simulate: Simulate,
        times: StepTimes,
    ) -> None:
        self._models, self._batch_of, self._slos = models, batch_of, slos
        self._requests = requests
        self._of: dict[frozenset[str], Sequence[Request]] = {}
        self._count = {name: sum(request.model == name for request in requests) for name in models}
        self._scenario, self._router = replace(scenario, most_waiting=_NEVER_STOP), router
        self._simulate, self._times = simulate, times

    def __call__(self, models: Sequence[str], replicas: Sequence[Placed]) -> Verdict:
        missed = {name: self._count[name] for name in models}
        requests = self._requests_of(frozenset(placed.model for placed in replicas))
        if not requests:
            return Verdict(_NOTHING, missed, {})
        scenario, deployer = deployment_of(
            replicas, self._scenario, self._models, self._batch_of, self._times, name="a candidate"
        )
        actions = tuple(
            action for action in scenario.actions if isinstance(action, Deploy) and action.name in missed
        )
        outcomes_of = self._simulate(
            requests, replace(scenario, actions=actions), Policies(deployer=deployer, router=self._router)
        )
        outcomes = outcomes_of.outcomes
        met = 0
        for index, name in enumerate(outcomes.deployments):
            own = outcomes.select(outcomes.deployment == index)
            kept_here = int(kept(own, self._slos[name]).sum())
            missed[name] -= kept_here
            met += kept_here
        answered = outcomes.completed
        score = Score(met, int(answered.sum()), -float(np.asarray(outcomes.e2e_s)[answered].sum()))
        return Verdict(score, missed, {(g.node_id, g.device_id): g.busy_fraction for g in outcomes_of.gpus})

    def _requests_of(self, models: frozenset[str]) -> Sequence[Request]:
        if models not in self._of:
            self._of[models] = [request for request in self._requests if request.model in models]
        return self._of[models]


def deployment_of(
    replicas: Iterable[Placed],
    scenario: Scenario,
    models: Mapping[str, Knowledge],
    batch_of: Mapping[str, int],
    times: StepTimes,
    *,
    name: str,
) -> tuple[Scenario, Fixed]:
    """Return ``scenario`` with the chosen number of replicas of each deployment, and the deployer that places
    them.
    """
    planned: dict[str, list[Deployed]] = {}
    for placed in replicas:
        batch = batch_of[placed.model]
        planned.setdefault(placed.model, []).append(
            Deployed(
                placement=placed.placement,
                steps=times(models[placed.model], placed.config, batch),
                what=f"{placed.config} on {placed.config.engine}, batch {batch}",
                pipelined=traits_of(placed.config.engine).fills_stages,
                config=placed.config,
                startup_s=traits_of(placed.config.engine).startup_s,
            )
        )
    actions = tuple(
        replace(action, model=action.name, replicas=max(1, len(planned.get(action.name, ()))))
        if isinstance(action, Deploy)
        else action
        for action in scenario.actions
    )
    return replace(scenario, actions=actions), Fixed(name, planned)
