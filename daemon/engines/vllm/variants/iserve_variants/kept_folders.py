"""Deltas of folders, read into an arena once: a later load of the same content reads its manifest alone."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import finalize

import torch

from iserve_variants.arena import Arena, Held
from iserve_variants.folder import MANIFEST_FILE, ServedDelta, read_folder

__all__ = ["KeptFolders", "Loaded"]

_LOGGER = logging.getLogger("vllm.iserve_variants")
_PIECE_BYTES = 2**22  # hashed at a time; hashing lets other threads run


class Loaded(dict[str, tuple[torch.Tensor, torch.Tensor]]):
    """Tensors of a delta by the modules that they are for; its place in the arena is its own while it lives."""

    __slots__ = ("__weakref__", "is_in_arena", "is_pinned")
    is_in_arena: bool
    """Whether all of it lies in the arena, where it can be found again."""
    is_pinned: bool
    """Whether all of it lies in page-locked memory."""


class KeptFolders:
    """Reads folders, by way of an arena where there is one."""

    def __init__(self, arena: Arena[ServedDelta], *, pins: bool) -> None:
        """Read without the arena where it has no memory.

        Args:
            arena: of this worker.
            pins: whether memory outside the arena is page-locked.
        """
        self.arena, self._pins = arena, pins
        self._unchecked: queue.SimpleQueue[tuple[Held[ServedDelta], ServedDelta]] = queue.SimpleQueue()
        self._hasher: threading.Thread | None = None
        self._left, self._checked = 0, threading.Condition()

    def load(
        self,
        folder: Path,
        place: Callable[[ServedDelta], dict[str, tuple[torch.Tensor, torch.Tensor]]],
        pause: Callable[[], None] = lambda: None,
    ) -> Loaded:
        """Return the delta in ``folder``, placed.

        Args:
            folder: with its manifest, which is read each time.
            place: returns the tensors by module.
            pause: called between tensors.

        Raises:
            ValueError: what ``read_folder`` and ``place`` refuse.
            OSError: a file that cannot be read.
        """
        raw = (folder / MANIFEST_FILE).read_bytes()
        key, arena = hashlib.sha256(raw).hexdigest(), self.arena
        held = arena.find(key)
        is_new = held is None
        if held is None:
            held = arena.begin(key)
        try:
            outside: list[int] = []

            def take(num_bytes: int) -> torch.Tensor:
                memory = arena.take(held, num_bytes) if not outside else None
                if memory is None:
                    outside.append(num_bytes)
                    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._pins)
                return memory

            delta = held.found or read_folder(folder, take=take, pause=pause, manifest=raw)
            made = Loaded(place(delta))
        except BaseException:
            arena.release(held)
            raise
        made.is_in_arena = not outside
        made.is_pinned = (arena.is_pinned and not outside) or self._pins
        if is_new and not outside and delta.hashes is not None:
            self._check_later(held, delta)
        finalize(made, arena.release, held).atexit = False
        return made

    def wait(self) -> None:
        """Wait until all that was read is hashed."""
        with self._checked:
            self._checked.wait_for(lambda: not self._left)

    def _check_later(self, held: Held[ServedDelta], delta: ServedDelta) -> None:
        """Hash a delta in a thread, after which later loads find it: the first one does not wait for it."""
        with self._checked:
            if self._hasher is None:
                hasher = threading.Thread(target=self._check, daemon=True, name="iserve-hash")
                hasher.start()
                self._hasher = hasher
            self._left += 1
        self.arena.use(held)
        self._unchecked.put((held, delta))

    def _check(self) -> None:
        while True:
            held, delta = self._unchecked.get()
            try:
                self._keep_if_whole(held, delta)
            except Exception:  # of one delta, which is not kept: those after it are hashed all the same
                _LOGGER.exception("a delta cannot be hashed; it is not kept")
            finally:
                self.arena.release(held)
                del held, delta
                with self._checked:
                    self._left -= 1
                    self._checked.notify_all()

    def _keep_if_whole(self, held: Held[ServedDelta], delta: ServedDelta) -> None:
        changed = next((name for name, tensor, said in delta.tensors() if said != _hash(tensor)), None)
        if changed is None:
            self.arena.keep(held, delta)
        else:
            _LOGGER.warning("tensor %s of a delta is not what its manifest says; it is not kept", changed)


def _hash(tensor: torch.Tensor) -> str:
    """Return the hash of a tensor as manifests have it (``fingerprint.tensor_hash``)."""
    names: dict[Any, str] = {torch.int16: "I16", torch.bfloat16: "BF16", torch.float16: "F16"}
    digest = hashlib.sha256(f"{names.get(tensor.dtype, 'F32')} {list(tensor.shape)}\n".encode())
    raw = memoryview(tensor.contiguous().flatten().view(torch.uint8).numpy())
    for at in range(0, len(raw), _PIECE_BYTES):
        digest.update(raw[at : at + _PIECE_BYTES])
    return digest.hexdigest()
