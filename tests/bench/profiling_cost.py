"""Cost of profiling: every launch, load and run that passes through a target, with its time and what it held.

A recording is one list of :class:`Activity`. What a strategy costs is the sum over those that it needs, so one
recording gives the price of several strategies. Knows nothing of estimates.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fingerprint.config import KvFormat, WeightFormat
from fingerprint.measurements import MachineInfo, RankMemory, RunReading
from fingerprint.profile_sessions import ProfileSession, ProfileTarget

__all__ = ["Activity", "Cost", "Kind", "RecordingTarget", "cost_of", "each_once"]

GIB = 2**30


class Kind(StrEnum):
    LAUNCH = "launch"
    LOAD = "load"
    RUN = "run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """Launch, load or run.

    ``held_bytes`` is what all ranks held when the load ended, of a launch what their processes held in addition.
    """

    kind: Kind
    tp: int
    pp: int
    seconds: float
    held_bytes: int
    num_layers: int = 0  # 0: a launch
    weights: WeightFormat | None = None
    about: tuple[int, ...] = ()  # a load: sequences and context tokens; a run: batch, input and output tokens


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of profiling: time, and memory over all devices times time."""

    seconds: float
    gib_s: float


def cost_of(activities: Iterable[Activity]) -> Cost:
    found = tuple(activities)
    return Cost(sum(a.seconds for a in found), sum(a.seconds * a.held_bytes for a in found) / GIB)


def each_once(activities: Iterable[Activity]) -> Iterator[Activity]:
    """The first of all that are alike: what memory needs, since bytes do not change from load to load or run to
    run. A time needs all of them."""
    seen = set()
    for a in activities:
        alike = (a.kind, a.tp, a.pp, a.num_layers, a.weights, a.about)
        if alike not in seen:
            seen.add(alike)
            yield a


class RecordingTarget:
    """``ProfileTarget`` that notes what is done with ``target``.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, target: ProfileTarget, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = target.engine
        self.activities: list[Activity] = []
        self._target, self._clock = target, clock

    def machine(self) -> MachineInfo:
        return self._target.machine()

    def open(self, *, tp: int, pp: int) -> RecordingSession:
        started = self._clock()
        session = self._target.open(tp=tp, pp=pp)
        return RecordingSession(session, self.activities, self._clock, tp, pp, self._clock() - started)


class RecordingSession:
    """``ProfileSession`` that notes what is done with ``session``.

    What a load held is read when it ends: at the next one, or at the close.
    """

    def __init__(
        self,
        session: ProfileSession,
        activities: list[Activity],
        clock: Callable[[], float],
        tp: int,
        pp: int,
        launch_s: float,
    ) -> None:
        self._session, self._activities, self._clock = session, activities, clock
        self._tp, self._pp = tp, pp
        self._launch_s: float | None = launch_s  # None: noted
        self._num_layers, self._weights = 0, WeightFormat.BITS16
        self._since_load: list[tuple[Kind, float, tuple[int, ...]]] = []

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
        self._end_load()
        with self._timed(Kind.LOAD, (max_batch, max_context_tokens)):
            self._session.load(
                checkpoint,
                weights=weights,
                kv=kv,
                layers_per_stage=layers_per_stage,
                max_batch=max_batch,
                max_context_tokens=max_context_tokens,
                kv_tokens=kv_tokens,
            )
        self._num_layers, self._weights = sum(layers_per_stage), weights

    def run(self, *, batch: int, input_tokens: int, output_tokens: int) -> RunReading:
        with self._timed(Kind.RUN, (batch, input_tokens, output_tokens)):
            return self._session.run(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens)

    def memory(self) -> tuple[RankMemory, ...]:
        return self._session.memory()

    def close(self) -> None:
        try:
            self._end_load()
        finally:
            self._session.close()

    @contextmanager
    def _timed(self, kind: Kind, about: tuple[int, ...]) -> Iterator[None]:
        """Time a block; a failed one is not noted, for nothing was learnt of it."""
        started = self._clock()
        yield
        self._since_load.append((kind, self._clock() - started, about))

    def _end_load(self) -> None:
        if not self._since_load:
            return
        ended, self._since_load = self._since_load, []
        ranks = self._session.memory()
        if self._launch_s is not None:
            runtime = sum(rank.runtime_bytes for rank in ranks)
            self._activities.append(
                Activity(kind=Kind.LAUNCH, tp=self._tp, pp=self._pp, seconds=self._launch_s, held_bytes=runtime)
            )
            self._launch_s = None
        held = sum(map(_held_bytes, ranks))
        self._activities += (
            Activity(
                kind=kind,
                tp=self._tp,
                pp=self._pp,
                seconds=seconds,
                held_bytes=held,
                num_layers=self._num_layers,
                weights=self._weights,
                about=about,
            )
            for kind, seconds, about in ended
        )


def _held_bytes(rank: RankMemory) -> int:
    counted = rank.weights_bytes + rank.kv_bytes + rank.activation_peak_bytes + rank.pp_buffer_bytes
    return counted + rank.runtime_bytes
