"""Choice of a tiling by what is known before the mix: the rows of a step.

All are the fastest of those that were timed on one H200 for the linears of Llama-3.1-8B and 2-bit deltas
(``tests/bench/results/delta_kernels_h200``, decision 47). Other models, formats and GPUs were not timed.
"""

from __future__ import annotations

from iserve_variants.delta_linear import Tiling

__all__ = ["choose_tiling"]

_ANY_MIX = Tiling(programs_per_sm=2, overlaps=True)
_MANY_ROWS = Tiling(small_rows=16, max_registers=168, overlaps=True)


def choose_tiling(bits: int, rows: int) -> Tiling:
    """Return the tiling of a step of ``rows`` rows, any number of which may have one delta.

    Those of 2 bits are taken for codes of other ``bits`` too.
    """
    return _MANY_ROWS if rows > 32 else _ANY_MIX
