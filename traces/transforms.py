"""Streams out of streams: merged, cut, capped, with models assigned. All lazy, all keep the order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, islice

import numpy as np

from fingerprint.errors import ConfigError
from traces.popularity import Popularity
from traces.request import Request

__all__ = ["assign_models", "cap_lengths", "clip", "merge"]

_CHUNK = 4096


def merge(*streams: Iterable[Request]) -> Iterator[Request]:
    """Yield several sorted streams as one; of requests at one time, those of an earlier stream are first."""
    return heapq.merge(*streams, key=lambda request: request.arrival_s)


def assign_models(
    requests: Iterable[Request], models: Sequence[str], popularity: Popularity, *, seed: int
) -> Iterator[Request]:
    """Give each request a model, the most popular first in ``models``; a model that it had is replaced.

    Raises:
        ConfigError: no models, or one twice.
    """
    if not models or len(set(models)) != len(models):
        raise ConfigError(f"requests need at least one model, each named once, got {list(models)}")
    return _assigned(iter(requests), tuple(models), popularity, np.random.default_rng(seed))


def _assigned(
    requests: Iterator[Request], models: tuple[str, ...], popularity: Popularity, rng: np.random.Generator
) -> Iterator[Request]:
    for first in count(0, _CHUNK):
        chunk = list(islice(requests, _CHUNK))
        # Always a whole chunk of random numbers: a longer stream begins with the same models.
        drawn = popularity.draw(rng, first, _CHUNK, len(models)).tolist()
        for request, index in zip(chunk, drawn, strict=False):
            yield replace(request, model=models[index])
        if len(chunk) < _CHUNK:
            return


def clip(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    """Yield the requests in [start_s, end_s), with the clock starting at ``start_s``; reads no further than
    ``end_s``.

    Raises:
        ConfigError: the window is empty or begins before 0.
    """
    if not 0 <= start_s < end_s:
        raise ConfigError(f"a window begins at 0 or later and ends after it begins, got {start_s} to {end_s} s")
    return _clipped(requests, start_s, end_s)


def _clipped(requests: Iterable[Request], start_s: float, end_s: float) -> Iterator[Request]:
    for request in requests:
        if request.arrival_s >= end_s:
            return
        if request.arrival_s >= start_s:
            yield request if start_s == 0 else replace(request, arrival_s=request.arrival_s - start_s)


def cap_lengths(
    requests: Iterable[Request],
    *,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    context_tokens: int | Mapping[str, int] | None = None,
) -> Iterator[Request]:
    """Cut lengths to what a deployment takes.

    Each side to its own limit first; then, where both together pass ``context_tokens``, the prompt gives way, down
    to one token, and after it the answer. Prefix blocks are cut in the proportion of the prompt.

    Args:
        context_tokens: of all requests, or by model; those of other models keep their lengths.

    Raises:
        ConfigError: a limit is below 1, or the context below 2.
    """
    contexts = context_tokens if isinstance(context_tokens, Mapping) else {"": context_tokens}
    limits = ((max_input_tokens, 1), (max_output_tokens, 1), *((context, 2) for context in contexts.values()))
    if any(limit is not None and limit < least for limit, least in limits):
        raise ConfigError(
            f"limits must be at least 1 token, a context at least 2, got max_input_tokens={max_input_tokens}, "
            f"max_output_tokens={max_output_tokens}, context_tokens={context_tokens}"
        )
    if isinstance(context_tokens, Mapping):
        return (_capped(one, max_input_tokens, max_output_tokens, contexts.get(one.model)) for one in requests)
    return (_capped(one, max_input_tokens, max_output_tokens, context_tokens) for one in requests)


def _capped(
    request: Request, max_input_tokens: int | None, max_output_tokens: int | None, context_tokens: int | None
) -> Request:
    inputs, outputs = request.input_tokens, request.output_tokens
    if max_input_tokens is not None:
        inputs = min(inputs, max_input_tokens)
    if max_output_tokens is not None:
        outputs = min(outputs, max_output_tokens)
    if context_tokens is not None and inputs + outputs > context_tokens:
        outputs = min(outputs, context_tokens - 1)
        inputs = context_tokens - outputs
    if (inputs, outputs) == (request.input_tokens, request.output_tokens):
        return request
    kept = -(-len(request.prefix_blocks) * inputs // max(1, request.input_tokens))
    return replace(request, input_tokens=inputs, output_tokens=outputs, prefix_blocks=request.prefix_blocks[:kept])
