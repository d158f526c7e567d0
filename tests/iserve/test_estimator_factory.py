"""Estimators of profiles: the roofline that scales a profile is that of the profile's own engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from daemon.engines.registry import capabilities_for, get_engine
from fingerprint.config import DeploymentConfig, WeightFormat, Workload
from fingerprint.estimators.adapter_slots import added_step_s, kernel_step_s, variant_cost
from fingerprint.estimators.fingerprinted import FingerprintedEstimator
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import ADAPTER_KERNELS_COMPONENT, Profile
from iserve.planning.estimator_factory import estimator_for, profile_as
from iserve.planning.pipeline import datasheet_estimator
from tests.fingerprint.synthetic_machine import SyntheticMachine, llama, take_profile

WORK = Workload(1, 512, 17)


@pytest.fixture(scope="module")
def measured() -> Profile:
    """A profile of a GPU, with the times of a synthetic machine."""
    taken = take_profile(SyntheticMachine(llama()))
    return replace(taken, engine="torch", machine=replace(taken.machine, device=gpu_spec("a6000")))


@pytest.mark.parametrize(("engine", "eager"), [("torch", True), ("vllm", False)])
def test_what_was_not_measured_is_scaled_with_the_launches_of_its_own_engine(
    measured: Profile, engine: str, *, eager: bool
) -> None:
    profile = replace(measured, engine=engine)
    config = DeploymentConfig(tp=4, weights=WeightFormat.INT8, engine=engine)
    spec, gpu = profile.spec, profile.machine.device
    found = estimator_for(profile).estimate(config, WORK)
    launched = FingerprintedEstimator(profile, datasheet_estimator(spec, gpu, capabilities_for("torch")))
    replayed = FingerprintedEstimator(profile, RooflineEstimator(spec, gpu))
    assert found == (launched if eager else replayed).estimate(config, WORK)
    if eager:
        assert found.tpot_s != replayed.estimate(config, WORK).tpot_s


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_profile_says_whose_kernels_compute_adapters(measured: Profile, *, has_kernels: bool) -> None:
    """A datasheet's estimate goes by the engine's table."""
    machine = measured.machine
    if has_kernels:
        machine = replace(machine, versions=(*machine.versions, (ADAPTER_KERNELS_COMPONENT, "iserve")))
    profile = replace(measured, engine="vllm", machine=machine)
    table = replace(get_engine("vllm").capabilities(), adapter_kernels=has_kernels)
    config = DeploymentConfig(engine="vllm", adapter_slots=32, adapter_rank=16)
    layers = profile.spec.num_layers
    expected = kernel_step_s(layers, 32, 8, 16) if has_kernels else added_step_s(layers, 32, 8, 32)
    for estimator in (estimator_for(profile), datasheet_estimator(profile.spec, machine.device, [table])):
        cost = variant_cost(estimator, profile.spec, config)
        assert cost is not None
        assert cost.step_s(32, 8).value == expected


def test_a_profile_of_text_alone_serves_a_model_with_its_towers(measured: Profile) -> None:
    """The times are those of the text; the towers lie on every stage, divided over its GPUs."""
    params = 10_000_000
    with_towers = replace(
        measured.spec, embedding_params=measured.spec.embedding_params + params, tower_params=params
    )
    assert with_towers.text_alone == measured.spec
    whole = profile_as(with_towers, measured)
    for tp, pp in ((1, 1), (2, 1), (1, 2)):
        config = DeploymentConfig(tp=tp, pp=pp, engine="torch")
        text, found = (estimator_for(one).estimate(config, WORK) for one in (measured, whole))
        assert (found.ttft_s, found.tpot_s, found.measured_config) == (
            text.ttft_s,
            text.tpot_s,
            text.measured_config,
        )
        more_bytes = [
            more.total_bytes - less.total_bytes
            for more, less in zip(found.memory.stages((1,) * pp), text.memory.stages((1,) * pp), strict=True)
        ]
        assert more_bytes == [2 * params // tp] * pp
    assert profile_as(measured.spec, measured) is measured
