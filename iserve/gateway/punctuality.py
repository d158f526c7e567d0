"""Gateway's data on requests that may be late: prompts by their bytes, workers by their URL, its clock.

For a deployment with a ``Punctuality`` in its route; ``planner.refusing`` decides what is rejected.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from iserve.gateway.sse import Usage
from iserve.route_table import Punctuality, Route
from planner.refusing import Flight, Judge, Late, Ratio

__all__ = ["Punctual"]

_TOKENS_PER_BYTE = 0.25  # of a request's body, until a worker has counted


class Punctual:
    """The requests of one deployment that are at its workers, and their judge."""

    def __init__(self, told: Punctuality, longest_tokens: int) -> None:
        self._told, self._longest_tokens = told, longest_tokens
        self._judge = Judge(told.slo, told.pace)
        self._at: dict[str, dict[Flight, None]] = {}  # by URL
        self._density = Ratio()  # tokens of a prompt, over what its bytes were taken for

    @classmethod
    def of(cls, route: Route, before: Punctual | None = None) -> Punctual | None:
        """Return the judge of ``route``; ``before`` goes on where the route says nothing new."""
        told = route.punctuality
        if told is None or (before is not None and before._told == told):
            return before if told is not None else None
        return cls(told, route.max_context_tokens)

    def flight(self, body_bytes: int, longest_answer: int | None, *, streams: bool) -> Flight:
        """Return a request that has arrived now."""
        tokens = min(body_bytes * _TOKENS_PER_BYTE * self._density.mean, self._longest_tokens)
        answer = None if longest_answer is None else min(longest_answer, self._longest_tokens)
        flight = self._judge.flight(time.monotonic(), max(1.0, tokens), answer, streams=streams)
        flight.bytes = body_bytes
        return flight

    def joins(self, flight: Flight, url: str) -> Late | None:
        """Return how late it would be at that worker, which has room; None: in time."""
        return self._judge.joins(flight, self._running(url), time.monotonic())

    def waits(self, flight: Flight, urls: Sequence[str], before: Iterable[Flight]) -> Late | None:
        """Return how late it would be behind ``before``, which wait for a worker of ``urls``; None: in time."""
        return self._judge.waits(flight, [self._running(url) for url in urls], before, time.monotonic())

    def counts_anew(self, flight: Flight) -> None:
        """Restart the count of its wait: so far no worker could have served it."""
        flight.since_s = time.monotonic()

    def sent(self, flight: Flight, url: str) -> None:
        self._judge.sent(flight, self._running(url), time.monotonic())
        self._at.setdefault(url, {})[flight] = None

    def left(self, flight: Flight, url: str) -> None:
        running = self._at.get(url, {})
        running.pop(flight, None)
        if not running:
            self._at.pop(url, None)

    def came(self, flight: Flight, tokens: int) -> None:
        """Note so many tokens of a stream."""
        self._judge.came(flight, tokens, time.monotonic())

    def ended(self, flight: Flight, usage: Usage | None) -> None:
        """Note that its answer is complete; ``usage`` as far as the worker reports it."""
        self._judge.ended(flight, time.monotonic(), None if usage is None else usage.completion_tokens)
        if usage is not None and usage.prompt_tokens > 0:
            self._density = self._density.seen(usage.prompt_tokens / (flight.bytes * _TOKENS_PER_BYTE))

    def _running(self, url: str) -> Collection[Flight]:
        return self._at.get(url, {}).keys()
