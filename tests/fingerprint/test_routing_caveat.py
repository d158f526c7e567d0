"""A profile of a mixture says how tokens fell on its experts, to the estimator and to a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.measurements import Profile
from fingerprint.profile_checks import routing_caveat
from iserve.planning.estimator_factory import estimator_for
from tests.bench.accuracy import RESULTS, load


@pytest.fixture(scope="module")
def recorded() -> dict[str, Profile]:
    """Return the profiles whose routing was recorded."""
    return {one.model: one.profile for one in load(RESULTS / "families-h200-vllm-0.33")}


def routed(profile: Profile, routing: str) -> Profile:
    memory = (replace(p, ranks=tuple(replace(r, expert_routing=routing) for r in p.ranks)) for p in profile.memory)
    return replace(profile, memory=tuple(memory))


def test_a_dense_model_has_none(recorded: dict[str, Profile]) -> None:
    assert routing_caveat(recorded["gemma-2-9b"]) is None


@pytest.mark.parametrize("model", ["OLMoE-1B-7B-0924", "gpt-oss-20b", "DeepSeek-V2-Lite"])
def test_a_mixture_tells_one_for_each_routing(recorded: dict[str, Profile], model: str) -> None:
    profile = recorded[model]
    uniform = routing_caveat(profile)
    by_routing = {routing: routing_caveat(routed(profile, routing)) for routing in ("uniform", "weights", "")}
    assert by_routing["uniform"] == uniform
    assert None not in by_routing.values()
    assert len(set(by_routing.values())) == 3
    assert uniform in estimator_for(profile).warnings
