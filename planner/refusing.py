"""Admission control of one deployment: rejects requests forecast to be late, and learns how forecasts err.

A request is *late* where its forecast (``planner.lateness``) exceeds a limit of the SLO. It is judged when it
comes, by what stands before it, and once more when its turn comes, by what it has waited. Who finds an idle
replica on coming is never refused: nobody slows it, it costs nobody who is there, and if the forecast says that
it cannot keep its limits even so, serving it is how the forecast is found out. So there is no state of the judge,
however wrong its times, in which an idle deployment refuses.

Five ratios are learned from what is served, each an exponential mean that begins at what the plan says and
stays within bounds: what prompts and steps take, how long answers get (of ``max_tokens``, which may be a bound
that none comes near; of the planned length where nobody says one), and what whole requests take by their forecast.
Of the last the mean is not enough: under overload the queue grows until forecasts are just within the limit, and
then half of the accepted would be late. It is taken with twice its mean deviation, as TCP's retransmission timer
does (Jacobson 1988). When its turn has come a request has its wait behind it, and is judged by the forecast
itself.

Times are seconds of the caller's clock. Used by the gateway on a real one and by the simulator on its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.intent import Slo
from planner.lateness import Asked, Forecast, Pace, Under, forecast, wait_s

__all__ = ["Flight", "Judge", "Late", "Ratio"]

_FARTHEST = 8.0  # from what the plan says, either way
_LARGEST_BOUND = 4096.0  # over what an answer gets: some clients give one bound whatever they ask
_SLIP_LOW, _SLIP_HIGH = 0.5, 2.0
_OLDEST = 1 / 16  # weight of the latest, once many have been seen
_AT_ONCE_S = 0.05  # who has waited no longer comes now
_ROUNDING_S = 1e-9


class Ratio(NamedTuple):
    """Ratio of what is seen to what was expected: mean, mean deviation, and count (the plan counts as one)."""

    mean: float = 1.0
    deviation: float = 0.0
    number: int = 1

    def seen(self, value: float, farthest: float = _FARTHEST) -> Ratio:
        """Return the average updated with one more observation."""
        value = min(max(value, 1 / farthest), farthest)
        weight = max(_OLDEST, 1 / (self.number + 1))
        error = value - self.mean
        deviation = self.deviation + weight * (abs(error) - self.deviation)
        return Ratio(self.mean + weight * error, deviation, self.number + 1)

    @property
    def high(self) -> float:
        """Return a ratio that few exceed."""
        return self.mean + 2 * self.deviation


class Late(NamedTuple):
    """Reason why a request is rejected."""

    limit: str  # "ttft" | "tpot" | "e2e", as an SLO is written
    forecast_s: float  # what it would take, its wait so far included
    limit_s: float
    alone: bool  # it would be late with nobody before it
    retry_s: float  # from now, until it is likely to be taken, should nobody else come


@dataclass(slots=True, eq=False)
class Flight:
    """Request from its arrival to its end, as far as it is known."""

    input_tokens: float
    output_tokens: float  # the most that it may get, or the planned length
    bounded: bool  # the former
    streams: bool  # its tokens are seen as they come
    since_s: float  # its wait counts from then on
    sent_s: float | None = None
    first_s: float | None = None
    tokens: int = 0  # seen
    bytes: int = 0  # that it came in, for who judges a prompt by them
    expected: Forecast | None = None  # by the plan's own times, when it was sent
    promised: tuple[str, float] | None = None  # when it came: the limit that was nearest, and the forecast of that


class Judge:
    """Admission controller of one deployment.

    Args:
        slo: what is late.
        pace: of a replica, by the plan.
    """

    def __init__(self, slo: Slo, pace: Pace) -> None:
        self.slo, self.pace = slo, pace
        self._prompts, self._steps, self._slip = Ratio(), Ratio(), Ratio()
        self._filled, self._length = Ratio(), Ratio()
        self._now = pace  # as it is seen to be

    def flight(
        self, now_s: float, input_tokens: float, max_tokens: int | None = None, *, streams: bool = True
    ) -> Flight:
        """A request that comes now."""
        output_tokens = self.pace.output_tokens if max_tokens is None else max(1, max_tokens)
        return Flight(input_tokens, output_tokens, max_tokens is not None, streams, now_s)

    def joins(self, flight: Flight, beside: Collection[Flight], now_s: float) -> Late | None:
        """Judge one that would begin now beside others; None: it keeps its limits, or finds nobody there."""
        under = self._under(beside, now_s)
        told = forecast(self._now, under, self._asked(flight))
        late = self._late(flight, told, now_s)
        if late is None or (not beside and now_s - flight.since_s <= _AT_ONCE_S):
            return None
        return late._replace(retry_s=self._retry_s(late, [under], ()))

    def waits(
        self, flight: Flight, replicas: Sequence[Collection[Flight]], waiting: Iterable[Flight], now_s: float
    ) -> Late | None:
        """Judge one that would wait behind ``waiting`` for a slot of ``replicas``; there is at least one."""
        under, line = [self._under(running, now_s) for running in replicas], [self._asked(one) for one in waiting]
        after_s, _ = wait_s(self._now, under, line)
        full = [Under(0.0, 1.0)] * (self.pace.slots - 1)
        late = self._late(flight, forecast(self._now, full, self._asked(flight), after_s), now_s)
        return None if late is None else late._replace(retry_s=self._retry_s(late, under, line))

    def sent(self, flight: Flight, beside: Collection[Flight], now_s: float) -> None:
        """Record that ``flight`` begins next to ``beside``, or begins anew."""
        flight.sent_s, flight.first_s, flight.tokens = now_s, None, 0
        flight.expected = forecast(
            self.pace, self._under(beside, now_s), Asked(flight.input_tokens, flight.output_tokens)
        )

    def came(self, flight: Flight, tokens: int, now_s: float) -> None:
        """So many more tokens."""
        flight.tokens += max(0, tokens)
        if flight.first_s is None and tokens > 0:
            flight.first_s = now_s
            if flight.expected is not None and flight.sent_s is not None:
                self._prompts = self._prompts.seen((now_s - flight.sent_s) / flight.expected.first_s)
                self._learned()

    def ended(self, flight: Flight, now_s: float, tokens: int | None = None) -> None:
        """Record that the answer of ``flight`` is whole, and learn from it.

        Args:
            tokens: of it, where that is known; None: as many as were seen.
        """
        count = flight.tokens if tokens is None else tokens
        if count < 1 or flight.sent_s is None or flight.expected is None:
            return
        began_s = flight.first_s
        if began_s is None:
            began_s = min(now_s, flight.sent_s + flight.expected.first_s * self._prompts.mean)
        took_s = {"ttft": began_s - flight.since_s, "e2e": now_s - flight.since_s}
        if count > 1:
            took_s["tpot"] = (now_s - began_s) / (count - 1)
            self._steps = self._steps.seen(took_s["tpot"] / flight.expected.step_s)
        if flight.promised is not None and flight.promised[0] in took_s:
            limit, promised_s = flight.promised
            self._slip = self._slip.seen(took_s[limit] / promised_s)
        share = count / flight.output_tokens
        if flight.bounded:
            self._filled = self._filled.seen(share, _LARGEST_BOUND)
        else:
            self._length = self._length.seen(share)
        self._learned()

    def _learned(self) -> None:
        self._now = self.pace.slowed(self._prompts.mean, self._steps.mean)

    def _expected_tokens(self, flight: Flight) -> float:
        if flight.bounded:
            return max(1.0, flight.output_tokens * min(1.0, self._filled.mean))
        return max(1.0, flight.output_tokens * self._length.mean)

    def _asked(self, flight: Flight) -> Asked:
        return Asked(flight.input_tokens, self._expected_tokens(flight))

    def _under(self, running: Collection[Flight], now_s: float) -> list[Under]:
        """Return the work left of each request: as seen, or as the time that it has run says."""
        step_s = self._now.step_s(len(running))
        left = []
        for one in running:
            expected = self._expected_tokens(one)
            if one.tokens:
                left.append(Under(0.0, max(1.0, expected - one.tokens)))
                continue
            ran_s = 0.0 if one.sent_s is None else now_s - one.sent_s
            prompt_s = self._now.prompt_s(one.input_tokens)
            if one.streams or ran_s < prompt_s:
                to_come = one.input_tokens * max(0.0, 1 - ran_s / prompt_s)
                left.append(Under(to_come, expected))
            else:
                left.append(Under(0.0, max(1.0, expected - 1 - (ran_s - prompt_s) / step_s)))
        return left

    def _late(self, flight: Flight, told: Forecast, now_s: float) -> Late | None:
        """The limit that it misses by most. What it is promised when it comes is remembered."""
        waited_s, limits = now_s - flight.since_s, self._limits(flight)
        if flight.promised is None:
            takes = _takes(told, waited_s)
            nearest = max(limits, key=lambda name: takes[name] / limits[name], default=None)
            flight.promised = None if nearest is None else (nearest, takes[nearest])
        slip = 1.0 if waited_s > _AT_ONCE_S else min(max(self._slip.high, _SLIP_LOW), _SLIP_HIGH)
        takes = _takes(Forecast(told.first_s * slip, told.step_s * slip, told.end_s * slip), waited_s)
        name = max(limits, key=lambda name: takes[name] / limits[name], default=None)
        if name is None or takes[name] <= limits[name] + _ROUNDING_S:
            return None
        alone = _takes(forecast(self._now, (), self._asked(flight)), 0.0)
        return Late(name, takes[name], limits[name], alone[name] > limits[name] + _ROUNDING_S, 0.0)

    def _limits(self, flight: Flight) -> dict[str, float]:
        """An answer of one token has no TPOT."""
        slo = self.slo
        limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s if flight.output_tokens > 1 else None, "e2e": slo.e2e_s}
        return {name: limit_s for name, limit_s in limits.items() if limit_s is not None}

    def _retry_s(self, late: Late, replicas: Sequence[Sequence[Under]], line: Sequence[Asked]) -> float:
        """Return the time for the queue to move on by the lateness; an idle replica rejects nothing."""
        _, empty_s = wait_s(self._now, replicas, line)
        return empty_s if late.alone or late.limit == "tpot" else min(late.forecast_s - late.limit_s, empty_s)


def _takes(told: Forecast, waited_s: float) -> dict[str, float]:
    """Return the times by the names that an SLO has for them."""
    return {"ttft": waited_s + told.first_s, "tpot": told.step_s, "e2e": waited_s + told.end_s}
