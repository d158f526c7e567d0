"""Measurements of fingerprints, taken by the sessions of ``fingerprint.profile_sessions``.

Estimators read the :class:`Profile` that results. Nothing here predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.engines import GRAPH_TOKENS
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from fingerprint.variant_measurements import VariantMeasurement

__all__ = [
    "ADAPTER_KERNELS_COMPONENT",
    "ExpertCount",
    "Lack",
    "LayerCache",
    "MachineInfo",
    "MeasuredKey",
    "MemoryPoint",
    "OtherProcess",
    "Profile",
    "RankMemory",
    "RunReading",
    "StepReading",
    "TimingPoint",
    "Unreached",
    "key_of",
]

ADAPTER_KERNELS_COMPONENT = "adapter_kernels"  # of ``MachineInfo.versions``, where our kernels computed adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    """Machine of a profile. ``device`` carries measured peak figures on a CPU, datasheet ones on a GPU."""

    device: GpuSpec
    """Peak figures of one device: measured on a CPU, from the datasheet on a GPU."""
    num_devices: int
    """Number of devices on the machine."""
    cores_per_device: int
    """CPU cores of each device; of a CPU share its own."""
    cpu_model: str
    """Product name of the CPU."""
    driver: str | None
    """Version of the NVIDIA driver; None: no NVIDIA GPU."""
    versions: tuple[tuple[str, str], ...]
    """Pairs of a component and its version, such as `["torch", "2.13.0"]`."""

    @property
    def has_adapter_kernels(self) -> bool:
        """Return whether the engine computed adapters by our kernels (docs/decisions/0054)."""
        return ADAPTER_KERNELS_COMPONENT in dict(self.versions)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Cache of one layer on one rank, as the engine itself specifies it."""

    layer: int
    """Index of the layer, from 0."""
    token_bytes: float
    """Bytes of one token: K and V, or what else grows with the tokens."""
    state_bytes: int
    """Bytes of state per request, whatever its length."""
    window: int | None
    """Attention window of the layer in tokens; None: all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCount:
    """Choices of experts by the tokens of one call, counted in one rank's layers."""

    choices: int
    """Choices in each layer: tokens times experts of each."""
    experts: int
    """Experts of a layer."""
    layers: int
    """Layers that were counted."""
    busiest: float
    """Choices of a layer's busiest expert over the mean of its experts; the mean over the layers."""
    busiest_layer: float
    """The same, of the layer where it is the most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on one rank, as the engine itself counts them; ``runtime_bytes`` is the rest of the process
    (CUDA context on a GPU; resident memory less the counted tensors on a CPU)."""

    rank: int
    """Rank of the worker, from 0."""
    stage: int
    """Pipeline stage of the rank, from 0."""
    weights_bytes: int
    """Bytes of the weights on this rank."""
    kv_bytes: int
    """Bytes allocated for the KV cache."""
    activation_peak_bytes: int
    """Peak bytes of activations over the largest step that was run."""
    pp_buffer_bytes: int
    """Bytes of the buffers between pipeline stages."""
    runtime_bytes: int
    """Bytes of the process that the engine does not count: CUDA context and libraries."""
    graph_bytes: int = 0
    """Bytes of captured CUDA graphs, where the engine counts them apart."""
    kv_room_tokens: int = 0
    """Tokens that `kv_bytes` hold, block by block; 0: the engine does not report it."""
    kv_block_tokens: int = 0
    """Tokens in one block of the KV cache; 0: no blocks."""
    kv_blocks: int = 0
    """Blocks that the engine would have made without a limit."""
    budget_bytes: int = 0
    """Bytes of the GPU that the engine allowed itself for all of these together; 0: not reported."""
    layer_caches: tuple[LayerCache, ...] = ()
    """Cache of each of the fingerprint's layers; empty: not reported."""
    expert_routing: str = ""
    """Routing of tokens to experts: `uniform`, by the router's random `weights`, or vLLM's name of another law
    by which they were drawn; empty: none, or not known."""
    expert_count: ExpertCount | None = None
    """How tokens fell on experts in one call; null: not counted."""


@dataclass(frozen=True, order=True, slots=True)
class MeasuredKey:
    """Degrees and formats that one set of fingerprints is run under."""

    tp: int
    pp: int
    weights: WeightFormat
    kv: KvFormat
    expert_parallel: bool = False

    def config(self, engine: str) -> DeploymentConfig:
        return DeploymentConfig(
            tp=self.tp,
            pp=self.pp,
            weights=self.weights,
            kv=self.kv,
            engine=engine,
            expert_parallel=self.expert_parallel,
        )

    def __str__(self) -> str:
        kv = "" if self.kv == KvFormat.BITS16 else f" kv={self.kv}"
        experts = " experts=parallel" if self.expert_parallel else ""
        return f"tp={self.tp} pp={self.pp} {self.weights}{kv}{experts}"


def key_of(config: DeploymentConfig) -> MeasuredKey:
    """Return the key of what would have to be measured for ``config``."""
    return MeasuredKey(config.tp, config.pp, config.weights, config.kv, config.expert_parallel)


@dataclass(frozen=True, kw_only=True, slots=True)
class _FingerprintPoint:
    """Fingerprint that a point was measured on."""

    num_layers: int
    """Hidden layers of the fingerprint."""
    tp: int
    """Tensor-parallel degree of the run."""
    pp: int
    """Pipeline-parallel degree of the run."""
    weights: WeightFormat
    """Storage format of the linear weights."""
    kv: KvFormat
    """Storage format of the KV cache."""
    expert_parallel: bool = False
    """Whether the GPUs of `tp` divided the experts as wholes."""

    @property
    def key(self) -> MeasuredKey:
        return MeasuredKey(self.tp, self.pp, self.weights, self.kv, self.expert_parallel)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint(_FingerprintPoint):
    """Memory of one fingerprint, loaded and run; its points differ in ``max_batched_tokens``."""

    max_batched_tokens: int
    """Tokens of the largest step behind `activation_peak_bytes`."""
    ranks: tuple[RankMemory, ...]
    """Memory of each rank."""
    kv_tokens: int = 0
    """Size of the KV cache that was asked for, in tokens; 0: not recorded."""
    kv_sequences: int = 0
    """Requests that share `kv_tokens` evenly; 0: not recorded."""
    layer_kinds: tuple[int, ...] = ()
    """Layers of each of the model's kinds, where there are several."""
    shard: bool = False
    """Whether one rank's shape was loaded alone; ranks are then one per stage."""
    max_batch: int = 0
    """Requests at once that the engine was started for, where its memory follows from that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReading:
    """Timing of one engine step on the device's own timeline (``daemon/profiling_worker``)."""

    tokens: int
    """Tokens computed, over all requests."""
    sequences: int
    """Requests in the step."""
    prefill_tokens: int
    """Prompt tokens among those computed."""
    context_tokens: int
    """Tokens in the KV cache before the step, over all requests."""
    attention_pairs: int
    """Query-key pairs of causal attention in one head of one layer."""
    gap_s: float
    """Seconds that the device waited for the host before the step."""
    lead_s: float
    """Seconds in which inputs were prepared."""
    forward_s: float
    """Seconds of the model's forward: the replay of its graph, or the call."""
    tail_s: float
    """Seconds of logits and sampling."""

    @property
    def cadence_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.gap_s + self.lead_s + self.forward_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherProcess:
    """GPU memory of a process that appeared on the GPU while the engine was loaded, and is not the engine's."""

    pid: int | None
    """Process id as the driver lists it; None: seen by its memory alone, as in a container."""
    used_bytes: int | None
    """GPU memory that it holds; None: the driver does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReading:
    """Timing of one run: ``batch`` prompts handed over at once, ``output_tokens`` each.

    ``device_s`` is time in the model's forward (CUDA events on a GPU, wall-clock inside the forward on a CPU,
    of the slowest stage summed over stages); ``host_s`` is the rest of the run's wall-clock.
    """

    e2e_s: float
    """Seconds from the first prompt to the last output token."""
    device_s: float
    """Seconds in the model's forward, of the slowest stage summed over stages."""
    host_s: float
    """Rest of the run's wall-clock time in seconds."""
    handover_s: float = 0.0
    """Seconds of transfer between stages within `device_s`, summed over steps."""
    sm_clock_mhz: float | None = None
    """Clock of the GPU's multiprocessors in MHz; None: not reported."""
    power_w: float | None = None
    """Power draw in watts; None: not reported."""
    held_bytes: int | None = None
    """GPU memory in use during the run by all processes, as the driver counts it; None: not reported."""
    slowed_by: tuple[str, ...] = ()
    """Reasons for which the driver lowered the clock during the run, such as `power cap` or `thermal slowdown`;
    empty: none, or not reported."""
    others: tuple[OtherProcess, ...] = ()
    """Processes that took the GPU since the engine was loaded; empty: none was seen."""
    steps: tuple[StepReading, ...] = ()
    """Steps of the slowest stage's rank, where they were timed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPoint(_FingerprintPoint):
    """Repeated runs of one fingerprint at one point."""

    batch: int
    """Requests at once."""
    input_tokens: int
    """Prompt length in tokens."""
    output_tokens: int
    """Answer length in tokens."""
    runs: tuple[RunReading, ...]
    """Repeated runs at this point."""
    repeat: int = 1
    """Times that each step's forward was run: the depth is `num_layers` times `repeat`."""
    loads: tuple[int, ...] = ()
    """Index of the load of the profile in which each run was made; empty: not recorded."""
    shard: bool = False
    """Whether one rank's shape was run alone, without all-reduces in its times."""
    layer_kinds: tuple[int, ...] = ()
    """Layers of each of the model's kinds, where there are several."""

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each of the model's kinds."""
        return self.layer_kinds or (self.num_layers,)


class Lack(StrEnum):
    """Reason why a planned measurement was not made."""

    BUDGET = "budget"  # of seconds
    MEMORY = "memory"  # of GPUs, free of promises to other workers
    AVAILABILITY = "availability"  # of the node's daemon
    FAILURE = "failure"  # nothing: its engine failed, or what was measured cannot be used


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreached:
    """A configuration of which a profile lacks points, all for one reason."""

    config: DeploymentConfig
    """Configuration that was not measured at all points."""
    missing_points: int
    """Fingerprint points with fewer runs than the plan's minimum."""
    planned_points: int
    """Fingerprint points that were planned."""
    lacked: Lack = Lack.BUDGET
    """What the missing points lacked."""
    points: tuple[tuple[int, int], ...] = ()
    """Batch and input tokens of each missing point; empty: not recorded."""
    need_bytes: int = 0
    """Bytes that the least of the points that lacked `memory` takes of each GPU; 0: not known, or none did."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Everything measured of one model shape on one machine with one engine."""

    model: str
    """Name of the model that was profiled."""
    spec: ModelSpec
    """Architecture of the model."""
    engine: str
    """Engine that was profiled."""
    machine: MachineInfo
    """Machine on which the profile was taken."""
    created_at: str
    """Time of the profile, ISO 8601 in UTC."""
    budget_s: float
    """Seconds that the profile was allowed."""
    spent_s: float
    """Seconds that the profile took, counted as `budget_s` is."""
    complete: bool
    """Whether all that was planned was measured, and every interval was tight, before the budget ended."""
    memory: tuple[MemoryPoint, ...]
    """Memory of each fingerprint that was loaded."""
    timing: tuple[TimingPoint, ...]
    """Times of each fingerprint that was run."""
    notes: tuple[str, ...] = ()
    """Reasons for what was left out."""
    skipped: tuple[DeploymentConfig, ...] = ()
    """Configurations that this request had no need of; another request may."""
    unreached: tuple[Unreached, ...] = ()
    """Configurations that lack points, by what these lacked: the budget, memory."""
    variants: tuple[VariantMeasurement, ...] = ()
    """Measurements with variants, one of each kind that was asked for; empty: none was."""
    compile_s: float = 0.0
    """Seconds of `spent_s` in which the engine compiled kernels within calls; 0: none, or not counted."""
    graph_tokens: int = GRAPH_TOKENS
    """Tokens of the engine's largest CUDA graph: a longer step is launched kernel by kernel."""
