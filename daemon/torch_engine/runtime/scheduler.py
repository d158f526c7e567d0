"""Continuous batching: the choice of which tokens of which sequences go into the next step.

Pure: counts tokens, knows neither their ids nor torch, a clock or a thread. The engine runs it on real steps and
a simulator can run it on predicted ones.

Policy: first come, first served. A sequence that is admitted holds one of ``max_batch`` slots until it ends.
Within a step the sequences that decode go first (one token each), then prompts in the order of their arrival, cut
to what is left of ``max_batched_tokens``; so a long prompt never stalls the sequences that already run.

Sequences that run are of ``adapter_slots`` adapters at most. One whose adapter finds no slot waits, and later ones
of the base or of adapters that run pass it. After ``_MAX_PASSED`` of the latter only the base passes, which takes
no slot: those that run end, and a slot is free.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fingerprint.errors import BadInputError, ConfigError, UnavailableError

__all__ = ["Demand", "Scheduler", "Work"]

_MAX_PASSED = 32  # sequences of adapters that are admitted before the first that waits


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a new sequence."""

    sequence_id: int  # unique among the sequences that are here
    prompt_tokens: int
    max_tokens: int  # output tokens, at most
    adapter_id: int | None = None  # None: the base alone


@dataclass(frozen=True, slots=True)
class Work:
    """A sequence's share of one step: its tokens at positions ``start`` to ``start + num_tokens - 1``."""

    sequence_id: int
    slot: int
    start: int
    num_tokens: int
    samples: bool  # these are its last known tokens: the step's logits give the next one


@dataclass(slots=True)
class _Sequence:
    demand: Demand
    slot: int = -1
    cached: int = 0  # tokens whose KV is written
    generated: int = 0
    passed: int = 0  # by sequences of adapters, while first in the queue

    @property
    def pending(self) -> int:
        return self.demand.prompt_tokens + self.generated - self.cached


class Scheduler:
    """Queue and slots of one engine. Not thread-safe.

    Use: ``submit`` and ``cancel`` at any time; ``plan``, run it, ``complete`` it, in turns.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_batched_tokens: int,
        max_context_tokens: int,
        max_waiting: int,
        adapter_slots: int = 0,
    ) -> None:
        for name, value in (
            ("max_batch", max_batch),
            ("max_batched_tokens", max_batched_tokens),
            ("max_context_tokens", max_context_tokens),
        ):
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.max_batch = max_batch
        self.max_batched_tokens = max_batched_tokens
        self.max_context_tokens = max_context_tokens
        self.max_waiting = max_waiting
        self.adapter_slots = adapter_slots
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[int, _Sequence] = {}  # in order of admission
        self._free_slots = list(range(max_batch))  # a heap: the lowest first, so that a lone sequence keeps slot 0
        self._ids: set[int] = set()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose KV is held now, over all slots."""
        return sum(sequence.cached for sequence in self._running.values())

    def submit(self, demands: Sequence[Demand]) -> None:
        """Queue all of ``demands`` in this order, or none of them.

        Raises:
            BadInputError: an empty prompt, no output asked for, or more tokens than one slot holds.
            UnavailableError: more than ``max_waiting`` would wait for a slot.
        """
        for demand in demands:
            if demand.prompt_tokens < 1 or demand.max_tokens < 1:
                raise BadInputError("a sequence needs at least one prompt token and one output token")
            if demand.prompt_tokens + demand.max_tokens > self.max_context_tokens:
                raise BadInputError(
                    f"{demand.prompt_tokens} prompt tokens and {demand.max_tokens} output tokens "
                    f"exceed the context of {self.max_context_tokens} tokens"
                )
            assert demand.sequence_id not in self._ids, "sequence ids are unique"
            assert demand.adapter_id is None or self.adapter_slots, "adapters need slots"
        room = self.max_waiting + len(self._free_slots) - len(self._waiting)
        if len(demands) > room:
            raise UnavailableError(
                f"{len(demands)} more would wait, the queue has room for {max(0, room)} "
                f"(limit {self.max_waiting}, {len(self._waiting)} waiting); try again later"
            )
        for demand in demands:
            self._ids.add(demand.sequence_id)
            self._waiting.append(_Sequence(demand))

    def cancel(self, sequence_id: int) -> bool:
        """Forget a sequence, freeing its slot. False if it is not here (any more).

        Safe while a plan runs: ``complete`` skips what has left, and slots are handed out by ``plan`` only.
        """
        if sequence_id not in self._ids:
            return False
        if sequence_id in self._running:
            self._leave(self._running[sequence_id])
        else:
            self._ids.remove(sequence_id)
            self._waiting = deque(s for s in self._waiting if s.demand.sequence_id != sequence_id)
        return True

    def plan(self) -> tuple[Work, ...]:
        """Return the next step, admitting waiting sequences into free slots; empty when there is nothing to do."""
        work = [_work(s, 1) for s in self._running.values() if s.generated]
        budget = self.max_batched_tokens - len(work)
        assert budget >= 0, "each decoder came out of a step that held its last prompt token beside all the others"
        prompts = [s for s in self._running.values() if not s.generated]
        for sequence in prompts:
            if not budget:
                break
            work.append(_work(sequence, min(budget, sequence.pending)))
            budget -= work[-1].num_tokens
        while budget and self._free_slots and (admitted := self._admit()) is not None:
            work.append(_work(admitted, min(budget, admitted.pending)))
            budget -= work[-1].num_tokens
        return tuple(work)

    def complete(self, plan: Sequence[Work], ended: Collection[int] = ()) -> tuple[int, ...]:
        """Account for a plan that ran. Each work with ``samples`` has given its sequence one more token.

        Args:
            plan: what :meth:`plan` returned last.
            ended: sequences whose new token is their last (end of sequence).

        Returns:
            The sequences not in ``ended`` that have reached their ``max_tokens``; both kinds have left.
        """
        at_length = []
        for work in plan:
            sequence = self._running.get(work.sequence_id)
            if sequence is None:  # cancelled while the step ran
                continue
            sequence.cached += work.num_tokens
            if not work.samples:
                continue
            sequence.generated += 1
            if work.sequence_id in ended:
                self._leave(sequence)
            elif sequence.generated == sequence.demand.max_tokens:
                at_length.append(work.sequence_id)
                self._leave(sequence)
        return tuple(at_length)

    def _admit(self) -> _Sequence | None:
        """Admit the first waiting sequence that may run; None: there is none."""
        active = {sequence.demand.adapter_id for sequence in self._running.values()} - {None}
        allowed = active | {None} if len(active) >= self.adapter_slots else None
        place = self._first_of(allowed)
        if place and self._waiting[0].passed >= _MAX_PASSED:
            place = self._first_of({None})
        if place is None:
            return None
        sequence = self._waiting[place]
        del self._waiting[place]
        if place and sequence.demand.adapter_id is not None:
            self._waiting[0].passed += 1
        sequence.slot = heapq.heappop(self._free_slots)
        self._running[sequence.demand.sequence_id] = sequence
        return sequence

    def _first_of(self, adapters: Collection[int | None] | None) -> int | None:
        """Return the first place in the queue of a sequence of ``adapters``, or of any; None: there is none."""
        each = enumerate(self._waiting)
        return next((place for place, s in each if adapters is None or s.demand.adapter_id in adapters), None)

    def _leave(self, sequence: _Sequence) -> None:
        del self._running[sequence.demand.sequence_id]
        self._ids.remove(sequence.demand.sequence_id)
        heapq.heappush(self._free_slots, sequence.slot)


def _work(sequence: _Sequence, num_tokens: int) -> Work:
    return Work(
        sequence.demand.sequence_id,
        sequence.slot,
        sequence.cached,
        num_tokens,
        samples=num_tokens == sequence.pending,
    )
