"""Plan of a depth-tied profile with our step timer: which points, how often, within what budget.

``depth_tied_profile`` carries it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from fingerprint.config import KvFormat, WeightFormat, Workload
from fingerprint.depth_tied_cuts import repeats_the_mix
from fingerprint.errors import ConfigError
from fingerprint.measurements import MeasuredKey
from fingerprint.model_spec import ModelSpec
from fingerprint.profile_plan import EngineSizes

__all__ = ["ONCE_TOKENS", "DepthTiedPlan", "Point", "depth_tied_plan", "tokens_of"]

Point = tuple[int, int]  # batch, input tokens

_MUCH_LONGER = 1.25  # than the prompts, from which on contexts have points of their own
_MOST_LONGER = 16  # a point's time is foreseen by those of shorter prompts, in proportion
_MOST_BURST_TOKENS = 131_072  # prompt tokens of a batch
ONCE_TOKENS = 32_768  # a prefill of as many takes a second of an 8B model on an H200: settled within itself


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthTiedPlan:
    """Measurements of a depth-tied profile. Points are (batch, input tokens)."""

    degrees: tuple[tuple[int, int], ...] = ((1, 1),)  # (tp, pp)
    expert_parallel: bool = False  # at all of these degrees
    weights: tuple[WeightFormat, ...] = (WeightFormat.BITS16,)
    kv: tuple[KvFormat, ...] = (KvFormat.BITS16,)
    points: tuple[Point, ...]
    shallow_points: tuple[Point, ...]  # of these, what the shallower fingerprint runs: for the cost of a repeat
    plain_points: tuple[Point, ...] = ()  # run unrepeated at both depths too, for the strategies that want that
    long_output: int = 33
    max_batch: int  # sequences that the engine is started for
    max_context_tokens: int
    max_batched_tokens: int = 0  # of the largest step that the engine is started for, to be recorded; 0: not known
    settle_s: float = 0.5  # bursts of one output token go on for as long
    most_bursts: int = 40
    long_s: float = 0.7  # and those that generate
    long_bursts: int = 4
    plain_bursts: int = 3
    agree_within: float = 0.10  # of a point's calls: how far the medians of their two halves may differ
    agree_limit_s: float = 20.0  # for further calls of a point, until they agree
    once_tokens: int | None = None  # points with more prompt tokens are run once, generating
    second_calls: bool = False  # of points called once, where the budget has room
    visits: int = 3  # of the deeper one to points of at most ``short_tokens``, for bursts of one output token
    short_tokens: int = 2048
    budget_s: float = 90.0  # of all its GPUs together, after engine starts
    least_call_s: float = 30.0  # that an answer is waited for, however little of the budget is left

    def __post_init__(self) -> None:
        if not self.points or not set(self.shallow_points) <= set(self.points):
            raise ConfigError("a plan needs points, and its shallow ones must be among them")
        if any(b < 1 or n < 1 or b > self.max_batch for b, n in self.points):
            raise ConfigError(
                f"batches and inputs of {self.points} must be 1 at least, batches {self.max_batch} at most"
            )
        longest = max(n for _, n in self.points) + self.long_output
        if longest > self.max_context_tokens:
            raise ConfigError(
                f"{longest} tokens of the longest point exceed the context {self.max_context_tokens}"
            )
        if self.long_output < 3:
            raise ConfigError(f"long_output must be at least 3, got {self.long_output}")

    def keys(self, tp: int, pp: int) -> tuple[MeasuredKey, ...]:
        """Return what is measured at one pair of degrees."""
        formats = product(self.weights, self.kv)
        return tuple(MeasuredKey(tp, pp, weights, kv, self.expert_parallel) for weights, kv in formats)

    def bursts(self, point: Point) -> tuple[tuple[int, int, float], ...]:
        """Return, by kind of burst, output tokens, most bursts, and seconds after which none begins."""
        long = (self.long_output, self.long_bursts, self.long_s)
        if self.once_tokens is not None and tokens_of(point) > self.once_tokens:
            return ((self.long_output, 1, 0.0),)
        return (1, self.most_bursts, self.settle_s), long

    def is_visited_again(self, point: Point) -> bool:
        """Return whether the deeper fingerprint repeats it: a short prompt also run with one output token."""
        return tokens_of(point) <= self.short_tokens and len(self.bursts(point)) > 1

    def num_bursts(self, depths: Sequence[int]) -> int:
        """Return how often bursts of one configuration are asked for, when nothing fails."""
        if not depths:
            return 0
        shallow = self.shallow_points or (min(self.points, key=tokens_of),)
        asked = [self.points, *(shallow for _ in depths[1:])]
        again = sum(map(self.is_visited_again, self.points)) if len(depths) > 1 else 0
        once = sum(len(self.bursts(point)) for points in asked for point in points)
        return once + 2 * len(self.plain_points) * len(depths) + (self.visits - 1) * again

    @property
    def kv_tokens(self) -> int:
        """Room of the KV cache that the largest point needs."""
        return max(b * (n + self.long_output) for b, n in self.points)

    @property
    def sizes(self) -> EngineSizes:
        """Sizes that the engine is started with."""
        return EngineSizes(
            max_batch=self.max_batch,
            max_context_tokens=self.max_context_tokens,
            max_batched_tokens=self.max_batched_tokens,
            kv_tokens=self.kv_tokens,
        )


def depth_tied_plan(
    spec: ModelSpec,
    workload: Workload,
    *,
    max_batch: int,
    weights: tuple[WeightFormat, ...] = (WeightFormat.BITS16,),
    kv: tuple[KvFormat, ...] = (KvFormat.BITS16,),
    degrees: tuple[tuple[int, int], ...] = ((1, 1),),
    budget_s: float = 90.0,
) -> DepthTiedPlan:
    """Points around ``workload``: its batch, one, and between; its input, and a quarter of it.

    Where answers are long, one sequence and the batch have a point at the longest context, which their last steps
    have, and batches between have one input: no plan has more than eight points.

    Raises:
        ConfigError: a context too short to generate in.
    """
    long_output = min(33, spec.max_context_tokens // 2)
    longest = min(workload.input_tokens, spec.max_context_tokens - long_output)
    top = max(1, min(workload.batch, _MOST_BURST_TOKENS // max(1, longest)))
    batches = {1, top, max(1, round(top**0.5)), max(top, min(8, _MOST_BURST_TOKENS // max(1, longest)))}
    inputs = {longest, max(1, longest // 4)}
    grid = {(b, n) for b in batches for n in inputs}
    last = min(workload.context_tokens, spec.max_context_tokens, _MOST_LONGER * longest) - long_output
    if last > _MUCH_LONGER * longest:
        grid = {(b, n) for b, n in grid if b in (1, top) or n == longest}
        grid |= {(1, last), (max(1, min(workload.batch, _MOST_BURST_TOKENS // last)), last)}
    points = tuple(sorted(grid))
    cheap = sorted(points, key=lambda point: point[0] * point[1])
    alike = all(repeats_the_mix(spec, pp) for _, pp in degrees)  # else each point has its own cost of a repeat
    return DepthTiedPlan(
        degrees=degrees,
        weights=weights,
        kv=kv,
        points=points,
        shallow_points=tuple(cheap[: max(1, (len(cheap) + 1) // 2)] if alike else cheap),
        long_output=long_output,
        max_batch=max(max_batch, *batches),
        max_context_tokens=min(spec.max_context_tokens, max(longest + long_output, workload.context_tokens)),
        once_tokens=ONCE_TOKENS,
        second_calls=True,
        budget_s=budget_s,
    )


def tokens_of(point: Point) -> int:
    """Return the prompt tokens that a point prefills."""
    return point[0] * point[1]
