"""Requests whose prompts begin alike, where a trace does not say which do, and what a cache holds of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tests.bench.fidelity_compare import Sent
from traces.request import PREFIX_BLOCK_TOKENS, Request
from traces.simulator.prefix_cache import PrefixCache

__all__ = ["cached_share", "share_of_counters", "with_shared_prefixes"]

PREFIXES = 8  # different ones, as of so many applications with a long instruction each
_COUNTER = re.compile(r"(?m)^vllm:prefix_cache_(queries|hits)(?:_total)?(?:\{[^}]*\})? (\S+)$")


def with_shared_prefixes(requests: Sequence[Request], share: float, seed: int = 0) -> list[Request]:
    """Return the same requests with prompts of which ``share`` of the tokens are of one of eight prefixes.

    A trace's own prefixes stay where any request has one. Otherwise each request draws its prefix, and has of it
    whole blocks of 512 tokens, at random the fewer or the more next to its share, and at least one token of its
    own.
    """
    if any(request.prefix_blocks for request in requests):
        return list(requests)
    random, found = np.random.default_rng(seed), []
    for request in requests:
        which, more = int(random.integers(PREFIXES)), random.random()
        wanted = int(share * request.input_tokens / PREFIX_BLOCK_TOKENS + more)
        blocks = min(wanted, (request.input_tokens - 1) // PREFIX_BLOCK_TOKENS)
        own = tuple(which + PREFIXES * block for block in range(blocks))
        found.append(replace(request, prefix_blocks=own))
    return found


def cached_share(sent: Sent) -> float:
    """Return the share of the prompts' tokens that an empty cache without an end would have had."""
    if not sent.prefix_blocks:
        return 0.0
    cache = PrefixCache(sent.prefix_blocks)
    hits = sum(cache.admit(row, tokens) for row, tokens in enumerate(sent.input_tokens))
    return hits / sum(sent.input_tokens)


def share_of_counters(before: str, after: str) -> float | None:
    """Return the share of tokens that vLLM found in its cache between two looks at its metrics; None: unknown."""
    first, last = (_counters(text) for text in (before, after))
    asked = last.get("queries", 0.0) - first.get("queries", 0.0)
    return (last.get("hits", 0.0) - first.get("hits", 0.0)) / asked if asked > 0 else None


def _counters(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in _COUNTER.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found
