"""Use of a KV cache over time: the mean and the peak share of its tokens, preemptions and what they cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["KvMeter", "KvUse", "kv_use"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KvUse:
    """Use of the KV caches of one deployment, over the time in which its replicas could serve.

    Tokens count from their admission on: an engine that reserves a whole answer uses its tokens before they are
    made.
    """

    mean_fraction: float  # of the tokens that there is room for
    peak_fraction: float  # at the end of any one step, of any one replica
    preemptions: int
    recomputed_tokens: int  # whose KV was dropped by them, and is computed again


@dataclass(slots=True)
class KvMeter:
    """Meter of one worker's KV cache."""

    room_tokens: int
    since_s: float  # it could serve
    until_s: float | None = None  # it was ended; None: it was not
    token_s: float = 0.0
    peak_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0

    def add(self, seconds: float, begin_tokens: int, end_tokens: int) -> None:
        """Add a run in which the tokens in use grew evenly from ``begin_tokens``, a most of ``end_tokens``."""
        self.token_s += seconds * (begin_tokens + end_tokens) / 2
        if end_tokens > self.peak_tokens:
            self.peak_tokens = end_tokens


def kv_use(meters: Iterable[KvMeter], end_s: float) -> KvUse | None:
    """Return the use of all ``meters`` until ``end_s``; None: no worker had a bounded KV cache."""
    room_s = token_s = peak = 0.0
    preemptions = recomputed = found = 0
    for meter in meters:
        until_s = end_s if meter.until_s is None else meter.until_s
        room_s += meter.room_tokens * max(0.0, until_s - meter.since_s)
        token_s += meter.token_s
        peak = max(peak, meter.peak_tokens / meter.room_tokens)
        preemptions += meter.preemptions
        recomputed += meter.recomputed_tokens
        found += 1
    if not found:
        return None
    return KvUse(
        mean_fraction=token_s / room_s if room_s else 0.0,
        peak_fraction=peak,
        preemptions=preemptions,
        recomputed_tokens=recomputed,
    )
