"""Who is expected to come, as a load that a choice brings with it.

A plan that is told how many deployments the cluster is to hold takes those that are still to come to do as its own
would in each configuration: a request of theirs takes tp GPUs for as long. That is a full batch's time or, where
a rate is told, its part of the time that a batch is under way at that rate. So a wide configuration that is fast
by itself and costs more GPU-seconds brings more load on every GPU, and what that costs it and the others counts
(``placement.others.Others.later``). It is what would be best for all if all chose alike.

How much is asked of each of them is, of the first of these that is known:

1.  what is asked of those that are there, in the mean: the load of the GPUs now, which the shapes of those that
    stand there turn into requests of the kind that is planned for;
2.  the rate that the plan was told;
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

__all__ = ["UNKNOWN_LOAD", "Expected", "expected"]

UNKNOWN_LOAD = 0.5  # docs/decisions/0021-room-for-later.md


class Expected(NamedTuple):
    """Those who are still to come."""

    num: int
    requests_per_s: float  # of all of them, for each GPU of the cluster
    gpu_s: Mapping[DeploymentConfig, float]  # of a request, of what may be chosen; of others a full batch's

    def load(self, estimate: Estimate) -> float:
        """That they bring to every GPU, each as ``estimate``."""
        return self.requests_per_s * self.gpu_s.get(estimate.config, _gpu_s(estimate))

    def slowest(self, estimate: Estimate) -> float:
        """How many times as long as now its requests take on idle GPUs once all are there."""
        return crowd(self.load(estimate))


def expected(
    in_all: int, candidates: Sequence[Candidate], intent: Intent, snapshot: ClusterSnapshot, others: Others
) -> Expected | None:
    """Those who are still to come of ``in_all`` deployments, one of which is planned for now; None: nobody, or the
    intent is not one that they matter to.

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
    return Expected(num, num * rate / len(snapshot.gpus), gpu_s)


def _gpu_s_of(candidates: Sequence[Candidate], rate_per_s: float | None) -> dict[DeploymentConfig, float]:
    """GPU-seconds of a request."""
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
    """GPU-seconds of a request of this plan's in the shapes of those that are there."""
    slowest_first = sorted((_of(one) for one in candidates), key=lambda one: one.e2e_s.value, reverse=True)
    fastest = {(one.config.tp, one.config.pp): one.config for one in slowest_first}
    shapes = (one.replicas[0].placement.stages for one in there if one.replicas)
    found = [gpu_s[fastest.get((len(stages[0].device_ids), len(stages)), least)] for stages in shapes]
    return fmean(found) if found else gpu_s[least]


def _of(one: Candidate) -> Estimate:
    assert one.estimate is not None, "what may be chosen has an estimate"
    return one.estimate


def _gpu_s(estimate: Estimate) -> float:
    """Of a batch, whose stages follow one another: of the groups of tp GPUs one is busy at a time."""
    return estimate.config.tp * estimate.e2e_s.value
