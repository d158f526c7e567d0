"""Continuous batching on a pipeline that keeps as many batches in flight as it has stages.

vLLM and TensorRT-LLM do not wait for a batch to leave the last stage before the first one begins another. The
running sequences are in at most one batch each; a batch that returns takes its sequences' next tokens, and
prompts from the one queue, into its next step. Slots and KV are shared by all batches, so what fits is what
fits without a pipeline. A step whose time is T alone spends ``share * T`` on a stage:

* It enters when the first stage is free: no sooner than the busiest stage's share of the step that entered before.
* It overtakes no other, so all in flight make one step in the time that the longest of their steps takes: a
  *round*. A batch that decodes gets one token while another's long prompt passes through.
* Stages are not equally long: k batches, whose largest share d gives k d > 1, all take k d times as long. The
  stages' work never exceeds the time.

The pipeline has a clock of its own, in rounds; a round's seconds change as batches enter and leave. On it a run of
many decode steps is one event, as in ``continuous``. The pipeline's run as a server lasts until the next batch
enters or returns, so that one event of the cluster is enough, and any worker that shares a GPU slows all of it.
tests/traces/simulator/test_pipelined.py compares it with the same pipeline stage by stage and step by step. A lone
request's chunks follow one another (vLLM has the next one enter while the last is under way).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence, Sized
from dataclasses import replace

from traces.simulator.continuous import AdmissionQueue, ContinuousWorker
from traces.simulator.kv_use import KvMeter
from traces.simulator.requests import Requests
from traces.simulator.step_model import Limits, StepModel
from traces.simulator.workers import Server, Stage

__all__ = ["PipelinedWorker", "UnbatchedPipeline"]


class _Batch:
    """Batch in flight, or an empty one. Times are of the pipeline's clock, but for ``step_s``."""

    __slots__ = ("begun", "end", "of", "step_s")

    def __init__(self, of: ContinuousWorker) -> None:
        self.of = of
        self.begun = self.end = 0.0
        self.step_s = 0.0  # its run's first step alone, a round's worth of its work

    def step(self, clock: float) -> tuple[float, int]:
        """Return when the current step ends, and its number in a run of decode steps."""
        if not self.of.decodes_only:
            return self.end, 1
        rounds, work_s = self.of.step_at(self.done_s(clock))
        return self.begun + work_s / self.step_s, rounds

    def done_s(self, clock: float) -> float:
        """Return the work of its run that is behind it."""
        return (clock - self.begun) * self.step_s


class PipelinedWorker(Server):
    """``len(stages)`` batches at most; with one stage it is ``ContinuousWorker``."""

    __slots__ = (
        "_busiest",
        "_clock",
        "_empty",
        "_flying",
        "_gate",
        "_longest_s",
        "_queue",
        "_returned",
        "_round_s",
        "_until",
    )
    cuts = True

    def __init__(self, name: str, stages: Sequence[Stage], ready_s: float, steps: StepModel, requests: Requests):
        super().__init__(name, stages, ready_s)
        self._empty: list[_Batch] = []
        self._queue, of_each = self._queues(steps.limits)
        batches = [ContinuousWorker(name, stages, ready_s, steps, requests, queue) for queue in of_each]
        for batch in batches:
            batch.kv = None  # its tokens are a part of all
        self.max_batch, self.longest = batches[0].max_batch, batches[0].longest
        self._empty += [_Batch(of) for of in batches]
        self._returned: deque[_Batch] = deque()  # with sequences, before the first stage
        self._flying: list[_Batch] = []  # in the order in which they entered
        self._busiest = max(stage.share for stage in stages)
        self._clock = 0.0  # rounds
        self._until = 0.0  # end of this run
        self._gate = 0.0  # the first stage is free from then on
        self._longest_s = 0.0  # of the steps in flight
        self._round_s = 1.0

    def _queues(self, limits: Limits) -> tuple[AdmissionQueue, Sequence[AdmissionQueue]]:
        """Return the queue that says whether one more request fits, and that of every batch."""
        queue = AdmissionQueue(limits)
        if limits.kv_tokens is not None:
            self.kv = KvMeter(limits.kv_tokens, self.ready_s)
        return queue, [queue] * len(self.stages)

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self.outstanding += 1
        self._queue.waiting.append((row, input_tokens, output_tokens))

    def begin(self) -> float:
        if not self._flying:
            self._clock = self._gate = 0.0  # nothing refers to it: numbers stay small
        while (entering := self._entering()) and self._gate <= self._clock:
            self._enter()
        flying = self._flying
        if not flying:
            return 0.0
        until = self._gate if entering else math.inf
        for batch in flying:
            if batch.end < until:
                until = batch.end
        self._until = until
        crowd = max(1.0, len(flying) * self._busiest)
        self._round_s = self._longest_s * crowd
        self.in_flight = len(flying) / crowd
        return (until - self._clock) * self._round_s

    def _entering(self) -> bool:
        """Return whether a batch would enter now, were the first stage free."""
        return bool(self._returned) or (bool(self._empty) and self._queue.takes_next)

    def _enter(self) -> None:
        batch = self._returned.popleft() if self._returned else self._empty.pop()
        work_s = batch.of.begin()
        step_s = batch.step_s = batch.of.step_s(work_s)
        batch.begun = self._clock
        batch.end = self._clock + work_s / step_s
        self._flying.append(batch)
        self._longest_s = max(self._longest_s, step_s)
        self._gate = self._clock + self._busiest * step_s / self._longest_s

    def finish(self, now_s: float) -> None:
        if self.kv is not None:
            used = self.kv.room_tokens - self._queue.kv_free  # from the admission on, whole answers
            self.kv.add(now_s - self.begun_s, used, used)
        clock = self._clock = self._until
        flying, self._flying, self._longest_s = self._flying, [], 0.0
        for batch in flying:
            if batch.end > clock:
                self._flying.append(batch)
                if batch.step_s > self._longest_s:
                    self._longest_s = batch.step_s
                continue
            batch.of.finish(now_s)
            self.outstanding += batch.of.outstanding  # less those that have left
            batch.of.outstanding = 0
            (self._returned if batch.of.holds else self._empty).append(batch)

    def cut(self, done_s: float) -> float:
        """Return the work of the run, cut short where a new request enters.

        It enters with an empty batch as soon as the first stage is free, or with the batch whose step ends next.
        """
        if self._returned or len(self._queue.waiting) > 1 or not self._queue.takes_next:
            return self.work_s
        clock = self._now(done_s)
        until = max(clock, self._gate) if self._empty else self._cut_the_next(clock)
        if until >= self._until:
            return self.work_s
        self._until = until
        return max(done_s, (until - self._clock) * self._round_s)

    def _cut_the_next(self, clock: float) -> float:
        """Cut the batch whose step ends first, as all are in flight: its run ends there."""
        next_end, next_rounds, found = math.inf, 0, self._flying[0]
        for batch in self._flying:
            end, rounds = batch.step(clock)
            if end < next_end:
                next_end, next_rounds, found = end, rounds, batch
        if found.of.decodes_only and found.of.shorten(next_rounds):
            found.end = next_end
        return found.end

    def _now(self, done_s: float) -> float:
        return self._clock + done_s / self._round_s

    def clear(self) -> tuple[list[int], list[int]]:
        waiting = self.give_back()
        running = [row for batch in self._all() for row in batch.of.clear()[0]]
        return running, waiting

    def give_back(self) -> list[int]:
        waiting = [row for row, _, _ in self._queue.waiting]
        self._queue.waiting.clear()
        self.outstanding -= len(waiting)
        return waiting

    def evict(self, done_s: float) -> list[tuple[int, int, int]]:
        clock, left = self._now(done_s), []
        for batch in self._all():
            left += batch.of.evict(batch.done_s(clock) if batch in self._flying else 0.0)
            batch.of.outstanding = 0
        self.outstanding -= len(left)
        return left

    def _all(self) -> list[_Batch]:
        return [*self._flying, *self._returned, *self._empty]


class UnbatchedPipeline(PipelinedWorker):
    """A request is a batch of its own: nothing is batched, and yet each stage has one.

    Room for the KV of all of them is taken for granted: of p requests a stage holds a p-th of the layers, so
    together no more than what one request holds in all.
    """

    __slots__ = ()

    @property
    def at_once(self) -> int:
        return len(self.stages)

    def _queues(self, limits: Limits) -> tuple[AdmissionQueue, Sequence[AdmissionQueue]]:
        one = replace(limits, max_batch=1, kv_tokens=None)
        whole = _WhileOneIsEmpty(one, self._empty)
        return whole, [AdmissionQueue(one, whole.waiting) for _ in self.stages]


class _WhileOneIsEmpty(AdmissionQueue):
    """Admission queue in which a new request takes an empty batch, and joins none."""

    __slots__ = ("_empty",)

    def __init__(self, limits: Limits, empty: Sized) -> None:
        super().__init__(limits)
        self._empty = empty

    @property
    def takes_next(self) -> bool:
        return bool(self.waiting) and len(self._empty) > 0
