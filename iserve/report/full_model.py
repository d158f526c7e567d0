"""Predictions for the whole model from repeated fingerprints: the numbers of the page's section of that name.

Times are the estimator's, at the points that were run and between them; a decode step's parts are the medians of
what the step timer read, with the cost of the repeats, which is taken off. Memory is what the engine counted of
each fingerprint and what follows for the whole model.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload, even_split
from fingerprint.errors import NotMeasuredError
from fingerprint.estimates import Quantity
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.repeat_overhead import (
    Overhead,
    Round,
    repeat_overheads,
    repeated_points,
    together,
    token_bound_s,
)
from fingerprint.estimators.whole_points import WholePoint
from fingerprint.measurements import MemoryPoint, TimingPoint, key_of

__all__ = [
    "KV_SHARE",
    "BatchLine",
    "CountedItems",
    "CountedModel",
    "DecodeStep",
    "Readings",
    "RepeatCost",
    "RunPoint",
    "TimeAt",
    "WholeModel",
    "whole_models",
]

KV_SHARE = 0.9  # of a GPU's memory, for which blocks are counted on the page


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeAt:
    """The whole model's times at one batch and input."""

    batch: int
    input_tokens: int
    ttft_s: Quantity
    tpot_s: Quantity


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLine:
    """Times over the batch, of one input length: at powers of two and wherever it was run."""

    input_tokens: int
    times: tuple[TimeAt, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """Decode step of the whole batch on the GPU's timeline, seconds; of the later half of a run."""

    gap_s: float  # the GPU waited for the host
    lead_s: float
    forward_s: float  # all repeats
    tail_s: float
    repeats_s: float  # of ``forward_s``, what repeating cost in addition to the layers; not the whole model's
    num_steps: int  # behind these medians

    @property
    def layers_s(self) -> float:
        """``forward_s`` without the repeats' cost."""
        return max(0.0, self.forward_s - self.repeats_s)

    @property
    def total_s(self) -> float:
        """Total as it was measured, the repeats' cost included."""
        return self.gap_s + self.lead_s + self.forward_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Readings:
    """The driver's, medians over runs; None: not recorded."""

    sm_clock_mhz: float | None
    power_w: float | None
    held_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPoint:
    """A point that the repeated fingerprint ran."""

    time: TimeAt
    num_runs: int
    run_tokens: int  # output tokens of the runs that generated
    decode: DecodeStep
    readings: Readings  # of the runs that generated


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatCost:
    """Cost of one repeat, in addition to its layers: seconds per pass of the forward, and per token in it."""

    first_per_pass_s: float
    first_per_token_s: float
    step_per_pass_s: float
    step_per_token_s: float
    depths: tuple[int, ...]  # the repeated fingerprints' layers


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedItems:
    """Bytes of the fullest GPU by the engine's own items."""

    num_layers: int
    weights_bytes: int
    activation_bytes: int
    context_bytes: int  # what is outside the engine's allocator
    pp_buffer_bytes: int
    graph_bytes: int
    kv_bytes_per_token: float

    @property
    def total_bytes(self) -> int:
        """Without the KV cache."""
        return (
            self.weights_bytes
            + self.activation_bytes
            + self.context_bytes
            + self.pp_buffer_bytes
            + self.graph_bytes
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedModel:
    """Counts of each fingerprint, shallowest first, and what follows for the whole model."""

    fingerprints: tuple[CountedItems, ...]
    whole: CountedItems
    block_tokens: int
    blocks: int  # in ``budget_bytes``
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeModel:
    """Configuration that was run depth-tied. All times are for ``output_tokens``."""

    tp: int
    pp: int
    weights: WeightFormat
    kv: KvFormat
    output_tokens: int
    num_layers: int  # of the fingerprint
    repeat: int
    shard: bool  # one rank of the TP group was run alone; the group's sums are modelled
    expert_parallel: bool
    points: tuple[RunPoint, ...]
    lines: tuple[BatchLine, ...]
    cost: RepeatCost
    plain_gap_s: tuple[float, float] | None  # smallest and largest, where it was run unrepeated
    memory: CountedModel | None  # None: not counted


def whole_models(estimator: DepthTiedEstimator, workload: Workload) -> tuple[WholeModel, ...]:
    """Return every configuration with repeated points in ``estimator``, with times for the workload's output."""
    profile, found = estimator.profile, []
    for key, whole in estimator.l3.points.items():
        config = key.config(profile.engine)
        times = _Times(estimator, config, workload.output_tokens)
        found.append(_whole_model(times, whole, _counted(estimator, config)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Times:
    """Estimates of one configuration."""

    estimator: DepthTiedEstimator
    config: DeploymentConfig
    output_tokens: int

    def at(self, batch: int, input_tokens: int) -> TimeAt:
        found = self.estimator.l3.latency(self.config, Workload(batch, input_tokens, self.output_tokens))
        return TimeAt(batch=batch, input_tokens=input_tokens, ttft_s=found.ttft_s, tpot_s=found.tpot_s)

    def line(self, input_tokens: int, ran: Sequence[int]) -> BatchLine:
        """Return the times over the batches that were run with that input, and the powers of two between."""
        between = {2**i for i in range(32) if min(ran) < 2**i < max(ran)}
        batches = sorted(between | set(ran))
        return BatchLine(input_tokens=input_tokens, times=tuple(self.at(b, input_tokens) for b in batches))


def _whole_model(times: _Times, whole: Sequence[WholePoint], memory: CountedModel | None) -> WholeModel:
    profile, config = times.estimator.profile, times.config
    num_layers = profile.spec.num_layers
    shard = key_of(config) in times.estimator.l3.shards
    ran = tuple(p for p in profile.timing if (p.shard, p.key) == (shard, key_of(config)))
    repeated, deepest = repeated_points(ran, num_layers)
    used = [p for p in repeated if p.num_layers == deepest]
    plain = [p for p in ran if p.repeat == 1 and p.num_layers < num_layers]
    most = token_bound_s(profile.spec, profile.machine.device)
    first, step = repeat_overheads(ran, num_layers, most)
    inputs = sorted({p.input_tokens for p in whole})
    return WholeModel(
        tp=config.tp,
        pp=config.pp,
        weights=config.weights,
        kv=config.kv,
        output_tokens=times.output_tokens,
        num_layers=deepest,
        repeat=used[0].repeat,
        shard=shard,
        expert_parallel=config.expert_parallel,
        points=tuple(_run_point(times.at(p.batch, p.input_tokens), used, step) for p in whole),
        lines=tuple(times.line(n, [p.batch for p in whole if p.input_tokens == n]) for n in inputs),
        cost=RepeatCost(
            first_per_pass_s=first.per_pass_s,
            first_per_token_s=first.per_token_s,
            step_per_pass_s=step.per_pass_s,
            step_per_token_s=step.per_token_s,
            depths=tuple(sorted({p.num_layers for p in repeated})),
        ),
        plain_gap_s=_range(statistics.median(s.gap_s for s in steps) for p in plain if (steps := _steady(p))),
        memory=memory,
    )


def _run_point(time: TimeAt, used: Sequence[TimingPoint], step: Overhead) -> RunPoint:
    here = [p for p in used if (p.batch, p.input_tokens) == (time.batch, time.input_tokens)]
    long = max(here, key=lambda p: p.output_tokens)
    steps = _steady(long)

    def middle(of: Callable[[Round], float]) -> float:
        return statistics.median(of(s) for s in steps)

    return RunPoint(
        time=time,
        num_runs=sum(len(p.runs) for p in here),
        run_tokens=long.output_tokens,
        decode=DecodeStep(
            gap_s=middle(lambda s: s.gap_s),
            lead_s=middle(lambda s: s.lead_s),
            forward_s=middle(lambda s: s.forward_s),
            tail_s=middle(lambda s: s.tail_s),
            repeats_s=(long.repeat - 1) * step.at(middle(lambda s: len(s.steps)), time.batch),
            num_steps=len(steps),
        ),
        readings=_readings(long),
    )


def _steady(point: TimingPoint) -> list[Round]:
    """Decode steps of the whole batch, of each run the later half: the clock has recovered from the prefill."""
    found = []
    for run in point.runs:
        whole = together(point, run)
        found += whole[len(whole) // 2 :]
    return found


def _readings(point: TimingPoint) -> Readings:
    def middle(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    held = middle(run.held_bytes for run in point.runs)
    return Readings(
        sm_clock_mhz=middle(run.sm_clock_mhz for run in point.runs),
        power_w=middle(run.power_w for run in point.runs),
        held_bytes=None if held is None else round(held),
    )


def _range(values: Iterable[float]) -> tuple[float, float] | None:
    known = sorted(values)
    return (known[0], known[-1]) if known else None


def _counted(estimator: DepthTiedEstimator, config: DeploymentConfig) -> CountedModel | None:
    counted = estimator.memory
    some_tokens = Workload(batch=1, input_tokens=1, output_tokens=1)
    try:
        points, whole = counted.loaded(config), counted.memory(config, some_tokens)
    except NotMeasuredError:
        return None
    block_tokens = max(rank.kv_block_tokens for point in points for rank in point.ranks)
    if not block_tokens:
        return None
    budget_bytes = int(KV_SHARE * estimator.profile.machine.device.memory_bytes)
    fullest = max(whole.stages(even_split(whole.num_layers, config.pp)), key=lambda stage: stage.weights_bytes)
    graph_bytes = counted.graph_bytes(config)
    return CountedModel(
        fingerprints=tuple(_items(point) for point in sorted(points, key=lambda p: p.num_layers)),
        whole=CountedItems(
            num_layers=whole.num_layers,
            weights_bytes=fullest.weights_bytes,
            activation_bytes=fullest.activation_bytes,
            context_bytes=fullest.runtime_bytes - graph_bytes,
            pp_buffer_bytes=fullest.pp_buffer_bytes,
            graph_bytes=graph_bytes,
            kv_bytes_per_token=fullest.kv_bytes / some_tokens.context_tokens,
        ),
        block_tokens=block_tokens,
        blocks=counted.kv_blocks(config, budget_bytes),
        budget_bytes=budget_bytes,
    )


def _items(point: MemoryPoint) -> CountedItems:
    """Return the largest of each item over the ranks."""
    return CountedItems(
        num_layers=point.num_layers,
        weights_bytes=max(rank.weights_bytes for rank in point.ranks),
        activation_bytes=max(rank.activation_peak_bytes for rank in point.ranks),
        context_bytes=max(rank.runtime_bytes for rank in point.ranks),
        pp_buffer_bytes=max(rank.pp_buffer_bytes for rank in point.ranks),
        graph_bytes=max(rank.graph_bytes for rank in point.ranks),
        kv_bytes_per_token=max(rank.kv_bytes / max(1, rank.kv_room_tokens) for rank in point.ranks),
    )
