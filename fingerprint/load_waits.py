"""Loads of variants, and the waits for those next to the steps of a worker, at any rate. Pure, no numpy.

Where a load stops no step it delays the requests for its variant alone. How many wait, and how long, depends on
the rate, which an estimate does not know: it has a table over the requests that arrive in the seconds of a load
(``planner.variant_cache`` makes it), which forecasts under load read (``fingerprint.load_columns``).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FIRST_OCTAVE", "OFFERED", "PER_OCTAVE", "LoadWaits", "OneLoad"]

FIRST_OCTAVE, _LAST_OCTAVE, PER_OCTAVE = -5, 6, 8
OFFERED = tuple(
    2.0 ** (step / PER_OCTAVE) for step in range(FIRST_OCTAVE * PER_OCTAVE, _LAST_OCTAVE * PER_OCTAVE + 1)
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadWaits:
    """Waits for loads at a worker that loads one variant at a time, next to its steps.

    The numbers of each list belong to rates from 1/32 to 64 requests in the seconds of a load, eight for each
    doubling (``OFFERED``). Below and above these rates the first and the last number holds.
    """

    load_s: float
    """Seconds of a load."""
    shares: tuple[float, ...]
    """Share of the requests that wait for a load."""
    means: tuple[float, ...]
    """Mean wait of these, the load included, in loads."""
    least: tuple[float, ...]
    """Least wait of the request that orders a load, in loads; an exponential time is on top."""
    shorter: tuple[float, ...]
    """Share, of the requests that wait, of those that share a load and wait an even time up to the least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OneLoad:
    """Load of a variant at a worker that makes one at a time."""

    load_s: float
    """Seconds of a load."""
    stops_steps: bool
    """Whether the worker decodes nothing meanwhile."""
    counted_s: float = 0.0
    """Mean seconds of loads that the time of each prompt counts, where they stop the steps."""
