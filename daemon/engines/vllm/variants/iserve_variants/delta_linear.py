"""Launch of the delta kernels: checks and the call."""

from __future__ import annotations

import torch

from iserve_variants.assembly import splice_asm
from iserve_variants.formats import CodeFormat
from iserve_variants.kernels import add_products, add_rows
from iserve_variants.launches import Workspace, multiprocessors, product_launch
from iserve_variants.route import Route
from iserve_variants.tilings import Tiling

__all__ = ["Tiling", "Workspace", "add_delta", "add_routed"]


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
    padded_outputs = scales.shape[2]
    kernel = product_launch(y, x, padded_outputs, format_, tiling, adds=adds)
    grid = multiprocessors(x.device) * tiling.programs_per_sm
    tiles = -(-padded_outputs // tiling.outputs)
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
        *kernel.integers,
        tiling.min_groups,
        ASM=assembly(format_, x.device),
        **kernel.constants,
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
