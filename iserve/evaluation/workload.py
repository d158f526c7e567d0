"""Requests of a world for one seed, and what they tell of each deployment: lengths, rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np

from fingerprint.config import Workload
from fingerprint.errors import ConfigError
from iserve.evaluation.variants import with_variant_names
from iserve.evaluation.world import LengthLaw, World, WorldModel
from traces.arrivals import RateSeries
from traces.generate import generate
from traces.lengths import LognormalLengths
from traces.request import Request
from traces.trace_argument import SYNTHETIC, requests_of
from traces.transforms import cap_lengths, merge

__all__ = ["Load", "load_of", "make_requests"]

_SEEDS_APART = 10_007  # prime: streams of different models and seeds share no random numbers
_MOST_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class Load:
    """Load of one deployment over the horizon: its mean request, its longest one, and its mean rate."""

    workload: Workload  # of one request at a time
    rate_per_s: float


def make_requests(world: World, seed: int, folder: Path) -> tuple[Request, ...]:
    """Return the requests in the world's time: those to a model arrive once it can be ready.

    Args:
        folder: where a relative path of a trace begins.

    Raises:
        ConfigError: the trace is shorter than the horizon, there are more than a million requests, or none.
        BadInputError: the trace cannot be read.
    """
    law = world.requests
    stream = _by_law(world, seed) if law.trace is None else _by_trace(world, seed, folder)
    capped = cap_lengths(stream, max_input_tokens=law.max_input_tokens, max_output_tokens=law.max_output_tokens)
    at_s = {model.name: model.deploy_at_s for model in world.models}
    ready = {name: at_s[model] for name, model in world.model_of.items()}
    startup_s = world.truth.startup_s
    kept = (
        replace(one, arrival_s=one.arrival_s + startup_s) for one in capped if one.arrival_s >= ready[one.model]
    )
    found = tuple(islice(kept, _MOST_REQUESTS + 1))
    if not found:
        raise ConfigError(
            f"{world.name}: no request arrives within {world.horizon_s:g} s; raise rates or horizon_s"
        )
    if len(found) > _MOST_REQUESTS:
        raise ConfigError(f"{world.name}: more than {_MOST_REQUESTS:,} requests; lower rates or horizon_s")
    return with_variant_names(world, found, seed)


def _by_law(world: World, seed: int) -> Iterable[Request]:
    law = world.requests
    if law.rate_per_s is None:
        rates = law.rates_per_s
    else:
        rates = {name: law.rate_per_s * weight for name, weight in law.weights(world.names).items()}
    streams = []
    for index, name in enumerate(world.names):
        per_second = tuple(rates[name] * factor for factor in _factors(world, name))
        if not any(per_second):
            continue
        lengths = law.lengths_by_model.get(name) or law.lengths
        assert lengths is not None, "the schema saw to it"
        streams.append(
            generate(
                RateSeries(1.0, per_second, law.arrival_cv),
                _lognormal(lengths),
                seed=seed * _SEEDS_APART + index,
                duration_s=world.horizon_s,
                models=(name,),
            )
        )
    return merge(*streams)


def _factors(world: World, name: str) -> list[float]:
    """Return the factor on a model's rate in each second of the horizon."""
    law = world.requests
    changes = sorted((change.at_s, change.factor) for change in law.changes if change.model == name)
    factors = []
    for second in range(math.ceil(world.horizon_s)):
        changed = [factor for at_s, factor in changes if at_s <= second]
        day = 1 - law.daily_amplitude * math.cos(2 * math.pi * (second + 0.5) / law.daily_period_s)
        factors.append((changed[-1] if changed else 1.0) * day)
    return factors


def _lognormal(law: LengthLaw) -> LognormalLengths:
    """Return the law with these means and coefficients of variation (before lengths are rounded up and cut)."""

    def parameters(mean: float, cv: float) -> tuple[float, float]:
        variance = math.log(1 + cv * cv)
        return math.log(mean) - variance / 2, math.sqrt(variance)

    return LognormalLengths(
        *parameters(law.input_mean_tokens, law.input_cv), *parameters(law.output_mean_tokens, law.output_cv)
    )


def _by_trace(world: World, seed: int, folder: Path) -> Iterable[Request]:
    law = world.requests
    assert law.trace is not None, "the schema saw to it"
    source = law.trace if law.trace.startswith(SYNTHETIC) else str(folder / law.trace)
    read = [one for one in islice(requests_of(source, seed=seed), _MOST_REQUESTS) if one.arrival_s >= law.start_s]
    if len(read) < 2 or read[-1].arrival_s <= read[0].arrival_s:
        raise ConfigError(f"{law.trace} has fewer than two requests at different times after {law.start_s:g} s")
    span_s = read[-1].arrival_s - law.start_s
    stretch = 1.0 if law.rate_per_s is None else len(read) / span_s / law.rate_per_s
    if span_s * stretch < world.horizon_s * (1 - 1e-9):
        raise ConfigError(
            f"{law.trace} is {span_s * stretch:.4g} s long at {len(read) / span_s / stretch:.4g} requests/s, the "
            f"horizon is {world.horizon_s:g} s; lower horizon_s or rate_per_s"
        )
    timed = (replace(one, arrival_s=(one.arrival_s - law.start_s) * stretch) for one in read)
    return _with_models(world, [one for one in timed if one.arrival_s < world.horizon_s], seed)


def _with_models(world: World, requests: Sequence[Request], seed: int) -> Iterable[Request]:
    """Give each request a model by the shares at its time, unless the trace names one of the world's models."""
    names, law = world.names, world.requests
    if any(one.model for one in requests):
        unknown = {one.model for one in requests} - set(world.model_of)
        if unknown:
            raise ConfigError(
                f"{law.trace} calls {', '.join(sorted(unknown)[:5])!s}; the models are {', '.join(names)}"
            )
        return requests
    base = law.weights(names)
    weights = np.array([[base[name] * factor for factor in _factors(world, name)] for name in names])
    if not (weights.sum(axis=0) > 0).all():
        raise ConfigError("requests.changes leaves a time without a model that is called; keep one factor above 0")
    edges = np.cumsum(weights, axis=0)
    drawn = np.random.default_rng(seed * _SEEDS_APART).random(len(requests))
    chosen = []
    for one, uniform in zip(requests, drawn.tolist(), strict=True):
        column = edges[:, min(int(one.arrival_s), edges.shape[1] - 1)]
        index = min(int(np.searchsorted(column, uniform * column[-1], side="right")), len(names) - 1)
        chosen.append(replace(one, model=names[index]))
    return chosen


def load_of(
    world: World, requests: Sequence[Request], deployed: Sequence[WorldModel] | None = None
) -> dict[str, Load]:
    """Return the load of each deployment; one without requests has the mean lengths of all.

    Args:
        deployed: deployments, where variants have some of their own; None: the models, each with its variants.
    """
    models, model_of = world.models if deployed is None else deployed, world.model_of
    by_name: dict[str, list[Request]] = {model.name: [] for model in models}
    for one in requests:
        by_name[one.model if one.model in by_name else model_of[one.model]].append(one)
    found = {}
    for model in models:
        own = by_name[model.name] or requests
        inputs = max(1, round(sum(one.input_tokens for one in own) / len(own)))
        outputs = max(1, round(sum(one.output_tokens for one in own) / len(own)))
        longest = max(inputs + outputs, *(one.input_tokens + one.output_tokens for one in own), 1)
        rate = len(by_name[model.name]) / max(world.horizon_s - model.deploy_at_s, 1.0)
        found[model.name] = Load(Workload(1, inputs, outputs, longest_tokens=longest), rate)
    return found
