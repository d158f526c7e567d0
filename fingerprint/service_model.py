"""Service times and memory of one replica at any concurrency, for planning, placement and simulation under load.

A :class:`ServiceModel` is one configuration of one model on one kind of GPU for one mix of requests (mean prompt
and mean answer). Times are the estimator's, tabulated once: a prompt alone, and a decode step of n sequences.
Pure; knows no rates and no neighbours (``placement.fleet`` does).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimate, Estimator, MemoryEstimate
from fingerprint.load_waits import LoadWaits, OneLoad

__all__ = [
    "LARGEST_BATCH",
    "STEP_KNOTS",
    "ServiceModel",
    "batches_in_flight",
    "service_between",
    "service_model",
    "steps_between",
]

LARGEST_BATCH = 256  # sequences that decode together at most (docs/decisions/0024)
STEP_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, LARGEST_BATCH)
_KNEE = 0.97  # share of the largest batch's capacity at which more KV room gains next to nothing
_BEYOND_KNEE = 1.25  # times the KV cache at which capacity has reached 97% of its most
SHARED_PROMPT = 0.7  # most of a prompt's time that it shares with the step it joins


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceModel:
    """Times and memory of one replica of ``config``."""

    config: DeploymentConfig
    """Configuration of the replica."""
    prompt_s: float
    """Seconds of a mean prompt, alone."""
    step_s: tuple[float, ...]
    """Seconds of a decode step of 1, 2, 4, ... 256 sequences at the mean context; of a pipeline whose stages are
    kept filled, of a token of each, as they are spread over one batch a stage."""
    input_tokens: float
    """Tokens of the mean prompt."""
    output_tokens: float
    """Tokens of the mean answer."""
    longest_tokens: int
    """Tokens of the longest request that must fit, prompt and answer together."""
    fixed_bytes: int
    """Bytes on each GPU without KV cache, at the upper end of the estimate's interval."""
    kv_bytes_per_token: float
    """Bytes of a token's KV cache on each GPU; of states alone, those of a sequence over its mean length."""
    is_split_measured: bool = False
    """Whether the times of this TP degree, or of its all-reduces, were measured."""
    largest_batch: int = LARGEST_BATCH
    """Sequences that run at once at most."""
    further_prompt_s: float | None = None
    """Seconds of each further prompt of a batch; None: those of one alone, without a read of the weights."""
    most_at_once: float | None = None
    """Requests that run at once on average; None: no slots for variants bound them (``Estimate.most_at_once``)."""
    load_waits: LoadWaits | None = None
    """Waits for loads of variants next to the steps, in no time of these; None: there are none."""
    one_load: OneLoad | None = None
    """Load of a variant; None: there are none, or its time is not known."""
    experts_read_by: float = 1.0
    """Sequences of which a decode step reads nearly all experts of a mixture; 1: a dense model, or not known."""
    spared_loads_s: tuple[float, ...] = ()
    """Seconds of loads, of those in prompts, that a request at 1, 2, ... replicas is spared at most; at more
    replicas the last."""

    def __post_init__(self) -> None:
        times = (self.prompt_s, *self.step_s)
        if len(self.step_s) != len(STEP_KNOTS) or not all(math.isfinite(t) and t > 0 for t in times):
            raise ConfigError(f"{self.config}: a service model needs {1 + len(STEP_KNOTS)} positive times")
        if not 0 <= self.added_prompt_s <= self.prompt_s:
            raise ConfigError(f"{self.config}: a further prompt takes 0 to {self.prompt_s} s, as one alone")
        if self.fixed_bytes < 0 or self.kv_bytes_per_token < 0:
            raise ConfigError(f"{self.config}: memory cannot be negative")
        if not 1 <= self.largest_batch <= LARGEST_BATCH:
            raise ConfigError(
                f"{self.config}: a batch has 1 to {LARGEST_BATCH} requests, got {self.largest_batch}"
            )

    @property
    def num_gpus(self) -> int:
        return self.config.num_gpus

    @property
    def busy_share_per_gpu(self) -> float:
        """Share of a step that each GPU works at most: a pipeline's stages take turns, unless each has a batch."""
        return batches_in_flight(self.config) / self.config.pp

    @property
    def mean_tokens(self) -> float:
        """Tokens that a mean request keeps at its end."""
        return self.input_tokens + self.output_tokens

    @property
    def added_prompt_s(self) -> float:
        """Time that a prompt adds to a step that decodes, or to other prompts: it reads no weights of its own."""
        if self.further_prompt_s is not None:
            return self.further_prompt_s
        return self.prompt_s - min(self.step_s[0], SHARED_PROMPT * self.prompt_s)

    @property
    def alone_s(self) -> float:
        """End-to-end time of a mean request that finds the replica idle."""
        return self.request_s(1)

    @property
    def idle_s(self) -> float:
        """Time of a mean request on an idle replica whose steps read nearly all experts, as those under load do.

        That of one alone, but for a mixture: its first sequences each make the next step read further experts.
        Once these are read, further sequences take a step longer by what is their own; that is left out, on the
        line through steps of as many sequences and of twice as many.
        """
        few, many = (_between(self.rounds_s, times * self.experts_read_by) for times in (1, 2))
        step_s = self.rounds_s[0] if self.experts_read_by == 1 else max(self.rounds_s[0], 2 * few - many)
        return self.prompt_s + (self.output_tokens - 1) * step_s

    def request_s(self, batch: float) -> float:
        """Return the time of a mean request that always runs among ``batch``, with the other requests' prompts."""
        later_s = (self.output_tokens - 1) * _between(self.rounds_s, batch)
        return self.prompt_s + (batch - 1) * self.added_prompt_s + later_s

    def step_of(self, sequences: float) -> float:
        """Return the time of a decode step of that many sequences, linear between the knots and beyond them."""
        return _between(self.step_s, sequences)

    @property
    def rounds_s(self) -> tuple[float, ...]:
        """Seconds in which each of 1, 2, 4, ... 256 sequences gets a token, without its part of the prompts' time.

        Those of a step; a pipeline's batches wait for the one that has most prompts, so the time beyond its even
        part is added. Of n sequences the prompts of n - 1 over the answer's tokens begin in a round.
        """
        batches = batches_in_flight(self.config)
        if batches == 1:
            return self.step_s
        begin = [(knot - 1) / self.output_tokens for knot in STEP_KNOTS]
        beyond = [batches * _mean_deepest(prompts, batches) - prompts for prompts in begin]
        return tuple(s + more * self.added_prompt_s for s, more in zip(self.step_s, beyond, strict=True))

    def loaded_step_of(self, sequences: int) -> float:
        """Return the time per token of that many sequences, of which all but one are replaced as they end.

        Each token then also waits for its share of the prompts of those that follow.
        """
        prompts_s = max(0, sequences - 1) * self.added_prompt_s / self.output_tokens
        return _between(self.rounds_s, sequences) + prompts_s

    def prompts_s(self, tokens: float) -> float:
        """Return the time of prompts of so many tokens in all, handed over at once."""
        return self.prompt_s + self.added_prompt_s * (tokens / self.input_tokens - 1)

    def counted_loads_s(self, tokens: float) -> float:
        """Return the part of ``prompts_s`` that is for loads of variants."""
        counted_s = 0.0 if self.one_load is None else self.one_load.counted_s
        return min(counted_s, self.added_prompt_s) * tokens / self.input_tokens

    def slowed(self, prompts: float, steps: float) -> ServiceModel:
        """Return the same with prompts, the loads that they count included, and steps so many times as slow."""
        load = self.one_load
        return replace(
            self,
            one_load=None if load is None else replace(load, counted_s=prompts * load.counted_s),
            prompt_s=prompts * self.prompt_s,
            further_prompt_s=prompts * self.added_prompt_s,
            step_s=tuple(steps * step_s for step_s in self.step_s),
            spared_loads_s=tuple(prompts * load_s for load_s in self.spared_loads_s),
        )

    def requests_per_s(self, batch: float) -> float:
        """Return the capacity at a batch of ``batch`` sequences on GPUs of its own."""
        return batch / self.request_s(batch)

    @property
    def knee_batch(self) -> float:
        """Smallest batch that reaches 97% of the capacity of the largest."""
        sizes = (*(knot for knot in STEP_KNOTS if knot < self.largest_batch), self.largest_batch)
        wanted = _KNEE * max(self.requests_per_s(batch) for batch in sizes)
        low, high = 1.0, float(self.largest_batch)
        if self.requests_per_s(low) >= wanted:
            return low
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if self.requests_per_s(middle) >= wanted else (middle, high)
        return high

    @property
    def useful_kv_tokens(self) -> float:
        """KV cache beyond which the replica gains next to nothing; of a batch that was given, what it fills."""
        most = math.inf if self.largest_batch == LARGEST_BATCH else self.largest_batch
        return max(float(self.longest_tokens), min(most, _BEYOND_KNEE * self.knee_batch) * self.mean_tokens)

    def batch_of(self, kv_tokens: float) -> float:
        """Return how many mean requests ``kv_tokens`` of KV cache hold at once, 1 to the largest batch."""
        return min(float(self.largest_batch), max(1.0, kv_tokens / self.mean_tokens))

    def bytes_per_gpu(self, kv_tokens: float) -> int:
        """Return the memory of each GPU with a KV cache of ``kv_tokens``."""
        return self.fixed_bytes + math.ceil(kv_tokens * self.kv_bytes_per_token)


def service_model(
    estimator: Estimator,
    config: DeploymentConfig,
    workload: Workload,
    *,
    longest_tokens: int | None = None,
    served_tokens: int | None = None,
    largest_batch: int = LARGEST_BATCH,
) -> ServiceModel:
    """Return the service model of ``config`` for requests of the workload's mean lengths; its batch is ignored.

    Args:
        longest_tokens: None: the workload's own longest request.
        served_tokens: longest request whose activations count; None: none beyond the mean.

    Raises:
        NotMeasuredError: the estimator knows no time of this configuration.
    """
    known = _known(estimator, config, replace(workload, longest_tokens=0))
    alone, most = known[0], known[-1]
    memory, full = _MemoryPerGpu.of(alone.memory), _MemoryPerGpu.of(most.memory)
    fixed_bytes = max(memory.fixed_bytes, full.fixed_bytes)
    if served_tokens is not None:
        long = replace(workload, batch=1, longest_tokens=served_tokens)
        fixed_bytes = max(fixed_bytes, _MemoryPerGpu.of(estimator.estimate(config, long).memory).fixed_bytes)
    usual = workload.input_tokens + workload.output_tokens
    more_tokens = (most.workload.batch - 1) * usual
    per_token = (full.kv_bytes - memory.kv_bytes) / more_tokens if more_tokens else memory.kv_bytes / usual
    found = ServiceModel(
        config=config,
        prompt_s=alone.ttft_s.value,
        step_s=_steps([estimate.tpot_s.value for estimate in known]),
        input_tokens=float(workload.input_tokens),
        output_tokens=float(workload.output_tokens),
        longest_tokens=longest_tokens or workload.context_tokens,
        fixed_bytes=fixed_bytes,
        kv_bytes_per_token=max(0.0, per_token),
        is_split_measured=config.tp == 1 or alone.is_measured or alone.links_measured,
        largest_batch=largest_batch,
        most_at_once=alone.most_at_once,
        load_waits=alone.load_waits,
        one_load=alone.one_load,
        spared_loads_s=alone.spared_loads_s,
    )
    return _spread(found, batches_in_flight(config))


def service_between(
    config: DeploymentConfig,
    workload: Workload,
    ttft_s: tuple[float, float],
    tpot_s: tuple[float, float],
    most_at_once: float | None = None,
    one_load: OneLoad | None = None,
) -> ServiceModel:
    """Return the service model by the times of one request and of a whole batch; its memory is not known.

    Args:
        ttft_s: of one request alone, and of the batch handed over at once.
        tpot_s: of one request alone, and of the batch.
        most_at_once: that of the estimates, as ``one_load``.
    """
    (prompt_s, full_s), (step_s, full_step_s) = ttft_s, tpot_s
    further_s = prompt_s - step_s  # of a batch of one: the rest is the read of the weights
    if workload.batch > 1:
        further_s = min((full_s - prompt_s) / (workload.batch - 1), prompt_s)
    found = ServiceModel(
        config=config,
        prompt_s=prompt_s,
        further_prompt_s=max(further_s, 0.0),
        step_s=steps_between(step_s, full_step_s, workload.batch),
        input_tokens=workload.input_tokens,
        output_tokens=workload.output_tokens,
        longest_tokens=workload.context_tokens,
        fixed_bytes=0,
        kv_bytes_per_token=0.0,
        largest_batch=min(LARGEST_BATCH, workload.batch),
        most_at_once=most_at_once,
        one_load=one_load,
    )
    return _spread(found, batches_in_flight(config))


def steps_between(alone_s: float, full_s: float, batch: int) -> tuple[float, ...]:
    """Return the times at all knots on the line through those of one sequence and of ``batch``."""
    slope = max(full_s - alone_s, 0.0) / max(1, batch - 1)  # a NaN stays one, and is refused
    return tuple(alone_s + slope * (knot - 1) for knot in STEP_KNOTS)


def _between(times_s: Sequence[float], sequences: float) -> float:
    high = min(max(1, bisect_left(STEP_KNOTS, sequences)), len(STEP_KNOTS) - 1)
    low_at, high_at = STEP_KNOTS[high - 1 : high + 1]
    part = max(0.0, (sequences - low_at) / (high_at - low_at))
    return times_s[high - 1] + part * (times_s[high] - times_s[high - 1])


def batches_in_flight(config: DeploymentConfig) -> int:
    """Return how many batches are under way at once: one for each stage, where the engine fills its stages."""
    return config.pp if traits_of(config.engine).fills_stages else 1


def _spread(one: ServiceModel, batches: int) -> ServiceModel:
    """Return the model of the same replica with its sequences spread evenly over so many batches in flight.

    All batches make one step in the time of one, of a part of the sequences, and one prompt each in the time of
    one (``traces.simulator.pipelined``).
    """
    if batches == 1:
        return one
    return replace(
        one,
        further_prompt_s=one.added_prompt_s / batches,
        spared_loads_s=(),  # those of a prompt and of what it adds are no longer the same
        step_s=tuple(one.step_of(max(1.0, knot / batches)) for knot in STEP_KNOTS),
    )


@lru_cache(maxsize=1024)
def _mean_deepest(prompts: float, batches: int) -> float:
    """Return the mean of the most prompts that a batch has, of ``prompts`` in all by a Poisson law.

    They wait in one queue, so the batches that enter in turn share them as evenly as whole prompts go.
    """
    deepest, chance = 0.0, math.exp(-prompts)
    for count in range(1, math.ceil(prompts + 8 * math.sqrt(prompts)) + 20):
        chance *= prompts / count
        deepest += chance * math.ceil(count / batches)
    return deepest


def _known(estimator: Estimator, config: DeploymentConfig, workload: Workload) -> list[Estimate]:
    """Return the estimates at the knots, up to the first batch of which nothing is known."""
    found: list[Estimate] = []
    for batch in STEP_KNOTS:
        try:
            found.append(estimator.estimate(config, replace(workload, batch=batch)))
        except NotMeasuredError:
            if not found:
                raise
            break
    return found


def _steps(known_s: Sequence[float]) -> tuple[float, ...]:
    """Return the times at all knots: those known, and the line through the last two beyond them."""
    steps = list(known_s)
    for low, here in zip(STEP_KNOTS[len(steps) - 1 :], STEP_KNOTS[len(steps) :], strict=False):
        slope = (steps[-1] - steps[-2]) / (low - STEP_KNOTS[len(steps) - 2]) if len(steps) > 1 else 0.0
        steps.append(steps[-1] + max(0.0, slope) * (here - low))
    return tuple(steps)


@dataclass(frozen=True, slots=True)
class _MemoryPerGpu:
    """Memory of the fullest GPU of an even split, at the upper end of its interval."""

    fixed_bytes: int
    kv_bytes: float

    @classmethod
    def of(cls, memory: MemoryEstimate) -> _MemoryPerGpu:
        layers = even_split(memory.num_layers, memory.pp)
        fullest = max(memory.stages(layers), key=lambda stage: stage.total_bytes)
        scale = 1 + memory.relative_error
        return cls(
            fixed_bytes=math.ceil(scale * (fullest.total_bytes - fullest.kv_bytes)),
            kv_bytes=scale * fullest.kv_bytes,
        )
