"""A machine whose true step times are known, behind a strict :class:`ProfileTarget`.

It schedules as vLLM does: a step holds at most ``max_batched_tokens``, one for each sequence that decodes and the
rest for prompts in the order of their arrival, so that prompts run in chunks, the first sequences decode with
the last ones' prompts, and end before them. A step takes ``r (o + L h) + c``; the whole model is the same machine
with all its layers and r = 1. It refuses what the protocol forbids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import hypot, log2
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fingerprint.config import KvFormat, WeightFormat
from fingerprint.depth_tied_plan import DepthTiedPlan
from fingerprint.depth_tied_profile import depth_tied_profile
from fingerprint.errors import IserveError, NotMeasuredError, TooLittleTimeError
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import MachineInfo, Profile, RankMemory, RunReading, StepReading
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfileProgress
from fingerprint.profile_sessions import CallState
from tests.fingerprint.synthetic_machine import FakeClock, llama

BLOCK_TOKENS = 16
CLOCK_MHZ = 1900.0
TELL_S = 5.0  # between what a call tells of itself


def llama_7b(num_layers: int = 32) -> ModelSpec:
    """Llama-2-7B, worked out by hand, of any depth."""
    hidden, inner, vocab = 4096, 11008, 32000
    linear = 4 * hidden**2 + 3 * hidden * inner
    return llama(
        num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        vocab_size=vocab,
        layer_params=linear + 2 * hidden,
        layer_linear_params=linear,
        embedding_params=vocab * hidden,
        head_params=vocab * hidden,
        final_norm_params=hidden,
    )


class Step(NamedTuple):
    """Step of the schedule: what it computes."""

    sequences: int
    prefill_tokens: int
    decoding: int  # sequences
    context: int
    pairs: int  # query and key, one head of a layer that looks back to the beginning
    parts: tuple[tuple[int, int], ...]  # of each sequence: tokens computed, tokens in the cache before

    def pairs_within(self, window: int | None) -> int:
        """Return the pairs of a layer that looks so far back."""
        if window is None:
            return self.pairs
        return sum(_pairs_below(c + q, window) - _pairs_below(c, window) for q, c in self.parts)

    def cached_within(self, window: int | None) -> int:
        """Return the cached tokens that sequences which decode read in a layer that looks so far back."""
        if self.prefill_tokens:
            return 0
        return sum(c if window is None else min(c, window) for _, c in self.parts)


def _pairs_below(length: int, window: int) -> int:
    """Return the pairs of the first so many tokens of a sequence."""
    w = min(window, length)
    return w * (w + 1) // 2 + (length - w) * w


@lru_cache(maxsize=256)
def schedule(batch: int, input_tokens: int, output_tokens: int, max_batched_tokens: int) -> tuple[Step, ...]:
    """The steps of a batch that is handed over at once."""
    prompted, made = [0] * batch, [0] * batch
    steps = []
    while any(m < output_tokens for m in made):
        room, taken = max_batched_tokens, []
        for i in range(batch):  # running ones are before waiting ones, and all are in the order of arrival
            if made[i] < output_tokens and room:
                count = 1 if made[i] else min(room, input_tokens - prompted[i])
                room -= count
                taken.append((i, count, prompted[i] + max(0, made[i] - 1) if made[i] else prompted[i]))
        decoding = sum(made[i] > 0 for i, _, _ in taken)
        steps.append(
            Step(
                sequences=len(taken),
                prefill_tokens=sum(count for i, count, _ in taken if not made[i]),
                decoding=decoding,
                context=sum(c for _, _, c in taken),
                pairs=sum(q * c + q * (q + 1) // 2 for _, q, c in taken),
                parts=tuple((q, c) for _, q, c in taken),
            )
        )
        for i, count, _ in taken:
            if made[i]:
                made[i] += 1
                continue
            prompted[i] += count
            made[i] = int(prompted[i] == input_tokens)
    return tuple(steps)


@dataclass(frozen=True, kw_only=True)
class StepTruth:
    """True costs of the machine, in seconds, for tp=1."""

    # h: weights are read while tokens are multiplied; then a query-key pair. Like Llama-2-7B on an H200.
    layer_s: tuple[float, float, float] = (9e-5, 7e-7, 2e-11)
    read_s: float = 4e-9  # a layer's keys and values of one cached token, 16 KiB, for a sequence that decodes
    prefill_repeat_s: tuple[float, float] = (8e-5, 1e-8)  # o of a step with prompts: a pass, a token
    decode_repeat_s: tuple[float, float] = (4e-6, 1e-8)  # of a step without; a token as in a prompt
    lead_s: float = 6e-5
    tail_s: float = 2e-4
    gap_s: float = 3e-5
    burst_s: float = 1e-3  # once per burst: handing over and answering
    recovery: float = 0.0  # by how much slower a layer is in the first decode step after a prefill; halves by step
    cool: float = 0.0  # by how much faster a layer's prefill is after decoding; halves by back-to-back burst
    sliding_time: float = 1.3  # of a layer that looks back a window, over that of one that looks back as far
    tp_time: float = 0.6  # a layer's time at tp=2 over that at tp=1
    max_batched_tokens: int = 8192
    # bytes
    activation_bytes: int = 1_500_000_000
    runtime_bytes: int = 240_000_000
    allocator_bytes: int = 20 * 2**20  # weights are counted in steps of it
    graph_bytes: int = 300 * 2**20

    def burst(self, steps: tuple[Step, ...], cut: Cut, *, cooled: float, level: float = 1.0) -> RunReading:
        readings, since_prefill = [], 0
        for step in steps:
            since_prefill = 0 if step.prefill_tokens else since_prefill + 1
            readings.append(self._step(step, cut, since_prefill, cooled, level))
        forward = sum(s.forward_s for s in readings)
        e2e = self.burst_s + sum(s.cadence_s for s in readings)
        return RunReading(
            e2e_s=e2e,
            device_s=forward,
            host_s=e2e - forward,
            sm_clock_mhz=CLOCK_MHZ,
            power_w=600.0,
            steps=tuple(readings),
        )

    def _step(self, step: Step, cut: Cut, since_prefill: int, cooled: float, level: float) -> StepReading:
        tokens = step.prefill_tokens + step.decoding
        h0, h1, h2 = self.layer_s
        clock = 1 - cooled if step.prefill_tokens else 1 + self.recovery / 2 ** (since_prefill - 1)
        layers = 0.0  # all of one repeat
        for window, count in Counter(cut.windows or (None,) * cut.layers).items():
            kind = self.sliding_time if window is not None else 1.0
            attention = h2 * step.pairs_within(window) + self.read_s * step.cached_within(window)
            layers += count * kind * (hypot(h0, h1 * tokens) + attention)
        layers *= clock * self.tp_time ** log2(cut.tp)
        o0, o1 = self.prefill_repeat_s if step.prefill_tokens else self.decode_repeat_s
        stage = cut.repeat * (o0 + o1 * tokens + layers / cut.pp) * level
        return StepReading(
            tokens=tokens,
            sequences=step.sequences,
            prefill_tokens=step.prefill_tokens,
            context_tokens=step.context,
            attention_pairs=step.pairs,
            gap_s=self.gap_s + (cut.pp - 1) * stage,  # one stage's reading: it waits for the rest
            lead_s=self.lead_s,
            forward_s=stage,
            tail_s=self.tail_s,
        )


class Cut(NamedTuple):
    """Part of the model that is loaded, and how often each forward is run."""

    layers: int  # of all stages
    repeat: int = 1
    tp: int = 1
    pp: int = 1
    windows: tuple[int | None, ...] = ()  # of each layer; empty: all look back to the beginning


@dataclass
class StepTimedMachine:
    """Implements ``ProfileTarget``. ``noise`` is the relative standard deviation of what a burst's steps share.

    ``broken`` is asked before each load (0, 0, 0 for the point) and burst, and may give the error to raise;
    after one in a burst nothing is loaded any more, as with the real worker, unless calls did not agree.
    ``slower`` multiplies what a load measures. ``compiles`` is asked for the seconds that a visit, by its
    number from 1, compiles before its first call; ``disturbed`` for what its readings have, of which a clock
    changes their times too.
    """

    spec: ModelSpec = field(default_factory=llama_7b)
    truth: StepTruth = field(default_factory=StepTruth)
    noise: float = 0.0
    seed: int = 0
    num_devices: int = 2
    launch_s: float = 5.0
    load_s: float = 60.0
    engine: str = "vllm"
    broken: Callable[[Cut, int, int, int], IserveError | None] = lambda *_: None
    slower: Callable[[int, int], float] = lambda _load, _layers: 1.0
    compiles: Callable[[int, Cut], float] = lambda _number, _cut: 0.0
    disturbed: Callable[[int, Cut], dict[str, Any]] = lambda _number, _cut: {}
    refuses_to_open: Callable[[int, int], IserveError | None] = lambda _tp, _pp: None

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.random = np.random.default_rng(self.seed)
        self.sessions: list[StepTimedSyntheticSession] = []
        self.log: list[tuple[object, ...]] = []
        self.loads = 0
        self.visits = 0
        self.ran_s: dict[tuple[int, int, int], float] = {}  # seconds of bursts, by layers, batch, input

    def machine(self) -> MachineInfo:
        return MachineInfo(
            device=gpu_spec("h200"),
            num_devices=self.num_devices,
            cores_per_device=1,
            cpu_model="synthetic",
            driver="580",
            versions=(("engine", "vllm 0.24.0"),),
        )

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> StepTimedSyntheticSession:
        assert all(s.closed for s in self.sessions), "a session is still open"
        assert tp * pp <= self.num_devices, f"{tp * pp} devices asked of {self.num_devices}"
        self.clock.now += self.launch_s
        self.log.append(("open", tp, pp, *(["experts"] if expert_parallel else [])))
        refusal = self.refuses_to_open(tp, pp)
        if refusal is not None:
            raise refusal
        self.sessions.append(StepTimedSyntheticSession(self, tp, pp))
        return self.sessions[-1]

    def fingerprint(self, layers: int) -> Path:
        assert 1 <= layers <= self.spec.num_layers
        return Path("/fingerprints") / str(layers)

    def jitter(self) -> float:
        return max(0.05, 1.0 + self.noise * self.random.standard_normal()) if self.noise else 1.0

    # --- the whole model -------------------------------------------------------------------------------------

    def ttft_s(self, batch: int, input_tokens: int, *, tp: int = 1, pp: int = 1) -> float:
        """Return the TTFT of settled bursts of one output token."""
        return self._whole(batch, input_tokens, 1, tp, pp, cooled=0.0).e2e_s

    def tpot_s(self, batch: int, input_tokens: int, output_tokens: int, *, tp: int = 1, pp: int = 1) -> float:
        long = self._whole(batch, input_tokens, output_tokens, tp, pp, cooled=self.truth.cool)
        return (long.e2e_s - self.ttft_s(batch, input_tokens, tp=tp, pp=pp)) / (output_tokens - 1)

    def _whole(self, batch: int, n: int, m: int, tp: int, pp: int, *, cooled: float) -> RunReading:
        steps = schedule(batch, n, m, self.truth.max_batched_tokens)
        cut = Cut(self.spec.num_layers, 1, tp, pp, self.spec.layer_windows)
        return self.truth.burst(steps, cut, cooled=cooled)


class StepTimedSyntheticSession:
    """Session of one worker of the machine."""

    def __init__(self, machine: StepTimedMachine, tp: int, pp: int) -> None:
        self.machine, self.tp, self.pp = machine, tp, pp
        self.num_devices = tp * pp
        self.closed = False
        self.loaded: Cut | None = None

    def load(
        self,
        checkpoint: Path,
        *,
        weights: WeightFormat,
        kv: KvFormat,
        layers_per_stage: tuple[int, ...],
        max_batch: int,
        max_context_tokens: int,
        kv_tokens: int,
    ) -> None:
        machine = self.machine
        assert not self.closed, "load after close"
        assert len(layers_per_stage) == self.pp
        assert len(set(layers_per_stage)) == 1, "stages of a fingerprint are equal"
        assert sum(layers_per_stage) == int(checkpoint.name)
        assert 2 <= max_context_tokens <= machine.spec.max_context_tokens
        assert kv_tokens >= 1
        self.loaded = None
        machine.loads += 1
        machine.clock.now += machine.load_s
        layers = sum(layers_per_stage)
        cut = Cut(layers, 1, self.tp, self.pp, machine.spec.layer_windows[:layers])
        machine.log.append(("load", cut, weights, kv))
        error = machine.broken(cut, 0, 0, 0)
        if error is not None:
            raise error
        self.loaded, self.weights, self.kv = cut, weights, kv
        self.level = machine.slower(machine.loads, cut.layers)
        self.max_batch, self.max_context_tokens, self.kv_tokens = max_batch, max_context_tokens, kv_tokens

    def bursts(
        self,
        *,
        batch: int,
        input_tokens: int,
        output_tokens: int,
        repeat: int,
        most: int,
        until_s: float,
        agree_within: float,
        agree_limit_s: float,
        limit_s: float,
        tell: Callable[[CallState], None],
    ) -> tuple[RunReading, ...]:
        machine, tokens = self.machine, input_tokens + output_tokens
        assert not self.closed, "bursts after close"
        assert self.loaded is not None, "bursts before load"
        assert min(batch, input_tokens, output_tokens, repeat, most) >= 1
        assert batch <= self.max_batch
        assert tokens <= self.max_context_tokens
        assert batch * tokens <= self.kv_tokens
        cut = self.loaded._replace(repeat=repeat)
        assert cut.layers * repeat <= machine.spec.num_layers, "deeper than the model"
        machine.log.append(("bursts", cut, batch, input_tokens, output_tokens))
        error = machine.broken(cut, batch, input_tokens, output_tokens)
        if error is not None:
            if not isinstance(error, NotMeasuredError):  # calls that do not agree leave the engine as it was
                self.loaded = None
            raise error
        machine.visits += 1
        compile_s = machine.compiles(machine.visits, cut)
        self._compile(compile_s, limit_s, tell)
        changes = machine.disturbed(machine.visits, cut)
        pace = CLOCK_MHZ / changes.get("sm_clock_mhz", CLOCK_MHZ)
        truth = machine.truth
        steps = schedule(batch, input_tokens, output_tokens, truth.max_batched_tokens)
        runs: list[RunReading] = []
        begun = machine.clock.now
        while not runs or (len(runs) < most and machine.clock.now - begun < until_s):
            cooled = truth.cool / 2 ** (len(runs) if output_tokens == 1 else 0)
            level = pace * self.level * machine.jitter()
            runs.append(replace(truth.burst(steps, cut, cooled=cooled, level=level), **changes))
            machine.clock.now += runs[-1].e2e_s
        at = (cut.layers, batch, input_tokens)
        machine.ran_s[at] = machine.ran_s.get(at, 0.0) + machine.clock.now - begun
        tell(CallState(ended=True, elapsed_s=machine.clock.now - begun + compile_s, compile_s=compile_s))
        return tuple(runs)

    def _compile(self, seconds: float, limit_s: float, tell: Callable[[CallState], None]) -> None:
        """Let so much time pass, and cut it at the limit; the engine is then busy for ever."""
        clock, begun = self.machine.clock, self.machine.clock.now
        while clock.now - begun < seconds:
            clock.now = min(clock.now + TELL_S, begun + limit_s, begun + seconds)
            tell(CallState(elapsed_s=clock.now - begun, compiling=True))
            if clock.now >= begun + limit_s:
                self.loaded = None
                raise TooLittleTimeError(f"no answer after {limit_s:.0f} s")

    def memory(self) -> tuple[RankMemory, ...]:
        assert not self.closed, "memory after close"
        assert self.loaded is not None, "memory before load"
        truth, spec, per_stage = self.machine.truth, self.machine.spec, self.loaded.layers // self.pp
        blocks = -(-self.kv_tokens // BLOCK_TOKENS) + self.max_batch + 1
        kv_token = spec.kv_bytes_per_token_per_layer(self.kv) / min(self.tp, spec.num_kv_heads)
        return tuple(
            RankMemory(
                rank=stage * self.tp + rank,
                stage=stage,
                weights_bytes=self._counted_bytes(stage, per_stage),
                kv_bytes=round(blocks * BLOCK_TOKENS * kv_token * per_stage),
                activation_peak_bytes=truth.activation_bytes,
                pp_buffer_bytes=0,
                runtime_bytes=truth.runtime_bytes,
                graph_bytes=truth.graph_bytes,
                kv_room_tokens=blocks * BLOCK_TOKENS,
                kv_block_tokens=BLOCK_TOKENS,
            )
            for stage in range(self.pp)
            for rank in range(self.tp)
        )

    def _counted_bytes(self, stage: int, layers: int) -> int:
        spec, step = self.machine.spec, self.machine.truth.allocator_bytes
        ends = (2 * spec.embedding_params if stage == 0 else 0) + (
            2 * (spec.head_params + spec.final_norm_params) if stage == self.pp - 1 else 0
        )
        exact = (ends + 2 * layers * spec.layer_params) / self.tp + layers * self._rounded_up_bytes()
        return round(-(-exact // step) * step)

    def _rounded_up_bytes(self) -> int:
        """Return what torch's allocator adds to a layer of Llama-2-7B: QKV, out, gate and up, down, in steps of 2
        MiB.
        """
        sizes = (whole * 2**20 // self.tp for whole in (96, 32, 172, 86))
        return sum(-size % 2**21 for size in sizes if size > 10 * 2**20)

    def close(self) -> None:
        self.closed = True


PLAN = DepthTiedPlan(
    points=((1, 128), (1, 1024), (8, 128), (8, 1024), (32, 512)),
    shallow_points=((1, 128), (1, 1024), (8, 128), (8, 1024)),
    max_batch=256,
    max_context_tokens=4096,
    visits=1,
    budget_s=1e6,
)


def take_depth_tied(
    machine: StepTimedMachine,
    plan: DepthTiedPlan = PLAN,
    *,
    progress: Callable[[ProfileProgress], None] = lambda _: None,
    **changes: object,
) -> Profile:
    """Profile the machine through the real driver on the machine's own clock."""
    plan = replace(plan, **changes)  # type: ignore[arg-type]
    return depth_tied_profile(
        "synthetic", machine.spec, machine, machine.fingerprint, plan, clock=machine.clock, progress=progress
    )
