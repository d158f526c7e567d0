"""vLLM's statistics and last words, and the worker that profiles it, without a process."""

from __future__ import annotations

import asyncio
import importlib
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import daemon
from daemon.engines.environments import environment_of
from daemon.engines.machine_info import gpu_machine
from daemon.engines.vllm import metrics
from daemon.engines.vllm.adapter import VllmEngine
from daemon.profile_client import WorkerProfileTarget
from fingerprint.codec import from_json
from fingerprint.errors import (
    BadInputError,
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    UnavailableError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from fingerprint.measurements import MachineInfo
from iserve.controller.engine_selection import deployable_engine
from iserve.controller.profiling_validity import release_to_start
from tests.daemon.engines.standin import make_vllm
from tests.daemon.engines.vllm_worker_spec import DEVICES, worker
from tests.golden_words import Golden

# --- statistics ------------------------------------------------------------------------------------------------

METRICS = b"""\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="chat"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="chat"} 2.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.25
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",engine="0",num_gpu_blocks="329"} 1.0
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="chat"} 1.2e+06
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="chat"} 512.0
# HELP vllm:iteration_tokens_total Histogram of number of tokens per engine_step.
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="chat"} 5.0
vllm:iteration_tokens_total_bucket{engine="0",le="+Inf",model_name="chat"} 70.0
vllm:iteration_tokens_total_count{engine="0",model_name="chat"} 70.0
vllm:iteration_tokens_total_sum{engine="0",model_name="chat"} 1.200512e+06
"""


def test_statistics_are_read_from_its_metrics():
    stats = metrics.read_stats("chat", METRICS)
    assert (stats.running, stats.waiting, stats.steps) == (3, 2, 70)
    assert (stats.prompt_tokens, stats.output_tokens) == (1_200_000, 512)
    assert (stats.kv_tokens_total, stats.kv_tokens_free) == (328 * 16, 328 * 12)  # one block is its own
    assert stats.kv_block_tokens == 16
    assert stats.busy == ()  # it does not tell; the daemon then goes by the driver
    assert stats.memory == ()


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xff\xfe", id="no-text"),
        pytest.param(b'vllm:num_requests_running{engine="0" 3.0\n', id="cut"),
        pytest.param(b'{"running": 3}', id="json"),
        pytest.param(METRICS.replace(b"kv_cache_usage_perc", b"gpu_cache_usage_perc"), id="an-older-name"),
        pytest.param(METRICS.replace(b'num_gpu_blocks="329"', b'num_gpu_blocks="None"'), id="no-blocks-yet"),
        pytest.param(METRICS.replace(b"} 0.25", b"} 25.0"), id="percent"),
        pytest.param(METRICS.replace(b"} 3.0", b"} NaN"), id="nan"),
        pytest.param(METRICS.replace(b"} 2.0", b"} -1"), id="negative"),
    ],
)
def test_what_is_not_its_metrics_is_an_engine_error(body):
    with pytest.raises(EngineError, match="vllm"):
        metrics.read_stats("chat", body)


@given(st.binary(max_size=400))
def test_no_answer_whatever_breaks_the_daemon(noise):
    with pytest.raises(EngineError):
        metrics.read_stats("chat", noise)


# --- last words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        pytest.param(
            "ValueError: Free memory on device cuda:0 (3.00/139.80 GiB) on startup is less than desired GPU "
            "memory utilization (0.9, 125.82 GiB). Decrease",
            UnavailableError,
            ["others use its GPU", "3.00/139.80"],
            id="others",
        ),
        pytest.param(
            "ValueError: No available memory for the cache blocks. Try increasing",
            InfeasibleError,
            ["weights and activations fill"],
            id="weights",
        ),
        pytest.param(
            "ValueError: To serve at least one request with the model's max seq len (4096), (0.50 GiB KV cache is "
            "needed, which is larger than the available KV cache memory (0.25 GiB). Based on the available "
            "memory, the estimated maximum model length is 2048. Try",
            InfeasibleError,
            ["one sequence of 4096 tokens (it would hold 2048)"],
            id="one-sequence",
        ),
        pytest.param(
            "ValueError: To serve at least one request with the model's max seq len (4096), (0.50 GiB KV",
            InfeasibleError,
            ["one sequence of 4096 tokens (it would hold ?)"],
            id="one-sequence-no-estimate",
        ),
        pytest.param(
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
            EngineError,
            ["ran out of GPU memory"],
            id="memory",
        ),
        pytest.param(
            "ValueError: Model architectures ['BloomForCausalLM'] are not supported for now. Supported",
            UnsupportedModelError,
            ["does not run the architecture BloomForCausalLM"],
            id="architecture",
        ),
        pytest.param(
            "ValueError: Model architecture XverseForCausalLM was supported in vLLM until v0.20, and is not "
            "supported anymore. Please use an older version",
            UnsupportedModelError,
            ["architecture XverseForCausalLM"],
            id="former-architecture",
        ),
        pytest.param(
            "ValueError: The Transformers implementation of 'CTRLLMHeadModel' is not compatible with vLLM.",
            UnsupportedModelError,
            ["does not run the architecture CTRLLMHeadModel", "use engine torch"],
            id="transformers-own-architecture",
        ),
        pytest.param(
            "ValueError: The checkpoint you are trying to load has model type `newer-4` but Transformers does not "
            "recognize this architecture. This could be because of an issue with the checkpoint",
            UnsupportedModelError,
            ["does not know the model type newer-4", "install a newer one there"],
            id="unknown-model-type",
        ),
        pytest.param(
            "ValueError: The repository /models/m contains custom code which must be executed to correctly load "
            "the model. Please pass the argument `trust_remote_code=True` to allow custom code to be run.",
            ConfigError,
            ["deploy with --trust-remote-code"],
            id="own-code",
        ),
        pytest.param(
            "ValueError: Total number of attention heads (71) must be divisible by tensor parallel size (2).",
            ConfigError,
            ["71 attention heads", "tp=2"],
            id="heads",
        ),
        pytest.param(
            "ValueError: sum(partitions)=31 does not match num_hidden_layers=32.",
            ConfigError,
            ["do not add up"],
            id="partition",
        ),
        pytest.param(
            "ValueError: Invalid partition string: 1,,2", ConfigError, ["do not add up"], id="partition-text"
        ),
        pytest.param(
            "ValueError: max_num_batched_tokens (8192) must be greater than or equal to max_num_seqs (9000).",
            ConfigError,
            ["9000 requests at once", "8192 tokens", "smaller batch"],
            id="sequences",
        ),
        pytest.param("OSError: [Errno 98] Address already in use", ConflictError, ["port is in use"], id="port"),
        pytest.param(
            "WARNING [parallel.py:750] Address already in use. Retrying with a new port.\nKeyError: 'gate'",
            EngineError,
            ["last words: KeyError: 'gate'"],
            id="port-that-it-retries",
        ),
        pytest.param(
            "vllm: error: unrecognized arguments: --block-size=16", ConfigError, ["--block-size"], id="flag"
        ),
        pytest.param(
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above)",
            EngineError,
            ["its engine died", "killed from outside"],
            id="dead",
        ),
        pytest.param(
            "torch.OutOfMemoryError: CUDA out of memory.\nEngineDeadError: EngineCore encountered an issue.",
            EngineError,
            ["ran out of GPU memory"],
            id="dead-of-memory",
        ),
        pytest.param(
            "(EngineCore pid=7) ERROR 11-21 10:00:00 [core.py:1137] KeyError: 'model.layers.0'\n"
            "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core "
            "proc(s): {}",
            EngineError,
            ["exit code 1", "last words: KeyError: 'model.layers.0'"],
            id="unknown",
        ),
        pytest.param("", EngineError, ["exit code 1", "said nothing"], id="silent"),
    ],
)
def test_last_words_become_one_of_our_errors_with_the_fix(text, error, words):
    spec = worker(Path("/models/m"))
    said = VllmEngine().explain_failure(
        spec, 1, f"(APIServer pid=1) INFO starting\n{text}\nTraceback:\n  File x\n"
    )
    if not text:
        said = VllmEngine().explain_failure(spec, 1, "")
    assert type(said) is error
    for word in ["worker w1 (vllm) ended", *words]:
        assert word in str(said)
    assert "\n" not in str(said)


CALL = "vLLM did not load /f/adapter-0: Exception: Call to add_lora method failed: "


@pytest.mark.parametrize(
    ("text", "error"),
    [
        pytest.param("ValueError: BloomForCausalLM does not support LoRA yet.", UnsupportedModelError, id="class"),
        pytest.param(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n  Value error, LoRA "
            "is not supported for BloomForCausalLM (/models/m). Supported models implement the `SupportsLoRA` "
            "interface. Run this model without `enable_lora`. [type=value_error, input_value=ArgsKwargs(())]",
            UnsupportedModelError,
            id="class-since-0.33",
        ),
        pytest.param(
            "AssertionError: No supported LoRA modules found in MambaForCausalLM.",
            UnsupportedModelError,
            id="modules",
        ),
        pytest.param(
            "ValueError: When using LoRA, vocab size must be <= 258048", UnsupportedModelError, id="vocabulary"
        ),
        pytest.param(
            "AssertionError: Monolithic kernels are not supported for Fused MoE LoRA.",
            UnsupportedModelError,
            id="monolithic-experts",
        ),
        pytest.param(
            "AssertionError: DeepGemmExperts does not support LoRA. For unquantized MoE, set moe_backend='triton'",
            UnsupportedModelError,
            id="experts",
        ),
        pytest.param(
            "ValueError: Unsupported base layer: QKVParallelLinear(in_features=64, output_features=128)",
            UnsupportedModelError,
            id="weights",
        ),
        pytest.param(
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for LoRAConfig\nmax_lora_rank\n  "
            "Input should be 1, 8, 16, 32, 64, 128, 256, 320 or 512 [type=literal_error, input_value=7]",
            ConfigError,
            id="rank-of-no-slots",
        ),
        pytest.param(
            "ValueError: iserve_deltas: deltas are not served of a multimodal model; start it without them",
            ConfigError,
            id="deltas",
        ),
        pytest.param(
            f"{CALL}LoRA rank 64 is greater than max_lora_rank 16.", UnsupportedAdapterError, id="larger-rank"
        ),
        pytest.param(
            f"{CALL}While loading /f/adapter-0, expected target modules in {{'qkv_proj'}} but received "
            "['model.layers.0.mixer.in_proj']. Please verify that the loaded LoRA module is correct",
            UnsupportedAdapterError,
            id="matrices",
        ),
    ],
)
def test_refusals_of_slots_and_adapters_happen_again(
    text: str, error: type[BadInputError], golden: Golden
) -> None:
    said = VllmEngine().explain_failure(worker(Path("/models/m")), 1, f"INFO starting\n{text}\nTraceback:\n")
    assert type(said) is error
    assert isinstance(said, BadInputError), "no start is tried anew"
    golden("engines", str(said))


def test_an_adapter_that_a_server_refused_is_not_why_it_ended() -> None:
    """The server answers the request and goes on; what ends it later may be gone at the next start."""
    log = "ERROR LoRA rank 64 is greater than max_lora_rank 16.\nINFO 200 OK\n"
    assert type(VllmEngine().explain_failure(worker(Path("/models/m")), -9, log)) is EngineError


def test_the_guards_own_refusal_is_a_conflict(golden: Golden):
    said = VllmEngine().explain_failure(worker(Path("/models/m")), 98, "port 8001 of 127.0.0.1 is in use\n")
    assert isinstance(said, ConflictError)
    golden("engines", str(said))


def test_the_release_that_a_deployment_asks_for_is_started(monkeypatch, tmp_path, golden: Golden):
    monkeypatch.delenv("ISERVE_VLLM_PYTHON", raising=False)
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    for version in ("0.24.0", "0.24.1"):
        environment = environment_of(tmp_path, "vllm", version)
        make_vllm(environment.folder, version)
        environment.marker.write_text("{}")
    one = {"GPU-0": DEVICES["GPU-0"]}
    spec = replace(worker(Path("/none")), profiling=True)
    for asked, started in ((None, "0.24.1"), ("0.24.0", "0.24.0"), ("0.24.1", "0.24.1")):
        command = VllmEngine().command(replace(spec, engine_version=asked), tmp_path, one)
        assert str(environment_of(tmp_path, "vllm", started).python) in command.argv
        assert from_json(command.files[0][1], MachineInfo).versions[0] == ("engine", f"vllm {started}")
    with golden.raises("engines", EngineError):
        VllmEngine().command(replace(spec, engine_version="0.33.0"), tmp_path, one)


def test_a_pinned_engine_is_that_release_whichever_comes_first(monkeypatch, tmp_path):
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(make_vllm(tmp_path / "env", "0.24.0")))
    for version in ("0.28.0", "0.33.0"):
        environment = environment_of(tmp_path, "vllm", version)
        make_vllm(environment.folder, version)
        environment.marker.write_text("{}")
    engine = VllmEngine()
    assert engine.pinned(None) is engine
    one, spec = {"GPU-0": DEVICES["GPU-0"]}, replace(worker(Path("/none")), profiling=True)
    for asked, found in (("0.28", "0.28.0"), ("0.33.0", "0.33.0"), ("0.24.0", "0.24.0")):
        pinned = engine.pinned(asked)
        assert dict(pinned.versions())["engine"] == f"vllm {found}"
        assert pinned.installed().python in pinned.command(spec, tmp_path, one).argv
        read = [
            note for note in pinned.capabilities().notes if "the sources were read, nothing was run" in note.text
        ]
        assert len(read) == (found == "0.28.0")
        assert deployable_engine("vllm", asked).versions() == pinned.versions()
        assert release_to_start(pinned) == found
    assert dict(engine.versions())["engine"] == "vllm 0.24.0"
    for name in ("vllm", "torch", "auto"):
        with pytest.raises(InfeasibleError, match=r"0\.31\.0 is (not installed|asked for)"):
            deployable_engine(name, "0.31.0")


def test_a_profiling_worker_is_launched_in_the_release_that_is_profiled(golden: Golden):
    launched = []

    def launch(spec):
        launched.append(spec)
        raise EngineError("no more of it is needed")

    target = WorkerProfileTarget(
        launch,
        checkpoint=Path("/none"),
        device_ids=["GPU-0"],
        limits=worker(Path("/none")).limits,
        engine="vllm",
        engine_version="0.28.0",
    )
    with golden.raises("engines", EngineError):
        target.machine()
    assert [spec.engine_version for spec in launched] == ["0.28.0"]


def test_a_profiling_worker_runs_our_own_program_in_its_interpreter(monkeypatch, tmp_path):
    python = make_vllm(tmp_path / "env")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
    one = {"GPU-0": DEVICES["GPU-0"]}
    command = VllmEngine().command(replace(worker(Path("/none")), profiling=True), tmp_path, one)
    at = command.argv.index("--", command.argv.index("daemon.engines.wrapper"))
    program = (str(python), "-m", "iserve_profiling.vllm", "--spec", str(tmp_path / "spec.json"))
    assert command.argv[at + 1 :] == program
    path = command.argv[command.argv.index("--python-path") + 1]
    assert Path(path).parts[-2:] == ("daemon", "profiling_worker")
    assert "VLLM_PP_LAYER_PARTITION" not in dict(command.env)
    ((name, text),) = command.files
    machine = from_json(text, MachineInfo)
    assert name == "machine.json"
    assert (machine.device.name, machine.num_devices) == ("h200-sxm", 1)
    assert machine.versions == (("engine", "vllm 0.24.0"),)


def test_the_drivers_version_is_recorded_and_its_absence_too(fake_nvml, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    assert gpu_machine(DEVICES.values(), ()).driver == "570.86.15"
    fake_nvml.FAILING["nvmlInit", ""] = fake_nvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert gpu_machine(DEVICES.values(), ()).driver is None


def test_a_gpu_without_a_datasheet_is_what_its_driver_says(fake_nvml, monkeypatch, tmp_path, golden: Golden):
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml)
    unknown = [replace(device, name="NVIDIA Abacus") for device in DEVICES.values()]
    with golden.raises("engines", ConfigError):
        gpu_machine(unknown, ())
    fake_nvml.GPUS[0].name = "NVIDIA Abacus"
    device = gpu_machine(unknown, ()).device
    golden("engines", device.name)
    assert device.memory_bytes_per_s == pytest.approx(768e9, rel=0.01)  # the stand-in has the clocks of an A6000
    with golden.raises("engines", ConfigError):
        gpu_machine([unknown[0], *DEVICES.values()], ())


def test_the_middleware_lets_nothing_through_without_the_token_but_health(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(daemon.__file__).parent / "vllm_middleware"))
    worker_key = importlib.import_module("iserve_worker_key")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(KeyError):
        worker_key.WorkerKey(None)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    passed, said = [], []

    async def app(scope: dict, receive: object, send: object) -> None:
        passed.append(scope["type"])

    async def send(message: dict) -> None:
        said.append((message["type"], message.get("status", message.get("code"))))

    def ask(kind: str, path: str, *authorization: bytes) -> None:
        headers = [(b"authorization", value) for value in authorization]
        asyncio.run(worker_key.WorkerKey(app)({"type": kind, "path": path, "headers": headers}, None, send))

    asyncio.run(worker_key.WorkerKey(app)({"type": "lifespan"}, None, send))
    ask("http", "/health")
    ask("http", "/metrics", b"Bearer secret")
    ask("websocket", "/v1/realtime", b"Bearer secret")
    assert (passed, said) == (["lifespan", "http", "http", "websocket"], [])
    ask("http", "/pause")
    ask("http", "/invocations", b"Bearer secre")
    ask("http", "/invocations", b"Bearer \xff")
    ask("http", "/invocations", b"Bearer wrong", b"Bearer secret")  # which of two a server takes is its own matter
    ask("websocket", "/health")
    assert len(passed) == 4
    assert [code for kind, code in said if kind != "http.response.body"] == [401, 401, 401, 401, 1008]
