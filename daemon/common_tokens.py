"""Tokens that two sequences begin with: of a prompt, and of the prompt with its answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

__all__ = ["num_common"]

T = TypeVar("T")


def num_common(first: Sequence[T], second: Sequence[T]) -> int:
    """Return how many tokens both begin with.

    A tokenizer may merge the end of a prompt and the start of its answer, "A: " and "Paris" into " Paris": the
    answer begins with the first token that the prompt alone does not have in that place.
    """
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))
