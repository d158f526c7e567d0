"""Number of variants in a step, by what distinct variants add to it. Pure.

DeltaZip tunes N, the deltas that run at once, by a short trace. Here N follows from step times, by the balance of
flow at a worker that always has n requests. Variant i completes p_i X of the X requests each second; each runs
for S, its number of steps, so that r_i = p_i X S of them run on average (Little). The variant has a slot from the
moment one is free until none of its requests runs: the busy period of a queue with infinitely many servers, begun
by its first request and those that arrived during its wait W for the slot. The slots are full where W is such
that the variants' shares of time with a slot sum up to N. Replayed closed loops agree
(``tests.bench.delta_policies``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import ConfigError
from planner.adapter_slots import MOST_SLOTS, AskedVariants

__all__ = ["StepSlots", "busy_periods", "flow_with_slots", "slots_by_step_time"]

StepTime = Callable[[float, float], float]  # seconds of a step, of its rows and its distinct variants
_NEGLIGIBLE = 0.01  # of the rate: fewer slots leave more memory for KV cache
_HALVINGS = 30  # of an interval, until it is known well enough
_MORE = 64  # customers beyond the most that are asked for, at which the recursion of busy periods begins


def _no_loads(slots: int) -> float:
    return 0.0


def _any_rows(slots: int) -> float:
    return float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSlots:
    """Worker that always has so many requests, with so many slots for distinct variants: expected means."""

    slots: int
    rows: float  # of a step: requests that run
    distinct: float  # variants of a step
    step_s: float
    waiting_s: float  # of a request until it runs

    @property
    def rows_per_s(self) -> float:
        return self.rows / self.step_s


def busy_periods(offered: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    """Return the mean busy periods of queues with infinitely many servers, of those begun by 0, 1, ... ``most``.

    From m customers to m - 1 takes t_m = (1 + r t_{m+1}) / m mean services, r the customers offered in one, both
    exponential: birth and death with rates r and m. Shape ``(most + 1, len(offered))``, in mean services.
    """
    last = most + _MORE
    down = np.ones(len(offered)) / last
    steps = np.empty((last, len(offered)))
    for customers in range(last, 0, -1):
        down = (1 + offered * down) / customers
        steps[customers - 1] = down
    return np.concatenate((np.zeros((1, len(offered))), np.cumsum(steps[:most], axis=0)))


class _Balance:
    """Variants whose requests run, ``rows`` of them at once on average."""

    def __init__(self, running: NDArray[np.float64], requests: float) -> None:
        self._running = running
        self._most = int(requests) + 2
        self._busy = busy_periods(running, self._most)

    def _cycle(self, wait: float) -> tuple[float, float]:
        """Return slots that are held and requests that wait, if variants wait for a slot so many services."""
        begun = np.minimum(1 + self._running * wait, self._most - 1)
        whole = begun.astype(int)
        columns = np.arange(len(begun))
        low, high = self._busy[whole, columns], self._busy[whole + 1, columns]
        busy = low + (high - low) * (begun - whole)
        cycle = 1 / self._running + wait + busy
        waiting = wait / cycle * (1 + self._running * wait / 2)
        return float((busy / cycle).sum()), float(waiting.sum())

    def within(self, slots: int) -> tuple[float, float]:
        """Return slots that are held of ``slots``, and requests that wait for one."""
        held, _ = self._cycle(0.0)
        if held <= slots:
            return held, 0.0
        low, high = 0.0, 1.0
        while self._cycle(high)[0] > slots:
            low, high = high, 2 * high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._cycle(middle)[0] > slots else (low, middle)
        return float(slots), self._cycle(high)[1]


def flow_with_slots(
    load: AskedVariants, requests: float, slots: int, step_s: StepTime, *, steps: float, max_rows: float
) -> StepSlots:
    """Return what a worker that always has ``requests`` does with ``slots``; see the module.

    Requests for the base run without a slot. What rows beyond ``max_rows`` wait for is room.
    """
    shares = load.shares[load.shares > 0]

    def state(rows: float) -> tuple[float, float]:
        return _Balance(shares * rows, requests).within(slots)

    low, high = 0.0, min(requests, max_rows)
    if high + state(high)[1] > requests:
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if middle + state(middle)[1] < requests else (low, middle)
    distinct = min(state(high)[0], high)
    took_s = step_s(high, distinct)
    waiting_s = (requests - high) / high * took_s * steps
    return StepSlots(slots=slots, rows=high, distinct=distinct, step_s=took_s, waiting_s=waiting_s)


def slots_by_step_time(
    load: AskedVariants,
    requests: float,
    step_s: StepTime,
    *,
    steps: float,
    max_rows: float = float("inf"),
    most_slots: int = MOST_SLOTS,
    loads_s: Callable[[int], float] = _no_loads,
    loads_stop_steps: bool = True,
    room_rows: Callable[[int], float] = _any_rows,
) -> StepSlots:
    """Return the slots, a power of two, with which most rows a second are decoded.

    That is the fewest within 1% of the best. One slot is there in any case; more only where they leave a KV cache
    for a row.

    Args:
        requests: at the worker, running and waiting, those for the base included.
        steps: of one request, its output tokens on average.
        max_rows: of a step.
        loads_s: seconds of loads for each request, one after another, by the number of slots.
        loads_stop_steps: whether no step is run meanwhile; else no more requests end than loads let begin.
        room_rows: of a step, whose KV cache has room next to so many slots; no more with more slots.

    Raises:
        ConfigError: no request, step, row or slot.
    """
    if not (0 < requests < float("inf") and steps > 0 and most_slots >= 1 and max_rows > 0):
        raise ConfigError(
            "slots are chosen for requests, steps and rows above 0 and at least one slot, got "
            f"{requests:g}, {steps:g}, {max_rows:g} and {most_slots}"
        )
    numbers = [number for number in itertools.accumulate([1] * 32, lambda one, _: 2 * one) if number <= most_slots]
    enough = next((number for number in numbers if number >= len(load.shares)), numbers[-1])

    def with_loads(slots: int) -> StepTime:
        each_s = loads_s(slots) / steps
        if loads_stop_steps:
            return lambda rows, distinct: step_s(rows, distinct) + rows * each_s
        return lambda rows, distinct: max(step_s(rows, distinct), rows * each_s)

    flows = [
        flow_with_slots(
            load,
            requests,
            number,
            with_loads(number),
            steps=steps,
            max_rows=max(1.0, min(max_rows, room_rows(number))),
        )
        for number in numbers
        if number == 1 or (number <= enough and room_rows(number) >= 1)
    ]
    best = max(one.rows_per_s for one in flows)
    return next(one for one in flows if one.rows_per_s >= (1 - _NEGLIGIBLE) * best)
