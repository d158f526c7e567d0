"""Deltas in slots against full models that are swapped: the same requests, one GPU a side.

32 variants of one base are asked for by laws of popularity, for some minutes. *Slots* is vLLM with the plug-in
and a slot for each delta; its own queue decides. *Swapping* is vLLM without it, in whose weights a full model is
copied from page-locked memory of the host when another one is due; its requests run in one batch, and ``PINNED``
copies are used in turn, so that the bytes of 32 move. Two orders: *fcfs* lets a request in when all before
it are in, and *grouped* lets in all of the model that is there, until one of another model has waited
``PATIENCE_S``. Both start with all that they serve in the host's memory, slots filled.

Measured by ``tests.bench.delta_served run --measure contest``.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, quantiles
from typing import Any, Protocol

__all__ = ["LAWS", "ORDERS", "PINNED", "Asked", "AtOnce", "Swapping", "Times", "draw", "play", "summary_of"]

VARIANTS, RATE_PER_S, MOST_ROWS = 32, 12.0, 64
LAWS = {"zipf-bursts": 180.0, "even": 90.0}
"""Seconds of each law: Zipf's with exponent 1.5, each variant's arrivals in bursts; and all alike, Poisson."""
ORDERS = ("fcfs", "grouped")
PINNED, PATIENCE_S = 4, 10.0
_CV = 4.0  # of the times between arrivals of one variant, in bursts
_INPUT, _OUTPUT = (256.0, 0.8, 16, 1536), (200.0, 0.6, 16, 512)  # mean, deviation of its logarithm, least, most
_PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Request for one variant.

    Attributes:
        variant: from 1 on.
        input_tokens, output_tokens: lengths.
    """

    at_s: float
    variant: int
    input_tokens: int
    output_tokens: int


def draw(law: str, seconds: float, seed: int, rate_per_s: float = RATE_PER_S) -> list[Asked]:
    """Return the requests of ``law`` in the order of their arrival."""
    drawn, found = random.Random(f"{law} {seed}"), list[Asked]()
    weights = [number ** -(1.5 if law == "zipf-bursts" else 0.0) for number in range(1, VARIANTS + 1)]
    shape = 1 / _CV**2 if law == "zipf-bursts" else 1.0
    for variant, weight in enumerate(weights, 1):
        between_s = sum(weights) / (weight * rate_per_s)
        at_s = drawn.gammavariate(shape, between_s / shape) * drawn.random()  # the first one is cut anywhere
        while at_s < seconds:
            found.append(
                Asked(
                    at_s=at_s,
                    variant=variant,
                    input_tokens=_length(drawn, *_INPUT),
                    output_tokens=_length(drawn, *_OUTPUT),
                )
            )
            at_s += drawn.gammavariate(shape, between_s / shape)
    return sorted(found, key=lambda one: one.at_s)


def _length(drawn: random.Random, mean: float, deviation: float, least: int, most: int) -> int:
    value = drawn.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)
    return round(min(max(value, least), most))


class Order(Protocol):
    """Decision on which requests enter the engine."""

    def arrive(self, number: int, variant: int, now_s: float) -> None:
        """Take a request into the queue."""

    def enter(self, running: int, now_s: float) -> list[int]:
        """Return the requests that enter now; ``running`` are in the engine."""


class AtOnce:
    """All requests enter when they arrive; the engine has a queue of its own."""

    def __init__(self) -> None:
        self._new: list[int] = []

    def arrive(self, number: int, variant: int, now_s: float) -> None:
        self._new.append(number)

    def enter(self, running: int, now_s: float) -> list[int]:
        entering, self._new = self._new, []
        return entering


class Swapping:
    """Requests of one model at a time enter; ``swap`` puts it there when nothing runs.

    Args:
        order: one of ``ORDERS``.
        swap: called with the variant whose weights are needed.
    """

    def __init__(self, order: str, swap: Callable[[int], None]) -> None:
        self._is_grouped, self._swap = order == "grouped", swap
        self._queue: list[tuple[int, int, float]] = []
        self._there: int | None = None
        self.swaps = 0

    def arrive(self, number: int, variant: int, now_s: float) -> None:
        self._queue.append((number, variant, now_s))

    def enter(self, running: int, now_s: float) -> list[int]:
        if not running and self._queue and self._queue[0][1] != self._there:
            self._there = self._queue[0][1]
            self._swap(self._there)
            self.swaps += 1
        entering: list[int] = []
        kept: list[tuple[int, int, float]] = []
        is_open = True
        for one in self._queue:
            number, variant, arrived_s = one
            is_open = is_open and running + len(entering) < MOST_ROWS
            if is_open and variant == self._there:
                entering.append(number)
                continue
            kept.append(one)
            # A batch that begins takes all of its model; after that none passes a request that waited too long.
            is_due = running > 0 and now_s - arrived_s > PATIENCE_S
            is_open = is_open and self._is_grouped and not is_due
        self._queue = kept
        return entering


class Engine(Protocol):
    """vLLM as ``delta_served_engine.Served`` has it."""

    engine: Any

    def add(self, prompt: Sequence[int], number: int, output: int) -> str:
        """Add a request; return its name."""


@dataclass(kw_only=True, slots=True)
class Times:
    """Times of a request since the beginning; None: not reached."""

    arrived_s: float
    first_s: float | None = None
    last_s: float | None = None
    tokens: int = 0


def play(
    served: Engine,
    requests: Sequence[Asked],
    order: Order,
    seconds: float,
    *,
    prompt: Callable[[int, int], Sequence[int]],
    number_of: Callable[[int], int],
    clock: Callable[[], float] = time.perf_counter,
    pause: Callable[[float], None] = time.sleep,
) -> list[Times]:
    """Ask an engine in real time; what has not ended after ``seconds`` is cut off.

    Args:
        prompt: returns the tokens of a prompt by a seed and its length.
        number_of: returns what ``served`` calls a variant, 0 for its own weights.
        clock, pause: the time, and what waits.
    """
    times = [Times(arrived_s=one.at_s) for one in requests]
    names: dict[str, int] = {}
    prompts = [prompt(number, one.input_tokens) for number, one in enumerate(requests)]
    begin, arrived = clock(), 0
    while (now_s := clock() - begin) < seconds:
        while arrived < len(requests) and requests[arrived].at_s <= now_s:
            order.arrive(arrived, requests[arrived].variant, requests[arrived].at_s)
            arrived += 1
        for number in order.enter(len(names), now_s):
            one = requests[number]
            names[served.add(prompts[number], number_of(one.variant), one.output_tokens)] = number
        if not names:
            pause(0.001)
            continue
        for output in served.engine.step():
            now_s = clock() - begin
            found = times[names[output.request_id]]
            found.tokens = len(output.outputs[0].token_ids)
            if found.tokens and found.first_s is None:
                found.first_s = now_s
            if output.finished:
                found.last_s = now_s
                del names[output.request_id]
    served.engine.abort_request(list(names))
    while served.engine.has_unfinished_requests():
        served.engine.step()
    return times


def summary_of(times: Iterable[Times], seconds: float) -> dict[str, Any]:
    """Return throughput and times; of a request that was cut off the time until then, which is a lower bound."""
    arrived = [one for one in times if one.arrived_s < seconds]
    ended = [one for one in arrived if one.last_s is not None]
    return {
        "requests": len(arrived),
        "ended": len(ended),
        "ended_per_s": len(ended) / seconds,
        "tokens_per_s": sum(one.tokens for one in arrived) / seconds,
        "e2e_s": _spread([(seconds if one.last_s is None else one.last_s) - one.arrived_s for one in arrived]),
        "ttft_s": _spread([(seconds if one.first_s is None else one.first_s) - one.arrived_s for one in arrived]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    cuts = quantiles(values, n=100)
    return {"mean": fmean(values), **{f"p{share}": cuts[share - 1] for share in _PERCENTILES}}
