"""Search space of AlpaServe's placement: buckets of models, ranges of GPUs, groups and their degrees.

After Li et al., "AlpaServe: Statistical Multiplexing with Model Parallelism for Deep Learning Serving" (OSDI 2023,
arXiv 2302.11665), section 4.2, with its prunings: models of similar size share a bucket; the groups of a bucket
have one size and one pair of degrees, but for what is left over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from placement.types import ClusterSnapshot, GpuState

__all__ = ["Group", "bucketings", "group_sizes", "in_order", "partitions", "shape"]


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that serve together: every model placed here runs with these degrees, or the nearest that it can."""

    gpus: tuple[GpuState, ...]
    tp: int
    pp: int


def in_order(cluster: ClusterSnapshot) -> tuple[GpuState, ...]:
    """Return neighbours next to one another: a group is a range of these."""
    return tuple(sorted(cluster.gpus, key=lambda gpu: (gpu.node_id, gpu.gpu_index, gpu.device_id)))


def bucketings(size_of: Mapping[str, float], most: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield ways to put models of similar size into at most ``most`` buckets.

    The first has one bucket; then the cut is where two neighbours differ most (by ratio), then there and at the
    second largest difference, and so on. Equal models are never cut.

    Args:
        size_of: a positive number of each model; AlpaServe's is its latency on one GPU.
    """
    models = sorted(size_of, key=lambda model: (size_of[model], model))
    steps = [(size_of[b] / size_of[a], i) for i, (a, b) in enumerate(pairwise(models), 1)]
    largest_first = [i for ratio, i in sorted(steps, key=lambda step: (-step[0], step[1])) if ratio > 1]
    for cuts in range(min(len(largest_first), most - 1) + 1):
        edges = [0, *sorted(largest_first[:cuts]), len(models)]
        yield tuple(tuple(models[a:b]) for a, b in pairwise(edges))


def shape(gpus: Sequence[GpuState]) -> tuple[tuple[int, ...], ...]:
    """Free bytes in runs of one node: what holds on one range of GPUs holds on any other of the same shape."""
    return tuple(tuple(gpu.free_bytes for gpu in run) for _, run in groupby(gpus, key=lambda gpu: gpu.node_id))


def group_sizes(num_gpus: int) -> list[int]:
    """Return powers of two, and what divides ``num_gpus``."""
    powers = {2**i for i in range(num_gpus.bit_length())}
    return sorted(powers | {size for size in range(1, num_gpus + 1) if not num_gpus % size})


def partitions(gpus: Sequence[GpuState], degrees: Iterable[tuple[int, int]]) -> Iterator[tuple[Group, ...]]:
    """Yield every cut of ``gpus`` into groups of one size and one pair of ``degrees`` (tp, pp).

    What is left over is cut
    into the largest powers of two, with as much of that TP as goes in.
    """
    known = sorted(set(degrees))
    for size in group_sizes(len(gpus)):
        for tp, pp in known:
            if tp * pp != size:
                continue
            whole = len(gpus) // size * size
            groups = [Group(tuple(gpus[i : i + size]), tp, pp) for i in range(0, whole, size)]
            at = whole
            while at < len(gpus):
                rest = 1 << ((len(gpus) - at).bit_length() - 1)
                rest_tp = next(t for t in range(min(tp, rest), 0, -1) if not rest % t)
                groups.append(Group(tuple(gpus[at : at + rest]), rest_tp, rest // rest_tp))
                at += rest
            yield tuple(groups)
