"""Refusals of loads that go on, kept out of vLLM's logs: they only say to ask again.

vLLM logs each error of a call with its traceback: milliseconds between two steps, each time that a client asks.
"""

from __future__ import annotations

import logging
import re

__all__ = ["LOGGERS", "StillReadError", "hide_refusals", "hides"]

LOGGERS = ("vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")  # which log errors of calls
_ASK_AGAIN = "is still being read: ask for it again"
_OF_A_WORKER = re.compile(  # sentence of vLLM's engine on an error in a worker's process
    rf"Worker failed with error '(adapter|delta) .* {_ASK_AGAIN}', please check the stack trace above .*"
)


class StillReadError(ValueError):
    """Refusal of a load whose thread has not ended: it has to be asked for again."""

    def __init__(self, kind: str, name: str) -> None:
        """Take ``adapter`` or ``delta``, and its name."""
        super().__init__(f"{kind} {name} {_ASK_AGAIN}")


def hide_refusals() -> None:
    """Have vLLM log no refusal that only says to ask again; all else is logged as before."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(_is_logged)


def hides(error: BaseException | None) -> bool:
    """Return whether an error is a refusal that only says to ask again, or what the engine has of one."""
    if isinstance(error, StillReadError):
        return True
    return isinstance(error, RuntimeError) and _OF_A_WORKER.fullmatch(str(error)) is not None


def _is_logged(record: logging.LogRecord) -> bool:
    return not (record.exc_info and hides(record.exc_info[1]))
