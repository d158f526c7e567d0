"""The step timer inside vLLM's worker, on a GPU that is a clock: both model runners, repeats, facts of steps."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from daemon.engines.external import PROFILING_PATH
from tests.daemon.engines.vllm_stand_in import costs
from tests.golden_words import Golden

HERE = Path(__file__).parent
STAND_IN = HERE / "engines" / "vllm_stand_in"
TIMER = Path(PROFILING_PATH) / "iserve_profiling" / "step_timer.py"

BROKEN_GRAPHS = "vllm.compilation.breakable_cudagraph"
LAYERS = 4
NEWER, OLDER = "LlamaForCausalLM", "FalconForCausalLM"
NAMES = ("host_s", "tokens", "sequences", "prefill_tokens", "context_tokens", "attention_pairs")
TIMES = ("gap_s", "lead_s", "forward_s", "tail_s")


def module_of(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


class Rig:
    """A worker of the stand-in with the timer registered in its process."""

    def __init__(self, timer: ModuleType, torch: ModuleType, worker: ModuleType, core: ModuleType) -> None:
        self.timer, self.torch, self.worker_module, self.core = timer, torch, worker, core

    def start(self, architecture: str = NEWER, *, eager: bool = False) -> Any:
        settings = {
            "architecture": architecture,
            "windows": [None] * LAYERS,
            "total_bytes": 48 * 2**30,
            "gpu_memory_utilization": 0.85,
            "cache_config": SimpleNamespace(block_size=16),
            "model_config": SimpleNamespace(enforce_eager=eager),
        }
        self.worker = worker = self.worker_module.Worker(settings, 0)
        worker.load_model()
        worker.determine_available_memory()
        worker.initialize_from_config(self.kv_config([["layer"] * LAYERS]))
        worker.compile_or_warm_up_model()
        return worker

    def kv_config(self, groups: list[list[str]], size: int = 4000) -> Any:
        """The cache of ``groups`` of layers in the release's form, ``size`` bytes in all."""
        if self.worker_module.IS_NEWER:
            strides = {"layer_stride": 20, "block_stride": 80, "offset": 0}
            tensors = [SimpleNamespace(size=size, layers=group, **strides) for group in groups]
        else:
            pools = max(map(len, groups))
            tensors = [SimpleNamespace(size=size // pools, shared_by=["layer"])] * pools
        spec = SimpleNamespace(page_size_bytes=320, block_size=16)
        named = [SimpleNamespace(layer_names=group, kv_cache_spec=spec) for group in groups]
        return SimpleNamespace(num_blocks=50, kv_cache_tensors=tensors, kv_cache_groups=named)

    def run(self, lengths: list[int], output_tokens: int, *, room: int = 64) -> None:
        limits = {"max_num_batched_tokens": room, "max_num_seqs": 64}
        for step in self.core.schedule(lengths, output_tokens, limits):
            self.worker.execute_model(step)
            self.worker.sample_tokens(None)

    def read(self) -> list[dict[str, float]]:
        return [dict(zip(self.timer.COLUMNS, row, strict=True)) for row in self.worker.iserve_timer_read()]

    def forward_s(self, tokens: int, pairs: int) -> float:
        return costs.OTHER_S + LAYERS * costs.layer_s(tokens, pairs)


def make_rig(monkeypatch: pytest.MonkeyPatch, *, newer: bool, asked: str = "rpc") -> Rig:
    """Register the timer in a process that holds a stand-in of 0.24 or, ``newer``, of 0.33."""
    monkeypatch.setenv("ISERVE_STEP_TIMER", asked)
    for name in (
        "torch",
        "vllm",
        "vllm.v1",
        "vllm.v1.worker",
        "vllm.v1.worker.gpu_worker",
        "vllm.costs",
        "vllm.envs",
        "vllm.release",
        "vllm.compilation",
        BROKEN_GRAPHS,
        "iserve_timer",
        "core",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored whatever follows
    torch = module_of("torch", STAND_IN / "torch_on_paper.py")
    sys.modules["vllm.release"].IS_NEWER = newer
    for name in ("costs", "checks", "deltas", "envs", "routers"):
        setattr(sys.modules["vllm"], name, module_of(f"vllm.{name}", STAND_IN / f"{name}.py"))
    module_of(BROKEN_GRAPHS, STAND_IN / "breakable_cudagraph.py")
    worker = module_of("vllm.v1.worker.gpu_worker", STAND_IN / "gpu_worker.py")
    core = module_of("core", STAND_IN / "core.py")
    monkeypatch.syspath_prepend(PROFILING_PATH)
    timer = module_of("iserve_timer", TIMER)
    timer.register()
    return Rig(timer, torch, worker, core)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return make_rig(monkeypatch, newer=False)


@pytest.fixture
def newer_rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return make_rig(monkeypatch, newer=True)


class TestWhatAStepTook:
    @pytest.mark.parametrize("runner", [NEWER, OLDER])
    @pytest.mark.parametrize("repeat", [1, 3, 16])
    def test_exactly_the_forward_is_timed_and_repeated_and_nothing_else(self, rig, runner, repeat) -> None:
        """Prefill, then decode steps: a graph's replay outside the forward, or graphs inside it."""
        rig.start(runner)
        rig.worker.iserve_timer_start(repeat, True)
        rig.run([10, 10], 4)
        prefill, *decode = rig.read()
        assert (prefill["prefill_tokens"], len(decode)) == (20, 3)
        assert prefill["forward_s"] == pytest.approx(repeat * rig.forward_s(20, 110))
        for number, step in enumerate(decode):
            pairs = 2 if runner == NEWER else 2 * (11 + number)  # a whole graph is of the size it was captured for
            assert step["forward_s"] == pytest.approx(repeat * rig.forward_s(2, pairs))
        for step in (prefill, *decode):
            assert step["lead_s"] == pytest.approx(costs.LEAD_S)
            assert step["tail_s"] == pytest.approx(costs.TAIL_S)
            assert step["gap_s"] == 0.0

    @pytest.mark.parametrize("runner", [NEWER, OLDER])
    def test_the_parts_of_all_steps_are_all_that_the_gpu_did(self, rig, runner) -> None:
        rig.start(runner)
        begun = rig.torch.stream.now_s
        rig.worker.iserve_timer_start(5, True)
        rig.run([7, 100, 3], 9)
        rows = rig.read()
        assert sum(row[name] for row in rows for name in TIMES) == pytest.approx(rig.torch.stream.now_s - begun)

    def test_a_gap_is_what_the_gpu_waited_between_steps(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(1, True)
        rig.run([4], 1)
        rig.torch.stream.now_s += 0.25
        rig.run([4], 1)
        assert [row["gap_s"] for row in rig.read()] == pytest.approx([0.0, 0.25])

    def test_a_forward_within_a_forward_is_not_repeated_again(self, rig) -> None:
        """Graphs of layers within the repeated call: r times in all, not r times r."""
        rig.start(OLDER)
        rig.worker.iserve_timer_start(4, False)
        calls = rig.worker.model_runner.model.calls
        before = rig.torch.stream.now_s
        rig.run([16], 1)
        assert rig.worker.model_runner.model.calls - calls == 4
        took = rig.torch.stream.now_s - before - costs.LEAD_S - costs.TAIL_S
        assert took == pytest.approx(4 * rig.forward_s(16, 136))

    def test_what_is_no_step_is_never_repeated(self, rig) -> None:
        """Capture and profile runs, and a step without tokens."""
        rig.start()
        rig.worker.iserve_timer_start(8, True)
        rig.run([4], 1)
        assert len(rig.read()) == 1
        rig.worker.iserve_timer_start(8, True)
        model, before = rig.worker.model_runner.model, rig.torch.stream.now_s
        model(5, {None: 5})
        assert rig.torch.stream.now_s - before == pytest.approx(rig.forward_s(5, 5))
        with rig.torch.cuda.graph(rig.torch.cuda.CUDAGraph()) as _:
            model(5, {None: 5})
        nothing = SimpleNamespace(total_num_scheduled_tokens=0, num_scheduled_tokens={})
        assert rig.worker.execute_model(nothing) == "nothing to do"
        assert rig.read() == []

    def test_a_forward_that_fails_leaves_the_timer_as_it_was(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(2, True)
        model = rig.worker.model_runner.model
        whole, model.run_layer = model.run_layer, lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            rig.run([100], 1, room=128)
        model.run_layer, rig.worker.model_runner.unsampled = whole, 0
        rig.run([10], 2)
        rows = rig.read()
        assert [row["tokens"] for row in rows] == [10, 1]
        assert rows[0]["forward_s"] == pytest.approx(2 * rig.forward_s(10, 55))


class TestMemory:
    """The engine's own count, in the words of both forms; a figure that it lacks is an error."""

    @pytest.mark.parametrize("newer", [False, True])
    def test_figures_are_the_same_whichever_way_the_release_counts(self, monkeypatch, newer) -> None:
        worker = make_rig(monkeypatch, newer=newer).start()
        counted = worker.iserve_memory()
        assert counted["weights"] == costs.OTHER_BYTES + LAYERS * costs.LAYER_BYTES
        assert counted["non_torch_memory"] == costs.CONTEXT_BYTES
        assert counted["peak_activation_memory"] == costs.ACTIVATION_BYTES
        assert counted["graphs"] == costs.GRAPH_BYTES  # not of the capture that only estimates
        assert counted["cudagraph_memory_estimate"] == (costs.GRAPH_ESTIMATE_BYTES if newer else 0)
        expected = {"kv_bytes": 4000, "blocks": 50, "kv_tensors": LAYERS, "kv_layers": LAYERS}
        assert {name: counted[name] for name in expected} == expected

    @pytest.mark.parametrize("newer", [False, True])
    def test_groups_that_share_blocks_are_counted_once(self, monkeypatch, newer) -> None:
        rig = make_rig(monkeypatch, newer=newer)
        layout = rig.timer.kv_layout(rig.kv_config([["a", "b"], ["c", "d"], ["e"]]))
        assert layout == {"kv_bytes": 4000, "blocks": 50, "kv_tensors": 2, "kv_layers": 5}

    def test_what_each_layer_keeps_is_read_from_its_specification(self, newer_rig) -> None:
        half = SimpleNamespace(itemsize=2)
        window = SimpleNamespace(
            real_page_size_bytes=1600, page_size_bytes=2048, block_size=16, sliding_window=128
        )
        state = SimpleNamespace(
            shapes=((3, 8), (2, 4, 4)), dtypes=(half, SimpleNamespace(itemsize=4)), block_size=64
        )
        latent = SimpleNamespace(page_size_bytes=640, block_size=64)
        shared = SimpleNamespace(
            block_size=64, kv_cache_specs={"layers.3.attn": latent, "layers.3.indexer.k_cache": latent}
        )
        config = SimpleNamespace(
            kv_cache_groups=[
                SimpleNamespace(layer_names=["model.layers.2.mixer", "model.layers.0.mixer"], kv_cache_spec=state),
                SimpleNamespace(layer_names=["model.layers.1.attn"], kv_cache_spec=window),
                SimpleNamespace(layer_names=list(shared.kv_cache_specs), kv_cache_spec=shared),
            ]
        )
        state_bytes = 2 * 24 + 4 * 32
        assert newer_rig.timer.kept_by_layer(config) == [
            [0, 0.0, state_bytes, None],
            [1, 100.0, 0, 128],
            [2, 0.0, state_bytes, None],
            [3, 20.0, 0, None],
        ]

    def test_a_specification_that_says_neither_is_an_error(self, newer_rig) -> None:
        config = newer_rig.kv_config([["a"]])
        config.kv_cache_groups[0].kv_cache_spec = SimpleNamespace(block_size=16)
        with pytest.raises(AttributeError):
            newer_rig.timer.kept_by_layer(config)

    def test_tensors_that_lie_on_the_host_are_not_the_gpus(self, newer_rig) -> None:
        config = newer_rig.kv_config([["a", "b"]])
        config.kv_cache_tensors.append(SimpleNamespace(size=9000, layers=["c"], host_resident=True))
        assert newer_rig.timer.kv_layout(config)["kv_bytes"] == 4000

    @pytest.mark.parametrize(
        "name", ["peak_activation_memory", "total_consumed", "requested_memory", "cudagraph_memory_estimate"]
    )
    def test_a_figure_that_a_release_does_not_keep_is_an_error_and_never_zero(self, newer_rig, name) -> None:
        worker = newer_rig.start()
        delattr(worker, name)
        with pytest.raises(AttributeError):
            worker.iserve_memory()

    @pytest.mark.parametrize("newer", [False, True])
    def test_graphs_that_are_captured_unseen_are_an_error_and_never_zero(
        self, monkeypatch, newer, golden: Golden
    ) -> None:
        rig = make_rig(monkeypatch, newer=newer)
        monkeypatch.setattr(rig.worker_module.Worker, "compile_or_warm_up_model", lambda _: None)
        with golden.raises("daemon", RuntimeError):
            rig.start().iserve_memory()

    @pytest.mark.parametrize("runner", ["ModelRunner", "GPUModelRunner"])
    def test_graphs_whose_bytes_are_not_told_are_an_error_and_never_zero(self, rig, monkeypatch, runner) -> None:
        monkeypatch.setattr(getattr(rig.worker_module, runner), "capture_model", lambda _: None)
        worker = rig.start(NEWER if runner == "ModelRunner" else OLDER)
        with pytest.raises(RuntimeError, match=f"capture_model of {runner} gave None"):
            worker.iserve_memory()

    @pytest.mark.parametrize("newer", [False, True])
    def test_an_engine_that_captures_no_graphs_has_none(self, monkeypatch, newer) -> None:
        rig = make_rig(monkeypatch, newer=newer)
        assert rig.start(eager=True).iserve_memory()["graphs"] == 0

    def test_a_cache_in_neither_form_is_an_error(self, newer_rig) -> None:
        config = newer_rig.kv_config([["a"]])
        config.kv_cache_tensors = [SimpleNamespace(size=1, pages=2)]
        with pytest.raises(AttributeError, match="layers"):
            newer_rig.timer.kv_layout(config)

    def test_memory_alone_is_told_without_timing_anything(self, monkeypatch) -> None:
        rig = make_rig(monkeypatch, newer=True, asked="memory")
        worker = rig.start()
        assert worker.iserve_memory()["blocks"] == 50
        assert not hasattr(worker, "iserve_timer_start")
        assert "run_forward" not in repr(worker.model_runner.model.forward)


class TestNewerRelease:
    def test_steps_are_timed_and_repeated_as_before(self, newer_rig) -> None:
        """Every architecture is on the newer runner there, whose warm-up captures twice."""
        newer_rig.start(OLDER)
        newer_rig.worker.iserve_timer_start(3, True)
        newer_rig.run([10, 10], 4)
        prefill, *decode = newer_rig.read()
        assert prefill["forward_s"] == pytest.approx(3 * newer_rig.forward_s(20, 110))
        assert [step["forward_s"] for step in decode] == pytest.approx([3 * newer_rig.forward_s(2, 2)] * 3)

    def test_broken_graphs_are_refused(self, newer_rig, monkeypatch, golden: Golden) -> None:
        """A step is several replays there, each of which would count as a forward."""
        monkeypatch.setattr(sys.modules[BROKEN_GRAPHS], "is_breakable_cudagraph_enabled", lambda: True)
        with golden.raises("daemon", RuntimeError):
            newer_rig.start()

    @pytest.mark.parametrize("newer", [False, True])
    def test_a_release_that_does_not_tell_whether_graphs_are_broken_is_refused(
        self, monkeypatch, newer, golden: Golden
    ) -> None:
        """Each one from 0.24 on tells; one that does not may run steps of several replays."""
        rig = make_rig(monkeypatch, newer=newer)
        del sys.modules[BROKEN_GRAPHS].is_breakable_cudagraph_enabled
        with golden.raises("daemon", RuntimeError):
            rig.start()


class TestFacts:
    def test_a_mixed_step_is_told_apart(self, rig) -> None:
        """In steps of 64, the first of two prompts of 40 decodes with the rest of the second."""
        rig.start()
        rig.worker.iserve_timer_start(1, True)
        rig.run([40, 40], 3)
        facts = [tuple(int(row[name]) for name in NAMES[1:]) for row in rig.read()]
        assert facts == [
            (64, 2, 64, 0, 40 * 41 // 2 + 24 * 25 // 2),
            (17, 2, 16, 40 + 24, 41 + 16 * 24 + 16 * 17 // 2),
            (2, 2, 0, 41 + 40, 42 + 41),
            (1, 1, 0, 41, 42),
        ]

    def test_a_prompt_of_one_token_is_a_prompt(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(1, True)
        rig.run([1, 4], 2)
        assert [(row["tokens"], row["prefill_tokens"]) for row in rig.read()] == [(5, 5), (2, 0)]

    def test_pairs_are_those_of_a_causal_mask(self, rig) -> None:
        for sizes in ([(1, 0)], [(1, 9)], [(5, 0), (3, 7)], [(40, 40), (1, 1), (17, 0)]):
            counted = sum(1 for q, c in sizes for i in range(q) for j in range(c + q) if j <= c + i)
            assert rig.timer.attention_pairs([q for q, _ in sizes], [c for _, c in sizes]) == counted

    def test_the_host_s_clock_orders_them(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(1, True)
        rig.run([4, 4], 6)
        begun = [row["host_s"] for row in rig.read()]
        assert begun == sorted(begun)


class TestRecording:
    def test_nothing_is_recorded_unless_asked_but_repeats_go_on(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(4, False)
        before = rig.torch.stream.now_s
        rig.run([10], 1)
        assert rig.torch.stream.now_s - before > 4 * rig.forward_s(10, 55)
        assert rig.read() == []

    def test_reading_ends_it_and_a_start_forgets_what_was_before(self, rig) -> None:
        rig.start()
        rig.worker.iserve_timer_start(1, True)
        rig.run([10], 2)
        assert len(rig.read()) == 2
        rig.run([10], 2)
        assert rig.read() == []
        rig.worker.iserve_timer_start(1, True)
        rig.run([10], 3)
        rig.worker.iserve_timer_start(2, True)
        rig.run([10], 1)
        (row,) = rig.read()
        assert row["forward_s"] == pytest.approx(2 * rig.forward_s(10, 55))

    def test_steps_that_the_device_has_not_done_yet_stay(self, rig) -> None:
        rig.start()
        timer = rig.timer.TIMER
        rig.worker.iserve_timer_start(1, True)
        rig.run([10], 1)
        rig.torch.cuda.synchronize()
        rig.run([10], 2)
        assert len(timer.read(wait=False)) == 1
        assert len(timer.read(wait=True)) == 2

    def test_a_reading_between_two_steps_takes_no_gap_away(self, rig) -> None:
        """A file is written every second, whatever the steps are about."""
        rig.start()
        timer = rig.timer.TIMER

        def gaps(*, read_after_each: bool) -> list[float]:
            rig.worker.iserve_timer_start(1, True)
            rows = []
            for _ in range(4):
                rig.run([10], 1)
                rows += timer.read() if read_after_each else []
                rig.torch.stream.now_s += 0.25
            return [row[6] for row in rows + timer.read()]

        assert gaps(read_after_each=True) == pytest.approx([0.0, 0.25, 0.25, 0.25])
        assert gaps(read_after_each=False) == pytest.approx([0.0, 0.25, 0.25, 0.25])

    def test_a_step_that_ends_while_its_turn_passes_is_not_lost(self, rig, monkeypatch) -> None:
        """The device goes on between two questions of another thread: the first step is asked too early, the
        second is done."""
        rig.start()
        timer = rig.timer.TIMER
        rig.worker.iserve_timer_start(1, True)
        rig.run([10], 2)
        rig.torch.cuda.synchronize()
        answers = iter([False, True])
        monkeypatch.setattr(rig.torch.cuda.Event, "query", lambda _: next(answers))
        early = timer.read(wait=False)
        monkeypatch.undo()
        assert [row[1] for row in early + timer.read()] == [10, 1]

    def test_events_are_used_again(self, rig) -> None:
        """A worker that records for hours makes no more of them than are under way."""
        rig.start()
        made = []
        event = rig.torch.cuda.Event
        rig.torch.cuda.Event = lambda **given: made.append(1) or event(**given)
        rig.worker.iserve_timer_start(1, True)
        for _ in range(20):
            rig.run([10], 5)
            rig.timer.TIMER.read()
        assert len(made) == 5 * 4 + 1  # one ends the step before the next

    @pytest.mark.parametrize("repeat", [0, -1])
    def test_a_repeat_below_one_is_refused(self, rig, repeat, golden: Golden) -> None:
        rig.start()
        with golden.raises("daemon", ValueError):
            rig.worker.iserve_timer_start(repeat, True)

    def test_memory_is_what_vllm_counted(self, rig) -> None:
        worker = rig.start()
        counted = worker.iserve_memory()
        assert counted["weights"] == costs.OTHER_BYTES + LAYERS * costs.LAYER_BYTES
        assert counted["peak_activation_memory"] == costs.ACTIVATION_BYTES
        assert counted["non_torch_memory"] == costs.CONTEXT_BYTES
        assert counted["graphs"] == costs.GRAPH_BYTES
        assert (counted["kv_bytes"], counted["blocks"], counted["block_tokens"]) == (4000, 50, 16)
        assert counted["available_kv"] == worker.available_kv_cache_memory_bytes > 0
        assert json.loads(json.dumps(counted)) == counted


class TestRegistering:
    def test_it_does_nothing_unless_asked(self, rig, monkeypatch) -> None:
        worker = module_of("vllm.v1.worker.gpu_worker", STAND_IN / "gpu_worker.py")
        replay = rig.torch.cuda.CUDAGraph.replay
        monkeypatch.delenv("ISERVE_STEP_TIMER")
        rig.timer.register()
        assert not hasattr(worker.Worker, "iserve_timer_start")
        assert rig.torch.cuda.CUDAGraph.replay is replay

    def test_twice_is_once(self, rig) -> None:
        """vLLM loads plugins anew in every process, and may do so twice in one."""
        execute = rig.worker_module.Worker.execute_model
        rig.timer.register()
        assert rig.worker_module.Worker.execute_model is execute

    def test_a_path_has_every_step_written_there(self, rig, tmp_path, monkeypatch) -> None:
        module_of("vllm.v1.worker.gpu_worker", STAND_IN / "gpu_worker.py")
        monkeypatch.setenv("ISERVE_STEP_TIMER", str(tmp_path / "steps-{pid}.jsonl"))
        kept = []
        monkeypatch.setattr(rig.timer.atexit, "register", lambda call, **given: kept.append((call, given)))
        rig.timer.register()
        rig.worker_module = sys.modules["vllm.v1.worker.gpu_worker"]
        rig.start()
        rig.run([10, 10], 3)
        ((flush, given),) = kept
        flush(**given)
        (file,) = tmp_path.iterdir()
        assert file.name == f"steps-{os.getpid()}.jsonl"
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        assert [row["tokens"] for row in rows] == [20, 2, 2]
        assert set(rows[0]) == set(rig.timer.COLUMNS)
