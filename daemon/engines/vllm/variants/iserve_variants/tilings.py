"""Choice of a tiling by what is known before the mix: the rows of a step.

Both were chosen for any number of deltas in use, by times on one H200 of the linears of Llama-3.1-8B and 2-bit
deltas; one number alone has faster ones (decision 47). They serve other formats, models and GPUs too, where they
were not chosen by times.
"""

from __future__ import annotations

from iserve_variants.delta_linear import Tiling

__all__ = ["choose_tiling"]

_ANY_MIX = Tiling(programs_per_sm=2, overlaps=True)
_MANY_ROWS = Tiling(small_rows=16, max_registers=168, overlaps=True)


def choose_tiling(rows: int) -> Tiling:
    """Return the tiling of a step of ``rows`` rows, any number of which may have one delta."""
    return _MANY_ROWS if rows > 32 else _ANY_MIX
