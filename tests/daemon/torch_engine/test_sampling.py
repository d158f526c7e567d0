"""From logits to tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.torch_engine.runtime.sampling import Sampler, SamplingParams, _kth_largest, _nucleus, sample
from fingerprint.errors import ConfigError


def rows(*logits: list[float]) -> np.ndarray:
    return np.array(logits, dtype=np.float32)


def draw(params: SamplingParams, logits: list[float], times: int) -> list[int]:
    sampler = Sampler(params)
    return [sample(rows(logits), [sampler], [()])[0] for _ in range(times)]


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(temperature=1e-9), SamplingParams(top_k=1)]
)
def test_greedy_takes_the_largest(params: SamplingParams) -> None:
    assert draw(params, [0.0, 3.0, 2.9], 5) == [1] * 5


def test_tokens_come_as_often_as_their_probability() -> None:
    """Logits ln 1, ln 2, ln 5: probabilities 1/8, 2/8, 5/8. 8,000 draws: 4 standard deviations are under 175."""
    counts = np.bincount(draw(SamplingParams(seed=1), list(np.log([1, 2, 5])), 8000))
    assert np.abs(counts - [1000, 2000, 5000]).max() < 175


def test_every_part_of_a_large_vocabulary_comes_as_often_as_its_weight() -> None:
    """Four tokens of 3,000, blocks apart, 1 : 1 : 2 : 4 of 8,000; the rest impossible."""
    logits = [float("-inf")] * 3000
    odds = {0: 1, 511: 1, 512: 2, 2999: 4}
    for token, weight in odds.items():
        logits[token] = float(np.log(weight))
    counts = np.bincount(draw(SamplingParams(seed=4), logits, 8000), minlength=3000)
    assert set(np.flatnonzero(counts)) == set(odds)
    for token, weight in odds.items():
        assert abs(counts[token] - 1000 * weight) < 180


def test_temperature_sharpens() -> None:
    """At temperature 0.5 the odds 1 : 3 become 1 : 9."""
    counts = np.bincount(draw(SamplingParams(temperature=0.5, seed=2), list(np.log([1, 3])), 5000))
    assert abs(counts[0] - 500) < 85


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [(0.5, {2}), (0.62, {2}), (0.63, {1, 2}), (0.87, {1, 2}), (0.88, {0, 1, 2}), (1e-9, {2})],
)
def test_top_p_keeps_the_fewest_that_reach_it(top_p: float, expected: set[int]) -> None:
    """Probabilities 0.125, 0.25, 0.625."""
    assert set(draw(SamplingParams(top_p=top_p, seed=3), list(np.log([1, 2, 5])), 300)) == expected


def test_top_k_keeps_the_likeliest() -> None:
    assert set(draw(SamplingParams(top_k=2, seed=3), list(np.log([1, 2, 5])), 300)) == {1, 2}


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(-(2**70), 2**70), others=st.integers(0, 5), place=st.integers(0, 5))
def test_a_seed_gives_the_same_whatever_is_beside_it(seed: int, others: int, place: int) -> None:
    logits = [0.1, 0.5, 0.2, 0.9]
    params = SamplingParams(seed=seed, top_p=0.95)
    alone = draw(params, logits, 8)
    place = min(place, others)
    samplers = [Sampler(SamplingParams(seed=99 + i)) for i in range(others)]
    samplers.insert(place, Sampler(params))
    batch = rows(*[logits for _ in samplers])
    beside = [sample(batch.copy(), samplers, [()] * len(samplers))[place] for _ in range(8)]
    assert beside == alone


def test_without_a_seed_two_differ() -> None:
    flat = [0.0] * 200
    assert draw(SamplingParams(), flat, 20) != draw(SamplingParams(), flat, 20)


def test_barred_tokens_are_never_chosen() -> None:
    assert sample(rows([5.0, 1.0, 0.0]), [Sampler(SamplingParams(temperature=0))], [(0, 7)]) == [1]


def test_barring_what_is_no_token_bars_nothing() -> None:
    """Nor counts from the vocabulary's end, as an index below 0 would."""
    assert sample(rows([0.0, 1.0, 5.0]), [Sampler(SamplingParams(temperature=0))], [(-1, -9, 3)]) == [2]


def test_what_is_no_number_gives_no_token_and_leaves_the_others_alone() -> None:
    greedy = [Sampler(SamplingParams(temperature=0)) for _ in range(4)]
    nan, inf = float("nan"), float("inf")
    batch = rows([0.0, nan], [0.0, inf], [-inf, -inf], [-inf, 0.0])
    assert sample(batch, greedy, [()] * 4) == [None, None, None, 1]


def test_impossible_tokens_are_never_drawn() -> None:
    assert set(draw(SamplingParams(seed=0), [float("-inf"), 0.0, float("-inf")], 50)) == {1}


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40),
    top_p=st.floats(0.01, 1.0),
    temperature=st.floats(0.05, 5.0),
    seed=st.integers(0, 99),
)
def test_what_is_drawn_is_in_the_nucleus(logits: list[float], top_p: float, temperature: float, seed: int) -> None:
    """The tokens that are likelier than the one drawn, by hand in float64, do not reach ``top_p`` yet."""
    params = SamplingParams(top_p=top_p, temperature=temperature, seed=seed)
    weights = np.exp((np.array(logits) - max(logits)) / temperature)
    for token in draw(params, logits, 5):
        likelier = weights[weights > weights[token] * (1 + 1e-4)].sum() / weights.sum()
        assert likelier < top_p + 1e-4


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 5, 300, 5000]),
    spread=st.sampled_from([0.0, 0.1, 3.0, 30.0]),
    top_k=st.integers(1, 400),
    top_p=st.one_of(st.floats(0.001, 0.999), st.sampled_from([1e-9, 1 - 1e-9])),
)
def test_both_filters_keep_what_sorting_everything_keeps(
    seed: int, vocab: int, spread: float, top_k: int, top_p: float
) -> None:
    """Rounded, so that there are ties; with a spread of 30 most weights are 0 in float32."""
    logits = np.random.default_rng(seed).normal(0, spread, vocab).round(2)
    weights = np.exp(logits - logits.max()).astype(np.float32)
    top_k = min(top_k, vocab)
    assert _kth_largest(weights, top_k) == np.sort(weights)[-top_k]
    order = np.argsort(-weights, kind="stable")
    reached = np.cumsum(weights[order], dtype=np.float64)
    kept = np.flatnonzero(_nucleus(weights, top_p))
    assert np.array_equal(np.sort(order[: len(kept)]), kept), "the likeliest, of equals the first"
    rounding = 1e-9 * reached[-1]
    assert reached[len(kept) - 1] >= top_p * reached[-1] - rounding
    assert len(kept) == 1 or reached[len(kept) - 2] < top_p * reached[-1] + rounding


def test_an_empty_batch() -> None:
    assert sample(np.zeros((0, 4), dtype=np.float32), [], []) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -2},
    ],
)
def test_parameters_out_of_range(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        SamplingParams(**wrong)
