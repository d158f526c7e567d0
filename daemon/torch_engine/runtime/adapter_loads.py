"""Loads of adapters: prepared next to the steps, one after the other, then switched to between two of them.

Knows threads and the runner, and no requests. Whatever ends a load, its caller is answered in the engine's thread,
where names are given and taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

from daemon.torch_engine.runner_types import Runner
from daemon.torch_engine.runtime.adapters import Adapter
from fingerprint.errors import UnavailableError

__all__ = ["AdapterLoads"]


class _Call(Protocol):
    def __call__(self, function: Callable[[], None], future: Future[None]) -> object: ...


class AdapterLoads:
    """Loads of one engine.

    Args:
        call: runs a function in the engine's thread between two steps, and answers the future with its outcome, or
            with an error where the engine has ended.
        ended: called there, with the error of a load that failed, which it raises; None: the adapter is loaded.
    """

    def __init__(self, runner: Runner, call: _Call, ended: Callable[[Adapter, Exception | None], None]) -> None:
        self._runner, self._call, self._ended = runner, call, ended
        self._preparing = threading.Lock()  # one adapter's copies in memory at a time

    def start(self, adapter: Adapter, folder: Path) -> Future[None]:
        """Load the adapter, under the number that it has.

        Raises:
            UnavailableError: the system gives no thread.
        """
        future: Future[None] = Future()
        thread = threading.Thread(
            target=self._load, args=(adapter, folder, future), name=f"adapter {adapter.adapter_id}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            raise UnavailableError(f"no thread for the adapter {adapter.name[:200]!r}: {error}") from error
        return future

    def _load(self, adapter: Adapter, folder: Path, future: Future[None]) -> None:
        failed: Exception | None = None
        try:
            with self._preparing:
                self._runner.prepare_adapter(adapter.adapter_id, folder)
        except Exception as error:  # noqa: BLE001 - raised in the engine's thread, which ends by what is a bug
            failed = error

        def switch() -> None:
            error = failed
            if error is None:
                try:
                    self._runner.switch_adapter(adapter.adapter_id)
                except Exception as unswitched:  # noqa: BLE001 - as above
                    error = unswitched
            self._ended(adapter, error)

        self._call(switch, future)
