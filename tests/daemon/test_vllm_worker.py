"""The profiling worker around ``vllm.LLM``: real daemon, shim, wrapper, HTTP and client; the package stands in.

The stand-in's engine is processes of their own that load the real step timer as a plugin; its GPU is a clock.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.profile_client import WorkerProfileSession, WorkerProfileTarget
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import KvFormat
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import ConfigError, ConflictError, EngineError, IserveError, UnavailableError
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.whole_points import whole_points
from fingerprint.families import load_spec
from fingerprint.measurements import Profile
from fingerprint.truncate import generate_shape
from tests.daemon.engines.vllm_stand_in import costs
from tests.daemon.profiling_house import (
    BITS16,
    FP8,
    GIB,
    GPUS,
    LAYERS,
    Handle,
    House,
    a_house,
    bursts,
    house,
    kept,
    session,
)
from tests.golden_words import Golden

pytestmark = pytest.mark.process

__all__ = ["house", "kept", "session"]  # fixtures


class TestMeasuring:
    @pytest.mark.parametrize("repeat", [1, 4])
    def test_a_burst_is_its_steps_repeated_as_asked(self, house, kept, repeat) -> None:
        house.load(kept, 2)
        runs = bursts(kept, repeat=repeat)
        assert len(runs) == 2
        for run in runs:
            assert [(s.tokens, s.sequences, s.prefill_tokens) for s in run.steps] == [
                (40, 2, 40),
                (2, 2, 0),
                (2, 2, 0),
            ]
            prefill = costs.OTHER_S + 2 * costs.layer_s(40, 420)
            decode = costs.OTHER_S + 2 * costs.layer_s(2, 2)
            assert run.steps[0].forward_s == pytest.approx(repeat * prefill)
            assert [s.forward_s for s in run.steps[1:]] == pytest.approx([repeat * decode] * 2)
            assert run.device_s == pytest.approx(sum(s.forward_s for s in run.steps))
            assert run.e2e_s >= run.device_s
            assert run.host_s == pytest.approx(run.e2e_s - run.device_s)
            assert (run.sm_clock_mhz, run.power_w) == (210.0, 25.0)

    def test_one_rank_of_a_group_is_a_model_like_any_other(self, house, kept, tmp_path) -> None:
        """A rank's config.json has no tokenizer, half of the heads and half of the vocabulary."""
        whole, rank = (json.loads((house.fingerprint(2) / "config.json").read_text()), tmp_path / "rank")
        generate_shape(house.model, rank, 2, tp=2)
        shape = json.loads((rank / "config.json").read_text())
        for name in ("num_attention_heads", "vocab_size"):
            assert shape[name] == whole[name] // 2
        kept.load(
            rank,
            weights=BITS16,
            kv=KvFormat.BITS16,
            layers_per_stage=(2,),
            max_batch=8,
            max_context_tokens=512,
            kv_tokens=2048,
        )
        assert [len(run.steps) for run in bursts(kept, repeat=4)] == [3, 3]

    def test_a_long_prompt_is_cut_by_the_limit_of_the_worker(self, house, kept) -> None:
        house.load(kept)
        (run,) = bursts(kept, 3, 200, 2, most=1)
        assert [s.prefill_tokens for s in run.steps] == [256, 255, 89, 0]  # the first decodes in the second step

    def test_bursts_end_with_the_count_or_the_time(self, house, kept) -> None:
        house.load(kept)
        assert len(bursts(kept, most=5)) == 5
        assert len(bursts(kept, most=5, until_s=0.0)) == 1

    def test_a_burst_in_which_kernels_were_made_is_left_out(self, house, kept) -> None:
        """A burst of a mixture of experts took 1.3 s where 60 ms were due, and no other burst did."""
        house.load(kept, behaviour={"kernels_s": 0.7})
        runs = bursts(kept, most=3, until_s=0.0)
        assert len(runs) > 1
        assert max(run.e2e_s for run in runs) < 0.7
        house.load(kept, behaviour={"kernels_s": 0.7})
        (only,) = bursts(kept, most=1)  # asked for alone: so it is reported
        assert only.e2e_s > 0.7

    @pytest.mark.parametrize("kv", [KvFormat.BITS16, KvFormat.FP8])
    def test_memory_is_what_vllm_counts_and_the_cache_has_the_room_asked_for(self, house, kept, kv) -> None:
        house.load(kept, 2, kv=kv)
        (rank,) = kept.memory()
        assert (rank.rank, rank.stage) == (0, 0)
        assert rank.weights_bytes == costs.OTHER_BYTES + 2 * costs.LAYER_BYTES
        assert rank.activation_peak_bytes == costs.ACTIVATION_BYTES
        assert (rank.runtime_bytes, rank.graph_bytes) == (costs.CONTEXT_BYTES, costs.GRAPH_BYTES)
        assert rank.kv_block_tokens == 16
        assert rank.kv_room_tokens == 16 * (2048 // 16 + 8 + 1)
        per_token = load_spec(house.model).kv_bytes_per_token_per_layer(kv)
        assert rank.kv_bytes == rank.kv_room_tokens * per_token * 2
        held = rank.weights_bytes + rank.activation_peak_bytes + rank.runtime_bytes
        assert rank.kv_blocks == pytest.approx((20 * GIB - held) // (2 * 16 * per_token), rel=1e-3)

    def test_how_tokens_fall_on_experts_is_counted(self, house, kept) -> None:
        house.load(kept, 3, behaviour={"experts": (8, 2)})
        (rank,) = kept.memory()
        assert rank.expert_routing == "uniform"
        assert rank.expert_count is not None
        assert (rank.expert_count.experts, rank.expert_count.choices) == (8, 2 * 2 * 511)  # two prompts
        assert rank.expert_count.layers == 3
        assert 1 < rank.expert_count.busiest <= rank.expert_count.busiest_layer < 1.3
        (again,) = kept.memory()
        assert again.expert_count.choices == rank.expert_count.choices  # counted anew
        house.load(kept, 3)
        (dense,) = kept.memory()
        assert (dense.expert_routing, dense.expert_count) == ("", None)

    def test_the_room_asked_for_holds_what_it_is_asked_for(self, house, kept) -> None:
        """Each sequence's last block is partly empty; the stand-in's engine dies rather than preempt."""
        house.load(kept, max_batch=8, max_context_tokens=70, kv_tokens=8 * 70)
        (run,) = bursts(kept, 8, 67, 3, most=1)
        assert sum(s.prefill_tokens for s in run.steps) == 8 * 67

    def test_the_machine_is_what_the_daemon_knows(self, kept) -> None:
        machine = kept.machine()
        assert machine.device.name == "a6000"
        assert machine.driver == "570.86.15"
        assert dict(machine.versions)["engine"] == "vllm 0.24.0"

    def test_fingerprints_follow_each_other_in_one_worker(self, house, kept) -> None:
        for layers, weights in ((2, BITS16), (1, BITS16), (2, FP8)):
            house.load(kept, layers, weights=weights)
            assert kept.memory()[0].weights_bytes == costs.OTHER_BYTES + layers * costs.LAYER_BYTES
            assert len(house.engine(kept)) == 1

    @pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
    def test_two_gpus_are_two_ranks_of_their_stages(self, house, tp, pp) -> None:
        """The stand-in refuses to start with NVLink multicast on when tp=2."""
        with house.target() as target:
            session = target.open(tp=tp, pp=pp)
            try:
                house.load(session, 2 * pp, stages=pp)
                ranks = session.memory()
                assert [(rank.rank, rank.stage) for rank in ranks] == [(0, 0), (1, 1 // tp)]
                assert {rank.weights_bytes for rank in ranks} == {costs.OTHER_BYTES + 2 * costs.LAYER_BYTES}
                (run,) = bursts(session, most=1)
                assert len(run.steps) == 3
            finally:
                session.close()
        assert not house.processes()

    def test_a_profile_of_it_tells_the_whole_model(self, house) -> None:
        """The real driver over all of this: decode steps and memory are those of the clock, exactly."""
        plan = DepthTiedPlan(
            points=((1, 32), (4, 64)),
            shallow_points=((1, 32), (4, 64)),
            long_output=9,
            max_batch=8,
            max_context_tokens=128,
            settle_s=0.0,
            budget_s=60.0,
        )
        with house.target() as target:
            profile = depth_tied_profile("m", load_spec(house.model), target, house.fingerprint, plan)
        assert (profile.complete, profile.notes) == (True, ())
        assert_whole(profile, house)
        assert not house.processes()

    @pytest.mark.parametrize(
        ("family", "num_layers", "depths"),
        [("gemma2", 8, (4, 2)), ("gemma3_text", 14, (8, 2))],
        ids=["pattern", "pattern-and-rest"],
    )
    def test_layers_of_several_kinds_share_blocks_and_tell_the_whole_model(
        self, house, tmp_path, family, num_layers, depths
    ) -> None:
        """The stand-in lays groups of layers over one pool of blocks, and would die rather than preempt."""
        gemma = House(house.node, tmp_path / "cuts", tmp_path / "model")
        for folder in (gemma.folder, gemma.model):
            folder.mkdir()
        config = json.loads((house.model / "config.json").read_text())
        architecture = {"gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}[family]
        config |= {"model_type": family, "architectures": [architecture], "num_hidden_layers": num_layers}
        config |= {"sliding_window": 40, "max_position_embeddings": 1024, "tie_word_embeddings": True}
        (gemma.model / "config.json").write_text(json.dumps(config))
        spec = load_spec(gemma.model)
        at = ((1, 32), (4, 64))
        plan = DepthTiedPlan(
            points=at, shallow_points=at, long_output=9, max_batch=8, max_context_tokens=128, settle_s=0.0
        )
        with gemma.target() as target:
            profile = depth_tied_profile("m", spec, target, gemma.fingerprint, plan)
        assert (profile.complete, profile.notes) == (True, ())
        assert tuple(point.num_layers for point in profile.memory) == depths
        beside = []  # what a first token takes in addition to the step, in steps: real time of this machine
        for point in whole_points(profile.timing, num_layers):
            prompts = {w: point.batch * costs.pairs(point.input_tokens, w) for w in spec.windows}
            tokens = point.batch * point.input_tokens
            prompt_s = costs.OTHER_S + sum(costs.layer_s(tokens, prompts[w]) for w in spec.windows)
            first = [r.steps[0] for p in profile.timing for r in p.runs if p.batch == point.batch]
            assert {s.prefill_tokens for s in first} == {tokens}  # one step, whose forward the whole model's is
            beside_s = point.ttft_s - prompt_s
            assert beside_s >= costs.LEAD_S + costs.TAIL_S
            beside.append(beside_s / prompt_s)
            middle = point.input_tokens + 6.5  # of the later half of 8 steps, from the first on
            pairs = {w: point.batch * min(middle, w or middle) for w in spec.windows}
            step_s = costs.OTHER_S + sum(costs.layer_s(point.batch, pairs[w]) for w in spec.windows)
            assert point.steady_s == pytest.approx(step_s + costs.LEAD_S + costs.TAIL_S, rel=1e-6)
        assert min(beside) <= 1
        for point in profile.memory:
            (rank,) = point.ranks
            per_token = spec.kv_bytes_per_token_per_layer(KvFormat.BITS16) * point.num_layers
            assert rank.kv_bytes / rank.kv_room_tokens == pytest.approx(per_token, rel=0.02)
            assert rank.kv_room_tokens >= plan.kv_tokens
        assert not gemma.processes()


def assert_whole(profile: Profile, house: House) -> None:
    points = whole_points(profile.timing, LAYERS)
    assert {(p.batch, p.input_tokens) for p in points} == {(1, 32), (4, 64)}
    for point in points:
        whole = costs.OTHER_S + LAYERS * costs.layer_s(point.batch, point.batch)
        assert point.steady_s == pytest.approx(whole + costs.LEAD_S + costs.TAIL_S, rel=1e-6)
    memory = CountedMemory(profile)
    (key,) = memory.keys
    assert (key.tp, key.pp) == (1, 1)
    assert {point.num_layers for point in profile.memory} == {1, 2}


class TestRefusals:
    def test_before_a_load_there_is_nothing_to_measure(self, session) -> None:
        for ask in (lambda: bursts(session), session.memory):
            with pytest.raises(UnavailableError, match="nothing is loaded"):
                ask()

    @pytest.mark.parametrize(
        ("batch", "input_tokens", "output_tokens"),
        [(9, 20, 3), (1, 511, 2), (8, 260, 3)],
        ids=["batch", "long", "room"],
    )
    def test_what_does_not_fit_what_was_loaded(
        self, house, kept, batch, input_tokens, output_tokens, golden: Golden
    ) -> None:
        house.load(kept)
        with golden.raises("daemon", ConfigError):
            bursts(kept, batch, input_tokens, output_tokens)
        assert bursts(kept)  # and nothing was harmed

    def test_one_request_at_a_time(self, house, kept, golden: Golden) -> None:
        house.load(kept)
        results: list[object] = []

        def long_one() -> None:
            while not results:
                with contextlib.suppress(ConflictError):  # of a question that was there before
                    results.append(bursts(kept, 8, 60, 100, most=4, until_s=60.0, repeat=4))

        thread = threading.Thread(target=long_one)
        thread.start()
        refused: list[IserveError] = []
        while thread.is_alive() and not refused:
            try:
                kept.memory()
            except ConflictError as error:
                refused.append(error)
        thread.join()
        golden("daemon", str(refused[0]))
        assert len(results) == 1

    def test_a_path_that_is_none(self, kept) -> None:
        with pytest.raises(IserveError, match="no route /profile/nothing"):
            kept._call("POST", "/profile/nothing", {}, dict[str, str])


def test_stages_are_of_the_devices_given() -> None:
    """The target asks a daemon for two stages of the given devices."""
    asked: list[WorkerSpec] = []

    def launch(spec: WorkerSpec) -> Handle:
        asked.append(spec)
        raise EngineError("not launched")

    limits = WorkerLimits(
        max_batch=1, max_batched_tokens=1, max_context_tokens=1, kv_tokens=1, memory_bytes_per_device=1
    )
    target = WorkerProfileTarget(launch, checkpoint=Path("/m"), device_ids=GPUS, limits=limits, engine="vllm")
    with pytest.raises(EngineError, match="not launched"):
        target.open(tp=1, pp=2)
    assert asked[0].profiling
    assert asked[0].stages == tuple(StageAssignment(device_ids=(gpu,), num_layers=1) for gpu in GPUS)


@pytest.fixture(scope="module")
def unknown(
    tmp_path_factory: pytest.TempPathFactory,
    make_node: Callable[[Path], Any],
    tiny_checkpoint: Callable[[str], Path],
) -> Iterator[WorkerProfileSession]:
    with a_house(tmp_path_factory.mktemp("unknown"), make_node, tiny_checkpoint, version="0.34.0") as house:
        session = house.target().open(tp=1, pp=1)
        house.load(session, 2)
        yield session
        session.close()


class TestUnknownRelease:
    """A release that was not read: the step timer stays out, bursts are timed by the wall clock."""

    def test_a_run_is_timed_as_a_whole(self, unknown) -> None:
        reading = unknown.run(batch=2, input_tokens=20, output_tokens=3)
        gpu_s = costs.OTHER_S + 2 * costs.layer_s(40, 420)
        assert reading.device_s == reading.e2e_s >= gpu_s
        assert (reading.host_s, reading.steps) == (0.0, ())

    def test_memory_is_counted_as_in_the_newest_release(self, unknown) -> None:
        (rank,) = unknown.memory()
        assert rank.weights_bytes == costs.OTHER_BYTES + 2 * costs.LAYER_BYTES
        assert rank.runtime_bytes == costs.CONTEXT_BYTES
        assert rank.activation_peak_bytes == costs.ACTIVATION_BYTES
        assert rank.graph_bytes == costs.GRAPH_BYTES

    @pytest.mark.parametrize("asked", [{"steps": True}, {"repeat": 4, "steps": False}])
    def test_steps_and_repeats_are_refused(self, unknown, asked, golden: Golden) -> None:
        with golden.raises("daemon", ConfigError):
            unknown.bursts(batch=1, input_tokens=8, output_tokens=2, most=1, until_s=0.0, **asked)
