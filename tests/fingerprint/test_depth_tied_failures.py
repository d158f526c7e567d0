"""Failures while a depth-tied profile is taken are reported, and take nothing with them that was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from fingerprint.errors import EngineError, InfeasibleError
from fingerprint.estimators.whole_points import whole_points
from fingerprint.measurements import RankMemory, RunReading
from tests.fingerprint.depth_tied_runs import BITS16, FP8, WHOLE, all_of, loads, measured
from tests.fingerprint.step_timed_machine import (
    PLAN,
    Cut,
    StepTimedMachine,
    StepTimedSyntheticSession,
    take_depth_tied,
)
from tests.golden_words import Golden

WORDS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def each_step(run: RunReading, **changes: float) -> RunReading:
    return replace(run, steps=tuple(replace(step, **changes) for step in run.steps))


def breaks(at: tuple[int, int, int, int], times: int = 1) -> object:
    """An engine that dies ``times`` times at (layers, batch, input, output)."""
    left = [times]

    def broken(cut: Cut, batch: int, input_tokens: int, output_tokens: int) -> EngineError | None:
        if (cut.layers, batch, input_tokens, output_tokens) == at and left[0]:
            left[0] -= 1
            return EngineError(WORDS)
        return None

    return broken


class TestFailures:
    @pytest.mark.parametrize("output_tokens", [1, 33])
    @pytest.mark.parametrize("at", [(2, 1, 1024), (2, 32, 512), (1, 1, 128)])
    def test_a_point_that_fails_is_noted_and_the_rest_goes_on_with_a_fresh_worker(self, at, output_tokens) -> None:
        machine = StepTimedMachine(broken=breaks((*at, output_tokens)))
        profile = take_depth_tied(machine)
        layers, batch, input_tokens = at
        (note,) = profile.notes
        where = f"tp=1 pp=1 16bit, {layers} layers, batch {batch} with {input_tokens} in"
        assert note == f"{where} failed: {WORDS}"
        assert not profile.complete
        assert measured(profile) == WHOLE - {at, (1, batch, input_tokens)}
        assert all(session.closed for session in machine.sessions)
        assert len(machine.sessions) == 2
        found = whole_points(profile.timing, 32)
        assert {(2, p.batch, p.input_tokens) for p in found} == all_of(2, PLAN.points) - {at}

    def test_after_the_last_point_no_engine_is_started_for_nothing(self) -> None:
        machine = StepTimedMachine(broken=breaks((1, 8, 1024, 33)))
        take_depth_tied(machine)
        assert len(loads(machine)) == 2

    def test_an_engine_that_dies_again_and_again_is_given_up_and_what_was_measured_is_kept(
        self, golden: Golden
    ) -> None:
        """Memory that does not hold the larger points: no start for each of them, none at all at one layer."""

        def broken(_cut: Cut, batch: int, input_tokens: int, _output: int) -> EngineError | None:
            return EngineError(WORDS) if batch * input_tokens >= 1024 else None

        machine = StepTimedMachine(broken=broken)
        profile = take_depth_tied(machine)
        assert [layers for _, _, layers, _ in loads(machine)] == [2, 2, 1]
        assert measured(profile) == {(2, 1, 128), (1, 1, 128)}
        assert [WORDS in note for note in profile.notes] == [True, True, False]
        golden("fingerprint", profile.notes[-1])
        assert len(whole_points(profile.timing, 32)) == 1
        assert all(session.closed for session in machine.sessions)

    def test_an_engine_that_does_not_come_back_takes_nothing_with_it_that_was_measured(
        self, golden: Golden
    ) -> None:
        """The engine dies at a batch of 8, and what it held is not free in time for its next start."""

        def broken(cut: Cut, batch: int, *_: int) -> EngineError | None:
            if cut.layers == 2 and not batch and len(loads(machine)) == 2:
                return EngineError("Free memory on device is less than desired")
            return EngineError(WORDS) if (cut.layers, batch) == (2, 8) else None

        machine = StepTimedMachine(broken=broken)
        profile = take_depth_tied(machine)
        assert [layers for _, _, layers, _ in loads(machine)] == [2, 2, 1]
        assert measured(profile) == {(k, 1, n) for k in (1, 2) for n in (128, 1024)}
        golden("fingerprint", profile.notes)
        assert whole_points(profile.timing, 32)
        assert all(session.closed for session in machine.sessions)

    @pytest.mark.parametrize(
        "wrong",
        [
            pytest.param(lambda run: None, id="no run"),
            pytest.param(lambda run: replace(run, e2e_s=0.0), id="no time"),
            pytest.param(lambda run: replace(run, e2e_s=-1.0), id="negative"),
            pytest.param(lambda run: replace(run, e2e_s=math.inf), id="endless"),
            pytest.param(lambda run: replace(run, steps=()), id="no steps"),
            pytest.param(lambda run: replace(run, steps=run.steps[1:]), id="no prompts"),
            pytest.param(lambda run: replace(run, steps=run.steps[:1] + run.steps), id="prompts twice"),
            pytest.param(lambda run: each_step(run, forward_s=0.0), id="no forward"),
            pytest.param(lambda run: each_step(run, gap_s=-1e-9), id="negative gap"),
            pytest.param(lambda run: each_step(run, tail_s=math.nan), id="not a number"),
            pytest.param(lambda run: each_step(run, sequences=0), id="no sequences"),
            pytest.param(lambda run: each_step(run, tokens=0), id="no tokens"),
        ],
    )
    def test_an_answer_that_cannot_be_is_no_measurement(self, wrong, golden: Golden) -> None:
        """A point is answered so; it is a failed point like any other."""
        at = (8, 1024)

        class Liar(StepTimedMachine):
            def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> StepTimedSyntheticSession:
                session = super().open(tp=tp, pp=pp)
                honest = session.bursts

                def bursts(**asked: Any) -> tuple[RunReading, ...]:
                    runs = honest(**asked)
                    lie = (asked["batch"], asked["input_tokens"]) == at
                    return tuple(run for run in map(wrong, runs) if run) if lie else runs

                session.bursts = bursts
                return session

        machine = Liar()
        profile = take_depth_tied(machine)
        assert measured(profile) == {found for found in WHOLE if found[1:] != at}
        (note,) = profile.notes
        golden("fingerprint", note)

    @pytest.mark.parametrize("changes", [None, {"weights_bytes": 0}, {"kv_bytes": -1}, {"stage": 1}])
    def test_memory_that_cannot_be_is_no_count(self, monkeypatch, changes) -> None:
        honest = StepTimedSyntheticSession.memory

        def memory(session: StepTimedSyntheticSession) -> tuple[RankMemory, ...]:
            return () if changes is None else tuple(replace(rank, **changes) for rank in honest(session))

        monkeypatch.setattr(StepTimedSyntheticSession, "memory", memory)
        machine = StepTimedMachine()
        with pytest.raises(EngineError, match="was answered"):
            take_depth_tied(machine)
        assert all(session.closed for session in machine.sessions)

    def test_where_no_point_can_be_measured_the_first_failure_is_told(self, golden: Golden) -> None:
        machine = StepTimedMachine(broken=lambda _cut, batch, *_: EngineError(WORDS) if batch else None)
        with golden.raises("fingerprint", EngineError):
            take_depth_tied(machine, weights=(BITS16, FP8))
        assert [weights for *_, weights in loads(machine)] == [BITS16, BITS16, FP8, FP8]
        assert all(session.closed for session in machine.sessions)

    def test_one_layer_runs_only_what_two_did(self) -> None:
        """A point of one depth alone tells nothing."""
        machine = StepTimedMachine(broken=breaks((2, 1, 128, 1)))
        assert (1, 1, 128) not in measured(take_depth_tied(machine))
        only = ((8, 1024),)
        profile = take_depth_tied(StepTimedMachine(), points=(*only, (1, 128)), shallow_points=())
        assert measured(profile) == {(2, 8, 1024), (2, 1, 128), (1, 1, 128)}

    def test_a_format_that_does_not_start_takes_no_other_with_it(self, golden: Golden) -> None:
        def broken(_cut: Cut, batch: int, *_: int) -> EngineError | None:
            weights = loads(machine)[-1][-1]
            return EngineError("ValueError: fp8 is not supported here") if weights == FP8 and not batch else None

        machine = StepTimedMachine(broken=broken)
        profile = take_depth_tied(machine, weights=(FP8, BITS16))
        assert {t.weights for t in profile.timing} == {BITS16}
        assert {m.weights for m in profile.memory} == {BITS16}
        golden("fingerprint", profile.notes)

    def test_a_degree_whose_worker_does_not_come_up_takes_no_other_with_it(self, golden: Golden) -> None:
        def refuses(tp: int, _pp: int) -> InfeasibleError | None:
            return InfeasibleError("tp=2, pp=1 needs 2 devices, 1 may be used") if tp == 2 else None

        machine = StepTimedMachine(refuses_to_open=refuses)
        profile = take_depth_tied(machine, degrees=((2, 1), (1, 1)), weights=(BITS16, FP8))
        golden("fingerprint", profile.notes)
        assert {t.tp for t in profile.timing} == {1}

    def test_when_nothing_at_all_is_measured_the_first_failure_is_told(self, golden: Golden) -> None:
        machine = StepTimedMachine(refuses_to_open=lambda *_: InfeasibleError("there is no device"))
        with golden.raises("fingerprint", InfeasibleError):
            take_depth_tied(machine, degrees=((1, 1), (2, 1)))

    @pytest.mark.parametrize("when", [0, 3, 7])
    def test_the_session_is_closed_whatever_ends_the_profile(self, when) -> None:
        """An interrupt is no failure to be noted."""
        left = [when]

        def broken(*_: object) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt

        machine = StepTimedMachine(broken=broken)
        with pytest.raises(KeyboardInterrupt):
            take_depth_tied(machine)
        assert all(session.closed for session in machine.sessions)
        assert machine.sessions
