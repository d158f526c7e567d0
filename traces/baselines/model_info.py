"""Facts of a model that a baseline is given, and what follows: where configurations fit, how fast they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Estimator
from fingerprint.model_spec import ModelSpec
from placement.fit import Placer, demand
from placement.policies import LeastLoaded
from placement.replicas import ReplicaPlacer
from placement.types import ClusterSnapshot, Placement, Refusal
from traces.simulator.step_model import Limits, StepModel, tabulate

__all__ = ["MOST_BATCH", "Knowledge", "Places", "StepTimes", "halvings", "largest", "sixteen_bit", "without"]

MOST_BATCH = 256  # sequences at once: no "largest batch" goes beyond, though memory may allow it

LimitsOf = Callable[[Workload, str], Limits]  # with what a worker of an engine planned for a workload is launched


@dataclass(frozen=True, kw_only=True, slots=True)
class Knowledge:
    """Facts of one model as iServe's planner knows it.

    ``configs`` are all that the model's shape and some engine allow on the cluster, whatever their memory.
    """

    name: str
    spec: ModelSpec
    estimator: Estimator
    workload: Workload  # what iServe plans for
    configs: tuple[DeploymentConfig, ...]
    limits: LimitsOf


def sixteen_bit(configs: Iterable[DeploymentConfig]) -> list[DeploymentConfig]:
    """Return the configurations that neither quantize nor prune."""
    plain = (WeightFormat.BITS16, KvFormat.BITS16, Pruning.NONE)
    return [c for c in configs if (c.weights, c.kv, c.pruning) == plain]


class StepTimes:
    """Step tables, made once for each model, configuration and batch."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, DeploymentConfig, int], StepModel] = {}

    def __call__(self, model: Knowledge, config: DeploymentConfig, batch: int) -> StepModel:
        key = (model.name, config, batch)
        if key not in self._made:
            limits = model.limits(replace(model.workload, batch=batch), config.engine)
            self._made[key] = tabulate(model.estimator, config, limits)
        return self._made[key]


class Places:
    """Places where configurations fit: found by the real placer, least loaded GPUs first.

    A configuration needs the upper end of the memory's interval, as for iServe.
    """

    def __init__(self, link_group_size: int) -> None:
        self._link_group_size = link_group_size

    def find(
        self, model: Knowledge, config: DeploymentConfig, batch: int, snapshot: ClusterSnapshot
    ) -> Placement | Refusal:
        """Return a placement, or a refusal; a refusal too where the estimator has nothing measured."""
        found = self.find_apart(model, config, batch, snapshot, 1)
        return found if isinstance(found, Refusal) else found[0]

    def find_apart(
        self, model: Knowledge, config: DeploymentConfig, batch: int, snapshot: ClusterSnapshot, count: int
    ) -> tuple[Placement, ...] | Refusal:
        """Return ``count`` placements, no two on one GPU: all of them, or a refusal."""
        try:
            memory = model.estimator.estimate(config, replace(model.workload, batch=batch)).memory
        except NotMeasuredError as error:
            return Refusal(str(error), 0)
        if count > 1:
            several = ReplicaPlacer(snapshot, count, self._placer).fit(demand(memory))
            return several if isinstance(several, Refusal) else several.placements
        alone = self._placer(snapshot).fit(demand(memory))
        return alone if isinstance(alone, Refusal) else (alone,)

    def _placer(self, snapshot: ClusterSnapshot) -> Placer:
        return Placer(snapshot, LeastLoaded(), link_group_size=self._link_group_size)


def without(snapshot: ClusterSnapshot, placement: Placement) -> ClusterSnapshot:
    """Return ``snapshot`` once ``placement`` holds its memory."""
    taken = {
        (stage.node_id, device): stage.bytes_per_gpu for stage in placement.stages for device in stage.device_ids
    }
    gpus = tuple(
        replace(gpu, free_bytes=gpu.free_bytes - taken.get((gpu.node_id, gpu.device_id), 0))
        for gpu in snapshot.gpus
    )
    return replace(snapshot, gpus=gpus)


def largest(holds: Callable[[int], bool], most: int) -> int:
    """Return the largest whole number up to ``most`` for which the monotone ``holds`` is true; 0: for none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low


def halvings(batch: int) -> Sequence[int]:
    """Return ``batch``, its half, and so on down to 1."""
    return tuple(dict.fromkeys(max(1, batch >> i) for i in range(batch.bit_length())))
