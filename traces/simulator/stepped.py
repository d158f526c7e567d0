"""Continuous batching with a scheduler that is passed in, one step after another.

With the engine's own ``Scheduler`` this is the truth that ``continuous`` must equal, and the way to try another
batching policy: any object that plans steps as :class:`Batcher` says. A step is planned when the one before has
ended, whatever ``StepModel.plans_ahead`` says.

A batcher knows slots and no room for KV. Where ``kv_tokens`` of the limits bounds that, requests reach the batcher
in the order of arrival, each when its prompt and whole answer fit next to the requests that it holds, as
``continuous`` admits them.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from traces.simulator.policy_errors import PolicyFault, ask
from traces.simulator.requests import Requests
from traces.simulator.step_model import Limits, StepModel
from traces.simulator.workers import Server, Stage

__all__ = ["Batcher", "Chunk", "MakeBatcher", "SteppedWorker"]


class Chunk(Protocol):
    """Share of one sequence in a step (``daemon.torch_engine.runtime.scheduler.Work`` is one)."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def start(self) -> int: ...  # its tokens that are cached
    @property
    def num_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...  # it gets its next token


class Batcher(Protocol):
    """Planner of steps: which tokens of which sequences go next. Sequences are known by their request's row."""

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None: ...
    def plan(self) -> Sequence[Chunk]: ...
    def complete(self, plan: Sequence[Chunk]) -> Sequence[int]:
        """Complete a plan that ran: return the rows that had their last token."""
        ...


MakeBatcher: TypeAlias = Callable[[Limits], Batcher]


class SteppedWorker(Server):
    """A run is one step."""

    __slots__ = ("_batcher", "_held", "_kv_free", "_plan", "_requests", "_steps", "_waiting")

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        ready_s: float,
        steps: StepModel,
        requests: Requests,
        batcher: Batcher,
    ):
        super().__init__(name, stages, ready_s)
        self.max_batch = steps.limits.max_batch
        limits = steps.limits
        self.longest = limits.longest
        self._kv_free = sys.maxsize if limits.kv_tokens is None else limits.kv_tokens
        self._steps = steps
        self._requests = requests
        self._batcher = batcher
        self._plan: Sequence[Chunk] = ()
        self._waiting: deque[tuple[int, int, int]] = deque()  # for KV: (row, input, output tokens)
        self._held: dict[int, int] = {}  # by the batcher, in order of arrival: the tokens that a row has KV for

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self.outstanding += 1
        self._waiting.append((row, input_tokens, output_tokens))

    def _hand_over(self) -> None:
        """To the batcher: those who wait, as far as there is KV for them."""
        kept_tokens = self._steps.limits.kept_tokens
        while self._waiting and kept_tokens(sum(self._waiting[0][1:])) <= self._kv_free:
            request = row, *lengths = self._waiting.popleft()
            self._held[row] = kept_tokens(sum(lengths))
            self._kv_free -= self._held[row]
            ask("batching", partial(self._batcher.submit, *request))

    def begin(self) -> float:
        self._hand_over()
        self._plan = ask("batching", self._batcher.plan)
        if self._held and not self._plan:
            raise PolicyFault("batching", f"planned nothing for {len(self._held)} requests")
        prompts, attention = self._requests.input_tokens, self._steps.attention_s
        tokens = sequences = contexts = longest = 0
        attention_s = 0.0
        for chunk in self._plan:
            end = chunk.start + chunk.num_tokens
            if chunk.start >= prompts[chunk.sequence_id]:
                sequences += 1
                contexts += end
                longest = max(longest, end)
            else:
                tokens += chunk.num_tokens
                attention_s += attention[end] - attention[chunk.start]
        mean = self._steps.context(contexts / sequences, longest) if sequences else 0.0
        if tokens:
            return self._steps.mixed_s(tokens, attention_s, sequences, mean)
        return self._steps.decode_s(sequences, mean) if sequences else 0.0

    def finish(self, now_s: float) -> None:
        first_s, last_s, token_s = self._requests.first_s, self._requests.last_s, self._requests.token_s
        for chunk in self._plan:
            if chunk.samples and token_s is not None:
                token_s[chunk.sequence_id].append(now_s)
            if chunk.samples and first_s[chunk.sequence_id] != first_s[chunk.sequence_id]:
                first_s[chunk.sequence_id] = now_s
        for row in ask("batching", lambda: self._batcher.complete(self._plan)):
            last_s[row] = now_s
            self.outstanding -= 1
            self._kv_free += self._held.pop(row)

    def clear(self) -> tuple[list[int], list[int]]:
        """Empty the server and return the running and the waiting rows.

        Sequences that have a token in the step count as running, all the rest as waiting: the scheduler does not
        tell them apart.
        """
        held = [*self._held, *(row for row, _, _ in self._waiting)]
        self._held.clear()
        self._waiting.clear()
        started = {chunk.sequence_id for chunk in self._plan}
        return [row for row in held if row in started], [row for row in held if row not in started]
