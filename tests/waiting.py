"""Waiting for events: a test names what must happen, and only a hang makes it fail."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["PATIENCE_S", "wait_until"]

T = TypeVar("T")

# Bounds a hang and is no part of what a test states: many times what a loaded machine needs. A worker that imports
# torch on a quarter of a core takes a minute.
PATIENCE_S = 300.0
_LOOK_EVERY_S = 0.01


def wait_until(condition: Callable[[], T], what: str = "it comes true", patience_s: float = PATIENCE_S) -> T:
    """Return the first truthy value of ``condition``.

    Raises:
        AssertionError: none was seen within ``patience_s``.
    """
    deadline = time.monotonic() + patience_s
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {patience_s:.0f} s in vain until {what}")
        time.sleep(_LOOK_EVERY_S)
    return value
