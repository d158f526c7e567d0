"""Profiling a real worker process from a plain thread."""

from __future__ import annotations

import asyncio
import http.client
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from daemon.profile_client import WorkerProfileTarget
from daemon.profile_messages import ProfileLoad, ProfileRun, ProfileVariants
from daemon.torch_engine.api import profile_api
from fingerprint.codec import to_json
from fingerprint.config import KvFormat, SlotFormat, WeightFormat
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    EngineError,
    InfeasibleError,
    NotFoundError,
    UnavailableError,
)
from fingerprint.random_variants import write_random_variant
from fingerprint.variant_measurements import VariantKind
from tests.golden_words import Golden

FORMATS = {"weights": WeightFormat.BITS16, "kv": KvFormat.BITS16}


@pytest.fixture(scope="module")
def target(launch, module_spec, demo_checkpoint: Path) -> Iterator[WorkerProfileTarget]:
    with WorkerProfileTarget(
        launch, checkpoint=demo_checkpoint, device_ids=("cpu:0", "cpu:1"), limits=module_spec().limits
    ) as target:
        yield target


@pytest.fixture(scope="module")
def session(target: WorkerProfileTarget) -> Iterator:
    target.machine()
    session = target.open(tp=1, pp=1)
    yield session
    session.close()


@pytest.fixture
def loaded(session, demo_checkpoint: Path):
    session.load(demo_checkpoint, **FORMATS, layers_per_stage=(8,), max_batch=4, max_context_tokens=96)
    return session


def test_the_machine(target: WorkerProfileTarget) -> None:
    machine = target.machine()
    assert machine.num_devices == 2
    assert machine.cores_per_device >= 1
    assert machine.cpu_model
    assert {"engine", "torch", "transformers", "python"} <= dict(machine.versions).keys()
    assert machine.device.memory_bytes_per_s > 0


def test_nothing_runs_before_a_load(launch, module_spec, session) -> None:
    with pytest.raises(UnavailableError, match="nothing is loaded"):
        session.run(batch=1, input_tokens=1, output_tokens=1)


def test_a_reading_adds_up(loaded) -> None:
    """Ten steps of decoding and three of prefill (4 x 24 tokens, 32 a step)."""
    short = loaded.run(batch=4, input_tokens=24, output_tokens=1)
    long = loaded.run(batch=4, input_tokens=24, output_tokens=11)
    for reading in (short, long):
        assert 0 < reading.device_s < reading.e2e_s
        assert reading.host_s == pytest.approx(reading.e2e_s - reading.device_s)
        assert reading.handover_s == 0
    assert long.device_s > short.device_s


def test_memory_is_itemised(loaded) -> None:
    loaded.run(batch=4, input_tokens=24, output_tokens=1)
    (rank,) = loaded.memory()
    # 8 layers x 2 (K, V) x 2 KV heads x 32 x 2 bytes x 4 slots of 96 tokens
    assert rank.kv_bytes == 8 * 2 * 2 * 32 * 2 * 4 * 96
    assert rank.weights_bytes > 3_000_000
    assert rank.activation_peak_bytes > 0
    assert rank.runtime_bytes > 0


def test_a_load_replaces_the_one_before(loaded, demo_checkpoint: Path) -> None:
    before = loaded.memory()[0].kv_bytes
    loaded.load(demo_checkpoint, **FORMATS, layers_per_stage=(8,), max_batch=2, max_context_tokens=96)
    assert loaded.memory()[0].kv_bytes == before // 2
    with pytest.raises(ConfigError, match="loaded with max_batch=2"):
        loaded.run(batch=3, input_tokens=1, output_tokens=1)


def test_refusals_keep_their_class_and_the_worker(
    loaded, demo_checkpoint: Path, tmp_path: Path, golden: Golden
) -> None:
    with golden.raises("daemon", ConfigError):
        loaded.run(batch=1, input_tokens=96, output_tokens=1)
    with golden.raises("daemon", ConfigError):
        loaded.run(batch=0, input_tokens=96, output_tokens=1)
    with golden.raises("daemon", ConfigError):
        loaded.load(demo_checkpoint, **FORMATS, layers_per_stage=(4, 4), max_batch=1, max_context_tokens=8)
    with golden.raises("daemon", NotFoundError):
        loaded.load(tmp_path / "none", **FORMATS, layers_per_stage=(8,), max_batch=1, max_context_tokens=8)
    loaded.load(demo_checkpoint, **FORMATS, layers_per_stage=(8,), max_batch=1, max_context_tokens=8)
    assert loaded.run(batch=1, input_tokens=7, output_tokens=1).e2e_s > 0


@pytest.mark.parametrize(
    "kind", [VariantKind(16), VariantKind(delta_format=SlotFormat.INT2)], ids=["adapters", "deltas"]
)
def test_variants_are_loaded_and_run_next_to_the_base(
    session, demo_checkpoint: Path, tmp_path: Path, kind: VariantKind, golden: Golden
) -> None:
    """Memory grows by the bytes of their files; bursts ask for those that are loaded alone."""
    written = [
        (tmp_path / str(number), write_random_variant(demo_checkpoint, tmp_path / str(number), kind, number))
        for number in range(2)
    ]
    session.load_with_slots(
        demo_checkpoint,
        num_layers=8,
        max_batch=4,
        max_context_tokens=64,
        slots=2,
        rank=16,
        delta_mib=8 if kind.is_delta else 0,
    )
    burst = {"batch": 4, "input_tokens": 8, "output_tokens": 3}
    assert session.run_variants(**burst, active=0).e2e_s > 0
    before = session.memory()[0].weights_bytes
    loads_s = session.load_variants([folder for folder, _ in written])
    assert len(loads_s) == 2
    assert min(loads_s) > 0
    assert session.memory()[0].weights_bytes - before == sum(num_bytes for _, num_bytes in written)
    for active in (0, 1, 2):
        assert session.run_variants(**burst, active=active).e2e_s > 0
    with golden.raises("daemon", NotFoundError):
        session.run_variants(**burst, active=3)
    with golden.raises("daemon", ConfigError):
        session.run_variants(**burst, active=5)
    session.load(demo_checkpoint, **FORMATS, layers_per_stage=(8,), max_batch=4, max_context_tokens=96)
    assert session.memory()[0].weights_bytes == before, "the next load has none"


def test_a_variant_whose_name_is_too_long_is_refused(loaded, golden: Golden) -> None:
    with golden.raises("daemon", BadInputError):
        loaded.load_variants([Path("/") / ("x" * 300)])


def test_a_client_that_leaves_cancels_no_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_api, "check_variant", lambda folder, max_rank: None)

    async def leave() -> None:
        begun, load = asyncio.Event(), Future[None]()

        def load_adapter(name: str, folder: Path) -> Future[None]:
            begun.set()
            return load

        engine: Any = SimpleNamespace(load_adapter=load_adapter)
        client = asyncio.create_task(profile_api._load_variants(engine, ProfileVariants(folders=(str(tmp_path),))))
        await begun.wait()
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        assert not load.cancelled()

    asyncio.run(leave())


def test_a_pipeline_of_two_with_uneven_layers(target: WorkerProfileTarget, demo_checkpoint: Path) -> None:
    found = []

    def measure() -> None:  # from a plain thread
        session = target.open(tp=1, pp=2)
        try:
            session.load(demo_checkpoint, **FORMATS, layers_per_stage=(5, 3), max_batch=2, max_context_tokens=64)
            found.append((session.run(batch=2, input_tokens=16, output_tokens=4), session.memory()))
        finally:
            session.close()
            session.close()

    thread = threading.Thread(target=measure)
    thread.start()
    thread.join()
    ((reading, memory),) = found
    assert 0 < reading.handover_s < reading.device_s < reading.e2e_s
    assert [rank.stage for rank in memory] == [0, 1]
    assert memory[0].kv_bytes * 3 == memory[1].kv_bytes * 5


def test_more_devices_than_there_are(target: WorkerProfileTarget, golden: Golden) -> None:
    with golden.raises("daemon", InfeasibleError):
        target.open(tp=2, pp=2)


def test_a_worker_that_dies_is_an_engine_error(launch, module_spec, demo_checkpoint: Path) -> None:
    handles = []

    def launch_and_keep(spec):
        handles.append(launch(spec))
        return handles[-1]

    target = WorkerProfileTarget(
        launch_and_keep, checkpoint=demo_checkpoint, device_ids=("cpu:0",), limits=module_spec().limits
    )
    session = target.open(tp=1, pp=1)
    handles[0].process.kill()
    handles[0].process.wait()
    with pytest.raises(EngineError, match="exit code -9"):
        session.memory()
    session.close()


def test_a_worker_that_never_comes_up_is_ended(module_spec, demo_checkpoint: Path, golden: Golden) -> None:
    class Silent:
        url, token = "http://127.0.0.1:9", None
        stopped = 0

        def failure(self) -> str | None:
            return None

        def stop(self) -> None:
            self.stopped += 1

    handle = Silent()
    target = WorkerProfileTarget(
        lambda spec: handle,
        checkpoint=demo_checkpoint,
        device_ids=("cpu:0",),
        limits=module_spec().limits,
        start_timeout_s=0.1,
    )
    with golden.raises("daemon", EngineError):
        target.open(tp=1, pp=1)
    assert handle.stopped == 1


def test_dummy_requests_are_reproducible_and_in_range() -> None:
    from daemon.torch_engine.api.profile_api import dummy_requests

    run = ProfileRun(batch=3, input_tokens=50, output_tokens=2)
    first, again = dummy_requests(run, 11), dummy_requests(run, 11)
    assert first == again
    assert len({request.prompt for request in first}) == 3
    assert {token for request in first for token in request.prompt} == set(range(11))
    assert all(request.end_ids == frozenset() for request in first)


def test_bodies_that_are_none(session, http_exchange) -> None:
    url = session._handle.url
    for path, body in (("/profile/run", b"{"), ("/profile/load", {}), ("/profile/run", {"batch": "x"})):
        status, answer = http_exchange(url, "POST", path, body)
        assert status == 400
        assert BadInputError.__name__.encode() in answer
    status, answer = http_exchange(url, "POST", "/v1/completions", {"prompt": [1]})
    assert status == 503


def test_who_leaves_a_run_does_not_spoil_the_next(serve, demo_checkpoint: Path) -> None:
    """The step of the first run that is under way does not count: each step of this runner says 0.25 s."""
    gate = threading.Semaphore(0)
    served = serve(lambda history: 5, prepare=lambda runner: setattr(runner, "gate", gate), profiling=True)
    order = ProfileLoad(
        checkpoint=str(demo_checkpoint), **FORMATS, layers_per_stage=(8,), max_batch=2, max_context_tokens=64
    )
    assert served.request("POST", "/profile/load", to_json(order))[0] == 200
    first = http.client.HTTPConnection("127.0.0.1", int(served.url.rpartition(":")[2]))
    first.request("POST", "/profile/run", to_json(ProfileRun(batch=2, input_tokens=3, output_tokens=9)))
    served.until(lambda stats: stats["running"] == 2)
    first.close()
    served.until(lambda stats: stats["running"] == stats["waiting"] == 0)
    with ThreadPoolExecutor(1) as pool:
        body = to_json(ProfileRun(batch=1, input_tokens=3, output_tokens=2))
        second = pool.submit(served.request, "POST", "/profile/run", body)
        engine = served.worker.engine
        while not (engine._calls or engine.has_work):
            time.sleep(0.001)
        gate.release(100)
        status, reading = second.result()
    assert (status, reading["device_s"]) == (200, 0.5)
