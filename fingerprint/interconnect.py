"""Measured times of the links of a group of GPUs, by message size. Pure; ``daemon.interconnect`` measures them."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from fingerprint.errors import ConfigError

__all__ = ["MeasuredLinks"]

_MOST_GPUS, _MOST_SIZES, _MOST_BYTES, _MOST_S = 1024, 32, 2**40, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLinks:
    """Times of all-reduces of ``gpus`` GPUs, and of sends over the middle of the group, by message size.

    Between two sizes time is linear in the size, which is exact for a latency and a bandwidth; beyond the largest
    it goes on as between the last two. A message smaller than the smallest takes as long.
    """

    gpus: int
    """Number of adjacent GPUs, the first of the machine."""
    sizes_bytes: tuple[int, ...]
    """Message sizes in bytes, growing."""
    all_reduce_s: tuple[float, ...]
    """Seconds of one all-reduce of each size."""
    send_s: tuple[float, ...]
    """Seconds of one send of each size, from a GPU to the next."""

    def __post_init__(self) -> None:
        if not 2 <= self.gpus <= _MOST_GPUS:
            raise ConfigError(f"links are between 2 to {_MOST_GPUS} GPUs, got gpus {self.gpus}")
        sizes = self.sizes_bytes
        if not (2 <= len(sizes) <= _MOST_SIZES and all(a < b for a, b in pairwise((0, *sizes, _MOST_BYTES)))):
            raise ConfigError(f"sizes_bytes are 2 to {_MOST_SIZES} growing sizes in bytes, got {sizes[:9]}")
        for name in ("all_reduce_s", "send_s"):
            times = getattr(self, name)
            known = len(times) == len(sizes) and all(0 < one < _MOST_S for one in times)
            if not (known and all(a <= b for a, b in pairwise(times))):
                raise ConfigError(
                    f"{name} has the seconds of each of {len(sizes)} sizes, none less than the one "
                    f"before, above 0 and below {_MOST_S:g}; got {times[:9]}"
                )

    def all_reduce_of_s(self, size_bytes: float, least_s: float) -> float:
        """Return the seconds of one all-reduce in a running step.

        Args:
            least_s: of the smallest message in a step. An isolated one may take less, for its launch and the wait
                for the slowest rank are hidden: all times then grow by the difference.
        """
        return self._time_s(self.all_reduce_s, size_bytes, least_s)

    def send_of_s(self, size_bytes: float, least_s: float) -> float:
        """Return the seconds of one send in a running step, likewise."""
        return self._time_s(self.send_s, size_bytes, least_s)

    def _time_s(self, times: tuple[float, ...], size_bytes: float, least_s: float) -> float:
        sizes = self.sizes_bytes
        high = min(max(1, bisect_left(sizes, size_bytes)), len(sizes) - 1)
        part = max(0.0, (size_bytes - sizes[high - 1]) / (sizes[high] - sizes[high - 1]))
        found = times[high - 1] + part * (times[high] - times[high - 1])
        return found + max(0.0, least_s - times[0])
