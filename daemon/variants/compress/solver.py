"""Codes and scales of one matrix of changes, by the optimal brain surgeon: a column's rounding error is made good
by the columns after it.

GPTQ (Frantar et al., 2022) with groups of 128 inputs, and SparseGPT's masks (Frantar & Alistarh, 2023) for 2:4,
applied to a change D = W' - W instead of to W' (DeltaZip, algorithm 1). With H = sum of x x^T over the inputs x,
the loss is tr((D - Q) H (D - Q)^T); U is the upper Cholesky factor of H^-1, and rounding column i by e changes the
loss by e^2 / U_ii^2. Rows do not interact.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from fingerprint.delta.formats import GROUP, DeltaFormat

__all__ = ["Compressed", "Curvature", "compress_matrix", "relative_error"]

_DAMPING = 0.01  # of the mean diagonal of H
_ROWS = 4096  # that are solved at once, which bounds memory
_FACTORS = np.geomspace(0.08, 1.0, 24)  # of the scale that would just reach the largest value of a group
_REFITS = 2  # of a scale to the codes that it gave


@dataclass(frozen=True, slots=True)
class Compressed:
    """Matrix in a format, not yet packed."""

    codes: npt.NDArray[np.uint8]  # [outputs, inputs]
    scales: npt.NDArray[np.float32]  # [outputs, groups], each a BF16 value


@dataclass(frozen=True, slots=True)
class Curvature:
    """Weights of errors, from the inputs that matrices of one input have."""

    hessian: torch.Tensor  # [inputs, inputs], float64: sum of x x^T over the inputs x, up to a factor
    factor: torch.Tensor  # U, upper, with H^-1 = U^T U of the damped H, float32

    @classmethod
    def of(cls, hessian: torch.Tensor) -> Curvature:
        return cls(hessian, _inverse_factor(hessian).to(torch.float32))


def compress_matrix(change: torch.Tensor, curvature: Curvature | None, format_: DeltaFormat) -> Compressed:
    """Return ``change`` [outputs, inputs], float32, in ``format_``.

    Args:
        curvature: None: all inputs count alike and do not correlate, so that every value is rounded by itself.
    """
    factor = None if curvature is None else curvature.factor
    diagonal = torch.ones(change.shape[1], device=change.device) if factor is None else factor.diagonal()
    levels = torch.from_numpy(format_.levels).to(change.device)
    parts = [_solve(rows.clone(), factor, diagonal, levels, format_) for rows in torch.split(change, _ROWS)]
    codes = torch.cat([part[0] for part in parts]).cpu().numpy()
    scales = torch.cat([part[1] for part in parts]).cpu().numpy()
    return Compressed(codes, scales)


def relative_error(change: torch.Tensor, kept: torch.Tensor, curvature: Curvature | None) -> float:
    """Return ||(D - Q) X||^2 / ||D X||^2, float64; 0 where the change adds nothing to the outputs."""
    hessian = None if curvature is None else curvature.hessian
    missing = lost = 0.0
    for before, after in zip(torch.split(change, _ROWS), torch.split(kept, _ROWS), strict=True):
        missing += _energy((before - after).double(), hessian)
        lost += _energy(before.double(), hessian)
    return missing / lost if lost > 0 else 0.0


def _energy(rows: torch.Tensor, hessian: torch.Tensor | None) -> float:
    weighted = rows if hessian is None else rows @ hessian
    return float((weighted * rows).sum())


def _inverse_factor(hessian: torch.Tensor) -> torch.Tensor:
    """Return U, upper, with H^-1 = U^T U of the damped H, float64.

    An input that is always 0 on the calibration texts gets no compensation and keeps its changes.
    """
    damped = hessian.clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    if not mean > 0:  # no input at all: nothing to weigh by
        return torch.eye(len(hessian), dtype=hessian.dtype, device=hessian.device)
    diagonal += _DAMPING * mean
    factor: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor


def _solve(
    rows: torch.Tensor,
    factor: torch.Tensor | None,
    diagonal: torch.Tensor,
    levels: torch.Tensor,
    format_: DeltaFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes [rows, inputs] and scales [rows, groups]; ``rows`` are overwritten."""
    codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
    scales = []
    for first, end in _groups(rows.shape[1]):
        group, pivots = rows[:, first:end], diagonal[first:end]
        scale = _fit_scales(group, 1 / pivots.square(), levels, format_)
        inner = None if factor is None else factor[first:end, first:end]
        codes[:, first:end], errors = _solve_group(group, inner, pivots, scale, levels, format_)
        if factor is not None and end < rows.shape[1]:
            rows[:, end:] -= errors @ factor[first:end, end:]
        scales.append(scale)
    return codes, torch.stack(scales, dim=1)


def _solve_group(
    group: torch.Tensor,
    factor: torch.Tensor | None,
    pivots: torch.Tensor,
    scale: torch.Tensor,
    levels: torch.Tensor,
    format_: DeltaFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of a group of columns, and their errors over U_ii, column by column from the left."""
    codes = torch.empty(group.shape, dtype=torch.uint8, device=group.device)
    errors = torch.zeros_like(group)
    kept = torch.ones(group.shape, dtype=torch.bool, device=group.device)
    for column in range(group.shape[1]):
        if format_.is_sparse and column % 4 == 0:
            four = slice(column, column + 4)
            kept[:, four] = _larger_half(group[:, four] / pivots[four])
        value = group[:, column]
        code = _nearest(value, scale, format_)
        if format_.is_sparse:
            code = torch.where(kept[:, column], code, torch.full_like(code, format_.zero))
        codes[:, column] = code.to(torch.uint8)
        error = (value - levels[code.long()] * scale) / pivots[column]
        errors[:, column] = error
        if factor is not None:
            group[:, column + 1 :] -= error[:, None] * factor[column, column + 1 :]
    return codes, errors


def _fit_scales(
    group: torch.Tensor, weights: torch.Tensor, levels: torch.Tensor, format_: DeltaFormat
) -> torch.Tensor:
    """Return the scale of each row that makes the weighted squared error of rounding least, as a BF16 value.

    A search over a grid, then least squares for the codes that the best of it gave, as long as that helps.
    """
    if format_.is_sparse:
        group = torch.where(_halves(group * weights.sqrt()), group, torch.zeros_like(group))
    largest = group.abs().amax(dim=1) / levels.abs().max()
    best = _as_stored(largest)
    least = _rounding_error(group, best, weights, format_)
    for factor in _FACTORS[:-1]:
        candidate = _as_stored(largest * float(factor))
        best, least = _better(candidate, best, least, group, weights, format_)
    for _ in range(_REFITS):
        chosen = levels[_nearest(group, best[:, None], format_).long()]
        fitted = (group * chosen * weights).sum(dim=1) / (chosen.square() * weights).sum(dim=1).clamp_min(1e-30)
        candidate = _as_stored(torch.where(fitted > 0, fitted, best))
        best, least = _better(candidate, best, least, group, weights, format_)
    return best


def _better(
    candidate: torch.Tensor,
    best: torch.Tensor,
    least: torch.Tensor,
    group: torch.Tensor,
    weights: torch.Tensor,
    format_: DeltaFormat,
) -> tuple[torch.Tensor, torch.Tensor]:
    error = _rounding_error(group, candidate, weights, format_)
    is_better = error < least
    return torch.where(is_better, candidate, best), torch.where(is_better, error, least)


def _rounding_error(
    group: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor, format_: DeltaFormat
) -> torch.Tensor:
    """Return the weighted squared error of each row; in place, since a matrix is rounded some 30 times."""
    rounded = _nearest(group, scale[:, None], format_).sub_(format_.zero).mul_(scale[:, None])
    return rounded.sub_(group).square_().mul_(weights).sum(dim=1)


def _nearest(values: torch.Tensor, scale: torch.Tensor, format_: DeltaFormat) -> torch.Tensor:
    """Return the codes whose values are nearest, as float32 whole numbers; where the scale is 0 the lowest of
    those around 0.
    """
    quotient = values / torch.where(scale > 0, scale, torch.inf)
    return quotient.add_(format_.zero).round_().clamp_(0, 2**format_.bits - 1)


def _as_stored(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.bfloat16).to(torch.float32)


def _halves(sizes: torch.Tensor) -> torch.Tensor:
    """Return which two of each four neighbours in a row are the larger."""
    padded = torch.nn.functional.pad(sizes, (0, -sizes.shape[1] % 4))
    kept = _larger_half(padded.reshape(-1, 4)).reshape(padded.shape)
    return kept[:, : sizes.shape[1]]


def _larger_half(fours: torch.Tensor) -> torch.Tensor:
    """Return which two of up to four columns are the larger in each row; of equal ones the earlier."""
    order = fours.abs().argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(fours, dtype=torch.bool).scatter_(1, order[:, :2], value=True)


def _groups(inputs: int) -> Iterator[tuple[int, int]]:
    for first in range(0, inputs, GROUP):
        yield first, min(first + GROUP, inputs)
