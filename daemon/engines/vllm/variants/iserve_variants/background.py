"""Loads ahead of use: a thread reads a delta and fills a spare place, while steps go on.

Only then is the delta given a slot, which takes no copy: the slot's place and the spare one are exchanged.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["BackgroundLoader", "Pauses", "SlotPlaces", "empty_aside"]

K = TypeVar("K")
T = TypeVar("T")
_MOST_HELD_S, _PAUSE_S = 2e-4, 5e-4


class Pauses:
    """Pauses of a thread that runs next to steps, in which their thread takes the interpreter.

    Without them it waits for up to 5 ms (``sys.getswitchinterval``) each time it wants the interpreter back.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        """Pause where the last pause was some time ago."""
        if time.perf_counter() - self._since > _MOST_HELD_S:
            self.take()

    def take(self) -> None:
        """Pause now: before what holds the interpreter in one call."""
        time.sleep(_PAUSE_S)
        self._since = time.perf_counter()


def empty_aside(held: dict[Any, Any]) -> None:
    """Empty ``held`` in a thread: freeing gigabytes of pages takes tenths of a second, in which steps go on."""
    threading.Thread(target=held.clear, daemon=True, name="iserve-free").start()


class SlotPlaces:
    """Places of the slots of all modules: those of vLLM's slots, and a spare one where loads run ahead."""

    def __init__(self, slots: int, *, has_spare: bool) -> None:
        self.count = slots + has_spare
        self._of = list(range(slots))
        self.spare = slots if has_spare else None

    def of(self, slot: int) -> int:
        """Return the place of vLLM's slot number ``slot``."""
        return self._of[slot]

    def exchange(self, slot: int) -> None:
        """Give ``slot`` the spare place, and make its own the spare one."""
        assert self.spare is not None
        self._of[slot], self.spare = self.spare, self._of[slot]


class BackgroundLoader(Generic[K, T]):
    """Reads folders one at a time in a thread, and keeps the last one read until it is taken."""

    def __init__(
        self,
        read: Callable[[K], T],
        fill: Callable[[T], None],
        begin: Callable[[K], None] = lambda folder: None,
        kept_s: float = 0.0,
    ) -> None:
        """Start nothing yet.

        Args:
            read: returns what a folder has; in the thread.
            fill: fills the spare place with it; in the thread.
            begin: called before a thread is started.
            kept_s: for which what was read is not dropped for another folder, from when it was read.
        """
        self._read, self._fill, self._begin, self.kept_s = read, fill, begin, kept_s
        self._read_at_s = 0.0
        self._thread: threading.Thread | None = None
        self._folder: K | None = None
        self._found: T | None = None
        self._error: Exception | None = None

    def is_ready(self, folder: K) -> bool:
        """Return whether ``folder`` was read, or start to; what was read before and not taken is dropped.

        Raises:
            Exception: what reading it raised; the next call starts again.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._folder != folder:
            if self._found is None or time.monotonic() - self._read_at_s >= self.kept_s:
                self._start(folder)
            return False
        if self._error is not None:
            error, self._folder, self._error = self._error, None, None
            raise error
        return self._found is not None

    def taken(self, folder: K) -> T | None:
        """Return what is ready of ``folder``; None: nothing is."""
        if self._folder != folder or self._thread is None or self._thread.is_alive():
            return None
        return self._found

    def holds(self, found: object) -> bool:
        """Return whether the spare place has ``found``."""
        is_done = self._thread is not None and not self._thread.is_alive()
        return is_done and self._found is not None and self._found is found

    def release(self) -> None:
        """Forget what the spare place had: it has a slot now."""
        self._folder = self._found = None

    def wait(self) -> None:
        """Wait for the thread."""
        if self._thread is not None:
            self._thread.join()

    def _start(self, folder: K) -> None:
        self._folder = self._found = self._error = None
        self._begin(folder)
        self._folder = folder
        self._thread = threading.Thread(target=self._run, args=(folder,), daemon=True, name="iserve-delta")
        self._thread.start()

    def _run(self, folder: K) -> None:
        try:
            Pauses().take()  # the thread that started this one wants the interpreter back
            found = self._read(folder)
            self._fill(found)
            self._read_at_s = time.monotonic()  # a client asks again after a pause
            self._found = found
        except Exception as error:  # noqa: BLE001 - raised where it is asked for
            self._error = error
