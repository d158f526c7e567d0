"""Cases of the benchmark of adapter kernels: linears with adapters, mixes of rows, and times of what is added."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

import tests.bench.delta_kernel_cases  # noqa: F401  # puts the plug-in's folder on the path
from tests.bench.lora_contest_plugin import align_pointers

from iserve_variants.adapter_kernels import (  # isort: skip
    TILINGS,
    AdapterTiling,
    Groups,
    add_adapters,
)

__all__ = [
    "LINEARS",
    "SLOTS",
    "TILINGS",
    "AdapterTiling",
    "Clock",
    "Linear",
    "Mix",
    "Operation",
    "VllmKernels",
    "mix_of",
    "own",
]

SLOTS, RANK = 32, 16
LINEARS = {  # of Qwen3-8B: inputs, and the outputs of each slice
    "qkv": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate_up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
COLD_BYTES = 110e6


class Mix(NamedTuple):
    """Rows by adapter, for our kernels and for vLLM's."""

    groups: Groups
    split: Groups
    meta: tuple[torch.Tensor, ...]


def mix_of(slot_of_row: torch.Tensor, slots: int = SLOTS) -> Mix:
    """Return what vLLM's ``LoRAKernelMeta`` makes of a mapping."""
    mapping, device = slot_of_row.to(torch.int32), slot_of_row.device
    found, count = torch.unique(mapping, sorted=True, return_counts=True)
    ids = torch.full((slots + 1,), -1, dtype=torch.int32, device=device)
    counts = torch.zeros(slots + 1, dtype=torch.int32, device=device)
    starts = torch.zeros(slots + 2, dtype=torch.int32, device=device)
    ids[: len(found)], counts[: len(found)] = found.int(), count.int()
    starts[1 : 1 + len(found)] = torch.cumsum(count, 0).int()
    order = torch.sort(mapping, stable=True).indices.int()
    is_base, most = torch.tensor([False]), torch.tensor([slots + 1], dtype=torch.int32)
    groups = Groups(order, counts, starts, ids)
    return Mix(groups, groups.split(AdapterTiling().rows), (mapping, order, counts, starts, ids, is_base, most))


@dataclass
class Linear:
    """Weights of one linear in several layers, and random adapters in every slot."""

    name: str
    inputs: int
    outputs: tuple[int, ...]
    device: str = "cuda"
    slots: int = SLOTS
    rank: int = RANK
    cold_bytes: float = COLD_BYTES

    def __post_init__(self) -> None:
        down, up = self.inputs * len(self.outputs), sum(self.outputs)
        layers = math.ceil(self.cold_bytes / (2 * self.slots * self.rank * min(down, up)))
        self.weights = [self._random(up, self.inputs, std=0.02) for _ in range(layers)]
        self.a = [[self._random(self.slots, 1, self.rank, self.inputs, std=0.01) for _ in self.outputs]
                  for _ in range(layers)]  # fmt: skip
        self.b = [[self._random(self.slots, 1, size, self.rank, std=0.01) for size in self.outputs]
                  for _ in range(layers)]  # fmt: skip

    def _random(self, *shape: int, std: float) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=std)

    @property
    def key(self) -> str:
        """Name of the shape in ``tilings.json``."""
        return f"{self.inputs}x{sum(self.outputs)}"

    def rows(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(rows, self.inputs, device=self.device).bfloat16()
        return x, torch.zeros(rows, sum(self.outputs), dtype=torch.bfloat16, device=self.device)

    def mixes(self, rows: int, active: int) -> list[Mix]:
        """Return mixes of ``active`` adapters each, which go through all slots."""
        row = torch.arange(rows, device=self.device) % active
        return [mix_of((row + first) % self.slots, self.slots) for first in range(0, self.slots, active)]


Operation = Callable[[Linear, int, torch.Tensor, torch.Tensor, Mix], None]


class Clock:
    """Times of operations after their linears; the linears' own times are measured once."""

    def __init__(self, seconds: Callable[[Callable[[], None]], float]) -> None:
        self._seconds, self._alone_s = seconds, dict[tuple[str, int], float]()

    def added_s(self, linear: Linear, rows: int, active: int, operation: Operation | None) -> float:
        """Return what ``operation`` adds to one linear; None: the linear's own time."""
        (x, y), mixes, layers = linear.rows(rows), linear.mixes(rows, active), len(linear.weights)

        def run(adds: Operation | None) -> None:
            for layer in range(layers):
                torch.mm(x, linear.weights[layer].t(), out=y)
                if adds is not None:
                    adds(linear, layer, y, x, mixes[layer % len(mixes)])

        key = (linear.name, rows)
        if key not in self._alone_s:
            self._alone_s[key] = self._seconds(lambda: run(None)) / layers
        if operation is None:
            return self._alone_s[key]
        return self._seconds(lambda: run(operation)) / layers - self._alone_s[key]


def own(tiling: AdapterTiling) -> Operation:
    def add(linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix) -> None:
        add_adapters(y, x, linear.a[layer], linear.b[layer], mix.split, 1.0, tiling)

    return add


class VllmKernels:
    """vLLM's two operations, with a configuration of each or with what vLLM looks up itself."""

    def __init__(self, aligned: Path | None = None) -> None:
        """Import them.

        Args:
            aligned: file for kernels that know their pointers to be aligned; None: as they are.
        """
        if aligned is not None:
            align_pointers(aligned)
        from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op, utils

        self._shrink, self._expand, self._utils = lora_shrink_op, lora_expand_op, utils
        self._theirs = utils.get_lora_op_configs

    def use_folder(self, folder: Path | None) -> None:
        """Look configurations up in ``folder``, as ``VLLM_TUNED_CONFIG_FOLDER`` does."""
        if folder is None:
            os.environ.pop("VLLM_TUNED_CONFIG_FOLDER", None)
        else:
            os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)
        self._utils.load_lora_op_config.cache_clear()
        self._theirs.cache_clear()

    def default(self, kind: str, linear: Linear, rows: int) -> dict[str, Any]:
        """Return what vLLM takes without a folder."""
        size = linear.inputs if kind == "shrink" else max(linear.outputs)
        adds = None if kind == "shrink" else True
        slices = len(linear.outputs)
        return dict(
            self._theirs(
                kind, max_loras=linear.slots + 1, batch=rows, hidden_size=size, rank=linear.rank,
                num_slices=slices, add_inputs=adds,
            )
        )  # fmt: skip

    def _with(self, module: Any, config: dict[str, Any] | None) -> None:
        module.get_lora_op_configs = self._theirs if config is None else lambda *_, **__: config

    def shrink(
        self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix,
        *, config: dict[str, Any] | None = None, buffer: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        self._with(self._shrink, config)
        if buffer is None:
            buffer = torch.empty(len(linear.outputs), len(x), linear.rank, device=x.device)
        self._shrink._lora_shrink(x, linear.a[layer], buffer, *mix.meta, 1.0)
        return buffer

    def expand(
        self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix,
        *, config: dict[str, Any] | None = None, buffer: torch.Tensor,
    ) -> None:  # fmt: skip
        self._with(self._expand, config)
        self._expand._lora_expand(buffer, linear.b[layer], y, *mix.meta, offset_start=0, add_inputs=True)

    def both(self, linear: Linear, layer: int, y: torch.Tensor, x: torch.Tensor, mix: Mix) -> None:
        buffer = self.shrink(linear, layer, y, x, mix)
        self.expand(linear, layer, y, x, mix, buffer=buffer)
