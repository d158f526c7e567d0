"""Waiting time before a deployment that serves at a fixed pace: the FCFS M/D/1 queue.

Poisson arrivals at rate r, one server, constant service time D, utilisation u = r * D. All waits here are in units
of D. The closed form that the planner's queue and the simulator are held against.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["md1_wait_cdf", "md1_wait_quantile"]

Array = npt.NDArray[np.float64]

_SERIES_TERMS = 4  # beyond, the tail is exact enough (below) and the alternating series begins to cancel
_TAIL_STEPS = 50
_QUANTILE_STEPS = 4
_FULL = 1 - 1e-12  # from here on the tail's decay drowns in rounding; the wait is above 1e11 service times


def md1_wait_cdf(utilisation: Array, wait: Array) -> Array:
    """P(W <= wait), ``wait`` in units of the service time, 0 < utilisation < 1.

    Below 4 the exact series; from there on the exponential tail, whose probabilities are within 0.2% of the exact
    ones for utilisations from 0.3, and within 1.5% from 0.05, where they are below 1e-8.
    """
    scale, decay = _tail(utilisation)
    with np.errstate(over="ignore", under="ignore"):
        tail = 1 - scale * np.exp(-decay * np.maximum(wait, _SERIES_TERMS))
    return np.where(wait < _SERIES_TERMS, _series(utilisation, np.minimum(wait, _SERIES_TERMS)), tail)


def md1_wait_quantile(utilisation: Array, percentile: float) -> Array:
    """The wait that ``percentile`` % of the requests do not exceed, in units of the service time.

    Inverse of :func:`md1_wait_cdf` to within 0.003 service times; infinite from utilisation 1 (less 1e-12) on, 0
    where that many requests find the server idle.
    """
    share = percentile / 100
    waits = np.zeros_like(utilisation)
    waits[utilisation >= _FULL] = np.inf
    # Up to one service time the distribution is (1 - u) exp(u x).
    queues = (utilisation < _FULL) & (utilisation > 1 - share)
    u = utilisation[queues]
    x = np.log(share / (1 - u)) / u
    later = x > 1
    u = u[later]
    scale, decay = _tail(u)
    guess = np.maximum(np.log(scale / (1 - share)) / decay, 1.0)
    near = guess < _SERIES_TERMS
    guess[near] = _newton(u[near], guess[near], share)
    x[later] = guess
    waits[queues] = x
    return waits


def _newton(utilisation: Array, guess: Array, share: float) -> Array:
    """Refine the tail's ``guess`` on the exact series, whose slope is ``u (F(x) - F(x - 1))``."""
    for _ in range(_QUANTILE_STEPS):
        here = _series(utilisation, guess)
        slope = np.maximum(utilisation * (here - _series(utilisation, guess - 1)), np.finfo(np.float64).tiny)
        guess = np.clip(guess - (here - share) / slope, 1.0, _SERIES_TERMS)
    return guess


def _series(utilisation: Array, wait: Array) -> Array:
    """P(W <= wait) for 0 <= wait <= _SERIES_TERMS, and 0 below 0.

    Source: Erlang (1909) and Crommelin (1932), one server:
    ``P(W <= x) = (1 - u) * sum over k = 0..floor(x) of (u (k - x))**k / k! * exp(-u (k - x))``.
    """
    total = np.zeros_like(wait)
    factorial = 1.0
    for k in range(_SERIES_TERMS):
        factorial *= max(k, 1)
        power = utilisation * (k - wait)
        term = power**k / factorial * np.exp(-power)
        total += np.where(wait >= k, term, 0.0)
    return (1 - utilisation) * total


def _tail(utilisation: Array) -> tuple[Array, Array]:
    """``(c, s)`` of ``P(W > x) -> c * exp(-s x)``.

    Source: the Cramer-Lundberg asymptote of the M/G/1 queue; with constant service, s > 0 solves
    ``u (exp(s) - 1) = s`` and ``c = (1 - u) / (u exp(s) - 1)``.
    """
    # Newton on a convex function from above its root never overshoots; both bounds hold, the larger is safe.
    decay = np.maximum(2 * (1 - utilisation), -2 * np.log(utilisation))
    for _ in range(_TAIL_STEPS):
        step = (utilisation * np.expm1(decay) - decay) / (utilisation * np.exp(decay) - 1)
        decay = decay - step
        if np.all(np.abs(step) <= 1e-12 * decay):
            break
    return (1 - utilisation) / (utilisation * np.exp(decay) - 1), decay
