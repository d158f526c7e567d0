"""Share of the requests whose variant a worker must load first, in steady state. Pure.

Che's approximation: of independent requests, each for variant i with probability p_i, the least recently used of
what C places hold is replaced. A variant stays for a time t without a request that is nearly the same for all,
the one in which C distinct ones are asked for: sum(1 - exp(-p_i t)) = C. So it is missing with probability
exp(-p_i t). The rate does not matter, as t is in requests.

Workers evict the variant of least decayed frequency (``placement.variant_routing``), which keeps popular ones
better at high rates; what that makes of the law is in docs/decisions/0050-loads-in-plans.md.

Sources: Che, Tung, Wang, Hierarchical Web caching systems, 2002; Fricker, Robert, Roberts, A versatile and
accurate approximation for LRU cache performance, 2012.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["missed_share"]

_HALVINGS = 60


def missed_share(shares: NDArray[np.float64], places: int) -> float:
    """Return the share of all requests that are for a variant which is not loaded.

    Args:
        shares: of all requests, for each variant; what is left to 1 is for the base, which is always there.
        places: variants that a worker keeps loaded.
    """
    asked = shares[shares > 0]
    if len(asked) <= places:
        return 0.0
    low, high = 0.0, 1.0
    while -np.expm1(-asked * high).sum() < places:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if -np.expm1(-asked * middle).sum() < places else (low, middle)
    return float((asked * np.exp(-asked * high)).sum())
