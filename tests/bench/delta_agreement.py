"""Agreement of answers in tokens and log-probabilities, and the random batches whose answers are compared."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

__all__ = ["MARGIN", "agreement", "allowed_margin", "random_batches"]

MARGIN = 0.1  # of log-probabilities: closer tokens may change places by rounding
_MOST_ROWS = 16


def agreement(
    one: Sequence[Sequence[float]], other: Sequence[Sequence[float]], allowed: float = MARGIN
) -> dict[str, Any]:
    """Return up to where two answers agree, and whether the first other token was a close one.

    Tokens behind it have another text before them, and are not compared.

    Args:
        one: of each token its number, its log-probability and its margin above the next.
        other: likewise.
        allowed: margin below which two tokens may change places.
    """
    agreed = 0
    for mine, its in zip(one, other, strict=True):
        if mine[0] != its[0]:
            break
        agreed += 1
    same_text = list(zip(one[:agreed], other[:agreed], strict=True))
    margin = None if agreed == len(one) else max(one[agreed][2], other[agreed][2])
    return {
        "tokens": len(one),
        "agreed": agreed,
        "margin_where_other": margin,
        "allowed_margin": allowed,
        "passed": margin is None or margin < allowed,
        "largest_logprob_error": max((abs(mine[1] - its[1]) for mine, its in same_text), default=None),
    }


def allowed_margin(compared: Sequence[dict[str, Any]]) -> float:
    """Return the margin for weights that are rounded elsewhere: twice what batches alone do, at least ``MARGIN``.

    Args:
        compared: agreements of the same requests in a batch and alone, with the same weights.
    """
    errors = [row["largest_logprob_error"] for row in compared if row["largest_logprob_error"] is not None]
    return max(MARGIN, 2 * max(errors, default=0.0))


def random_batches(
    seed: int, *, batches: int, variants: Sequence[int], prompts: int
) -> list[list[tuple[int, int]]]:
    """Return batches of requests, each a variant and the number of a prompt.

    A batch has some of the variants, one to all; a prompt may be asked for again.
    """
    drawn, found = random.Random(seed), []
    for _ in range(batches):
        some = drawn.sample(variants, drawn.randint(1, len(variants)))
        rows = drawn.randint(2, _MOST_ROWS)
        found.append([(drawn.choice(some), drawn.randrange(prompts)) for _ in range(rows)])
    return found
