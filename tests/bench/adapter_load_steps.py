"""Decode steps of the embedded engine while an adapter is loaded: next to the steps, and between two of them.

    python -m tests.bench.adapter_load_steps measure OUT.json --machine WORDS [--gpu]
    python -m tests.bench.adapter_load_steps row OUT.json

``measure`` runs one engine on a random Llama of ``CONFIG``'s shape, in this process, with ``ROWS`` requests of the
base that decode. Adapters of ``RANKS`` are loaded in turns in two ways: ``next to`` is ``Engine.load_adapter``;
``between`` makes the same two calls in the engine's thread, which is what a load was before and blocks the steps.
Each is unloaded again. A gap is the time between two steps' tokens; those of a load touch the time from the order
to its answer, the rest are between two loads. Other work on the machine lengthens them, so that there are CPU
seconds of the engine's thread next to them: of a step, and of a load between two. On a CPU torch has one thread,
so that they are all that a step computes. Files were just written, and are read from the page cache.
``row`` prints the figures of docs/variants.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepPlan, StepResult
from daemon.torch_engine.runtime.engine import Engine
from daemon.torch_engine.runtime.sampling import SamplingParams
from daemon.torch_engine.runtime.sequences import SequenceRequest, TokenEvent
from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig
from tests.bench.kept import read_kept, write_kept
from tests.bench.lora_adapters import write_adapter, write_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
RANKS, ROUNDS, ROWS = (8, 64, 256), 15, 2
CONTEXT, PROMPT = 4096, 16
QUIET_STEPS = 10  # between two loads
WAYS = ("next to", "between")
PATIENCE_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A load, and the decode steps meanwhile."""

    way: str
    rank: int
    load_s: float  # from the order to its answer
    longest_gap_s: float  # of those that touch it
    quiet_gap_s: float  # median of those before it
    longest_quiet_gap_s: float
    num_steps: int  # that ended within it
    taken_s: float  # CPU seconds of the load in the engine's thread
    step_s: float  # median of the CPU seconds of the steps before it, in that thread


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSteps:
    """All loads of a run."""

    machine: str
    torch_version: str
    adapter_bytes: dict[str, int]  # by rank
    loads: tuple[Load, ...]


class _Steps:
    """Times at which steps have given tokens."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self._more = threading.Condition()

    def deliver(self, events: list[TokenEvent]) -> None:
        with self._more:
            self.times_s += sorted({event.at_s for event in events if event.token is not None})
            self._more.notify_all()

    def wait(self, count: int) -> None:
        """Wait for ``count`` further steps."""
        with self._more:
            wanted = len(self.times_s) + count
            if not self._more.wait_for(lambda: len(self.times_s) >= wanted, PATIENCE_S):
                raise TimeoutError("the engine gives no tokens")


class _Timed(LocalRunner):
    """Runner that counts what the thread of the steps does."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_s: list[float] = []
        self.taken_s = 0.0
        self._thread: int | None = None

    def step(self, plan: StepPlan) -> StepResult:
        self._thread, began_s = threading.get_ident(), time.thread_time()
        result = super().step(plan)
        self.steps_s.append(time.thread_time() - began_s)
        return result

    def prepare_adapter(self, adapter_id: int, folder: Path) -> None:
        with self._taken():
            super().prepare_adapter(adapter_id, folder)

    def switch_adapter(self, adapter_id: int) -> None:
        with self._taken():
            super().switch_adapter(adapter_id)

    @contextmanager
    def _taken(self) -> Iterator[None]:
        began_s = time.thread_time()
        yield
        if threading.get_ident() == self._thread:
            self.taken_s += time.thread_time() - began_s


def gaps_s(times_s: Sequence[float], begun_s: float, ended_s: float) -> list[float]:
    """Return the gaps between times that touch the span."""
    return [second - first for first, second in pairwise(times_s) if second > begun_s and first < ended_s]


def measure(machine: str, *, gpu: bool) -> LoadSteps:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = folder / "base"
        base.mkdir()
        (base / "config.json").write_text(json.dumps(CONFIG))
        write_checkpoint(base, CONFIG)
        for rank in RANKS:
            write_adapter(folder / str(rank), CONFIG, rank)
        num_bytes = {
            str(rank): sum(file.stat().st_size for file in (folder / str(rank)).iterdir()) for rank in RANKS
        }
        steps, runner = _Steps(), _Timed()
        if not gpu:
            torch.set_num_threads(1)
        engine = Engine(runner, deliver=steps.deliver)
        engine.start()
        try:
            loads = _loads(engine, runner, steps, folder, "cuda:0" if gpu else "cpu:0")
        finally:
            engine.close(PATIENCE_S)
    return LoadSteps(machine=machine, torch_version=torch.__version__, adapter_bytes=num_bytes, loads=loads)


def _loads(engine: Engine, runner: _Timed, steps: _Steps, folder: Path, device: str) -> tuple[Load, ...]:
    limits = WorkerLimits(
        max_batch=ROWS,
        max_batched_tokens=512,
        max_context_tokens=CONTEXT,
        kv_tokens=ROWS * CONTEXT,
        memory_bytes_per_device=8 * 2**30,
    )
    stages = (StageAssignment(device_ids=(device,), num_layers=CONFIG["num_hidden_layers"]),)  # type: ignore[arg-type]
    config = DeploymentConfig(adapter_slots=1, adapter_rank=max(RANKS))
    engine.load(folder / "base", config, stages, limits).result(PATIENCE_S)
    engine.ready()
    request = SequenceRequest(
        prompt=tuple(range(PROMPT)), max_tokens=CONTEXT - PROMPT, sampling=SamplingParams(temperature=0.0)
    )
    engine.submit([request] * ROWS)
    steps.wait(3 * QUIET_STEPS)
    found: list[Load] = []
    for number in range(ROUNDS * len(RANKS) * len(WAYS)):
        way, rank = WAYS[number % 2], RANKS[number // 2 % len(RANKS)]
        adapter_id = 10_000 + number

        def between(rank: int = rank, adapter_id: int = adapter_id) -> None:
            runner.prepare_adapter(adapter_id, folder / str(rank))
            runner.switch_adapter(adapter_id)

        def next_to(rank: int = rank) -> None:
            engine.load_adapter("adapter", folder / str(rank)).result(PATIENCE_S)

        order: Callable[[], None] = (
            next_to if way == "next to" else lambda: engine.call(between).result(PATIENCE_S)
        )
        found.append(_one(order, way, rank, steps, runner))
        if way == "next to":
            engine.unload_adapter("adapter")
        else:
            engine.call(lambda adapter_id=adapter_id: runner.unload_adapter(adapter_id)).result(PATIENCE_S)
        if not engine.has_work:
            raise RuntimeError("the requests have ended before the last load: lower ROUNDS")
    return tuple(found)


def _one(order: Callable[[], None], way: str, rank: int, steps: _Steps, runner: _Timed) -> Load:
    first, first_step = len(steps.times_s), len(runner.steps_s)
    steps.wait(QUIET_STEPS)
    begun_s, taken_s, step_s = time.perf_counter(), runner.taken_s, statistics.median(runner.steps_s[first_step:])
    order()
    ended_s = time.perf_counter()
    steps.wait(2)
    times_s = steps.times_s[first:]
    quiet = [second - at for at, second in pairwise(times_s) if second <= begun_s][1:]
    return Load(
        way=way,
        rank=rank,
        load_s=ended_s - begun_s,
        longest_gap_s=max(gaps_s(times_s, begun_s, ended_s)),
        quiet_gap_s=statistics.median(quiet),
        longest_quiet_gap_s=max(quiet),
        num_steps=sum(begun_s < at <= ended_s for at in times_s),
        taken_s=runner.taken_s - taken_s,
        step_s=step_s,
    )


def row(found: LoadSteps) -> str:
    """Return what a load takes of the steps' thread, in steps: per rank, before and now; medians of the rounds."""
    parts = []
    for rank in RANKS:
        before, now = (
            _median(found, way, rank, lambda load: load.taken_s / load.step_s) for way in reversed(WAYS)
        )
        size = found.adapter_bytes[str(rank)] / 2**20
        parts.append(f"rank {rank} ({size:.1f} MiB) {before:.3f}, now {now:.3f}")
    return "; ".join(parts)


def gap_row(found: LoadSteps) -> str:
    """Return the longest gaps of loads in median gaps of the steps before: per rank, before and now; medians."""
    parts = []
    for rank in RANKS:
        before, now = (
            _median(found, way, rank, lambda load: load.longest_gap_s / load.quiet_gap_s) for way in reversed(WAYS)
        )
        parts.append(f"rank {rank} {before:.1f}, now {now:.1f}")
    quiet = statistics.median(load.longest_quiet_gap_s / load.quiet_gap_s for load in found.loads)
    return f"{'; '.join(parts)}; without a load {quiet:.1f}"


def _median(found: LoadSteps, way: str, rank: int, value: Callable[[Load], float]) -> float:
    return statistics.median(value(load) for load in found.loads if (load.way, load.rank) == (way, rank))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "row"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--machine", default=f"{os.cpu_count()} CPU cores", help="words of the result")
    parser.add_argument("--gpu", action="store_true")
    arguments = parser.parse_args()
    if arguments.what == "measure":
        found = measure(arguments.machine, gpu=arguments.gpu)
        write_kept(arguments.file, json.dumps(asdict(found), indent=0) + "\n")
    kept = from_json(read_kept(arguments.file), LoadSteps, what=str(arguments.file))
    print(f"CPU time in steps: {row(kept)}\nlongest gap: {gap_row(kept)}")


if __name__ == "__main__":
    main()
