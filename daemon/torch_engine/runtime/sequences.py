"""Sequences as requests give them, as they grow in the engine, and the events of their tokens."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from daemon.torch_engine.runtime.sampling import Sampler, SamplingParams
from daemon.torch_engine.runtime.scoring import TokenScore

__all__ = ["Finish", "LiveSequence", "SequenceRequest", "TokenEvent"]


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRequest:
    """Sequence to generate. ``end_ids`` end it, as its last token; before ``min_tokens`` they are barred.

    ``forced`` tokens follow the prompt in place of chosen ones. Each is scored, with the ``score_top`` likeliest:
    a text is scored by the steps that serve it, and takes no memory that a sequence of its length does not.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    min_tokens: int = 0
    end_ids: frozenset[int] = frozenset()
    adapter: str | None = None  # None: the base alone
    forced: tuple[int, ...] = ()
    score_top: int = 0


class TokenEvent(NamedTuple):
    """A new token of a sequence, or its end by an error (then ``token`` is None and ``error`` says why)."""

    sequence_id: int
    token: int | None
    finish: Finish | None
    at_s: float  # time.perf_counter()
    error: str | None = None
    score: TokenScore | None = None  # of a forced token


@dataclass(slots=True)
class LiveSequence:
    """Sequence that runs or waits."""

    request: SequenceRequest
    sampler: Sampler
    adapter_id: int | None
    tokens: list[int] = field(default_factory=list)  # prompt and output

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def forced(self) -> int | None:
        """Token that is given in place of the next one."""
        forced = self.request.forced
        return forced[self.generated] if self.generated < len(forced) else None

    def barred(self) -> tuple[int, ...]:
        return tuple(self.request.end_ids) if self.generated < self.request.min_tokens else ()
