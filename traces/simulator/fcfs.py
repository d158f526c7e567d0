"""Service of one request at a time, first come, first served: no batching, as in the paper's evaluation."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from traces.simulator.requests import Requests
from traces.simulator.step_model import StepModel
from traces.simulator.workers import Server, Stage

__all__ = ["FcfsWorker"]


class FcfsWorker(Server):
    """A run is a prompt, then its answer's decode steps. Equals continuous batching with one slot."""

    __slots__ = ("_current", "_first_s", "_last_s", "_prompted", "_requests", "_steps", "_waiting")

    def __init__(self, name: str, stages: Sequence[Stage], ready_s: float, steps: StepModel, requests: Requests):
        super().__init__(name, stages, ready_s)
        self.longest = steps.limits.max_context_tokens
        self._steps = steps
        self._requests = requests
        self._first_s, self._last_s = requests.first_s, requests.last_s
        self._waiting: deque[tuple[int, int, int]] = deque()  # (row, input, output tokens)
        self._current: tuple[int, int, int] | None = None
        self._prompted = False

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self.outstanding += 1
        self._waiting.append((row, input_tokens, output_tokens))

    def begin(self) -> float:
        if self._current is not None:
            _, input_tokens, output_tokens = self._current
            return self._steps.run_s(1, input_tokens + 1, output_tokens - 1)
        if not self._waiting:
            return 0.0
        self._current = self._waiting.popleft()
        self._prompted = False
        return self._steps.prompt_s(self._current[1])

    def finish(self, now_s: float) -> None:
        assert self._current is not None, "a run is of a request"
        row, _, output_tokens = self._current
        if not self._prompted:
            self._first_s[row] = now_s
            self._prompted = True
            if output_tokens > 1:
                return
        self._last_s[row] = now_s
        self._current = None
        self.outstanding -= 1

    def clear(self) -> tuple[list[int], list[int]]:
        running = [] if self._current is None else [self._current[0]]
        waiting = [row for row, _, _ in self._waiting]
        self._current = None
        self._waiting.clear()
        return running, waiting

    def give_back(self) -> list[int]:
        waiting = [row for row, _, _ in self._waiting]
        self._waiting.clear()
        self.outstanding -= len(waiting)
        return waiting
