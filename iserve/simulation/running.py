"""Hands the real planner, placement and batching policies, and predicted times, to the cluster simulator.

``traces`` may not import any of the daemon's or iServe's code; what decides in production is given to it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from daemon.engines.registry import capabilities_for
from daemon.torch_engine.runtime.scheduler import Demand, Scheduler, Work
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.engine_caches import with_engine_caches
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimator
from fingerprint.estimators.adapter_slots import loads_stop_steps, variant_cost, variant_load_s
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import Profile
from fingerprint.model_spec import ModelSpec
from fingerprint.profile_checks import caveats
from fingerprint.service_model import ServiceModel, service_between
from iserve.planning.engine_choice import by_preference
from iserve.planning.estimator_factory import check_taken_on, estimator_for, step_tokens_of
from iserve.planning.joint_choice import ExpectedModel, JointQuestion, expected_model
from iserve.planning.joint_promise import promised_choice
from iserve.planning.launch_limits import largest_step
from iserve.planning.launch_limits import launch_limits as planned_limits
from iserve.planning.pipeline import (
    FitsOn,
    Hardware,
    PlanOptions,
    alone_of,
    datasheet_estimator,
    make_plan,
    placements_of,
)
from iserve.planning.ranking_cache import RankedModel
from iserve.planning.serving_capacity import capacity_of
from placement.actions import ClusterPolicy
from placement.harvesting import spare_gpu
from placement.routing import Router
from placement.types import ClusterSnapshot, GpuState, Placement
from placement.variant_routing import VariantPolicy, make_variant_policy
from planner.plan import NoRoom, Plan
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Deployed, Deployer, NotDeployed, Policies, Scenario
from traces.simulator.simulation import Progress, simulate
from traces.simulator.step_model import Limits, StepModel, tabulate
from traces.simulator.stepped import Chunk

__all__ = [
    "EngineBatcher",
    "PlannedDeployer",
    "SimulatedModel",
    "adapter_cost",
    "idle_cluster",
    "launch_limits",
    "measured_model",
    "roofline_model",
    "simulate_cluster",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedModel:
    """Model as the planner needs it; ``options`` is what is asked of it.

    A replica serves the planned workload and no more unless ``options`` say ``more_requests`` or
    ``longer_requests``, as a deploy's do where --batch or --context is left out.
    """

    name: str
    spec: ModelSpec
    estimator: Estimator  # its ConfigurationMap: measured, or by the roofline
    engines: tuple[EngineCapabilities, ...]  # in order of preference
    options: PlanOptions
    step_tokens: int | None = None  # of the largest step it was measured with, where that binds (a profile)
    caveats: tuple[str, ...] = ()  # of its profile


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


def launch_limits(
    workload: Workload,
    engine: str,
    step_tokens: int | None = None,
    *,
    served: Workload | None = None,
    spec: ModelSpec | None = None,
) -> Limits:
    """Return the limits of a worker of ``engine`` that is planned for ``workload`` and serves ``served``.

    Args:
        served: None: nothing beyond the plan.
        spec: which tells what is kept of a request, and whether steps are padded; None: all of it, unpadded.
    """
    sizes = planned_limits(workload, engine, step_tokens, served=served)
    windows = {kind.window for kind in spec.kinds if kind.kv_share} if spec is not None else {None}
    bounded = set() if traits_of(engine).has_slots else {window for window in windows if window is not None}
    return Limits(
        max_batch=sizes.max_batch,
        max_context_tokens=sizes.max_context_tokens,
        max_batched_tokens=sizes.max_batched_tokens,
        kv_tokens=sizes.kv_tokens if windows else None,
        kv_window=max(bounded) if bounded and len(bounded) == len(windows) else None,
        preempts=traits_of(engine).preempts,
        pads_steps=spec is not None and pads_steps(spec, engine),
    )


def pads_steps(spec: ModelSpec, engine: str) -> bool:
    """Return whether decode steps take as long as those of the rows of their graph, as a mixture's do.

    Rows that pad a step choose experts as the rest do, whose weights are read (docs/fidelity.md, "Padded steps").
    What they cost a dense model is left out.
    """
    return spec.is_mixture and traits_of(engine).pads_decode_steps


def roofline_model(name: str, spec: ModelSpec, gpu: GpuSpec, options: PlanOptions, engine: str) -> SimulatedModel:
    """Return a model by datasheet alone; ``engine`` "auto": as a deploy prefers them."""
    engines = by_preference(capabilities_for(engine), gpu)
    return SimulatedModel(
        name=name,
        spec=spec,
        estimator=datasheet_estimator(spec, gpu, engines),
        engines=engines,
        options=options,
    )


def measured_model(name: str, profile: Profile, gpu: GpuSpec, options: PlanOptions) -> SimulatedModel:
    """Return a model by its measurements, on the engine it was measured on.

    Raises:
        ConfigError: it was measured on another kind of device.
    """
    check_taken_on(profile, gpu)  # its measured links are in the estimator
    return SimulatedModel(
        name=name,
        spec=with_engine_caches(profile.spec, profile.memory),
        estimator=estimator_for(profile),
        engines=tuple(capabilities_for(profile.engine)),
        options=options,
        step_tokens=step_tokens_of(profile),
        caveats=caveats(profile),
    )


def adapter_cost(
    config: DeploymentConfig, spec: ModelSpec, rank: int, estimator: Estimator | None = None
) -> AdapterCost | None:
    """Return the slots of a worker with ``config`` and what adapters of ``rank`` take there; None: no slots.

    In slots for deltas all are deltas of that size. Where the time of variants is not known they take none.

    Args:
        estimator: of the base, which may have measurements of variants; None: there are none.
    """
    if not config.adapter_slots:
        return None
    slots, max_loaded = config.adapter_slots, config.loaded_adapters
    cost = variant_cost(estimator, spec, config)
    if cost is None:
        return AdapterCost(slots=slots, max_loaded=max_loaded)
    return AdapterCost(
        slots=slots,
        max_loaded=max_loaded,
        load_s=variant_load_s(cost, spec, config, rank),
        stops_steps=loads_stop_steps(config),
        added_s=lambda rows, active: cost.step_s(rows, active).value,
        prompt_share=cost.prompt_share,
        prompt_s=cost.prompt_s,
    )


class PlannedDeployer:
    """Deployer that does what ``iserve deploy`` would do with the cluster as it is.

    It ranks all configurations and places the best that fits (implements
    ``traces.simulator.scenario.ReplicaDeployer``).

    Args:
        knows_rates: of what is deployed there, counted until then; else only how busy each GPU was, as without a
            gateway's report.

    Raises:
        ConfigError: a workload longer than a model's context.
    """

    def __init__(self, gpu: GpuSpec, models: Iterable[SimulatedModel], *, knows_rates: bool = True) -> None:
        self._gpu, self._knows_rates = gpu, knows_rates
        self._models = {model.name: model for model in models}
        self._steps: dict[tuple[str, DeploymentConfig, Limits], StepModel] = {}
        self._services: dict[str, dict[DeploymentConfig, ServiceModel]] = {name: {} for name in self._models}
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
        if self._is_joint(asked):
            found = self._jointly(replace(asked, options=_exactly(asked.options, 1)), snapshot)
            return found if isinstance(found, NotDeployed) else found[0]
        chosen = ranked.choose(snapshot)
        if chosen is None:
            return NotDeployed(reason=self._why_not(asked, snapshot))
        there = self._deployed(asked, chosen.config, (chosen.placement,), snapshot)
        return there if isinstance(there, NotDeployed) else there[0]

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        """Return the best configuration that fits so often, each on GPUs of its own.

        Raises:
            ConfigError: more than a deployment may have.
        """
        asked = self._models[model]
        snapshot = snapshot if self._knows_rates else replace(snapshot, deployments=())
        if self._is_joint(asked):
            return self._jointly(replace(asked, options=_exactly(asked.options, count)), snapshot)
        plan = self._plan(asked, snapshot, count)
        if plan.best is None:
            return NotDeployed(reason=_nearest(plan))
        config, layout = plan.best.config, plan.best.layout
        assert layout is not None, "the best has a place"
        return self._deployed(asked, config, placements_of(layout), snapshot)

    def all_replicas(
        self, model: str, snapshot: ClusterSnapshot, expected: Sequence[ExpectedModel] = ()
    ) -> Sequence[Deployed] | NotDeployed:
        """Return every replica that a deploy with the model's options would start.

        Args:
            expected: models that are to be deployed next, for a joint plan.
        """
        asked = self._models[model]
        if self._is_joint(asked):
            return self._jointly(asked, snapshot, expected)
        return self.several(model, snapshot, asked.options.replicas)

    def expected(self, model: str, num_gpus: int) -> ExpectedModel | None:
        """Return a model as the plans of those before it expect it, on a cluster of ``num_gpus``."""
        asked = self._models[model]
        estimates = self._ranked[model].feasible(num_gpus)
        gpu_bytes = self._gpu.memory_bytes
        return expected_model(model, estimates, asked.spec, asked.estimator, asked.options, gpu_bytes=gpu_bytes)

    def _is_joint(self, asked: SimulatedModel) -> bool:
        return asked.options.is_joint(asked.engines, self._gpu)

    def _jointly(
        self, asked: SimulatedModel, snapshot: ClusterSnapshot, expected: Sequence[ExpectedModel] = ()
    ) -> Sequence[Deployed] | NotDeployed:
        if not snapshot.gpus:
            return NotDeployed(reason="no GPU is left")
        estimates = self._ranked[asked.name].feasible(len(snapshot.gpus))
        question = JointQuestion(
            estimates=estimates,
            spec=asked.spec,
            hardware=self._hardware(snapshot),
            estimator=asked.estimator,
            options=asked.options,
            services=self._services[asked.name],
            expected=expected,
        )
        choice, promise = promised_choice(question)
        if choice is None:
            return NotDeployed(reason=self._why_not(asked, snapshot))
        config, first = choice.config, choice.replicas[0]
        served = replace(
            asked.options.workload, batch=first.requests_at_once, longest_tokens=choice.context_tokens
        )
        if (refusal := _not_simulated(config)) is not None:
            return NotDeployed(reason=refusal)
        steps, mean_steps = self._step_models(asked, config, served)
        return [
            Deployed(
                placement=replica.placement,
                adapters=self._adapter_cost(asked, config),
                mean_steps=mean_steps,
                steps=steps if steps.limits.kv_tokens is None else steps.with_kv_tokens(replica.kv_tokens),
                what=f"{config} on {config.engine}, up to {served.batch} requests at once of up to "
                f"{served.context_tokens:,} tokens, {replica.kv_tokens:,} tokens of KV cache",
                pipelined=traits_of(config.engine).fills_stages,
                startup_s=traits_of(config.engine).startup_s,
                forecast_service=choice.service,
                config=config,
                service=choice.service,
                miss_probability=None if promise is None else promise.miss_probability,
            )
            for replica in choice.replicas
        ]

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        """Return the same configuration where the policy puts it, with what it can serve there."""
        asked = self._models[model]
        config = like.config
        assert config is not None, "every replica of this deployer has one"
        estimate = asked.estimator.estimate(config, asked.options.workload)
        found = FitsOn(self._hardware(snapshot), replace(asked.options, replicas=1))(estimate)
        if isinstance(found, NoRoom):
            return NotDeployed(reason=f"no place for one more on GPUs without its replicas: {found.reason}")
        there = self._deployed(asked, config, placements_of(found), snapshot)
        return there if isinstance(there, NotDeployed) else there[0]

    def _deployed(
        self,
        asked: SimulatedModel,
        config: DeploymentConfig,
        placements: tuple[Placement, ...],
        snapshot: ClusterSnapshot,
    ) -> list[Deployed] | NotDeployed:
        """Return the replicas of ``config`` at ``placements``, launched as the controller launches them."""
        if (refusal := _not_simulated(config)) is not None:
            return NotDeployed(reason=refusal)
        hardware = self._hardware(snapshot)
        capacity = capacity_of(config, placements, asked.spec, hardware, asked.estimator, asked.options)
        served = capacity.workload
        work, estimator = asked.options.workload, asked.estimator
        full = estimator.estimate(config, work)
        alone = alone_of(estimator, config, work) or full
        ttft_s, tpot_s = (alone.ttft_s.value, full.ttft_s.value), (alone.tpot_s.value, full.tpot_s.value)
        what = f"{config} on {config.engine}"
        if served != work:
            what += f", up to {served.batch} requests at once of up to {served.context_tokens:,} tokens"
        steps, mean_steps = self._step_models(asked, config, served)
        return [
            Deployed(
                placement=placement,
                steps=steps,
                adapters=self._adapter_cost(asked, config),
                mean_steps=mean_steps,
                what=what,
                pipelined=traits_of(config.engine).fills_stages,
                startup_s=traits_of(config.engine).startup_s,
                forecast_service=service_between(config, work, ttft_s, tpot_s, full.most_at_once, full.one_load),
                config=config,
            )
            for placement in capacity.placements
        ]

    def _why_not(self, asked: SimulatedModel, snapshot: ClusterSnapshot) -> str:
        plan = self._plan(asked, snapshot, asked.options.replicas)
        if plan.best is not None:  # of a joint plan, whose replicas need more
            return "no GPUs have room for it with a request of the longest kind"
        return _nearest(plan)

    def _plan(self, asked: SimulatedModel, snapshot: ClusterSnapshot, replicas: int) -> Plan:
        options = replace(asked.options, replicas=replicas)
        return make_plan(asked.spec, self._hardware(snapshot), asked.estimator, asked.engines, options)

    def _hardware(self, snapshot: ClusterSnapshot) -> Hardware:
        return Hardware(label=f"{len(snapshot.gpus)} x {self._gpu.name}", gpu=self._gpu, snapshot=snapshot)

    def _adapter_cost(self, asked: SimulatedModel, config: DeploymentConfig) -> AdapterCost | None:
        rank = asked.options.intent.traffic.variant_rank
        return adapter_cost(config, asked.spec, rank, asked.estimator)

    def _step_models(
        self, model: SimulatedModel, config: DeploymentConfig, served: Workload
    ) -> tuple[StepModel, StepModel | None]:
        """Return the steps of the base, and where there are adapter slots those with adapters on average."""
        planned = model.options.workload
        step_tokens = largest_step(model.spec, config, planned, served, model.step_tokens)
        limits = launch_limits(planned, config.engine, step_tokens, served=served, spec=model.spec)
        whole = self._step_model(model, config, limits)
        return (
            (self._step_model(model, config.without_slots, limits), whole)
            if config.adapter_slots
            else (whole, None)
        )

    def _step_model(self, model: SimulatedModel, config: DeploymentConfig, limits: Limits) -> StepModel:
        key = (model.name, config, limits)
        if key not in self._steps:
            self._steps[key] = tabulate(model.estimator, config, limits)
        return self._steps[key]


def _not_simulated(config: DeploymentConfig) -> str | None:
    """Return why a configuration is not simulated; None: it is."""
    if config.adapter_slots and config.pp > 1 and traits_of(config.engine).fills_stages:
        return (
            f"{config} is a pipeline, whose adapters are not simulated; ask for an --intent that splits tensors, "
            "such as min-latency"
        )
    return None


def _exactly(options: PlanOptions, replicas: int) -> PlanOptions:
    return replace(options, replicas=replicas, more_replicas=False)


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
    cluster_policy: ClusterPolicy | None = None,
    variant_policy: VariantPolicy | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Run :func:`traces.simulator.simulation.simulate` with the policies that decide in production.

    Args:
        deployer: None: the planner.
        cluster_policy: scales and moves what is deployed; None: it stays as it is.
        variant_policy: which worker takes a request for a variant; None: the gateway's default.
    """
    policies = Policies(
        deployer=deployer or PlannedDeployer(gpu, models.values()),
        router=router,
        harvest=spare_gpu,
        make_batcher=EngineBatcher,
        cluster_policy=cluster_policy,
        variant_policy=variant_policy or make_variant_policy(),
    )
    return simulate(requests, scenario, policies, progress=progress)
