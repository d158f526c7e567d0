"""A node with a daemon, two GPUs on paper and an engine that stands in, for workers that profile with it."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.client import DaemonClient
from daemon.engines.vllm.release import Standing, standing_of
from daemon.procfs import processes
from daemon.profile_client import WorkerProfileSession, WorkerProfileTarget
from daemon.status import WorkerState, WorkerStatus
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.config import KvFormat, WeightFormat
from fingerprint.truncate import generate_shape
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_sources import write_release

GIB = 2**30
GPUS = ("GPU-aaaa", "GPU-bbbb")
LAYERS = 8  # of the whole model
BITS16, FP8 = WeightFormat.BITS16, WeightFormat.FP8


class Handle:
    """A worker that a daemon runs, as the profiling client wants it."""

    def __init__(self, client: DaemonClient, status: WorkerStatus) -> None:
        self._client, self.worker_id = client, status.spec.worker_id
        self.url, self.token = status.url, status.token

    def failure(self) -> str | None:
        status = self._client.worker(self.worker_id)
        ended = status.state in (WorkerState.FAILED, WorkerState.STOPPED) or status.restarts
        return (status.error or f"it is {status.state}") if ended else None

    def stop(self) -> None:
        self._client.stop(self.worker_id)


class House:
    """A node with an engine on two GPUs, and the whole model's folder."""

    engine_name = "vllm"

    def __init__(self, node: Any, folder: Path, checkpoint: Path) -> None:
        self.node, self.folder, self.model = node, folder, checkpoint
        self.handles: list[Handle] = []

    def target(self, step_tokens: int = 256) -> WorkerProfileTarget:
        def launch(spec: WorkerSpec) -> Handle:
            status = self.node.client.launch(spec)
            self.handles.append(Handle(self.node.client, status))
            return self.handles[-1]

        limits = WorkerLimits(
            max_batch=1,
            max_batched_tokens=step_tokens,
            max_context_tokens=1024,
            kv_tokens=1024,
            memory_bytes_per_device=20 * GIB,
        )
        return WorkerProfileTarget(
            launch,
            checkpoint=self.model,
            device_ids=GPUS,
            limits=limits,
            engine=self.engine_name,
            start_timeout_s=60,
            call_timeout_s=60,
        )

    def fingerprint(self, layers: int, **behaviour: object) -> Path:
        """The config.json of that many layers alone, as the controller makes it."""
        target = self.folder / f"{layers}-layers-{len(list(self.folder.iterdir()))}"
        generate_shape(self.model, target, layers)
        if behaviour:
            (target / "behaviour.json").write_text(json.dumps(behaviour))
        return target

    def load(self, session: WorkerProfileSession, layers: int = 2, *, stages: int = 1, **changes: Any) -> None:
        behaviour = changes.pop("behaviour", {})
        values = {
            "weights": BITS16,
            "kv": KvFormat.BITS16,
            "layers_per_stage": (layers // stages,) * stages,
            "max_batch": 8,
            "max_context_tokens": 512,
            "kv_tokens": 2048,
        }
        session.load(self.fingerprint(layers, **behaviour), **(values | changes))

    def processes(self, session: WorkerProfileSession | None = None) -> set[int]:
        """Return the processes of this worker, or the last one: those with its folder in their environment."""
        where = str(self._folder_of(session)).encode()
        found = set()
        for stat in processes():
            with contextlib.suppress(OSError):
                if where in Path(f"/proc/{stat.pid}/environ").read_bytes():
                    found.add(stat.pid)
        return found

    def engine(self, session: WorkerProfileSession) -> set[int]:
        """The processes that vLLM itself started."""
        return {pid for pid in self.processes(session) if "spawn_main" in cmdline(pid)}

    def log(self, session: WorkerProfileSession) -> str:
        return (self._folder_of(session) / "worker.log").read_text()

    def _folder_of(self, session: WorkerProfileSession | None) -> Path:
        handle = self.handles[-1] if session is None else session._handle
        assert isinstance(handle, Handle)
        return Path(self.node.home) / "workers" / handle.worker_id


@contextlib.contextmanager
def a_house(
    folder: Path,
    make_node: Callable[[Path], Any],
    tiny_checkpoint: Callable[[str], Path],
    *,
    version: str = "0.24.0",
) -> Iterator[House]:
    """A node with vLLM ``version``; one that was not read has the sources of 0.33."""
    node = make_node(folder / "home")
    node.offer_gpus(folder / "nvml")
    node.extra_env["ISERVE_VLLM_PYTHON"] = str(make_vllm(folder / "env", version))
    if standing_of(version) is Standing.UNKNOWN:
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        write_release(recorded()["0.33.0"], packages / "vllm")
    model, fingerprints = folder / "model", folder / "fingerprints"
    shutil.copytree(tiny_checkpoint("llama"), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": LAYERS, "max_position_embeddings": 1024})
    )
    for weights in model.glob("*.safetensors"):
        weights.unlink()  # of fewer layers; what profiles run has random ones
    fingerprints.mkdir()
    try:
        node.start(real_engines=True, cpu_devices=None)
        yield House(node, fingerprints, model)
    finally:
        node.clear()


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory,
    make_node: Callable[[Path], Any],
    tiny_checkpoint: Callable[[str], Path],
) -> Iterator[House]:
    with a_house(tmp_path_factory.mktemp("vllm-worker"), make_node, tiny_checkpoint) as house:
        yield house


@contextlib.contextmanager
def opened(house: House) -> Iterator[WorkerProfileSession]:
    with house.target() as target:
        session = target.open(tp=1, pp=1)
        try:
            yield session
        finally:
            session.close()


@pytest.fixture
def session(house: House) -> Iterator[WorkerProfileSession]:
    """A worker of one's own."""
    with opened(house) as session:
        yield session


@pytest.fixture(scope="class")
def kept(house: House) -> Iterator[WorkerProfileSession]:
    """Yield one worker for a class of tests, each of which loads what it needs."""
    with opened(house) as session:
        yield session


def bursts(
    session: WorkerProfileSession, batch: int = 2, input_tokens: int = 20, output_tokens: int = 3, **changes
):
    values = {"repeat": 1, "most": 2, "until_s": 60.0} | changes
    return session.bursts(batch=batch, input_tokens=input_tokens, output_tokens=output_tokens, **values)


def cmdline(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def shims(house: House) -> set[int]:
    return {p for p in house.processes() if "daemon.shim" in cmdline(p)}
