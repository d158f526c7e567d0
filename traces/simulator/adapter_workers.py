"""Workers with adapter slots: what loads and the adapters in each step cost, on top of continuous batching.

*   Loads of a worker follow one another. A request whose adapter is being loaded is held before the worker's queue
    until it is there.
*   A load runs between two steps: no sequence of the worker gets a token meanwhile. A stretch of decode steps ends
    with the step in which a load is ordered; at an idle worker, requests that have what they need begin first, for
    a load is behind the unload that makes room for it. Where loads stop no steps (``AdapterCost.stops_steps``),
    they run next to them instead (``LoadingThread``), and take nothing from requests but those that are held.
*   A step in which sequences of adapters decode takes ``AdapterCost.step_s`` longer, by all sequences that decode
    in it and by the adapters of all that is in it; prompts of adapters take ``prompt_share`` of their time longer.
    Of deltas the prompts take ``prompt_s`` longer instead, once for each delta that has some in the step.

Slots bound which adapters are in flight at a worker before requests reach it (``placement.variant_routing``), so
that each request here has a slot. An adapter that is loaded and has none is copied into one when it is asked for;
what that takes was not measured and is left out.

Which adapters are in a step changes only as sequences join and leave, so that a stretch of decode steps stays one
run, each of its steps longer by the same time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.continuous import ContinuousWorker
from traces.simulator.preempting import PreemptingWorker
from traces.simulator.requests import Requests
from traces.simulator.step_model import StepModel
from traces.simulator.workers import Server, Stage

__all__ = ["AdapterServer", "AdapterWorker", "LoadingThread", "PreemptingAdapterWorker"]

_Waiting: TypeAlias = tuple[int, int, int]  # (row, input, output tokens)


class _Loads:
    """Loads of a worker, one after another, and the requests that are held for them."""

    __slots__ = ("held", "ordered", "under_way")

    def __init__(self) -> None:
        self.ordered: deque[str] = deque()  # that have not begun
        self.under_way: str | None = None
        self.held: dict[str, list[_Waiting]] = {}  # for the end of the last load of their adapter

    def __contains__(self, variant: str) -> bool:
        return variant == self.under_way or variant in self.ordered

    def begin(self) -> None:
        self.under_way = self.ordered.popleft()

    def end(self) -> tuple[str, list[_Waiting]]:
        """Return the adapter of the load under way, and the requests that it lets go on."""
        variant, self.under_way = self.under_way, None
        assert variant is not None, "a load is under way"
        return variant, [] if variant in self.ordered else self.held.pop(variant, [])

    def drop(self) -> list[int]:
        """Return the rows that are held; no load is begun any more."""
        rows = [row for waiting in self.held.values() for row, _, _ in waiting]
        self.held.clear()
        self.ordered.clear()
        return rows


class AdapterServer(ContinuousWorker):
    """Adapters of a worker; the concrete classes say how it admits."""

    def __init__(
        self,
        name: str,
        stages: Sequence[Stage],
        ready_s: float,
        steps: StepModel,
        requests: Requests,
        *,
        adapters: AdapterCost,
    ) -> None:
        super().__init__(name, stages, ready_s, steps, requests)
        self._plain, self._cost = steps, adapters
        self._by_active: dict[int, StepModel] = {}  # steps by the adapters that are in them
        self._variant: dict[int, str] = {}  # of rows that are here; those of the base have none
        self._loads = _Loads()
        self.thread = None if adapters.stops_steps else LoadingThread(self, self._loads, adapters.load_s)
        self._between = self._loads if adapters.stops_steps else _Loads()  # those that are runs of its own
        self._is_first = False  # the next step is before the loads, which were ordered while there was none
        self.loaded: list[str] = []  # since they were last looked at, as the next two
        self.released: list[int] = []  # rows whose adapter is there now
        self.ended: list[int] = []  # rows that have had their last token

    def order(self, variant: str) -> None:
        """Order a load, for the end of the loads before it and, where it stops them, of the current step."""
        self._is_first = self._is_first or not (self.busy or self._loads.ordered)
        self._loads.ordered.append(variant)

    def has_ordered(self, variant: str) -> bool:
        """Return whether a load of ``variant`` has not ended."""
        return variant in self._loads

    def tag(self, row: int, variant: str) -> None:
        """Note the adapter of a row that is submitted next."""
        self._variant[row] = variant

    def untag(self, row: int) -> None:
        """Forget a row that was not submitted."""
        self._variant.pop(row, None)

    def submit(self, row: int, input_tokens: int, output_tokens: int) -> None:
        variant = self._variant.get(row)
        if variant is not None and variant in self._loads:
            self.outstanding += 1
            self._loads.held.setdefault(variant, []).append((row, input_tokens, output_tokens))
        else:
            super().submit(row, input_tokens, output_tokens)

    def begin(self) -> float:
        self._steps = self._plain
        is_first, self._is_first = self._is_first, False
        if self._between.ordered and not is_first:
            return self._begin_load()
        work_s = super().begin()
        if not work_s:
            return self._begin_load() if self._between.ordered else 0.0
        return self._with_adapters(work_s) if self._variant else work_s

    def _begin_load(self) -> float:
        self._loads.begin()
        self._rounds = 0
        return self._cost.load_s

    def _with_adapters(self, work_s: float) -> float:
        """Return the work of the run that was begun, ``work_s`` of the base, with the adapters that are in it."""
        n = len(self._decoders)
        if not self._chunks:
            active = len(self._adapters_of(row for _, row, _ in self._decoders))
            if not active:
                return work_s
            self._steps = self._with_active(active)
            return self._steps.run_s(n, self._context(n), self._rounds)
        in_step = [row for _, row, _ in self._decoders]
        if self._cost.prompt_s is None:
            in_step += [prompt[0] for prompt, _ in self._chunks]
        else:
            work_s += sum(map(self._cost.prompt_s, self._adapter_tokens().values()))
        work_s += self._cost.step_s(n, len(self._adapters_of(in_step)))
        return work_s + self._cost.prompt_share * self._adapter_prompts_s()

    def _adapters_of(self, rows: Iterable[int]) -> set[str]:
        found = self._variant
        return {found[row] for row in rows if row in found}

    def _adapter_tokens(self) -> Counter[str]:
        """Return the tokens of the step's prompts by adapter."""
        tokens = Counter[str]()
        for prompt, size in self._chunks:
            if (variant := self._variant.get(prompt[0])) is not None:
                tokens[variant] += size
        return tokens

    def _adapter_prompts_s(self) -> float:
        """Return the time of the step's prompts that have adapters, as if they were alone."""
        tokens, attention_s, attention = 0, 0.0, self._plain.attention_s
        for prompt, size in self._chunks:
            if prompt[0] in self._variant:
                tokens += size
                attention_s += attention[prompt[3] + size] - attention[prompt[3]]
        return self._plain.tokens_s[tokens] + attention_s if tokens else 0.0

    def _with_active(self, active: int) -> StepModel:
        found = self._by_active.get(active)
        if found is None:
            found = self._plain.with_longer_steps(lambda rows: self._cost.step_s(rows, active))
            self._by_active[active] = found
        return found

    def finish(self, now_s: float) -> None:
        if self._between.under_way is None:
            super().finish(now_s)
            return
        if self.kv is not None:
            used = self.kv.room_tokens - self._queue.kv_free
            self.kv.add(now_s - self.begun_s, used, used)
        variant, released = self._loads.end()
        self.loaded.append(variant)
        for waiting in released:
            self.release(waiting)

    def release(self, waiting: _Waiting) -> None:
        """Let a request that was held into the worker's queue."""
        self._queue.waiting.append(waiting)
        self.released.append(waiting[0])

    def _leave(self, row: int, kv_tokens: int, now_s: float) -> None:
        self.ended.append(row)
        self._variant.pop(row, None)
        super()._leave(row, kv_tokens, now_s)

    def cut(self, done_s: float) -> float:
        if self._between.under_way is not None:
            return self.work_s
        if self._between.ordered and not self._chunks:
            rounds, work_s = self.step_at(done_s)
            return work_s if self.shorten(rounds) else self.work_s
        return super().cut(done_s)

    def clear(self) -> tuple[list[int], list[int]]:
        held = self._loads.drop()
        running, waiting = super().clear()
        self._variant.clear()
        return running, [*waiting, *held]

    def give_back(self) -> list[int]:
        """Return the waiting rows and those that are held for a load; no load is begun any more."""
        held = self._loads.drop()
        self.outstanding -= len(held)
        return [*super().give_back(), *held]


class LoadingThread(Server):
    """Loads of a worker that run next to its steps: a server of its own, which takes none of a GPU's time."""

    __slots__ = ("_load_s", "_loads", "released", "worker")

    def __init__(self, worker: AdapterServer, loads: _Loads, load_s: float) -> None:
        super().__init__(f"{worker.name} loads", (), worker.ready_s)
        self.worker, self._loads, self._load_s = worker, loads, load_s
        self.released: list[_Waiting] = []  # requests that go on since they were last looked at

    def begin(self) -> float:
        if not self._loads.ordered:
            return 0.0
        self._loads.begin()
        return self._load_s

    def finish(self, now_s: float) -> None:
        variant, released = self._loads.end()
        self.worker.loaded.append(variant)
        self.released += released


class AdapterWorker(AdapterServer):
    """Worker that reserves the KV of whole answers."""


class PreemptingAdapterWorker(AdapterServer, PreemptingWorker):
    """Worker that admits by prompts, and preempts."""
