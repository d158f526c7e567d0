"""Measures models on vLLM and a GPU for ``tests/bench/accuracy.py``: fingerprints first, then the whole model.

Run with vLLM's own Python on the GPU machine, from the repository's root::

    python -m tests.bench.accuracy_measure OUT MODEL_DIR[:FORMAT] [...] [--tp T] [--pp P] [--expert-parallel]
        [--shards] [--most-prompt-tokens N] [--max-seconds S] [--first-gpu I] [--scratch DIR]

A MODEL_DIR needs a config.json alone, for all weights are random. Both sides run in the same worker process on the
same GPU, one after the other: ``vllm.LLM`` in its default mode (compiled, overlapped), prefix caching off,
max_num_seqs 256, max_num_batched_tokens 16384, gpu_memory_utilization 0.85, KV room for the largest point on
either side. TTFT is the time of a call with one output token, TPOT that of 65 tokens less that of one over 64.
Every point is called six times, one of more than 32,768 prompt tokens three times, and the first is left out; a
short prompt waits for the host, whose pace changes by half within seconds where cores are shared, so those are
called for half a second at three visits, of which the later halves are kept. On both sides a call in which a
kernel was compiled does not count, and the medians of a point's two halves must agree within a tenth: a point
where they do not is left out and named. A mixture's tokens fall on its experts uniformly on both sides, or by the
law that ``VLLM_MOE_ROUTING_SIMULATION_STRATEGY`` names (vLLM has ``normal_routing``), and are counted. The whole
model's calls are timed with the step timer off, but for two points that show what it costs. With
``--expert-parallel`` each GPU of a TP group has whole experts, on both sides.

Writes OUT/NAME-FORMAT-tpT-ppP[-ep].json.xz, a :class:`Recorded` each; nothing is predicted here.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path

from daemon.profile_client import WorkerProfileSession, WorkerProfileTarget
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.codec import to_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.depth_tied_cuts import repeats_the_mix
from fingerprint.depth_tied_plan import ONCE_TOKENS, DepthTiedPlan, Point
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.engines import largest_graph
from fingerprint.errors import IserveError, NotMeasuredError, TooLittleTimeError
from fingerprint.families import read_config, read_spec
from fingerprint.gpus import match_device
from fingerprint.measurements import MachineInfo, Profile, RankMemory, RunReading, TimingPoint
from fingerprint.model_spec import ModelSpec
from fingerprint.truncate import generate_shape
from tests.bench.kept import write_kept
from tests.bench.profiling_process import ProfilingProcess

ROOT = Path(__file__).parents[2]
BATCHES, INPUTS = (1, 8, 32, 128), (128, 512, 1024, 2048)
MOST_PROMPT_TOKENS = 131_072
OUTPUT = 65
REPEATS, MANY_TOKENS_REPEATS = 5, 2
AGREE_WITHIN, AGREE_LIMIT_S = 0.10, 20.0  # as in the plan of a profile
TIMER_POINTS = ((1, 128), (32, 128))
SHORT_TOKENS, VISITS, VISIT_S, MOST_CALLS = 2048, 3, 0.5, 40
SHALLOW_POINTS = ((1, 128), (1, 1024), (8, 128), (8, 512), (32, 128))
PLAIN_POINTS = ((1, 128), (1, 1024), (8, 512), (32, 512), (32, 1024), (128, 128))
MAX_SEQUENCES, MAX_STEP_TOKENS, MEMORY_FRACTION = 256, 16_384, 0.85
MAX_CONTEXT = 4096
Runs = tuple[RunReading, ...]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Recording of one model in one format, fingerprints and whole, from one call."""

    model: str
    weights: WeightFormat
    tp: int
    pp: int
    profile: Profile
    whole: tuple[TimingPoint, ...]  # timer off
    whole_timed: tuple[TimingPoint, ...]  # timer on, at ``TIMER_POINTS``
    whole_memory: tuple[RankMemory, ...]
    budget_bytes: int  # that the engine might take of each GPU
    measured_at: str
    start_s: tuple[float, ...]  # of every engine start, in order
    profile_start_s: float  # of these, the fingerprints'
    whole_s: float  # the whole model's calls, warm-ups included
    rank_profile: Profile | None = None  # the same with one TP rank's shape alone on a GPU per stage
    whole_between: tuple[TimingPoint, ...] = ()  # timer off, in turns with ``whole_timed``; before, none were
    left_out: tuple[str, ...] = ()  # points of the whole model whose calls did not agree; before, all were kept
    expert_parallel: bool = False

    @property
    def config(self) -> DeploymentConfig:
        """Configuration that was measured."""
        return DeploymentConfig(
            tp=self.tp,
            pp=self.pp,
            weights=self.weights,
            engine=self.profile.engine,
            expert_parallel=self.expert_parallel,
        )


def grid(max_context_tokens: int, most_prompt_tokens: int = MOST_PROMPT_TOKENS) -> tuple[Point, ...]:
    """The points that the context holds and whose prompts total at most ``most_prompt_tokens``."""
    return tuple(
        (b, n) for b in BATCHES for n in INPUTS if b * n <= most_prompt_tokens and n + OUTPUT <= max_context_tokens
    )


def kept_name(model: str, weights: WeightFormat, tp: int, pp: int, expert_parallel: bool) -> str:
    """Return the name of a recording's file."""
    return f"{model}-{weights}-tp{tp}-pp{pp}{'-ep' * expert_parallel}.json.xz"


def machine_here(num_gpus: int) -> MachineInfo:
    """Asked of the driver and the interpreter's metadata; makes no CUDA context."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    name, driver = (part.strip() for part in text[0].split(","))
    device = match_device(name)
    if device is None:
        raise SystemExit(f"{name} is not in the GPU table")
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return MachineInfo(
        device=device,
        num_devices=num_gpus,
        cores_per_device=(os.cpu_count() or 1) // max(1, len(text)),
        cpu_model=cpu.partition(":")[2].strip(),
        driver=driver,
        versions=(
            ("engine", f"vllm {metadata.version('vllm')}"),
            ("torch", metadata.version("torch")),
            ("transformers", metadata.version("transformers")),
        ),
    )


def total_bytes() -> int:
    """Return the first GPU's memory, by the driver, as the worker divides by it."""
    text = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return int(text.split()[0]) * 2**20


@dataclass
class _Bench:
    out: Path
    tp: int
    pp: int
    machine: MachineInfo
    budget_bytes: int
    scratch: Path
    expert_parallel: bool = False
    shards: bool = False
    most_prompt_tokens: int = MOST_PROMPT_TOKENS
    port: int = 18_080
    first_gpu: int = 0

    def target(self, directory: Path, spec: ModelSpec) -> WorkerProfileTarget:
        def launch(worker: WorkerSpec) -> ProfilingProcess:
            self.port += 1
            folder = self.scratch / worker.worker_id
            folder.mkdir(parents=True)
            return ProfilingProcess(replace(worker, port=self.port), self.machine, folder)

        return WorkerProfileTarget(
            launch,
            checkpoint=directory,
            device_ids=[str(self.first_gpu + index) for index in range(self.tp * self.pp)],
            limits=WorkerLimits(
                max_batch=MAX_SEQUENCES,
                max_batched_tokens=MAX_STEP_TOKENS,
                max_context_tokens=min(MAX_CONTEXT, spec.max_context_tokens),
                kv_tokens=1,
                memory_bytes_per_device=self.budget_bytes,
                graph_tokens=largest_graph("vllm", is_mixture=spec.is_mixture),
            ),
            engine="vllm",
            start_timeout_s=180,
            call_timeout_s=400,
        )

    def measure(self, directory: Path, weights: WeightFormat) -> None:
        spec = read_spec(read_config(directory))
        context = min(MAX_CONTEXT, spec.max_context_tokens)
        points = grid(context, self.most_prompt_tokens)
        plan = DepthTiedPlan(
            degrees=((self.tp, self.pp),),
            expert_parallel=self.expert_parallel,
            weights=(weights,),
            points=points,
            shallow_points=tuple(p for p in points if p in SHALLOW_POINTS or not repeats_the_mix(spec, self.pp)),
            plain_points=tuple(p for p in PLAIN_POINTS if p in points),
            max_batch=MAX_SEQUENCES,
            max_context_tokens=context,
            settle_s=VISIT_S,
            visits=VISITS,
            short_tokens=SHORT_TOKENS,
            once_tokens=ONCE_TOKENS,
            budget_s=200,
        )

        def shape(layers: int, tp: int = 1) -> Path:
            folder = self.scratch / f"{directory.name}-{weights}-{layers}-of-{tp}"
            if not folder.exists():
                generate_shape(directory, folder, layers, tp=tp)
            return folder

        measure = partial(depth_tied_profile, directory.name, spec)
        with self.target(directory, spec) as target:
            shared = _Shared(target)
            try:
                recorded = self._recorded(shared, measure, shape, plan, directory, weights)
            finally:
                shared.end()
        path = self.out / kept_name(directory.name, weights, self.tp, self.pp, self.expert_parallel)
        write_kept(path, to_json(recorded).decode())
        print(f"{path.name}: whole model {recorded.whole_s:.0f} s, starts {recorded.start_s}", flush=True)

    def _recorded(
        self,
        shared: _Shared,
        measure: Callable[..., Profile],
        shape: Callable[..., Path],
        plan: DepthTiedPlan,
        directory: Path,
        weights: WeightFormat,
    ) -> Recorded:
        rank_profile: Profile | None = None
        if self.shards:
            rank_profile = measure(shared, shape, plan, num_gpus=self.pp)
            print(f"{directory.name} {weights}: one rank alone {rank_profile.spent_s:.0f} s", flush=True)
            shared.start_s.clear()
        begun = time.monotonic()
        profile = measure(shared, shape, plan)
        print(f"{directory.name} {weights}: profiled in {time.monotonic() - begun:.0f} s,", end=" ")
        print(f"{profile.spent_s:.0f} s after starts; {'; '.join(profile.notes)}", flush=True)
        return replace(self._whole(shared, profile, plan, directory, weights), rank_profile=rank_profile)

    def _whole(
        self, shared: _Shared, profile: Profile, plan: DepthTiedPlan, directory: Path, weights: WeightFormat
    ) -> Recorded:
        profile_start_s = sum(shared.start_s)
        session = shared.open(tp=self.tp, pp=self.pp, expert_parallel=self.expert_parallel)
        layers = profile.spec.num_layers
        kv_tokens = max(b * (n + OUTPUT) for b, n in plan.points)
        shared.load(
            directory,
            weights=weights,
            kv=KvFormat.BITS16,
            layers_per_stage=(layers // self.pp,) * self.pp,
            max_batch=MAX_SEQUENCES,
            max_context_tokens=plan.max_context_tokens,
            kv_tokens=kv_tokens,
        )
        room = min(rank.kv_room_tokens for rank in session.session.memory())
        begun = time.monotonic()
        calls = _Calls(session.session)
        points = tuple(p for p in plan.points if p[0] * (p[1] + OUTPUT) <= room)
        for batch, input_tokens in set(plan.points) - set(points):  # it would wait, or be computed twice
            calls.left_out.append(
                f"batch {batch} with {input_tokens} in left out, the whole model got room for {room} tokens"
            )
        whole = calls.grid(points)
        turns = {p: calls.in_turns(p, OUTPUT) for p in TIMER_POINTS if p in points}
        for line in calls.left_out:
            print(line, flush=True)

        def timing(measured: list[tuple[Point, int, Runs]]) -> tuple[TimingPoint, ...]:
            return tuple(
                TimingPoint(
                    num_layers=layers,
                    tp=self.tp,
                    pp=self.pp,
                    weights=weights,
                    kv=KvFormat.BITS16,
                    expert_parallel=self.expert_parallel,
                    batch=batch,
                    input_tokens=input_tokens,
                    output_tokens=output,
                    runs=runs,
                )
                for (batch, input_tokens), output, runs in measured
            )

        return Recorded(
            model=directory.name,
            weights=weights,
            tp=self.tp,
            pp=self.pp,
            profile=profile,
            whole=timing(whole),
            whole_timed=timing([(p, OUTPUT, on) for p, (_, on) in turns.items()]),
            whole_between=timing([(p, OUTPUT, off) for p, (off, _) in turns.items()]),
            whole_memory=session.session.memory(),
            budget_bytes=self.budget_bytes,
            measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
            start_s=tuple(shared.start_s),
            profile_start_s=profile_start_s,
            whole_s=time.monotonic() - begun,
            left_out=tuple(calls.left_out),
            expert_parallel=self.expert_parallel,
        )


@dataclass(frozen=True)
class _Calls:
    """Calls of the whole model; a point whose calls do not agree is ``left_out``."""

    session: WorkerProfileSession
    left_out: list[str] = field(default_factory=list)

    def grid(self, points: tuple[Point, ...]) -> list[tuple[Point, int, Runs]]:
        """Every point with one token and with ``OUTPUT``, one after the other; short ones once more at the end."""
        found: dict[tuple[Point, int], Runs] = {}
        for point in sorted(points, key=_tokens):
            try:
                found |= {(point, 1): self.first(point), (point, OUTPUT): self.five(point, OUTPUT)}
            except NotMeasuredError as error:
                self.left_out.append(str(error))
        for _ in range(1, VISITS):
            for point in points:
                if _tokens(point) <= SHORT_TOKENS and (point, OUTPUT) in found:
                    with contextlib.suppress(NotMeasuredError):  # the first visit's calls agreed
                        found[point, 1] += self.first(point)
        return [(point, output, runs) for (point, output), runs in found.items()]

    def first(self, point: Point) -> Runs:
        """Settled calls of one token."""
        if _tokens(point) > SHORT_TOKENS:
            return self._calls(point, 1, _repeats(point) + 1)[1:]
        runs = self._calls(point, 1, MOST_CALLS, VISIT_S)
        return runs[len(runs) // 2 :]

    def five(self, point: Point, output: int) -> Runs:
        return self._calls(point, output, _repeats(point))

    def in_turns(self, point: Point, output: int) -> tuple[Runs, Runs]:
        """Run with the timer off and on, one call of each after the other: a drift affects both."""
        off: Runs = ()
        on: Runs = ()
        for _ in range(REPEATS):
            off += self._calls(point, output, 1)
            on += self._calls(point, output, 1, steps=True)
        return off, on

    def _calls(self, point: Point, output: int, most: int, until_s: float = 1e9, *, steps: bool = False) -> Runs:
        return self.session.bursts(
            batch=point[0],
            input_tokens=point[1],
            output_tokens=output,
            most=most,
            until_s=until_s,
            steps=steps,
            agree_within=AGREE_WITHIN,
            agree_limit_s=AGREE_LIMIT_S,
        )


def _repeats(point: Point) -> int:
    return REPEATS if _tokens(point) <= ONCE_TOKENS else MANY_TOKENS_REPEATS


def _tokens(point: Point) -> int:
    return point[0] * point[1]


class _Shared:
    """A target whose one worker outlives the profile's session, so that the whole model needs no new imports."""

    def __init__(self, target: WorkerProfileTarget) -> None:
        self._target = target
        self.engine = target.engine
        self.session: WorkerProfileSession | None = None
        self._degree = (0, 0, False)
        self._failed = False
        self.start_s: list[float] = []

    def machine(self) -> MachineInfo:
        if self.session is None:
            return self._target.machine()
        return self.session.machine()

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> _Shared:
        if self._degree != (tp, pp, expert_parallel):
            self.end()
        if self.session is None:
            self.session = self._target.open(tp=tp, pp=pp, expert_parallel=expert_parallel)
            self._degree = (tp, pp, expert_parallel)
        return self

    def load(self, *args: object, **kwargs: object) -> None:
        begun = time.monotonic()
        self._asked(self.session.load, *args, **kwargs)  # type: ignore[union-attr]
        self.start_s.append(round(time.monotonic() - begun, 1))

    @property
    def num_devices(self) -> int:
        return self.session.num_devices  # type: ignore[union-attr]

    def bursts(self, **kwargs: object) -> object:
        return self._asked(self.session.bursts, **kwargs)  # type: ignore[union-attr]

    def _asked(self, call: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return call(*args, **kwargs)
        except NotMeasuredError as error:  # calls that do not agree; the engine is as good as before
            self._failed |= isinstance(error, TooLittleTimeError)  # but where it is busy with a call that was cut
            raise
        except IserveError:
            self._failed = True
            raise

    def memory(self) -> tuple[RankMemory, ...]:
        return self.session.memory()  # type: ignore[union-attr]

    def close(self) -> None:
        """The profile is done with it, and :meth:`end` ends it; one that failed is ended now, for a fresh one."""
        if self._failed:
            self.end()

    def end(self) -> None:
        session, self.session, self._failed = self.session, None, False
        if session is not None:
            session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", nargs="+", help="MODEL_DIR or MODEL_DIR:fp8")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--expert-parallel", action="store_true", help="whole experts on each GPU of --tp")
    parser.add_argument("--shards", action="store_true", help="profile one TP rank alone on pp GPUs too")
    parser.add_argument("--max-seconds", type=float, default=1e9, help="begin no model after this many seconds")
    parser.add_argument(
        "--most-prompt-tokens", type=int, default=MOST_PROMPT_TOKENS, help="of a point's whole batch"
    )
    parser.add_argument("--first-gpu", type=int, default=0, help="the GPUs from this index on")
    parser.add_argument("--scratch", type=Path, help="folder for shapes and workers' logs, which are kept there")
    options = parser.parse_args()
    if options.shards and options.tp < 2:
        parser.error("--shards profiles one rank of a group: give --tp 2 or more")
    if options.expert_parallel and (options.tp < 2 or options.shards):
        parser.error("--expert-parallel divides experts among the GPUs of --tp 2 or more, not those of one rank")
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    kept = contextlib.nullcontext(options.scratch)
    with tempfile.TemporaryDirectory() if options.scratch is None else kept as scratch:
        bench = _Bench(
            out=options.out,
            tp=options.tp,
            pp=options.pp,
            machine=machine_here(options.tp * options.pp),
            budget_bytes=int(total_bytes() * MEMORY_FRACTION) + 2**20,  # the worker rounds down
            scratch=Path(scratch),
            expert_parallel=options.expert_parallel,
            shards=options.shards,
            most_prompt_tokens=options.most_prompt_tokens,
            port=18_080 + 100 * options.first_gpu,
            first_gpu=options.first_gpu,
        )
        for number, named in enumerate(options.models):
            if time.monotonic() - begun > options.max_seconds:
                print(f"no time left for {', '.join(options.models[number:])}")
                return
            directory, _, weights = named.partition(":")
            try:
                bench.measure(Path(directory).resolve(), WeightFormat(weights or "16bit"))
            except IserveError as error:
                print(f"{named} failed: {error}", flush=True)


if __name__ == "__main__":
    main()
