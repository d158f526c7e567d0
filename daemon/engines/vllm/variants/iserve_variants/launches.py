"""Launches of the delta kernels: their buffers, and all that Triton compiles a kernel anew for.

No Triton is imported here, so that a test without a GPU compares the launches that steps reach with those that
were made at the start.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

from iserve_variants.formats import GROUP, TILE_ROWS, CodeFormat
from iserve_variants.tilings import Tiling

__all__ = ["Kernel", "Workspace", "is_aligned", "merge_launch", "multiprocessors", "product_launch"]

_MERGED_GROUPS = 4  # of 128 inputs, that a program takes


class Kernel(NamedTuple):
    """Arguments that make another kernel of the same source."""

    constants: Mapping[str, object]
    """Those that Triton takes as constants, and its options."""
    integers: tuple[int, ...]
    """Those whose value Triton looks at: it compiles anew for 1, for multiples of 16, and for all else."""

    @property
    def key(self) -> tuple[object, ...]:
        """Key of the compiled kernel."""
        kinds = ("one" if one == 1 else "sixteens" if one % 16 == 0 else "any" for one in self.integers)
        return (*sorted(self.constants.items()), *kinds)


def is_aligned(x: torch.Tensor) -> bool:
    """Return whether kernels read the rows of ``x`` where they are, by the kernel of rows that are contiguous."""
    inputs, stride = x.shape[1], x.stride(0)
    has_its_kind = stride % 8 == 0 and (stride % 16 == 0) == (inputs % 16 == 0)
    return x.stride(1) == 1 and x.data_ptr() % 16 == 0 and has_its_kind


def product_launch(
    y: torch.Tensor, x: torch.Tensor, padded_outputs: int, format_: CodeFormat, tiling: Tiling, *, adds: bool
) -> Kernel:
    """Return the kernel that adds products of ``x`` [rows, inputs] to ``y`` [rows, outputs], or stores them."""
    outputs, inputs = y.shape[1], x.shape[1]
    groups = -(-inputs // GROUP)
    overlaps = tiling.overlaps and adds and x.device.type == "cuda"
    options: dict[str, object] = {} if tiling.max_registers is None else {"maxnreg": tiling.max_registers}
    if overlaps:
        options["launch_pdl"] = True
    constants = {
        "BITS": format_.bits,
        "ZERO": format_.zero,
        "BN": tiling.outputs,
        "SMALL_ROWS": min(tiling.small_rows, tiling.rows),
        "ROWS": tiling.rows,
        "STEP": tiling.step if groups % tiling.step == 0 else 1,
        "STAGES": tiling.stages,
        # Triton copies asynchronously from 4 bytes a thread on, which are two scales.
        "SCALES_AHEAD": tiling.outputs < 2 * 32 * tiling.warps,
        "ADD": adds,
        "OVERLAP": overlaps,
        "WHOLE_N": padded_outputs % tiling.outputs == 0,
        "WHOLE_K": inputs % GROUP == 0,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        **options,
    }
    return Kernel(constants, (outputs, padded_outputs, inputs, groups, x.stride(0), y.stride(0)))


def merge_launch(
    weight: torch.Tensor, out: torch.Tensor, format_: CodeFormat, *, groups: int = _MERGED_GROUPS, warps: int = 4
) -> Kernel:
    """Return the kernel that merges a delta into ``weight`` [outputs, inputs], ``groups`` of inputs a program."""
    outputs, inputs = weight.shape
    tiles, all_groups = -(-outputs // TILE_ROWS), -(-inputs // GROUP)
    is_whole = outputs % TILE_ROWS == 0 and inputs % GROUP == 0 and all_groups % groups == 0
    constants = {
        "BITS": format_.bits,
        "ZERO": format_.zero,
        "GROUPS": groups,
        "WHOLE": is_whole,
        "num_warps": warps,
    }
    sizes = (outputs, tiles * TILE_ROWS, inputs, all_groups, weight.stride(0), out.stride(0))
    return Kernel(constants, sizes)


class Workspace:
    """Buffers of launches that follow one another on one stream; they live as long as the graphs that use them."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._partial = torch.empty(0, dtype=torch.float32, device=self.device)
        self._arrived = torch.zeros(0, dtype=torch.int32, device=self.device)
        self._kept: list[torch.Tensor] = []

    def partial(self, elements: int) -> torch.Tensor:
        """Return float32 of at least so many elements, of any values."""
        if self._partial.numel() < elements:
            self._kept.append(self._partial)  # graphs that were captured have its address
            self._partial = torch.empty(elements, dtype=torch.float32, device=self.device)
        return self._partial

    def arrived(self, elements: int) -> torch.Tensor:
        """Return int32 of at least so many elements, all 0 between launches."""
        if self._arrived.numel() < elements:
            self._kept.append(self._arrived)
            self._arrived = torch.zeros(elements, dtype=torch.int32, device=self.device)
        return self._arrived


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors that a launch's programs are spread over."""
    if device.type != "cuda":
        return 3  # of the interpreter: a few programs, which share tiles
    return torch.cuda.get_device_properties(device).multi_processor_count
