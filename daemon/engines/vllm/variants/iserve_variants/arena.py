"""Host memory of a fixed size that keeps deltas which were read, for the next load of the same content.

It is taken once, page-locked where a GPU is, so that copies to the GPU need no further buffer. A delta is found by
the hash of its manifest, which has the hash of each of its tensors, and only after its bytes in the arena were
hashed and are those of the manifest. Where room is needed, the least valuable delta that nothing uses gives way.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

import torch

__all__ = ["Arena", "Held"]

T = TypeVar("T")
_ALIGNED = 4096


@dataclass(eq=False)
class Held(Generic[T]):
    """Delta whose files lie in the arena: being read, in use, or kept for a later load."""

    key: str
    extents: list[tuple[int, int]] = field(default_factory=list)
    """First byte and end of each file."""
    found: T | None = None
    users: int = 1
    uses: int = 1
    value: float = 0.0
    is_kept: bool = False
    """Whether a later load may find it: its bytes were hashed."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its files, each in whole pages."""
        return sum(end - begin for begin, end in self.extents)


class Arena(Generic[T]):
    """Deltas in one block of memory. Thread-safe.

    A delta's value is the number of its loads, above the value of the last one that gave way: a load takes time by
    the byte, so a byte of each is worth the same for each load (greedy dual size frequency, cost by the size).
    """

    def __init__(self, num_bytes: int, *, pin: bool, before_reuse: Callable[[], None] = lambda: None) -> None:
        """Take the memory.

        Args:
            num_bytes: of the block; what does not fit is not kept.
            pin: whether it is page-locked.
            before_reuse: called before bytes of an earlier delta are written: waits for copies from them.

        Raises:
            RuntimeError: there is not so much memory.
        """
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin and num_bytes > 0)
        self.is_pinned = pin
        self._before_reuse = before_reuse
        self._lock = threading.Lock()
        self._free = [(0, num_bytes)] if num_bytes else []
        self._kept: dict[str, Held[T]] = {}
        self._released: deque[Held[T]] = deque()  # by finalizers, which may run within any call
        self._last_value, self._has_given_back = 0.0, False

    def find(self, key: str) -> Held[T] | None:
        """Return the delta of ``key`` for one more user, to be released; None: it is not kept."""
        with self._lock:
            self._collect()
            held = self._kept.get(key)
            if held is None:
                return None
            held.users += 1
            held.uses += 1
            held.value = self._last_value + held.uses
            return held

    def begin(self, key: str) -> Held[T]:
        """Return a delta of no files yet, for one user."""
        return Held(key)

    def take(self, held: Held[T], num_bytes: int) -> torch.Tensor | None:
        """Return memory for a file of a delta that is being read; None: there is no room that nothing uses."""
        size = -(-max(num_bytes, 1) // _ALIGNED) * _ALIGNED
        with self._lock:
            self._collect()
            idle = [one for one in self._kept.values() if not one.users]
            if all(end - begin < size for begin, end in self._joined(*(one.extents for one in idle))):
                return None  # not even without all of these
            while (place := self._fitting(size)) is None:
                least = min(idle, key=lambda one: one.value)
                idle.remove(least)
                self._last_value = least.value
                del self._kept[least.key]
                self._give_back(least)
            begin, end = self._free.pop(place)
            if begin + size < end:
                self._free.insert(place, (begin + size, end))
            held.extents.append((begin, begin + size))
        if self._has_given_back:
            self._before_reuse()
        return self.memory[begin : begin + num_bytes]

    def keep(self, held: Held[T], found: T) -> bool:
        """Keep a delta, whose bytes were hashed, for later loads; return whether it was not kept before."""
        with self._lock:
            self._collect()
            if held.key in self._kept or not held.extents:
                return False
            held.found, held.is_kept = found, True
            held.value = self._last_value + held.uses
            self._kept[held.key] = held
            return True

    def use(self, held: Held[T]) -> None:
        """Count one more user."""
        with self._lock:
            held.users += 1

    def release(self, held: Held[T]) -> None:
        """Count one user less; without any, what is not kept gives its memory back. From any thread."""
        self._released.append(held)

    def taken_bytes(self) -> int:
        """Return the bytes of all deltas in the arena."""
        with self._lock:
            self._collect()
            return len(self.memory) - sum(end - begin for begin, end in self._free)

    def _collect(self) -> None:
        """Count what was released; the lock is held."""
        while self._released:
            held = self._released.popleft()
            held.users -= 1
            if not held.users and not held.is_kept:
                self._give_back(held)

    def _fitting(self, size: int) -> int | None:
        return next((at for at, (begin, end) in enumerate(self._free) if end - begin >= size), None)

    def _give_back(self, held: Held[T]) -> None:
        self._free, self._has_given_back = self._joined(held.extents), True
        held.extents, held.found, held.is_kept = [], None, False

    def _joined(self, *extents: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return what would be free with ``extents``, neighbours as one."""
        joined: list[tuple[int, int]] = []
        for begin, end in sorted(chain(self._free, *extents)):
            if joined and joined[-1][1] == begin:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((begin, end))
        return joined
