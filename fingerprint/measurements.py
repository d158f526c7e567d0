"""What is measured of fingerprints, and the protocol of what can be measured.

``daemon`` implements :class:`ProfileTarget`; ``fingerprint.profile`` drives it; estimators read the
:class:`Profile` that results. Nothing here predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec

__all__ = [
    "LayerCache",
    "MachineInfo",
    "MemoryPoint",
    "Profile",
    "ProfileSession",
    "ProfileTarget",
    "RankMemory",
    "RunReading",
    "StepReading",
    "StepTimedSession",
    "TimingPoint",
    "Unreached",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineInfo:
    """Where a profile was taken. ``device`` carries measured peak figures on a CPU, datasheet ones on a GPU."""

    device: GpuSpec
    num_devices: int
    cores_per_device: int
    cpu_model: str
    driver: str | None  # NVIDIA driver version
    versions: tuple[tuple[str, str], ...]  # (("engine", "torch 0.1.0"), ("torch", "2.13.0"), ...)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerCache:
    """Cache of one layer on one rank, as the engine itself specifies it."""

    layer: int
    token_bytes: float  # of K and V, or of what else grows with the tokens
    state_bytes: int  # of a sequence, whatever its length
    window: int | None  # tokens that the layer looks back; None: all


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Bytes on one rank, as the engine itself counts them; ``runtime_bytes`` is the process beside them
    (CUDA context on a GPU; resident memory less the counted tensors on a CPU)."""

    rank: int
    stage: int
    weights_bytes: int
    kv_bytes: int  # the allocated cache
    activation_peak_bytes: int  # over the largest step that was run
    pp_buffer_bytes: int
    runtime_bytes: int
    graph_bytes: int = 0  # captured CUDA graphs, where the engine counts them apart
    kv_room_tokens: int = 0  # that ``kv_bytes`` hold, block by block; 0: the engine does not say
    kv_block_tokens: int = 0
    kv_blocks: int = 0  # that the engine would have made had nobody limited them
    budget_bytes: int = 0  # of the GPU that the engine gave itself, for all of these together; 0: it does not say
    layer_caches: tuple[LayerCache, ...] = ()  # of the fingerprint's layers; empty: the engine does not say


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPoint:
    """Memory of one fingerprint, loaded and run; its points differ in ``max_batched_tokens``."""

    num_layers: int
    tp: int
    pp: int
    weights: WeightFormat
    kv: KvFormat
    max_batched_tokens: int  # tokens of the largest step behind ``activation_peak_bytes``
    ranks: tuple[RankMemory, ...]
    kv_tokens: int = 0  # room of the KV cache that ``load`` asked for; 0: not recorded
    kv_sequences: int = 0  # that share ``kv_tokens`` evenly; 0: not recorded
    layer_kinds: tuple[int, ...] = ()  # layers of each of the model's kinds, where they are several
    shard: bool = False  # one TP rank's shape (``shard_config``) alone on pp GPUs; ranks are one per stage
    max_batch: int = 0  # sequences that the engine was started for, where its memory follows from that


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReading:
    """One engine step, timed on the device's own timeline (``daemon/step_timer``)."""

    tokens: int  # computed, over all sequences
    sequences: int
    prefill_tokens: int
    context_tokens: int  # in the KV cache before the step, over all sequences
    attention_pairs: int  # query-key pairs of causal attention, one head, one layer
    gap_s: float  # the device waited for the host before the step
    lead_s: float  # inputs were made
    forward_s: float  # the model: the replay of its graph, or the call
    tail_s: float  # logits and sampling

    @property
    def cadence_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.gap_s + self.lead_s + self.forward_s + self.tail_s


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReading:
    """One run: ``batch`` prompts handed over at once, ``output_tokens`` each.

    ``device_s`` is time in the model's forward (CUDA events on a GPU, wall-clock inside the forward on a CPU,
    of the slowest stage summed over stages); ``host_s`` is the rest of the run's wall-clock.
    """

    e2e_s: float
    device_s: float
    host_s: float
    handover_s: float = 0.0  # stage-to-stage transfer inside device_s, summed over steps
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    held_bytes: int | None = None  # of the GPUs' memory in use during the run, all processes, the driver's word
    steps: tuple[StepReading, ...] = ()  # of the slowest stage's rank, when they were asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingPoint:
    """Repeated runs of one fingerprint at one point."""

    num_layers: int
    tp: int
    pp: int
    weights: WeightFormat
    kv: KvFormat
    batch: int
    input_tokens: int
    output_tokens: int
    runs: tuple[RunReading, ...]
    repeat: int = 1  # times that every step's forward was run: the depth is num_layers * repeat
    loads: tuple[int, ...] = ()  # which load of the profile each run was of; empty: not recorded
    shard: bool = False  # one TP rank's shape alone on pp GPUs: no all-reduce is in its times
    layer_kinds: tuple[int, ...] = ()  # layers of each of the model's kinds, where they are several

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers of each of the model's kinds."""
        return self.layer_kinds or (self.num_layers,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unreached:
    """A configuration of which the budget of a profile did not hold all points."""

    config: DeploymentConfig
    missing_points: int  # of fingerprints, with fewer runs than the plan's minimum
    planned_points: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Everything measured of one model shape on one machine with one engine."""

    model: str
    spec: ModelSpec
    engine: str
    machine: MachineInfo
    created_at: str  # ISO 8601, UTC
    budget_s: float
    spent_s: float  # as ``budget_s``: after starts where each load is one, with a step timer of all GPUs
    complete: bool  # False: the budget ended before every interval was tight
    memory: tuple[MemoryPoint, ...]
    timing: tuple[TimingPoint, ...]
    notes: tuple[str, ...] = ()  # what was left out, and why
    skipped: tuple[DeploymentConfig, ...] = ()  # of that, what only its wish had no need of; another may
    unreached: tuple[Unreached, ...] = ()  # what the budget ended before


class ProfileSession(Protocol):
    """A worker launched once for one (tp, pp); fingerprints are loaded into it one after the other."""

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
        """Replace what is loaded by ``checkpoint`` in these formats.

        Args:
            kv_tokens: room of the KV cache, over all sequences; 0: the whole context of each.
        """
        ...

    def run(self, *, batch: int, input_tokens: int, output_tokens: int) -> RunReading:
        """One burst of dummy requests: random token ids, greedy, end-of-sequence ignored."""
        ...

    def memory(self) -> tuple[RankMemory, ...]:
        """Memory of what is loaded, activation peak since ``load``."""
        ...

    def close(self) -> None:
        """End the worker and give its memory back. Safe to call twice."""
        ...


class StepTimedSession(Protocol):
    """A worker whose engine carries our step timer: it times every step and can repeat each step's forward."""

    num_devices: int  # that it holds while it is open

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
        """Replace what is loaded by ``checkpoint`` (a config.json is enough) with random weights.

        Args:
            max_batch: sequences that the engine is started for, as a deployment would be.
            kv_tokens: room of the KV cache, over all sequences.
        """
        ...

    def bursts(
        self,
        *,
        batch: int,
        input_tokens: int,
        output_tokens: int,
        repeat: int = 1,
        most: int,
        until_s: float,
        steps: bool = True,
    ) -> tuple[RunReading, ...]:
        """Bursts of dummy requests back to back: at least one, until ``most`` or ``until_s``.

        Args:
            repeat: times that each step's forward is run on the same inputs, so that the fingerprint takes the
                time of a model that many times as deep.
            steps: record every step; without it the timer is off.
        """
        ...

    def memory(self) -> tuple[RankMemory, ...]: ...

    def close(self) -> None: ...


class ProfileTarget(Protocol):
    """An engine on some devices that can be measured."""

    engine: str

    def machine(self) -> MachineInfo: ...

    def open(self, *, tp: int, pp: int) -> ProfileSession:
        """Launch a worker on tp * pp devices.

        Raises:
            EngineError: the worker did not come up.
            InfeasibleError: fewer devices than that are free.
        """
        ...
