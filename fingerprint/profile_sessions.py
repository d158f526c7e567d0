"""Protocol of what can be profiled: a target, and the sessions that it opens.

``daemon`` implements :class:`ProfileTarget`; ``fingerprint.profile`` drives it. What is measured is in
``fingerprint.measurements``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from fingerprint.config import KvFormat, SlotFormat, WeightFormat
from fingerprint.measurements import MachineInfo, RankMemory, RunReading

__all__ = [
    "CallState",
    "ProfileSession",
    "ProfileTarget",
    "Session",
    "StepTimedSession",
    "StepTimedVariantSession",
    "VariantSession",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class CallState:
    """Progress of the calls that a worker was asked for."""

    ended: bool = False
    """Whether they have ended."""
    elapsed_s: float = 0.0
    """Seconds since they were asked for."""
    compiling: bool = False
    """Whether kernels were added to the engine's caches in the last seconds."""
    compile_s: float = 0.0
    """Seconds of them in which the engine compiled kernels, as far as it has reported."""


class Session(Protocol):
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
            max_batch: sequences that the engine is started for, as a deployment would be.
            kv_tokens: room of the KV cache, over all sequences; 0: the whole context of each.
        """
        ...

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory of what is loaded, activation peak since ``load``."""
        ...

    def close(self) -> None:
        """End the worker and give its memory back. Safe to call twice."""
        ...


class ProfileSession(Session, Protocol):
    """A worker that runs one burst after the other."""

    def run(self, *, batch: int, input_tokens: int, output_tokens: int) -> RunReading:
        """Run one burst of dummy requests: random token ids, greedy, end-of-sequence ignored."""
        ...


class VariantSession(Protocol):
    """A worker that serves variants next to what is loaded, and runs bursts as :class:`ProfileSession`."""

    def load_with_slots(
        self,
        checkpoint: Path,
        *,
        num_layers: int,
        max_batch: int,
        max_context_tokens: int,
        slots: int,
        rank: int,
        delta_mib: int = 0,
        delta_format: SlotFormat = SlotFormat.NONE,
        kv_tokens: int = 0,
    ) -> None:
        """Replace what is loaded by ``checkpoint``, in 16 bits on one stage, with slots for variants.

        Args:
            slots: 0: none, as an engine without variants is started.
            rank: of the largest adapter; 0: there is none.
            delta_mib: of the largest delta, where slots hold deltas by their size; 0: they hold none.
            delta_format: of the deltas, where slots hold one format; `none`: they hold none.
            kv_tokens: room of the KV cache, over all sequences; 0: the whole context of each.
        """
        ...

    def load_variants(self, folders: Sequence[Path]) -> tuple[float, ...]:
        """Load variants one after the other, and return the seconds of each load."""
        ...

    def run_variants(self, *, batch: int, input_tokens: int, output_tokens: int, active: int) -> RunReading:
        """Run one burst whose requests ask for the first ``active`` loaded variants in turn; 0: for the base."""
        ...

    def memory(self) -> tuple[RankMemory, ...]:
        """Return the memory of what is loaded, variants with the weights."""
        ...

    def close(self) -> None:
        """End the worker and give its memory back. Safe to call twice."""
        ...


class StepTimedSession(Session, Protocol):
    """A worker whose engine carries our step timer: it times every step and can repeat each step's forward.

    What it loads needs a config.json alone and has random weights.
    """

    num_devices: int  # that it holds while it is open

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
        agree_within: float | None = None,
        agree_limit_s: float = 0.0,
        active: int = 0,
        limit_s: float | None = None,
        tell: Callable[[CallState], None] = lambda _: None,
    ) -> tuple[RunReading, ...]:
        """Run bursts of dummy requests back to back: at least one, until ``most`` or ``until_s``.

        Bursts in which the engine compiled a kernel are left out.

        Args:
            repeat: times that each step's forward is run on the same inputs, so that the fingerprint takes the
                time of a model that many times as deep.
            steps: record every step; without it the timer is off.
            agree_within: how far the medians of the earlier and the later half may differ, over the smaller one;
                further bursts run until they do not; None: whatever they are.
            agree_limit_s: seconds after which none of these begin.
            active: distinct variants, the first loaded ones, that the requests ask for in turn; 0: the base.
            limit_s: seconds after which an answer is no longer waited for; None: as long as for any call.
            tell: given the state of the calls now and then while they run, and once when they have ended.

        Raises:
            TooLittleTimeError: there is no answer after ``limit_s``; the worker is busy, and can only be closed.
            NotMeasuredError: they do not agree by then, or a kernel was compiled in each of them.
        """
        ...


class StepTimedVariantSession(VariantSession, StepTimedSession, Protocol):
    """A worker whose engine carries our step timer and serves variants."""


SessionT = TypeVar("SessionT", bound=Session, covariant=True)


class ProfileTarget(Protocol[SessionT]):
    """An engine on some devices that can be measured."""

    engine: str

    def machine(self) -> MachineInfo: ...

    def open(self, *, tp: int, pp: int, expert_parallel: bool = False) -> SessionT:
        """Launch a worker on tp * pp devices.

        Args:
            expert_parallel: whether those of ``tp`` divide a mixture's experts as wholes.

        Raises:
            EngineError: the worker did not start.
            InfeasibleError: fewer devices than that are free.
        """
        ...
