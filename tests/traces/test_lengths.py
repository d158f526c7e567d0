"""Length models: what they are fitted to they give back, and how far they are is a figure."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import BadInputError, ConfigError
from tests.traces.fit_distance import fit_distance
from traces.lengths import (
    EmpiricalLengths,
    FixedLengths,
    HistogramLengths,
    LengthModel,
    LognormalLengths,
    MixedLengths,
    QuantileLengths,
)
from traces.reading import open_trace
from traces.request import Request

MODELS: dict[str, LengthModel] = {
    "fixed": FixedLengths(7, 3),
    "empirical": EmpiricalLengths(np.array([1, 500]), np.array([9, 2])),
    "lognormal": LognormalLengths(6.0, 1.0, 4.0, 0.8, -0.4, 2000, 500),
    "quantiles": QuantileLengths(((0, 1), (0.5, 10), (1, 99.5)), ((0, 3), (1, 3))),
    "histogram": HistogramLengths((np.array([1, 9]), np.array([0.4, 1.0])), (np.array([5]), np.array([0.7]))),
    "mixed": MixedLengths(((1.0, FixedLengths(1, 1)), (3.0, FixedLengths(9, 5)))),
}


def requests_of(inputs: np.ndarray, outputs: np.ndarray) -> list[Request]:
    return [Request(0.0, i, o) for i, o in zip(inputs.tolist(), outputs.tolist(), strict=True)]


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 300))
def test_lengths_are_whole_at_least_1_and_follow_from_the_seed(name: str, seed: int, count: int) -> None:
    inputs, outputs = MODELS[name].sample(np.random.default_rng(seed), count)
    for side in (inputs, outputs):
        assert side.dtype == np.int64
        assert len(side) == count
        assert (side >= 1).all()
    again = MODELS[name].sample(np.random.default_rng(seed), count)
    assert (inputs == again[0]).all()
    assert (outputs == again[1]).all()


def test_a_model_is_at_no_distance_from_its_own_draws() -> None:
    """Two samples of n: the distance passes 1.95 sqrt(2 / n) once in a thousand."""
    for name, model in MODELS.items():
        drawn = requests_of(*model.sample(np.random.default_rng(7), 20_000))
        distance = fit_distance(model, drawn, samples=20_000, seed=8)
        assert max(distance.input_ks, distance.output_ks) < 1.95 * math.sqrt(2 / 20_000), name
        assert distance.compared == 20_000


def test_the_distance_of_two_lengths_by_hand() -> None:
    """A quarter of the trace lies above the model's one input, the rest on it; outputs have nothing in common."""
    trace = [Request(0, 5, 1)] * 3 + [Request(0, 6, 1)]
    found = fit_distance(FixedLengths(5, 2), trace, samples=100)
    assert (found.input_ks, found.output_ks) == (0.25, 1.0)


def test_lognormal_fit_gives_back_what_made_the_trace() -> None:
    made = LognormalLengths(6.0, 1.0, 4.0, 0.8, -0.4)
    fitted = LognormalLengths.fit(requests_of(*made.sample(np.random.default_rng(1), 100_000)))
    assert fitted.log_mean_input == pytest.approx(6.0, abs=0.02)
    assert fitted.log_std_input == pytest.approx(1.0, abs=0.02)
    assert fitted.log_mean_output == pytest.approx(4.0, abs=0.02)
    assert fitted.log_std_output == pytest.approx(0.8, abs=0.02)
    assert fitted.log_correlation == pytest.approx(-0.4, abs=0.02)


def test_a_trace_of_one_length_has_no_spread() -> None:
    fitted = LognormalLengths.fit([Request(0, 100, 7)] * 5)
    inputs, outputs = fitted.sample(np.random.default_rng(0), 50)
    assert set(inputs.tolist()) == {100}
    assert set(outputs.tolist()) == {7}


def test_empirical_keeps_pairs_together() -> None:
    trace = [Request(0, 10 * n, n) for n in range(1, 200)]
    inputs, outputs = EmpiricalLengths.fit(trace).sample(np.random.default_rng(0), 1000)
    assert (inputs == 10 * outputs).all()


def test_a_bounded_empirical_fit_is_fair_to_all_of_the_trace() -> None:
    """10,000 kept of 100,000: each tenth of the trace keeps a tenth of them, within four sigma."""
    kept = EmpiricalLengths.fit((Request(0, n + 1, 1) for n in range(100_000)), max_kept=10_000, seed=3)
    assert len(kept.input_tokens) == 10_000
    assert len(set(kept.input_tokens.tolist())) == 10_000
    shares = np.bincount((kept.input_tokens - 1) // 10_000, minlength=10)
    assert np.abs(shares - 1000).max() < 4 * math.sqrt(1000 * 0.9)


def test_the_reservoir_is_fair_to_each_request() -> None:
    """Two kept of five: each in two fifths of 4,000 seeds, within four sigma."""
    trace = [Request(0, n + 1, 1) for n in range(5)]
    kept = [EmpiricalLengths.fit(trace, max_kept=2, seed=seed).input_tokens for seed in range(4000)]
    shares = np.bincount(np.concatenate(kept) - 1) / 4000
    assert np.abs(shares - 0.4).max() < 4 * math.sqrt(0.24 / 4000)


def test_a_mixture_is_mixed_all_along() -> None:
    """A quarter of the samples is of the first part, in the first thousand as in the last."""
    inputs, outputs = MODELS["mixed"].sample(np.random.default_rng(0), 10_000)
    assert ((inputs == 1) == (outputs == 1)).all()
    for some in (inputs[:1000], inputs[-1000:]):
        assert (some == 1).mean() == pytest.approx(0.25, abs=0.055)


@pytest.mark.parametrize(
    ("trace", "empirical", "input_ks", "output_ks"),
    [
        # What a lognormal misses: conv's templates near 400 and 1,000 tokens, answers near 400.
        pytest.param("azure_llm_2023_conv", 0.01, 0.158, 0.182, id="conv"),
        pytest.param("azure_llm_2023_code", 0.01, 0.107, 0.115, id="code"),
        pytest.param("mooncake_synthetic", 0.01, 0.202, 0.105, id="mooncake"),
    ],
)
def test_how_well_real_traces_are_fitted(
    trace: str, empirical: float, input_ks: float, output_ks: float, reference_traces: Path
) -> None:
    """Recorded distances; docs/traces.md quotes them."""
    path = reference_traces / f"{trace}.csv.gz"
    resampled = fit_distance(EmpiricalLengths.fit(open_trace(path)), open_trace(path))
    assert max(resampled.input_ks, resampled.output_ks) < empirical
    lognormal = fit_distance(LognormalLengths.fit(open_trace(path)), open_trace(path))
    assert lognormal.input_ks == pytest.approx(input_ks, abs=0.005)
    assert lognormal.output_ks == pytest.approx(output_ks, abs=0.005)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: FixedLengths(0, 1), id="no-input"),
        pytest.param(lambda: EmpiricalLengths(np.array([]), np.array([])), id="nothing"),
        pytest.param(lambda: EmpiricalLengths(np.array([1]), np.array([1, 2])), id="uneven"),
        pytest.param(lambda: LognormalLengths(1, -1, 1, 1), id="negative-spread"),
        pytest.param(lambda: LognormalLengths(1, 1, 1, 1, 2), id="correlation-2"),
        pytest.param(lambda: QuantileLengths(((0, 1),), ((0, 1), (1, 1))), id="one-knot"),
        pytest.param(lambda: QuantileLengths(((0, 5), (1, 4)), ((0, 1), (1, 1))), id="descending"),
        pytest.param(lambda: QuantileLengths(((0.1, 1), (1, 4)), ((0, 1), (1, 1))), id="not-from-0"),
        pytest.param(lambda: QuantileLengths(((0, 0), (1, 4)), ((0, 1), (1, 1))), id="no-tokens"),
    ],
)
def test_what_no_model_can_have(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


def test_nothing_fits_a_trace_without_requests() -> None:
    for act in (EmpiricalLengths.fit, LognormalLengths.fit, lambda none: fit_distance(FixedLengths(1, 1), none)):
        with pytest.raises(BadInputError, match="without requests"):
            act([])
