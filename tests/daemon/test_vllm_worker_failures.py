"""Failures of the profiling worker around ``vllm.LLM``, and its end: whatever is killed, nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from pathlib import Path

import pytest

from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import ConflictError, EngineError, UnavailableError
from fingerprint.families import load_spec
from tests.daemon.profiling_house import bursts, cmdline, house, kept, session, shims
from tests.golden_words import Golden

pytestmark = pytest.mark.process

__all__ = ["house", "kept", "session"]  # fixtures


class TestFailures:
    def test_an_engine_that_does_not_start_is_named_and_another_load_goes_well(
        self, house, kept, golden: Golden
    ) -> None:
        words = "ValueError: No available memory for the cache blocks."
        with golden.raises("daemon", EngineError):
            house.load(kept, behaviour={"start_error": words})
        assert words in house.log(kept)
        assert not house.engine(kept)
        house.load(kept)
        assert bursts(kept)

    def test_an_argument_that_vllm_refuses_itself_is_told(self, house, kept, golden: Golden) -> None:
        with golden.raises("daemon", EngineError):
            house.load(kept, max_context_tokens=2048, kv_tokens=4096)

    @pytest.mark.parametrize(
        "behaviour", [{"dies_at_batch": 4}, {"no_memory_at_tokens": 100}], ids=["killed", "out-of-memory"]
    )
    def test_an_engine_that_dies_in_a_run_leaves_nothing_and_the_worker_goes_on(
        self, house, kept, behaviour, golden: Golden
    ) -> None:
        house.load(kept, behaviour=behaviour)
        assert bursts(kept, 2, 20)
        with golden.raises("daemon", EngineError):
            bursts(kept, 4, 60)
        if "no_memory_at_tokens" in behaviour:
            assert "torch.OutOfMemoryError: CUDA out of memory" in house.log(kept)
        assert not house.engine(kept)
        with golden.raises("daemon", UnavailableError):
            bursts(kept)
        house.load(kept)
        assert bursts(kept, 4, 60)

    def test_a_point_that_kills_the_engine_costs_a_profile_that_point_alone(self, house, golden: Golden) -> None:
        plan = DepthTiedPlan(
            points=((1, 32), (2, 32), (4, 64)),
            shallow_points=((1, 32), (4, 64)),
            long_output=9,
            max_batch=8,
            max_context_tokens=128,
            settle_s=0.0,
            budget_s=60.0,
        )
        fragile = [house.fingerprint(2, dies_at_batch=4)]

        def fingerprints(layers: int) -> Path:
            return fragile.pop() if layers == 2 and fragile else house.fingerprint(layers)

        with house.target() as target:
            profile = depth_tied_profile("m", load_spec(house.model), target, fingerprints, plan)
        (note,) = profile.notes
        golden("daemon", note)
        assert {(t.num_layers, t.batch) for t in profile.timing} == {(2, 1), (2, 2), (1, 1)}
        assert not house.processes()


class TestTheEnd:
    def test_a_stopped_worker_takes_its_engine_with_it(self, house, session) -> None:
        house.load(session)
        engine = house.processes()
        assert len(engine) >= 3  # wrapper, worker, engine core
        session.close()
        assert not house.processes()
        exit_file = house.node.home / "workers" / house.handles[-1].worker_id / "exit.json"
        assert json.loads(exit_file.read_text())["exit_code"] == 0

    def test_sigterm_during_a_run_finishes_it_first(self, house, session, until) -> None:
        house.load(session)
        results: list[object] = []

        def run() -> None:
            while not results:
                with contextlib.suppress(ConflictError):
                    results.append(bursts(session, 8, 60, 100, most=4, until_s=60.0, repeat=4))

        def is_running() -> bool:
            try:
                session.memory()
            except ConflictError:
                return True
            return False

        thread = threading.Thread(target=run)
        thread.start()
        until(is_running)
        (worker,) = (
            p for p in house.processes() if "iserve_profiling.vllm" in cmdline(p) and "wrapper" not in cmdline(p)
        )
        os.kill(worker, signal.SIGTERM)
        thread.join()
        assert len(results) == 1
        until(lambda: worker not in house.processes() and not house.engine(session), "it is gone with its engine")

    @pytest.mark.parametrize("who", ["worker", "wrapper", "engine"])
    def test_kill_9_of_any_process_leaves_none(self, house, session, until, who) -> None:
        house.load(session)
        marks = {"worker": "iserve_profiling.vllm", "wrapper": "daemon.engines.wrapper", "engine": "spawn_main"}
        found = [p for p in house.processes() if marks[who] in cmdline(p)]
        (victim,) = (p for p in found if who != "worker" or "wrapper" not in cmdline(p))
        before = house.processes()
        os.kill(victim, signal.SIGKILL)
        if who == "engine":
            with pytest.raises(EngineError, match="EngineDeadError"):
                bursts(session)
            assert not house.engine(session)
        else:
            until(lambda: not (before - shims(house)) & house.processes(), "all that ran is gone")
        session.close()
        assert not house.processes()
