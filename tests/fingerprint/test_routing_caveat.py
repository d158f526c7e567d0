"""A profile of a mixture says how tokens fell on its experts, and what was counted, to estimator and plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.measurements import ExpertCount, Profile
from fingerprint.profile_checks import routing_caveat
from iserve.planning.estimator_factory import estimator_for
from tests.bench.accuracy import RESULTS, load

ROUTINGS = ("uniform", "weights", "normal_routing", "")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Profile]:
    """Return the profiles whose routing was recorded."""
    return {one.model: one.profile for one in load(RESULTS / "families-h200-vllm-0.33")}


def routed(profile: Profile, routing: str, count: ExpertCount | None = None) -> Profile:
    """Return the profile with another routing, and another count of experts where one is given."""
    memory = (
        replace(
            p,
            ranks=tuple(replace(r, expert_routing=routing, expert_count=count or r.expert_count) for r in p.ranks),
        )
        for p in profile.memory
    )
    return replace(profile, memory=tuple(memory))


def counted(choices: np.ndarray) -> ExpertCount:
    """Return what a worker tells of the choices of each expert by layer, (layers, experts)."""
    busiest = choices.max(1) / choices.mean(1)
    return ExpertCount(
        choices=int(choices.sum(1).min()),
        experts=choices.shape[1],
        layers=len(choices),
        busiest=float(busiest.mean()),
        busiest_layer=float(busiest.max()),
    )


def test_a_dense_model_has_none(recorded: dict[str, Profile]) -> None:
    assert routing_caveat(recorded["gemma-2-9b"]) is None


@pytest.mark.parametrize("model", ["OLMoE-1B-7B-0924", "gpt-oss-20b", "DeepSeek-V2-Lite"])
def test_a_mixture_tells_one_for_each_routing(recorded: dict[str, Profile], model: str) -> None:
    profile = recorded[model]
    uniform = routing_caveat(profile)
    by_routing = {routing: routing_caveat(routed(profile, routing)) for routing in ROUTINGS}
    assert by_routing["uniform"] == uniform
    assert None not in by_routing.values()
    assert len(set(by_routing.values())) == len(ROUTINGS)
    assert uniform in estimator_for(profile).warnings


def caveat_of(profile: Profile, count: ExpertCount) -> str:
    found = routing_caveat(routed(profile, "uniform", count))
    assert found is not None
    return found


@given(
    experts=st.integers(4, 256),
    each=st.integers(1, 8),
    tokens=st.sampled_from([512, 8192]),
    seed=st.integers(0, 99),
)
def test_even_chances_pass_for_uniform_and_a_normal_law_does_not(
    recorded: dict[str, Profile], experts: int, each: int, tokens: int, seed: int
) -> None:
    """Uneven chances are drawn as vLLM does: the logistic function of a normal draw, by the experts in order."""
    profile, chances = recorded["OLMoE-1B-7B-0924"], np.random.default_rng(seed)
    even = chances.multinomial(tokens * each, np.full(experts, 1 / experts), size=2)
    places = (experts / (1 + np.exp(-chances.standard_normal((2, tokens * each))))).astype(int)
    normal = np.stack([np.bincount(row, minlength=experts) for row in np.minimum(places, experts - 1)])
    assert "were not" not in caveat_of(profile, counted(even))
    for uneven in uneven_layers(even, normal, choices_of_each=tokens * each / experts):
        found = caveat_of(profile, counted(uneven))
        assert "were not" in found
        assert f"{counted(uneven).busiest_layer:.2f} times the mean" in found


def uneven_layers(even: np.ndarray, normal: np.ndarray, *, choices_of_each: float) -> Iterator[np.ndarray]:
    """Yield what few choices do not hide: layers that are all uneven, and seventeen of which one alone is."""
    if choices_of_each >= 64:
        yield normal
    if choices_of_each >= 256:
        yield np.concatenate([np.repeat(even, 8, axis=0), normal[:1]])
