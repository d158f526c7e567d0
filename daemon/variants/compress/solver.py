"""Codes and scales of one matrix of changes, by the optimal brain surgeon: a column's rounding error is made good
by the columns after it.

GPTQ (Frantar et al., 2022) with groups of 128 inputs, and SparseGPT's masks (Frantar & Alistarh, 2023) for 2:4,
applied to a change D = W' - W instead of to W' (DeltaZip, algorithm 1). With H = sum of x x^T over the inputs x
and E = D - Q, the loss is tr(E H E^T). For H = R R^T, R upper, it is the sum of squares of E R, whose column j has
the errors of columns up to j alone. The errors P of the columns before a group are made good by moving the group
to D_g + P R_pg R_gg^-1; within it, with U = R_gg^-1, rounding column i by e moves the columns after it by
-e U_ij / U_ii and adds e^2 R_ii^2 to the loss. GPTQ, which inverts the whole of H, takes the same steps. Rows do
not interact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from fingerprint.delta.formats import GROUP, DeltaFormat

__all__ = ["Compressed", "Curvature", "compress_matrix", "relative_error", "second_moment"]

_DAMPING = 0.01  # of the mean diagonal of H
_ROWS = {"cpu": 1024, "cuda": 32_768}  # that are solved at once; on a CPU by one thread
_THREADS = 8  # at most, of a CPU, which bounds memory
_ERROR_ROWS = {"cpu": 4096, "cuda": 32_768}  # whose error is summed at once, which bounds memory
_BLOCK = 16  # columns whose errors go to each other at once, and to those after them together
_PANEL = 1024  # columns of a symmetric matrix that are multiplied at once
_Solved = tuple[torch.Tensor, torch.Tensor]  # codes [inputs, rows] and scales [groups, rows]
_FACTORS = np.geomspace(0.08, 1.0, 24)  # of the scale that would just reach the largest value of a group
_REFITS = 2  # of a scale to the codes that it gave


@dataclass(frozen=True, slots=True)
class Compressed:
    """Matrix in a format, not yet packed."""

    codes: torch.Tensor  # [outputs, inputs], uint8
    scales: torch.Tensor  # [outputs, groups], float32, each a BF16 value

    def values(self, format_: DeltaFormat) -> torch.Tensor:
        """Return the values [outputs, inputs] of the codes, the same as a reader's."""
        values = self.codes.to(torch.float32).sub_(format_.zero)
        for number, (first, end) in enumerate(_groups(values.shape[1])):
            values[:, first:end] *= self.scales[:, number, None]
        return values


@dataclass(frozen=True, slots=True)
class Curvature:
    """Weights of errors, from the inputs that matrices of one input have."""

    hessian: torch.Tensor  # [inputs, inputs]: sum of x x^T over the inputs x, up to a factor
    factor: torch.Tensor  # R, upper, with H = R R^T of the damped H, float32

    @classmethod
    def of(cls, hessian: torch.Tensor) -> Curvature:
        return cls(hessian, _factor(hessian))


def second_moment(inputs: torch.Tensor) -> torch.Tensor:
    """Return the mean of x x^T over ``inputs`` [tokens, inputs]. Panels below the diagonal are copied."""
    total = inputs.new_empty(inputs.shape[1], inputs.shape[1])
    for first, end in _panels(len(total)):
        torch.mm(inputs[:, first:end].T, inputs[:, first:], out=total[first:end, first:])
        total[end:, first:end] = total[first:end, end:].T
    return total.div_(len(inputs))


def compress_matrix(change: torch.Tensor, curvature: Curvature | None, format_: DeltaFormat) -> Compressed:
    """Return ``change`` [outputs, inputs], float32, in ``format_``, on the device of ``change``.

    Args:
        curvature: None: all inputs count alike and do not correlate, so that every value is rounded by itself.
    """
    factor = None if curvature is None else curvature.factor
    sizes = torch.ones(change.shape[1], device=change.device) if factor is None else factor.diagonal()
    solve = partial(_solve, factor=factor, sizes=sizes, format_=format_)
    solved = _each(solve, torch.split(change, _ROWS[change.device.type]))
    return Compressed(torch.cat([part[0].T for part in solved]), torch.cat([part[1].T for part in solved]))


def relative_error(change: torch.Tensor, kept: torch.Tensor, curvature: Curvature | None) -> float:
    """Return ||(D - Q) X||^2 / ||D X||^2; 0 where the change adds nothing to the outputs."""
    hessian = None if curvature is None else curvature.hessian.to(torch.float32)
    missing = lost = torch.zeros((), dtype=torch.float64, device=change.device)
    rows = _ERROR_ROWS[change.device.type]
    for before, after in zip(torch.split(change, rows), torch.split(kept, rows), strict=True):
        missing = missing + _energy(before - after, hessian)
        lost = lost + _energy(before, hessian)
    return float(missing) / float(lost) if float(lost) > 0 else 0.0


def _energy(rows: torch.Tensor, hessian: torch.Tensor | None) -> torch.Tensor:
    """Return tr(rows H rows^T), float64; each panel of H below its diagonal counts for its mirror image."""
    if hessian is None:
        return rows.double().square().sum()
    total = torch.zeros((), dtype=torch.float64, device=rows.device)
    for first, end in _panels(len(hessian)):
        weighted = rows[:, first:end] @ hessian[first:end, first:end]
        if end < len(hessian):
            weighted.addmm_(rows[:, end:], hessian[end:, first:end], alpha=2)
        total += (weighted * rows[:, first:end]).sum(dtype=torch.float64)
    return total


def _factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return R, upper, with H = R R^T of the damped H; from the last input to the first it is a Cholesky factor.

    An input that is always 0 on the calibration texts gets no compensation and keeps its changes.
    """
    backwards = hessian.flip((0, 1)).double()
    diagonal = backwards.diagonal()
    mean = diagonal.mean()
    if not mean > 0:  # no input at all: nothing to weigh by
        return torch.eye(len(hessian), device=hessian.device)
    diagonal += _DAMPING * mean
    factor: torch.Tensor = torch.linalg.cholesky(backwards)
    del backwards, diagonal  # as large as the factor
    return factor.float().flip((0, 1))


def _each(solve: Callable[[torch.Tensor], _Solved], parts: tuple[torch.Tensor, ...]) -> list[_Solved]:
    """Return what ``solve`` makes of each part.

    On a CPU each part has one thread: a column's vectors are too short for several. So codes are the same on any
    number of threads.
    """
    threads = torch.get_num_threads()
    if parts[0].device.type != "cpu" or threads == 1:
        return [solve(part) for part in parts]
    torch.set_num_threads(1)  # of each thread that begins from now on, too
    try:
        with ThreadPoolExecutor(min(threads, _THREADS, len(parts))) as pool:
            return list(pool.map(solve, parts))
    finally:
        torch.set_num_threads(threads)


# Columns of a matrix are rows here, and contiguous: [inputs, rows of the matrix].


def _solve(rows: torch.Tensor, factor: torch.Tensor | None, sizes: torch.Tensor, format_: DeltaFormat) -> _Solved:
    target = rows.T.contiguous()
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    errors = torch.empty_like(target if factor is not None else target[:0])
    scales = []
    for first, end in _groups(len(target)):
        values, steps = target[first:end], None
        if factor is not None:
            steps = _steps(factor[first:end, first:end])
            left = factor[:first, first:end].T @ errors[:first]
            values = torch.addmm(values, steps.T, left / sizes[first:end, None])
        scale = _fit_scales(values.contiguous(), sizes[first:end], format_)
        found = _solve_group(values / _divisor(scale), steps, sizes[first:end], format_)
        codes[first:end] = found
        if factor is not None:
            torch.addcmul(target[first:end], found.sub_(format_.zero), scale, value=-1, out=errors[first:end])
        scales.append(scale)
    return codes, torch.stack(scales)


def _steps(factor: torch.Tensor) -> torch.Tensor:
    """Return the rows of a triangle's inverse, U, over U_ii: what later columns are moved by for one's error."""
    identity = torch.eye(len(factor), device=factor.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(factor, identity, upper=True)
    return inverse * factor.diagonal()[:, None]


def _solve_group(
    values: torch.Tensor, steps: torch.Tensor | None, sizes: torch.Tensor, format_: DeltaFormat
) -> torch.Tensor:
    """Return the codes, as floats, of a group of columns, column by column.

    Args:
        values: multiples of the scale, with the errors of the columns before the group made good; overwritten.
        steps: within the group; None: no column makes good another's error.
    """
    if steps is None:
        return _codes(values, _larger_half(values * sizes[:, None]) if format_.is_sparse else None, format_)
    codes, errors = torch.empty_like(values), torch.empty_like(values)
    values += format_.zero
    for first in range(0, len(values), _BLOCK):
        end = min(first + _BLOCK, len(values))
        if first:
            values[first:end].addmm_(steps[:first, first:end].T, errors[:first], alpha=-1)
        for column in range(first, end):
            own = codes[column]
            torch.round(values[column], out=own)
            own.clamp_(0, 2**format_.bits - 1)
            if format_.is_sparse:
                if column % 4 == 0:
                    four = slice(column, column + 4)
                    is_dropped = ~_larger_half((values[four] - format_.zero) * sizes[four, None])
                own.masked_fill_(is_dropped[column % 4], format_.zero)
            torch.sub(values[column], own, out=errors[column])
            if column + 1 < end:
                values[column + 1 : end].addr_(steps[column, column + 1 : end], errors[column], alpha=-1)
    return codes


def _codes(values: torch.Tensor, kept: torch.Tensor | None, format_: DeltaFormat) -> torch.Tensor:
    """Return the codes nearest to multiples of a scale, as float32 whole numbers; of 0 the lowest of those around
    it, and of what is not kept the one that means 0.
    """
    codes = (values + format_.zero).round_().clamp_(0, 2**format_.bits - 1)
    return codes if kept is None else codes.masked_fill_(~kept, format_.zero)


def _fit_scales(group: torch.Tensor, sizes: torch.Tensor, format_: DeltaFormat) -> torch.Tensor:
    """Return the scale of each row that makes the weighted squared error of rounding least, as a BF16 value.

    By a search over a grid, then by least squares for the codes that the best of it gave, as long as that helps.
    """
    if format_.is_sparse:
        group = group.masked_fill(~_larger_half(group * sizes[:, None]), 0)
    weights, scratch = sizes.square(), (torch.empty_like(group), torch.empty_like(group))
    largest = group.abs().amax(dim=0) / float(np.abs(format_.levels).max())
    best = _as_stored(largest)
    least = _rounding_error(group, best, weights, format_, scratch)
    for factor in _FACTORS[:-1]:
        candidate = _as_stored(largest * float(factor))
        best, least = _better(candidate, best, least, _rounding_error(group, candidate, weights, format_, scratch))
    for _ in range(_REFITS):
        chosen = _codes(group / _divisor(best), None, format_).sub_(format_.zero)
        fitted = weights @ (group * chosen) / (weights @ chosen.square_()).clamp_min(1e-30)
        candidate = _as_stored(torch.where(fitted > 0, fitted, best))
        best, least = _better(candidate, best, least, _rounding_error(group, candidate, weights, format_, scratch))
    return best


def _better(
    candidate: torch.Tensor, best: torch.Tensor, least: torch.Tensor, error: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    is_better = error < least
    return torch.where(is_better, candidate, best), torch.where(is_better, error, least)


def _rounding_error(
    group: torch.Tensor,
    scale: torch.Tensor,
    weights: torch.Tensor,
    format_: DeltaFormat,
    scratch: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Return the weighted squared error of each row; in place, since a matrix is rounded some 30 times."""
    multiples, codes = scratch
    torch.div(group, _divisor(scale), out=multiples).add_(format_.zero)
    torch.round(multiples, out=codes).clamp_(0, 2**format_.bits - 1).sub_(multiples)
    return weights @ codes.square_() * scale.square()


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, scale, torch.inf)


def _as_stored(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.bfloat16).to(torch.float32)


def _larger_half(sizes: torch.Tensor) -> torch.Tensor:
    """Return which two of each four columns, the last may be fewer, are the larger; of equal ones the earlier."""
    padded = torch.nn.functional.pad(sizes.abs(), (0, 0, 0, -len(sizes) % 4), value=-1)
    fours = padded.reshape(-1, 4, *padded.shape[1:])
    rivals = torch.zeros(fours.shape, dtype=torch.int8, device=sizes.device)
    for one in range(4):
        for other in range(one + 1, 4):
            is_behind = fours[:, one] < fours[:, other]
            rivals[:, one] += is_behind
            rivals[:, other] += ~is_behind
    return (rivals < 2).flatten(0, 1)[: len(sizes)]


def _groups(inputs: int) -> Iterator[tuple[int, int]]:
    return _spans(inputs, GROUP)


def _panels(inputs: int) -> Iterator[tuple[int, int]]:
    return _spans(inputs, _PANEL)


def _spans(inputs: int, width: int) -> Iterator[tuple[int, int]]:
    for first in range(0, inputs, width):
        yield first, min(first + width, inputs)
