"""Expected deployments, as a load that a choice implies.

A plan may be given how many deployments the cluster is to hold. It then takes those that are still expected to do
as its own would in each configuration: a request of theirs takes tp GPUs for as long. That is a full batch's time
or, where a rate is given, its part of the time that a batch is under way at that rate. So a wide configuration
that is fast by itself and costs more GPU-seconds brings more load on every GPU, and what that costs all
deployments counts (``placement.others.Others.later``). The choice is what would be best for all if all chose
alike.

The request rate of each is the first of these that is known:

1.  the mean rate of the existing deployments: the load of the GPUs now, which the shapes of those deployments turn
    into requests of the kind that is planned for;
2.  the rate that the plan was given;
3.  nothing is known: all together keep the GPUs busy for half the time (``UNKNOWN_LOAD``), each on the
    configuration that takes the fewest GPU-seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np

from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from placement.batch_load import Batching, Chains
from placement.load_model import crowd
from placement.others import Others
from placement.types import ClusterSnapshot, DeploymentState
from planner.costs import objective_of
from planner.intent import Intent
from planner.plan import Candidate

__all__ = ["UNKNOWN_LOAD", "FutureLoad", "expected"]

UNKNOWN_LOAD = 0.5  # docs/decisions/0021-room-for-later.md


class FutureLoad(NamedTuple):
    """Load of the deployments that are still expected."""

    num: int
    requests_per_s: float  # of all of them, for each GPU of the cluster
    gpu_s: Mapping[DeploymentConfig, float]  # of a request, of what may be chosen; else a full batch's

    def load(self, estimate: Estimate) -> float:
        """Return the load that they bring to every GPU, each as ``estimate``."""
        return self.requests_per_s * self.gpu_s.get(estimate.config, _gpu_s(estimate))

    def slowest(self, estimate: Estimate) -> float:
        """Return how many times as long as now its requests take on idle GPUs once all are there."""
        return crowd(self.load(estimate))


def expected(
    in_all: int, candidates: Sequence[Candidate], intent: Intent, snapshot: ClusterSnapshot, others: Others
) -> FutureLoad | None:
    """Return the deployments still expected of ``in_all``, one of which is planned for now.

    None: none is expected, or the intent is not one that they matter to.

    Args:
        candidates: what may be chosen on idle GPUs.
    """
    there = len(snapshot.deployments)
    num = in_all - there - 1
    if num < 1 or not candidates or not snapshot.gpus or not objective_of(intent).of_all:
        return None
    gpu_s = _gpu_s_of(candidates, intent.rate_per_s)
    least = min(gpu_s, key=lambda config: gpu_s[config])
    load = sum(others.loads.values()) / max(there, 1)
    if there and load > 0:
        rate = load / _mean_gpu_s(snapshot.deployments, candidates, gpu_s, least)
    elif intent.rate_per_s is not None:
        rate = intent.rate_per_s
    else:
        rate = UNKNOWN_LOAD * len(snapshot.gpus) / in_all / gpu_s[least]
    return FutureLoad(num, num * rate / len(snapshot.gpus), gpu_s)


def _gpu_s_of(candidates: Sequence[Candidate], rate_per_s: float | None) -> dict[DeploymentConfig, float]:
    """Return the GPU-seconds of a request."""
    if rate_per_s is None:
        return {one.config: _gpu_s(_of(one)) for one in candidates}
    stays = [
        Batching(
            rate_per_s, (one.alone or _of(one)).e2e_s.value, _of(one).e2e_s.value, _of(one).workload.batch, 1, ()
        )
        for one in candidates
    ]
    under_way = Chains(stays, 1.0).under_way(np.ones(len(stays)))
    return {
        one.config: one.config.tp * float(busy) / rate_per_s
        for one, busy in zip(candidates, under_way, strict=True)
    }


def _mean_gpu_s(
    there: Sequence[DeploymentState],
    candidates: Sequence[Candidate],
    gpu_s: Mapping[DeploymentConfig, float],
    least: DeploymentConfig,
) -> float:
    """Return the GPU-seconds of a request of this plan's in the shapes of the existing deployments."""
    slowest_first = sorted((_of(one) for one in candidates), key=lambda one: one.e2e_s.value, reverse=True)
    fastest = {(one.config.tp, one.config.pp): one.config for one in slowest_first}
    shapes = (one.replicas[0].placement.stages for one in there if one.replicas)
    found = [gpu_s[fastest.get((len(stages[0].device_ids), len(stages)), least)] for stages in shapes]
    return fmean(found) if found else gpu_s[least]


def _of(one: Candidate) -> Estimate:
    assert one.estimate is not None, "what may be chosen has an estimate"
    return one.estimate


def _gpu_s(estimate: Estimate) -> float:
    """Return the GPU-seconds of a batch, of whose groups of tp GPUs one is busy at a time."""
    return estimate.config.tp * estimate.e2e_s.value
