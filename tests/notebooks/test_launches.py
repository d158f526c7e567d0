"""Figures 8 and 15: the equation where it was solved, and what a profile launches."""

from __future__ import annotations

import pytest

from fingerprint.config import WeightFormat, even_split
from fingerprint.estimators.roofline import RooflineEstimator
from notebooks.figures.launches import alpaserve, cost_of, fingerprints
from notebooks.figures.layers import itemised_bytes, solved_terms
from notebooks.figures.setting import GPU, MODELS, WORKLOAD, config_of, spec_of


@pytest.mark.parametrize("degree", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("model", ["Llama-2-7b-hf", "falcon-40b"])
def test_the_equation_is_exact_where_it_was_solved(model: str, degree: tuple[int, int]) -> None:
    assert solved_terms(model).total_bytes(*degree) == pytest.approx(itemised_bytes(model, *degree), rel=1e-12)


@pytest.mark.parametrize("model", MODELS)
def test_m3_launches_what_m2_does_and_more(model: str) -> None:
    few, every = fingerprints(model), fingerprints(model, everywhere=True)
    assert set(few) < set(every)
    assert len(set(every)) == len(every)
    assert all(launch.num_layers in (launch.pp, 2 * launch.pp) for launch in every)


def test_a_format_takes_ten_fingerprints_where_tp_is_possible() -> None:
    """TP 1, 2, 4 and 8 at pp=1, and (1,2), at two depths; 15 degrees at two depths for M3."""
    of_one = [x for x in fingerprints("gpt-j-6b") if x.weights is WeightFormat.INT8]
    of_every = [x for x in fingerprints("gpt-j-6b", everywhere=True) if x.weights is WeightFormat.INT8]
    assert (len(of_one), len(of_every)) == (10, 30)


@pytest.mark.parametrize("model", MODELS)
def test_alpaserve_launches_whole_models_that_fit(model: str) -> None:
    spec = spec_of(model)
    estimator = RooflineEstimator(spec, GPU)
    plain, full = alpaserve(model), alpaserve(model, full=True)
    assert set(plain) <= set(full)
    for launch in full:
        memory = estimator.estimate(config_of(launch.tp, launch.pp, launch.weights), WORKLOAD).memory
        assert memory.per_gpu_bytes(even_split(spec.num_layers, launch.pp)) <= GPU.memory_bytes


def test_costs_add_up_and_are_unknown_without_a_start() -> None:
    launches = fingerprints("gpt-j-6b")
    both = [cost_of("gpt-j-6b", part, 10.0) for part in (launches[:7], launches[7:])]
    whole = cost_of("gpt-j-6b", launches, 10.0)
    assert whole.time_s == pytest.approx(sum(part.time_s or 0.0 for part in both))
    assert whole.gpu_s == pytest.approx(sum(part.gpu_s or 0.0 for part in both))
    assert whole.most_gib == max(part.most_gib for part in both)
    assert cost_of("gpt-j-6b", launches, None).time_s is None
