"""Values of a fleet: deployments with their options, the cluster's GPUs, and a plan of replicas on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain

from fingerprint.errors import ConfigError
from fingerprint.gpu_sharing import GROUP_LOSS
from fingerprint.service_model import ServiceModel

__all__ = ["Fleet", "FleetDeployment", "FleetGoal", "FleetGpu", "FleetPlan", "FleetReplica", "plainness"]

_UNKNOWN = 0.15  # of a GPU's memory, which is kept free or the driver's own
_CALM = 0.05  # busy share of a GPU's time that is no reason to avoid it


class FleetGoal(StrEnum):
    """Goal of a joint plan."""

    LATENCY = "latency"  # mean end-to-end time of all requests
    COST = "cost"  # held share of GPUs per request, with a guard on each deployment's latency
    GPUS = "gpus"  # GPUs that hold anything, no deployment slower for it than the rule has it beyond that guard


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetDeployment:
    """Deployment with the configurations that it may take: of one stage, then pipelines, each by their GPUs.

    Attributes:
        options: at most one for each (tp, pp), the fastest of the formats that are allowed.
        fixed: replicas that run and stay as they are, by option and GPUs; the search adds to them only.
        most_replicas: None: as many as fit.
        limit_s: end-to-end time that requests are promised; None: a cheap plan keeps its own guard.
    """

    name: str
    options: tuple[ServiceModel, ...]
    fixed: tuple[FleetReplica, ...] = ()
    most_replicas: int | None = None
    least_replicas: int = 1
    limit_s: float | None = None

    def __post_init__(self) -> None:
        if not self.options:
            raise ConfigError(f"{self.name} has no configuration to choose from")
        if self.least_replicas < 1 or (self.most_replicas or self.least_replicas) < self.least_replicas:
            raise ConfigError(
                f"{self.name} needs at least one replica and no more than the most, got {self.least_replicas} to "
                f"{self.most_replicas}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetGpu:
    """GPU of the cluster: its place, and the memory that new workers may take.

    ``busy``: share of its time that processes take which no deployment of the fleet accounts for.
    """

    node_id: str
    device_id: str
    gpu_index: int
    usable_bytes: int
    total_bytes: int
    busy: float = 0.0


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
        loaded_gpus: GPUs of whose worth of load the prior has shares; None: all.
        group_loss: of TP groups in crowds (``fingerprint.gpu_sharing``).
    """

    deployments: tuple[FleetDeployment, ...]
    gpus: tuple[FleetGpu, ...]
    reserved: frozenset[int] = frozenset()
    expected: int = 0
    loaded_gpus: int | None = None
    group_loss: float = GROUP_LOSS

    def __post_init__(self) -> None:
        if not self.deployments or not self.gpus:
            raise ConfigError("a fleet needs at least one deployment and one GPU")

    def option(self, replica: FleetReplica) -> ServiceModel:
        return self.deployments[replica.deployment].options[replica.option]

    @cached_property
    def blocks(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """GPU groups by size: of one node, neighbours, aligned to the size; sizes that an option has.

        Of sizes that only pipelines have the stages are aligned, to the widest TP: any that have room will do.
        """
        options = [option for one in self.deployments for option in one.options]
        sizes = {option.num_gpus for option in options}
        whole = {option.num_gpus for option in options if option.config.pp == 1}
        nodes: dict[str, list[int]] = {}
        for number, gpu in sorted(enumerate(self.gpus), key=lambda item: (item[1].node_id, item[1].gpu_index)):
            nodes.setdefault(gpu.node_id, []).append(number)
        found: dict[int, tuple[tuple[int, ...], ...]] = {}
        for size in sizes:
            stage = size
            if size not in whole:
                stage = max(option.config.tp for option in options if option.num_gpus == size)
            groups: list[tuple[int, ...]] = []
            for numbers in nodes.values():
                aligned = self._aligned(numbers, stage)
                if stage < size:  # the roomiest first
                    aligned.sort(key=lambda group: -min(self.gpus[gpu].usable_bytes for gpu in group))
                several = size // stage
                chains = (aligned[at : at + several] for at in range(len(aligned) - several + 1))
                groups += (tuple(chain.from_iterable(stages)) for stages in chains)
            found[size] = tuple(groups)
        return found

    def _aligned(self, numbers: Sequence[int], size: int) -> list[tuple[int, ...]]:
        """Return the groups of ``size`` neighbours among a node's GPUs that are aligned to it."""
        by_block: dict[int, list[int]] = {}
        for number in numbers:
            by_block.setdefault(self.gpus[number].gpu_index // size, []).append(number)
        found = [tuple(block) for block in by_block.values() if len(block) == size]
        if not found:  # no aligned neighbours, such as GPUs 1 and 2 alone
            found = [tuple(numbers[end - size : end]) for end in range(size, len(numbers) + 1, size)]
        return found

    @cached_property
    def groups(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Blocks that this plan may use: without a reserved GPU and, where one has room, without a busy one."""
        found = {}
        for size, blocks in self.blocks.items():
            free = tuple(group for group in blocks if not self.reserved.intersection(group))
            calm = tuple(group for group in free if all(self.gpus[gpu].busy <= _CALM for gpu in group))
            found[size] = calm if any(self._has_room(group) for group in calm) else free
        return found

    def _has_room(self, group: tuple[int, ...]) -> bool:
        """Return whether a group has room for the longest request of every deployment's option of its size."""
        free_bytes = min(self.gpus[gpu].usable_bytes for gpu in group)
        options = (o for one in self.deployments if not one.fixed for o in one.options)
        return all(o.bytes_per_gpu(o.longest_tokens) <= free_bytes for o in options if o.num_gpus == len(group))

    @cached_property
    def held_by_unknown(self) -> tuple[int, ...]:
        """GPUs of whose memory more is taken than by the replicas that run: as good as one more on each."""
        free = [gpu.total_bytes - gpu.usable_bytes for gpu in self.gpus]
        for replica in (replica for one in self.deployments for replica in one.fixed):
            for gpu in replica.gpus:
                free[gpu] -= self.option(replica).bytes_per_gpu(replica.kv_tokens or 0.0)
        return tuple(
            number
            for number, (size, gpu) in enumerate(zip(free, self.gpus, strict=True))
            if size > _UNKNOWN * gpu.total_bytes
        )

    def least(self, deployment: int) -> ServiceModel:
        """Return the option on the fewest GPUs whose longest request fits on an empty one; else the widest.

        A pipeline is the least only where no option of one stage fits, drafts are where none without them does.
        """
        return self._least[deployment]

    @cached_property
    def _least(self) -> tuple[ServiceModel, ...]:
        most_bytes = max(gpu.usable_bytes for gpu in self.gpus)
        found = []
        for deployment in self.deployments:
            options = sorted(deployment.options, key=plainness)
            fits = (option for option in options if option.bytes_per_gpu(option.longest_tokens) <= most_bytes)
            found.append(next(fits, options[-1]))
        return tuple(found)

    @cached_property
    def useful_tokens(self) -> tuple[tuple[float, ...], ...]:
        """KV cache of each option of each deployment beyond which it gains next to nothing."""
        return tuple(
            tuple(option.useful_kv_tokens for option in deployment.options) for deployment in self.deployments
        )


def plainness(option: ServiceModel) -> tuple[bool, int, int]:
    """Order of the options that the rule tries: fewest GPUs first, of these without drafts; pipelines last."""
    return option.config.pp > 1, option.num_gpus, option.config.draft_tokens
