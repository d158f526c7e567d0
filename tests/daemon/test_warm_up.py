"""Warm-up of workers: which requests it is made of, and that a worker is not ready before they are answered."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.devices import Device
from daemon.engines.base import Burst, Command
from daemon.engines.torch import TorchEngine
from daemon.engines.vllm.launch import warm_up_bursts
from daemon.probe import Health, Prober
from daemon.settings import DaemonSettings
from daemon.status import WorkerState
from daemon.worker import SupervisedWorker
from daemon.worker_process import Phase, WorkerProcess
from daemon.worker_spec import StageAssignment, WorkerSpec
from fingerprint.config import DeploymentConfig
from tests.daemon.engines.engine_conformance import LIMITS, ask
from tests.daemon.engines.standin import make_vllm
from tests.waiting import PATIENCE_S

SECONDS_A_TOKEN = 0.05
BURST = [7, 7, 7]  # tokens of the prompts that are sent to a worker of ``WarmedUp``


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


@pytest.mark.parametrize(("max_batch", "requests"), [(4, 4), (8, 8), (256, 8)])
def test_short_and_long_prompts_are_run_and_decoded_together_up_to_eight(max_batch, requests):
    limits = replace(LIMITS, max_batch=max_batch, max_batched_tokens=2048, max_context_tokens=8192)
    together = {burst for burst in warm_up_bursts(limits) if burst.requests > 1}
    assert together == {Burst(requests, 64, 4), Burst(requests, 1024, 4)}


class WarmedUp(TorchEngine):
    """An engine whose workers are sent one burst."""

    def command(self, *_arguments):
        return Command(argv=("true",))

    def warm_up_bursts(self, spec):
        return (Burst(requests=len(BURST), input_tokens=7, output_tokens=2),)


class Process(WorkerProcess):
    """A worker's folder, and a process that runs until it is ended; nothing is started."""

    phase = Phase.RUNNING

    def look(self):
        return self.phase

    def listens_on(self, port):
        return True

    def end(self, *, grace_s):
        self.phase = Phase.ENDED
        return True


class Answers(Prober):
    """A prober to which a worker is healthy, and has its completions wait until ``may_answer`` is set."""

    def __init__(self):
        super().__init__(timeout_s=1.0)
        self.is_health = Health.OK
        self.may_answer = asyncio.Event()
        self.asked, self.dropped = [], []  # tokens of prompts

    async def health(self, url):
        return self.is_health

    async def stats(self, url, read, token=None):
        return None

    async def completes(self, url, body, token):
        self.asked.append(len(body["prompt"]))
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.dropped.append(len(body["prompt"]))
            raise
        return True


class Clock:
    """The clock of what supervises a worker."""

    time = staticmethod(time.time)
    late_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.late_s


@dataclass
class Watched:
    """A worker that was just launched, the prober that it is looked at with, and the clock."""

    worker: SupervisedWorker
    prober: Answers
    clock: Clock

    async def look(self):
        await self.worker.tick(self.prober)

    async def begin(self):
        """Have the first burst sent."""
        await self.look()
        await until(lambda: self.prober.asked == BURST)

    async def is_dropped(self):
        await until(lambda: self.prober.dropped == BURST)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    """``supervise(what, **settings)``: run ``what`` with a worker that was just launched."""
    clock = Clock()
    monkeypatch.setattr("daemon.worker.time", clock)
    monkeypatch.setattr("daemon.worker_process.spawn_detached", lambda *_: None)
    device = Device(device_id="cpu:0", index=0, kind="cpu", name="a CPU", total_bytes=2**30)
    spec = WorkerSpec(
        worker_id="w1",
        served_model="m",
        checkpoint=str(tmp_path),
        config=DeploymentConfig(),
        stages=(StageAssignment(device_ids=("cpu:0",), num_layers=2),),
        limits=LIMITS,
        port=1,
        ends_at=time.time() + 3600,
    )

    def run(what, **settings):
        async def supervised():
            process = Process(tmp_path / "workers" / "w1")
            worker = SupervisedWorker(
                spec,
                WarmedUp(),
                process,
                DaemonSettings(home=tmp_path, **settings),
                {"cpu:0": device},
                lambda _: None,
                fixed_port=True,
            )
            await worker.launch()
            await asyncio.wait_for(what(Watched(worker, Answers(), clock)), PATIENCE_S)

        asyncio.run(supervised())

    return run


class TestAWorkerInItsWarmUp:
    def test_requests_of_a_burst_are_sent_at_once_and_it_is_ready_once_they_are_answered(self, supervise):
        async def watch(watched):
            await watched.begin()
            assert watched.worker.state() is WorkerState.STARTING
            watched.prober.may_answer.set()
            await until(lambda: watched.worker.state() is WorkerState.READY)

        supervise(watch)

    def test_the_time_of_a_start_ends_with_the_first_healthy_answer(self, supervise):
        async def watch(watched):
            await watched.begin()
            watched.clock.late_s = 2 * DaemonSettings.start_timeout_s
            await watched.look()
            assert watched.worker.state() is WorkerState.STARTING
            assert (watched.worker.process.phase, watched.worker.error) == (Phase.RUNNING, None)

        supervise(watch)

    def test_it_is_ready_after_the_time_of_a_warm_up_though_nothing_was_answered(self, supervise):
        async def watch(watched):
            await watched.begin()
            await until(lambda: watched.worker.state() is WorkerState.READY)
            assert watched.prober.dropped == BURST
            assert (watched.worker.restarts, watched.worker.error) == (0, None)

        supervise(watch, warm_up_s=1e-3)


async def stop(watched):
    await watched.worker.stop()


async def let_go(watched):
    watched.worker.let_go()


async def exits(watched):
    watched.worker.process.phase = Phase.ENDED
    await watched.look()


async def is_silent_for_long(watched):
    watched.prober.is_health = Health.SILENT
    watched.clock.late_s = 2 * DaemonSettings.unresponsive_s
    await watched.look()
    assert watched.worker.process.phase is Phase.ENDED


async def has_had_its_time(watched):
    watched.clock.late_s = 2 * 3600
    await watched.look()
    assert watched.worker.process.phase is Phase.ENDED


@pytest.mark.parametrize("end", [stop, let_go, exits, is_silent_for_long, has_had_its_time])
def test_a_worker_that_is_ended_or_let_go_is_sent_no_more_of_its_warm_up(supervise, end):
    async def watch(watched):
        await watched.begin()
        await end(watched)
        await watched.is_dropped()

    supervise(watch)


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

    def test_a_daemon_that_adopts_it_in_its_warm_up_begins_that_anew(self, vllm_node, until, tmp_path):
        may_answer = tmp_path / "may-answer"
        (vllm_node.checkpoint / "behaviour.json").write_text(json.dumps({"token_file": str(may_answer)}))
        bursts = launch(vllm_node)
        until(lambda: _is_healthy(vllm_node.client.worker("w1").url))
        before = vllm_node.client.worker("w1")
        until(lambda: _steps(before) == 1)  # the first prompt's; no token is made
        vllm_node.signal_daemon(signal.SIGKILL)
        vllm_node.start(real_engines=True, cpu_devices=None)
        assert vllm_node.client.worker("w1").state is WorkerState.STARTING
        may_answer.touch()
        after = vllm_node.wait("w1", WorkerState.READY)
        assert (after.pid, after.restarts) == (before.pid, 0)
        assert _steps(after) >= 1 + sum(burst.requests * (1 + burst.output_tokens) for burst in bursts)


def _is_healthy(url):
    try:
        return ask(url, "/health")[0] == 200
    except OSError:
        return False


def _steps(status):
    text = ask(status.url, "/metrics", token=status.token)[1].decode()
    (line,) = [line for line in text.splitlines() if line.startswith("vllm:iteration_tokens_total_count")]
    return float(line.rsplit(" ", 1)[1])
