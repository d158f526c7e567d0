"""Continuous batching in an engine that admits by prompts and preempts when its KV cache is full.

vLLM's scheduler, as far as it matters for time (``vllm.v1.core.sched.scheduler``, first come first served):

* A request is admitted when a slot is free and the KV of its prompt fits (``scheduler_reserve_full_isl``, on by
  default); its answer takes a token of KV with every step.
* Running sequences come first. While a step's tokens do not fit, the most recently admitted sequence is preempted:
  its KV is freed, it goes to the head of the queue, and in that step no request is admitted.
* A preempted sequence is admitted again like a request whose prompt is all of its tokens so far: these are
  computed again in chunks, and the next token of its answer follows.

A run of decode steps ends no later than the last step whose tokens fit. Without pressure on the KV cache the times
are those of ``continuous``, whatever is reserved there.

Simplified:

* KV is counted in tokens, not in blocks (of 16 tokens, whose last one is half empty on average).
* A prompt takes all of its KV when it is admitted, not chunk by chunk.
* A preemption takes effect in the step that does not fit; an engine that plans ahead decides one step sooner.
* Blocks that a preempted sequence has freed are never found again by prefix caching; no watermark is kept free.
* Pipelines do not preempt: they reserve whole answers (``pipelined``).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from traces.simulator.continuous import AdmissionQueue, ContinuousWorker
from traces.simulator.requests import Requests
from traces.simulator.step_model import Limits, StepModel
from traces.simulator.workers import Stage

__all__ = ["PreemptingWorker", "PromptQueue"]


class PromptQueue(AdmissionQueue):
    """Admission queue that asks for the KV of a prompt alone."""

    __slots__ = ("closed", "spare_tokens")

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.closed = False  # in a step in which a sequence was preempted
        self.spare_tokens = 0  # that running sequences take before the request could begin

    @property
    def takes_next(self) -> bool:
        if self.closed or not (self.waiting and self.free):
            return False
        return self._limits.kept_tokens(self.waiting[0][1]) + self.spare_tokens <= self.kv_free

    def claimed_tokens(self, input_tokens: int, output_tokens: int) -> int:
        return input_tokens


class PreemptingWorker(ContinuousWorker):
    """Continuous batching by the module docstring. ``kv_tokens`` of the limits is never exceeded."""

    __slots__ = ("_admitted_rows", "_growing", "_preempted", "_prompt_queue", "_window")

    def __init__(
        self, name: str, stages: Sequence[Stage], ready_s: float, steps: StepModel, requests: Requests
    ) -> None:
        self._prompt_queue = PromptQueue(steps.limits)
        super().__init__(name, stages, ready_s, steps, requests, self._prompt_queue)
        self._window = steps.limits.kv_window
        self._growing = 0  # tokens that sequences take in the first step of a run
        self._admitted_rows: dict[int, None] = {}  # of running sequences, in the order of their admission
        self._preempted: dict[int, tuple[int, int]] = {}  # row that waits again -> tokens so far, and to come

    def begin(self) -> float:
        queue = self._prompt_queue
        queue.closed, queue.spare_tokens = False, 0
        growth = self._growth(1)
        while growth > queue.kv_free:
            self._preempt()
            growth = self._growth(1)
            queue.closed = True
        queue.kv_free -= growth
        self._growing = growth
        return super().begin()

    def _admit_all(self) -> None:
        """Admit requests to the step after the one that begins; running sequences take their tokens first."""
        self._prompt_queue.spare_tokens = len(self._decoders) + len(self._chunks)
        super()._admit_all()

    def _admitted(self) -> list[int]:
        prompt = super()._admitted()
        self._admitted_rows[prompt[0]] = None
        self._preempted.pop(prompt[0], None)
        return prompt

    def _rounds_left(self) -> int:
        rounds = super()._rounds_left()
        growing = self._growing
        return min(rounds, 1 + self._queue.kv_free // growing) if growing else rounds

    def _growth(self, steps: int) -> int:
        """Return the tokens of KV that the sequences take in ``steps`` decode steps from the current round on."""
        window = self._window
        if window is None:
            return len(self._decoders) * steps
        here = self._round
        return sum(
            max(0, min(steps, window - (cached - last_round + here))) for last_round, _, cached in self._decoders
        )

    def finish(self, now_s: float) -> None:
        if self._rounds > 1 and not self._chunks:  # the first step's tokens are taken already
            self._queue.kv_free -= self._growth(self._rounds) - self._growing
        super().finish(now_s)

    def _leave(self, row: int, kv_tokens: int, now_s: float) -> None:
        del self._admitted_rows[row]
        super()._leave(row, kv_tokens - 1, now_s)  # the last token of an answer is never cached

    def _preempt(self) -> None:
        """Preempt the most recently admitted sequence."""
        queue, meter = self._queue, self.kv
        assert meter is not None
        row, _ = self._admitted_rows.popitem()
        if self._prompts:  # they are admitted after every sequence that decodes
            _, input_tokens, output_tokens, cached = self._prompts.pop()
            queue.leave(input_tokens)
        else:
            last_round, _, cached_by_then = self._take_out(row)
            output_tokens = last_round - self._round
            cached = cached_by_then - output_tokens
            input_tokens = cached + 1
            self._cached -= cached
            self._longest = None
            queue.leave(cached)
            if self._tokens is not None:
                self._tokens.leaves(row)
        self._preempted[row] = input_tokens, output_tokens
        queue.waiting.appendleft((row, input_tokens, output_tokens))
        meter.preemptions += 1
        meter.recomputed_tokens += cached

    def _take_out(self, row: int) -> tuple[int, int, int]:
        """Take a sequence that decodes out of the heap, where the latest is often near the end."""
        decoders = self._decoders
        at = len(decoders) - 1
        while decoders[at][1] != row:
            at -= 1
        found, last = decoders[at], decoders.pop()
        if found is not last:
            decoders[at] = last
            heapq.heapify(decoders)
        return found

    def clear(self) -> tuple[list[int], list[int]]:
        """Empty the server; a preempted request has begun, and counts as running."""
        running, waiting = super().clear()
        begun, self._preempted = self._preempted, {}
        self._admitted_rows.clear()
        return [*running, *begun], [row for row in waiting if row not in begun]

    def give_back(self) -> list[int]:
        """Return the waiting rows; preempted requests stay, and end here."""
        waiting, queue = super().give_back(), self._queue
        begun = self._preempted
        queue.waiting.extend((row, *begun[row]) for row in waiting if row in begun)
        self.outstanding += len(queue.waiting)
        return [row for row in waiting if row not in begun]

    def evict(self, done_s: float) -> list[tuple[int, int, int]]:
        left = super().evict(done_s)
        left += [(row, *tokens) for row, tokens in self._preempted.items()]
        self.outstanding -= len(self._preempted)
        self._preempted.clear()
        self._queue.waiting.clear()
        return left
