"""Calls of minutes in threads of their own, next to the event loop's few."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

__all__ = ["in_own_thread"]

T = TypeVar("T")


async def in_own_thread(call: Callable[[], T]) -> T:
    """Return what ``call`` returns, from a thread that takes no other call's and keeps no process from ending.

    The threads of ``asyncio.to_thread`` are few, look up names for connections as well, and are waited for when
    the process ends. A cancelled wait leaves the thread to itself.
    """
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # a cancelled wait does not cancel it

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            result.set_exception(error)

    Thread(target=run, name="own-thread", daemon=True).start()
    return await asyncio.wrap_future(result)
