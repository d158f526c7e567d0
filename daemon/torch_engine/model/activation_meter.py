"""Peak of live tensor bytes during a piece of work, on the CPU, where no allocator keeps count.

Sees every tensor that an operator returns, and its death. Does not see scratch that a kernel takes inside itself;
that is part of the process's runtime bytes. Slow (tens of microseconds an operator): for single steps only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["ActivationMeter"]


class ActivationMeter(TorchDispatchMode):
    """Used as a context manager; ``known`` are tensors that exist already and do not count."""

    def __init__(self, known: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves(out):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._live or not num_bytes or storage.data_ptr() in self._known:
            return

        def gone(_: weakref.ref[torch.UntypedStorage]) -> None:
            del self._live[key]
            self._live_bytes -= num_bytes

        self._live[key] = weakref.ref(storage, gone)
        self._live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
