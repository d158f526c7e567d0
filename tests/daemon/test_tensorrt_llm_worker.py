"""The profiling worker around ``tensorrt_llm.LLM``: real daemon, shim, wrapper, HTTP, client; a stand-in package.

The stand-in's ranks are processes of their own that import the real step timer because its class was registered
where the engine is made; their GPU is a clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.external import PROFILING_PATH
from daemon.profile_client import WorkerProfileSession
from fingerprint.config import KvFormat
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import ConfigError, EngineError, IserveError, UnavailableError
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.whole_points import whole_points
from fingerprint.families import load_spec
from tests.daemon.engines.tensorrt_environment import make_checkpoint, make_tensorrt_llm
from tests.daemon.engines.vllm_stand_in import costs
from tests.daemon.profiling_house import BITS16, FP8, LAYERS, House, cmdline
from tests.golden_words import Golden

pytestmark = pytest.mark.process


class TensorRtHouse(House):
    engine_name = "tensorrt-llm"

    def load(self, session: WorkerProfileSession, layers: int = 2, **changes: Any) -> None:
        behaviour = changes.pop("behaviour", {})
        self.load_folder(session, self.fingerprint(layers, **behaviour), layers, **changes)

    def load_folder(self, session: WorkerProfileSession, folder: Path, layers: int = 2, **changes: Any) -> None:
        values = {
            "weights": BITS16,
            "kv": KvFormat.BITS16,
            "layers_per_stage": (layers,),
            "max_batch": 8,
            "max_context_tokens": 512,
            "kv_tokens": 2048,
        }
        session.load(folder, **(values | changes))

    def ranks(self) -> list[int]:
        return sorted(pid for pid in self.processes() if "spawn_main" in cmdline(pid))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, make_node: Callable[[Path], Any]) -> Iterator[TensorRtHouse]:
    folder = tmp_path_factory.mktemp("tensorrt-llm-worker")
    node = make_node(folder / "home")
    node.offer_gpus(folder / "nvml")
    node.extra_env["ISERVE_TENSORRT_LLM_PYTHON"] = str(make_tensorrt_llm(folder / "env"))
    model, fingerprints = make_checkpoint(folder / "model", num_hidden_layers=LAYERS), folder / "fingerprints"
    fingerprints.mkdir()
    try:
        node.start(real_engines=True, cpu_devices=None)
        yield TensorRtHouse(node, fingerprints, model)
    finally:
        node.clear()


@pytest.fixture(scope="module")
def kept(house: TensorRtHouse) -> Iterator[WorkerProfileSession]:
    """Yield one worker for all tests that do not end it; each loads what it needs."""
    with house.target() as target:
        session = target.open(tp=1, pp=1)
        try:
            yield session
        finally:
            session.close()


def bursts(session: WorkerProfileSession, batch=2, input_tokens=20, output_tokens=3, **changes):
    values = {"repeat": 1, "most": 2, "until_s": 60.0} | changes
    return session.bursts(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, **values)


class TestMeasuring:
    def test_a_burst_is_its_steps_repeated_as_asked(self, house, kept) -> None:
        """The engine is one step ahead of what it has read: a request does not know its last token yet."""
        house.load(kept)
        for repeat in (1, 4):
            runs = bursts(kept, repeat=repeat)
            assert len(runs) == 2
            for run in runs:
                facts = [(s.tokens, s.prefill_tokens, s.context_tokens, s.attention_pairs) for s in run.steps]
                assert facts == [(40, 40, 0, 420), (2, 0, 40, 42), (2, 0, 42, 44)]
                prefill = costs.OTHER_S + 2 * costs.layer_s(40, 420)
                decode = costs.OTHER_S + 2 * costs.layer_s(2, 2)  # a graph is of the size it was captured for
                assert run.steps[0].forward_s == pytest.approx(repeat * prefill)
                assert [s.forward_s for s in run.steps[1:]] == pytest.approx([repeat * decode] * 2)
                assert {(round(s.lead_s, 7), round(s.tail_s, 7)) for s in run.steps} == {
                    (costs.LEAD_S, costs.TAIL_S)
                }
                assert run.e2e_s >= run.device_s
                assert (run.sm_clock_mhz, run.power_w) == (210.0, 25.0)

    def test_a_long_prompt_is_cut_by_the_limit_of_the_worker(self, house, kept) -> None:
        house.load(kept)
        (run,) = bursts(kept, 3, 200, 2, most=1)
        assert [s.prefill_tokens for s in run.steps] == [256, 255, 89, 0]

    def test_without_records_nothing_is_recorded(self, house, kept) -> None:
        house.load(kept)
        assert [run.steps for run in bursts(kept, steps=False)] == [(), ()]

    @pytest.mark.parametrize("kv", [KvFormat.BITS16, KvFormat.FP8])
    def test_memory_is_what_its_own_dry_run_shows(self, house, kept, kv) -> None:
        house.load(kept, kv=kv)
        (rank,) = kept.memory()
        assert rank.weights_bytes == costs.OTHER_BYTES + 2 * costs.LAYER_BYTES
        assert rank.activation_peak_bytes == costs.ACTIVATION_BYTES
        assert rank.runtime_bytes == costs.CONTEXT_BYTES
        assert (rank.kv_block_tokens, rank.kv_room_tokens) == (32, 32 * (-(-(2048 + 2 * 8) // 32) + 8))
        per_token = load_spec(house.model).kv_bytes_per_token_per_layer(kv)
        assert rank.kv_bytes == rank.kv_room_tokens * per_token * 2

    def test_two_gpus_are_two_ranks(self, house) -> None:
        with house.target() as target:
            session = target.open(tp=2, pp=1)
            try:
                house.load(session, behaviour={"others_are_late_s": 0.5})  # than the one whose word is waited for
                first, second = session.memory()
                assert (first.rank, first.stage, second.rank, second.stage) == (0, 0, 1, 0)
                assert second.kv_room_tokens == first.kv_room_tokens  # and not that of its dry run
                (run,) = bursts(session, most=1)
                assert len(run.steps) == 3
            finally:
                session.close()
        assert not house.processes()

    def test_a_profile_of_it_tells_the_whole_model(self, house, golden: Golden) -> None:
        """The real driver over all of this: decode steps are those of the clock, exactly."""
        plan = DepthTiedPlan(
            points=((1, 32), (4, 64)),
            shallow_points=((1, 32), (4, 64)),
            degrees=((1, 1), (1, 2)),
            long_output=9,
            max_batch=8,
            max_context_tokens=128,
            settle_s=0.0,
            budget_s=60.0,
        )
        with house.target() as target:
            profile = depth_tied_profile("m", load_spec(house.model), target, house.fingerprint, plan)
        (note,) = profile.notes
        assert "tp=1 pp=2" in note
        golden("daemon", note)
        for point in whole_points(profile.timing, LAYERS):
            whole = costs.OTHER_S + LAYERS * costs.layer_s(point.batch, point.batch)
            assert point.steady_s == pytest.approx(whole + costs.LEAD_S + costs.TAIL_S, rel=1e-6)
        (key,) = CountedMemory(profile).keys
        assert (key.tp, key.pp) == (1, 1)
        assert dict(profile.machine.versions)["engine"] == "tensorrt-llm 1.2.1"
        assert not house.processes()


@pytest.mark.parametrize(("asked", "hooked"), [("", "False"), ("rpc", "False"), ("unix:x", "True")])
def test_without_being_asked_the_step_timer_hooks_nothing(house, asked, hooked) -> None:
    program = (
        "import iserve_profiling.tensorrt_llm_step_timer\n"
        "from tensorrt_llm._torch.pyexecutor.py_executor import PyExecutor\n"
        "print(hasattr(PyExecutor, 'iserve_hooked'))"
    )
    done = subprocess.run(
        [house.node.extra_env["ISERVE_TENSORRT_LLM_PYTHON"], "-c", program],
        env={"PYTHONPATH": PROFILING_PATH, "ISERVE_STEP_TIMER": asked},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == hooked


class TestRefusals:
    def test_a_format_that_it_would_not_make_while_loading(self, house, kept, golden: Golden) -> None:
        with golden.raises("daemon", ConfigError):
            house.load(kept, weights=FP8)
        with golden.raises("daemon", ConfigError):
            house.load(kept, kv=KvFormat.INT8)
        with golden.raises("daemon", UnavailableError):
            bursts(kept)

    def test_layers_of_several_kinds(self, house, kept, golden: Golden) -> None:
        folder = house.fingerprint(2)
        config = json.loads((folder / "config.json").read_text())
        kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
        (folder / "config.json").write_text(json.dumps(config | kinds))
        with golden.raises("daemon", ConfigError):
            house.load_folder(kept, folder)

    def test_steps_that_cannot_be_all_of_a_burst_are_not_kept(self, house, kept, golden: Golden) -> None:
        """A release that counts otherwise than the one that was read."""
        house.load(kept, behaviour={"counts_otherwise": True})
        with golden.raises("daemon", EngineError):
            bursts(kept)

    def test_a_release_with_other_methods_is_refused_before_it_is_started(
        self, house, kept, golden: Golden
    ) -> None:
        (packages,) = (house.folder.parent / "env").glob("lib/python*/site-packages/tensorrt_llm")
        file = packages / "_torch" / "pyexecutor" / "py_executor.py"
        whole = file.read_text()
        file.write_text(whole.replace("_sample_async", "_sample"))
        try:
            with (
                house.target() as target,
                contextlib.closing(target.open(tp=1, pp=1)) as other,
                golden.raises("daemon", EngineError),
            ):
                house.load(other)
        finally:
            file.write_text(whole)


class TestFailures:
    @pytest.mark.parametrize(
        "behaviour",
        [
            {"start_error": "CUDA error: no kernel image"},
            {"no_memory_for_kv": True},
            {"dies_at_start": True},
        ],
        ids=["error", "no-memory-for-kv", "killed"],
    )
    def test_an_engine_that_does_not_start_is_told_and_another_load_goes_well(
        self, house, kept, behaviour, golden: Golden
    ) -> None:
        with golden.raises("daemon", EngineError):
            house.load(kept, behaviour=behaviour)
        house.load(kept)
        assert bursts(kept)

    def test_an_architecture_that_it_lacks_is_named(self, house, kept, golden: Golden) -> None:
        folder = house.fingerprint(2)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BloomForCausalLM"]}))
        with golden.raises("daemon", EngineError):
            house.load_folder(kept, folder)

    def test_out_of_memory_in_a_run_is_told(self, house, kept, golden: Golden) -> None:
        house.load(kept, behaviour={"no_memory_at_tokens": 100})
        with golden.raises("daemon", EngineError):
            bursts(kept, 4, 60)

    def test_a_rank_that_is_killed_while_the_engine_waits_ends_the_worker(self, house) -> None:
        """The engine may or may not notice; the driver's next point gets a fresh worker."""
        with house.target() as target:
            session = target.open(tp=1, pp=1)
            try:
                house.load(session, behaviour={"dies_at_batch": 4})
                assert bursts(session)
                with pytest.raises(IserveError, match=r"its rank process [0-9]+ died"):
                    bursts(session, 4, 60)
            finally:
                session.close()
        assert not house.processes()

    @pytest.mark.long
    def test_kill_9_of_the_worker_leaves_no_rank(self, house, until) -> None:
        with house.target() as target:
            session = target.open(tp=1, pp=1)
            house.load(session)
            ranks = house.ranks()
            assert len(ranks) == 1
            (worker,) = (
                p
                for p in house.processes()
                if "iserve_profiling.tensorrt_llm" in cmdline(p) and "wrapper" not in cmdline(p)
            )
            os.kill(worker, signal.SIGKILL)
            until(lambda: not set(ranks) & house.processes(), "the rank is gone")
            session.close()
        assert not house.processes()
