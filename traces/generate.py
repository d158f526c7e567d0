"""Synthetic request streams: a law for arrivals, one for lengths, one for models, and a seed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from fingerprint.errors import ConfigError
from traces.arrivals import ArrivalProcess
from traces.lengths import LengthModel
from traces.popularity import Popularity, Uniform
from traces.request import Request

__all__ = ["generate"]


def generate(
    arrivals: ArrivalProcess,
    lengths: LengthModel,
    *,
    seed: int,
    duration_s: float | None = None,
    num_requests: int | None = None,
    models: Sequence[str] = (),
    popularity: Popularity | None = None,
) -> Iterator[Request]:
    """Yield requests until ``duration_s`` or ``num_requests`` is reached, in constant memory.

    The same arguments give the same stream. Arrivals, lengths and models have separate random numbers: a change of
    one law leaves the values of the other two as they were, and a longer duration only continues the stream.

    Raises:
        ConfigError: neither bound is given, or one is not above 0.
    """
    if duration_s is None and num_requests is None:
        raise ConfigError("a generated trace needs a duration_s or a num_requests")
    if (duration_s is not None and not duration_s > 0) or (num_requests is not None and num_requests < 1):
        raise ConfigError(f"duration_s={duration_s} and num_requests={num_requests} must be above 0")
    if seed < 0:
        raise ConfigError(f"the seed must be at least 0, got {seed}")
    return _stream(arrivals, lengths, seed, duration_s, num_requests, models, popularity or Uniform())


def _stream(
    arrivals: ArrivalProcess,
    lengths: LengthModel,
    seed: int,
    duration_s: float | None,
    num_requests: int | None,
    models: Sequence[str],
    popularity: Popularity,
) -> Iterator[Request]:
    arrivals_rng, lengths_rng, models_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(3))
    given = 0
    for times in arrivals.arrivals(arrivals_rng):
        # A whole chunk is drawn before it is cut, so that a longer trace begins like this one.
        inputs, outputs = lengths.sample(lengths_rng, len(times))
        names = [""] * len(times)
        if models:
            drawn = popularity.draw(models_rng, given, len(times), len(models))
            names = [models[index] for index in drawn.tolist()]
        keep = len(times)
        if duration_s is not None:
            keep = int(np.searchsorted(times, duration_s))
        if num_requests is not None:
            keep = min(keep, num_requests - given)
        yield from map(Request, times[:keep].tolist(), inputs[:keep].tolist(), outputs[:keep].tolist(), names)
        given += keep
        if keep < len(times) or given == num_requests:
            return
