"""Local search for a fleet plan: from the rule and its variants, the best of all small changes while one helps.

The rule's own plan is always among the candidates and is judged by the same forecast; a plan that gains less
than 2% over it is not taken. Of plans within 2% of the best the one with the fewest pipelines, then on the fewest
GPUs, then without drafts, is. Deterministic: the same fleet and loads give the same plan.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fingerprint.errors import InfeasibleError
from placement.fleet.load import Loads, loads_of
from placement.fleet.memory import kv_room
from placement.fleet.objective import Judged, Judgement, judge_of
from placement.fleet.starts import (
    fixed_plan,
    more_replicas,
    more_split,
    most_replicas,
    most_split,
    rule_plan,
)
from placement.fleet.types import Fleet, FleetGoal, FleetPlan, FleetReplica

__all__ = ["FleetChoice", "choose"]

_WORTH = 0.02  # gain in the logarithm of latency, or in cost, below which the rule's plan is taken
_ROUNDING = 1e-9
_MOST_JUDGEMENTS = 6_000
_STARTS_KEPT = 3


@dataclass(frozen=True)
class FleetChoice:
    """Chosen plan and the rule's, both judged at ``loads``."""

    chosen: Judged
    rule: Judged
    fullest: Judged  # by the load that the first deployment can serve
    loads: Loads

    def utilisation(self, judged: Judged) -> float:
        """Return the mean rate over capacity of the first deployment's busiest replica; infinite without one."""
        return _utilisation(judged, self.loads)

    @property
    def is_rule(self) -> bool:
        return self.chosen.plan.key == self.rule.plan.key


def choose(
    fleet: Fleet,
    goal: FleetGoal,
    rates_per_s: Sequence[float | None] | None = None,
    *,
    rule: FleetPlan | None = None,
    burstiness: float = 1.0,
    most_judgements: int = _MOST_JUDGEMENTS,
) -> FleetChoice:
    """Return the best plan found for ``goal``.

    Args:
        rates_per_s: of each deployment, None for one that is not known; None: none is known.
        rule: plan that must not be lost to; None: ``rule_plan``.
        burstiness: as for ``placement.fleet.load.loads_of``.
        most_judgements: bound on the work, a plan each.

    Raises:
        ConfigError: not one rate for each deployment.
        InfeasibleError: nothing fits.
    """
    rule = _that_fits(fleet, rule)
    rates = [None] * len(fleet.deployments) if rates_per_s is None else rates_per_s
    loads = loads_of(fleet, rule, rates, burstiness=burstiness)
    search = _Search(fleet, judge_of(fleet, loads, rule, goal), most_judgements)
    of_rule = search.judge(rule)
    assert of_rule is not None, "it was found to fit"
    starts = (rule, more_replicas(fleet, rule), more_split(fleet, rule), most_split(fleet), fixed_plan(fleet))
    judged = [one for one in map(search.judge, starts) if one is not None]
    judged.sort(key=lambda one: one.score)
    best = min((search.improved(start) for start in judged[:_STARTS_KEPT]), key=lambda one: one.score)
    best = search.plainest(best, goal)
    chosen = best if _gains(best, of_rule, goal) else of_rule
    fullest = min((chosen, *_full_plans(fleet, search)), key=lambda one: _utilisation(one, loads))
    return FleetChoice(chosen, of_rule, fullest, loads)


def _full_plans(fleet: Fleet, search: _Search) -> list[Judged]:
    """Return the plans of as many replicas of the first deployment as fit, of each option."""
    if fleet.deployments[0].fixed:
        return []
    plans = (most_replicas(fleet, option) for option in range(len(fleet.deployments[0].options)))
    judged = (search.judge(plan) for plan in plans if plan is not None)
    return [one for one in judged if one is not None]


def _utilisation(judged: Judged, loads: Loads) -> float:
    rows = [row for row, replica in enumerate(judged.plan.replicas) if replica.deployment == 0]
    if not rows:
        return math.inf
    return float(loads.of_mean_rates @ judged.forecast.utilisation[:, rows].max(axis=1))


def _that_fits(fleet: Fleet, rule: FleetPlan | None) -> FleetPlan:
    """Return the plan that a choice is compared with: ``rule`` where it fits, else the fleet's own or most TP.

    Raises:
        InfeasibleError: none of them places anything.
    """
    for plan in (rule, rule_plan(fleet), most_split(fleet)):
        if plan is not None and plan.replicas and kv_room(fleet, plan) is not None:
            return plan
    names = ", ".join(one.name for one in fleet.deployments)
    raise InfeasibleError(
        f"no configuration of {names} fits on the {len(fleet.gpus)} GPUs as they are; free memory, add GPUs "
        "or allow narrower formats"
    )


def _gains(best: Judged, rule: Judged, goal: FleetGoal) -> bool:
    """Return whether ``best`` keeps more promises than the rule, or gains enough over it.

    A plan that leaves out a deployment that the rule serves has to serve more of them.
    """
    served, of_rule = ({replica.deployment for replica in one.plan.replicas} for one in (best, rule))
    if not of_rule <= served and len(served) <= len(of_rule):
        return False
    if best.score[0] < rule.score[0] - _ROUNDING:
        return True
    if goal is FleetGoal.LATENCY:
        return best.score[1] < rule.score[1] - _WORTH
    return best.score[1] < rule.score[1] * math.exp(-_WORTH)


class _Search:
    """Judges each plan once, and no more plans than its budget.

    Plans in which no GPU is shared are one where they differ in nothing but which of GPUs in the same state each
    replica has.
    """

    def __init__(self, fleet: Fleet, judgement: Judgement, most_judgements: int) -> None:
        self._fleet, self._judgement, self._most = fleet, judgement, most_judgements
        self._known: dict[object, Judged | None] = {}
        self._fixed = {replica for one in fleet.deployments for replica in one.fixed}
        self.judgements = 0

    def judge(self, plan: FleetPlan) -> Judged | None:
        if not plan.replicas:
            return None
        key = self._key(plan)
        if key not in self._known:
            self.judgements += 1
            self._known[key] = self._judgement(plan)
        return self._known[key]

    def _key(self, plan: FleetPlan) -> object:
        gpus = [gpu for replica in plan.replicas for gpu in replica.gpus]
        if len(set(gpus)) < len(gpus):
            return plan.key
        states = self._fleet.gpus
        return tuple(
            sorted(
                (
                    one.deployment,
                    one.option,
                    -1.0 if one.kv_tokens is None else one.kv_tokens,
                    tuple(
                        (states[gpu].usable_bytes, states[gpu].total_bytes, states[gpu].busy) for gpu in one.gpus
                    ),
                )
                for one in plan.replicas
            )
        )

    def improved(self, start: Judged) -> Judged:
        """Return the end of the descent from ``start``."""
        here = start
        while self.judgements < self._most:
            best = here
            for plan in self._changes(here.plan):
                found = self.judge(plan)
                if found is not None and found.score < best.score:
                    best = found
                if self.judgements >= self._most:
                    break
            if best is here or not _better(best.score, here.score):
                return best
            here = best
        return here

    def plainest(self, best: Judged, goal: FleetGoal) -> Judged:
        """Return the plainest of all within 2% of ``best``: fewest pipelines and GPUs, least shared, no drafts."""

        def is_as_good(one: Judged) -> bool:
            if one.score[0] > best.score[0] + _ROUNDING:
                return False
            if goal is FleetGoal.LATENCY:
                return one.score[1] <= best.score[1] + _WORTH
            return one.score[1] <= best.score[1] * math.exp(_WORTH)

        def plainness(one: Judged) -> tuple[int, int, int, int, float]:
            tenants = Counter(gpu for replica in one.plan.replicas for gpu in replica.gpus)
            configs = [self._fleet.option(replica).config for replica in one.plan.replicas]
            pipelines, drafts = sum(c.pp > 1 for c in configs), sum(c.draft_tokens > 0 for c in configs)
            shared = sum(number > 1 for number in tenants.values())
            return pipelines, tenants.total(), shared, drafts, one.score[1]

        return min((one for one in self._known.values() if one and is_as_good(one)), key=plainness)

    def _changes(self, plan: FleetPlan) -> Iterator[FleetPlan]:
        for number, deployment in enumerate(self._fleet.deployments):
            own = [replica for replica in plan.of(number) if replica not in self._fixed]
            yield from self._resized(plan, number)
            yield from self._restaged(plan, number)
            yield from (plan.without(replica) for replica in own if len(plan.of(number)) > 1)
            if len(plan.of(number)) != deployment.most_replicas:
                yield from self._added(plan, number)
            for replica in own:
                yield from self._moved(plan, replica)
        yield from self._swapped(plan)

    def _added(self, plan: FleetPlan, number: int) -> Iterator[FleetPlan]:
        options = range(len(self._fleet.deployments[number].options))
        own = plan.of(number)
        held = {gpu for replica in own for gpu in replica.gpus}
        for option in {replica.option for replica in own} or options:
            for group in self._distinct(plan, number, option):
                if not held.intersection(group):
                    yield plan.adding(FleetReplica(number, option, group))

    def _moved(self, plan: FleetPlan, replica: FleetReplica) -> Iterator[FleetPlan]:
        rest = plan.without(replica)
        held = {gpu for other in rest.of(replica.deployment) for gpu in other.gpus}
        for group in self._distinct(rest, replica.deployment, replica.option):
            if group != replica.gpus and not held.intersection(group):
                yield rest.adding(FleetReplica(replica.deployment, replica.option, group))

    def _resized(self, plan: FleetPlan, number: int) -> Iterator[FleetPlan]:
        """Yield one replica of another option anywhere in place of all of a deployment's."""
        deployment = self._fleet.deployments[number]
        if deployment.fixed:
            return
        current = {replica.option for replica in plan.of(number)}
        rest = plan.with_deployment(number, ())
        for option in range(len(deployment.options)):
            if option in current:
                continue
            for group in self._distinct(rest, number, option):
                yield rest.adding(FleetReplica(number, option, group))

    def _restaged(self, plan: FleetPlan, number: int) -> Iterator[FleetPlan]:
        """Yield all of a deployment's replicas where they are, as pipelines or with drafts or the reverse."""
        deployment, own = self._fleet.deployments[number], plan.of(number)
        if deployment.fixed or not own:
            return
        for option, service in enumerate(deployment.options):
            if option != own[0].option and service.num_gpus == len(own[0].gpus):
                yield plan.with_deployment(number, [replace(one, option=option) for one in own])

    def _swapped(self, plan: FleetPlan) -> Iterator[FleetPlan]:
        """Yield exchanges of the GPUs of two deployments with groups of the same size."""
        free = [replica for replica in plan.replicas if replica not in self._fixed]
        for position, one in enumerate(free):
            for other in free[position + 1 :]:
                if (
                    one.deployment == other.deployment
                    or len(one.gpus) != len(other.gpus)
                    or one.gpus == other.gpus
                ):
                    continue
                if self._holds(plan, one, other.gpus) or self._holds(plan, other, one.gpus):
                    continue
                yield (
                    plan.without(one)
                    .without(other)
                    .adding(
                        FleetReplica(one.deployment, one.option, other.gpus),
                        FleetReplica(other.deployment, other.option, one.gpus),
                    )
                )

    def _holds(self, plan: FleetPlan, replica: FleetReplica, gpus: tuple[int, ...]) -> bool:
        """Return whether another replica of the same deployment is on any of ``gpus``."""
        siblings = (other for other in plan.of(replica.deployment) if other != replica)
        return any(set(other.gpus).intersection(gpus) for other in siblings)

    def _distinct(self, plan: FleetPlan, number: int, option: int) -> Iterator[tuple[int, ...]]:
        """Yield the groups of an option's size, one of each set of groups with the same tenants."""
        seen = set()
        size = self._fleet.deployments[number].options[option].num_gpus
        tenants: dict[int, list[tuple[int, int]]] = {}
        for replica in plan.replicas:
            for gpu in replica.gpus:
                tenants.setdefault(gpu, []).append((replica.deployment, replica.option))
        for group in self._fleet.groups[size]:
            states = [self._fleet.gpus[gpu] for gpu in group]
            kind = tuple(
                (tuple(sorted(tenants.get(gpu, ()))), state.usable_bytes, state.busy)
                for gpu, state in zip(group, states, strict=True)
            )
            if kind not in seen:
                seen.add(kind)
                yield group


def _better(found: tuple[float, float], than: tuple[float, float]) -> bool:
    """Return whether a score is better by more than rounding."""
    return found[0] < than[0] - _ROUNDING or (found[0] <= than[0] and found[1] < than[1] - 1e-6)
