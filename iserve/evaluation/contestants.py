"""Contestants by name: today's product, rules of one line, and baselines, each as a function of a situation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel
from iserve.evaluation.aiconfigurator import ANSWERS, Recommended, read_answers
from iserve.evaluation.arena import Arena
from iserve.evaluation.rules import Idle, Rule
from iserve.evaluation.situation import Asked, Contestant, Decision, Replica, Situation
from iserve.simulation.baselines import Baseline, alpaserve, static_deployer
from iserve.simulation.baselines import World as BaselineWorld
from iserve.simulation.running import PlannedDeployer, SimulatedModel
from placement.policies import JOINT
from placement.routing import LeastOutstanding
from placement.types import ClusterSnapshot, DeploymentState, ReplicaState
from placement.variant_routing import DEFAULT_VARIANT_POLICY
from planner.intent import Intent, IntentKind, Slo
from traces.baselines.model_info import without
from traces.simulator.scenario import Deploy, Deployed, Deployer, NotDeployed, Scenario

__all__ = [
    "AICONFIGURATOR",
    "ALPASERVE",
    "CONTESTANTS",
    "FIRST_FIT_MERGED",
    "OF_VARIANTS",
    "ORACLE",
    "OURS",
    "OURS_FCFS",
    "OURS_ROUND_ROBIN",
    "RULE_MERGED",
    "STANDARD",
    "STRONG_RULE",
    "Kind",
    "check_names",
    "make_contestant",
]

OURS = "ours"
OURS_BY_NUMBER = "ours-by-number"
OURS_HYBRID = "ours-hybrid"
OURS_ROUND_ROBIN = "ours-round-robin"
OURS_FCFS = "ours-fcfs"
RULE_MERGED = "rule-merged"
FIRST_FIT_MERGED = "first-fit-merged"
STRONG_RULE = "rule-min-tp-full"
ALPASERVE = "alpaserve"
ORACLE = "oracle"
AICONFIGURATOR = "aiconfigurator"

RULES = (
    Rule(name="rule-min-tp"),
    Rule(name=STRONG_RULE, full=True),
    Rule(name="rule-replicas", full=True, idle=Idle.REPLICAS),
    Rule(name="rule-more-tp", full=True, idle=Idle.TP),
    Rule(name="first-fit", packs=True),
    Rule(name=RULE_MERGED, full=True),
    Rule(name=FIRST_FIT_MERGED, packs=True),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of contestant: its description, what it depends on, what it knows, and how it serves variants."""

    about: str
    by_intent: bool = False
    has_trace: bool = False  # more information than the rest: reported as regret
    is_merged: bool = False  # knows no variants: each is a deployment of its own
    routing: str = DEFAULT_VARIANT_POLICY  # of requests for variants
    of_variants: bool = False  # differs from a contestant above it in worlds with variants alone


CONTESTANTS = {
    OURS: Kind(
        "iServe by default, one deploy after the other, each with `--expected-model` of the next", by_intent=True
    ),
    OURS_BY_NUMBER: Kind("the same with `--expected-deployments`, the number of all, alone", by_intent=True),
    OURS_HYBRID: Kind("iServe with `--policy hybrid`: ranked by one batch, then placed", by_intent=True),
    "rule-min-tp": Kind("least TP that fits, least used GPUs, KV room for the planned batch"),
    STRONG_RULE: Kind("the same with all free KV room and a batch of 256: the strong rule"),
    "rule-replicas": Kind("the strong rule, and replicas of the models in turn on idle GPUs"),
    "rule-more-tp": Kind("the strong rule, and TP doubled in turn over idle GPUs"),
    "max-tp": Kind("most TP, the largest batch with which all models fit"),
    "first-fit": Kind("least TP that fits on the fullest GPUs that have room, KV room for the planned batch"),
    AICONFIGURATOR: Kind(
        "replicas that AIConfigurator recommends, where a recording has its answer",
        by_intent=True,
        is_merged=True,
    ),
    ALPASERVE: Kind(
        "AlpaServe's search, given the trace and the believed step times", has_trace=True, is_merged=True
    ),
    ORACLE: Kind("seeded search with the simulator itself, given trace and truth", by_intent=True, has_trace=True),
    OURS_ROUND_ROBIN: Kind(
        "`ours`, requests for variants to replicas in turn",
        by_intent=True,
        routing="round-robin",
        of_variants=True,
    ),
    OURS_FCFS: Kind(
        "`ours`, requests for variants first come, first served", by_intent=True, routing="fcfs", of_variants=True
    ),
    RULE_MERGED: Kind(
        "the strong rule for a deployment of each variant, merged into its base", is_merged=True, of_variants=True
    ),
    FIRST_FIT_MERGED: Kind("first-fit for a deployment of each variant", is_merged=True, of_variants=True),
}
STANDARD = tuple(
    name
    for name, kind in CONTESTANTS.items()
    if not (kind.has_trace or kind.of_variants) and name != AICONFIGURATOR
)
OF_VARIANTS = tuple(name for name, kind in CONTESTANTS.items() if kind.of_variants)


def check_names(names: tuple[str, ...], *, variants: bool = False) -> tuple[str, ...]:
    """Return ``names``, or the standard contestants where there are none.

    Args:
        variants: whether the standard ones are those of a world with variants.

    Raises:
        ConfigError: an unknown name.
    """
    for name in names:
        if name not in CONTESTANTS:
            raise ConfigError(f"there is no contestant {name!r}; there are {', '.join(CONTESTANTS)}")
    return tuple(dict.fromkeys(names)) or (*STANDARD, *(OF_VARIANTS if variants else ()))


def make_contestant(name: str, arena: Arena) -> Contestant:
    """Return a contestant by name; the oracle is ``oracle.search``'s.

    Raises:
        ConfigError: AlpaServe with too many requests.
        NotFoundError: the world names answers of AIConfigurator that cannot be read.
        BadInputError: these are no such answers.
    """
    rules = {rule.name: rule for rule in RULES}
    if name in rules:
        return rules[name]
    if name in (OURS, OURS_BY_NUMBER, OURS_HYBRID, OURS_ROUND_ROBIN, OURS_FCFS):
        names_next = name not in (OURS_BY_NUMBER, OURS_HYBRID)
        return Ours(name, policy="hybrid" if name == OURS_HYBRID else JOINT, names_next=names_next)
    if name == "max-tp":
        return ByDeployer(name, _max_tp)
    if name == AICONFIGURATOR:
        return _recommended(arena)
    if name == ALPASERVE:
        return ByDeployer(name, _alpaserve(arena))
    raise ConfigError(f"there is no contestant {name!r}")


class Ours:
    """Planner of ``iserve deploy`` (implements ``Contestant``): one model after the other, by the intent.

    Each is planned with the product's defaults for its mean request and its longest one, at its rate where that is
    known. The number of deployments is given; of those that run the planner knows what a controller does: their
    plans, and their rates over the last 120 s.

    Args:
        policy: of placement. Hybrid takes no number of deployments for a cost, and a batch with a rate.
        names_next: the models that are asked for at the same time are given as well, with their rates.
    """

    def __init__(self, name: str, *, policy: str = JOINT, names_next: bool = True) -> None:
        self.name, self._policy, self._names_next = name, policy, names_next
        self._deployers: dict[tuple[str, IntentKind], PlannedDeployer] = {}
        self._plans: dict[str, _Planned] = {}

    def __call__(self, situation: Situation) -> Decision:
        cluster = self._as_planned(situation.cluster)
        replicas, reasons = list[Replica](), list[str]()
        expected = [
            self._deployer(asked, situation).expected(asked.name, len(cluster.gpus)) for asked in situation.asked
        ]
        for number, asked in enumerate(situation.asked):
            later = [one for one in expected[number + 1 :] if one is not None and self._names_next]
            found = self._deployer(asked, situation).all_replicas(asked.name, cluster, later)
            if isinstance(found, NotDeployed):
                reasons.append(f"{asked.name}: {found.reason}")
                continue
            self._plans[asked.name] = plan = _Planned(found[0].service, asked.rate_per_s)
            for one in found:
                cluster = without(cluster, one.placement)
            cluster = replace(cluster, deployments=(*cluster.deployments, _just_placed(asked.name, found, plan)))
            replicas += [_replica(asked.name, one) for one in found]
        return Decision(replicas=tuple(replicas), reasons=tuple(reasons))

    def _as_planned(self, cluster: ClusterSnapshot) -> ClusterSnapshot:
        """Return the cluster with the service models and rates of the plans of those that run."""
        of = {one.name: self._plans.get(one.name, _Planned()) for one in cluster.deployments}
        known = (replace(one, **of[one.name]._asdict()) for one in cluster.deployments)
        return replace(cluster, deployments=tuple(known))

    def _deployer(self, asked: Asked, situation: Situation) -> PlannedDeployer:
        key = (asked.name, situation.intent)
        if key not in self._deployers:
            self._deployers[key] = PlannedDeployer(situation.gpu, [self._model(asked, situation)])
        return self._deployers[key]

    def _model(self, asked: Asked, situation: Situation) -> SimulatedModel:
        kind, model = situation.intent, asked.model
        intent = Intent(
            kind=kind,
            slo=asked.slo if kind is IntentKind.LATENCY_SLO else None,
            rate_per_s=asked.rate_per_s,
            traffic=model.options.intent.traffic,
            quality=situation.quality,
        )
        is_joint = self._policy == JOINT
        is_planned = not is_joint and asked.rate_per_s is not None
        options = replace(
            model.options,
            intent=intent,
            policy=self._policy,
            workload=replace(model.options.workload, batch=situation.planned_batch if is_planned else 1),
            more_requests=not is_planned,
            more_replicas=is_joint,
            expect=situation.expected if is_joint else 0,
        )
        return replace(model, estimator=asked.estimator, options=options)


class _Planned(NamedTuple):
    """Facts of a deployment's plan, which later plans know."""

    service: ServiceModel | None = None
    planned_rate_per_s: float | None = None


def _just_placed(name: str, found: Sequence[Deployed], plan: _Planned) -> DeploymentState:
    """Return the state of a deployment that has served nothing yet."""
    replicas = tuple(
        ReplicaState(
            replica_id=f"{name}-{number}",
            placement=one.placement,
            ready=False,
            outstanding=0,
            max_batch=one.steps.limits.max_batch,
            kv_tokens=one.steps.limits.kv_tokens,
        )
        for number, one in enumerate(found)
    )
    return DeploymentState(
        name=name,
        model=name,
        wanted=len(replicas),
        replicas=replicas,
        moving=False,
        waiting=0,
        requests_per_s=0.0,
        service_s=0.0,
        idle_s=0.0,
        steady_s=0.0,
        **plan._asdict(),
    )


@dataclass(frozen=True, slots=True)
class ByDeployer:
    """Contestant that a deployer of the simulator is, made anew in each situation (implements ``Contestant``)."""

    name: str
    deployer_of: Callable[[Situation], Deployer]

    def __call__(self, situation: Situation) -> Decision:
        deployer = self.deployer_of(situation)
        return _one_by_one(situation, lambda asked: deployer, all_replicas=self.name == ALPASERVE)


def _one_by_one(
    situation: Situation, deployer_of: Callable[[Asked], Deployer], *, all_replicas: bool = False
) -> Decision:
    """Return what deployers place one after the other, each on what those before it left.

    Args:
        all_replicas: a deployer is asked for replicas until it has no more; else for one.
    """
    cluster, replicas, reasons = situation.cluster, list[Replica](), list[str]()
    for asked in situation.asked:
        deployer, placed = deployer_of(asked), 0
        while all_replicas or not placed:
            found = deployer(asked.name, cluster)
            if isinstance(found, NotDeployed):
                reasons += [] if placed else [f"{asked.name}: {found.reason}"]
                break
            cluster, placed = without(cluster, found.placement), placed + 1
            replicas.append(_replica(asked.name, found))
    return Decision(replicas=tuple(replicas), reasons=tuple(reasons))


def _replica(name: str, found: Deployed) -> Replica:
    assert found.config is not None, "each of these deployers names its configuration"
    return Replica(
        deployment=name,
        config=found.config,
        placement=found.placement,
        limits=found.steps.limits,
        miss_probability=found.miss_probability,
    )


def _baseline_world(situation: Situation, arena: Arena | None = None) -> BaselineWorld:
    """Return the situation as the baselines of ``iserve simulate`` know it, for the planned batch."""
    models = {asked.name: _for_planned_batch(asked.model, situation) for asked in situation.asked}
    actions = tuple(Deploy(at_s=0.0, name=asked.name, model=asked.name) for asked in situation.asked)
    scenario = Scenario(cluster=situation.cluster, actions=actions) if arena is None else arena.scenario(1)
    return BaselineWorld(situation.gpu, models, scenario)


def _for_planned_batch(model: SimulatedModel, situation: Situation) -> SimulatedModel:
    workload = replace(model.options.workload, batch=situation.planned_batch)
    intent = Intent(
        kind=situation.intent,
        slo=Slo(e2e_s=1e9) if situation.intent is IntentKind.LATENCY_SLO else None,
        traffic=model.options.intent.traffic,
        quality=situation.quality,
    )
    return replace(model, options=replace(model.options, workload=workload, intent=intent))


def _max_tp(situation: Situation) -> Deployer:
    return static_deployer(Baseline.MAX_TP, _baseline_world(situation))


def _recommended(arena: Arena) -> Recommended:
    """Return AIConfigurator with the answers that the world names, or else with those in its folder."""
    named = arena.world.aiconfigurator_answers
    path = arena.folder / (named or ANSWERS)
    return Recommended(AICONFIGURATOR, read_answers(path) if named or path.exists() else None)


def _alpaserve(arena: Arena) -> Callable[[Situation], Deployer]:
    """Return the deployer of one search for the whole trace, by the believed step times."""
    everything = arena.situation(arena.names, IntentKind.LATENCY_SLO, arena.cluster)
    slos = {asked.name: asked.slo for asked in everything.asked}
    world = _baseline_world(everything, arena)
    prepared = alpaserve(world, arena.requests, slos, router=LeastOutstanding())
    return lambda situation: prepared.deployer
