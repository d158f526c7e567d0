"""The engine's thread: what sequences get, how they end, and what callers are answered when it breaks."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from daemon.torch_engine.runtime.engine import Engine, EngineState
from daemon.torch_engine.runtime.sampling import SamplingParams
from daemon.torch_engine.runtime.sequences import Finish, SequenceRequest, TokenEvent
from fingerprint.errors import BadInputError, ConflictError, EngineError, UnavailableError
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0)


class Driven:
    """An engine around a scripted runner, and its events in order."""

    def __init__(self, runner, spec) -> None:
        self.runner = runner
        self.spec = spec
        self.events: queue.Queue[TokenEvent] = queue.Queue()
        self.failures: list[BaseException] = []
        self.engine = Engine(
            runner, deliver=lambda events: [self.events.put(e) for e in events], failed=self.failures.append
        )
        self.engine.start()
        self.load()
        self.engine.ready()

    def load(self) -> None:
        spec = self.spec
        self.engine.load("unused", spec.config, spec.stages, spec.limits).result(PATIENCE_S)

    def finish(self, ids: tuple[int, ...]) -> dict[int, list[TokenEvent]]:
        """All events up to the end of each of ``ids``."""
        got: dict[int, list[TokenEvent]] = {id_: [] for id_ in ids}
        while not all(events and events[-1].finish for events in got.values()):
            event = self.events.get(timeout=PATIENCE_S)
            got.setdefault(event.sequence_id, []).append(event)
        return got


@pytest.fixture
def drive(scripted_runner, spec) -> Iterator[Callable[..., Driven]]:
    started: list[Driven] = []

    def start(script, **changes) -> Driven:
        runner = scripted_runner(script)
        for name, value in changes.items():
            setattr(runner, name, value)
        started.append(Driven(runner, spec()))
        return started[-1]

    yield start
    for each in started:
        if each.runner.gate is not None:
            each.runner.gate.release(10_000)
        assert each.engine.close(PATIENCE_S)
        assert each.runner.closed


def request(prompt: tuple[int, ...], max_tokens: int = 4, **changes) -> SequenceRequest:
    return SequenceRequest(prompt=prompt, max_tokens=max_tokens, **({"sampling": GREEDY} | changes))


def next_number(history: tuple[int, ...]) -> int:
    return (sum(history) + len(history)) % 250


def by_hand(prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_number(tuple(tokens)))
    return tokens[len(prompt) :]


def test_mixed_prompts_each_get_their_own_answer(drive) -> None:
    """More sequences than slots, prompts longer than a step: the runner sees each token once and in order."""
    driven = drive(next_number)
    prompts = [tuple(range(1, 1 + n)) for n in (1, 40, 3, 90, 7, 33, 2)]
    ids = driven.engine.submit([request(prompt, 5) for prompt in prompts])
    got = driven.finish(ids)
    for id_, prompt in zip(ids, prompts, strict=True):
        assert [event.token for event in got[id_]] == by_hand(prompt, 5)
        assert [event.finish for event in got[id_]] == [None] * 4 + [Finish.LENGTH]
    totals = driven.engine.totals
    assert totals.prompt_tokens == sum(map(len, prompts))
    assert totals.output_tokens == 7 * 5
    assert totals.steps == len(driven.runner.plans)
    assert totals.device_s == pytest.approx(0.25 * totals.steps)
    assert all(sum(len(i.token_ids) for i in plan.items) <= 32 for plan in driven.runner.plans)
    stats = driven.engine.stats("m")
    assert (stats.running, stats.waiting, stats.kv_tokens_free) == (0, 0, 4 * 128)
    assert stats.busy[0].busy_s == pytest.approx(0.25 * totals.steps)


def test_an_end_token_ends_but_not_before_min_tokens(drive) -> None:
    driven = drive(lambda history: [0.0, 3.0, 2.0])  # 1 is best, then 2
    end = frozenset({1})
    ids = driven.engine.submit(
        [
            request((5,), 6, end_ids=end),
            request((5,), 6, end_ids=end, min_tokens=3),
            request((5,), 3),  # end of sequence ignored
        ]
    )
    got = driven.finish(ids)
    assert [[event.token for event in got[id_]] for id_ in ids] == [[1], [2, 2, 2, 1], [1, 1, 1]]
    assert [got[id_][-1].finish for id_ in ids] == [Finish.STOP, Finish.STOP, Finish.LENGTH]


def test_a_seed_is_reproducible_alone_and_in_a_batch(drive) -> None:
    driven = drive(lambda history: [float(i % 3) for i in range(100)])
    seeded = request((9,), 12, sampling=SamplingParams(seed=5, top_p=0.9))
    alone = driven.finish(driven.engine.submit([seeded]))
    others = [request((i,), 10, sampling=SamplingParams(seed=i)) for i in range(6)]
    ids = driven.engine.submit([*others[:2], seeded, *others[2:]])
    beside = driven.finish(ids)[ids[2]]
    assert [event.token for event in beside] == [event.token for event in next(iter(alone.values()))]


def test_cancelled_while_its_step_runs(drive) -> None:
    gate = threading.Semaphore(0)
    driven = drive(next_number, gate=gate)
    first, second = driven.engine.submit([request((1,), 100), request((2,), 3)])
    gate.release()
    assert driven.events.get(timeout=PATIENCE_S).sequence_id == first
    driven.engine.cancel([first])
    assert driven.engine.stats("m").running == 1
    gate.release(100)
    got = driven.finish((second,))
    assert [event.token for event in got[second]] == by_hand((2,), 3)
    assert first not in got
    assert driven.engine.stats("m").running == 0


def test_a_failed_step_ends_every_sequence_with_the_reason(drive) -> None:
    gate = threading.Semaphore(0)
    driven = drive(next_number, gate=gate, fail_at_step=2)
    ids = driven.engine.submit([request((i,), 50) for i in range(6)])  # four run, two wait
    gate.release(3)
    got = driven.finish(ids)
    assert {events[-1].finish for events in got.values()} == {Finish.ERROR}
    assert {events[-1].error for events in got.values()} == {"rank 1 is gone"}
    assert driven.engine.close(PATIENCE_S)
    assert driven.engine.state is EngineState.FAILED
    assert [type(error) for error in driven.failures] == [EngineError]
    with pytest.raises(UnavailableError, match="rank 1 is gone"):
        driven.engine.submit([request((1,))])
    with pytest.raises(UnavailableError, match="rank 1 is gone"):
        driven.engine.memory().result(PATIENCE_S)


def test_logits_that_are_no_numbers_end_one_sequence_only(drive) -> None:
    driven = drive(lambda history: [float("nan")] if history[0] == 13 else 7)
    bad, good = driven.engine.submit([request((13,)), request((14,))])
    got = driven.finish((bad, good))
    assert got[bad][-1].finish is Finish.ERROR
    assert "not numbers" in (got[bad][-1].error or "")
    assert [event.token for event in got[good]] == [7] * 4


def test_closing_tells_who_still_waits(drive, golden: Golden) -> None:
    gate = threading.Semaphore(0)
    driven = drive(next_number, gate=gate)
    ids = driven.engine.submit([request((i,), 50) for i in range(6)])
    closer = threading.Thread(target=driven.engine.close, args=(PATIENCE_S,))
    closer.start()
    while not driven.engine._stopping:
        time.sleep(0.001)
    gate.release()
    closer.join()
    got = driven.finish(ids)
    (error,) = {events[-1].error for events in got.values()}
    golden("daemon", error)
    assert driven.failures == []


def test_draining_finishes_what_was_admitted(drive) -> None:
    gate = threading.Semaphore(0)
    driven = drive(next_number, gate=gate)
    ids = driven.engine.submit([request((i,), 2) for i in range(6)])
    driven.engine.begin_drain()
    with pytest.raises(UnavailableError, match="draining"):
        driven.engine.submit([request((1,))])
    gate.release(100)
    assert {events[-1].finish for events in driven.finish(ids).values()} == {Finish.LENGTH}


def test_refusals_leave_nothing_behind(drive, golden: Golden) -> None:
    driven = drive(next_number, gate=threading.Semaphore(0))
    with golden.raises("daemon", BadInputError):
        driven.engine.submit([request((1,)), request((1,) * 128)])
    with golden.raises("daemon", UnavailableError):
        driven.engine.submit([request((1,))] * 600)
    assert not driven.engine.has_work


def test_a_model_is_replaced_only_when_idle(drive) -> None:
    gate = threading.Semaphore(0)
    driven = drive(next_number, gate=gate)
    ids = driven.engine.submit([request((1,), 2)])
    refused = driven.engine.load("unused", driven.spec.config, driven.spec.stages, driven.spec.limits)
    gate.release(100)
    with pytest.raises(ConflictError, match="1 sequences are running"):
        refused.result(PATIENCE_S)
    driven.finish(ids)
    driven.load()
    assert [e.token for e in driven.finish(driven.engine.submit([request((3,))])).popitem()[1]] == by_hand((3,), 4)


@pytest.mark.parametrize(
    ("max_batched_tokens", "expected"),
    [
        (32, [[(0, 0, 32)], [(0, 95, 32)], [(slot, 127, 1) for slot in range(4)]]),
        (2, [[(0, 0, 2)], [(0, 125, 2)], [(0, 127, 1), (1, 127, 1)]]),
        (512, [[(0, 0, 127)], [(slot, 127, 1) for slot in range(4)]]),
    ],
)
def test_warming_up_runs_the_largest_steps_and_counts_nothing(
    drive, spec, max_batched_tokens: int, expected: list
) -> None:
    """The steps of a context of 128 are a prompt's piece at either end, then all slots' last tokens."""
    driven = drive(next_number, warming=True)
    driven.spec = spec(limits=replace(driven.spec.limits, max_batched_tokens=max_batched_tokens))
    driven.load()
    driven.engine.warm_up().result(PATIENCE_S)
    sizes = [[(item.slot, item.start, len(item.token_ids)) for item in plan.items] for plan in driven.runner.plans]
    assert sizes == expected
    assert driven.engine.totals.steps == 0


def test_a_rank_that_goes_while_nothing_runs_is_noticed(drive) -> None:
    """The reading of memory that goes with the account notices it, before the next request."""
    driven = drive(next_number)
    driven.runner.fail_reading_memory = True
    driven.engine._memory_at_s = -1e9  # as if read long ago
    driven.engine.stats("m")
    driven.engine._thread.join(PATIENCE_S)
    assert driven.engine.state is EngineState.FAILED
    assert [str(error) for error in driven.failures] == ["rank 1 is gone"]


def test_who_asks_for_a_call_and_leaves_does_no_harm(drive) -> None:
    """A caller of a profiling route may leave before its call is made, while it runs, and at the end."""
    driven = drive(next_number)
    begun, go_on = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        go_on.wait(PATIENCE_S)

    running, waiting = driven.engine.call(slow), driven.engine.call(lambda: 1 // 0)
    assert begun.wait(PATIENCE_S)
    running.cancel()
    assert waiting.cancel()
    go_on.set()
    assert driven.engine.call(lambda: "alive").result(PATIENCE_S) == "alive"
    begun.clear(), go_on.clear()
    driven.engine.call(slow)
    never = driven.engine.call(lambda: 1 // 0)
    assert begun.wait(PATIENCE_S)
    assert never.cancel()
    closer = threading.Thread(target=driven.engine.close, args=(PATIENCE_S,))
    closer.start()
    while not driven.engine._stopping:
        time.sleep(0.001)
    go_on.set()
    closer.join()
    assert driven.runner.closed
    assert driven.failures == []
