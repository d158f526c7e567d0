"""Requests of a world: rates, shares and changes are those that it states."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from fingerprint.errors import ConfigError
from iserve.evaluation.workload import load_of, make_requests
from tests.iserve.evaluation.worlds import LLAMA_8B, small_world

HERE = Path()
LENGTHS = {"input_mean_tokens": 400, "output_mean_tokens": 50}


def test_requests_begin_after_the_start_up_and_are_sorted() -> None:
    requests = make_requests(small_world(truth={"startup_s": 30}), 1, HERE)
    times = [one.arrival_s for one in requests]
    assert times[0] >= 30
    assert times[-1] < 50
    assert times == sorted(times)


def test_requests_repeat_with_their_seed() -> None:
    world = small_world()
    assert make_requests(world, 1, HERE) == make_requests(world, 1, HERE)
    assert make_requests(world, 1, HERE) != make_requests(world, 2, HERE)


def test_stated_means_and_rates_are_met() -> None:
    """Means of 20,000 requests with a CV of 1 are within three standard errors, 2.1%."""
    requests = make_requests(small_world(horizon_s=2000), 1, HERE)
    assert len(requests) == pytest.approx(20_000, rel=0.022)
    assert sum(one.input_tokens for one in requests) / len(requests) == pytest.approx(400.5, rel=0.022)
    assert sum(one.output_tokens for one in requests) / len(requests) == pytest.approx(50.5, rel=0.022)


def test_zipf_shares_of_two_models_are_two_to_one() -> None:
    requests = make_requests(
        small_world(horizon_s=1000, requests={"lengths": LENGTHS, "rate_per_s": 9, "shares": "zipf:1"}), 1, HERE
    )
    counts = Counter(one.model for one in requests)
    assert counts["chat"] / counts["mail"] == pytest.approx(2, rel=0.08)


def test_change_multiplies_the_rate_from_its_time_on() -> None:
    change = {"at_s": 500, "model": "chat", "factor": 10}
    world = small_world(
        horizon_s=1000, requests={"lengths": LENGTHS, "rates_per_s": {"chat": 1, "mail": 1}, "changes": [change]}
    )
    early, late = Counter(), Counter()
    for one in make_requests(world, 1, HERE):
        (early if one.arrival_s < 560 else late)[one.model] += 1
    assert late["chat"] / early["chat"] == pytest.approx(10, rel=0.15)
    assert late["mail"] / early["mail"] == pytest.approx(1, rel=0.2)


def test_trace_is_stretched_to_the_stated_rate() -> None:
    world = small_world(
        horizon_s=300, requests={"trace": "synthetic:azure-conv", "rate_per_s": 11, "shares": "even"}
    )
    assert len(make_requests(world, 1, HERE)) / 300 == pytest.approx(11, rel=0.3)  # it drifts by a quarter


def test_trace_shorter_than_the_horizon_is_an_error() -> None:
    world = small_world(horizon_s=3000, requests={"trace": "synthetic:azure-conv", "rate_per_s": 40})
    with pytest.raises(ConfigError, match="horizon"):
        make_requests(world, 1, HERE)


def test_model_is_called_once_it_can_be_ready() -> None:
    models = [{"name": "chat", "config": LLAMA_8B}, {"name": "mail", "config": LLAMA_8B, "deploy_at_s": 10}]
    requests = make_requests(small_world(models=models), 1, HERE)
    assert min(one.arrival_s for one in requests if one.model == "mail") >= 10 + 60


def test_load_is_that_of_the_requests() -> None:
    world = small_world()
    requests = make_requests(world, 1, HERE)
    load = load_of(world, requests)["chat"]
    own = [one for one in requests if one.model == "chat"]
    assert load.rate_per_s == len(own) / 20
    assert load.workload.longest_tokens == max(one.input_tokens + one.output_tokens for one in own)
    assert load.workload.input_tokens == round(sum(one.input_tokens for one in own) / len(own))
