"""Prefix cache of a worker: blocks of prompts whose KV is computed once.

Simplified:

* A block is there for the next request as soon as its first one is admitted, as in vLLM, whose scheduler
  registers the blocks of a step while it plans that step; blocks of later chunks are there early.
* Nothing is evicted, and KV that requests share is counted for each of them.
* Blocks are those of the trace (``PREFIX_BLOCK_TOKENS``), not the engine's. At least one token is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from traces.request import PREFIX_BLOCK_TOKENS

__all__ = ["PrefixCache"]


class PrefixCache:
    """Cache that knows the blocks of all requests that were admitted.

    Args:
        blocks: of every row, which may grow.
    """

    __slots__ = ("_blocks", "_known")

    def __init__(self, blocks: Sequence[tuple[int, ...]]) -> None:
        self._blocks = blocks
        self._known: set[int] = set()

    def admit(self, row: int, input_tokens: int) -> int:
        """Return how many of the first tokens of a prompt are there, and keep its whole blocks from now on."""
        blocks, hits = self._blocks[row], 0
        for block in blocks:
            if block not in self._known:
                break
            hits += PREFIX_BLOCK_TOKENS
        self._known.update(blocks[: input_tokens // PREFIX_BLOCK_TOKENS])
        return min(hits, input_tokens - 1)
