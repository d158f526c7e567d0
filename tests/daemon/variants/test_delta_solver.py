"""Optimal brain surgeon on matrices of changes: what compensation must gain, and what a format promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from daemon.variants.compress.solver import Curvature, compress_matrix, relative_error
from fingerprint.delta.formats import FORMATS, GROUP, DeltaFormat
from fingerprint.delta.packing import dequantize, pad_scales

OUTPUTS, INPUTS = 96, 384
# Largest relative error of what a Gaussian change adds to outputs, by this solver on this data, and half as much
# again. RTN is of the same scales without compensation.
BOUNDS = {
    "int1": 0.32,
    "int2": 0.08,
    "int3": 0.02,
    "int4": 0.006,
    "sparse24-int4": 0.07,
    "sparse24-int2": 0.16,
}


def gaussian(seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_normal((OUTPUTS, INPUTS)).astype(np.float32) * 1e-3)


def heavy_tailed(seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy(random.standard_t(3, (OUTPUTS, INPUTS)).astype(np.float32) * 1e-3)


def correlated_inputs(seed: int, tokens: int = 2048) -> torch.Tensor:
    """Return inputs [tokens, INPUTS] with a quarter as many directions as inputs, some noise, and uneven sizes.

    Directions and sizes are the same for all seeds.
    """
    fixed, random = np.random.default_rng(99), np.random.default_rng(seed)
    directions, sizes = fixed.standard_normal((INPUTS // 4, INPUTS)), np.exp(fixed.standard_normal(INPUTS) / 2)
    hidden = random.standard_normal((tokens, INPUTS // 4)) @ directions / np.sqrt(INPUTS // 4)
    return torch.from_numpy((hidden + 0.3 * random.standard_normal((tokens, INPUTS))) * sizes)


def kept(change: torch.Tensor, curvature: Curvature | None, format_: DeltaFormat) -> torch.Tensor:
    found = compress_matrix(change, curvature, format_)
    read = torch.from_numpy(dequantize(found.codes.numpy(), pad_scales(found.scales.numpy()), format_))
    assert torch.equal(read, found.values(format_))
    return read


@pytest.fixture(scope="module")
def curvature() -> Curvature:
    inputs = correlated_inputs(0)
    return Curvature.of(inputs.T @ inputs)


@pytest.mark.parametrize("change_of", [gaussian, heavy_tailed])
@pytest.mark.parametrize("name", FORMATS)
def test_compensation_loses_less_than_rounding(name: str, change_of: Any, curvature: Curvature) -> None:
    """On the inputs that it was made with, and on further ones of the same kind."""
    format_, change = FORMATS[name], change_of(1)
    rounded, compensated = kept(change, None, format_), kept(change, curvature, format_)
    fresh = correlated_inputs(1)
    held_out = Curvature(fresh.T @ fresh, curvature.factor)
    for inputs in (curvature, held_out):
        by_rounding, by_obs = (relative_error(change, each, inputs) for each in (rounded, compensated))
        assert by_obs < 0.7 * by_rounding
    if change_of is gaussian:
        assert relative_error(change, compensated, curvature) < BOUNDS[name]


@pytest.mark.parametrize("name", FORMATS)
def test_compensation_costs_nothing_where_inputs_do_not_correlate(name: str) -> None:
    format_, change = FORMATS[name], gaussian(2)
    plain = Curvature.of(torch.eye(INPUTS, dtype=torch.float64))
    assert torch.equal(kept(change, plain, format_), kept(change, None, format_))


def test_more_bits_lose_less(curvature: Curvature) -> None:
    change = heavy_tailed(3)
    found = [kept(change, curvature, FORMATS[f"int{bits}"]) for bits in (1, 2, 3, 4)]
    errors = [relative_error(change, each, curvature) for each in found]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", ["sparse24-int4", "sparse24-int2"])
@pytest.mark.parametrize("is_calibrated", [True, False])
def test_two_of_four_are_zero(name: str, is_calibrated: bool, curvature: Curvature) -> None:
    found = kept(gaussian(4), curvature if is_calibrated else None, FORMATS[name])
    zeros = (found.reshape(OUTPUTS, -1, 4) == 0).sum(dim=2)
    assert zeros.min() >= 2
    assert (found != 0).any(dim=1).all()


@pytest.mark.parametrize("name", FORMATS)
def test_no_change_is_kept_as_none(name: str, curvature: Curvature) -> None:
    """Outputs without a change have none, though dense formats have no level for 0."""
    change = gaussian(5)
    change[7] = 0
    assert not kept(change, curvature, FORMATS[name])[7].any()
    assert not kept(torch.zeros(3, INPUTS), curvature, FORMATS[name]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_an_input_that_was_never_active_keeps_its_changes(name: str) -> None:
    """Rounded like any other, not dropped: other texts may use it."""
    inputs = correlated_inputs(6)
    inputs[:, 50] = 0
    change = gaussian(6)
    change[:, 50] = change[:, 50].sign() * 2e-3
    found = kept(change, Curvature.of(inputs.T @ inputs), FORMATS[name])
    assert found.isfinite().all()
    if not FORMATS[name].is_sparse:
        assert (found[:, 50].sign() == change[:, 50].sign()).float().mean() > 0.95


def test_inputs_that_are_all_zero_are_no_failure() -> None:
    found = kept(gaussian(7), Curvature.of(torch.zeros(INPUTS, INPUTS, dtype=torch.float64)), FORMATS["int2"])
    assert torch.equal(found, kept(gaussian(7), None, FORMATS["int2"]))


def test_scales_are_what_the_file_holds() -> None:
    found = compress_matrix(gaussian(8), None, FORMATS["int2"])
    scales = found.scales
    assert scales.shape == (OUTPUTS, INPUTS // GROUP)
    assert torch.equal(scales.to(torch.bfloat16).to(torch.float32), scales)
    assert (scales > 0).all()


def test_outputs_do_not_depend_on_each_other(curvature: Curvature) -> None:
    change = gaussian(9)
    whole = compress_matrix(change, curvature, FORMATS["int2"])
    part = compress_matrix(change[10:20], curvature, FORMATS["int2"])
    assert (part.codes == whole.codes[10:20]).float().mean() > 0.999  # sums of other shapes differ in last bits


def test_any_number_of_threads_makes_the_same_codes_and_is_left_as_it_was(curvature: Curvature) -> None:
    change = gaussian(10).repeat(30, 1)  # more rows than one thread solves at once
    before, found = torch.get_num_threads(), []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            found.append(compress_matrix(change, curvature, FORMATS["int2"]))
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
    alone, several = found
    assert torch.equal(alone.codes, several.codes)
    assert torch.equal(alone.scales, several.scales)
