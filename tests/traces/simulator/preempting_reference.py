"""Admission by prompts and preemption, one step at a time: what ``traces.simulator.preempting`` must equal."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from traces.request import Request
from traces.simulator.step_model import StepModel

__all__ = ["StepByStep"]


@dataclass
class _Sequence:
    row: int
    prompt: int  # tokens, with those of the answer that were made before it was preempted
    left: int  # tokens of its answer
    cached: int = 0

    @property
    def decodes(self) -> bool:
        return self.cached >= self.prompt

    def kept(self, window: int | None) -> int:
        """Return its tokens of KV before the next step."""
        return min(max(self.cached, self.prompt), window or 10**9)


class StepByStep:
    """The rule of ``preempting``'s docstring, one step at a time. Checks that the KV never exceeds its room."""

    def __init__(self, requests: list[Request], steps: StepModel) -> None:
        self.first, self.last = [float("nan")] * len(requests), [float("nan")] * len(requests)
        self.preemptions = self.recomputed = self.peak = 0
        self.bounds, self.steps = steps.limits, steps
        self._arriving = deque(enumerate(requests))
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []  # in the order of admission
        self._now_s = 0.0
        while self._running or self._waiting or self._arriving:
            self._step()

    def _used(self) -> int:
        return sum(s.kept(self.bounds.kv_window) for s in self._running)

    def _grown(self) -> int:
        window = self.bounds.kv_window or 10**9
        return sum(min(s.cached + 1, window) if s.decodes else min(s.prompt, window) for s in self._running)

    def _admit(self, spare: int) -> _Sequence | None:
        """Admit the next request if its prompt fits next to what the running ones take, and ``spare`` tokens."""
        room = (self.bounds.kv_tokens or 10**9) - self._grown() - spare
        if not self._waiting or len(self._running) == self.bounds.max_batch or self._waiting[0].kept(
            self.bounds.kv_window
        ) > room:  # fmt: skip
            return None
        self._running.append(self._waiting.popleft())
        return self._running[-1]

    def _step(self) -> None:
        if not self._running and not self._waiting:
            self._now_s = max(self._now_s, self._arriving[0][1].arrival_s)
        while self._arriving and self._arriving[0][1].arrival_s <= self._now_s:
            row, request = self._arriving.popleft()
            self._waiting.append(_Sequence(row, request.input_tokens, request.output_tokens))
        idle, ahead, preempted = not self._running, self.steps.plans_ahead, False
        while self._grown() > (self.bounds.kv_tokens or 10**9):
            victim = self._running.pop()
            tokens = victim.cached + 1 if victim.decodes else victim.prompt
            self._waiting.appendleft(_Sequence(victim.row, tokens, victim.left))
            self.preemptions, self.recomputed = self.preemptions + 1, self.recomputed + victim.cached
            preempted = True
        decoding = [s for s in self._running if s.decodes]
        budget, chunks = self.bounds.max_batched_tokens - len(decoding), []
        for s in self._running:
            if budget and not s.decodes:
                chunks.append((s, min(budget, s.prompt - s.cached)))
                budget -= chunks[-1][1]
        while budget and not preempted and (idle or not ahead) and (admitted := self._admit(0)):
            chunks.append((admitted, min(budget, admitted.prompt)))
            budget -= chunks[-1][1]
        while ahead and not preempted and self._admit(len(decoding) + len(chunks)):
            pass
        self.peak = max(self.peak, self._grown())
        self._advance(decoding, chunks, prepared=ahead and not idle)

    def _advance(self, decoding: list[_Sequence], chunks: list[tuple[_Sequence, int]], *, prepared: bool) -> None:
        tokens, attention = sum(size for _, size in chunks), self.steps.attention_s
        contexts = [s.cached + 1 for s in decoding]
        context = self.steps.context(sum(contexts) / len(contexts), max(contexts)) if contexts else 0.0
        if tokens:
            attention_s = sum(attention[s.cached + size] - attention[s.cached] for s, size in chunks)
            self._now_s += self.steps.mixed_s(tokens, attention_s, len(decoding), context, prepared=prepared)
        else:
            self._now_s += self.steps.decode_s(len(decoding), context)
        made = list(decoding)
        for s, size in chunks:
            s.cached += size
            if s.decodes:
                made.append(s)
        for s in decoding:
            s.cached += 1
        for s in made:
            s.left -= 1
            if self.first[s.row] != self.first[s.row]:
                self.first[s.row] = self._now_s
            if not s.left:
                self.last[s.row] = self._now_s
                self._running.remove(s)
