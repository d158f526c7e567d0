"""Rules of one line: the least TP that fits, one GPU group for each model, spread over the least used GPUs.

The variants differ in the KV room that a replica takes, and in what is done with GPUs that are left idle.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from fingerprint.config import DeploymentConfig
from fingerprint.errors import InfeasibleError
from iserve.evaluation.situation import Asked, Decision, Situation
from iserve.evaluation.sizing import USABLE_FRACTION, Spot, least_bytes, planned_bytes, size_together
from iserve.simulation.baselines import knowledge_of
from placement.fit import Placer
from placement.policies import LeastLoaded, Packing
from placement.types import BlockDemand, ClusterSnapshot, GpuState, PlacementPolicy, Refusal
from planner.intent import allows
from traces.baselines.model_info import halvings
from traces.baselines.rule_of_thumb import rule_of_thumb

__all__ = ["Idle", "Rule", "configs_by_tp", "least_tp", "spread"]

_A_TENANT = 1e-3  # of a GPU's load, by which the placer counts the replicas on it


class Idle(StrEnum):
    """Use of the GPUs that one replica of each model leaves idle."""

    LEFT = "left"
    REPLICAS = "replicas"
    TP = "tp"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule (implements ``Contestant``).

    Args:
        full: all free KV room and a batch of 256; else the room of the planned batch.
        idle: what becomes of idle GPUs; as many stay idle as deployments are still expected.
        packs: the first GPUs that have room, in place of the least used.
    """

    name: str
    full: bool = False
    idle: Idle = Idle.LEFT
    packs: bool = False

    def __call__(self, situation: Situation) -> Decision:
        policy: PlacementPolicy = Packing() if self.packs else LeastLoaded()
        configs: dict[str, DeploymentConfig] = {}
        reasons: list[str] = []
        for asked in situation.asked:
            try:
                configs[asked.name] = least_tp(asked, situation)
            except InfeasibleError as error:
                reasons.append(f"{asked.name}: {error}")
        wanted = [asked for asked in situation.asked if asked.name in configs]
        for batch in (None,) if self.full else halvings(situation.planned_batch):
            spots, missing = spread(situation, [(one, configs[one.name]) for one in wanted], batch, policy)
            last = batch is None or batch == 1
            if (missing and not last) or size_together(situation, spots) is None:
                continue
            reasons += [f"{name}: no GPU has room for it" for name in missing]
            if not missing and self.idle is Idle.REPLICAS:
                spots = _with_replicas(situation, spots)
            elif not missing and self.idle is Idle.TP:
                spots = _with_more_tp(situation, spots)
            return Decision(replicas=size_together(situation, spots) or (), reasons=tuple(reasons))
        return Decision(reasons=(*reasons, "the models do not fit next to one another"))


def configs_by_tp(asked: Asked, situation: Situation) -> dict[int, DeploymentConfig]:
    """Return the configurations without pipeline stages by TP degree, in the narrowest formats allowed."""
    known = knowledge_of(asked.model, situation.gpu, situation.cluster)
    order = rule_of_thumb(asked.model.spec, situation.gpu, fast=False)
    able = sorted((c for c in known.configs if c.pp == 1 and allows(situation.quality, c)), key=order)
    if not able:
        return {}
    first = able[0]
    alike = [c for c in able if (c.weights, c.kv, c.pruning) == (first.weights, first.kv, first.pruning)]
    return {config.tp: config for config in sorted(alike, key=lambda config: config.tp)}


def least_tp(asked: Asked, situation: Situation) -> DeploymentConfig:
    """Return the configuration of the least TP that holds the planned batch on empty GPUs; else half of it, etc.

    Raises:
        InfeasibleError: no TP degree holds one request.
    """
    configs = configs_by_tp(asked, situation)
    usable = USABLE_FRACTION * situation.gpu.memory_bytes
    for batch in halvings(situation.planned_batch):
        for config in configs.values():
            if max(planned_bytes(asked, config, batch), least_bytes(asked, config)) <= usable:
                return config
    slots = asked.model.options.adapter_slots
    fewer, of_slots = (", or fewer slots", f" with {slots} slots for variants") if slots else ("", "")
    raise InfeasibleError(
        f"no TP degree of {', '.join(map(str, configs)) or 'none'} holds it{of_slots} on {situation.gpu.name}; "
        f"take larger GPUs or narrower formats{fewer}"
    )


def spread(
    situation: Situation,
    wanted: Iterable[tuple[Asked, DeploymentConfig]],
    batch: int | None,
    policy: PlacementPolicy,
    spots: Sequence[Spot] = (),
    *,
    only: frozenset[tuple[str, str]] | None = None,
) -> tuple[list[Spot], list[str]]:
    """Return ``spots`` with one more for each of ``wanted``, the largest first, and the names without a place.

    Args:
        batch: of each, as ``Spot`` has it.
        only: keys of the GPUs that may be taken; None: all.
    """
    found, missing = list(spots), list[str]()
    gpus = {(gpu.node_id, gpu.device_id): gpu for gpu in situation.cluster.gpus}
    new = [Spot(asked, config, (), batch) for asked, config in wanted]
    for spot in sorted(new, key=lambda spot: -spot.least_bytes * spot.config.tp):
        snapshot = _with_spots(situation, found, only)
        placer = Placer(snapshot, policy, link_group_size=situation.gpu.link_group_size)
        placed = placer.fit(_demand(spot.least_bytes, spot.config.tp))
        if isinstance(placed, Refusal):
            missing.append(spot.asked.name)
            continue
        stage = placed.stages[0]
        found.append(replace(spot, gpus=tuple(gpus[stage.node_id, device] for device in stage.device_ids)))
    return found, missing


def _demand(size_bytes: int, tp: int) -> BlockDemand:
    """Return the demand of one stage of ``size_bytes`` on each of ``tp`` GPUs."""
    return BlockDemand(
        tp=tp, pp=1, num_layers=1, layer_bytes=size_bytes, first_stage_bytes=0, last_stage_bytes=0, fixed_bytes=0
    )


def _with_spots(
    situation: Situation, spots: Sequence[Spot], only: frozenset[tuple[str, str]] | None
) -> ClusterSnapshot:
    """Return the cluster with ``spots`` on it, a GPU's load being the number of replicas there."""
    taken, tenants = Counter[tuple[str, str]](), _running_tenants(situation)
    for spot in spots:
        for device in spot.devices:
            taken[device] += spot.least_bytes
            tenants[device] += 1

    def state(gpu: GpuState) -> GpuState:
        key = (gpu.node_id, gpu.device_id)
        kept = math.ceil((1 - USABLE_FRACTION) * gpu.total_bytes)
        free = max(0, gpu.free_bytes - kept - taken[key])
        return replace(gpu, free_bytes=free, load_fraction=min(1.0, tenants[key] * _A_TENANT))

    gpus = (gpu for gpu in situation.cluster.gpus if only is None or (gpu.node_id, gpu.device_id) in only)
    return ClusterSnapshot(tuple(state(gpu) for gpu in gpus))


def _running_tenants(situation: Situation) -> Counter[tuple[str, str]]:
    return Counter(
        (stage.node_id, device)
        for replica in situation.running
        for stage in replica.placement.stages
        for device in stage.device_ids
    )


def _idle_gpus(situation: Situation, spots: Sequence[Spot]) -> tuple[frozenset[tuple[str, str]], int]:
    """Return the GPUs without a replica, and how many of them are to stay so for deployments still expected."""
    taken = {*_running_tenants(situation), *(device for spot in spots for device in spot.devices)}
    idle = frozenset((gpu.node_id, gpu.device_id) for gpu in situation.cluster.gpus) - taken
    there = {replica.deployment for replica in situation.running} | {asked.name for asked in situation.asked}
    return idle, max(0, situation.expected - len(there))


def _with_replicas(situation: Situation, spots: list[Spot]) -> list[Spot]:
    """Return ``spots`` with replicas of the models in turn on idle GPUs."""
    firsts = {spot.asked.name: spot for spot in spots}
    grew = True
    while grew:
        grew = False
        for asked in situation.asked:
            config = firsts[asked.name].config
            idle, kept = _idle_gpus(situation, spots)
            if len(idle) - kept < config.tp:
                continue
            more, missing = spread(situation, [(asked, config)], None, LeastLoaded(), spots, only=idle)
            if not missing:
                spots, grew = more, True
    return spots


def _with_more_tp(situation: Situation, spots: list[Spot]) -> list[Spot]:
    """Return ``spots`` with the TP of the models doubled in turn, while each has GPUs of its own."""
    chosen = {spot.asked.name: spot.config for spot in spots}
    unused, _ = _idle_gpus(situation, ())
    if sum(config.tp for config in chosen.values()) > len(unused):
        return spots
    grew = True
    while grew:
        grew = False
        for asked in situation.asked:
            wider = configs_by_tp(asked, situation).get(2 * chosen[asked.name].tp)
            if wider is None:
                continue
            tried = {**chosen, asked.name: wider}
            wanted = [(one, tried[one.name]) for one in situation.asked]
            placed, missing = spread(situation, wanted, None, LeastLoaded(), only=unused)
            devices = [device for spot in placed for device in spot.devices]
            idle, kept = _idle_gpus(situation, placed)
            if not missing and len(set(devices)) == len(devices) and len(idle) >= kept:
                chosen, spots, grew = tried, placed, True
    return spots
