"""Course of one contestant in one arena: it is asked at each time of deployment, and requests are simulated."""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from iserve.evaluation.arena import Arena
from iserve.evaluation.situation import Contestant, Decision, Replica, Situation
from placement.routing import LeastOutstanding
from placement.types import ClusterSnapshot
from placement.variant_routing import DEFAULT_VARIANT_POLICY, make_variant_policy
from planner.intent import IntentKind
from traces.simulator.contention import ProcessorSharing
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deployed, NotDeployed, Policies
from traces.simulator.simulation import simulate

__all__ = ["Placed", "Played", "play"]


@dataclass(frozen=True, slots=True)
class Played:
    """Result of a contestant: what it placed, why some has no place, and what the simulator made of it."""

    replicas: tuple[Replica, ...]
    reasons: tuple[str, ...]
    result: SimulationResult


@dataclass(frozen=True, slots=True)
class Placed:
    """Plan that is known beforehand (implements ``Contestant``)."""

    name: str
    replicas: tuple[Replica, ...]
    reasons: tuple[str, ...] = ()

    def __call__(self, situation: Situation) -> Decision:
        names = {asked.name for asked in situation.asked}
        return Decision(
            replicas=tuple(replica for replica in self.replicas if replica.deployment in names),
            reasons=self.reasons,
        )


def play(
    arena: Arena, contestant: Contestant, intent: IntentKind, *, routing: str = DEFAULT_VARIANT_POLICY
) -> Played:
    """Return what becomes of ``contestant`` under ``intent``.

    Args:
        routing: policy by which requests for variants are given to replicas.

    Raises:
        PolicyError: it placed more than there is room for, or replicas without slots for their variants.
    """
    deployer = _ContestantDeployer(arena, contestant, intent)
    contention = ProcessorSharing(overhead=arena.world.truth.sharing)
    policies = Policies(
        deployer=deployer,
        router=LeastOutstanding(),
        contention=contention,
        variant_policy=make_variant_policy(routing),
    )
    result = simulate(arena.requests, arena.scenario(len(arena.cluster.gpus)), policies)
    return Played(tuple(deployer.placed), tuple(dict.fromkeys(deployer.reasons)), result)


class _ContestantDeployer:
    """Deployer that asks the contestant once for each group and hands out its replicas one by one."""

    def __init__(self, arena: Arena, contestant: Contestant, intent: IntentKind) -> None:
        self.name = contestant.name
        self._arena, self._contestant, self._intent = arena, contestant, intent
        self._group_of = {name: names for _, names in arena.groups for name in names}
        self._left: dict[str, list[Replica]] = {}
        self.placed: list[Replica] = []
        self.reasons: list[str] = []

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        if model not in self._left:
            self._ask(self._group_of[model], snapshot)
        if not self._left[model]:
            return NotDeployed(reason=f"{self.name} has no further replica of {model}")
        replica = self._left[model].pop(0)
        self.placed.append(replica)
        config = replica.config
        return Deployed(
            placement=replica.placement,
            steps=self._arena.truths[model](config, replica.limits),
            what=f"{config} on {config.engine}",
            pipelined=traits_of(config.engine).fills_stages,
            config=config,
            adapters=self._arena.slot_cost(model, config),
        )

    def _ask(self, names: tuple[str, ...], snapshot: ClusterSnapshot) -> None:
        situation = self._arena.situation(names, self._intent, snapshot, tuple(self.placed))
        decision = self._contestant(situation)
        strange = {replica.deployment for replica in decision.replicas} - set(names)
        if strange:
            raise ConfigError(
                f"{self.name} placed {', '.join(sorted(strange))}, asked for were {', '.join(names)}"
            )
        for name in names:
            self._left[name] = [replica for replica in decision.replicas if replica.deployment == name]
        self.reasons.extend(decision.reasons)
