"""Bytes that a compression asks a device for, next to those that its tensors take, counted on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from daemon.variants.compress import compress_delta, compressor
from daemon.variants.compress.devices import needed_device_bytes
from tests.daemon.tiny_deltas import write_fine_tune
from tests.daemon.variants.tiny_pairs import order

WORKSPACE_BYTES = 2**30
MASK_BYTES = 2 * 32 * 64**2  # of the workspace: of 32 sequences of 64 tokens, of layers of two kinds


class LiveBytes(TorchDispatchMode):
    """Count of the bytes of all tensors that an operation has read or made, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._live: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves((args, kwargs, made)):
            if isinstance(each, torch.Tensor) and not each.is_meta:
                self._see(each.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._live:
            return

        def end(_: object) -> None:
            del self._live[key]
            self._now -= num_bytes

        self._live[key] = weakref.ref(storage, end)
        self._now += num_bytes
        self.peak = max(self.peak, self._now)


def test_bytes_are_counted_while_a_tensor_lives() -> None:
    with LiveBytes() as counted:
        first = torch.zeros(1000)
        second = first + 1
        del first
        third = second * 2
        del second, third
    assert counted.peak == 8000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changed"),
    [
        ("llama", ""),
        ("llama", "layers.1.self_attn.q_proj"),
        ("phi3", ""),  # gate and up are one matrix
        ("qwen3", ""),  # queries are wider than hidden states, and have norms
        ("gemma2", ""),
        ("gpt_neox", ""),
    ],
)
def test_a_compression_asks_for_at_least_what_its_tensors_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_checkpoint: Callable[[str], Path],
    family: str,
    changed: str,
) -> None:
    base, asked = tiny_checkpoint(family), []
    write_fine_tune(base, tmp_path / "tuned", 1, is_changed=lambda name: changed in name)

    def ask(*args: Any) -> int:
        asked.append(needed_device_bytes(*args))
        return asked[-1]

    monkeypatch.setattr(compressor, "needed_device_bytes", ask)
    monkeypatch.setattr(compressor, "check_free", lambda device, needed_bytes: None)
    with LiveBytes() as counted:
        compress_delta(replace(order(tmp_path), base=base, calibration=None))
    (needed,) = asked
    assert 0.5 * (needed - WORKSPACE_BYTES) < counted.peak <= needed - WORKSPACE_BYTES + MASK_BYTES
