"""Largest step of a worker, 2,048 tokens where that is no slower; plans, launches and simulations agree on it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from iserve.planning.launch_limits import SHORT_STEP_MEAN_PROMPT, SHORT_STEP_TOKENS, largest_step, launch_limits
from iserve.planning.pipeline import PlanOptions
from iserve.planning.verdict_text import plan_lines
from iserve.simulation.running import PlannedDeployer, idle_cluster, roofline_model
from tests.iserve.joint_plans import (
    LLAMA,
    MODELS,
    estimator_on,
    flags_of,
    hardware_on,
    planned,
    spec_of,
    wish,
    workers_of,
)
from traces.simulator.scenario import NotDeployed
from traces.simulator.step_model import Limits, tabulate

H200 = gpu_spec("h200")
ONE_GPU = DeploymentConfig(engine="vllm")
MEASURED = 8192
USUAL = Workload()
SERVED = Workload(256, 512, 128, longest_tokens=32_768)
DENSE = [MODELS[kind] for kind in ("dense", "window", "windows")]

workloads = st.builds(Workload, st.integers(1, 4096), st.integers(1, 30_000), st.integers(1, 4096))


def step_of(
    spec: ModelSpec | None = None,
    config: DeploymentConfig = ONE_GPU,
    planned: Workload = USUAL,
    served: Workload = SERVED,
    measured: int | None = MEASURED,
) -> int:
    return largest_step(spec or spec_of(LLAMA), config, planned, served, measured)


@pytest.mark.parametrize("name", DENSE)
def test_steps_are_short_where_most_prompts_fit_into_one(name: str) -> None:
    assert step_of(spec_of(name)) == SHORT_STEP_TOKENS == 2048
    assert step_of(spec_of(name), planned=Workload(1, 1477, 128)) == SHORT_STEP_TOKENS
    assert step_of(spec_of(name), planned=Workload(1, 1478, 128)) == MEASURED
    assert step_of(spec_of(name), measured=None) == SHORT_STEP_TOKENS, "datasheets know no step"


@pytest.mark.parametrize(
    "config",
    [
        replace(ONE_GPU, tp=2),
        replace(ONE_GPU, pp=2),
        replace(ONE_GPU, draft_tokens=3),
        replace(ONE_GPU, adapter_slots=4, adapter_rank=16),
        replace(ONE_GPU, engine="tensorrt-llm"),
    ],
    ids=["tp", "pp", "drafts", "adapters", "tensorrt-llm"],
)
def test_what_was_not_served_with_short_steps_keeps_the_measured_one(config: DeploymentConfig) -> None:
    assert step_of(config=config) == MEASURED


@pytest.mark.parametrize("kind", ["states", "latents"])
def test_experts_and_states_keep_the_measured_step(kind: str) -> None:
    spec = spec_of(MODELS[kind])
    assert spec.num_experts or spec.keeps_state
    assert step_of(spec) == MEASURED
    assert step_of(replace(spec_of(LLAMA), tower_params=10**6)) == MEASURED, "images may need a whole step"


@given(planned=workloads, more=workloads, measured=st.none() | st.integers(256, 16_384))
def test_a_step_is_never_longer_than_its_memory_nor_too_short_to_decode(
    planned: Workload, more: Workload, measured: int | None
) -> None:
    for config in (ONE_GPU, replace(ONE_GPU, tp=2)):
        usual = launch_limits(planned, "vllm", measured, served=more).max_batched_tokens
        assert more.batch <= step_of(config=config, planned=planned, served=more, measured=measured) <= usual


@pytest.mark.parametrize("name", DENSE)
def test_no_prompt_that_fits_is_slower_and_no_answer_waits_longer_for_prompts(name: str) -> None:
    """Times of the step model; a step that is full of prompts holds up the answers next to it."""
    estimator = estimator_on(name, H200)
    short, long = (
        tabulate(estimator, ONE_GPU, Limits(max_batch=64, max_context_tokens=8192, max_batched_tokens=step))
        for step in (SHORT_STEP_TOKENS, MEASURED)
    )
    fits = range(1, SHORT_STEP_TOKENS + 1)
    np.testing.assert_array_less([short.prompt_s(x) for x in fits], [1.001 * long.prompt_s(x) for x in fits])
    full = [one.mixed_s(one.limits.max_batched_tokens - 64, 0.0, 64, 1024) for one in (short, long)]
    assert full[0] < 0.4 * full[1]


@pytest.mark.parametrize("gpus", [1, 4])
@pytest.mark.parametrize("name", MODELS.values())
@pytest.mark.parametrize("options", [wish(), wish(rate=20.0), wish(workload=Workload(1, 4000, 128))])
def test_plan_launch_and_simulation_have_the_same_step(gpus: int, name: str, options: PlanOptions) -> None:
    hardware = hardware_on(f"h200:{gpus}")
    found = planned(hardware, options, name)
    workers = workers_of(found, options, name)
    deployer = PlannedDeployer(H200, [roofline_model("chat", spec_of(name), H200, options, "vllm")])
    simulated = deployer.all_replicas("chat", idle_cluster(H200, gpus))
    assert not isinstance(simulated, NotDeployed)
    assert found.document.capacity is not None
    (step,) = {worker.limits.max_batched_tokens for worker in workers}
    assert {one.steps.limits.max_batched_tokens for one in simulated} == {step}
    assert found.document.capacity.step_tokens == step
    assert flags_of(workers[0], hardware, spec_of(name))["max-num-batched-tokens"] == str(step)
    said = "\n".join(line for _, line in plan_lines(found.document))
    assert f"; steps of up to {step:,} tokens" in said
    is_dense = name in DENSE and workers[0].config.num_gpus == 1
    fits = options.workload.input_tokens <= SHORT_STEP_MEAN_PROMPT
    assert step == (SHORT_STEP_TOKENS if is_dense and fits else MEASURED)
