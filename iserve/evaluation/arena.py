"""World for one seed, ready to be played: hardware, models as contestants and as the truth have them, requests.

Variants of a model have slots next to it; in a merged arena each is a deployment of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

import numpy as np

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, ConfigError, InfeasibleError
from fingerprint.estimates import Estimator
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import parse_gpus
from fingerprint.model_spec import ModelSpec
from iserve.evaluation.rules import least_tp
from iserve.evaluation.situation import Asked, Replica, Situation
from iserve.evaluation.sizing import Spot, size_together
from iserve.evaluation.truth import TrueSteps, true_estimator, true_links
from iserve.evaluation.variants import merged_models, slot_cost, with_variant_slots
from iserve.evaluation.workload import Load, load_of, make_requests
from iserve.evaluation.world import Information, Interconnect, World, WorldModel
from iserve.model_source import resolve
from iserve.planning.pipeline import PlanOptions, check_context, with_traffic
from iserve.simulation.running import SimulatedModel, idle_cluster, roofline_model
from placement.types import ClusterSnapshot
from planner.intent import IntentKind, Slo
from traces.outcomes import Floats
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.scenario import Deploy, Scenario
from traces.simulator.step_model import StepModel

__all__ = ["Arena", "make_arena"]

_NEVER_STOP = 2**62  # however many wait, all requests are followed to their end


@dataclass(frozen=True, kw_only=True)
class Arena:
    """World for one seed."""

    world: World
    seed: int
    folder: Path  # where relative paths of the world begin
    gpu: GpuSpec
    cluster: ClusterSnapshot  # idle
    deployed: tuple[WorldModel, ...]  # deployments that contestants are asked for
    models: Mapping[str, SimulatedModel]  # by deployment: what contestants believe
    ours: Mapping[str, Estimator]  # by deployment: what the product believes
    truths: Mapping[str, TrueSteps]  # by deployment: step times as the simulator has them
    requests: tuple[Request, ...]
    loads: Mapping[str, Load]
    alone: Mapping[str, StepModel]  # by the world's model, on the least TP that fits: for SLOs and the guard

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the deployments."""
        return tuple(model.name for model in self.deployed)

    @cached_property
    def model_of(self) -> Mapping[str, str]:
        """Model of the world, by the names of deployments and of variants."""
        return self.world.model_of

    @cached_property
    def merged(self) -> Arena:
        """Arena in which each variant is a deployment of its own; without variants, this one."""
        if not any(model.variant_names for model in self.deployed):
            return self
        deployed = merged_models(self.world, self.requests)
        loads = load_of(self.world, self.requests, deployed)
        of = {one.name: self.model_of[one.name] for one in deployed}
        models = {
            name: replace(self.models[model], name=name, options=PlanOptions(workload=loads[name].workload))
            for name, model in of.items()
        }
        ours = {name: self.ours[model] for name, model in of.items()}
        truths = {name: self.truths[model] for name, model in of.items()}
        return replace(self, deployed=deployed, models=models, ours=ours, truths=truths, loads=loads)

    @property
    def groups(self) -> tuple[tuple[float, tuple[str, ...]], ...]:
        """Deployments that are asked for at one time, together, by time."""
        order = sorted(self.deployed, key=lambda model: model.deploy_at_s)
        return tuple(
            (at_s, tuple(model.name for model in group))
            for at_s, group in groupby(order, key=lambda model: model.deploy_at_s)
        )

    def asked(self, name: str) -> Asked:
        """Return the deployment as far as the world's information lets a contestant know it."""
        load = self.loads[name]
        mean = load.workload
        known = self.world.information is not Information.NONE and load.rate_per_s > 0
        return Asked(
            name=name,
            model=self.models[name],
            estimator=self.ours[name],
            slo=Slo(e2e_s=self.world.slo_multiple * self.alone_s(name, mean.input_tokens, mean.output_tokens)),
            rate_per_s=load.rate_per_s if known else None,
        )

    def situation(
        self,
        names: tuple[str, ...],
        intent: IntentKind,
        cluster: ClusterSnapshot,
        running: tuple[Replica, ...] = (),
    ) -> Situation:
        """Return the question in which ``names`` are asked for together."""
        return Situation(
            gpu=self.gpu,
            cluster=cluster,
            asked=tuple(self.asked(name) for name in names),
            running=running,
            expected=len(self.deployed),
            intent=intent,
            quality=self.world.quality,
            planned_batch=self.world.planned_batch,
        )

    @cached_property
    def all_alone_s(self) -> Floats:
        """E2E of each request alone, in the order of ``requests``."""
        return np.array([self.alone_s(one.model, one.input_tokens, one.output_tokens) for one in self.requests])

    def alone_s(self, name: str, input_tokens: int, output_tokens: int) -> float:
        """Return the E2E of one request alone, on the least TP that fits, by the truth: that of its base."""
        steps = self.alone[self.model_of[name]]
        later_s = steps.run_s(1, input_tokens + 1, output_tokens - 1) if output_tokens > 1 else 0.0
        return steps.prompt_s(input_tokens) + later_s

    def slot_cost(self, name: str, config: DeploymentConfig) -> AdapterCost | None:
        """Return the slots of a replica of a deployment, and what its variants take; None: it has no variants.

        Raises:
            ConfigError: it has variants, and the configuration no slots for them.
        """
        model = self.models[name]
        if model.options.intent.traffic.variants and not config.adapter_slots:
            raise ConfigError(f"{config} has no slots for the variants of {name!r}")
        return slot_cost(config, model, self.world.truth)

    def scenario(self, replicas: int) -> Scenario:
        """Return the simulated world in which each deployment may have so many replicas."""
        variants = {name: model.name for model in self.deployed for name in model.variant_names}
        return Scenario(
            cluster=self.cluster,
            actions=tuple(
                Deploy(at_s=model.deploy_at_s, name=model.name, model=model.name, replicas=replicas)
                for model in sorted(self.deployed, key=lambda model: model.deploy_at_s)
            ),
            variants=variants,
            registered=tuple(variants),
            startup_s=self.world.truth.startup_s,
            most_waiting=_NEVER_STOP,
        )


def make_arena(world: World, seed: int, folder: Path) -> Arena:
    """Return ``world`` for one seed.

    Raises:
        ConfigError: a model's shape or the requests cannot be used.
        InfeasibleError: a model that no TP degree holds on an empty GPU.
    """
    gpu, count = parse_gpus(world.cluster)
    requests = make_requests(world, seed, folder)
    loads = load_of(world, requests)
    models, ours, truths = {}, {}, {}
    linked = gpu
    if world.interconnect is Interconnect.MEASURED:
        linked = replace(gpu, interconnect=true_links(gpu, min(count, world.gpus_per_node), world.truth))
    for one in world.models:
        spec = _spec_of(one, folder)
        options = PlanOptions(workload=loads[one.name].workload)
        try:
            check_context(spec, options.workload)
        except ConfigError as error:
            raise ConfigError(
                f"{world.name}: {one.name}: {error}, or max_input_tokens and max_output_tokens"
            ) from error
        model = roofline_model(one.name, spec, gpu, options, world.engine)
        model = replace(model, engines=tuple(table.unprepared() for table in model.engines))
        models[one.name] = with_variant_slots(model, one.variants, gpu)
        known = roofline_model(one.name, spec, linked, options, world.engine).estimator
        ours[one.name] = with_traffic(known, spec, models[one.name].options)
        estimator = true_estimator(spec, gpu, capabilities_for(world.engine), world.truth)
        truths[one.name] = TrueSteps(estimator)
    bare = Arena(
        world=world,
        seed=seed,
        folder=folder,
        gpu=gpu,
        cluster=idle_cluster(gpu, count, per_node=world.gpus_per_node),
        deployed=world.models,
        models=models,
        ours=ours,
        truths=truths,
        requests=requests,
        loads=loads,
        alone={},
    )
    return replace(bare, alone={name: _alone(bare, name) for name in world.names})


def _alone(arena: Arena, name: str) -> StepModel:
    """Return the steps of the least TP that fits, on GPUs of its own."""
    load, limit = arena.loads[name], Slo(e2e_s=1.0)  # which the rule does not look at
    asked = Asked(name=name, model=arena.models[name], estimator=arena.ours[name], slo=limit)
    situation = Situation(
        gpu=arena.gpu,
        cluster=arena.cluster,
        asked=(asked,),
        running=(),
        expected=1,
        intent=IntentKind.MIN_LATENCY,
        quality=arena.world.quality,
        planned_batch=arena.world.planned_batch,
    )
    try:
        config = least_tp(asked, situation)
    except InfeasibleError as error:
        raise InfeasibleError(f"{arena.world.name}: {name}: {error}") from error
    placed = size_together(situation, [Spot(asked, config, arena.cluster.gpus[: config.tp])])
    assert placed is not None, f"the least TP holds {load.workload} on empty GPUs"
    return arena.truths[name](config, placed[0].limits)


def _spec_of(model: WorldModel, folder: Path) -> ModelSpec:
    if model.config is not None:
        try:
            return read_spec(model.config)
        except BadInputError as error:
            raise ConfigError(f"config of {model.name!r}: {error}") from error
    assert model.model is not None, "the schema saw to it"
    local = folder / model.model
    return resolve(str(local) if local.exists() else model.model, need_weights=False).spec
