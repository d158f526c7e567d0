"""The worker of a profile takes only memory without a promise, and the cause of its engine's death is reported."""

from __future__ import annotations

import contextlib
import http.server
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from daemon.engines.external import PROFILING_PATH
from daemon.engines.vllm.adapter import VllmEngine
from daemon.monitor import Monitor, WorkerUse
from daemon.nvml import NvmlDevices
from daemon.profile_client import LOAD_MARK, WorkerProfileSession
from daemon.status import NodeStatus, WorkerState
from daemon.worker_spec import StageAssignment, WorkerLimits, WorkerSpec
from fingerprint.config import DeploymentConfig
from fingerprint.errors import EngineError, InfeasibleError
from iserve.controller.daemon_workers import start_profiling_worker
from iserve.controller.profiling import last_words, within_what_is_free
from tests.daemon import fake_nvml
from tests.daemon.conftest import Node
from tests.daemon.stranger import Stranger
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S, wait_until

GIB = 2**30
TOTAL = 48 * GIB


def spec(
    *device_ids: str, memory_bytes: int = 0, worker_id: str = "profile", profiling: bool = True
) -> WorkerSpec:
    """A worker that holds the whole of each of its devices' share."""
    return WorkerSpec(
        worker_id=worker_id,
        served_model="m",
        checkpoint="/m",
        config=DeploymentConfig(pp=len(device_ids)),
        stages=tuple(StageAssignment(device_ids=(device_id,), num_layers=1) for device_id in device_ids),
        limits=WorkerLimits(
            max_batch=1,
            max_batched_tokens=64,
            max_context_tokens=64,
            kv_tokens=64,
            memory_bytes_per_device=memory_bytes,
        ),
        profiling=profiling,
    )


@pytest.fixture
def nvml() -> Iterator[ModuleType]:
    gpus = [replace(gpu) for gpu in fake_nvml.GPUS]
    yield fake_nvml
    fake_nvml.GPUS[:] = gpus
    fake_nvml.FAILING.clear()


def use(number: int, promised: int, used: int, *, ready: bool) -> WorkerUse:
    """A worker on the first GPU whose process the driver lists."""
    return WorkerUse(
        worker_id=f"w{number}",
        pid=100 + number,
        slots={"GPU-aaaa": 1},
        promised_bytes={"GPU-aaaa": promised},
        pids=frozenset({100 + number}),
        ready=ready,
    )


shares = st.tuples(st.integers(0, 12), st.floats(0, 1), st.booleans())  # GiB promised, part in use, ready


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(workers=st.lists(shares, max_size=4), strangers_gib=st.integers(0, 20))
def test_no_promise_to_others_is_ever_given_to_a_profile(
    nvml: ModuleType, workers: list[tuple[int, float, bool]], strangers_gib: int
) -> None:
    """All promised memory fits next to the profile, whatever part of it is used by now."""
    uses, processes = [], {7: strangers_gib * GIB}
    for number, (gib, part, ready) in enumerate(workers):
        promised = gib * GIB
        processes[100 + number] = int(part * promised)
        uses.append(use(number, promised, processes[100 + number], ready=ready))
    in_use = min(TOTAL, sum(processes.values()))
    nvml.GPUS[0] = replace(nvml.GPUS[0], used=in_use, processes=processes)
    source = NvmlDevices.open(nvml)
    assert source is not None
    monitor = Monitor(source)
    monitor.read()
    node = NodeStatus(node_id="n", observed_at=0.0, devices=monitor.statuses(uses), workers=())
    taken = within_what_is_free(spec("GPU-aaaa"), node).limits.memory_bytes_per_device
    promised = sum(gib * GIB for gib, *_ in workers)
    left = TOTAL - strangers_gib * GIB - promised
    assert taken <= max(0, left)
    assert taken == pytest.approx(0.9 * max(0, left), abs=2)
    source.close()


def test_the_fullest_of_its_gpus_decides(nvml: ModuleType) -> None:
    nvml.GPUS[1] = replace(nvml.GPUS[1], used=38 * GIB, processes={7: 38 * GIB})
    source = NvmlDevices.open(nvml)
    assert source is not None
    monitor = Monitor(source)
    monitor.read()
    node = NodeStatus(node_id="n", observed_at=0.0, devices=monitor.statuses([]), workers=())
    assert within_what_is_free(spec("GPU-aaaa", "GPU-bbbb"), node).limits.memory_bytes_per_device == 9 * GIB
    source.close()


@pytest.mark.process
def test_the_daemon_counts_a_profile_beside_a_deployment(tmp_path: Path) -> None:
    """A real daemon over the strict NVML: 20 GiB of 48 are promised to a worker that still loads."""
    node = Node(tmp_path / "home")
    node.offer_gpus(tmp_path / "nvml")
    try:
        client = node.start(cpu_devices=None)
        node.behave(slow_start_s=600)
        deployed = replace(
            spec("GPU-aaaa", memory_bytes=20 * GIB, worker_id="deployed", profiling=False),
            checkpoint=str(node.checkpoint),
        )
        client.launch(deployed)
        profile = within_what_is_free(replace(spec("GPU-aaaa"), checkpoint=str(node.checkpoint)), client.node())
        assert profile.limits.memory_bytes_per_device == int(0.9 * 28 * GIB)
        client.launch(profile)
        first = client.node().devices[0]
        assert first.free_bytes == pytest.approx(2.8 * GIB, abs=4)
        with pytest.raises(InfeasibleError, match=r"2\.80 GiB are free"):
            client.launch(replace(deployed, worker_id="more"))
        client.stop("profile")
        assert client.node().devices[0].free_bytes == 28 * GIB
        assert client.worker("deployed").state is WorkerState.STARTING
        assert client.node().driver == "570.86.15"
    finally:
        node.clear()


# --- last words ------------------------------------------------------------------------------------------------

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory."
CORE_FAILED = (
    "vLLM did not start: RuntimeError: Engine core initialization failed. See root cause above. "
    "Failed core proc(s): {}"
)
EARLIER = (
    f"{LOAD_MARK} /f/2-layers 16bit 16bit\n(EngineCore_0 pid=7) ERROR 11-21 12:00:00 [core.py:9] {OUT_OF_MEMORY}\n"
)
NOW = f"{LOAD_MARK} /f/2-layers fp8 16bit\nINFO 11-21 12:01:00 [core.py:1] Initializing a V1 LLM engine\n"


def said(log: str, error: str = CORE_FAILED) -> str:
    return str(last_words(VllmEngine(), spec("GPU-aaaa"), EngineError(error), log))


def test_the_log_knows_what_the_worker_was_not_told(golden: Golden) -> None:
    """vLLM's own error only says that its engine core failed; the core's words are in the log."""
    words = said(EARLIER)
    golden("controller", words)


def test_only_the_last_start_is_asked(golden: Golden) -> None:
    words = said(f"{EARLIER}{NOW}(EngineCore_0 pid=8) ValueError: No kernel for fp8 here\n")
    golden("controller", words)
    assert "OutOfMemory" not in words


def test_where_the_log_knows_nothing_the_worker_s_own_word_stands(golden: Golden) -> None:
    golden("controller", said(NOW, "vLLM did not start: TypeError: unexpected keyword argument 'x'"))
    assert "Engine core initialization failed" not in said(NOW, "vLLM did not start: TypeError: bad")


def test_the_worker_prints_the_mark_that_the_controller_looks_for() -> None:
    """The worker cannot import it: it runs in the engine's interpreter."""
    base = (Path(PROFILING_PATH) / "iserve_profiling" / "base.py").read_text()
    assert f'LOAD_MARK = "{LOAD_MARK}"' in base


class HungUp:
    """Worker that no longer listens; its watcher sees its end at the fourth look."""

    url, token = "http://127.0.0.1:9", None
    looks = 0

    def failure(self) -> str | None:
        self.looks += 1
        return "worker profile (vllm) ended: exit code -9; last words: Killed" if self.looks > 3 else None

    def stop(self) -> None: ...


def test_a_worker_that_hung_up_is_given_a_moment_to_be_seen_dead(golden: Golden) -> None:
    """The daemon reports why it ended, at its next look; a closed port alone shows nothing."""
    with golden.raises("controller", EngineError):
        WorkerProfileSession(HungUp(), call_timeout_s=PATIENCE_S).memory()


class Trickle(http.server.BaseHTTPRequestHandler):
    """Answers with a byte now and then, for far longer than anybody waits."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1000):
                self.wfile.write(b" ")
                time.sleep(0.01)

    def log_message(self, *_: object) -> None: ...


def test_a_worker_whose_answer_does_not_end_is_given_up(golden: Golden) -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trickle) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        handle = HungUp()
        handle.url, handle.looks = f"http://127.0.0.1:{server.server_port}", -(10**9)
        with golden.raises("controller", EngineError):
            WorkerProfileSession(handle, call_timeout_s=0.3).memory()
        server.shutdown()


@pytest.mark.process
def test_a_profile_sends_nothing_to_a_stranger_on_its_worker_s_port(tmp_path: Path) -> None:
    node = Node(tmp_path / "home")
    node.behave(bind_file=str(tmp_path / "loaded"))
    stranger = Stranger()
    try:
        node.start()
        with ThreadPoolExecutor(1) as pool:
            started = pool.submit(start_profiling_worker, lambda: node.client, node.spec(), 60.0)
            wait_until(node.client.workers)
            with stranger.listening(node.client.worker("w1").spec.port):
                wait_until(lambda: node.client.worker("w1").error)
                assert not started.done()
            (tmp_path / "loaded").touch()
            assert started.result().url == node.client.worker("w1").url
        assert set(stranger.asked) == {("/health", None)}
    finally:
        node.clear()


@pytest.mark.process
def test_a_profiling_worker_that_does_not_serve_in_time_says_why_and_is_ended(
    tmp_path: Path, golden: Golden
) -> None:
    node = Node(tmp_path / "home")
    node.behave(slow_start_s=600)
    try:
        node.start()
        with golden.raises("controller", EngineError):
            start_profiling_worker(lambda: node.client, node.spec(), 0.3)
        assert node.client.worker("w1").state is WorkerState.STOPPED
    finally:
        node.clear()
