"""TensorRT-LLM's adapter under the real supervisor: a strict stand-in for ``trtllm-serve``, as real processes.

Not run on the real engine: what is shown here is that the adapter keeps to its documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest

from daemon.backoff import RestartPolicy
from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from daemon.monitor import Monitor
from daemon.nvml import NvmlDevices
from daemon.procfs import processes
from daemon.settings import DaemonSettings
from daemon.status import WorkerState, WorkerStatus
from daemon.supervisor import Supervisor
from daemon.worker_stats import WorkerStats
from daemon.worker_token import authorization
from tests.daemon.engines.engine_conformance import EngineConformance
from tests.daemon.engines.tensorrt_environment import (
    CONFIG,
    VARIABLE,
    make_checkpoint,
    make_spec,
    make_tensorrt_llm,
)
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tensorrt_llm(tmp_path_factory.mktemp("tensorrt-llm"))


@pytest.fixture
def engine(environment: Path, monkeypatch: pytest.MonkeyPatch) -> TensorRtLlmEngine:
    monkeypatch.setenv(VARIABLE, str(environment))
    return TensorRtLlmEngine()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "Tiny-Llama")


def behave(checkpoint: Path, **behaviour: object) -> None:
    (checkpoint / "stand_in.json").write_text(json.dumps({"metrics_wait_s": 0.1} | behaviour))


class TestTensorRtLlm(EngineConformance):
    engine = "tensorrt-llm"
    device = "GPU-aaaa"
    settings: ClassVar = {"cpu_devices": None}

    @pytest.fixture(scope="class")
    @classmethod
    def prepare(cls):
        def prepare(node, folder):
            node.offer_gpus(folder / "nvml")
            node.extra_env[VARIABLE] = str(make_tensorrt_llm(folder / "env"))
            (node.checkpoint / "tokenizer_config.json").write_text("{}")
            behave(node.checkpoint)

        return prepare


@contextlib.asynccontextmanager
async def node(
    home: Path, nvml: ModuleType, engine: TensorRtLlmEngine, **settings: object
) -> AsyncIterator[Supervisor]:
    """A supervisor over two GPUs; every worker is ended with it."""
    restart = RestartPolicy(max_starts=2, window_s=600.0, first_delay_s=0.05, max_delay_s=0.1)
    values = {"tick_s": 0.1, "stop_grace_s": 2.0, "restart": restart, "memory_free_timeout_s": 1.0} | settings
    source = NvmlDevices.open(nvml)
    assert source is not None
    supervisor = Supervisor(DaemonSettings(home=home, **values), Monitor(source), lambda name: engine)
    leave = asyncio.Event()
    await supervisor.open()
    loop = asyncio.create_task(supervisor.run(until=leave))
    try:
        yield supervisor
    finally:
        for worker in supervisor.workers():
            await supervisor.stop(worker.spec.worker_id)
        leave.set()
        await loop
        await supervisor.close()


async def in_state(supervisor: Supervisor, state: WorkerState, worker_id: str = "w1") -> WorkerStatus:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            status = supervisor.worker(worker_id)
            if status.state is state:
                return status
            ended = status.state in (WorkerState.FAILED, WorkerState.STOPPED)
            assert not ended, f"{status.state}: {status.error}\n{supervisor.log_path(worker_id).read_text()}"
            await asyncio.sleep(0.02)


Scene = Callable[[Supervisor], Coroutine[Any, Any, None]]


@pytest.fixture
def on_node(tmp_path: Path, fake_nvml: ModuleType, engine: TensorRtLlmEngine) -> Callable[..., None]:
    """Run a scene on a node of two GPUs."""

    def run(scene: Scene, **settings: object) -> None:
        async def play() -> None:
            async with node(tmp_path / "home", fake_nvml, engine, **settings) as supervisor:
                await scene(supervisor)

        asyncio.run(play())

    return run


async def ask(status: WorkerStatus, path: str, body: object = None) -> tuple[int, bytes]:
    def call() -> tuple[int, bytes]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | authorization(status.token)
        request = urllib.request.Request(status.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return await asyncio.to_thread(call)


def ranks(supervisor: Supervisor) -> frozenset[int]:
    file = supervisor.log_path("w1").parent / "ranks"
    return frozenset(map(int, file.read_text().split())) if file.exists() else frozenset()


def running(pids: frozenset[int]) -> frozenset[int]:
    return frozenset(stat.pid for stat in processes() if stat.pid in pids and not stat.is_gone)


async def failed(supervisor: Supervisor) -> WorkerStatus:
    async with asyncio.timeout(PATIENCE_S):
        while (status := supervisor.worker("w1")).state is not WorkerState.FAILED:
            await asyncio.sleep(0.02)
    return status


async def probed(supervisor: Supervisor, output_tokens: int = 0) -> WorkerStats:
    """Return what the supervisor's own probes have read, once it has so many tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while (stats := supervisor._workers["w1"]._sight.stats) is None or stats.output_tokens < output_tokens:
            await asyncio.sleep(0.02)
    return stats


def test_it_comes_up_serves_within_its_limits_and_leaves_nothing(on_node, engine, checkpoint):
    behave(checkpoint)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        status = await in_state(supervisor, WorkerState.READY)
        code, body = await ask(status, "/v1/completions", {"model": "m", "prompt": [1, 2, 3], "max_tokens": 4})
        answer = json.loads(body)
        assert (code, answer["usage"]["completion_tokens"]) == (200, 4)
        assert answer["model"] == "m"  # the name that was asked for, not the folder's
        # a sequence may have 100 tokens: the engine cuts what goes beyond, the proxy refuses where it can count
        code, body = await ask(status, "/v1/completions", {"prompt": [1] * 90, "max_tokens": 11})
        assert (code, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        assert "100 tokens" in json.loads(body)["error"]["message"]
        _, body = await ask(status, "/v1/completions", {"prompt": "word " * 90, "max_tokens": 50})
        assert json.loads(body)["usage"]["completion_tokens"] == 10
        # a text's length only the engine knows; its flat refusal is in the form that clients parse
        code, body = await ask(status, "/v1/completions", {"prompt": "word " * 100})
        assert (code, json.loads(body)["error"]["code"]) == (400, "context_length_exceeded")
        code, body = await ask(status, "/v1/completions", {"prompt": "a", "guided_json": "{}"})
        assert (code, "body.guided_json" in json.loads(body)["error"]["message"]) == (400, True)
        everything = supervisor._workers["w1"].process.pids() | ranks(supervisor)
        assert len(everything) >= 4  # wrapper, proxy, server, one rank
        await supervisor.stop("w1")
        assert not running(everything)

    on_node(scene)


def test_a_worker_that_is_stopped_finishes_what_it_answers(on_node, checkpoint):
    behave(checkpoint, token_s=0.05)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        status = await in_state(supervisor, WorkerState.READY)
        asked = asyncio.create_task(ask(status, "/v1/completions", {"prompt": "a", "max_tokens": 30}))
        async with asyncio.timeout(PATIENCE_S):
            while (await ask(status, "/stats"))[0] != 200:  # until it has begun
                await asyncio.sleep(0.01)
        await supervisor.stop("w1")
        code, body = await asked
        assert (code, json.loads(body)["usage"]["completion_tokens"]) == (200, 30)

    on_node(scene, stop_grace_s=PATIENCE_S)


def test_its_account_is_the_plans(on_node, engine, checkpoint):
    """The KV room that the engine itself reports is what the limits ask for: 8 sequences of 4 blocks of 32."""
    behave(checkpoint)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        status = await in_state(supervisor, WorkerState.READY)
        await ask(status, "/v1/completions", {"prompt": [1] * 20, "max_tokens": 5})
        stats = await probed(supervisor, output_tokens=5)  # a probe may have read it in the middle
        assert (stats.model, stats.kv_tokens_total) == ("m", 1024)
        assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (20, 5, 5)
        assert [busy.busy_s for busy in stats.busy] == pytest.approx([0.005])

    on_node(scene)


def test_an_engine_that_reports_nothing_is_watched_all_the_same(on_node, engine, checkpoint):
    behave(checkpoint, no_metrics=True)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        status = await in_state(supervisor, WorkerState.READY)
        await ask(status, "/v1/completions", {"prompt": [1], "max_tokens": 2})
        assert (await ask(status, engine.stats_path))[0] == 503
        assert supervisor.worker("w1").state is WorkerState.READY

    on_node(scene)


def test_an_uneven_pipeline_goes_on_exactly_its_gpus(on_node, engine, checkpoint, tmp_path):
    behave(checkpoint)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint, layers=(2, 4)))
        status = await in_state(supervisor, WorkerState.READY)
        environ = Path(f"/proc/{status.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=GPU-aaaa,GPU-bbbb" in environ
        await ask(status, "/v1/completions", {"prompt": [1] * 20, "max_tokens": 2})
        stats = await probed(supervisor)
        assert stats.kv_tokens_total == 1024  # the longer stage's room
        assert [busy.device_id for busy in stats.busy] == ["GPU-aaaa", "GPU-bbbb"]

    on_node(scene)


@pytest.mark.parametrize(
    "behaviour",
    [
        pytest.param({"fail": "out-of-memory"}, id="memory"),
        pytest.param({"fail": "cuda-malloc"}, id="kv-memory"),
        pytest.param({"fail": "worker-died"}, id="rank-died"),
        pytest.param({"fail": "worker-error"}, id="rank-error"),
        pytest.param({"fail": "unknown"}, id="unknown"),
        pytest.param({"port_is_stolen": True}, id="port-stolen"),
    ],
)
def test_each_documented_way_to_fail_is_told_with_its_fix(on_node, checkpoint, behaviour, golden: Golden):
    behave(checkpoint, **behaviour)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        status = await failed(supervisor)
        golden("engines", status.error)
        # Another process may have had the memory or the port: it is tried again, and given up.
        assert status.restarts == 1
        assert not supervisor._workers["w1"].process.pids()

    on_node(scene)


def test_an_architecture_that_the_engine_lacks_is_named(on_node, checkpoint, golden: Golden):
    """An architecture that our table does not know: the files are exchanged between the adapter's look and the
    start.
    """
    behave(checkpoint)
    other = json.dumps(CONFIG | {"architectures": ["BloomForCausalLM"]})

    class Late(TensorRtLlmEngine):
        def command(self, *arguments: Any) -> Any:
            command = super().command(*arguments)
            (checkpoint / "config.json").write_text(other)
            return command

    async def scene(supervisor: Supervisor) -> None:
        supervisor._engines = lambda name: Late()
        await supervisor.launch(make_spec(checkpoint))
        status = await failed(supervisor)
        golden("engines", status.error)
        assert status.restarts == 0

    on_node(scene)


def test_a_fixed_port_that_is_in_use_is_refused_before_the_engine_starts(on_node, checkpoint, golden: Golden):
    behave(checkpoint)

    async def scene(supervisor: Supervisor) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            await supervisor.launch(make_spec(checkpoint, port=taken.getsockname()[1]))
            status = await failed(supervisor)
        golden("engines", status.error)

    on_node(scene)


def test_a_worker_stopped_while_it_loads_leaves_no_rank(on_node, checkpoint):
    """The engine has no handler yet: it dies at once and forgets its ranks, which ignore SIGTERM."""
    behave(checkpoint, load_s=60)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        async with asyncio.timeout(PATIENCE_S):
            while not ranks(supervisor):
                await asyncio.sleep(0.02)
        assert supervisor.worker("w1").state is WorkerState.STARTING
        everything = supervisor._workers["w1"].process.pids() | ranks(supervisor)
        assert running(everything) == everything
        await supervisor.stop("w1")
        assert not running(everything)

    on_node(scene)


@pytest.mark.parametrize("killed", ["wrapper", "proxy", "server"])
def test_whichever_of_its_processes_is_killed_it_is_started_again(on_node, checkpoint, killed):
    """And nothing of the first is left: not the ranks, which are in sessions of their own and ignore SIGTERM."""
    behave(checkpoint)

    def parent(pid: int) -> int:
        return next(stat.parent_pid for stat in processes() if stat.pid == pid)

    async def scene(supervisor: Supervisor) -> None:
        await supervisor.launch(make_spec(checkpoint))
        first = await in_state(supervisor, WorkerState.READY)
        (rank,) = ranks(supervisor)
        server = parent(rank)
        chain = {"server": server, "proxy": parent(server), "wrapper": parent(parent(server))}
        assert chain["wrapper"] == first.pid
        everything = frozenset(chain.values()) | {rank}
        os.kill(chain[killed], signal.SIGKILL)
        async with asyncio.timeout(PATIENCE_S):
            while (status := await in_state(supervisor, WorkerState.READY)).pid == first.pid:
                await asyncio.sleep(0.02)
        assert status.restarts == 1
        assert not running(everything)

    on_node(scene)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("max_tokens", 10**9, id="max-tokens"),
        pytest.param("max_gpu_total_bytes", 0, id="bytes"),
        pytest.param("max_tokens", None, id="no-max-tokens"),
    ],
)
def test_each_of_the_two_kv_limits_alone_holds(on_node, checkpoint, key, value):
    """Either bound gives the planned room, should a release read the other differently."""
    behave(checkpoint)

    class Loosened(TensorRtLlmEngine):
        def command(self, *arguments: Any) -> Any:
            command = super().command(*arguments)
            options = json.loads(command.files[0][1])
            options["kv_cache_config"][key] = value
            return replace(command, files=((command.files[0][0], json.dumps(options)),))

    async def scene(supervisor: Supervisor) -> None:
        supervisor._engines = lambda name: Loosened()
        await supervisor.launch(make_spec(checkpoint))
        status = await in_state(supervisor, WorkerState.READY)
        await ask(status, "/v1/completions", {"prompt": [1] * 20, "max_tokens": 2})
        stats = await probed(supervisor)
        assert stats.kv_tokens_total == 1024

    on_node(scene)
