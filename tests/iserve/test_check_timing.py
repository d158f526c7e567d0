"""Order and times of a check's bursts, on a worker whose true times are known."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import Workload
from fingerprint.errors import ConflictError, NotMeasuredError, TooLittleTimeError
from iserve.verify.timing import Burst, Times, time_batches, time_bursts
from tests.golden_words import Golden

WORK = Workload(batch=4, input_tokens=100, output_tokens=65)


@dataclass
class Worker:
    """Worker whose first burst takes ten times as long; time passes only while it works."""

    ttft_s: float = 0.1
    step_s: float = 0.01
    drift: float = 1.0  # each burst takes this many times what the one before took
    crowded: frozenset[int] = frozenset()  # bursts in which other requests are served
    now_s: float = 1000.0
    asked: list[Workload] = field(default_factory=list)
    seen: list[tuple[int, int, float]] = field(default_factory=list)

    def burst(self, work: Workload) -> Burst:
        number = len(self.asked)
        self.asked.append(work)
        elapsed_s = self.ttft_s + (work.output_tokens - 1) * self.step_s
        elapsed_s *= (10 if number == 0 else 1) * self.drift**number
        if number in self.crowded:
            elapsed_s *= 3
        self.now_s += elapsed_s
        return Burst(elapsed_s, number not in self.crowded)

    def check(self, work: Workload = WORK, max_seconds: float = 60.0) -> Times:
        return time_bursts(
            self.burst,
            work,
            max_seconds=max_seconds,
            clock=lambda: self.now_s,
            progress=lambda *told: self.seen.append(told),
        )


@given(
    ttft_s=st.floats(1e-3, 0.3),
    step_s=st.floats(1e-4, 0.3),
    batch=st.integers(1, 200),
    output_tokens=st.integers(2, 3000),
    max_seconds=st.floats(30.0, 120.0),
)
def test_true_times_are_found_within_the_time_given(
    ttft_s: float, step_s: float, batch: int, output_tokens: int, max_seconds: float
) -> None:
    work = Workload(batch=batch, input_tokens=7, output_tokens=output_tokens)
    worker = Worker(ttft_s=ttft_s, step_s=step_s)
    times = worker.check(work, max_seconds)
    assert times.ttft_s.value == pytest.approx(ttft_s)
    assert times.tpot_s is not None
    assert times.tpot_s.value == pytest.approx(step_s, rel=1e-6)
    assert times.ttft_s.repeats == times.tpot_s.repeats >= 5
    assert 2 <= times.workload.output_tokens <= output_tokens
    assert (times.workload.batch, times.workload.input_tokens) == (batch, 7)
    assert worker.now_s - 1000.0 <= max_seconds * (1 + 1e-9)


def test_the_whole_answer_is_run_when_there_is_time() -> None:
    worker = Worker()
    assert worker.check().workload == WORK
    assert {work.output_tokens for work in worker.asked} == {1, 9, 65}


def test_an_answer_too_long_for_the_time_is_cut_and_told() -> None:
    times = Worker(step_s=1.0).check(max_seconds=60.0)
    assert times.workload.output_tokens < WORK.output_tokens
    assert times.tpot_s is not None
    assert times.tpot_s.value == pytest.approx(1.0)


def test_beside_long_prompts_fewer_pairs_have_answers_that_tell_something() -> None:
    """Five pairs, as once on an H200, left two tokens each, and 8.7 ms a token, give or take 8.2."""
    times = Worker(ttft_s=1.6, step_s=0.007).check(replace(WORK, output_tokens=512), max_seconds=30.0)
    assert times.workload.output_tokens > 9
    assert times.ttft_s.repeats >= 3


def test_bursts_of_one_token_have_no_tpot() -> None:
    worker = Worker()
    times = worker.check(Workload(batch=2, input_tokens=5, output_tokens=1))
    assert (times.tpot_s, times.ttft_s.value) == (None, pytest.approx(0.1))
    assert {work.output_tokens for work in worker.asked} == {1}


def test_pairs_in_which_others_were_served_are_left_out() -> None:
    times = Worker(crowded=frozenset({3, 9, 10})).check()
    assert times.disturbed == 2
    assert times.ttft_s.value == pytest.approx(0.1)
    assert times.tpot_s is not None
    assert times.tpot_s.value == pytest.approx(0.01)


def test_a_worker_that_never_is_alone_cannot_be_verified(golden: Golden) -> None:
    worker = Worker(crowded=frozenset(range(10_000)))
    with golden.raises("controller", ConflictError):
        worker.check(max_seconds=30.0)
    assert worker.now_s - 1000.0 < 60.0


def test_a_burst_too_long_for_the_time_is_refused_at_once(golden: Golden) -> None:
    worker = Worker(ttft_s=15.0)
    with golden.raises("controller", NotMeasuredError):
        worker.check(max_seconds=60.0)
    assert len(worker.asked) == 3


def test_times_that_scatter_are_repeated_for_the_whole_time_and_say_how_far() -> None:
    worker = Worker(drift=1.02)
    times = worker.check(max_seconds=20.0)
    assert times.ttft_s.repeats > 5
    assert times.ttft_s.low < times.ttft_s.value < times.ttft_s.high
    assert worker.now_s - 1000.0 > 10.0


def test_noise_beyond_the_effect_is_no_time_per_token() -> None:
    with pytest.raises(NotMeasuredError, match="too noisy"):
        Worker(step_s=0.0, drift=0.9).check()


def test_more_time_is_advised_where_it_helps(golden: Golden) -> None:
    with pytest.raises(TooLittleTimeError):
        Worker(ttft_s=15.0).check(max_seconds=60.0)
    with golden.raises("controller", NotMeasuredError) as noisy:
        Worker(step_s=0.0, drift=0.9).check()
    assert not isinstance(noisy.value, TooLittleTimeError)


def test_progress_rises_to_what_was_planned() -> None:
    worker = Worker()
    worker.check()
    done = [done for done, _, _ in worker.seen]
    assert done == sorted(done)
    assert all(elapsed_s >= 0 for _, _, elapsed_s in worker.seen)


def test_more_pairs_than_were_planned_are_expected_once_they_turn_out_quicker() -> None:
    """The progress never says that the 7th of 6 is under way."""
    worker = Worker(drift=0.98)
    worker.check(max_seconds=20.0)
    planned = [total for _, total, _ in worker.seen]
    assert all(done < total for done, total, _ in worker.seen)
    assert max(planned) > planned[1]


class Growing(Worker):
    """Each request of a batch takes ``step_s`` of every step, and as much again of the first as its prompt."""

    def burst(self, work: Workload) -> Burst:
        self.asked.append(work)
        elapsed_s = work.batch * (self.ttft_s + (work.output_tokens - 1) * self.step_s)
        self.now_s += elapsed_s
        return Burst(elapsed_s, True)

    def both(self, work: Workload, max_seconds: float) -> tuple[Times, Times | None, str | None]:
        return time_batches(
            self.burst,
            work,
            max_seconds=max_seconds,
            clock=lambda: self.now_s,
            progress=lambda *told: self.seen.append(told),
        )


@given(batch=st.integers(2, 64), step_s=st.floats(1e-4, 0.01), max_seconds=st.floats(30.0, 120.0))
def test_one_request_is_timed_as_well_within_the_same_time(batch: int, step_s: float, max_seconds: float) -> None:
    worker = Growing(ttft_s=0.01, step_s=step_s)
    work = Workload(batch=batch, input_tokens=7, output_tokens=400)
    full, alone, unknown = worker.both(work, max_seconds)
    assert unknown is None
    assert alone is not None
    assert full.tpot_s is not None
    assert alone.tpot_s is not None
    assert (full.workload.batch, alone.workload.batch) == (batch, 1)
    assert full.tpot_s.value == pytest.approx(batch * step_s, rel=1e-6)
    assert alone.tpot_s.value == pytest.approx(step_s, rel=1e-6)
    assert worker.now_s - 1000.0 <= max_seconds * (1 + 1e-9)


def test_a_batch_of_one_is_timed_once() -> None:
    worker = Growing()
    full, alone, unknown = worker.both(Workload(batch=1, input_tokens=7, output_tokens=33), 60.0)
    assert (full.workload.batch, alone, unknown) == (1, None, None)


def test_where_the_batch_takes_all_the_time_one_request_is_told_as_not_timed(golden: Golden) -> None:
    """A burst of 4 takes 8 s to its first tokens: five of the shortest, and nothing is left for more."""
    worker = Growing(ttft_s=2.0, step_s=0.0)
    full, alone, unknown = worker.both(Workload(batch=4, input_tokens=7, output_tokens=1), 45.0)
    assert (full.workload.batch, alone) == (4, None)
    assert unknown is not None
    golden("controller", unknown)
