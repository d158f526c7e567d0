"""Hands the real planner, placement and batching policies, and predicted times, to the cluster simulator.

``traces`` may not import any of the daemon's or iServe's code; what decides in production is given to it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from daemon.engines.registry import capabilities_for
from daemon.torch_engine.scheduler import Demand, Scheduler, Work
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimator
from fingerprint.estimators.roofline import DEFAULT_MAX_BATCHED_TOKENS, RooflineEstimator
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from iserve.controller.estimating import estimator_for, step_tokens_of
from iserve.planning.engine_choice import by_preference
from iserve.planning.making import FitsOn, Hardware, PlanOptions, alone_of, make_plan, placements_of
from iserve.planning.ranked_model import RankedModel
from placement.harvesting import spare_gpu
from placement.orders import Steering
from placement.routing import Router
from placement.types import ClusterSnapshot, GpuState, Placement
from planner.lateness import Pace
from planner.plan import NoRoom, Plan
from traces.request import Request
from traces.simulator.pipelined import keeps_stages_full
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deployed, Deployer, NotDeployed, Policies, Scenario
from traces.simulator.simulation import Progress, simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.simulator.stepped import Chunk

__all__ = [
    "EngineBatcher",
    "PlannedDeployer",
    "SimulatedModel",
    "idle_cluster",
    "launch_limits",
    "measured_model",
    "roofline_model",
    "simulate_cluster",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedModel:
    """A model as the planner needs it; ``options`` is what is wished of it."""

    name: str
    spec: ModelSpec
    estimator: Estimator  # its ConfigurationMap: measured, or by the roofline
    engines: tuple[EngineCapabilities, ...]  # in order of preference
    options: PlanOptions
    step_tokens: int | None = None  # of the largest step it was measured with, where that binds (a profile)


def idle_cluster(gpu: GpuSpec, count: int, *, per_node: int = 8) -> ClusterSnapshot:
    """``count`` idle GPUs in nodes of ``per_node``; nodes are ``node0``, ``node1``, and so on.

    Raises:
        ConfigError: no GPU, or none in a node.
    """
    if count < 1 or per_node < 1:
        raise ConfigError(f"a simulated cluster needs at least one GPU in each node, got {count} and {per_node}")
    return ClusterSnapshot(
        tuple(
            GpuState(
                device_id=f"{gpu.name}:{index}",
                node_id=f"node{index // per_node}",
                gpu_index=index % per_node,
                total_bytes=gpu.memory_bytes,
                free_bytes=gpu.memory_bytes,
            )
            for index in range(count)
        )
    )


def launch_limits(workload: Workload, engine: str, step_tokens: int | None = None) -> Limits:
    """With what a worker of ``engine`` planned for ``workload`` is launched, as a deploy does it."""
    context = workload.context_tokens
    largest = step_tokens or min(DEFAULT_MAX_BATCHED_TOKENS, max(workload.batch * workload.input_tokens, context))
    return Limits(
        max_batch=workload.batch,
        max_context_tokens=context,
        max_batched_tokens=max(largest, workload.batch),
        kv_tokens=workload.kv_tokens(engine),
    )


def roofline_model(name: str, spec: ModelSpec, gpu: GpuSpec, options: PlanOptions, engine: str) -> SimulatedModel:
    """By datasheet alone; ``engine`` "auto": as a deploy prefers them."""
    return SimulatedModel(
        name=name,
        spec=spec,
        estimator=RooflineEstimator(spec, gpu),
        engines=by_preference(capabilities_for(engine), gpu),
        options=options,
    )


def measured_model(name: str, profile: Profile, gpu: GpuSpec, options: PlanOptions) -> SimulatedModel:
    """By what was measured of it, on the engine it was measured on.

    Raises:
        ConfigError: it was measured on another kind of device.
    """
    device = profile.machine.device
    if device != gpu:
        raise ConfigError(f"the profile of {profile.model} was taken on {device.name}, the cluster has {gpu.name}")
    return SimulatedModel(
        name=name,
        spec=profile.spec,
        estimator=estimator_for(profile),
        engines=tuple(capabilities_for(profile.engine)),
        options=options,
        step_tokens=step_tokens_of(profile),
    )


class PlannedDeployer:
    """What ``iserve deploy`` would do with the cluster as it is: rank all configurations, place the best that fits
    (implements ``traces.simulator.scenario.ReplicaDeployer``).

    Args:
        knows_rates: of what is deployed there, counted until then; else only how busy each GPU was, as where no
            gateway tells.

    Raises:
        ConfigError: a workload longer than a model's context.
    """

    def __init__(self, gpu: GpuSpec, models: Iterable[SimulatedModel], *, knows_rates: bool = True) -> None:
        self._gpu, self._knows_rates = gpu, knows_rates
        self._models = {model.name: model for model in models}
        self._steps: dict[tuple[str, DeploymentConfig], StepModel] = {}
        self._paces: dict[tuple[str, DeploymentConfig], Pace] = {}
        self._ranked = {
            name: RankedModel(model.spec, gpu, model.estimator, model.engines, model.options)
            for name, model in self._models.items()
        }

    @property
    def name(self) -> str:
        policies = dict.fromkeys(model.options.policy for model in self._models.values())
        return f"planner with {'/'.join(policies)} placement"

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        asked, ranked = self._models[model], self._ranked[model]
        if not self._knows_rates:
            snapshot = replace(snapshot, deployments=())
        chosen = ranked.choose(snapshot)
        if chosen is None:
            return NotDeployed(reason=self._why_not(asked, snapshot))
        return self._deployed(asked, chosen.config, chosen.placement)

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        """The best configuration that fits so often, each on GPUs of its own.

        Raises:
            ConfigError: more than a deployment may have.
        """
        asked = self._models[model]
        plan = self._plan(asked, snapshot if self._knows_rates else replace(snapshot, deployments=()), count)
        if plan.best is None:
            return NotDeployed(reason=_nearest(plan))
        config, layout = plan.best.config, plan.best.layout
        assert layout is not None, "the best has a place"
        return [self._deployed(asked, config, placement) for placement in placements_of(layout)]

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        """The same configuration where the policy puts it."""
        asked = self._models[model]
        config = next(config for (_, config), steps in self._steps.items() if steps is like.steps)
        estimate = asked.estimator.estimate(config, asked.options.workload)
        found = FitsOn(self._hardware(snapshot), replace(asked.options, replicas=1))(estimate)
        if isinstance(found, NoRoom):
            return NotDeployed(reason=f"no place for one more on GPUs without its replicas: {found.reason}")
        (placement,) = placements_of(found)
        return self._deployed(asked, config, placement)

    def _deployed(self, asked: SimulatedModel, config: DeploymentConfig, placement: Placement) -> Deployed:
        return Deployed(
            placement=placement,
            steps=self._step_model(asked, config),
            what=f"{config} on {config.engine}",
            pipelined=keeps_stages_full(config.engine),
            pace=self._pace(asked, config),
        )

    def _pace(self, asked: SimulatedModel, config: DeploymentConfig) -> Pace:
        """As the controller tells it to a gateway."""
        found = self._paces.get((asked.name, config))
        if found is None:
            work = asked.options.workload
            alone = alone_of(asked.estimator, config, work)
            found = Pace.planned(work, asked.estimator.estimate(config, work), alone)
            self._paces[asked.name, config] = found
        return found

    def _why_not(self, asked: SimulatedModel, snapshot: ClusterSnapshot) -> str:
        plan = self._plan(asked, snapshot, 1)
        assert plan.best is None, "the kept order gives the plan's own choice"
        return _nearest(plan)

    def _plan(self, asked: SimulatedModel, snapshot: ClusterSnapshot, replicas: int) -> Plan:
        options = replace(asked.options, replicas=replicas)
        return make_plan(asked.spec, self._hardware(snapshot), asked.estimator, asked.engines, options)

    def _hardware(self, snapshot: ClusterSnapshot) -> Hardware:
        return Hardware(label=f"{len(snapshot.gpus)} x {self._gpu.name}", gpu=self._gpu, snapshot=snapshot)

    def _step_model(self, model: SimulatedModel, config: DeploymentConfig) -> StepModel:
        found = self._steps.get((model.name, config))
        if found is None:
            limits = launch_limits(model.options.workload, config.engine, model.step_tokens)
            found = self._steps[model.name, config] = tabulate(model.estimator, config, limits)
        return found


def _nearest(plan: Plan) -> str:
    nearest = plan.why_not.nearest
    return "nothing is feasible" if nearest is None else nearest.text


class EngineBatcher:
    """The embedded engine's scheduler, as the simulator asks it."""

    def __init__(self, limits: Limits) -> None:
        self._scheduler = Scheduler(
            max_batch=limits.max_batch,
            max_batched_tokens=limits.max_batched_tokens,
            max_context_tokens=limits.max_context_tokens,
            max_waiting=_NO_BOUND,  # the scenario has its own
        )

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self._scheduler.submit([Demand(row, input_tokens, output_tokens)])

    def plan(self) -> Sequence[Work]:
        return self._scheduler.plan()

    def complete(self, plan: Sequence[Chunk]) -> Sequence[int]:
        return self._scheduler.complete(cast("Sequence[Work]", plan))  # what ``plan`` answered


_NO_BOUND = 2**62


def simulate_cluster(
    requests: Iterable[Request],
    scenario: Scenario,
    gpu: GpuSpec,
    models: Mapping[str, SimulatedModel],
    *,
    router: Router,
    deployer: Deployer | None = None,
    steering: Steering | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """:func:`traces.simulator.simulation.simulate` with the policies that decide in production.

    Args:
        deployer: None: the planner.
        steering: scales and moves what is deployed; None: it stays as it is.
    """
    policies = Policies(
        deployer=deployer or PlannedDeployer(gpu, models.values()),
        router=router,
        harvest=spare_gpu,
        make_batcher=EngineBatcher,
        steering=steering,
    )
    return simulate(requests, scenario, policies, progress=progress)
