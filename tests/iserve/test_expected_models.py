"""Deployments that are to follow, named by their models: what a joint plan leaves them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fingerprint.codec import from_json, to_json
from fingerprint.errors import ConfigError
from iserve.api_types import DeployBody, ExpectedDeployment
from iserve.planning.joint_choice import JointChoice
from iserve.planning.joint_plan import chosen_plan
from iserve.planning.model_use import with_expected_specs
from iserve.planning.pipeline import ExpectedSpec, Hardware, PlanOptions
from placement.types import ClusterSnapshot, DeploymentState, ReplicaState
from planner.intent import IntentKind
from tests.iserve.command_line import Done, iserve, model
from tests.iserve.joint_plans import LLAMA, VLLM, estimator_on, hardware_on, spec_of, wish

__all__ = ["iserve", "model"]  # fixtures

LARGE, MEDIUM = "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-32B"


def chosen(name: str, hardware: Hardware, options: PlanOptions) -> JointChoice:
    spec = spec_of(name)
    _, choice = chosen_plan(spec, hardware, estimator_on(name, hardware.gpu), [VLLM.unprepared()], options)
    assert choice is not None, f"{name} finds a place"
    return choice


def after(hardware: Hardware, name: str, choice: JointChoice) -> Hardware:
    """Return ``hardware`` once ``choice`` runs there and has served nothing yet."""
    taken = {gpu.device_id: 0 for gpu in hardware.snapshot.gpus}
    for placement in choice.placements:
        for device in placement.device_ids:
            taken[device] += placement.stages[0].bytes_per_gpu
    gpus = tuple(replace(gpu, free_bytes=gpu.free_bytes - taken[gpu.device_id]) for gpu in hardware.snapshot.gpus)
    state = DeploymentState(
        name=name, model=name, wanted=len(choice.replicas), moving=False, waiting=0, requests_per_s=0.0,
        service_s=0.0, idle_s=0.0, steady_s=0.0, service=choice.service,
        replicas=tuple(
            ReplicaState(
                replica_id=f"{name}-{number}", placement=one.placement, ready=True, outstanding=0,
                max_batch=one.requests_at_once, kv_tokens=one.kv_tokens,
            )
            for number, one in enumerate(choice.replicas)
        ),
    )  # fmt: skip
    snapshot = ClusterSnapshot(gpus, (*hardware.snapshot.deployments, state))
    return replace(hardware, snapshot=snapshot)


def one_by_one(order: tuple[str, ...], options: PlanOptions) -> dict[str, JointChoice]:
    """Return the choice for each model, deployed in ``order`` on four H200s, each given those that follow."""
    hardware, found = hardware_on("h200:4"), {}
    for number, name in enumerate(order):
        later = tuple(ExpectedSpec(next_one, spec=spec_of(next_one)) for next_one in order[number + 1 :])
        found[name] = chosen(name, hardware, replace(options, expected_models=later))
        hardware = after(hardware, name, found[name])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", [IntentKind.MIN_COST, IntentKind.MIN_LATENCY])
@pytest.mark.parametrize("order", list(itertools.permutations((LLAMA, MEDIUM, LARGE))))
def test_whatever_the_order_each_has_gpus_of_its_own(order: tuple[str, ...], kind: IntentKind) -> None:
    """16 bits of 70B take two H200s, the rest one each: four are enough for all three."""
    found = one_by_one(order, wish(kind))
    devices = [set(placement.device_ids) for choice in found.values() for placement in choice.placements]
    assert sum(map(len, devices)) == len(set().union(*devices)) <= 4


def test_a_model_alone_takes_the_gpus_that_it_leaves_to_one_that_is_named() -> None:
    options = replace(wish(IntentKind.MIN_LATENCY), expect=1)
    alone = chosen(LLAMA, hardware_on("h200:2"), options)
    named = chosen(
        LLAMA, hardware_on("h200:2"), replace(options, expected_models=(ExpectedSpec(LARGE, spec=spec_of(LARGE)),))
    )
    held = {device for placement in named.placements for device in placement.device_ids}
    assert len({device for placement in alone.placements for device in placement.device_ids}) == 2
    assert len(held) == 1


def test_a_hot_one_to_follow_is_left_more_than_an_idle_one() -> None:
    def taken(rate: float) -> int:
        options = replace(
            wish(IntentKind.MIN_LATENCY, 40.0), expected_models=(ExpectedSpec(MEDIUM, rate, spec_of(MEDIUM)),)
        )
        choice = chosen(LLAMA, hardware_on("h200:4"), options)
        return len({device for placement in choice.placements for device in placement.device_ids})

    assert taken(40.0) < taken(0.01)


def test_names_are_looked_up_once_and_a_strange_one_is_an_error() -> None:
    asked = []

    def spec_by_name(name: str) -> object:
        asked.append(name)
        return spec_of(name)

    options = replace(wish(), expected_models=(ExpectedSpec(LLAMA), ExpectedSpec(MEDIUM, 2.0, spec_of(MEDIUM))))
    found = with_expected_specs(options, spec_by_name)  # type: ignore[arg-type]
    assert asked == [LLAMA]
    assert [one.spec for one in found.expected_models] == [spec_of(LLAMA), spec_of(MEDIUM)]
    assert found.expected_models[1].rate_per_s == 2.0


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate of m"):
        ExpectedDeployment(model="m", rate_per_s=rate)


def test_a_request_with_names_is_read_as_it_was_written() -> None:
    body = DeployBody(model="a", expected_models=(ExpectedDeployment(model="b", rate_per_s=2.5),))
    assert from_json(to_json(body), DeployBody, what="a body") == body
    assert body.given() == {"model": "a", "expected_models": ({"model": "b", "rate_per_s": 2.5},)}


def test_the_command_takes_models_with_and_without_a_rate(
    iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    asked = ("plan", model("Llama-2-7b"), "--gpus", "h200:2", "--intent", "min-latency", "--json")
    named = ("--expected-model", f"{model('Llama-2-70b')}=0.5", "--expected-model", model("Llama-2-13b"))
    joint = iserve(*asked, *named).document["joint"]
    assert joint["forecast"]["replicas"] == 1
    assert iserve(*asked, "--expected-deployments", "1").document["joint"]["forecast"]["replicas"] == 2
    bad = iserve(*asked, "--expected-model", f"{model('Llama-2-7b')}=often")
    assert bad.code == 2
    assert "--expected-model" in bad.err
    missing = iserve(*asked, "--expected-model", "no/such/model/here")
    assert missing.code == 1
    assert len(missing.err.splitlines()) == 1
