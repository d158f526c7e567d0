"""Choice of a tiling by what is known before the mix: rows of a step, and deltas in use where a graph has them.

All are the fastest of those that were timed on one H200 for the linears of Llama-3.1-8B and 2-bit deltas
(``tests/bench/results/delta_kernels_h200``, decision 47). Other models, formats and GPUs were not timed.
"""

from __future__ import annotations

from iserve_variants.delta_linear import Tiling

__all__ = ["MERGED_FROM_ROWS", "choose_tiling"]

MERGED_FROM_ROWS = 256  # of one delta: from here on one product with merged weights is as fast as two

_FEW_DELTAS = Tiling(outputs=64, small_rows=32, stages=4, min_groups=8, step=1, max_registers=168, overlaps=True)
_MANY_DELTAS = Tiling(rows=8, programs_per_sm=4, max_registers=128, overlaps=True)
_ANY_MIX = Tiling(programs_per_sm=2, overlaps=True)
_MANY_ROWS = Tiling(small_rows=16, max_registers=168, overlaps=True)


def choose_tiling(bits: int, rows: int, active: int | None = None) -> Tiling:
    """Return the tiling of a step of ``rows`` rows, any number of which may have one delta.

    Args:
        bits: of a code.
        active: deltas in use, where it is known (a graph for each number of them); None: any number.
    """
    if rows > 32:
        return _MANY_ROWS
    if active is not None and active <= 2:
        return _FEW_DELTAS
    if active is not None and rows <= 8 * active:
        return _MANY_DELTAS
    return _ANY_MIX
