"""Values of a fleet: deployments with their options, the cluster's GPUs, and a plan of replicas on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fingerprint.errors import ConfigError
from fingerprint.service_model import ServiceModel

__all__ = ["Fleet", "FleetDeployment", "FleetGpu", "FleetPlan", "FleetReplica"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetDeployment:
    """Deployment with the configurations that it may take, in the order of their GPUs.

    Attributes:
        options: at most one for each (tp, pp), the fastest of the formats that are allowed.
        fixed: replicas that run and stay as they are, by option and GPUs; the search adds to them only.
        most_replicas: None: as many as fit.
    """

    name: str
    options: tuple[ServiceModel, ...]
    fixed: tuple[FleetReplica, ...] = ()
    most_replicas: int | None = None

    def __post_init__(self) -> None:
        if not self.options:
            raise ConfigError(f"{self.name} has no configuration to choose from")
        if self.most_replicas is not None and self.most_replicas < 1:
            raise ConfigError(f"{self.name} needs at least one replica, got {self.most_replicas}")


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetGpu:
    """GPU of the cluster: its place, and the memory that new workers may take."""

    node_id: str
    device_id: str
    gpu_index: int
    usable_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class FleetReplica:
    """Replica of deployment number ``deployment`` as its option number ``option``, on GPUs by their numbers.

    ``kv_tokens``: KV cache of one that runs, whose memory is no part of what is usable; None: the plan decides.
    """

    deployment: int
    option: int
    gpus: tuple[int, ...]
    kv_tokens: float | None = None


@dataclass(frozen=True)
class FleetPlan:
    """Replicas of all deployments; the order has no meaning."""

    replicas: tuple[FleetReplica, ...]

    def of(self, deployment: int) -> tuple[FleetReplica, ...]:
        return tuple(replica for replica in self.replicas if replica.deployment == deployment)

    def without(self, replica: FleetReplica) -> FleetPlan:
        rest = list(self.replicas)
        rest.remove(replica)
        return FleetPlan(tuple(rest))

    def adding(self, *replicas: FleetReplica) -> FleetPlan:
        return FleetPlan((*self.replicas, *replicas))

    def with_deployment(self, deployment: int, replicas: Sequence[FleetReplica]) -> FleetPlan:
        """Return the plan with ``replicas`` as all of one deployment's."""
        others = tuple(replica for replica in self.replicas if replica.deployment != deployment)
        return FleetPlan((*others, *replicas))

    @cached_property
    def key(self) -> tuple[tuple[int, int, tuple[int, ...]], ...]:
        """Identity of the plan, whatever the order of its replicas."""
        return tuple(sorted((one.deployment, one.option, one.gpus) for one in self.replicas))


@dataclass(frozen=True)
class Fleet:
    """Deployments to be served together, and the GPUs that there are.

    A replica's GPUs are neighbours on one node, aligned to their number, so that they lie within a link group
    where they can.

    Attributes:
        reserved: numbers of GPUs that are left to deployments still expected.
        expected: deployments that there will be in all; 0: no more than these.
    """

    deployments: tuple[FleetDeployment, ...]
    gpus: tuple[FleetGpu, ...]
    reserved: frozenset[int] = frozenset()
    expected: int = 0

    def __post_init__(self) -> None:
        if not self.deployments or not self.gpus:
            raise ConfigError("a fleet needs at least one deployment and one GPU")

    def option(self, replica: FleetReplica) -> ServiceModel:
        return self.deployments[replica.deployment].options[replica.option]

    @cached_property
    def groups(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """GPU groups by size: of one node, neighbours, aligned to the size; sizes that an option has."""
        sizes = {option.num_gpus for one in self.deployments for option in one.options}
        nodes: dict[str, list[int]] = {}
        for number, gpu in sorted(enumerate(self.gpus), key=lambda item: (item[1].node_id, item[1].gpu_index)):
            nodes.setdefault(gpu.node_id, []).append(number)
        found: dict[int, tuple[tuple[int, ...], ...]] = {}
        for size in sizes:
            groups: list[tuple[int, ...]] = []
            for numbers in nodes.values():
                by_block: dict[int, list[int]] = {}
                for number in numbers:
                    by_block.setdefault(self.gpus[number].gpu_index // size, []).append(number)
                groups += [tuple(block) for block in by_block.values() if len(block) == size]
            found[size] = tuple(group for group in groups if not self.reserved.intersection(group))
        return found

    def least(self, deployment: int) -> ServiceModel:
        """Return the option on the fewest GPUs whose longest request fits on an empty one; else the widest."""
        most_bytes = max(gpu.usable_bytes for gpu in self.gpus)
        options = sorted(self.deployments[deployment].options, key=lambda option: option.num_gpus)
        return next((o for o in options if o.bytes_per_gpu(o.longest_tokens) <= most_bytes), options[-1])
