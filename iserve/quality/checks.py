"""Checks of a result that a caller sends: its numbers are finite and possible, its hashes are hashes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import datetime

from fingerprint.codec import to_builtins
from fingerprint.errors import BadInputError
from fingerprint.sanitize import is_plain
from iserve.quality.document import ComparisonDocument, Interval, QualityDocument

__all__ = ["check_result"]

_HASH = re.compile(r"[0-9a-f]{64}")
_HASHES = ("sha256", "variant_hash", "weights_stamp")
_MOST = 2**53  # integers that every reader of JSON has exactly
_ROUNDING = 1e-3  # a negative log-likelihood below 0 by no more is that of rounded logarithms


def check_result(result: QualityDocument) -> None:
    """Return if ``result`` may be of a measurement.

    Raises:
        BadInputError: it cannot, and its first field that says so.
    """
    fault = next(_faults(result), None)
    if fault is not None:
        raise BadInputError(f"no measurement has this result: {fault}; post what `iserve quality --json` prints")


def _faults(result: QualityDocument) -> Iterator[str]:
    """Yield what is impossible. The first faults are those that later checks would fail at."""
    yield from _faults_of_values("", to_builtins(result))
    text = result.text
    if not text.num_tokens >= text.num_texts >= 1:
        yield f"text: {text.num_tokens} tokens of {text.num_texts} texts"
    try:
        datetime.fromisoformat(result.started_at)
    except ValueError:
        yield f"started_at: {result.started_at[:80]!r} is no time"
    if (result.against is None) != (result.comparison is None):
        yield "comparison: it is given with a reference (against), and only then"
    yield from _faults_of_interval("nll", result.nll, -_ROUNDING, math.inf)
    yield from _faults_of_interval("exact_match", result.exact_match, 0, 1)
    if result.comparison is not None:
        yield from _faults_of_comparison(result.comparison)


def _faults_of_comparison(found: ComparisonDocument) -> Iterator[str]:
    yield from _faults_of_interval("comparison.nll", found.nll, -_ROUNDING, math.inf)
    yield from _faults_of_interval("comparison.nll_difference", found.nll_difference, -math.inf, math.inf)
    yield from _faults_of_interval("comparison.exact_match", found.exact_match, 0, 1)
    yield from _faults_of_interval("comparison.kl", found.kl, 0, math.inf)
    yield from _faults_of_interval("comparison.top1_agreement", found.top1_agreement, 0, 1)
    if not 0 <= found.shared_mass <= 1:
        yield f"comparison.shared_mass: {found.shared_mass} is not from 0 to 1"


def _faults_of_interval(name: str, interval: Interval | None, least: float, most: float) -> Iterator[str]:
    if interval is None:
        return
    if (interval.low is None) != (interval.high is None):
        yield f"{name}: an interval has two ends or none"
    low = interval.value if interval.low is None else interval.low
    high = interval.value if interval.high is None else interval.high
    if not least <= low <= interval.value <= high <= most:
        bounds = "" if least == -math.inf else f", within {max(0, least):g} and {most:g}"
        yield f"{name}: low <= value <= high{bounds}; got {low}, {interval.value}, {high}"


def _faults_of_values(path: str, value: object) -> Iterator[str]:
    """Yield what no field may have: other than finite numbers, plain text, and hashes of 64 hex digits."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in _HASHES and inner is not None and not _HASH.fullmatch(inner):
                yield f"{path}{name}: {inner[:80]!r} is no hash of 64 hex digits"
            yield from _faults_of_values(f"{path}{name}.", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _faults_of_values(path, inner)
    elif isinstance(value, str) and not is_plain(value):
        yield f"{path[:-1]}: {ascii(value)[:80]} has control characters, or none of UTF-8"
    elif isinstance(value, int) and not 0 <= value < _MOST:
        yield f"{path[:-1]}: it is from 0 to {_MOST - 1}"
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{path[:-1]}: {value} is no finite number"
