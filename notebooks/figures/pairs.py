"""Does TP over GPUs that are joined in pairs pay? The roofline under all-reduces measured on other such nodes.

The roofline's one latency per further GPU is fitted on nodes whose GPUs are all joined by NVLink. Nothing here is
fed back: the figures use the calibrated constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from fingerprint.estimators.roofline import CALIBRATED, RooflineConstants, RooflineEstimator
from notebooks.figures.figure import Table
from notebooks.figures.setting import DEGREES, GPU, WORKLOAD, config_of, spec_of
from planner.costs import total_bytes

__all__ = ["ALL_REDUCE_4_S", "hop_of", "paired_estimator", "pairs_table", "turning_hop_s"]

GIB = 2**30
# One all-reduce of 10 KB over 4 GPUs of which pairs are joined by NVLink and the rest by PCIe, run alone: medians
# published with Vidur (7d47513, MIT), which a test holds to the reference data. None is of an A6000, or of 8 GPUs.
ALL_REDUCE_4_S: Mapping[str, float] = {"A100 pairs": 59e-6, "H100 pairs": 28e-6}


def hop_of(four_gpus_s: float) -> float:
    """The constant ``all_reduce_hop_s`` with which 4 GPUs take that long."""
    return (four_gpus_s - CALIBRATED.all_reduce_latency_s) / 2


@cache
def paired_estimator(model: str) -> RooflineEstimator:
    """The roofline with the A100 pairs' all-reduces."""
    constants = replace(CALIBRATED, all_reduce_hop_s=hop_of(ALL_REDUCE_4_S["A100 pairs"]))
    return RooflineEstimator(spec_of(model), GPU, constants=constants)


def _e2e_s(model: str, tp: int, pp: int, constants: RooflineConstants) -> float:
    return (
        RooflineEstimator(spec_of(model), GPU, constants=constants)
        .estimate(config_of(tp, pp), WORKLOAD)
        .e2e_s.value
    )


def turning_hop_s(model: str) -> float:
    """Latency of an all-reduce per GPU beyond two at which TP=8 takes as long as TP=4: by bisection, to 10 ns."""

    def gain_s(hop_s: float) -> float:
        constants = replace(CALIBRATED, all_reduce_hop_s=hop_s)
        return _e2e_s(model, 4, 1, constants) - _e2e_s(model, 8, 1, constants)

    low, high = 0.0, 1e-3
    while high - low > 1e-8:
        middle = (low + high) / 2
        low, high = (middle, high) if gain_s(middle) > 0 else (low, middle)
    return high


def pairs_table(models: tuple[str, ...]) -> Table:
    """Figure 3's answers under each node's latency: TP 2 to 4 and 4 to 8, and the degrees that are best."""
    hops = {"calibrated": CALIBRATED.all_reduce_hop_s} | {n: hop_of(s) for n, s in ALL_REDUCE_4_S.items()}
    rows: list[tuple[str | float, ...]] = []
    for model in models:
        for name, hop_s in hops.items():
            constants = replace(CALIBRATED, all_reduce_hop_s=hop_s)
            took = {degree: _e2e_s(model, *degree, constants) for degree in DEGREES}
            cost = {degree: s * _total_gib(model, *degree) for degree, s in took.items()}
            changes = [f"{took[2 * tp, 1] / took[tp, 1] - 1:+.1%}" for tp in (2, 4)]
            best = ["({},{})".format(*min(of, key=lambda degree: (of[degree], degree))) for of in (took, cost)]
            rows.append((model, name, hop_s * 1e6, *changes, *best))
    columns = ("model", "all-reduce of", "us a GPU beyond 2", "TP 2 to 4", "4 to 8", "least latency", "least cost")
    return Table("what if all-reduces took as long as on these nodes", columns, tuple(rows))


def _total_gib(model: str, tp: int, pp: int) -> float:
    return total_bytes(RooflineEstimator(spec_of(model), GPU).estimate(config_of(tp, pp), WORKLOAD).memory) / GIB
