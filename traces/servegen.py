"""ServeGen's description of production traffic, made into requests: clients with a rate and a gap law per slot.

A client's gaps in a slot are drawn from its published law (gamma or Weibull, by shape) and stretched to fill the
slot with the client's rate: the published scale is not used, since for Weibull laws it misses the published rate
(m-mid's busiest client by a factor of 665,000). Clients are merged. A client's input and output lengths are
independent: only each one's distribution is published.

Source: ServeGen (Xiang et al., arXiv 2505.09999), sections 3 and 6, and its data's README.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fingerprint.errors import BadInputError, ConfigError
from traces.arrivals import RateSeries
from traces.generate import generate
from traces.lengths import LengthModel
from traces.request import Request

__all__ = ["Client", "ClientSlot", "GapLaw", "LengthWindow", "client_requests", "series_requests"]

GapLaw = Literal["Gamma", "Weibull"]
_MAX_PER_DRAW = 10_000_000


@dataclass(frozen=True)
class ClientSlot:
    """A client in one slot of time: rate, law of its gaps, lengths of its requests."""

    start_s: float
    duration_s: float
    rate_per_s: float
    law: GapLaw
    shape: float
    lengths: LengthModel

    def __post_init__(self) -> None:
        if not (self.rate_per_s >= 0 and self.shape > 0 and self.duration_s > 0):
            raise ConfigError(f"a client's rate must be at least 0, its shape and duration above 0, got {self}")


@dataclass(frozen=True)
class Client:
    """Slots of one client, ascending."""

    name: str
    slots: tuple[ClientSlot, ...]


def client_requests(clients: Sequence[Client], *, seed: int) -> Iterator[Request]:
    """Yield all clients' requests, merged, from first to last slot; a client's slot at a time in memory."""
    seeds = np.random.SeedSequence(seed).spawn(len(clients))
    streams = [_requests(client, np.random.default_rng(own)) for client, own in zip(clients, seeds, strict=True)]
    return heapq.merge(*streams, key=lambda request: request.arrival_s)


def _requests(client: Client, rng: np.random.Generator) -> Iterator[Request]:
    for slot in client.slots:
        expected = slot.rate_per_s * slot.duration_s
        if expected > _MAX_PER_DRAW:
            raise BadInputError(f"client {client.name} has {expected:.0f} requests in one slot; that is no rate")
        count = int(expected + rng.random())  # the fraction by chance, so that slow clients keep their rate
        if count == 0:
            continue
        inputs, outputs = slot.lengths.sample(rng, count)
        times = slot.start_s + _positions(slot, count, rng) * slot.duration_s
        yield from map(Request, times.tolist(), inputs.tolist(), outputs.tolist())


def _positions(slot: ClientSlot, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """``count`` places in [0, 1): one gap more than requests, so that the last does not sit on the slot's end."""
    if slot.law == "Gamma":
        gaps = rng.gamma(slot.shape, size=count + 1)
    else:
        # A Weibull gap is an exponential one to the power of 1/shape; by logarithms, for a small shape overflows.
        logs = np.log(rng.exponential(size=count + 1)) / slot.shape
        gaps = np.exp(logs - logs.max())
    total = float(gaps.sum())
    if total == 0:  # a gamma shape so small that every gap underflows
        return np.sort(rng.random(count))
    places: NDArray[np.float64] = np.cumsum(gaps)[:-1] / total
    return places.clip(max=np.nextafter(1.0, 0.0))


@dataclass(frozen=True)
class LengthWindow:
    """Lengths from ``start_s`` until the next window."""

    start_s: float
    lengths: LengthModel


def series_requests(rates: RateSeries, windows: Sequence[LengthWindow], *, seed: int) -> Iterator[Request]:
    """Yield requests of a rate series whose lengths change from window to window.

    Raises:
        BadInputError: no window begins at 0, or one not at the beginning of a slot.
    """
    edges = [window.start_s / rates.slot_s for window in windows]
    if not edges or edges[0] != 0 or edges != sorted(set(edges)) or any(edge % 1 for edge in edges):
        raise BadInputError("windows of lengths must ascend from 0 and begin where slots of the rate do")
    return _series(rates, windows, seed)


def _series(rates: RateSeries, windows: Sequence[LengthWindow], seed: int) -> Iterator[Request]:
    starts = [int(window.start_s / rates.slot_s) for window in windows]
    seeds = np.random.SeedSequence(seed).generate_state(len(windows), np.uint64).tolist()
    for window, first, last, own in zip(windows, starts, [*starts[1:], None], seeds, strict=True):
        slots = rates.rates_per_s[first:last]
        if not any(slots):
            continue
        part = RateSeries(rates.slot_s, slots, rates.cv)
        requests = generate(part, window.lengths, seed=own, duration_s=len(slots) * rates.slot_s)
        for request in requests:
            yield Request(window.start_s + request.arrival_s, request.input_tokens, request.output_tokens)
