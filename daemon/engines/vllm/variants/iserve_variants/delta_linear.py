"""Launch of the delta kernels: the tiling of a product, its buffers, and the call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from iserve_variants.assembly import splice_asm
from iserve_variants.formats import GROUP, CodeFormat
from iserve_variants.kernels import add_products, add_rows
from iserve_variants.route import Route

__all__ = ["Tiling", "Workspace", "add_delta", "add_routed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Shape of the work of one launch. All of it is known without the mix of rows."""

    outputs: int = 128
    """Outputs of a tile."""
    small_rows: int = 8
    """Rows of the product for short segments: 8 take the tensor cores' narrow form, more Hopper's wide one."""
    rows: int = 32
    """Most rows of a segment, as in the route, and rows of the product for all that are not short."""
    warps: int = 4
    stages: int = 3
    """Steps of groups that are loaded ahead, and the one in use."""
    programs_per_sm: int = 3
    min_groups: int = 4
    """Fewest groups of inputs that a program takes."""
    step: int = 2
    """Groups of inputs of a step of the loop: 1, 2 or 4; 1 where they are no multiple."""
    max_registers: int | None = None
    overlaps: bool = False
    """Whether the launch may begin before the kernel that wrote y has ended (programmatic dependent launch).

    All else (x, route, codes and scales) must have been written when that kernel began.
    """

    def __str__(self) -> str:
        limit = f" r{self.max_registers}" if self.max_registers else ""
        form = " o" if self.overlaps else ""
        return (
            f"n{self.outputs} m{self.small_rows}/{self.rows} w{self.warps} s{self.stages} "
            f"c{self.programs_per_sm} g{self.min_groups} k{self.step}{limit}{form}"
        )


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


def add_delta(
    y: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    route: Route,
    format_: CodeFormat,
    tiling: Tiling,
    workspace: Workspace,
    *,
    adds: bool = True,
) -> None:
    """Add to each routed row of ``y`` the product of its delta and its row of ``x``; leave other rows alone.

    One launch, whose grid depends on shapes and ``tiling`` alone: it can be captured in a CUDA graph and replayed
    after ``route`` was filled anew.

    Args:
        y: bfloat16 [rows, outputs], rows contiguous.
        x: bfloat16 [rows, inputs], rows contiguous and 16-byte aligned.
        codes: int16 [slots, tiles, groups, 64, words].
        scales: bfloat16 [slots, groups, padded outputs].
        route: of segments of ``tiling.rows`` rows.
        adds: False: the products are stored in the routed rows of ``y``, which may be float32 then.

    Raises:
        ValueError: shapes or types that do not belong together.
    """
    _check(y, x, codes, scales, route, format_, tiling, adds)
    outputs, inputs = y.shape[1], x.shape[1]
    groups, padded_outputs = scales.shape[1:]
    step = tiling.step if groups % tiling.step == 0 else 1
    grid = _multiprocessors(x.device) * tiling.programs_per_sm
    tiles = -(-padded_outputs // tiling.outputs)
    overlaps = tiling.overlaps and adds and x.device.type == "cuda"
    options = {} if tiling.max_registers is None else {"maxnreg": tiling.max_registers}
    if overlaps:
        options["launch_pdl"] = True
    add_products[(grid,)](
        x,
        y,
        codes,
        scales,
        route.order,
        route.segments,
        route.num_segments,
        workspace.partial(grid * 2 * tiling.outputs * tiling.rows),
        workspace.arrived(route.segments.shape[0] * tiles),
        outputs,
        padded_outputs,
        inputs,
        groups,
        x.stride(0),
        y.stride(0),
        tiling.min_groups,
        BITS=format_.bits,
        ZERO=format_.zero,
        ASM=assembly(format_, x.device),
        BN=tiling.outputs,
        SMALL_ROWS=min(tiling.small_rows, tiling.rows),
        ROWS=tiling.rows,
        STEP=step,
        STAGES=tiling.stages,
        # Triton copies asynchronously from 4 bytes a thread on, which are two scales.
        SCALES_AHEAD=tiling.outputs < 2 * 32 * tiling.warps,
        ADD=adds,
        OVERLAP=overlaps,
        WHOLE_N=padded_outputs % tiling.outputs == 0,
        WHOLE_K=inputs % GROUP == 0,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **options,
    )


def add_routed(y: torch.Tensor, change: torch.Tensor, route: Route) -> None:
    """Add ``change`` to the routed rows of ``y``, both [rows, outputs]: what :func:`add_delta` stored."""
    outputs = y.shape[1]
    add_rows[(-(-outputs // 2048), len(y))](
        y, change, route.order, route.num_rows, outputs, y.stride(0), change.stride(0), BN=2048, num_warps=8
    )


def _check(
    y: torch.Tensor,
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    route: Route,
    format_: CodeFormat,
    tiling: Tiling,
    adds: bool,
) -> None:
    outputs, inputs = y.shape[1], x.shape[1]
    if route.segment_rows != tiling.rows:
        raise ValueError(f"the route has segments of {route.segment_rows} rows, the tiling {tiling.rows}")
    if codes.shape[1:] != format_.codes_shape(outputs, inputs):
        raise ValueError(f"codes {list(codes.shape)} are not of {outputs} outputs and {inputs} inputs")
    if scales.shape[1:] != format_.scales_shape(outputs, inputs):
        raise ValueError(f"scales {list(scales.shape)} are not of {outputs} outputs and {inputs} inputs")
    if {x.dtype, scales.dtype, y.dtype if adds else x.dtype} != {torch.bfloat16}:
        raise ValueError("x, scales and a y that is added to are bfloat16")
    if x.stride(1) != 1 or y.stride(1) != 1 or not codes.is_contiguous() or not scales.is_contiguous():
        raise ValueError("rows of x and y, codes and scales are contiguous")


def assembly(format_: CodeFormat, device: torch.device) -> str:
    """Return the kernels' inline assembly for ``format_``; none on a CPU, where the interpreter runs them."""
    return splice_asm(format_.bits, format_.zero) if device.type == "cuda" else ""


@lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 3  # of the interpreter: a few programs, which share tiles
    return torch.cuda.get_device_properties(device).multi_processor_count
