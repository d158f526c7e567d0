"""A request stream as arrays, a block at a time, and moments that grow block by block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from traces.request import Request

__all__ = ["Block", "Moments", "blocks", "count_values"]


class Block(NamedTuple):
    """Up to some thousand requests in a row; arrays of one length."""

    arrival_s: NDArray[np.float64]
    tokens: NDArray[np.int64]  # [requests, 2]: input, output
    requests: list[Request]


def blocks(requests: Iterable[Request], size: int = 8192) -> Iterator[Block]:
    """Yield the stream in blocks of ``size``, the last one shorter; none for an empty stream."""
    held: list[Request] = []
    for request in requests:
        held.append(request)
        if len(held) == size:
            yield _block(held)
            held = []
    if held:
        yield _block(held)


def _block(held: list[Request]) -> Block:
    return Block(
        np.array([request.arrival_s for request in held]),
        np.array([(request.input_tokens, request.output_tokens) for request in held], dtype=np.int64),
        held,
    )


class Moments:
    """Mean and covariance (over the count) of rows of ``width`` numbers, without keeping them.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm, 1979.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = np.zeros(width)
        self._spread = np.zeros((width, width))

    def add(self, rows: NDArray[np.float64]) -> None:
        """Add rows of shape [any, width]."""
        more = len(rows)
        if more == 0:
            return
        block_mean = rows.mean(0)
        shift, away = block_mean - self.mean, rows - block_mean
        self._spread += away.T @ away + np.outer(shift, shift) * self.count * more / (self.count + more)
        self.mean = self.mean + shift * more / (self.count + more)
        self.count += more

    @property
    def std(self) -> NDArray[np.float64]:
        spread: NDArray[np.float64] = np.sqrt(np.diag(self._spread) / self.count)
        return spread

    @property
    def correlation(self) -> float:
        """Correlation of the first two columns; 0 where one of them does not vary."""
        scale = float(np.sqrt(self._spread[0, 0] * self._spread[1, 1]))
        return float(np.clip(self._spread[0, 1] / scale, -1, 1)) if scale > 0 else 0.0


def count_values(values: NDArray[np.int64], histogram: dict[int, int]) -> None:
    """Add the number of occurrences of each value to the histogram."""
    found, times = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), times.tolist(), strict=True):
        histogram[value] = histogram.get(value, 0) + count
