"""Gateway's side of admission control: prompts by their bytes, workers by their URL, its clock.

For a deployment with an ``AdmissionPolicy`` in its route; ``planner.admission`` decides what is rejected.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence

from iserve.gateway.sse import Usage
from iserve.route_table import Route
from planner.admission import AdmissionController, AdmissionPolicy, InFlightRequest, LearnedRatio, Rejection
from planner.pending_loads import LoadsAhead

__all__ = ["GatewayAdmission"]

_TOKENS_PER_BYTE = 0.25  # of a request's body, until a worker has counted


class GatewayAdmission:
    """The requests of one deployment that are at its workers, and its admission controller."""

    def __init__(self, policy: AdmissionPolicy, longest_tokens: int) -> None:
        self._policy, self._longest_tokens = policy, longest_tokens
        self._controller = AdmissionController(policy)
        self._running: dict[str, dict[InFlightRequest, None]] = {}  # by URL
        self._density = LearnedRatio()  # tokens of a prompt, over what its bytes were taken for

    @classmethod
    def of(cls, route: Route, before: GatewayAdmission | None = None) -> GatewayAdmission | None:
        """Return the admission of ``route``; ``before`` goes on where the route's policy is the same."""
        if route.admission is None:
            return None
        if before is not None and before._policy == route.admission:
            return before
        return cls(route.admission, route.max_context_tokens)

    def new_request(self, body_bytes: int, longest_answer: int | None, *, is_streamed: bool) -> InFlightRequest:
        """Return a request that has arrived now."""
        tokens = min(body_bytes * _TOKENS_PER_BYTE * self._density.mean, self._longest_tokens)
        answer = None if longest_answer is None else min(longest_answer, self._longest_tokens)
        now_s = time.monotonic()
        request = self._controller.new_request(now_s, max(1.0, tokens), answer, is_streamed=is_streamed)
        request.body_bytes = body_bytes
        return request

    def check_start(self, request: InFlightRequest, url: str, loads: LoadsAhead | None = None) -> Rejection | None:
        """Judge a request that would be sent to that worker, which has room, and wait for ``loads`` there; None:
        in time.
        """
        return self._controller.check_start(request, self._at(url), time.monotonic(), loads)

    def check_queue(
        self,
        request: InFlightRequest,
        urls: Sequence[str],
        before: Iterable[InFlightRequest],
        loads: LoadsAhead | None = None,
    ) -> Rejection | None:
        """Judge a request behind ``before``, which wait for a worker of ``urls``; None: in time."""
        running = [self._at(url) for url in urls]
        return self._controller.check_queue(request, running, before, time.monotonic(), loads)

    def restart_wait(self, request: InFlightRequest) -> None:
        """Count its wait from now on: so far no worker could have served it."""
        request.arrived_s = time.monotonic()

    def record_start(self, request: InFlightRequest, url: str, loads: LoadsAhead | None = None) -> None:
        self._controller.record_start(request, self._at(url), time.monotonic(), loads)
        self._running.setdefault(url, {})[request] = None

    def record_loaded(self, request: InFlightRequest, url: str) -> None:
        """Record that its worker has its variant."""
        rest = [one for one in self._at(url) if one is not request]
        self._controller.record_loaded(request, rest, time.monotonic())

    def record_load(self, took_s: float) -> None:
        """Record the time of one load, for which any number of requests have waited."""
        self._controller.record_load(took_s)

    def record_leave(self, request: InFlightRequest, url: str) -> None:
        running = self._running.get(url, {})
        running.pop(request, None)
        if not running:
            self._running.pop(url, None)

    def record_tokens(self, request: InFlightRequest, tokens: int) -> None:
        """Record so many tokens of a stream."""
        self._controller.record_tokens(request, tokens, time.monotonic())

    def record_end(self, request: InFlightRequest, usage: Usage | None) -> None:
        """Record that its answer is complete; ``usage`` as far as the worker reports it."""
        tokens = None if usage is None else usage.completion_tokens
        self._controller.record_end(request, time.monotonic(), tokens)
        if usage is not None and usage.prompt_tokens > 0:
            self._density = self._density.updated(usage.prompt_tokens / (request.body_bytes * _TOKENS_PER_BYTE))

    def _at(self, url: str) -> Collection[InFlightRequest]:
        return self._running.get(url, {}).keys()
