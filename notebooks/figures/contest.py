"""Contestants under load and their figures: every contestant serves the same ``load.World``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean

import numpy as np

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import InfeasibleError
from iserve.planning.pipeline import JOINT, JOINT_KINDS
from iserve.simulation.baselines import Baseline, Prepared, alpaserve, knowledge_of, static_deployer
from iserve.simulation.baselines import World as BaselineWorld
from iserve.simulation.running import PlannedDeployer, SimulatedModel
from notebooks.figures.load import World
from notebooks.figures.recommended import recommended
from placement.routing import LeastOutstanding
from placement.types import ClusterSnapshot, Placement
from planner.intent import Intent, IntentKind, Quality, Slo, Traffic
from traces.baselines.model_info import Places, sixteen_bit
from traces.simulator.contention import processor_sharing
from traces.simulator.result import ChangeKind, SimulationResult
from traces.simulator.scenario import Deployed, Deployer, NotDeployed, Policies
from traces.simulator.simulation import simulate
from traces.summary import kept

__all__ = [
    "BASELINES",
    "SLO_FACTOR",
    "Contestant",
    "Served",
    "averaged",
    "fewest_gpus",
    "former",
    "iserve",
    "serve",
    "slos_of",
]

GIB = 2**30
SLO_FACTOR = 5.0  # the middle of the paper's 2.5 to 7.5; AlpaServe needs one to place by


@dataclass(frozen=True, kw_only=True, slots=True)
class Contestant:
    """iServe under an intent, or a baseline.

    Args:
        kind: what iServe is asked for, what the rule of thumb is given, and which limits AIConfigurator; no other
            baseline knows it.
            ``latency-slo``: each model's own SLO, for the longest request, which models are planned for.
        policy: of iServe; the default is its own, joint plans, which choose GPUs with the configuration.
        knows_rates: of iServe's planner, of running deployments; else the busy fractions of their GPUs only.
        longest_apart: plans for the mean request with room for the longest, as by ``--context``, and has the SLO
            by which it is judged; else it plans for the longest request, with the SLO of that.
        told_number: of models, how many the cluster is to hold in all, as by ``--expected-deployments``, where the
            plan is joint.
        told_demand: of its own model's requests, their rate and traffic.
        refused: what iServe is asked for, no demand given, where it refuses ``kind``; None: the model is not
            deployed then.
        refuses_late: requests that could not keep their SLO any more when their turn is reached, by exact times,
            as AlpaServe's runtime does; else they wait.
        by_forecast: of those, on arrival and by what iServe's gateway knows then.
    """

    name: str
    baseline: Baseline = Baseline.ISERVE
    kind: IntentKind = IntentKind.MIN_COST
    quality: Quality = Quality.ANY
    policy: str = JOINT
    knows_rates: bool = True
    longest_apart: bool = False
    told_number: bool = True
    told_demand: bool = False
    refused: IntentKind | None = None
    refuses_late: bool = False
    by_forecast: bool = False

    def intent(self, slo: Slo, demand: tuple[float, Traffic] | None = None) -> Intent:
        """Return the intent for a model with this SLO and demand."""
        wish = Intent(
            kind=self.kind, quality=self.quality, slo=slo if self.kind is IntentKind.LATENCY_SLO else None
        )
        return wish if demand is None else replace(wish, rate_per_s=demand[0], traffic=demand[1])


def iserve(kind: IntentKind, quality: Quality = Quality.ANY) -> Contestant:
    """iServe under an intent; 16 bits where ``quality`` is exact, as every baseline but the rule."""
    words = {Quality.EXACT: ", 16 bits", Quality.NEAR: ", near", Quality.ANY: ""}[quality]
    return Contestant(name=f"{kind}{words}", kind=kind, quality=quality)


def former(kind: IntentKind, quality: Quality = Quality.ANY) -> Contestant:
    """The paper's way: ranked by one batch on idle GPUs, then placed by ``hybrid``; the number is not used."""
    return replace(iserve(kind, quality), name=f"{iserve(kind, quality).name}, hybrid", policy="hybrid")


BASELINES = (
    Contestant(name="max TP", baseline=Baseline.MAX_TP),
    Contestant(name="max PP", baseline=Baseline.MAX_PP),
    Contestant(name="FSDP, offload", baseline=Baseline.FSDP),
    Contestant(name="AlpaServe", baseline=Baseline.ALPASERVE),
    Contestant(name="AlpaServe, all", baseline=Baseline.ALPASERVE_ALL),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """Results of a contestant in a world.

    Latencies are from arrival to last token, waiting included, of answered requests; but ``p50_all_s`` is of all,
    one that is not answered taking forever. Cost and GPU-seconds are means over answered requests: what the
    deployment that served it holds, times its E2E. With replicas, the mean replica's.
    """

    deployed: float  # of the models that were asked for
    answered: float  # of all requests
    p50_all_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    missed: float  # of all requests; unanswered ones are missed
    cost_gib_s: float
    gpu_s: float
    memory_gib: float  # of all deployments together
    gpu_hours: float  # in which a GPU was held, until the last answer
    gpus: float  # that ever held a worker
    busy: float  # mean fraction of the time of those
    throughput: float  # answered requests per second and GPU that ever held a worker
    what: str  # the configurations of every deployment, in the order in which they were made; -: none


def averaged(several: Sequence[Served]) -> Served:
    """Means over worlds that differ in the seed; ``what`` is the first's."""
    return Served(
        what=several[0].what,
        **{f.name: fmean(getattr(one, f.name) for one in several) for f in fields(Served) if f.name != "what"},
    )


def fewest_gpus(world: World) -> dict[str, DeploymentConfig]:
    """Return, for each model, the 16-bit configuration on the fewest GPUs that the idle cluster holds.

    Of equal ones the most TP. It is the paper's minimum parallelism, which its SLOs are multiples of.
    """
    places, cluster, found = Places(world.site.gpu.link_group_size), world.scenario.cluster, {}
    for name, model in world.models(lambda model: Intent()).items():
        known = knowledge_of(model, world.site.gpu, cluster)
        by_size = sorted(sixteen_bit(known.configs), key=lambda c: (c.num_gpus, -c.tp))
        found[name] = next(c for c in by_size if isinstance(places.find(known, c, 1, cluster), Placement))
    return found


def slos_of(world: World, factor: float, request: Workload) -> dict[str, Slo]:
    """Return the SLO of each model: ``factor`` times the request's time alone at minimum parallelism."""
    models, fewest = world.models(lambda model: Intent()), fewest_gpus(world)
    return {
        name: Slo(e2e_s=factor * model.estimator.estimate(fewest[name], request).e2e_s.value)
        for name, model in models.items()
    }


def serve(world: World, who: Contestant, slo_factor: float = SLO_FACTOR) -> Served | None:
    """``world`` as ``who`` serves it, judged by SLOs of the mean request; None: AlpaServe found no placement of
    all."""
    by_model = slos_of(world, slo_factor, world.mean_request)
    slos = {name: by_model[model] for name, model in world.deployments.items()}
    if who.refuses_late:
        scenario = replace(world.scenario, reject_late=slos, rejects_by_forecast=who.by_forecast)
        world = replace(world, scenario=scenario)
    prepared = _prepared(world, who, slo_factor, slos)
    if prepared is None:
        return None
    policies = Policies(
        deployer=prepared.deployer,
        router=LeastOutstanding(),
        contention=processor_sharing,  # without the loss that was measured later, as recorded
    )
    return _measured(simulate(world.requests, prepared.scenario, policies), slos)


def _models(world: World, who: Contestant, slo_factor: float) -> dict[str, SimulatedModel]:
    """Return the models as ``who`` asks for them."""
    workload = world.site.workload
    slos = slos_of(world, slo_factor, world.mean_request if who.longest_apart else workload)
    if who.longest_apart:
        usual = replace(world.mean_request, batch=workload.batch)
        workload = replace(usual, longest_tokens=workload.context_tokens)

    def intent(model: str) -> Intent:
        return who.intent(slos[model], world.demand_of(model) if who.told_demand else None)

    is_told = who.told_number and who.policy == JOINT and who.kind in JOINT_KINDS
    expect = len(world.deployments) if is_told else 0
    return world.models(intent, who.policy, workload=workload, expect=expect)


@dataclass(frozen=True, slots=True)
class _Else:
    """Deploys by the second where the first refuses."""

    first: Deployer
    second: Deployer

    @property
    def name(self) -> str:
        return f"{self.first.name}, else {self.second.name}"

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = self.first(model, snapshot)
        return self.second(model, snapshot) if isinstance(found, NotDeployed) else found


def _planner(world: World, who: Contestant, slo_factor: float) -> Deployer:
    models = _models(world, who, slo_factor).values()
    planner = PlannedDeployer(world.site.gpu, models, knows_rates=who.knows_rates)
    if who.refused is None:
        return planner
    second = replace(who, kind=who.refused, refused=None, told_demand=False)
    return _Else(planner, _planner(world, second, slo_factor))


def _prepared(world: World, who: Contestant, slo_factor: float, slos: Mapping[str, Slo]) -> Prepared | None:
    if who.baseline is Baseline.ISERVE:
        return Prepared(world.scenario, _planner(world, who, slo_factor))
    seen = BaselineWorld(gpu=world.site.gpu, models=_models(world, who, slo_factor), scenario=world.scenario)
    match who.baseline:
        case Baseline.ALPASERVE | Baseline.ALPASERVE_ALL:
            keep_all = who.baseline is Baseline.ALPASERVE_ALL
            try:
                return alpaserve(seen, world.requests, slos, router=LeastOutstanding(), keep_all=keep_all)
            except InfeasibleError:
                return None
        case Baseline.AICONFIGURATOR:
            return Prepared(world.scenario, recommended(seen, who.kind, who.quality))
        case _:
            return Prepared(world.scenario, static_deployer(who.baseline, seen))


def _measured(result: SimulationResult, slos: Mapping[str, Slo]) -> Served:
    outcomes, done = result.outcomes, result.outcomes.completed
    e2e_s = outcomes.e2e_s[done]
    held: dict[str, list[tuple[float, int]]] = defaultdict(list)  # GiB and GPUs of each replica
    what: dict[str, list[str]] = defaultdict(list)
    for change in result.changes:
        if change.kind is ChangeKind.DEPLOYED:
            held[change.name].append((change.memory_bytes / GIB, len(set(change.device_ids))))
            what[change.name].append(_short(change.text))
    gib, gpus = (
        np.array([fmean(r[i] for r in held[name]) if held[name] else 0.0 for name in outcomes.deployments])[
            outcomes.deployment[done]
        ]
        for i in (0, 1)
    )
    met = sum(int(kept(own, slos[name]).sum()) for name, own in outcomes.by_deployment())
    used = [gpu for gpu in result.gpus if gpu.peak_bytes > 0]
    p50, p95, p99 = np.percentile(e2e_s, (50, 95, 99)) if e2e_s.size else (np.nan,) * 3
    return Served(
        deployed=sum(bool(replicas) for replicas in held.values()),
        answered=float(done.mean()),
        p50_all_s=float(np.percentile(np.where(done, outcomes.e2e_s, np.inf), 50, method="higher")),
        p50_s=float(p50),
        p95_s=float(p95),
        p99_s=float(p99),
        missed=1 - met / len(outcomes),
        cost_gib_s=float(np.mean(gib * e2e_s)) if e2e_s.size else float("nan"),
        gpu_s=float(np.mean(gpus * e2e_s)) if e2e_s.size else float("nan"),
        memory_gib=sum(r[0] for replicas in held.values() for r in replicas),
        gpu_hours=sum(gpu.held_fraction for gpu in result.gpus) * result.end_s / 3600,
        gpus=len(used),
        busy=fmean(gpu.busy_fraction for gpu in used) if used else 0.0,
        throughput=float(done.sum()) / result.end_s / len(used) if used else 0.0,
        what=_together([" + ".join(what[figures.name]) or "-" for figures in result.deployments]),
    )


def _together(each: Sequence[str]) -> str:
    return f"all {each[0]}" if len(set(each)) == 1 else "; ".join(each)


def _short(what: str) -> str:
    """``tp=4,pp=1,weights=int4,...`` as ``(4,1) int4``; anything else as it is."""
    parts = dict(part.partition("=")[::2] for part in what.split(" ")[0].split(","))
    if not {"tp", "pp", "weights"} <= set(parts):
        return what
    return f"({parts['tp']},{parts['pp']}) {parts['weights']}"
