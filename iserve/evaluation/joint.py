"""Joint planner as a contestant: configurations, replicas and GPUs of all deployments asked for together.

Replicas of deployments that run stay as they are; what is decided is about the new ones.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from fingerprint.config import Workload
from fingerprint.errors import InfeasibleError
from fingerprint.service_model import LARGEST_BATCH, ServiceModel, service_model
from iserve.evaluation.rules import Rule, configs_by_tp
from iserve.evaluation.situation import Asked, Decision, Replica, Situation
from iserve.evaluation.sizing import USABLE_FRACTION
from iserve.simulation.running import launch_limits
from placement.fleet.objective import FleetGoal, Judged
from placement.fleet.search import choose
from placement.fleet.types import Fleet, FleetDeployment, FleetGpu, FleetPlan, FleetReplica
from placement.types import Placement, StagePlacement
from planner.intent import IntentKind

__all__ = ["JointPlanner"]

_PARTLY_EMPTY_TOKENS = 32  # of each request: two pages of vLLM
_CHEAP = (IntentKind.MIN_COST, IntentKind.MIN_GPU_HOURS, IntentKind.MIN_MEMORY)


class JointPlanner:
    """Planner of all deployments that are asked for together (implements ``Contestant``).

    Remembers the deployments that it was asked for, since a situation names of those that run only their replicas.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._asked: dict[str, Asked] = {}

    def __call__(self, situation: Situation) -> Decision:
        self._asked |= {asked.name: asked for asked in situation.asked}
        strong = Rule(name=self.name, full=True)(situation)
        wanted = [asked for asked in situation.asked if _options(asked, situation)]
        if not wanted:
            return strong
        fleet = _fleet(situation, wanted, self._asked)
        names = [one.name for one in fleet.deployments]
        fixed = tuple(replica for one in fleet.deployments for replica in one.fixed)
        rule = FleetPlan((*fixed, *(_as_fleet(replica, fleet, names) for replica in strong.replicas)))
        rates = [self._asked[name].rate_per_s for name in names]
        known = tuple(rate for rate in rates if rate is not None)
        goal = FleetGoal.COST if situation.intent in _CHEAP else FleetGoal.LATENCY
        try:
            choice = choose(fleet, goal, known if len(known) == len(names) else None, rule=rule)
        except InfeasibleError as error:
            return Decision(reasons=(*strong.reasons, str(error)))
        if choice.is_rule and goal is FleetGoal.LATENCY:
            return strong
        replicas = _replicas(fleet, choice.chosen, wanted)
        placed = {replica.deployment for replica in replicas}
        left_out = [asked.name for asked in situation.asked if asked.name not in placed]
        return Decision(replicas=replicas, reasons=tuple(f"{name}: no GPU has room for it" for name in left_out))


def _fleet(situation: Situation, wanted: list[Asked], known: dict[str, Asked]) -> Fleet:
    """Return the fleet of the deployments ``wanted`` and those that run, on the cluster as it is."""
    gpus = tuple(
        FleetGpu(
            node_id=gpu.node_id,
            device_id=gpu.device_id,
            gpu_index=gpu.gpu_index,
            usable_bytes=gpu.free_bytes - int((1 - USABLE_FRACTION) * gpu.total_bytes),
            total_bytes=gpu.total_bytes,
        )
        for gpu in situation.cluster.gpus
    )
    running: dict[str, list[Replica]] = {}
    for replica in situation.running:
        running.setdefault(replica.deployment, []).append(replica)
    deployments = [FleetDeployment(name=asked.name, options=_options(asked, situation)) for asked in wanted]
    for name, replicas in running.items():
        number, asked = len(deployments), known[name]
        options = tuple(_service(asked, replica) for replica in replicas)
        fixed = tuple(
            FleetReplica(number, row, _numbers(replica.placement, gpus), _kv_tokens(replica, options[row]))
            for row, replica in enumerate(replicas)
        )
        deployments.append(FleetDeployment(name=name, options=options, fixed=fixed, most_replicas=len(fixed)))
    reserved = _reserved(situation, gpus, wanted, running)
    return Fleet(tuple(deployments), gpus, reserved, situation.expected)


def _reserved(
    situation: Situation, gpus: tuple[FleetGpu, ...], wanted: list[Asked], running: dict[str, list[Replica]]
) -> frozenset[int]:
    """Return idle GPUs, the last ones, for the deployments still expected, where the new ones can spare them."""
    taken = {number for own in running.values() for one in own for number in _numbers(one.placement, gpus)}
    idle = [number for number in range(len(gpus)) if number not in taken]
    later = max(0, situation.expected - len(running) - len(situation.asked))
    spare = max(0, len(idle) - len(wanted))
    return frozenset(idle[len(idle) - min(later, spare) :])


def _options(asked: Asked, situation: Situation) -> tuple[ServiceModel, ...]:
    widest = max(Counter(gpu.node_id for gpu in situation.cluster.gpus).values())
    return tuple(
        service_model(asked.model.estimator, config, _mean(asked), longest_tokens=_longest(asked))
        for config in configs_by_tp(asked, situation).values()
        if config.num_gpus <= widest
    )


def _service(asked: Asked, replica: Replica) -> ServiceModel:
    return service_model(asked.model.estimator, replica.config, _mean(asked), longest_tokens=_longest(asked))


def _kv_tokens(replica: Replica, option: ServiceModel) -> float:
    """Return the KV cache of a running replica, of states alone as many mean requests as it may run at once."""
    if replica.limits.kv_tokens is None:
        return replica.limits.max_batch * option.mean_tokens
    return float(replica.limits.kv_tokens)


def _mean(asked: Asked) -> Workload:
    return replace(asked.model.options.workload, batch=1, longest_tokens=0)


def _longest(asked: Asked) -> int:
    return asked.model.options.workload.context_tokens


def _numbers(placement: Placement, gpus: tuple[FleetGpu, ...]) -> tuple[int, ...]:
    by_key = {(gpu.node_id, gpu.device_id): number for number, gpu in enumerate(gpus)}
    return tuple(by_key[stage.node_id, device] for stage in placement.stages for device in stage.device_ids)


def _as_fleet(replica: Replica, fleet: Fleet, names: list[str]) -> FleetReplica:
    number = names.index(replica.deployment)
    options = [option.config for option in fleet.deployments[number].options]
    return FleetReplica(number, options.index(replica.config), _numbers(replica.placement, fleet.gpus))


def _replicas(fleet: Fleet, chosen: Judged, wanted: list[Asked]) -> tuple[Replica, ...]:
    """Return the new replicas of the chosen plan with their memory and launch limits."""
    found = []
    for replica, tokens in zip(chosen.plan.replicas, chosen.room.kv_tokens, strict=True):
        if replica.kv_tokens is not None:
            continue
        asked, option = wanted[replica.deployment], fleet.option(replica)
        served = replace(asked.model.options.workload, batch=LARGEST_BATCH)
        limits = launch_limits(served, option.config.engine, spec=asked.model.spec)
        at_once = max(1, int(option.batch_of(tokens)))
        if limits.kv_tokens is None:  # states alone, of as many sequences as there is room for
            limits = replace(limits, max_batch=at_once)
        else:
            whole = int(tokens) - at_once * _PARTLY_EMPTY_TOKENS
            limits = replace(limits, kv_tokens=max(limits.max_context_tokens, whole))
        first = fleet.gpus[replica.gpus[0]]
        stage = StagePlacement(
            node_id=first.node_id,
            device_ids=tuple(fleet.gpus[number].device_id for number in replica.gpus),
            first_layer=0,
            num_layers=asked.model.spec.num_layers,
            bytes_per_gpu=option.bytes_per_gpu(tokens),
        )
        found.append(
            Replica(deployment=asked.name, config=option.config, placement=Placement((stage,)), limits=limits)
        )
    return tuple(found)
