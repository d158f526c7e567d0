"""Measurements of the fidelity bench before it plays a trace, on a worker of which all is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import NotMeasuredError
from fingerprint.families import read_config, read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.measurements import MachineInfo, Profile
from tests.bench import fidelity
from tests.bench.fidelity_steps import WholeSteps, whole_profile
from tests.daemon.torch_engine.conftest import DEMO
from tests.golden_words import Golden
from tests.iserve.replay.stand_in import stand_in
from traces.simulator.step_model import Limits

CONFIG = DeploymentConfig(engine="vllm")
WORK = Workload(8, 512, 128)
LIMITS = Limits(max_batch=8, max_context_tokens=640, max_batched_tokens=2048)


def profile() -> Profile:
    machine = MachineInfo(
        device=gpu_spec("h200-sxm"), num_devices=1, cores_per_device=8, cpu_model="cpu", driver="0", versions=()
    )
    return Profile(
        model="demo",
        spec=read_spec(read_config(DEMO)),
        engine="vllm",
        machine=machine,
        created_at="2026-11-22T00:00:00+00:00",
        budget_s=1.0,
        spent_s=1.0,
        complete=True,
        memory=(),
        timing=(),
    )


def step_s(batch: int, context: float) -> float:
    return 0.005 + 1e-5 * batch + 1e-7 * batch * context


def burst_s(work: Workload) -> float:
    """Prompts at 20,000 tokens/s, then a step each."""
    steps = work.output_tokens - 1
    context = work.input_tokens + work.output_tokens / 2
    return 0.006 + work.batch * work.input_tokens / 20_000 + 0.004 + steps * step_s(work.batch, context)


def whole(burst) -> Profile:
    return whole_profile(burst, profile(), CONFIG, WORK, beside_s=0.006, max_seconds=0.0)


def test_steps_of_a_known_worker_are_found_between_the_points() -> None:
    steps = WholeSteps(whole(burst_s))
    for batch, prompt in ((1, 100), (3, 300), (8, 500)):
        found = steps.estimate(CONFIG, Workload(batch, prompt, 33)).tpot_s.value
        assert found == pytest.approx(step_s(batch, prompt + 16.5), rel=0.02)


def test_an_engine_that_keeps_prompts_is_found_out(golden: Golden) -> None:
    """Prompts are never computed twice by vLLM: the burst with the longer answer ended the sooner."""
    seen: set[tuple[int, int]] = set()

    def kept(work: Workload) -> float:
        key = (work.batch, work.input_tokens)
        known = key in seen and work.output_tokens > 1  # the first answer of a round finds them pushed out
        seen.add(key)
        return burst_s(replace(work, input_tokens=1) if known else work)

    with golden.raises("controller", NotMeasuredError):
        WholeSteps(whole(kept))


def test_no_burst_sends_a_prompt_again() -> None:
    with stand_in() as server:
        target = fidelity.Target(url=server.url, model="fine", config=CONFIG, workload=WORK, limits=LIMITS)
        for _ in range(3):
            fidelity.streamed_burst_s(target, Workload(2, 64, 1))
    assert len({tuple(body["prompt"]) for body in server.bodies}) == 6
