"""Number of adapter slots that a base reserves for its variants, by how they are popular. Pure.

Requests in flight are taken to be independent of one another: of n on average, variant i has a Poisson number of
mean n p_i, as of arrivals in an open system. So the variants that are asked for at once are independent events of
probability 1 - exp(-n p_i), and the distribution of their number is exact.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fingerprint.config import ADAPTER_RANKS, SlotFormat
from fingerprint.load_waits import LoadWaits
from planner.variant_cache import load_waits, missed_share

__all__ = [
    "MOST_SLOTS",
    "MOST_WITHOUT",
    "AskedVariants",
    "SlotNeed",
    "VariantLoad",
    "VariantShares",
    "slot_need",
]

MOST_SLOTS = 64  # that a plan reserves by itself
MOST_WITHOUT = 0.05  # of the variants that are asked for at once, without a slot on average


class AskedVariants(ABC):
    """Variants of a base, and how often each is asked for."""

    __slots__ = ()

    @property
    @abstractmethod
    def shares(self) -> NDArray[np.float64]:
        """Share of all requests for each variant, the most popular first; the rest is for the base."""

    @property
    def of_base(self) -> float:
        """Share of the requests for the base itself."""
        return max(0.0, 1 - float(self.shares.sum()))

    def asked_for(self, requests: float) -> NDArray[np.float64]:
        """Return the probability of each variant that one of ``requests`` in flight on average asks for it."""
        return np.asarray(-np.expm1(-requests * self.shares))

    def distinct(self, requests: float) -> float:
        """Return how many variants ``requests`` in flight ask for on average."""
        return float(self.asked_for(requests).sum())

    def missed(self, places: int) -> float:
        """Return the share of all requests whose variant a worker with ``places`` for loaded ones must load."""
        return missed_share(self.shares, places)

    def load_waits(self, slots: int, places: int, load_s: float) -> LoadWaits | None:
        """Return the waits for loads of ``load_s`` that run next to the steps; None: all variants stay loaded."""
        return load_waits(self.shares, slots, places, load_s)

    def without_slot(self, requests: float) -> NDArray[np.float64]:
        """Return the share of the variants asked for at once that find none of 0, 1, ..., ``MOST_SLOTS`` slots.

        It is E[max(D - slots, 0)] / E[D] of their number D. Slots that go to those with most requests leave a
        smaller share of the requests without one.
        """
        chances = self.asked_for(requests)
        number = np.zeros(MOST_SLOTS)  # probability that D is 0, 1, ...
        number[0] = 1.0
        for chance in chances:
            number[1:] += chance * (number[:-1] - number[1:])
            number[0] *= 1 - chance
        more = 1 - np.cumsum(number)  # that D is above 0, 1, ...; their sum is E[min(D, slots)]
        served = np.concatenate(([0.0], np.cumsum(more)))
        return np.asarray(np.clip(1 - served / chances.sum(), 0.0, 1.0))


@dataclass(frozen=True, slots=True)
class VariantLoad(AskedVariants):
    """Variants of a base, the i-th asked for in proportion to ``i ** -skew`` (Zipf's law)."""

    variants: int
    skew: float
    base_share: float = 0.0  # of the requests, those for the base itself

    @property
    def shares(self) -> NDArray[np.float64]:
        weights = np.arange(1.0, self.variants + 1) ** -self.skew
        return np.asarray((1 - self.base_share) * weights / weights.sum())


@dataclass(frozen=True, slots=True)
class VariantShares(AskedVariants):
    """Variants of a base by their shares of all requests, the largest first."""

    of_variants: tuple[float, ...]

    @property
    def shares(self) -> NDArray[np.float64]:
        return np.array(self.of_variants)

    def without_first(self, number: int) -> VariantShares:
        """Return what is left when the first ``number`` are asked for elsewhere, by their shares of the rest."""
        left = 1 - sum(self.of_variants[:number])
        return VariantShares(tuple(min(1.0, share / left) for share in self.of_variants[number:]))


@dataclass(frozen=True, slots=True)
class SlotNeed:
    """Slots that a load needs, and what is left without."""

    slots: int
    rank: int  # that each holds
    without_slot: tuple[float, ...]  # share of the variants asked for at once, with 0, 1, ... slots
    is_fixed: bool = False  # so many were asked for, whatever they take
    delta_mib: int = 0  # of the largest delta that each holds
    delta_format: SlotFormat = SlotFormat.NONE  # of those that each holds

    @property
    def without(self) -> float:
        """Return the share that these slots leave without one."""
        return self.without_slot[self.slots]


def slot_need(
    load: AskedVariants,
    rank: int,
    requests: float,
    slots: int = 0,
    *,
    delta_mib: int = 0,
    delta_format: SlotFormat = SlotFormat.NONE,
) -> SlotNeed:
    """Return the fewest slots, a power of two, with which at most ``MOST_WITHOUT`` of the variants find none.

    Args:
        rank: of the adapters, the largest; slots are made for the next rank that engines offer. 0: there are none.
        requests: in flight on average, those for the base included.
        slots: asked for, ``MOST_SLOTS`` at most; 0: as many as are needed.
        delta_mib: of the largest delta of a full fine-tune among them; 0: all are adapters.
        delta_format: of the deltas, where an engine's slots have one.
    """
    slot_rank = next(one for one in ADAPTER_RANKS if one >= rank) if rank else 0
    without, is_fixed = load.without_slot(requests), slots > 0
    slots = slots or 1
    while not is_fixed and slots < min(MOST_SLOTS, len(load.shares)) and without[slots] > MOST_WITHOUT:
        slots *= 2
    return SlotNeed(
        slots,
        slot_rank,
        tuple(without.tolist()),
        is_fixed=is_fixed,
        delta_mib=delta_mib,
        delta_format=delta_format,
    )
