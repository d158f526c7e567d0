"""Scenario of a simulation: a cluster, what happens to it and when, how workers serve, and the policies.

Policies are values passed in; the simulator runs whatever decides in production.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from fingerprint.config import DeploymentConfig
from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel
from placement.actions import ClusterPolicy
from placement.routing import LeastOutstanding, Router
from placement.types import ClusterSnapshot, GpuState, Placement
from placement.variant_routing import LeastLoaded, VariantPolicy
from planner.intent import Slo
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.contention import Contention, ProcessorSharing, processor_sharing
from traces.simulator.step_model import StepModel
from traces.simulator.stepped import MakeBatcher

__all__ = [
    "Action",
    "Deploy",
    "Deployed",
    "Deployer",
    "Harvest",
    "NodeFails",
    "NodeReturns",
    "NotDeployed",
    "Policies",
    "Profile",
    "Remove",
    "ReplicaDeployer",
    "Scenario",
    "Service",
]


class Service(StrEnum):
    """Discipline by which a worker serves its queue."""

    FCFS = "fcfs"  # one request at a time
    FCFS_PIPELINED = "fcfs-pipelined"  # in every stage, where the engine keeps its stages full; else as fcfs
    CONTINUOUS = "continuous"
    STEPPED = "stepped"  # continuous, by the scheduler that is handed in, step by step: slow, and the same times

    @property
    def batches(self) -> bool:
        """True when requests share steps."""
        return self not in (Service.FCFS, Service.FCFS_PIPELINED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Deploy:
    """``replicas`` of ``model`` are asked for under ``name``, which requests call.

    With ``variants``, any other name that requests call is a LoRA variant of it, as on the wire.
    """

    at_s: float
    name: str
    model: str
    replicas: int = 1
    variants: bool = field(default=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Remove:
    """``name`` is taken down: what it runs or has waiting is not served."""

    at_s: float
    name: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFails:
    """Every worker with a GPU there ends; its running requests are lost, its waiting ones go elsewhere."""

    at_s: float
    node_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReturns:
    """The node is back, empty."""

    at_s: float
    node_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A fingerprint's profile: ``work_s`` seconds of a GPU, were it alone, in ``memory_bytes`` of spare memory."""

    at_s: float
    name: str
    memory_bytes: int
    work_s: float


Action: TypeAlias = Deploy | Remove | NodeFails | NodeReturns | Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployed:
    """Placement of one replica, and the times of its steps."""

    placement: Placement
    steps: StepModel
    what: str  # the configuration, for people
    pipelined: bool = False  # its engine keeps as many batches in flight as there are stages
    startup_s: float = 0.0  # of its engine, from the decision until it serves
    forecast_service: ServiceModel | None = None  # by its plan; what a gateway would know of it
    config: DeploymentConfig | None = None  # None: it is no configuration of one engine
    service: ServiceModel | None = None  # by its plan; what later plans know of it
    miss_probability: float | None = None  # of its SLO at its rate, by its plan; None: without either
    adapters: AdapterCost | None = None  # its slots, on top of ``steps``, which are the base's; None: it has none
    mean_steps: StepModel | None = None  # with adapters as requests ask for them on average, for cluster policies


@dataclass(frozen=True, kw_only=True, slots=True)
class NotDeployed:
    reason: str


class Deployer(Protocol):
    """Planner and placement: what becomes of one more replica of ``model`` on the cluster as it is now."""

    @property
    def name(self) -> str: ...

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed: ...


@runtime_checkable
class ReplicaDeployer(Deployer, Protocol):
    """Deployer that knows what replicas are, as the controller does.

    No two replicas share a GPU, and those deployed together have one configuration. Any other deployer is asked
    for each replica by itself, and may stack them.
    """

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        """Return the placement of all replicas of a deployment that has none, or of none of them."""
        ...

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        """Return one more replica; in ``snapshot``, nothing is free on the GPUs of the existing ones."""
        ...


Harvest: TypeAlias = Callable[[ClusterSnapshot, int], GpuState | None]


def _no_harvest(snapshot: ClusterSnapshot, need_bytes: int) -> GpuState | None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Policies:
    """Everything that decides.

    ``make_batcher`` is needed for stepped service only; without ``cluster_policy`` no deployment changes.
    ``contention`` None: processor sharing, with the measured overhead where requests are batched, and without a
    loss where one at a time is served, as in the paper's evaluation.
    """

    deployer: Deployer
    router: Router = field(default_factory=LeastOutstanding)
    harvest: Harvest = _no_harvest
    contention: Contention | None = None
    make_batcher: MakeBatcher | None = None
    cluster_policy: ClusterPolicy | None = None
    variant_policy: VariantPolicy = field(default_factory=LeastLoaded)

    def contention_of(self, service: Service) -> Contention:
        """Return how workers that serve by ``service`` slow one another on a GPU."""
        if self.contention is not None:
            return self.contention
        return ProcessorSharing() if service.batches else processor_sharing


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """Simulated world. At one time, actions happen first, in the order given, then arrivals, then ends of steps.

    Raises:
        ConfigError: no GPU, a value out of its range, or an action that names what is not there.
    """

    cluster: ClusterSnapshot  # idle; ``free_bytes`` is what workers may take
    actions: tuple[Action, ...]
    service: Service = Service.CONTINUOUS
    startup_s: float | None = None  # from the decision until a worker serves; None: that of its engine
    overhead_s: float = (
        0.0  # of each request next to its steps: HTTP, its tokens made ready, the way there and back
    )
    outstanding_per_slot: int = 2  # requests sent to a worker at once, per slot; the rest wait in the gateway
    max_waiting: int | None = (
        None  # there, of one deployment; more are refused, as by the gateway. None: they wait
    )
    most_waiting: int = 10_000  # of one deployment: beyond, it is overloaded and the simulation stops
    # By deployment: a request that could not keep this any more, were it alone from its turn on, is refused then.
    # Its turn is when a slot is free: no request of such a deployment waits at the worker.
    reject_late: Mapping[str, Slo] = field(default_factory=dict)
    # It is rejected on arrival, by what a gateway can know and the plan's times, as by iServe's gateway. Where a
    # deployment has no such times it is as above, with every time known exactly: as by AlpaServe.
    rejects_by_forecast: bool = False
    variants: Mapping[str, str] = field(default_factory=dict)  # names of variants -> the deployment that has them
    registered: tuple[str, ...] = ()  # of those, what idle replicas load before it is asked for, in this order
    token_times: bool = False  # the outcomes have the gaps between an answer's tokens, too
    prefix_cache: bool = False  # workers compute no prefix of a prompt again (``prefix_cache``)

    def __post_init__(self) -> None:
        if not self.cluster.gpus:
            raise ConfigError("a simulated cluster needs at least one GPU")
        if self.startup_s is not None and not (math.isfinite(self.startup_s) and self.startup_s >= 0):
            raise ConfigError(f"startup_s must be a number of seconds of at least 0, got {self.startup_s}")
        if not (math.isfinite(self.overhead_s) and self.overhead_s >= 0):
            raise ConfigError(f"overhead_s must be a number of seconds of at least 0, got {self.overhead_s}")
        if self.outstanding_per_slot < 1:
            raise ConfigError(f"outstanding_per_slot must be at least 1, got {self.outstanding_per_slot}")
        if self.most_waiting < 1 or (self.max_waiting is not None and self.max_waiting < 0):
            raise ConfigError(
                f"the queue's bounds must be at least 1 (most_waiting, got {self.most_waiting}) and 0 "
                f"(max_waiting, got {self.max_waiting})"
            )
        nodes = {gpu.node_id for gpu in self.cluster.gpus}
        names: set[str] = set()
        for action in self.actions:
            _check(action, nodes, names)
        self._check_variants()
        if self.token_times and self.service not in (Service.CONTINUOUS, Service.STEPPED):
            raise ConfigError(f"the times of single tokens are not simulated in {self.service} service")
        if self.prefix_cache and self.service is not Service.CONTINUOUS:
            raise ConfigError(
                f"a prefix cache in {self.service} service is not simulated; it needs {Service.CONTINUOUS}"
            )

    @property
    def variant_deployment(self) -> str | None:
        """Name of the deployment whose variants all other names are; None: names are deployments."""
        return next((one.name for one in self.actions if isinstance(one, Deploy) and one.variants), None)

    def _check_variants(self) -> None:
        any_of, deployed = self.variant_deployment, {one.name for one in self.actions if isinstance(one, Deploy)}
        if any_of is None and not self.variants:
            return
        if any_of is not None and (len(deployed) > 1 or self.variants):
            raise ConfigError(
                f"any name but {any_of!r} is one of its variants in this simulation; deploy no other model"
            )
        for name, of in self.variants.items():
            if name in deployed or of not in deployed:
                raise ConfigError(
                    f"variant {name!r} of {of!r}: a variant has a name of its own and belongs to a deployment; "
                    f"deployed are {', '.join(sorted(deployed))}"
                )
        if unknown := [name for name in self.registered if name not in self.variants]:
            raise ConfigError(f"registered variant {unknown[0]!r} belongs to no deployment; name its deployment")
        if self.service is not Service.CONTINUOUS:
            raise ConfigError(
                f"adapters in {self.service} service are not simulated; variants need {Service.CONTINUOUS}"
            )
        if self.reject_late and not self.rejects_by_forecast:
            raise ConfigError(
                "late requests for variants are rejected by forecast alone; set rejects_by_forecast, or "
                "leave reject_late out"
            )


def _check(action: Action, nodes: set[str], names: set[str]) -> None:
    if not (math.isfinite(action.at_s) and action.at_s >= 0):
        raise ConfigError(f"actions happen at finite times from 0 on, got {action}")
    match action:
        case Deploy(name=name, replicas=replicas):
            if name in names or replicas < 1:
                raise ConfigError(f"{name!r}: a name is deployed once, with at least one replica, got {action}")
            names.add(name)
        case Remove(name=name) if name not in names:
            raise ConfigError(f"there is no earlier deployment {name!r} to remove")
        case NodeFails(node_id=node) | NodeReturns(node_id=node) if node not in nodes:
            raise ConfigError(f"there is no node {node!r}; the cluster has {', '.join(sorted(nodes))}")
        case Profile(memory_bytes=memory, work_s=work_s):
            if memory < 0 or not (math.isfinite(work_s) and work_s > 0):
                raise ConfigError(f"a profile takes memory and a positive time, got {action}")
        case _:
            pass
