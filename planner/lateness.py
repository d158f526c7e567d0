"""Forecast of a request's first and last token before it begins, from the requests before it.

A worker serves in *slots*: so many requests run in one batch, and whoever comes next waits, first come first
served, for one of them to end. What is known of a request is its prompt's length and how long its answer is
expected to be; of a running one also how much of both is behind it. From that and four times of the plan follow

*   *a prompt*: a fixed time and one for each token, so that one prompt takes TTFT alone, and a whole batch of
    them handed over at once the batch's TTFT. Prompts that are under way come first. Where a batch is of one,
    the fixed time is that of a decode step, for which the weights are read as well;
*   *a step of n that decode*: between TPOT alone and TPOT of the whole batch, on a line; beside others also a
    share of the prompts that come as those end, one for each answer of the planned length;
*   *a slot*: it ends when its prompt and the rest of its answer are through at the pace of a full batch; those
    who wait take one after the other the one that ends first.

What comes later slows a request too, and is in none of this but the share of prompts: whoever forecasts learns
how far off that is (``planner.refusing``).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import Quantity

__all__ = ["Asked", "Forecast", "Pace", "Under", "forecast", "wait_s"]


class Asked(NamedTuple):
    """A request that has not begun: tokens of its prompt, and of the answer that is expected."""

    input_tokens: float
    output_tokens: float


class Under(NamedTuple):
    """Work left of a running request. ``prompt_tokens`` 0: its first token has been sent."""

    prompt_tokens: float
    output_tokens: float


class Forecast(NamedTuple):
    """Times of one request, in seconds from now; ``step_s`` is its TPOT."""

    first_s: float
    step_s: float
    end_s: float


class Times(Protocol):
    """Times of an estimate, or of its document."""

    @property
    def ttft_s(self) -> Quantity: ...
    @property
    def tpot_s(self) -> Quantity: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Pace of a replica: for one request, and with all its slots full. Times in seconds, of the planned lengths.

    Raises:
        ConfigError: a number of slots or tokens below 1, or a time that is not positive and finite.
    """

    slots: int
    input_tokens: int
    output_tokens: int
    ttft_s: float  # of one prompt
    ttft_full_s: float  # of ``slots`` of them, handed over at once
    tpot_s: float
    tpot_full_s: float

    def __post_init__(self) -> None:
        if min(self.slots, self.input_tokens, self.output_tokens) < 1:
            raise ConfigError(f"a pace has at least one slot and tokens in and out, got {self}")
        times = (self.ttft_s, self.ttft_full_s, self.tpot_s, self.tpot_full_s)
        if not all(math.isfinite(time_s) and time_s > 0 for time_s in times):
            raise ConfigError(f"the times of a pace must be positive, finite numbers of seconds, got {self}")

    @classmethod
    def planned(cls, work: Workload, full: Times, alone: Times | None = None, slowdown: float = 1.0) -> Pace:
        """Return the pace by the estimates of a whole batch and of one request of it; None: that is as slow."""
        one = full if alone is None else alone
        return cls(
            slots=work.batch,
            input_tokens=work.input_tokens,
            output_tokens=work.output_tokens,
            ttft_s=one.ttft_s.value * slowdown,
            ttft_full_s=full.ttft_s.value * slowdown,
            tpot_s=one.tpot_s.value * slowdown,
            tpot_full_s=full.tpot_s.value * slowdown,
        )

    @property
    def prompt_token_s(self) -> float:
        """Each token of a prompt, beside the fixed time."""
        if self.slots == 1:
            return max(0.0, self.ttft_s - self.tpot_s) / self.input_tokens
        more_s = max(0.0, self.ttft_full_s - self.ttft_s) / (self.slots - 1)
        return min(more_s, self.ttft_s) / self.input_tokens

    def prompt_s(self, tokens: float) -> float:
        """Prompts of so many tokens in all."""
        token_s = self.prompt_token_s
        return self.ttft_s + token_s * (tokens - self.input_tokens)

    def step_s(self, running: int) -> float:
        """Return the time of one token of each of ``running`` requests; at most all slots count."""
        others = min(max(running, 1), self.slots) - 1
        if not others:
            return self.tpot_s
        beside_s = max(0.0, self.tpot_full_s - self.tpot_s) * others / (self.slots - 1)
        prompts_s = others * self.prompt_token_s * self.input_tokens / self.output_tokens
        return self.tpot_s + beside_s + prompts_s

    def slowed(self, prompts: float, steps: float) -> Pace:
        """The same with prompts and steps so many times as slow."""
        return replace(
            self,
            ttft_s=self.ttft_s * prompts,
            ttft_full_s=self.ttft_full_s * prompts,
            tpot_s=self.tpot_s * steps,
            tpot_full_s=self.tpot_full_s * steps,
        )


def wait_s(pace: Pace, replicas: Sequence[Sequence[Under]], waiting: Iterable[Asked]) -> tuple[float, float]:
    """Return the seconds until the next behind ``waiting`` gets a slot, and until all before it have ended.

    Args:
        replicas: what runs on each that serves; there is at least one.
    """
    step_s, token_s, ends = pace.step_s(pace.slots), pace.prompt_token_s, []
    for running in replicas:
        prompts_s = token_s * sum(
            under.prompt_tokens for under in running
        )  # their fixed time is passed, or shared
        ends += [prompts_s + under.output_tokens * step_s for under in running]
        ends += [0.0] * (pace.slots - len(running))
    heapq.heapify(ends)
    fixed_s = pace.prompt_s(0) - step_s  # the first token comes with the prompt
    for input_tokens, output_tokens in waiting:
        heapq.heapreplace(ends, ends[0] + fixed_s + input_tokens * token_s + max(1.0, output_tokens) * step_s)
    return ends[0], max(ends)


def forecast(pace: Pace, beside: Sequence[Under], asked: Asked, after_s: float = 0.0) -> Forecast:
    """Return the forecast of ``asked`` on a replica that runs ``beside`` when its turn begins in ``after_s``."""
    prompts = sum(under.prompt_tokens for under in beside)
    first_s = after_s + pace.prompt_s(prompts + asked.input_tokens)
    step_s = pace.step_s(len(beside) + 1)
    return Forecast(first_s, step_s, first_s + max(0.0, asked.output_tokens - 1) * step_s)
