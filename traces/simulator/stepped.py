"""Continuous batching with a scheduler that is handed in, one step after another.

With the engine's own ``Scheduler`` this is the truth that ``continuous`` must equal, and the way to try another
batching policy: anything that plans steps as :class:`Batcher` says. A step is planned when the one before has
ended, whatever ``StepModel.plans_ahead`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from traces.simulator.faults import PolicyFault, ask
from traces.simulator.requests import Requests
from traces.simulator.servers import Server, Stage
from traces.simulator.step_model import Limits, StepModel

__all__ = ["Batcher", "Chunk", "MakeBatcher", "SteppedWorker"]


class Chunk(Protocol):
    """One sequence's share of a step (``daemon.torch_engine.scheduler.Work`` is one)."""

    @property
    def sequence_id(self) -> int: ...
    @property
    def start(self) -> int: ...  # its tokens that are cached
    @property
    def num_tokens(self) -> int: ...
    @property
    def samples(self) -> bool: ...  # it gets its next token


class Batcher(Protocol):
    """Which tokens of which sequences go into the next step. Sequences are known by their request's row."""

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None: ...
    def plan(self) -> Sequence[Chunk]: ...
    def complete(self, plan: Sequence[Chunk]) -> Sequence[int]:
        """The plan ran: the rows that had their last token."""
        ...


MakeBatcher: TypeAlias = Callable[[Limits], Batcher]


class SteppedWorker(Server):
    """A run is one step."""

    __slots__ = ("_batcher", "_held", "_plan", "_requests", "_steps")

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
        self.longest = steps.limits.max_context_tokens
        self._steps = steps
        self._requests = requests
        self._batcher = batcher
        self._plan: Sequence[Chunk] = ()
        self._held: dict[int, None] = {}  # in order of arrival

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self.outstanding += 1
        self._held[row] = None
        ask("batching", lambda: self._batcher.submit(row, input_tokens, output_tokens))

    def begin(self) -> float:
        self._plan = ask("batching", self._batcher.plan)
        if self._held and not self._plan:
            raise PolicyFault("batching", f"planned nothing for {len(self._held)} requests")
        prompts, attention = self._requests.input_tokens, self._steps.attention_s
        tokens = sequences = contexts = 0
        attention_s = 0.0
        for chunk in self._plan:
            end = chunk.start + chunk.num_tokens
            if chunk.start >= prompts[chunk.sequence_id]:
                sequences += 1
                contexts += end
            else:
                tokens += chunk.num_tokens
                attention_s += attention[end] - attention[chunk.start]
        mean = contexts / sequences if sequences else 0.0
        if tokens:
            return self._steps.mixed_s(tokens, attention_s, sequences, mean)
        return self._steps.decode_s(sequences, mean) if sequences else 0.0

    def finish(self, now_s: float) -> None:
        first_s, last_s = self._requests.first_s, self._requests.last_s
        for chunk in self._plan:
            if chunk.samples and first_s[chunk.sequence_id] != first_s[chunk.sequence_id]:
                first_s[chunk.sequence_id] = now_s
        for row in ask("batching", lambda: self._batcher.complete(self._plan)):
            last_s[row] = now_s
            self.outstanding -= 1
            del self._held[row]

    def clear(self) -> tuple[list[int], list[int]]:
        """Those that have a token run, the others count as waiting: the scheduler does not tell them apart."""
        held, self._held = list(self._held), {}
        started = {chunk.sequence_id for chunk in self._plan}
        return [row for row in held if row in started], [row for row in held if row not in started]
