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

from tests.daemon.engines.vllm_stand_in import costs

HERE = Path(__file__).parent
STAND_IN = HERE / "engines" / "vllm_stand_in"
TIMER = HERE.parents[1] / "daemon" / "step_timer" / "iserve_step_timer.py"

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

    def start(self, architecture: str = NEWER) -> Any:
        settings = {
            "architecture": architecture,
            "windows": [None] * LAYERS,
            "total_bytes": 48 * 2**30,
            "gpu_memory_utilization": 0.85,
            "cache_config": SimpleNamespace(block_size=16),
        }
        self.worker = worker = self.worker_module.Worker(settings, 0)
        worker.load_model()
        worker.determine_available_memory()
        tensors = [SimpleNamespace(size=1000, shared_by=["layer"])] * LAYERS
        worker.initialize_from_config(SimpleNamespace(num_blocks=50, kv_cache_tensors=tensors))
        worker.compile_or_warm_up_model()
        return worker

    def run(self, lengths: list[int], output_tokens: int, *, room: int = 64) -> None:
        limits = {"max_num_batched_tokens": room, "max_num_seqs": 64}
        for step in self.core.schedule(lengths, output_tokens, limits):
            self.worker.execute_model(step)
            self.worker.sample_tokens(None)

    def read(self) -> list[dict[str, float]]:
        return [dict(zip(self.timer.COLUMNS, row, strict=True)) for row in self.worker.iserve_timer_read()]

    def forward_s(self, tokens: int, pairs: int) -> float:
        return costs.OTHER_S + LAYERS * costs.layer_s(tokens, pairs)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    monkeypatch.setenv("ISERVE_STEP_TIMER", "rpc")
    for name in (
        "torch",
        "vllm",
        "vllm.v1",
        "vllm.v1.worker",
        "vllm.v1.worker.gpu_worker",
        "vllm.costs",
        "iserve_timer",
        "core",
    ):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))  # restored whatever follows
    torch = module_of("torch", STAND_IN / "torch_on_paper.py")
    for name in ("costs", "checks"):
        setattr(sys.modules["vllm"], name, module_of(f"vllm.{name}", STAND_IN / f"{name}.py"))
    worker = module_of("vllm.v1.worker.gpu_worker", STAND_IN / "gpu_worker.py")
    core = module_of("core", STAND_IN / "core.py")
    timer = module_of("iserve_timer", TIMER)
    timer.register()
    return Rig(timer, torch, worker, core)


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


class TestFacts:
    def test_a_mixed_step_is_told_apart(self, rig) -> None:
        """Two prompts of 40 in steps of 64: the first decodes beside the rest of the second."""
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
    def test_a_repeat_below_one_is_refused(self, rig, repeat) -> None:
        rig.start()
        with pytest.raises(ValueError, match=f"repeat must be at least 1, got {repeat}"):
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
