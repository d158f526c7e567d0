"""The embedded engine's own scheduler on a clock that no machine keeps: every step takes a known time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from daemon.torch_engine.runtime.scheduler import Demand, Scheduler, Work
from fingerprint.config import Workload
from traces.outcomes import Failure, Floats, Outcomes
from traces.request import Request
from traces.simulator.step_model import Limits

__all__ = ["FixedStepWorker"]

# Seconds of a step, of each of its tokens, and of each token that one of them looks at.
_STEP_S, _TOKEN_S, _CONTEXT_S = 2e-3, 4e-5, 2e-7
_ANY_NUMBER = 10**9


@dataclass(frozen=True)
class FixedStepWorker:
    """A worker of ``limits`` on which a request takes ``beside_s`` next to its steps."""

    limits: Limits
    beside_s: float = 3e-3
    pace: float = 1.0  # how many times as long all of it takes

    def serve(self, requests: Sequence[Request]) -> Outcomes:
        """Return what becomes of ``requests``, each sent when it arrives."""
        first_s, last_s, given = self._run(requests)
        arrival_s = np.array([request.arrival_s for request in requests])
        input_tokens = np.array([request.input_tokens for request in requests])
        return Outcomes(
            deployments=("m",),
            deployment=np.zeros(len(requests), int),
            arrival_s=arrival_s,
            scheduled_s=arrival_s,
            sent_s=arrival_s,
            first_token_s=first_s + self.pace * self.beside_s,
            last_token_s=last_s + self.pace * self.beside_s,
            asked_input_tokens=input_tokens,
            asked_output_tokens=np.array([request.output_tokens for request in requests]),
            input_tokens=input_tokens,
            output_tokens=given,
            failure=np.full(len(requests), Failure.NONE),
        )

    def burst_s(self, work: Workload) -> float:
        """Return the seconds until the last of ``work.batch`` requests, sent at once, has its last token."""
        found = self.serve([Request(0.0, work.input_tokens, work.output_tokens)] * work.batch)
        return float(found.last_token_s.max())

    def _run(self, requests: Sequence[Request]) -> tuple[Floats, Floats, np.ndarray]:
        """Return when each request's first and last token arrived, and how many it got."""
        scheduler = Scheduler(
            max_batch=self.limits.max_batch,
            max_batched_tokens=self.limits.max_batched_tokens,
            max_context_tokens=self.limits.max_context_tokens,
            max_waiting=_ANY_NUMBER,
        )
        first_s, last_s = (np.full(len(requests), np.nan) for _ in range(2))
        given = np.zeros(len(requests), int)
        due = deque(sorted(enumerate(requests), key=lambda one: one[1].arrival_s))
        now_s = 0.0
        while due or scheduler.has_work:
            if not scheduler.has_work:
                now_s = max(now_s, due[0][1].arrival_s)
            while due and due[0][1].arrival_s <= now_s:
                row, request = due.popleft()
                scheduler.submit([Demand(row, request.input_tokens, request.output_tokens)])
            plan = scheduler.plan()
            now_s += self._step_s(plan)
            rows = [work.sequence_id for work in plan if work.samples]
            first_s[rows] = np.where(given[rows], first_s[rows], now_s)
            last_s[rows] = now_s
            given[rows] += 1
            scheduler.complete(plan)
        return first_s, last_s, given

    def _step_s(self, plan: Sequence[Work]) -> float:
        tokens = sum(work.num_tokens for work in plan)
        looked_at = sum(work.num_tokens * (work.start + (work.num_tokens + 1) / 2) for work in plan)
        return self.pace * (_STEP_S + _TOKEN_S * tokens + _CONTEXT_S * looked_at)
