"""Intervals from what predictions of other models were off by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.codec import from_json, to_json
from fingerprint.estimators.calibration import Calibration, MeasuredError, shipped_calibration


def error(shape: str, log_error: float, metric: str = "ttft") -> MeasuredError:
    return MeasuredError(
        model=shape,
        shape_hash=shape,
        engine="vllm 0.24.0",
        gpu="h200",
        weights="16bit",
        metric=metric,
        batch=1,
        input_tokens=128,
        log_error=log_error,
    )


def of(*models: list[float], metric: str = "ttft") -> Calibration:
    return Calibration(tuple(error(f"m{i}", e, metric) for i, errors in enumerate(models) for e in errors))


several = st.lists(st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=30), min_size=2, max_size=8)


@given(models=several)
def test_nine_in_ten_of_the_others_errors_lie_within_each_model_counting_alike(models) -> None:
    below, above = of(*models).bounds("ttft", prompt_tokens=128, exclude_shape="another")
    inside = [sum(-below - 1e-12 <= e <= above + 1e-12 for e in errors) / len(errors) for errors in models]
    assert sum(inside) / len(inside) >= 0.9 - 1e-9


@given(models=several, own=st.lists(st.floats(-5, 5), max_size=5))
def test_the_own_model_is_left_out(models, own) -> None:
    others = of(*models)
    with_own = Calibration(others.errors + tuple(error("own", e) for e in own))
    assert with_own.bounds("ttft", prompt_tokens=128, exclude_shape="own") == others.bounds(
        "ttft", prompt_tokens=128, exclude_shape="own"
    )


@given(models=several, factor=st.floats(1, 5))
def test_larger_errors_never_make_it_narrower(models, factor) -> None:
    narrow = of(*models).bounds("ttft", prompt_tokens=128, exclude_shape="")
    wide = of(*([e * factor for e in errors] for errors in models)).bounds(
        "ttft", prompt_tokens=128, exclude_shape=""
    )
    assert wide[0] >= narrow[0] >= 0
    assert wide[1] >= narrow[1] >= 0


@given(models=several, more=st.floats(0, 1))
def test_a_model_that_was_further_off_never_makes_that_side_narrower(models, more) -> None:
    """Of as many models, one of which is predicted lower than it was."""
    before = of(*models).bounds("ttft", prompt_tokens=128, exclude_shape="")
    after = of([e + more for e in models[0]], *models[1:]).bounds("ttft", prompt_tokens=128, exclude_shape="")
    assert after[1] >= before[1]
    assert after[0] <= before[0]


@given(models=several)
def test_the_order_in_which_they_were_measured_changes_nothing(models) -> None:
    calibration = of(*models)
    turned = Calibration(calibration.errors[::-1])
    assert turned.bounds("ttft", prompt_tokens=128, exclude_shape="") == pytest.approx(
        calibration.bounds("ttft", prompt_tokens=128, exclude_shape="")
    )


def test_one_model_of_many_points_does_not_outweigh_the_others() -> None:
    """A hundred points that are exact, and nine models of one point each that are 10% off."""
    models = [[0.0] * 100, *[[0.1]] * 9]
    assert of(*models).bounds("ttft", prompt_tokens=128, exclude_shape="") == (0.0, 0.1)


@pytest.mark.parametrize("models", [(), ([0.3],)])
def test_fewer_than_two_other_models_are_an_assumption(models) -> None:
    assert of(*models).bounds("ttft", prompt_tokens=128, exclude_shape="own") == (0.15, 0.15)


def test_each_metric_has_its_own() -> None:
    both = Calibration(of([0.2], [0.2]).errors + of([-0.1], [-0.1], metric="tpot").errors)
    assert both.bounds("ttft", prompt_tokens=128, exclude_shape="") == (0.0, 0.2)
    assert both.bounds("tpot", prompt_tokens=128, exclude_shape="") == (0.1, 0.0)


def test_points_of_about_as_many_prompt_tokens_count_most() -> None:
    """Short prompts off by 40%, long ones by 2%, of three models each."""
    near = of(*[[0.4, -0.4]] * 3).errors
    far = tuple(replace(e, input_tokens=32_768, log_error=e.log_error / 20) for e in near)
    both = Calibration(near + far)
    for prompt_tokens, off in ((64, 0.4), (128, 0.4), (16_384, 0.02), (131_072, 0.02)):
        bounds = both.bounds("ttft", prompt_tokens=prompt_tokens, exclude_shape="")
        assert bounds == pytest.approx((off, off))


def test_beyond_all_that_was_measured_the_nearest_decides() -> None:
    short = of([0.1, -0.1], [0.2, -0.2])
    assert short.bounds("ttft", prompt_tokens=10**9, exclude_shape="") == (0.2, 0.2)


def test_errors_that_are_shipped_are_read_as_they_are_written() -> None:
    errors = of([0.01, -0.02], [0.03]).errors
    assert from_json(to_json(errors), tuple[MeasuredError, ...]) == errors
    for shipped in shipped_calibration().errors:
        assert shipped.metric in ("ttft", "tpot")
        assert abs(shipped.log_error) < 1
        assert replace(shipped) == shipped
