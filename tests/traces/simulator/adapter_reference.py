"""A worker with adapter slots followed one step at a time, with all of its requests sent to it as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.step_model import StepModel

__all__ = ["StepByStep"]


@dataclass
class _Sequence:
    row: int
    prompt: int  # tokens
    left: int  # tokens of its answer
    variant: str
    cached: int = 0

    @property
    def decodes(self) -> bool:
        return self.cached >= self.prompt


@dataclass
class StepByStep:
    """First and last tokens of ``requests``, whose model is a variant's name, or "" for the base.

    Each variant is loaded once, when it is first asked for; a load takes ``cost.load_s`` between two steps, and is
    after the step of the requests that arrived with it at an idle worker.
    """

    requests: Sequence[Request]
    steps: StepModel
    cost: AdapterCost
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first, self.last = [0.0] * len(self.requests), [0.0] * len(self.requests)
        self._coming = deque(enumerate(self.requests))
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._ordered: deque[str] = deque()
        self._held: dict[str, list[_Sequence]] = {}
        self._known: set[str] = set()
        self._now_s = 0.0
        while self._running or self._waiting or self._ordered or self._coming:
            is_idle = not (self._running or self._waiting or self._ordered)
            if is_idle:
                self._now_s = max(self._now_s, self._coming[0][1].arrival_s)
            self._arrive()
            if self._ordered and not (is_idle and self._waiting):
                self._load()
            elif self._running or self._waiting:
                self._step()

    def _arrive(self) -> None:
        while self._coming and self._coming[0][1].arrival_s <= self._now_s:
            row, request = self._coming.popleft()
            one = _Sequence(row, request.input_tokens, request.output_tokens, request.model)
            if one.variant and one.variant not in self._known:
                self._known.add(one.variant)
                self._ordered.append(one.variant)
                self._held[one.variant] = []
            self._held.get(one.variant, self._waiting).append(one)

    def _load(self) -> None:
        self._now_s += self.cost.load_s
        self._arrive()
        self._waiting.extend(self._held.pop(self._ordered.popleft()))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.steps.limits.max_batch:
            self._running.append(self._waiting.popleft())

    def _step(self) -> None:
        steps, settled = self.steps, self.steps.plans_ahead and bool(self._running)
        decoding = [s for s in self._running if s.decodes]
        budget = steps.limits.max_batched_tokens - len(decoding)
        if not settled:
            self._admit_within(budget)
        tokens, attention_s, adapter_tokens, adapter_attention_s = 0, 0.0, 0, 0.0
        chunks = []
        for s in self._running:
            size = 0 if s.decodes else min(budget - tokens, s.prompt - s.cached)
            if size:
                its_s = steps.attention_s[s.cached + size] - steps.attention_s[s.cached]
                tokens, attention_s = tokens + size, attention_s + its_s
                if s.variant:
                    adapter_tokens, adapter_attention_s = adapter_tokens + size, adapter_attention_s + its_s
                chunks.append((s, size))
        if steps.plans_ahead:
            self._admit()
        n = len(decoding)
        contexts = [s.cached + 1 for s in decoding]
        context = steps.context(sum(contexts) / n, max(contexts)) if n else 0.0
        took_s = (
            steps.mixed_s(tokens, attention_s, n, context, prepared=settled)
            if tokens
            else steps.decode_s(n, context)
        )
        adapters = {s.variant for s in (*decoding, *(s for s, _ in chunks)) if s.variant}
        if adapters and n:
            took_s += self.cost.added_s(n, len(adapters))
        if adapter_tokens:
            took_s += self.cost.prompt_share * (steps.tokens_s[adapter_tokens] + adapter_attention_s)
        self._now_s += took_s
        for s, size in chunks:
            s.cached += size
            if s.decodes:
                self.first[s.row] = self._now_s
                s.left -= 1
        for s in decoding:
            s.cached += 1
            s.left -= 1
        for s in [s for s in self._running if s.decodes and not s.left]:
            self.last[s.row] = self._now_s
            self._running.remove(s)

    def _admit_within(self, budget: int) -> None:
        """Admit requests while tokens of the step are left for them."""
        left = budget - sum(s.prompt - s.cached for s in self._running if not s.decodes)
        while left > 0 and self._waiting and len(self._running) < self.steps.limits.max_batch:
            one = self._waiting.popleft()
            self._running.append(one)
            left -= one.prompt
