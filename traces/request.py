"""Request of a workload: the unit that readers and generators yield and replay and simulation consume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["PREFIX_BLOCK_TOKENS", "Request", "RequestStream"]

PREFIX_BLOCK_TOKENS = 512  # of each prefix block of a request; a format with other blocks is read into these


@dataclass(frozen=True, slots=True)
class Request:
    """``arrival_s`` counts from the start of the trace; streams are sorted by it.

    ``model`` is a deployment's or model's name, "" where the trace names none. ``prefix_blocks`` are hashes of the
    prompt's leading blocks in order, ``PREFIX_BLOCK_TOKENS`` each, where a trace has them: equal ids mean KV that
    could be shared.
    """

    arrival_s: float
    input_tokens: int
    output_tokens: int
    model: str = ""
    prefix_blocks: tuple[int, ...] = ()


RequestStream: TypeAlias = Iterator[Request]
