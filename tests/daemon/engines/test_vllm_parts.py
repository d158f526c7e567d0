"""vLLM's command line, statistics and last words, without a process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.devices import Device
from daemon.engines.base import StageAssignment, WorkerLimits, WorkerSpec
from daemon.engines.machine import gpu_machine
from daemon.engines.vllm import launch, metrics
from daemon.engines.vllm.adapter import VllmEngine
from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import (
    CheckpointError,
    ConfigError,
    ConflictError,
    EngineError,
    InfeasibleError,
    UnavailableError,
    UnsupportedModelError,
)
from fingerprint.measurements import MachineInfo

GIB = 2**30
# Llama-3.1-8B: 8 KV heads of 128, 32 layers
LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
DEVICES = {
    f"GPU-{index}": Device(
        device_id=f"GPU-{index}", index=index, kind="cuda", name="NVIDIA H200", total_bytes=140 * GIB
    )
    for index in range(4)
}


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the 8B's config and no weights to speak of."""

    def make(**changes: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changes))
        (tmp_path / "model.safetensors").touch()
        return tmp_path

    return make


def worker(folder: Path, *, layers=(32,), tp=1, limits=None, **config: object) -> WorkerSpec:
    ids = iter(DEVICES)
    return WorkerSpec(
        worker_id="w1",
        served_model="chat",
        checkpoint=str(folder),
        config=DeploymentConfig(engine="vllm", tp=tp, pp=len(layers), **config),
        stages=tuple(
            StageAssignment(device_ids=tuple(next(ids) for _ in range(tp)), num_layers=count) for count in layers
        ),
        limits=limits
        or WorkerLimits(
            max_batch=8,
            max_batched_tokens=8192,
            max_context_tokens=640,
            kv_tokens=8 * 640,
            memory_bytes_per_device=35 * GIB,
        ),
        port=8001,
    )


def options(spec: WorkerSpec) -> dict[str, str]:
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    assert words[:2] == ("serve", spec.checkpoint)
    return {name: value for name, _, value in (word.partition("=") for word in words[2:])}


def test_every_limit_is_on_the_command_line(checkpoint):
    assert options(worker(checkpoint())) == {
        "--host": "127.0.0.1",
        "--port": "8001",
        "--served-model-name": "chat",
        "--tensor-parallel-size": "1",
        "--pipeline-parallel-size": "1",
        "--max-model-len": "640",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "8192",
        "--block-size": "16",
        # 320 blocks for the tokens, 8 that are partly empty, 1 of its own; 64 KiB a block and layer
        "--kv-cache-memory-bytes": str(329 * 65536 * 32),
        "--gpu-memory-utilization": "0.2500",
        "--kv-cache-dtype": "auto",
        "--load-format": "safetensors",
        "--generation-config": "vllm",
        "--shutdown-timeout": "30",
        "--compilation-config": '{"max_cudagraph_capture_size": 512}',
        "--disable-uvicorn-access-log": "",
        "--skip-tokenizer-init": "",
    }


@pytest.mark.parametrize(
    ("wish", "kv_bytes"),
    [
        # a block of 16 tokens and a layer: 2 x heads x 16 x (128 x bytes of an element + a scale)
        pytest.param({}, 329 * 32 * (2 * 8 * 16 * 128 * 2), id="16bit"),
        pytest.param({"kv": KvFormat.FP8}, 329 * 32 * (2 * 8 * 16 * 128), id="fp8"),
        pytest.param({"kv": KvFormat.INT8}, 329 * 32 * (2 * 8 * 16 * (128 + 4)), id="int8-and-scales"),
        pytest.param({"tp": 4}, 329 * 32 * (2 * 2 * 16 * 128 * 2), id="two-heads-a-gpu"),
        pytest.param({"layers": (20, 12)}, 329 * 20 * (2 * 8 * 16 * 128 * 2), id="longest-stage"),
    ],
)
def test_kv_cache_bytes(checkpoint, wish, kv_bytes):
    assert options(worker(checkpoint(), **wish))["--kv-cache-memory-bytes"] == str(kv_bytes)


def test_kv_heads_are_replicated_beyond_their_number_not_split(checkpoint):
    spec = worker(checkpoint(num_key_value_heads=2), tp=4)
    assert options(spec)["--kv-cache-memory-bytes"] == str(329 * 32 * (2 * 1 * 16 * 128 * 2))


def test_a_sliding_window_may_begin_inside_a_block(checkpoint):
    changes = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 256}
    spec = worker(checkpoint(**changes))
    assert options(spec)["--kv-cache-memory-bytes"] == str((329 + 8) * 32 * 65536)


@pytest.mark.parametrize(
    ("types", "layers_of_blocks"),
    [
        # 329 blocks hold all tokens; of 8 windows and a step of 8192, as much; of 16 tokens' windows 9 a sequence
        pytest.param(
            ["sliding_attention", "full_attention"] * 16, 16 * (1 + 328 + 328 + 8), id="two-groups-of-16"
        ),
        pytest.param(
            (["sliding_attention"] * 7 + ["full_attention"]) * 4, 4 * (1 + 328 + 7 * 336), id="eight-of-4"
        ),
        pytest.param(["sliding_attention"] * 18 + ["full_attention"] * 14, 18 * (1 + 328 + 336), id="filled-up"),
    ],
)
def test_kinds_of_layers_share_the_blocks(checkpoint, types, layers_of_blocks):
    changes = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 256}
    spec = worker(checkpoint(**changes, layer_types=types, head_dim=128))
    assert options(spec)["--kv-cache-memory-bytes"] == str(layers_of_blocks * 65536)


@given(
    batch=st.integers(1, 300),
    context=st.integers(1, 5000),
    kv=st.sampled_from(KvFormat),
    first=st.integers(1, 31),
)
def test_every_sequence_fits_whatever_its_length(batch, context, kv, first):
    """vLLM's own rule: bytes // page // layers blocks of the stage that has fewest, one kept; 16 tokens each."""
    limits = WorkerLimits(
        max_batch=batch,
        max_batched_tokens=8192,
        max_context_tokens=context,
        kv_tokens=batch * context,
        memory_bytes_per_device=GIB,
    )
    spec = worker(Path("/"), layers=(first, 32 - first), limits=limits, kv=kv)
    model = launch.read_spec(LLAMA_8B)
    cache_bytes = launch.kv_cache_bytes(spec, model)
    page = 2 * 8 * 16 * {KvFormat.BITS16: 256, KvFormat.FP8: 128, KvFormat.INT8: 132}[kv]
    blocks = min(cache_bytes // page // layers for layers in (first, 32 - first)) - 1
    assert blocks >= batch * -(-context // 16)
    assert blocks <= batch * -(-context // 16) + batch + 1  # and not much more


def test_options_that_depend_on_the_configuration(checkpoint):
    found = options(worker(checkpoint(), layers=(17, 15), tp=2, weights=WeightFormat.FP8, kv=KvFormat.FP8))
    assert found["--quantization"] == "fp8"
    assert found["--kv-cache-dtype"] == "fp8"
    assert found["--distributed-executor-backend"] == "mp"
    assert json.loads(found["--compilation-config"])["pass_config"] == {"fuse_allreduce_rms": False}


def test_graphs_are_as_large_however_few_the_sequences(checkpoint):
    """vLLM's own default, twice the sequences, leaves prompts of a hundred tokens to the host's pace."""
    for tp in (1, 2):
        found = options(worker(checkpoint(), tp=tp))
        assert json.loads(found["--compilation-config"])["max_cudagraph_capture_size"] == launch.GRAPH_TOKENS
    hosted = (Path(launch.__file__).parents[2] / "vllm_worker" / "hosted.py").read_text()
    assert f"\nGRAPH_TOKENS = {launch.GRAPH_TOKENS} " in hosted  # a profile is of the engine that is deployed


def test_a_checkpoint_with_a_tokenizer_keeps_it(checkpoint):
    folder = checkpoint()
    (folder / "tokenizer.json").touch()
    assert "--skip-tokenizer-init" not in options(worker(folder))


def test_dummy_weights_are_used_where_asked_for_only(checkpoint):
    folder = checkpoint()
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors files"):
        options(worker(folder))
    assert options(replace(worker(folder), dummy_weights=True))["--load-format"] == "dummy"


@pytest.mark.parametrize(
    ("method", "weights", "taken"),
    [
        ("gptq", WeightFormat.GPTQ4, True),
        ("awq", WeightFormat.INT4, True),
        ("compressed-tensors", WeightFormat.INT4, True),
        ("fp8", WeightFormat.FP8, True),
        (None, WeightFormat.FP8, True),
        (None, WeightFormat.INT4, False),
        ("gptq", WeightFormat.BITS16, False),
        ("gptq", WeightFormat.INT4, False),
        ("bitsandbytes", WeightFormat.BITS16, False),
    ],
)
def test_weights_are_served_in_the_format_that_was_planned_or_not_at_all(checkpoint, method, weights, taken):
    stored = {} if method is None else {"quantization_config": {"quant_method": method, "bits": 4}}
    spec = worker(checkpoint(**stored), weights=weights)
    if taken:
        # quantized while loading only where the checkpoint is not quantized already
        assert ("--quantization" in options(spec)) is (method is None)
    else:
        with pytest.raises(CheckpointError, match=f"weights={weights} on vllm takes a checkpoint made by"):
            options(spec)


def test_the_environment_names_gpus_by_index_and_the_layers_of_each_stage(checkpoint):
    env = dict(launch.environment(worker(checkpoint(), layers=(20, 12)), DEVICES))
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "NCCL_NVLS_ENABLE" not in env
    env = dict(launch.environment(worker(checkpoint(), tp=2), DEVICES))
    assert (env["VLLM_ALLREDUCE_USE_SYMM_MEM"], env["NCCL_NVLS_ENABLE"]) == ("0", "0")
    assert env["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"


@pytest.mark.parametrize("memory_bytes", [0, 141 * GIB])
def test_a_memory_limit_that_is_no_part_of_the_device_is_refused(checkpoint, memory_bytes):
    spec = worker(checkpoint())
    limits = replace(spec.limits, memory_bytes_per_device=memory_bytes)
    with pytest.raises(ConfigError, match="memory_bytes_per_device"):
        options(replace(spec, limits=limits))


def test_stages_of_differing_memory_are_gated_by_the_smallest_part(checkpoint):
    spec = worker(checkpoint(), layers=(24, 8))
    large, small = spec.stages
    stages = (large, replace(small, memory_bytes_per_device=14 * GIB))
    assert options(replace(spec, stages=stages))["--gpu-memory-utilization"] == "0.1000"


def test_the_memory_limit_is_rounded_down(checkpoint):
    spec = worker(checkpoint())
    limits = replace(spec.limits, memory_bytes_per_device=spec.limits.memory_bytes_per_device + 10**7)
    assert options(replace(spec, limits=limits))["--gpu-memory-utilization"] == "0.2500"


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


def test_the_guards_own_refusal_is_a_conflict():
    said = VllmEngine().explain_failure(worker(Path("/models/m")), 98, "port 8001 of 127.0.0.1 is in use\n")
    assert isinstance(said, ConflictError)
    assert "port 8001 of 127.0.0.1 is in use" in str(said)


def test_a_profiling_worker_runs_our_own_program_in_its_interpreter(monkeypatch, tmp_path):
    from tests.daemon.engines.standin import make_vllm

    python = make_vllm(tmp_path / "env")
    monkeypatch.setenv("ISERVE_VLLM_PYTHON", str(python))
    one = {"GPU-0": DEVICES["GPU-0"]}
    command = VllmEngine().command(replace(worker(Path("/none")), profiling=True), tmp_path, one)
    at = command.argv.index("--", command.argv.index("daemon.engines.guard"))
    program, *rest = command.argv[at + 2 :]
    assert command.argv[at + 1] == str(python)
    assert program.endswith("/daemon/vllm_worker/__main__.py")
    assert rest == ["--spec", str(tmp_path / "spec.json")]
    path = command.argv[command.argv.index("--python-path") + 1]
    assert [Path(folder).parts[-2:] for folder in path.split(":")] == [
        ("daemon", "step_timer"),
        ("daemon", "hosted_worker"),
    ]
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


def test_a_gpu_without_a_datasheet_is_not_profiled():
    unknown = [replace(device, name="NVIDIA Abacus") for device in DEVICES.values()]
    with pytest.raises(ConfigError, match="no datasheet of 'NVIDIA Abacus'"):
        gpu_machine(unknown, ())
    with pytest.raises(ConfigError, match="one kind of GPU"):
        gpu_machine([unknown[0], *DEVICES.values()], ())
