"""The imports of torch and transformers, which are most of what a worker's start takes, without what none needs.

Five seconds of a core became less than four (torch 2.13, transformers 5.23). Itself imports neither.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

__all__ = ["trimmed_imports"]

_LOSSES = "transformers.loss.loss_utils"


class _NoLosses(ModuleType):
    """In place of transformers' table of training losses, which loads scipy for those of object detection.

    Whatever else a release of transformers looks for there, it gets from the real module; but models built here
    know no loss: a worker trains nothing, and ``model(labels=...)`` fails.
    """

    LOSS_MAPPING: dict[str, Any] = {}  # noqa: RUF012 - a module's attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system's own questions
            raise AttributeError(name)
        if sys.modules.get(_LOSSES) is self:
            del sys.modules[_LOSSES]
        return getattr(import_module(_LOSSES), name)


@contextmanager
def trimmed_imports() -> Iterator[None]:
    """Import inside the block for good: the collector looks through no imported object, now or later."""
    sys.modules.setdefault(_LOSSES, _NoLosses(_LOSSES))
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
