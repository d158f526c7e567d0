"""vLLM under the real daemon, a strict stand-in in its place: what it promises, and every way to fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from daemon.engine_options import NO_OPTIONS, EngineOptions
from daemon.engines.environments import environment_of
from daemon.engines.registry import get_engine
from daemon.procfs import processes
from daemon.status import WorkerState
from daemon.worker_spec import StageAssignment
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import CheckpointError, ConfigError, EngineError
from fingerprint.families import load_spec
from fingerprint.gpus import gpu_spec
from iserve.demo import demo_model_path
from tests.daemon.engines.engine_conformance import CONTEXT, LIMITS, EngineConformance, Running, ask
from tests.daemon.engines.standin import make_editable, make_vllm, set_version
from tests.daemon.engines.vllm_releases import recorded
from tests.daemon.engines.vllm_sources import write_release
from tests.daemon.engines.vllm_worker_spec import DEVICES, LLAMA_8B, worker
from tests.golden_words import Golden

GIB = 2**30
GPUS = ("GPU-aaaa", "GPU-bbbb")


class TestVllm(EngineConformance):
    engine = "vllm"
    device = "GPU-aaaa"
    settings: ClassVar = {"cpu_devices": None}

    @pytest.fixture(scope="class")
    @classmethod
    def prepare(cls):
        def prepare(node, folder):
            node.offer_gpus(folder / "nvml")
            node.extra_env["ISERVE_VLLM_PYTHON"] = str(make_vllm(folder / "vllm-env", "0.33.0"))

        return prepare


@pytest.fixture(scope="module")
def vllm_python(tmp_path_factory):
    return make_vllm(tmp_path_factory.mktemp("vllm") / "env")


@pytest.fixture
def vllm_node(node, tmp_path, vllm_python, tiny_checkpoint):
    """A node with two GPUs and vLLM, its daemon not started yet."""
    node.offer_gpus(tmp_path / "nvml")
    node.extra_env["ISERVE_VLLM_PYTHON"] = str(vllm_python)
    shutil.copytree(tiny_checkpoint("llama"), node.checkpoint, dirs_exist_ok=True)
    return node


def start(node, **settings):
    return node.start(real_engines=True, cpu_devices=None, **settings)


def spec(node, worker_id="w1", *, layers=(4,), tp=1, kv=KvFormat.BITS16, **changes):
    values = {
        "config": DeploymentConfig(engine="vllm", tp=tp, pp=len(layers), kv=kv),
        "stages": tuple(
            StageAssignment(device_ids=GPUS[index * tp : (index + 1) * tp], num_layers=count)
            for index, count in enumerate(layers)
        ),
        "limits": LIMITS,
    }
    return node.spec(worker_id, **(values | changes))


def engine_processes(node) -> list[int]:
    """Server, engine core and workers of every start so far, as they noted themselves."""
    return [int(line) for line in (node.home / "workers" / "w1" / "processes").read_text().split()]


def living(pids: list[int]) -> set[int]:
    return {stat.pid for stat in processes()} & set(pids)


# --- degrees ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "tp"),
    [
        pytest.param((4,), 2, id="tp2"),
        pytest.param((2, 2), 1, id="pp2"),
        pytest.param((3, 1), 1, id="uneven-pp2"),
    ],
)
def test_several_gpus_are_several_processes_of_one_worker(vllm_node, layers, tp):
    """The stand-in also refuses to start with NVLink multicast on when tp=2."""
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node, layers=layers, tp=tp))
    status = vllm_node.wait("w1", WorkerState.READY)
    assert ask(status.url, "/version", token=status.token)[1] == b'{"version": "0.24.0"}'
    pids = engine_processes(vllm_node)
    assert len(pids) == 4  # server, engine core, a worker per GPU
    assert living(pids) == set(pids)
    vllm_node.client.stop("w1")
    assert not living(pids)


@pytest.mark.parametrize("kv", list(KvFormat))
def test_each_kv_format_has_the_planned_room(vllm_node, kv):
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node, kv=kv))
    running = Running(vllm_node, vllm_node.wait("w1", WorkerState.READY))
    assert LIMITS.kv_tokens <= running.stats().kv_tokens_total <= LIMITS.kv_tokens + 16 * (LIMITS.max_batch + 1)


def test_dummy_weights_need_no_weights_but_are_never_chosen_silently(vllm_node):
    (vllm_node.checkpoint / "model.safetensors").unlink()
    start(vllm_node)
    with pytest.raises(CheckpointError, match="no safetensors"):
        vllm_node.client.launch(spec(vllm_node))
    vllm_node.client.launch(spec(vllm_node, dummy_weights=True))
    vllm_node.wait("w1", WorkerState.READY)


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("behaviour", "words", "restarts"),
    [
        pytest.param(
            {"free_bytes": GIB // 2}, ["others use its GPU", "Free memory on device cuda:0"], 2, id="others-use-it"
        ),
        pytest.param(
            {"weight_bytes": 48 * GIB}, ["ran out of GPU memory", "Tried to allocate 2.00"], 2, id="memory"
        ),
    ],
)
def test_a_failed_start_is_told_with_its_fix_and_leaves_nothing(vllm_node, behaviour, words, restarts):
    """The cause is far above the last lines of the log, which only say that something failed."""
    start(vllm_node)
    vllm_node.behave(**behaviour)
    vllm_node.client.launch(spec(vllm_node))
    status = vllm_node.wait("w1", WorkerState.FAILED)
    assert status.restarts == restarts  # three starts are allowed here; what cannot change is tried once
    for word in words:
        assert word in status.error
    assert "module_149" not in status.error
    assert not (vllm_node.home / "workers" / "w1" / "processes").exists()  # no start got so far


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        pytest.param({"layers": (3, 3)}, ConfigError, id="layers"),
        pytest.param({"limits": replace(LIMITS, kv_tokens=CONTEXT - 1)}, ConfigError, id="short-cache"),
        pytest.param({"limits": replace(LIMITS, max_batched_tokens=2)}, ConfigError, id="step"),
        pytest.param({"limits": replace(LIMITS, memory_bytes_per_device=0)}, ConfigError, id="no-memory"),
        pytest.param(
            {"config": DeploymentConfig(engine="vllm", weights=WeightFormat.GPTQ4)},
            CheckpointError,
            id="not-quantized",
        ),
    ],
)
def test_what_vllm_cannot_keep_is_refused_before_it_starts(vllm_node, changes, error, golden: Golden):
    start(vllm_node)
    with golden.raises("engines", error):
        vllm_node.client.launch(spec(vllm_node, **changes))
    assert vllm_node.client.workers() == ()
    assert not list((vllm_node.home / "workers").glob("*"))


def test_what_only_vllm_knows_of_is_given_up_at_once(vllm_node, golden: Golden):
    """A context beyond the model's: the class of the error says that another start cannot help."""
    start(vllm_node)
    limits = replace(LIMITS, max_context_tokens=128, kv_tokens=384, max_batched_tokens=384)
    vllm_node.client.launch(spec(vllm_node, limits=limits))
    status = vllm_node.wait("w1", WorkerState.FAILED)
    assert status.restarts == 0
    golden("engines", status.error)


def test_an_engine_core_that_is_killed_takes_the_server_along_and_both_are_started_again(vllm_node):
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node, tp=2))
    before = vllm_node.wait("w1", WorkerState.READY)
    old = engine_processes(vllm_node)
    os.kill(old[1], signal.SIGKILL)
    after = vllm_node.wait("w1", WorkerState.READY, but_not_pid=before.pid)
    assert after.restarts == 1
    assert "EngineDeadError" in vllm_node.client.log("w1")
    assert not living(old)


def test_with_daemon_and_shim_killed_nothing_holds_the_gpu(vllm_node, until):
    """The engine's own processes do not mind their parent's death; the wrapper does."""
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node, tp=2))
    vllm_node.wait("w1", WorkerState.READY)
    pids = engine_processes(vllm_node)
    vllm_node.signal_daemon(signal.SIGKILL)
    os.kill(vllm_node.lease().shim_pid, signal.SIGKILL)
    until(lambda: not living(pids))


def test_an_orphan_ends_when_its_lease_runs_out(vllm_node, until):
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node, lease_ttl_s=1.0, tp=2))
    vllm_node.wait("w1", WorkerState.READY)
    pids = engine_processes(vllm_node)
    vllm_node.signal_daemon(signal.SIGKILL)
    until(lambda: not living(pids))
    until(lambda: (vllm_node.home / "workers" / "w1" / "exit.json").exists())
    assert json.loads((vllm_node.home / "workers" / "w1" / "exit.json").read_text())["reason"] == "lease expired"


def test_a_new_daemon_adopts_a_running_server(vllm_node):
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node))
    before = vllm_node.wait("w1", WorkerState.READY)
    vllm_node.signal_daemon(signal.SIGKILL)
    start(vllm_node)
    assert vllm_node.wait("w1", WorkerState.READY).pid == before.pid


def test_a_deaf_server_is_ended_with_all_its_processes(vllm_node):
    start(vllm_node)
    vllm_node.behave(deaf=True)
    vllm_node.client.launch(spec(vllm_node, tp=2))
    vllm_node.wait("w1", WorkerState.READY)
    pids = engine_processes(vllm_node)
    assert vllm_node.client.stop("w1").state is WorkerState.STOPPED
    assert not living(pids)


# --- the installation ------------------------------------------------------------------------------------------


def unknown_release(folder: Path, **changes: tuple[str, ...]) -> Path:
    """An environment with a release that iServe has not read, whose Python is 0.33's but for ``changes``."""
    python = make_vllm(folder, "0.34.0")
    (packages,) = (folder / "lib").glob("python*/site-packages")
    write_release(replace(recorded()["0.33.0"], **changes), packages / "vllm")
    return python


def without_flag(flag: str) -> tuple[str, ...]:
    return tuple(name for name in recorded()["0.33.0"].flags if name != flag)


@pytest.mark.parametrize("version", ["0.19.2", "0.34.0", "unknown"])
def test_a_release_that_cannot_be_read_is_not_started(tmp_path, monkeypatch, version, golden: Golden):
    """The release's metadata is there, its command line is not."""
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", version)))
    golden("engines", get_engine("vllm").capabilities().unavailable or "")


def test_an_unknown_release_that_lacks_an_option_is_not_started(tmp_path, monkeypatch, golden: Golden):
    flags = without_flag("--kv-cache-memory-bytes")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(unknown_release(tmp_path / "env", flags=flags)))
    why = get_engine("vllm").capabilities().unavailable or ""
    assert "vllm 0.34.0" in why
    golden("engines", why)


FP8 = {"weights": WeightFormat.FP8}
ESTIMATE = "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS"
STAGES = "VLLM_PP_LAYER_PARTITION"
EXECUTOR = "--distributed-executor-backend"
INT8_KV = "--kv-cache-dtype=int8_per_token_head"


def without_value(value: str) -> tuple[str, ...]:
    return tuple(name for name in recorded()["0.33.0"].values if name != value)


def without_variable(variable: str) -> tuple[str, ...]:
    return tuple(name for name in recorded()["0.33.0"].variables if name != variable)


@pytest.mark.parametrize(
    ("changes", "wish", "missing"),
    [
        pytest.param({"flags": without_flag("--quantization")}, FP8, "--quantization", id="fp8"),
        pytest.param({"flags": without_flag(EXECUTOR)}, {"tp": 2}, EXECUTOR, id="gpus"),
        pytest.param({"values": without_value(INT8_KV)}, {"kv": KvFormat.INT8}, f"value {INT8_KV}", id="int8-kv"),
        pytest.param(
            {"flags": without_flag("--reasoning-parser")},
            {"options": EngineOptions(reasoning_parser="qwen3")},
            "--reasoning-parser",
            id="parser",
        ),
        pytest.param(
            {"variables": without_variable("VLLM_PP_LAYER_PARTITION")},
            {"layers": (20, 12)},
            "PP_LAYER",
            id="stages",
        ),
        pytest.param({"batches_in_flight": ("9 * pp_size",)}, {"window": 256}, "steps in flight", id="window"),
        pytest.param(
            {"routes": ("/v1/load_lora_adapter",)},
            {"adapter_slots": 4, "adapter_rank": 16},
            "route /v1/unload_lora_adapter",
            id="slots-routes",
        ),
        pytest.param(
            {"variables": without_variable("VLLM_ALLOW_RUNTIME_LORA_UPDATING")},
            {"adapter_slots": 4, "adapter_rank": 16},
            "RUNTIME_LORA",
            id="slots-variable",
        ),
        pytest.param({"variables": without_variable(ESTIMATE)}, None, "", id="none"),
    ],
)
def test_an_unknown_release_is_refused_only_to_a_launch_that_needs_what_it_lacks(
    tmp_path, monkeypatch, changes, wish, missing, golden: Golden
):
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(unknown_release(tmp_path / "env", **changes)))
    vllm, checkpoint = get_engine("vllm"), tmp_path / "model"
    checkpoint.mkdir()
    (checkpoint / "tokenizer.json").touch()

    def launched(*, window=None, options=NO_OPTIONS, **wish):
        sliding = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": window}
        (checkpoint / "config.json").write_text(json.dumps(LLAMA_8B | (sliding if window else {})))
        return vllm.command(
            replace(worker(checkpoint, **wish), dummy_weights=True, options=options), tmp_path, DEVICES
        )

    assert launched().argv
    assert vllm.capabilities().deployable
    if wish is not None:
        with golden.raises("engines", EngineError):
            launched(**wish)
        assert [note for note in vllm.capabilities().notes if f"{missing}" in note.text]


def test_an_unknown_release_serves_and_says_what_is_not_verified(vllm_node, tmp_path, monkeypatch, golden: Golden):
    python = unknown_release(tmp_path / "env")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
    table = get_engine("vllm").capabilities()
    assert (table.deployable, table.step_timed, table.unprofiled) == (True, False, None)
    golden("engines", [note.text for note in table.notes])
    vllm_node.extra_env["ISERVE_VLLM_PYTHON"] = str(python)
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node))
    status = vllm_node.wait("w1", WorkerState.READY)
    assert ask(status.url, "/version", token=status.token)[1] == b'{"version": "0.34.0"}'


def test_sources_that_can_be_edited_are_of_no_release_and_read_by_the_contract(
    vllm_node, tmp_path, monkeypatch, golden: Golden
):
    """The version reads 0.33.0, which ran, and tells nothing of what was edited since."""
    python = make_vllm(tmp_path / "env", "0.33.0")
    (packages,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    write_release(recorded()["0.33.0"], packages / "vllm")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
    engine = get_engine("vllm")
    assert (engine.capabilities().step_timed, engine.standing(engine.installed())) == (True, "run")
    folder = make_editable(python, "vllm", tmp_path / "sources")
    table = engine.capabilities()
    assert engine.installed().package("vllm") == folder
    assert engine.standing(engine.installed()) == "unknown"
    assert (table.unavailable, table.step_timed, table.unprofiled) == (None, False, None)
    golden("engines", [note.text for note in table.notes], "notes")
    profiling = replace(worker(Path("/none")), profiling=True)
    profiling = engine.command(profiling, tmp_path, {"GPU-0": DEVICES["GPU-0"]})
    assert "--no-step-timer" in profiling.argv
    vllm_node.extra_env["ISERVE_VLLM_PYTHON"] = str(python)
    start(vllm_node)
    vllm_node.client.launch(spec(vllm_node))
    status = vllm_node.wait("w1", WorkerState.READY)
    assert ask(status.url, "/version", token=status.token)[1] == b'{"version": "0.33.0"}'
    declared = folder / "engine" / "arg_utils.py"
    declared.write_text(declared.read_text().replace("--kv-cache-memory-bytes", "--kv-cache-bytes"))
    golden("engines", engine.capabilities().unavailable or "")


def test_an_unknown_release_whose_memory_cannot_be_read_is_served_unprofiled(tmp_path, monkeypatch):
    classes = dict(recorded()["0.33.0"].classes)
    del classes["v1/kv_cache_interface.py:KVCacheTensor"]
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(unknown_release(tmp_path / "env", classes=classes)))
    table = get_engine("vllm").capabilities()
    assert table.deployable
    assert "cannot be profiled" in (table.unprofiled or "")


@pytest.mark.parametrize(("version", "was_run"), [("0.24.1", True), ("0.33.0", True), ("0.28.0", False)])
def test_a_plan_says_when_another_release_is_installed_than_was_run(tmp_path, monkeypatch, version, was_run):
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", version)))
    told = (
        get_engine("vllm")
        .capabilities()
        .conditions(load_spec(demo_model_path()), DeploymentConfig(engine="vllm"), gpu_spec("h200"))
    )
    said = [
        one for one in told if f"vllm {version} is installed here; of this release the sources were read" in one
    ]
    assert bool(said) != was_run


def test_an_upgrade_under_a_running_daemon_is_seen(vllm_node, tmp_path, golden: Golden):
    python = make_vllm(tmp_path / "env", "0.19.2")
    (packages,) = Path(tmp_path / "env" / "lib").glob("python*/site-packages")
    vllm_node.extra_env["ISERVE_VLLM_PYTHON"] = str(python)
    start(vllm_node)
    with golden.raises("engines", EngineError):
        vllm_node.client.launch(spec(vllm_node))
    set_version(packages, "vllm", "0.28.0")
    vllm_node.client.launch(spec(vllm_node))
    after = vllm_node.wait("w1", WorkerState.READY)
    assert ask(after.url, "/version", token=after.token)[1] == b'{"version": "0.28.0"}'


def test_an_installation_under_a_running_daemon_is_seen(vllm_node, golden: Golden):
    del vllm_node.extra_env["ISERVE_VLLM_PYTHON"]
    vllm_node.extra_env["ISERVE_HOME"] = str(vllm_node.home)
    start(vllm_node)
    with golden.raises("engines", EngineError):
        vllm_node.client.launch(spec(vllm_node))
    environment = environment_of(vllm_node.home, "vllm", "0.24.0")
    make_vllm(environment.folder)
    with golden.raises("engines", EngineError):  # unfinished
        vllm_node.client.launch(spec(vllm_node))
    environment.marker.write_text("{}")
    vllm_node.client.launch(spec(vllm_node))
    ready = vllm_node.wait("w1", WorkerState.READY)
    assert ask(ready.url, "/version", token=ready.token)[1] == b'{"version": "0.24.0"}'


def test_a_cpu_share_is_refused(node, tmp_path, vllm_python, tiny_checkpoint, golden: Golden):
    node.extra_env["ISERVE_VLLM_PYTHON"] = str(vllm_python)
    shutil.copytree(tiny_checkpoint("llama"), node.checkpoint, dirs_exist_ok=True)
    node.start(real_engines=True)
    with golden.raises("engines", ConfigError):
        node.client.launch(spec(node, stages=(StageAssignment(device_ids=("cpu:0",), num_layers=4),)))


def test_a_worker_with_slots_loads_serves_and_unloads_adapters(vllm_node, tmp_path):
    """Routes need the worker's token; names, answers and lists are those of vLLM's own routes."""
    vllm_node.extra_env["ISERVE_VLLM_PYTHON"] = str(make_vllm(tmp_path / "env", "0.33.0"))
    start(vllm_node)
    config = DeploymentConfig(engine="vllm", adapter_slots=2, adapter_rank=8)
    vllm_node.client.launch(spec(vllm_node, config=config))
    status = vllm_node.wait("w1", WorkerState.READY)
    folders = {rank: tmp_path / f"adapter-{rank}" for rank in (8, 16)}
    for rank, folder in folders.items():
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
        (folder / "adapter_model.safetensors").touch()

    def post(path, **body):
        answer = ask(status.url, path, body, token=status.token)
        return answer[0], answer[1].decode()

    load = {"lora_name": "style@0123456789abcdef", "lora_path": str(folders[8])}
    body = {"model": load["lora_name"], "prompt": [1, 2], "max_tokens": 2}
    assert ask(status.url, "/v1/load_lora_adapter", load)[0] == 401
    assert post("/v1/completions", **body)[0] == 404
    assert post("/v1/load_lora_adapter", **load)[0] == 200
    assert post("/v1/load_lora_adapter", **load)[0] == 400
    assert json.loads(post("/v1/completions", **body)[1])["model"] == load["lora_name"]
    models = json.loads(ask(status.url, "/v1/models", token=status.token)[1])["data"]
    assert [(one["id"], one["root"], one["parent"]) for one in models[1:]] == [
        (load["lora_name"], load["lora_path"], models[0]["id"])
    ]
    larger = {"lora_name": "larger", "lora_path": str(folders[16])}
    assert "rank 16 is greater" in post("/v1/load_lora_adapter", **larger)[1]
    assert [post("/v1/unload_lora_adapter", lora_name=load["lora_name"])[0] for _ in range(2)] == [200, 404]
    assert post("/v1/completions", **body)[0] == 404
