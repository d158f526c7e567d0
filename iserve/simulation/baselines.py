"""The baselines in iServe's simulator: each is handed the models, estimators and limits that the planner has.

``iserve simulate --planner`` and the evaluation choose one by name.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from pathlib import Path

from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from fingerprint.gpu_spec import GpuSpec
from iserve.planning.pipeline import EngineChooser, slots_of
from iserve.simulation.running import PlannedDeployer, SimulatedModel, launch_limits
from placement.routing import Router
from placement.types import ClusterSnapshot
from planner.intent import Slo, allows
from planner.space import configuration_space, shape_refusal
from traces.baselines.aiconfigurator import Recording, read_recording
from traces.baselines.alpaserve import SimulatedTrace, deployment_of, search
from traces.baselines.first_fit import FirstFit, Preference, common_batch, max_pp, max_tp
from traces.baselines.fsdp import FsdpDeployer
from traces.baselines.model_info import Knowledge, Places, StepTimes
from traces.baselines.rule_of_thumb import FAST_KINDS, rule_of_thumb
from traces.request import Request
from traces.simulator.scenario import Deploy, Deployed, Deployer, NotDeployed, Scenario
from traces.simulator.simulation import simulate

__all__ = [
    "MOST_REQUESTS",
    "Baseline",
    "Prepared",
    "World",
    "alpaserve",
    "check_steerable",
    "knowledge_of",
    "parse_planner",
    "prepare",
    "served_contexts",
    "static_deployer",
]

MOST_REQUESTS = 20_000  # of a trace that AlpaServe searches: minutes


class Baseline(StrEnum):
    """Planner that decides what is deployed."""

    ISERVE = "iserve"
    MAX_TP = "max-tp"  # TensorRT-LLM as people launch it
    MAX_PP = "max-pp"
    RULE = "rule"  # max TP for latency, min TP that fits for cost
    FSDP = "fsdp-offload"  # Accelerate
    ALPASERVE = "alpaserve"
    ALPASERVE_ALL = "alpaserve-all"  # which may drop no model
    AICONFIGURATOR = "aiconfigurator"  # from recorded answers


@dataclass(frozen=True, slots=True)
class World:
    """Simulated world, as far as a baseline may know it."""

    gpu: GpuSpec
    models: Mapping[str, SimulatedModel]
    scenario: Scenario

    @property
    def deploys(self) -> list[Deploy]:
        """All that will be deployed, in that order."""
        return [action for action in self.scenario.actions if isinstance(action, Deploy)]


def knowledge_of(model: SimulatedModel, gpu: GpuSpec, cluster: ClusterSnapshot) -> Knowledge:
    """Return all that the planner would rank, but for what the model's shape or every engine refuses."""
    num_gpus = len(cluster.gpus)
    chooser = EngineChooser(model.spec, gpu, model.engines)
    space = configuration_space(model.spec, gpu, num_gpus, chooser.name, slots=slots_of(model.options))
    return Knowledge(
        name=model.name,
        spec=model.spec,
        estimator=model.estimator,
        workload=model.options.workload,
        configs=tuple(
            config
            for config in space
            if shape_refusal(model.spec, config, num_gpus) is None and chooser.refusal(config) is None
        ),
        limits=lambda workload, engine: launch_limits(workload, engine, model.step_tokens, spec=model.spec),
    )


@dataclass(frozen=True, slots=True)
class Prepared:
    """A world as a baseline serves it: its own number of replicas, its deployer, what it said of its decision."""

    scenario: Scenario
    deployer: Deployer
    notes: tuple[str, ...] = ()


def parse_planner(text: str) -> tuple[Baseline, Path | None]:
    """Return a baseline by name, and of ``aiconfigurator:FILE`` the file of its answers.

    Raises:
        ConfigError: there is no such baseline, or the file is missing or one too many.
    """
    name, separator, file = text.partition(":")
    if name not in list(Baseline):
        raise ConfigError(f"there is no planner {name!r}; there are {', '.join(Baseline)}")
    baseline = Baseline(name)
    if bool(file) != (baseline is Baseline.AICONFIGURATOR) or bool(separator) != bool(file):
        raise ConfigError(
            f"{text!r}: aiconfigurator answers from a file of its answers, as aiconfigurator:ANSWERS.json "
            "(tests/bench/aiconfigurator_static.py makes one); no other planner takes one"
        )
    return baseline, Path(file) if file else None


def check_steerable(baseline: Baseline) -> None:
    """Raise ConfigError where the baseline has placed every replica beforehand, so that none can change."""
    if baseline in (Baseline.ALPASERVE, Baseline.ALPASERVE_ALL):
        raise ConfigError(
            f"{baseline} places every replica beforehand, knowing the trace; --replicas MIN:MAX, --scale-to-zero, "
            "--consolidate and --migrate go with another --planner"
        )


def served_contexts(baseline: Baseline, world: World, replicas: int) -> dict[str, int]:
    """Return the longest request, prompt and answer together, that each model's first replica serves.

    A baseline serves the planned ones. iServe serves what memory holds: on the idle cluster, where deployments
    made before may leave less.

    Args:
        replicas: of a model, planned together.
    """
    contexts = {name: model.options.workload.context_tokens for name, model in world.models.items()}
    deployer, cluster = PlannedDeployer(world.gpu, world.models.values()), world.scenario.cluster
    for name in world.models if baseline is Baseline.ISERVE else ():
        found = deployer(name, cluster) if replicas == 1 else deployer.several(name, cluster, replicas)
        if isinstance(found, NotDeployed):  # as the simulation will tell
            continue
        limits = (found if isinstance(found, Deployed) else found[0]).steps.limits
        contexts[name] = limits.longest
    return contexts


def prepare(
    baseline: Baseline,
    world: World,
    requests: Iterable[Request],
    *,
    slo: Slo | None,
    router: Router,
    answers: Path | None = None,
    labels: Mapping[str, str] | None = None,
) -> tuple[Prepared, Iterable[Request]]:
    """Return ``world`` as ``baseline`` serves it, and the requests, which AlpaServe has read to their end.

    Args:
        slo: of all requests; AlpaServe needs one.
        answers: AIConfigurator's.
        labels: each model's name in AIConfigurator's answers; None: the names in ``world``.

    Raises:
        ConfigError: what the baseline needs is missing, or beyond it.
        InfeasibleError: AlpaServe, asked to drop none, found no place for all.
        BadInputError: ``answers`` cannot be read.
    """
    match baseline:
        case Baseline.ALPASERVE | Baseline.ALPASERVE_ALL:
            # One more than it takes, so that a trace of millions is not read to be refused.
            read = list(islice(requests, MOST_REQUESTS + 1))
            slos = {} if slo is None else dict.fromkeys((deploy.name for deploy in world.deploys), slo)
            keep_all = baseline is Baseline.ALPASERVE_ALL
            return alpaserve(world, read, slos, router=router, keep_all=keep_all), read
        case Baseline.AICONFIGURATOR:
            assert answers is not None, "parse_planner saw to it"
            recording = read_recording(_read(answers), str(answers))
            deployer = _by_answers(recording, world, labels or {name: name for name in world.models})
            return Prepared(world.scenario, deployer, (f"AIConfigurator {recording.aiconfigurator}",)), requests
        case _:
            return Prepared(world.scenario, static_deployer(baseline, world)), requests


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise BadInputError(f"the answers {path} are no whole gzip file: {error}") from error
    except OSError as error:
        raise NotFoundError(f"the answers {path} cannot be read: {error.strerror or error}") from error


def _by_answers(recording: Recording, world: World, labels: Mapping[str, str]) -> FirstFit:
    cluster, gpu = world.scenario.cluster, world.gpu
    batches = _batches(world)
    preferences = []
    for name, model in world.models.items():
        known = knowledge_of(model, gpu, cluster)
        order = recording.order(known, labels[name], gpu, model.options.intent)
        work = model.options.workload
        why_none = (
            f"no answer for {labels[name]} on {gpu.name}, batch {work.batch}, {work.input_tokens} input and "
            f"{work.output_tokens} output tokens that keeps the intent's limits"
        )
        preferences.append(Preference(known, order, batches[name], why_none))
    return FirstFit(Baseline.AICONFIGURATOR, preferences, Places(gpu.link_group_size), StepTimes())


def alpaserve(
    world: World,
    requests: Sequence[Request],
    slos: Mapping[str, Slo],
    *,
    router: Router,
    keep_all: bool = False,
    beam: int = 0,
) -> Prepared:
    """Return AlpaServe's placement for the whole of ``requests``; each deployment's replicas are its choice.

    Args:
        slos: of each deployment, by name.
        beam: 0: the fast heuristic of its Algorithm 1 (``traces.baselines.alpaserve.search``).

    Raises:
        ConfigError: the trace is longer than ``MOST_REQUESTS``, or a deployment has no SLO or asks for replicas.
        InfeasibleError: ``keep_all``, and no placement of all was found.
    """
    deploys = world.deploys
    _check_alpaserve(deploys, len(requests), slos)
    cluster, gpu = world.scenario.cluster, world.gpu
    models = {
        deploy.name: replace(knowledge_of(world.models[deploy.model], gpu, cluster), name=deploy.name)
        for deploy in deploys
    }
    batches = world.scenario.service.batches
    batch_of = {name: model.workload.batch if batches else 1 for name, model in models.items()}
    times = StepTimes()
    judge = SimulatedTrace(
        models, batch_of, requests, world.scenario, slos, router=router, simulate=simulate, times=times
    )
    places = Places(gpu.link_group_size)
    plan = search(models, batch_of, cluster, places, judge, keep_all=keep_all, beam=beam)
    name = Baseline.ALPASERVE_ALL if keep_all else Baseline.ALPASERVE
    scenario, deployer = deployment_of(plan.replicas, world.scenario, models, batch_of, times, name=name)
    dropped = [name for name in models if name not in {placed.model for placed in plan.replicas}]
    return Prepared(
        scenario,
        deployer,
        (
            f"{name} expects {plan.score.met} of {len(requests)} requests to keep their SLO, after "
            f"{plan.simulations} simulations of the trace",
            *([f"it drops {', '.join(dropped)}"] if dropped else []),
        ),
    )


def _check_alpaserve(deploys: Sequence[Deploy], num_requests: int, slos: Mapping[str, Slo]) -> None:
    if num_requests > MOST_REQUESTS:
        raise ConfigError(
            f"AlpaServe's search simulates the trace some thousand times; at most {MOST_REQUESTS} requests are "
            "searched, this trace has more: cut it with --limit"
        )
    for deploy in deploys:
        if deploy.name not in slos:
            raise ConfigError(f"AlpaServe places for an SLO and {deploy.name} has none; give one with --eval-slo")
        if deploy.replicas != 1:
            raise ConfigError(f"AlpaServe chooses the number of replicas itself; {deploy.replicas} were asked for")


def static_deployer(baseline: Baseline, world: World) -> Deployer:
    """Return the deployer of a baseline that needs to know nothing of the trace."""
    cluster = world.scenario.cluster
    known = {name: knowledge_of(model, world.gpu, cluster) for name, model in world.models.items()}
    match baseline:
        case Baseline.ISERVE:
            return PlannedDeployer(world.gpu, world.models.values())
        case Baseline.FSDP:
            return FsdpDeployer(world.gpu, known.values(), _batches(world))
        case Baseline.MAX_TP | Baseline.MAX_PP | Baseline.RULE:
            return _first_fit(baseline, world, known)
        case _:
            raise ConfigError(f"{baseline} needs to know the trace or recorded answers")


def _first_fit(baseline: Baseline, world: World, known: Mapping[str, Knowledge]) -> FirstFit:
    places = Places(world.gpu.link_group_size)
    if baseline is Baseline.RULE:
        preferences: Iterable[Preference] = [
            Preference(known[name], _by_the_rule(known[name], model, world.gpu), _batches(world)[name])
            for name, model in world.models.items()
        ]
    else:
        order = max_tp if baseline is Baseline.MAX_TP else max_pp
        configs = {name: order(model) for name, model in known.items()}
        deployments = [(known[d.model], configs[d.model], d.replicas) for d in world.deploys]
        batches = _batches(world, common_batch(deployments, world.scenario.cluster, places))
        preferences = [Preference(known[name], configs[name], batches[name]) for name in known]
    return FirstFit(baseline, preferences, places, StepTimes())


def _batches(world: World, common: int = 0) -> dict[str, int]:
    """Return each model's batch: 1 without batching, else ``common``, and where that is 0 the workload's own."""
    if not world.scenario.service.batches:
        return dict.fromkeys(world.models, 1)
    return {name: common or model.options.workload.batch for name, model in world.models.items()}


def _by_the_rule(known: Knowledge, model: SimulatedModel, gpu: GpuSpec) -> tuple[DeploymentConfig, ...]:
    intent = model.options.intent
    order = rule_of_thumb(known.spec, gpu, fast=intent.kind in FAST_KINDS)
    return tuple(sorted((c for c in known.configs if allows(intent.quality, c)), key=order))
