"""Event loop for tests of pauses, which waits for no time."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["TimelessLoop"]


class TimelessLoop(asyncio.SelectorEventLoop):
    """Event loop whose clock goes to the next timer at once, so that no test waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s, self._really = 0.0, self._selector.select
        self._selector.select = self._select  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now_s

    def _select(self, timeout: float | None = None) -> Any:
        self._now_s += timeout or 0.0
        return self._really(0)
