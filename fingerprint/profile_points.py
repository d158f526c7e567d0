"""Visits of a profile, a fingerprint each in its formats, and the shapes of the bursts that are run in them.

Both drivers (``profile``, ``depth_tied_profile``) load, run and record by visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fingerprint.config import KvFormat, WeightFormat, even_split
from fingerprint.depth_tied_cuts import kind_counts
from fingerprint.measurements import MeasuredKey, MemoryPoint, RankMemory, RunReading, TimingPoint
from fingerprint.model_spec import ModelSpec
from fingerprint.profile_plan import EngineSizes
from fingerprint.profile_sessions import Session

__all__ = ["Shape", "Visit", "settled"]


@dataclass(frozen=True, slots=True)
class Shape:
    batch: int
    input_tokens: int
    output_tokens: int

    @property
    def cost(self) -> int:
        """Tokens computed: what a run's time grows with at most."""
        return self.batch * (self.input_tokens + self.output_tokens)


@dataclass(frozen=True, slots=True)
class Visit:
    """A fingerprint loaded in one pair of formats, at one pair of degrees."""

    layers: tuple[int, ...]  # of the model
    weights: WeightFormat
    kv: KvFormat
    tp: int = 1
    pp: int = 1
    shard: bool = False  # one rank of the tensor-parallel group alone
    expert_parallel: bool = False

    @classmethod
    def of(cls, key: MeasuredKey, layers: tuple[int, ...], *, shard: bool = False) -> Visit:
        """Return the visit of a fingerprint of ``layers`` under ``key``."""
        return cls(layers, key.weights, key.kv, key.tp, key.pp, shard, key.expert_parallel)

    def __str__(self) -> str:
        return f"{self.key}, {self.num_layers} layers"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def key(self) -> MeasuredKey:
        return MeasuredKey(self.tp, self.pp, self.weights, self.kv, self.expert_parallel)

    def kinds(self, spec: ModelSpec) -> tuple[int, ...]:
        """Layers of each kind; empty where all of the model are alike."""
        return kind_counts(spec, self.layers)

    def load(self, session: Session, checkpoint: Path, sizes: EngineSizes) -> None:
        """Load the fingerprint, which is in ``checkpoint``."""
        session.load(
            checkpoint,
            weights=self.weights,
            kv=self.kv,
            layers_per_stage=even_split(self.num_layers, self.pp),
            max_batch=sizes.max_batch,
            max_context_tokens=sizes.max_context_tokens,
            kv_tokens=sizes.kv_tokens,
        )

    def memory_point(self, spec: ModelSpec, ranks: tuple[RankMemory, ...], sizes: EngineSizes) -> MemoryPoint:
        """Return ``ranks`` as the memory of an engine that was started with ``sizes``."""
        return MemoryPoint(
            num_layers=self.num_layers,
            tp=self.tp,
            pp=self.pp,
            weights=self.weights,
            kv=self.kv,
            layer_kinds=self.kinds(spec),
            shard=self.shard,
            expert_parallel=self.expert_parallel,
            max_batched_tokens=sizes.max_batched_tokens,
            max_batch=sizes.max_batch,
            kv_tokens=sizes.kv_tokens,
            ranks=ranks,
        )

    def timing_point(
        self,
        spec: ModelSpec,
        shape: Shape,
        runs: tuple[RunReading, ...],
        *,
        repeat: int = 1,
        loads: tuple[int, ...] = (),
    ) -> TimingPoint:
        """Return ``runs`` of bursts of ``shape``, in which each forward was run ``repeat`` times."""
        return TimingPoint(
            num_layers=self.num_layers,
            tp=self.tp,
            pp=self.pp,
            weights=self.weights,
            kv=self.kv,
            layer_kinds=self.kinds(spec),
            shard=self.shard,
            expert_parallel=self.expert_parallel,
            batch=shape.batch,
            input_tokens=shape.input_tokens,
            output_tokens=shape.output_tokens,
            runs=runs,
            repeat=repeat,
            loads=loads,
        )


def settled(runs: tuple[RunReading, ...]) -> tuple[RunReading, ...]:
    """Return the later half of bursts that ran back to back."""
    return runs[len(runs) // 2 :]
