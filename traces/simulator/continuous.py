"""Continuous batching with chunked prefill, many steps at once.

The policy is that of ``daemon.torch_engine.runtime.scheduler`` (and, of vLLM's, the part that matters for time):
every sequence that decodes gets one token of a step, then prompts in the order of their arrival are cut to what is
left of ``max_batched_tokens``, and waiting ones are admitted into free slots. While no prompt is under way and
none can be admitted, every step is alike but for one token more of context: such a stretch is one run,
whose length is a closed sum. A request that can be admitted cuts it short at the end of the step it arrives in.
``stepped`` runs the engine's own scheduler step by step; both give the same times
(tests/traces/simulator/test_continuous.py).

Where the steps say so (``StepModel.plans_ahead``), the content of a step is settled when the one before begins: a
request that arrives meanwhile, or waits for a slot that the one before frees, is in the step after it. A worker
that has nothing to do begins at once.

Beyond the slots, each of which has the states of a sequence too, ``kv_tokens`` of the limits bounds admission: a
request waits, first in the queue, until what is kept of its prompt and its whole answer fits next to the running
ones, as in the embedded engine and in TensorRT-LLM (launched with ``GUARANTEED_NO_EVICT``). vLLM admits by
prompts, and preempts (``preempting``).
Queue, slots and KV are a :class:`AdmissionQueue`, which the batches of a pipeline share (``pipelined``).
"""

from __future__ import annotations

import heapq
import sys
from collections import deque
from collections.abc import Iterator, Sequence

from traces.simulator.kv_use import KvMeter
from traces.simulator.prefix_cache import PrefixCache
from traces.simulator.requests import Requests
from traces.simulator.step_model import Limits, StepModel
from traces.simulator.token_times import TokenTimes
from traces.simulator.workers import Server, Stage

__all__ = ["AdmissionQueue", "ContinuousWorker"]


class AdmissionQueue:
    """Waiting requests, and the slots and tokens of KV that are free for them."""

    __slots__ = ("_limits", "free", "kv_free", "waiting")

    def __init__(self, limits: Limits, waiting: deque[tuple[int, int, int]] | None = None) -> None:
        self.waiting = deque() if waiting is None else waiting  # (row, input, output tokens)
        self._limits = limits
        self.free = limits.max_batch
        self.kv_free = sys.maxsize if limits.kv_tokens is None else limits.kv_tokens

    @property
    def takes_next(self) -> bool:
        """True when the first waiting request fits."""
        if not (self.waiting and self.free):
            return False
        _, input_tokens, output_tokens = self.waiting[0]
        return self._limits.kept_tokens(input_tokens + output_tokens) <= self.kv_free

    def claimed_tokens(self, input_tokens: int, output_tokens: int) -> int:
        """Return the tokens of a request that take their KV when it is admitted."""
        return input_tokens + output_tokens

    def take(self, tokens: int) -> None:
        """Take a slot and the KV that ``tokens`` keep."""
        self.free -= 1
        self.kv_free -= self._limits.kept_tokens(tokens)

    def leave(self, tokens: int) -> None:
        """Free a slot and the KV that ``tokens`` keep."""
        self.free += 1
        self.kv_free += self._limits.kept_tokens(tokens)


class ContinuousWorker(Server):
    """Rounds count the steps since the beginning; a sequence that decodes knows the round of its last token."""

    __slots__ = (
        "_begun_kv_free",
        "_cached",
        "_chunks",
        "_decoders",
        "_first_s",
        "_last_s",
        "_longest",
        "_prefixes",
        "_prompts",
        "_queue",
        "_requests",
        "_round",
        "_rounds",
        "_step_tokens",
        "_steps",
        "_tokens",
    )  # fmt: skip
    cuts = True

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        ready_s: float,
        steps: StepModel,
        requests: Requests,
        queue: AdmissionQueue | None = None,
    ):
        super().__init__(name, stages, ready_s)
        limits = steps.limits
        self.max_batch = limits.max_batch
        self.longest = limits.longest
        self._steps = steps
        self._step_tokens = limits.max_batched_tokens
        self._requests = requests
        self._first_s, self._last_s = requests.first_s, requests.last_s
        self._tokens = None if requests.token_s is None else TokenTimes(requests.token_s)
        self._prefixes = None if requests.prefix_blocks is None else PrefixCache(requests.prefix_blocks)
        self._queue = queue or AdmissionQueue(limits)
        if limits.kv_tokens is not None:
            self.kv = KvMeter(limits.kv_tokens, ready_s)
        self._begun_kv_free = 0  # tokens free as the run began
        self._prompts: list[list[int]] = []  # [row, input, output tokens, cached], in order of admission
        self._decoders: list[tuple[int, int, int]] = []  # heap of (last round, row, tokens cached by then)
        self._chunks: list[tuple[list[int], int]] = []  # of this step: (prompt, tokens)
        self._cached = 0  # tokens whose KV the decoders hold
        self._longest: int | None = None  # of the decoders, less the round; None: to be found anew
        self._round = 0
        self._rounds = 0  # steps of this run

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        self.outstanding += 1
        self._queue.waiting.append((row, input_tokens, output_tokens))

    def begin(self) -> float:
        decoders, steps = self._decoders, self._steps
        n = len(decoders)
        settled = steps.plans_ahead and self.holds
        tokens, attention_s = 0, 0.0
        if self._prompts or (not settled and self._queue.waiting and self._queue.free):
            budget = self._step_tokens - n
            if budget:
                tokens, attention_s = self._prefill(budget, admits=not settled)
        if steps.plans_ahead and self._queue.waiting:
            self._admit_all()
        self._begun_kv_free = self._queue.kv_free
        if tokens:
            self._rounds = 1
            return steps.mixed_s(tokens, attention_s, n, self._context(n) if n else 0.0, prepared=settled)
        if not n:
            return 0.0
        self._rounds = rounds = 1 if steps.plans_ahead and self._prompts else self._rounds_left()
        return steps.run_s(n, self._context(n), rounds)

    def _context(self, n: int) -> float:
        """Return the context of the next step's ``n`` decoders (:meth:`StepModel.context`)."""
        mean = self._cached / n + 1
        if not self._steps.longest_share:
            return mean
        if self._longest is None:
            self._longest = max(cached - last_round for last_round, _, cached in self._decoders)
        return self._steps.context(mean, self._longest + self._round + 1)

    def _rounds_left(self) -> int:
        """Return the steps until a sequence that decodes has its last token."""
        return self._decoders[0][0] - self._round

    def _admit_all(self) -> None:
        """Admit requests to the step after the one that begins."""
        queue = self._queue
        while queue.takes_next:
            self._prompts.append(self._admitted())

    def _admitted(self) -> list[int]:
        """Admit the first waiting request, which has a slot and room for its KV now."""
        queue = self._queue
        row, input_tokens, output_tokens = queue.waiting.popleft()
        queue.take(queue.claimed_tokens(input_tokens, output_tokens))
        cached = 0 if self._prefixes is None else self._prefixes.admit(row, input_tokens)
        return [row, input_tokens, output_tokens, cached]

    def _prefill(self, budget: int, *, admits: bool) -> tuple[int, float]:
        """Fill the step's ``budget`` of tokens with prompts: their tokens, and their attention's time."""
        attention, chunks, left, attention_s = self._steps.attention_s, self._chunks, budget, 0.0
        for prompt in self._prompts:
            if not left:
                break
            cached = prompt[3]
            tokens = min(left, prompt[1] - cached)
            left -= tokens
            attention_s += attention[cached + tokens] - attention[cached]
            chunks.append((prompt, tokens))
        while left and admits and self._queue.takes_next:
            prompt = self._admitted()
            self._prompts.append(prompt)
            cached = prompt[3]
            tokens = min(left, prompt[1] - cached)
            left -= tokens
            attention_s += attention[cached + tokens] - attention[cached]
            chunks.append((prompt, tokens))
        return budget - left, attention_s

    def finish(self, now_s: float) -> None:
        if self.kv is not None:
            room, queue = self.kv.room_tokens, self._queue
            self.kv.add(now_s - self.begun_s, room - self._begun_kv_free, room - queue.kv_free)
        decoders, rounds, token_times = self._decoders, self._rounds, self._tokens
        if token_times is not None:
            token_times.ran(self._step_ends(now_s))
        self._round = here = self._round + rounds
        if decoders:
            self._cached += rounds * len(decoders)
            while decoders and decoders[0][0] == here:
                _, row, cached = heapq.heappop(decoders)
                self._cached -= cached
                if self._longest == cached - here:
                    self._longest = None
                self._leave(row, cached + 1, now_s)
        if not self._chunks:
            return
        ended = 0
        for prompt, tokens in self._chunks:
            prompt[3] += tokens
            row, input_tokens, output_tokens, cached = prompt
            if cached < input_tokens:
                continue
            ended += 1
            if token_times is not None:
                token_times.answers(row)
            if self._first_s[row] != self._first_s[row]:  # one that was moved here has had its first token
                self._first_s[row] = now_s
            if output_tokens == 1:
                self._leave(row, input_tokens + 1, now_s)
            else:
                self._cached += cached
                heapq.heappush(decoders, (here + output_tokens - 1, row, input_tokens + output_tokens - 1))
                if self._longest is not None:
                    self._longest = max(self._longest, cached - here)
        self._chunks.clear()
        del self._prompts[:ended]  # prompts end in their order: only the last of a step can be cut

    def _step_ends(self, now_s: float) -> Iterator[float]:
        """Yield the ends of the steps of the run that has ended, as if all of it had been of one speed."""
        if self._rounds > 1:
            n, run_s = len(self._decoders), self._steps.run_s
            context = self._context(n)
            pace = (now_s - self.begun_s) / run_s(n, context, self._rounds)
            for steps in range(1, self._rounds):
                yield self.begun_s + pace * run_s(n, context, steps)
        yield now_s

    def _leave(self, row: int, kv_tokens: int, now_s: float) -> None:
        if self._tokens is not None:
            self._tokens.leaves(row)
        self._last_s[row] = now_s
        self.outstanding -= 1
        self._queue.leave(kv_tokens)

    @property
    def holds(self) -> bool:
        """True while the worker has sequences under way."""
        return bool(self._decoders or self._prompts)

    @property
    def decodes_only(self) -> bool:
        """True when the current run only decodes."""
        return not self._chunks

    def step_s(self, work_s: float) -> float:
        """Return the time of the first step of the run that was begun, which takes ``work_s``."""
        if self._rounds == 1:
            return work_s
        n = len(self._decoders)
        return self._steps.decode_s(n, self._context(n))

    def step_at(self, done_s: float) -> tuple[int, float]:
        """Return the step that a run of decode steps is in: its number, from 1 on, and when it ends, as work since
        the run's beginning.
        """
        n = len(self._decoders)
        return self._steps.step_at(n, self._context(n), done_s)

    def cut(self, done_s: float) -> float:
        """Return the work of the run, cut short where the first waiting request can be admitted.

        Only the first in the queue cuts, and only a stretch of decode steps; for later ones it is cut already.
        """
        if self._chunks or len(self._queue.waiting) > 1 or not self._queue.takes_next:
            return self.work_s
        if len(self._decoders) >= self._step_tokens:
            return self.work_s
        rounds, work_s = self.step_at(done_s)
        return work_s if self.shorten(rounds) else self.work_s

    def shorten(self, rounds: int) -> bool:
        """Shorten a run of decode steps to so many; False: it ends by then in any case."""
        if rounds >= self._rounds:
            return False
        self._rounds = rounds
        return True

    def clear(self) -> tuple[list[int], list[int]]:
        running = [prompt[0] for prompt in self._prompts] + [row for _, row, _ in self._decoders]
        waiting = [row for row, _, _ in self._queue.waiting]
        for held in (self._queue.waiting, self._prompts, self._decoders, self._chunks):
            held.clear()
        self._longest = None
        return running, waiting

    def give_back(self) -> list[int]:
        waiting = [row for row, _, _ in self._queue.waiting]
        self._queue.waiting.clear()
        self.outstanding -= len(waiting)
        return waiting

    def evict(self, done_s: float) -> list[tuple[int, int, int]]:
        """Evict running requests; a step under way gives no tokens, and prompts that were begun are begun anew."""
        left = [(row, input_tokens, output_tokens) for row, input_tokens, output_tokens, _ in self._prompts]
        done = 0
        if self._decoders and not self._chunks and self._rounds > 1 and done_s > 0:
            n = len(self._decoders)
            done = self._steps.steps_until(n, self._context(n), done_s) - 1
        for last_round, row, cached in sorted(self._decoders):
            to_come = last_round - self._round - done
            left.append((row, cached + 1 - to_come, to_come))
        for held in (self._prompts, self._decoders, self._chunks):
            held.clear()
        self._longest = None
        self.outstanding -= len(left)
        return left
