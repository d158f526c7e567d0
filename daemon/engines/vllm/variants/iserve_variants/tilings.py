"""Tilings of the delta kernels, and the choice of one by what is known before the mix: the rows of a step.

Both were chosen for any number of deltas in use, by times on one H200 of the linears of Llama-3.1-8B and 2-bit
deltas; one number alone has faster ones (decision 47). They serve other formats, models and GPUs too, where they
were not chosen by times.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Tiling", "choose_tiling", "rows_of_each_tiling"]


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


_ANY_MIX = Tiling(programs_per_sm=2, overlaps=True)
_MANY_ROWS = Tiling(small_rows=16, max_registers=168, overlaps=True)
_MANY_ROWS_FROM = 33


def choose_tiling(rows: int) -> Tiling:
    """Return the tiling of a step of ``rows`` rows, any number of which may have one delta."""
    return _MANY_ROWS if rows >= _MANY_ROWS_FROM else _ANY_MIX


def rows_of_each_tiling(most: int) -> tuple[int, ...]:
    """Return a number of rows for each tiling that steps of up to ``most`` rows have."""
    return (1, _MANY_ROWS_FROM) if most >= _MANY_ROWS_FROM else (1,)
