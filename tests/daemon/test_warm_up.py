"""Warm-up of workers: which requests it is made of, and that a worker is not ready before they are answered."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engines.vllm.launch import warm_up_bursts
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment
from fingerprint.config import DeploymentConfig
from tests.daemon.engines.engine_conformance import LIMITS, ask
from tests.daemon.engines.standin import make_vllm

SECONDS_A_TOKEN = 0.05


@given(
    max_batch=st.integers(1, 512),
    max_batched_tokens=st.integers(1, 65_536),
    max_context_tokens=st.integers(4, 200_000),
)
def test_every_request_keeps_the_limits(max_batch, max_batched_tokens, max_context_tokens):
    limits = replace(
        LIMITS,
        max_batch=max_batch,
        max_batched_tokens=max_batched_tokens,
        max_context_tokens=max_context_tokens,
    )
    for burst in warm_up_bursts(limits):
        assert 1 <= burst.requests <= max_batch
        assert burst.input_tokens >= 1
        assert burst.input_tokens + burst.output_tokens <= max_context_tokens


def test_each_power_of_two_of_a_step_is_run_and_one_token_less():
    limits = replace(LIMITS, max_batch=8, max_batched_tokens=2048, max_context_tokens=8192)
    alone = {burst.input_tokens for burst in warm_up_bursts(limits) if burst.requests == 1}
    assert alone == {1} | {size - less for size in (16, 32, 64, 128, 256, 512, 1024, 2048) for less in (0, 1)}


@pytest.fixture
def vllm_node(node, tmp_path, tiny_checkpoint):
    node.offer_gpus(tmp_path / "nvml")
    python = make_vllm(tmp_path / "vllm-env")
    node.extra_env["ISERVE_VLLM_PYTHON"] = str(python)
    shutil.copytree(tiny_checkpoint("llama"), node.checkpoint, dirs_exist_ok=True)
    return node


def launch(node):
    node.start(real_engines=True, cpu_devices=None)
    stage = StageAssignment(device_ids=("GPU-aaaa",), num_layers=4)
    limits = replace(LIMITS, max_context_tokens=48)
    node.client.launch(
        node.spec(
            "w1", config=DeploymentConfig(engine="vllm"), stages=(stage,), limits=limits, served_model="tiny"
        )
    )
    return warm_up_bursts(limits)


@pytest.mark.process
class TestAWorkerOfVllm:
    def test_it_is_healthy_before_it_is_ready(self, vllm_node):
        (vllm_node.checkpoint / "behaviour.json").write_text(json.dumps({"token_s": SECONDS_A_TOKEN}))
        bursts = launch(vllm_node)
        seen = False
        while not seen:  # healthy, and only then not ready
            status = vllm_node.client.worker("w1")
            assert status.state is WorkerState.STARTING
            seen = _is_healthy(status.url) and vllm_node.client.worker("w1").state is WorkerState.STARTING
        ready = vllm_node.wait("w1", WorkerState.READY)
        assert _steps(ready) >= sum(burst.output_tokens for burst in bursts if burst.requests == 1)
        assert "warmed up" in vllm_node.daemon_log

    def test_a_daemon_that_adopts_it_does_not_warm_it_up_again(self, vllm_node):
        launch(vllm_node)
        before = vllm_node.wait("w1", WorkerState.READY)
        steps = _steps(before)
        assert steps > 0
        vllm_node.signal_daemon(signal.SIGKILL)
        vllm_node.start(real_engines=True, cpu_devices=None)
        after = vllm_node.wait("w1", WorkerState.READY)
        assert after.pid == before.pid
        assert _steps(after) == steps


def _is_healthy(url):
    try:
        return ask(url, "/health")[0] == 200
    except OSError:
        return False


def _steps(status):
    text = ask(status.url, "/metrics", token=status.token)[1].decode()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_count")]
    return float(line.rsplit(" ", 1)[1])
