"""Values common to ServeGen's two kinds of files: laws of gaps, numbers, clients without lengths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fingerprint.errors import BadInputError
from traces.formats.base import seconds_of
from traces.lengths import LengthModel, MixedLengths
from traces.servegen import GapLaw
from traces.text_reader import Lines

__all__ = ["SIDES", "SLOT_S", "gap_law", "lengths_of_others", "number_above_0", "number_at_least_0"]

SLOT_S = 600.0
SIDES = ("input_tokens", "output_tokens")
_LAWS: dict[str, GapLaw] = {"Gamma": "Gamma", "Weibull": "Weibull"}


def lengths_of_others(known: Iterable[tuple[float, LengthModel | None]], path: Path) -> MixedLengths:
    """Return the lengths for clients without any: those of the clients that have some, by their rates."""
    weights: dict[LengthModel, float] = {}
    for rate_per_s, lengths in known:
        if lengths is not None and rate_per_s > 0:
            weights[lengths] = weights.get(lengths, 0.0) + rate_per_s
    if not weights:
        raise BadInputError(f"{path}: no client has both a rate and lengths")
    return MixedLengths(tuple((weight, lengths) for lengths, weight in weights.items()))


def gap_law(text: str, lines: Lines) -> GapLaw:
    if text not in _LAWS:
        raise lines.error(f"the law of gaps is {text[:40]!r}; known are {', '.join(_LAWS)}")
    return _LAWS[text]


def number_at_least_0(text: str, what: str, lines: Lines) -> float:
    value = seconds_of(text, what, lines)
    if value < 0:
        raise lines.error(f"{what} is {text[:40]}, below 0")
    return value


def number_above_0(text: str, what: str, lines: Lines) -> float:
    value = seconds_of(text, what, lines)
    if value <= 0:
        raise lines.error(f"{what} is {text[:40]}, not above 0")
    return value
