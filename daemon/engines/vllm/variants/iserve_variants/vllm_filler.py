"""Filling of the places of all modules: between steps, or from a thread on a stream of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from iserve_variants.runtime import Runtime

__all__ = ["Pairs", "PlaceFiller"]

Pair = tuple[torch.Tensor, torch.Tensor]  # codes and scales of a matrix; the weight of a norm twice
Pairs = dict[str, Pair]
_MOST_JOINED = 8  # matrices that a module joins
_PAUSE_S = 0.0005  # after each module, in which the thread that steps takes the interpreter


class PlaceFiller:
    """Copies a delta to a place of all modules."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Module],
        packed: Mapping[str, list[str]],
        runtime: Runtime,
        device: torch.device,
    ) -> None:
        """Take the page-locked buffer and the stream, where loads run ahead on a GPU.

        Args:
            modules: of the manager, by name.
            packed: names of the matrices that a module joins, by its name.
            runtime: of the model.
            device: of the model.
        """
        self._modules = {
            name: one for name, one in modules.items() if hasattr(type(one), "fill") and one.deltas is not None
        }
        self._packed, self._runtime, self._device = packed, runtime, device
        self._stream: torch.cuda.Stream | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        if runtime.settings.background and device.type == "cuda":
            self._stream, self._freed = torch.cuda.Stream(device), torch.cuda.Event()
            self._freed.record()
            largest = max((_place_bytes(one) for one in self._modules.values()), default=0)
            self._locked = torch.empty(largest, dtype=torch.uint8, pin_memory=True)

    def free_spare(self) -> None:
        """Mark the spare place as free once the steps that are launched have ended; from the thread that steps."""
        if self._stream is not None:
            self._freed.record()

    def put(self, place: int, pairs: Pairs) -> None:
        """Fill a place with a delta; from the thread that steps."""
        for name, module in self._modules.items():
            self._fill(module, place, self._found(name, pairs))
        if self._copied is not None:
            self._copied.record()

    def settle(self) -> None:
        """Wait until nothing is copied any more from the tensors that :meth:`put` was given; from any thread."""
        if self._copied is not None:
            self._copied.synchronize()

    def fill_spare(self, pairs: Pairs) -> None:
        """Fill the spare place with a delta and wait for it; from another thread than that which steps."""
        place = self._runtime.places.spare
        assert place is not None
        with torch.inference_mode():
            if self._stream is None:
                self.put(place, pairs)
                return
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                self._stream.wait_event(self._freed)
                for name, module in self._modules.items():
                    found = self._found(name, pairs)
                    own = module.own_parts(found) if hasattr(type(module), "own_parts") else found
                    locked = own if _is_locked(pairs, own) else self._locked_pairs(own)
                    self._fill(module, place, locked, is_own=True)
                    self._stream.synchronize()  # the buffer is used again
                    time.sleep(_PAUSE_S)

    def _found(self, name: str, pairs: Pairs) -> list[Pair | None]:
        """Return what a delta has for each matrix that module ``name`` joins."""
        return [pairs.get(one) for one in self._packed.get(name, [name])]

    @staticmethod
    def _fill(module: torch.nn.Module, place: int, found: list[Pair | None], **of_rank: bool) -> None:
        if not any(found):
            module.deltas.clear(place)
        elif len(found) > 1:
            module.fill(place, *([one and one[at] for one in found] for at in (0, 1)), **of_rank)
        else:
            module.fill(place, *found[0], **of_rank)

    def _locked_pairs(self, found: list[Pair | None]) -> list[Pair | None]:
        """Return copies in the page-locked buffer."""
        at, copies = 0, list[Pair | None]()
        for pair in found:
            made = []
            for tensor in pair or ():
                view = self._locked[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                made.append(view.copy_(tensor))
                at += -(-tensor.nbytes // 16) * 16
            copies.append((made[0], made[1]) if made else None)
        return copies


def _is_locked(pairs: Pairs, own: list[Pair | None]) -> bool:
    """Return whether a module's pairs are page-locked, and contiguous as they are."""
    return getattr(pairs, "is_pinned", False) and all(one.is_contiguous() for pair in own for one in pair or ())


def _place_bytes(module: torch.nn.Module) -> int:
    """Return the bytes that one rank's part of a module's pairs takes in the page-locked buffer."""
    deltas = module.deltas
    held = [deltas.table] * 2 if hasattr(deltas, "table") else [deltas.codes, deltas.scales]
    return sum(one[0].nbytes for one in held) + 16 * 2 * _MOST_JOINED
