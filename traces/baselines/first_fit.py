"""Deployers that know one order of configurations and take the first that fits: max TP, max PP, a rule of thumb.

So that none is weak for lack of it, each has:

*   the batch (the rule of thumb has the workload's): where workers batch, the largest with which every model of
    the cluster fits next to the rest (the deployers know what will be deployed later), up to ``MOST_BATCH``; where
    workers do not batch, 1, so that no memory is spent on sequences that never run together;
*   further degrees: a model that does not fit at the favourite ones is tried at the next, then with half the
    batch, before it is refused;
*   the least loaded GPUs;
*   replicas on separate GPUs, all launched alike, or none: the first configuration and batch of which as many as
    are wanted fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from placement.types import ClusterSnapshot, Refusal
from traces.baselines.model_info import (
    MOST_BATCH,
    Knowledge,
    Places,
    StepTimes,
    halvings,
    largest,
    sixteen_bit,
    without,
)
from traces.simulator.scenario import Deployed, NotDeployed

__all__ = ["FirstFit", "Preference", "common_batch", "max_pp", "max_tp"]


@dataclass(frozen=True, slots=True)
class Preference:
    """A model's configurations, best first, and the batch that it is launched for."""

    model: Knowledge
    configs: tuple[DeploymentConfig, ...]
    batch: int
    why_none: str = "no engine runs it"  # where there are no configurations


def max_tp(model: Knowledge) -> tuple[DeploymentConfig, ...]:
    """Return TensorRT-LLM with the maximum TP degree (iServe paper, section 8).

    16 bits, the most TP that the model's shape and the node allow; PP only where that alone does not hold the
    model.
    """
    return tuple(sorted(sixteen_bit(model.configs), key=lambda c: (-c.tp, c.pp, c)))


def max_pp(model: Knowledge) -> tuple[DeploymentConfig, ...]:
    """Return TensorRT-LLM with the maximum PP degree (iServe paper, section 8).

    16 bits, as many stages as there are GPUs and layers for; TP only where that alone does not hold the model.
    """
    return tuple(sorted(sixteen_bit(model.configs), key=lambda c: (-c.pp, c.tp, c)))


def common_batch(
    deployments: Sequence[tuple[Knowledge, Sequence[DeploymentConfig], int]],
    cluster: ClusterSnapshot,
    places: Places,
) -> int:
    """Return the largest batch up to ``MOST_BATCH`` with which ``deployments`` (replicas of each) fit side by side
    on the idle ``cluster``, each in its first configuration that fits alone; 0: not even one sequence of each
    does.
    """
    firsts = []
    for model, configs, count in deployments:
        alone = (c for c in configs if not isinstance(places.find_apart(model, c, 1, cluster, count), Refusal))
        firsts.append((model, next(alone, None), count))

    def all_fit(batch: int) -> bool:
        left = cluster
        for model, config, count in firsts:
            if config is None:
                return False
            placed = places.find_apart(model, config, batch, left, count)
            if isinstance(placed, Refusal):
                return False
            for one in placed:
                left = without(left, one)
        return True

    return largest(all_fit, MOST_BATCH)


class FirstFit:
    """The first of a model's configurations that fits the cluster as it is now (implements ``Deployer``).

    Raises:
        ConfigError: two models of one name.
    """

    def __init__(self, name: str, preferences: Iterable[Preference], places: Places, times: StepTimes) -> None:
        self.name = name
        told = list(preferences)
        self._preferences: Mapping[str, Preference] = {p.model.name: p for p in told}
        if len(self._preferences) < len(told):
            raise ConfigError("two models have one name")
        self._places, self._times = places, times

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = self.several(model, snapshot, 1)
        return found if isinstance(found, NotDeployed) else found[0]

    def several(self, model: str, snapshot: ClusterSnapshot, count: int) -> Sequence[Deployed] | NotDeployed:
        wanted = self._preferences[model]
        refusal: Refusal | None = None
        for config in wanted.configs:
            for batch in halvings(wanted.batch):
                placed = self._places.find_apart(wanted.model, config, batch, snapshot, count)
                if isinstance(placed, Refusal):
                    refusal = refusal or placed
                    continue
                steps = self._times(wanted.model, config, batch)
                what = f"{config} on {config.engine}, batch {batch}"
                traits = traits_of(config.engine)
                return [
                    Deployed(
                        placement=one,
                        steps=steps,
                        what=what,
                        pipelined=traits.fills_stages,
                        startup_s=traits.startup_s,
                        config=config,
                    )
                    for one in placed
                ]
        if refusal is None:
            return NotDeployed(reason=f"{self.name}: {wanted.why_none}")
        return NotDeployed(reason=f"no configuration of {self.name} fits; of the first: {refusal.reason}")

    def another(self, like: Deployed, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        """Return what fits now: a replica of another configuration is better than none."""
        return self(model, snapshot)
