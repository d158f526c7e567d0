"""Workers that batch and share GPUs: how busy each is where all came to rest (``placement.batch_load``).

All of a cluster are worked out at once, turn by turn: from how busy they are how much each is slowed, from that
how busy it is. A turn begins with what the last one left of all of them, so that their order is no reason.

Where each of some runs for a share q of the time, independently, one that always runs has the mean of
``1 / (1 + X)`` of the GPU, X of them running. That is the integral over t from 0 to 1 of the product of their
``1 - q (1 - t)``, since ``1 / (1 + X)`` is that of t to the X: a polynomial, which the rule of Gauss and Legendre
integrates exactly. Who is one of them sees the product without its own factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from placement.batch_load import Batching, Chains, Floats
from placement.load_model import Key

__all__ = ["kept", "settle"]

_TURNS, _CLOSE = 100, 1e-4  # of a slowdown: rises less, it is at rest


def settle(tenants: Sequence[Batching]) -> list[float]:
    """The batches that each of ``tenants`` has under way where all came to rest beside one more that always runs
    on every GPU. No two stages of one stand on the same GPU."""
    return _Sharing(tenants).at_rest().tolist() if tenants else []


def kept(tenants: Sequence[Batching], told: Sequence[Batching]) -> dict[Key, float]:
    """Return the part of each GPU's time that ``tenants`` keep from a worker that always runs there, once they
    settled next to it and ``told``, which slow them."""
    return _Sharing([*tenants, *told]).kept(len(tenants)) if tenants else {}


class _Sharing:
    """Arrays of three lengths: one place for each tenant, for each stage of each, for each GPU of each stage."""

    def __init__(self, tenants: Sequence[Batching]) -> None:
        self._gpus: dict[Key, int] = {}
        stages = [(who, share, len(keys)) for who, t in enumerate(tenants) for share, keys in t.stages]
        number = self._gpus.setdefault
        where = [number(key, len(self._gpus)) for t in tenants for _, keys in t.stages for key in keys]
        owners, shares, sizes = (np.array(column) for column in zip(*stages, strict=True))
        self._shares, self._stage_starts = shares, np.cumsum(sizes) - sizes
        self._tenant_starts = np.flatnonzero(np.diff(owners, prepend=-1))
        self._owner, self._share, self._where = np.repeat(owners, sizes), np.repeat(shares, sizes), np.array(where)
        self._by_gpu, crowds = np.argsort(self._where, kind="stable"), np.bincount(self._where)
        self._gpu_starts = np.cumsum(crowds) - crowds
        self._times, self._weights = _rule(int(crowds.max()))
        self._chains = Chains(tenants, float(crowds.max() + 1))
        self._num_tenants = len(tenants)

    def at_rest(self) -> Floats:
        """Return each tenant's batches under way."""
        batches, slowed = np.zeros(self._num_tenants), np.zeros(self._num_tenants)
        for _ in range(_TURNS):
            slower = self._slowed(batches)
            if (slower <= slowed * (1 + _CLOSE)).all():
                break
            slowed, batches = slower, np.maximum(batches, self._chains.under_way(slower))
        return batches

    def kept(self, first: int) -> dict[Key, float]:
        """Return the part of each GPU's time that the first ``first`` tenants keep."""
        batches = self.at_rest()
        batches[first:] = 0.0
        of_gpus = (1 - self._products(self._factors(batches))) @ self._weights
        return dict(zip(self._gpus, of_gpus.tolist(), strict=True))

    def _slowed(self, batches: Floats) -> Floats:
        factors = self._factors(batches)
        others = self._products(factors)[self._where] / factors
        speeds = np.minimum.reduceat(others @ (self._times * self._weights), self._stage_starts)
        slowed: Floats = np.add.reduceat(self._shares / speeds, self._tenant_starts)
        return slowed

    def _factors(self, batches: Floats) -> Floats:
        running = np.minimum(1.0, self._share * batches[self._owner])
        factors: Floats = 1 - running[:, np.newaxis] * (1 - self._times)
        return factors

    def _products(self, factors: Floats) -> Floats:
        """Return the product of the factors of each GPU."""
        products: Floats = np.multiply.reduceat(factors[self._by_gpu], self._gpu_starts)
        return products


@lru_cache(maxsize=64)
def _rule(degree: int) -> tuple[Floats, Floats]:
    """Nodes and weights of the mean over 0 to 1, exact for polynomials of this degree."""
    nodes, weights = np.polynomial.legendre.leggauss(degree // 2 + 1)
    return (nodes + 1) / 2, weights / 2
