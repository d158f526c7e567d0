"""Popularity laws: shares by the formulas that they are named after."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from traces.popularity import Distinct, Geometric, Identical, Popularity, Uniform, Zipf, popularity_named

ALL: list[Popularity] = [Uniform(), Identical(), Distinct(), Zipf(), Zipf(0.0), Geometric(), Geometric(1.0)]


@given(law=st.sampled_from(ALL), seed=st.integers(0, 999), models=st.integers(1, 50), count=st.integers(0, 200))
def test_every_request_gets_a_model_that_is_there(law: Popularity, seed: int, models: int, count: int) -> None:
    drawn = law.draw(np.random.default_rng(seed), 5, count, models)
    assert len(drawn) == count
    assert ((drawn >= 0) & (drawn < models)).all()
    assert (drawn == law.draw(np.random.default_rng(seed), 5, count, models)).all()


@pytest.mark.parametrize(
    ("law", "shares"),
    [
        pytest.param(Uniform(), [0.25, 0.25, 0.25, 0.25], id="uniform"),
        # 1, 1/2, 1/3, 1/4 over their sum 25/12
        pytest.param(Zipf(1.0), [0.48, 0.24, 0.16, 0.12], id="zipf-1"),
        # 1, 0.3536, 0.1925, 0.125 over 1.671
        pytest.param(Zipf(1.5), [0.5985, 0.2116, 0.1152, 0.0748], id="zipf-1.5-as-deltazip"),
        # 8 : 4 : 2 : 1
        pytest.param(Geometric(2.0), [8 / 15, 4 / 15, 2 / 15, 1 / 15], id="geometric-2"),
        pytest.param(Identical(), [1.0, 0.0, 0.0, 0.0], id="identical"),
        pytest.param(Distinct(), [0.25, 0.25, 0.25, 0.25], id="distinct"),
    ],
)
def test_shares(law: Popularity, shares: list[float]) -> None:
    """100,000 requests: a share is off by 0.007 once in 20,000 times."""
    drawn = law.draw(np.random.default_rng(0), 0, 100_000, 4)
    assert np.bincount(drawn, minlength=4) / 100_000 == pytest.approx(shares, abs=0.007)


@given(first=st.integers(0, 10**6), models=st.integers(1, 30))
def test_distinct_gives_no_two_of_a_round_the_same_model(first: int, models: int) -> None:
    drawn = Distinct().draw(np.random.default_rng(0), first, models, models)
    assert sorted(drawn.tolist()) == list(range(models))


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("uniform", Uniform()),
        ("identical", Identical()),
        ("distinct", Distinct()),
        ("zipf", Zipf(1.5)),
        ("zipf:1.1", Zipf(1.1)),
        ("geometric:3", Geometric(3.0)),
    ],
)
def test_laws_by_name(text: str, law: Popularity) -> None:
    assert popularity_named(text) == law


@pytest.mark.parametrize(
    "text", ["", "pareto", "uniform:2", "zipf:", "zipf:x", "zipf:-1", "zipf:nan", "geometric:0.5"]
)
def test_no_such_law(text: str) -> None:
    if text == "zipf:":
        assert popularity_named(text) == Zipf()
        return
    with pytest.raises(ConfigError):
        popularity_named(text)
