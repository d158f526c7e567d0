"""A machine whose true costs are known, behind a strict :class:`ProfileTarget`.

It refuses what the protocol forbids (run before load, anything after close, two sessions at once, more devices
than there are, a split that does not add up), so a driver that only works against a lenient fake fails here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from fingerprint.config import KvFormat, WeightFormat, even_split
from fingerprint.gpu_spec import GpuSpec
from fingerprint.measurements import MachineInfo, Profile, RankMemory, RunReading
from fingerprint.model_spec import ModelSpec
from fingerprint.profile import ProfilePlan, profile

CPU = GpuSpec(
    name="synthetic",
    memory_bytes=16 * 2**30,
    memory_bytes_per_s=2e10,
    flops_16bit_per_s=1e11,
    flops_8bit_per_s=None,
    flops_fp8_per_s=None,
    compute_capability=None,
    link_bytes_per_s=1e10,
    link_group_size=8,
    pcie_bytes_per_s=1e10,
)


def llama(num_layers: int = 32, **changes: object) -> ModelSpec:
    """A Llama shape with hidden size 256, worked out by hand."""
    hidden, inner, vocab, kv_heads, head_dim = 256, 512, 1000, 4, 32
    linear = hidden * 256 + 2 * hidden * kv_heads * head_dim + 256 * hidden + 3 * hidden * inner
    spec = ModelSpec(
        family="llama",
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=8,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=4096,
        tied_embeddings=False,
        layer_params=linear + 2 * hidden,
        layer_linear_params=linear,
        embedding_params=vocab * hidden,
        head_params=vocab * hidden,
        final_norm_params=hidden,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


class FakeClock:
    """Seconds that pass only when something is done."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


Layers = int | Sequence[int | None]  # so many that look all the way back, or the window of each


def _counted(layers: Layers) -> list[tuple[int | None, int]]:
    return [(None, layers)] if isinstance(layers, int) else list(Counter(layers).items())


@dataclass(frozen=True, kw_only=True)
class Truth:
    """True costs of the machine. Times are for tp=1 at 16bit; ``int8_time`` multiplies a layer's."""

    # seconds of one layer's prefill: base + per token + per (token of the batch x prompt length)
    layer_first_s: tuple[float, float, float] = (2e-4, 4e-6, 2e-9)
    other_first_s: tuple[float, float, float] = (1e-3, 5e-5, 1e-6)  # base, per sequence, per token
    layer_next_s: tuple[float, float, float] = (3e-4, 2e-5, 5e-8)  # base, per sequence, per cached token
    other_next_s: tuple[float, float] = (8e-4, 1e-4)  # base, per sequence
    host_s: tuple[float, float] = (2e-4, 1e-4)  # per run, per step
    handover_s: tuple[float, float] = (1e-4, 1e-7)  # per step and boundary, and per token of the step
    tp_time: float = 0.6  # a layer's time at tp=2 over that at tp=1; at t it is this to the log2(t)
    int8_time: float = 0.8
    sliding_time: float = 1.3  # of a layer that looks back a window, over that of one that looks back as far
    # bytes
    layer_split_bytes: int = 1_000_000  # of one layer, divided by tp
    layer_whole_bytes: int = 2_000  # of one layer, on every rank
    int8_bytes: float = 0.5  # of the split part
    embedding_bytes: int = 512_000  # on every rank
    head_split_bytes: int = 512_000
    norm_bytes: int = 512  # on every rank
    tied: bool = False  # the head is the embedding, on every rank
    activation_split_bytes: tuple[int, int] = (0, 2_000)  # base, per token
    activation_whole_bytes: tuple[int, int] = (100_000, 1_000)
    pp_buffer_bytes: tuple[int, int] = (4_096, 1_024)  # base, per token
    runtime_bytes: int = 50_000_000
    kv_factor: float = 1.0  # what the engine allocates over what the spec says

    def first_s(
        self, layers: Layers, batch: int, n: int, *, tp: int = 1, pp: int = 1, int8: bool = False
    ) -> float:
        b0, b1, b2 = self.layer_first_s
        o0, o1, o2 = self.other_first_s
        own = 0.0
        for window, count in _counted(layers):
            w = min(window or n, n)
            looked_at = (2 * n * w - w * w + w) / n - 1  # n where the window is no shorter
            layer = b0 + b1 * batch * n + b2 * batch * n * looked_at
            own += count * layer * (1.0 if window is None else self.sliding_time)
        return own * self._speed(tp, int8) + o0 + o1 * batch + o2 * batch * n + (pp - 1) * self.hop_s(batch * n)

    def next_s(
        self, layers: Layers, batch: int, context: float, *, tp: int = 1, pp: int = 1, int8: bool = False
    ) -> float:
        b0, b1, b2 = self.layer_next_s
        own = 0.0
        for window, count in _counted(layers):
            layer = b0 + b1 * batch + b2 * batch * min(context, window or context)
            own += count * layer * (1.0 if window is None else self.sliding_time)
        others = self.other_next_s[0] + self.other_next_s[1] * batch + (pp - 1) * self.hop_s(batch)
        return own * self._speed(tp, int8) + others

    def hop_s(self, tokens: int) -> float:
        return self.handover_s[0] + self.handover_s[1] * tokens

    def ttft_s(self, layers: Layers, batch: int, n: int, **where: object) -> float:
        return self.first_s(layers, batch, n, **where) + self.host_s[0]  # type: ignore[arg-type]

    def tpot_s(self, layers: Layers, batch: int, n: int, m: int, **where: object) -> float:
        return self.next_s(layers, batch, n + m / 2, **where) + self.host_s[1]  # type: ignore[arg-type]

    def _speed(self, tp: int, int8: bool) -> float:
        return float(self.tp_time ** np.log2(tp)) * (self.int8_time if int8 else 1.0)

    def weights_bytes(self, layers: int, *, tp: int, first: bool, last: bool, int8: bool = False) -> int:
        """On one rank of a stage."""
        split = self.layer_split_bytes * (self.int8_bytes if int8 else 1.0)
        total = layers * (split / tp + self.layer_whole_bytes)
        total += self.embedding_bytes if first else 0
        if last:
            total += self.norm_bytes
            if not self.tied:
                total += self.head_split_bytes / tp
            elif not first:
                total += self.embedding_bytes
        return round(total)

    def activation_bytes(self, tokens: int, *, tp: int) -> int:
        split = self.activation_split_bytes[0] + self.activation_split_bytes[1] * tokens
        return round(split / tp + self.activation_whole_bytes[0] + self.activation_whole_bytes[1] * tokens)


@dataclass
class SyntheticMachine:
    """Implements ``ProfileTarget``; ``noise`` is the relative standard deviation of every run's parts, and
    ``load_noise`` of what all runs of one load share."""

    spec: ModelSpec = field(default_factory=llama)
    truth: Truth = field(default_factory=Truth)
    noise: float = 0.0
    load_noise: float = 0.0
    outliers: float = 0.0  # share of runs that the system delays to three times their time
    seed: int = 0
    num_devices: int = 2
    launch_s: float = 5.0
    load_s: float = 0.1
    close_s: float = 0.0
    run_cost: float = 1.0  # seconds of clock per second reported
    engine: str = "torch"

    def __post_init__(self) -> None:
        self.clock = FakeClock()
        self.random = np.random.default_rng(self.seed)
        self.sessions: list[SyntheticSession] = []
        self.log: list[tuple[object, ...]] = []

    def machine(self) -> MachineInfo:
        return MachineInfo(
            device=CPU,
            num_devices=self.num_devices,
            cores_per_device=1,
            cpu_model="synthetic",
            driver=None,
            versions=(("engine", "synthetic 1"),),
        )

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> SyntheticSession:
        assert all(s.closed for s in self.sessions), "a session is still open"
        assert tp * pp <= self.num_devices, f"{tp * pp} devices asked of {self.num_devices}"
        self.clock.now += self.launch_s
        self.log.append(("open", tp, pp))
        session = SyntheticSession(self, tp, pp)
        self.sessions.append(session)
        return session

    def fingerprint(self, layers: Sequence[int]) -> Path:
        """The name says how many layers of each kind."""
        assert list(layers) == sorted(set(layers))
        assert set(layers) <= set(range(self.spec.num_layers))
        windows = [self.spec.windows[layer] for layer in layers]
        return Path("/fingerprints") / "-".join(str(windows.count(kind.window)) for kind in self.spec.kinds)

    def level(self) -> float:
        """Return how fast the next load runs."""
        return max(0.05, 1.0 + self.load_noise * self.random.standard_normal()) if self.load_noise else 1.0

    def jitter(self) -> float:
        late = 3.0 if self.outliers and self.random.random() < self.outliers else 1.0
        return max(0.05, 1.0 + self.noise * self.random.standard_normal()) * late if self.noise else late


class SyntheticSession:
    """Session of one worker of the synthetic machine."""

    def __init__(self, machine: SyntheticMachine, tp: int, pp: int) -> None:
        self.machine, self.tp, self.pp = machine, tp, pp
        self.closed = False
        self.layers: tuple[int, ...] | None = None
        self.peak_tokens = 0

    def load(
        self,
        checkpoint: Path,
        *,
        weights: WeightFormat,
        kv: KvFormat,
        layers_per_stage: tuple[int, ...],
        max_batch: int,
        max_context_tokens: int,
        kv_tokens: int = 0,
    ) -> None:
        assert not self.closed, "load after close"
        counts = [int(count) for count in checkpoint.name.split("-")]
        assert layers_per_stage == even_split(sum(counts), self.pp), layers_per_stage
        kinds = zip(self.machine.spec.kinds, counts, strict=True)
        self.windows = tuple(kind.window for kind, count in kinds for _ in range(count))
        assert len(set(layers_per_stage)) == 1, "fingerprints are extrapolated between equal splits only"
        assert 2 <= max_context_tokens <= self.machine.spec.max_context_tokens
        self.machine.clock.now += self.machine.load_s
        self.machine.log.append(("load", self.tp, self.pp, sum(layers_per_stage), weights))
        self.layers, self.weights, self.kv = layers_per_stage, weights, kv
        self.max_batch, self.max_context_tokens, self.kv_tokens = max_batch, max_context_tokens, kv_tokens
        self.peak_tokens, self.level = 0, self.machine.level()

    def run(self, *, batch: int, input_tokens: int, output_tokens: int) -> RunReading:
        assert not self.closed, "run after close"
        assert self.layers is not None, "run before load"
        assert 1 <= batch <= self.max_batch
        assert input_tokens >= 1
        assert output_tokens >= 1
        assert input_tokens + output_tokens <= self.max_context_tokens
        assert not self.kv_tokens or batch * (input_tokens + output_tokens) <= self.kv_tokens
        truth, machine, steps = self.machine.truth, self.machine, output_tokens - 1
        where = {"tp": self.tp, "pp": self.pp, "int8": self.weights is WeightFormat.INT8}
        layers, context = sum(self.layers), input_tokens + output_tokens / 2
        device = truth.first_s(self.windows, batch, input_tokens, **where)
        later = truth.next_s(self.windows, batch, context, **where)
        device = (device + steps * later) * machine.jitter() * self.level
        host = (truth.host_s[0] + steps * truth.host_s[1]) * machine.jitter() * self.level
        hops = (self.pp - 1) * (truth.hop_s(batch * input_tokens) + steps * truth.hop_s(batch))
        machine.clock.now += (device + host) * machine.run_cost
        machine.log.append(("run", self.tp, self.pp, layers, batch, input_tokens, output_tokens))
        self.peak_tokens = max(self.peak_tokens, batch * input_tokens)
        return RunReading(e2e_s=device + host, device_s=device, host_s=host, handover_s=hops * machine.jitter())

    def memory(self) -> tuple[RankMemory, ...]:
        assert not self.closed, "memory after close"
        assert self.layers is not None, "memory before load"
        truth, spec, last = self.machine.truth, self.machine.spec, self.pp - 1
        kv_token = spec.kv_bytes_per_token_per_layer(self.kv) / min(self.tp, spec.num_kv_heads) * truth.kv_factor
        room = [self.max_batch * min(self.max_context_tokens, w or sys.maxsize) for w in self.windows]
        if self.kv_tokens:
            room = [self.kv_tokens] * len(self.windows)
        ends = list(accumulate(self.layers))
        int8 = self.weights is WeightFormat.INT8
        buffer = truth.pp_buffer_bytes[0] + truth.pp_buffer_bytes[1] * self.peak_tokens if self.pp > 1 else 0
        return tuple(
            RankMemory(
                rank=stage * self.tp + rank,
                stage=stage,
                weights_bytes=truth.weights_bytes(n, tp=self.tp, first=stage == 0, last=stage == last, int8=int8),
                kv_bytes=round(kv_token * sum(room[ends[stage] - n : ends[stage]])),
                activation_peak_bytes=truth.activation_bytes(self.peak_tokens, tp=self.tp),
                pp_buffer_bytes=buffer,
                runtime_bytes=truth.runtime_bytes,
                kv_room_tokens=self.kv_tokens,
            )
            for stage, n in enumerate(self.layers)
            for rank in range(self.tp)
        )

    def close(self) -> None:
        if not self.closed:
            self.machine.clock.now += self.machine.close_s
        self.closed = True


def take_profile(machine: SyntheticMachine, plan: ProfilePlan | None = None) -> Profile:
    """Profile the machine through the real driver on the machine's own clock."""
    plan = plan or ProfilePlan(budget_s=1e6, max_repeats=5)
    return profile("synthetic", machine.spec, machine, machine.fingerprint, plan, clock=machine.clock)
