"""vLLM's command line and environment, without a process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from daemon.engines.vllm import cache, launch
from daemon.worker_spec import WorkerLimits, WorkerSpec
from fingerprint.config import KvFormat, WeightFormat
from fingerprint.engines import graph_sizes
from fingerprint.errors import CheckpointError, ConfigError
from tests.daemon.engines.vllm_worker_spec import DEVICES, GIB, LLAMA_8B, worker
from tests.golden_words import Golden


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with the 8B's config and no weights to speak of."""

    def make(**changes: object) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | changes))
        (tmp_path / "model.safetensors").touch()
        return tmp_path

    return make


def options(spec: WorkerSpec) -> dict[str, str]:
    words = launch.arguments(spec, launch.read_model(spec), DEVICES)
    assert words[:2] == ("serve", spec.checkpoint)
    return {name: value for name, _, value in (word.partition("=") for word in words[2:])}


@pytest.mark.parametrize("tp", [2, 4])
def test_expert_parallelism_is_one_word_more(checkpoint, tp: int) -> None:
    """The all-reduces are those of tensor parallelism, and NVLink multicast stays off."""
    folder = checkpoint(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=8,
        num_experts_per_tok=2,
    )
    plain, divided = (worker(folder, tp=tp, expert_parallel=experts) for experts in (False, True))
    assert options(divided) == options(plain) | {"--enable-expert-parallel": ""}
    assert launch.environment(divided, DEVICES) == launch.environment(plain, DEVICES)
    assert dict(launch.environment(divided, DEVICES))["NCCL_NVLS_ENABLE"] == "0"


def test_every_limit_is_on_the_command_line(checkpoint):
    assert options(worker(checkpoint())) == {
        "--host": "127.0.0.1",
        "--port": "8001",
        "--served-model-name": "chat",
        "--tensor-parallel-size": "1",
        "--pipeline-parallel-size": "1",
        "--max-model-len": "640",
        "--max-num-seqs": "8",
        "--max-num-batched-tokens": "5120",  # all that 8 sequences hold
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


def test_drafts_are_looked_up_in_the_text_itself(checkpoint):
    found = options(worker(checkpoint(), draft_tokens=4))
    assert json.loads(found.pop("--speculative-config")) == {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
    assert found == options(worker(checkpoint()))


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


def test_a_window_keeps_the_tokens_of_every_step_in_flight(checkpoint):
    """For one sequence of 32,768 tokens, a window of 128, steps of 8,192, the blocks are those that vLLM asks for.

    It asks for 521 blocks of the window's group in 0.24 and for 1,033 from 0.26 on, which schedules a second step
    while one runs.
    """
    types = ["sliding_attention", "full_attention"] * 16
    changes = {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "sliding_window": 128}
    folder = checkpoint(**changes, layer_types=types, head_dim=128, max_position_embeddings=32_768)
    limits = replace(worker(folder).limits, max_batch=1, max_context_tokens=32_768, kv_tokens=32_768)
    spec = replace(worker(folder), limits=limits)
    blocks = int(options(spec)["--kv-cache-memory-bytes"]) // 65536 // 16
    full = 32_768 // 16 + 1
    assert 1033 <= blocks - 1 - full <= 1035


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
    cache_bytes = cache.kv_cache_bytes(spec, model)
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


@pytest.mark.parametrize(
    ("quantization", "dtype", "plain"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "bfloat16", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, "float16", "float16"),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "bfloat16", "bfloat16"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, "bfloat16", "auto"),
        (None, "bfloat16", "auto"),
    ],
)
def test_a_cache_in_16_bits_is_one_whatever_the_checkpoint_asks_for(
    quantization: dict[str, object] | None, dtype: str, plain: str
) -> None:
    """FP8 is what "auto" means to vLLM where the checkpoint has scales for it."""
    found = cache.plain_kv_dtype({"quantization_config": quantization, "dtype": dtype})
    assert found == plain
    assert [cache.kv_dtype(kv, found) for kv in KvFormat] == [plain, "int8_per_token_head", "fp8"]


def test_graphs_are_as_large_however_few_the_sequences(checkpoint):
    """vLLM's own default, twice the sequences, leaves prompts of a hundred tokens to the host's pace."""
    for tp in (1, 2):
        found = options(worker(checkpoint(), tp=tp))
        assert json.loads(found["--compilation-config"])["max_cudagraph_capture_size"] == 512


@pytest.mark.parametrize(("step_tokens", "largest"), [(8192, 4096), (700, 700)])
def test_graphs_are_as_large_as_the_launch_says(checkpoint, step_tokens: int, largest: int):
    """The host takes longer to launch a mixture's many short kernels, up to 4,096 tokens, than they run."""
    spec = worker(checkpoint())
    limits = replace(spec.limits, max_batched_tokens=step_tokens, graph_tokens=4096)
    found = options(replace(spec, limits=limits))
    assert json.loads(found["--compilation-config"]) == {"cudagraph_capture_sizes": [*graph_sizes(largest)]}


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
def test_weights_are_served_in_the_format_that_was_planned_or_not_at_all(
    checkpoint, method, weights, taken, golden: Golden
):
    stored = {} if method is None else {"quantization_config": {"quant_method": method, "bits": 4}}
    spec = worker(checkpoint(**stored), weights=weights)
    if taken:
        # quantized while loading only where the checkpoint is not quantized already
        assert ("--quantization" in options(spec)) is (method is None)
    else:
        with golden.raises("engines", CheckpointError):
            options(spec)


def test_the_environment_names_gpus_by_index_and_the_layers_of_each_stage(checkpoint):
    env = dict(launch.environment(worker(checkpoint(), layers=(20, 12)), DEVICES))
    assert env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert env["VLLM_PP_LAYER_PARTITION"] == "20,12"
    assert env["VLLM_NO_USAGE_STATS"] == env["DO_NOT_TRACK"] == "1"
    assert "NCCL_NVLS_ENABLE" not in env
    assert "VLLM_PP_LAYER_PARTITION" not in dict(launch.environment(worker(checkpoint()), DEVICES))
    env = dict(launch.environment(worker(checkpoint(), tp=2), DEVICES))
    assert (env["VLLM_ALLREDUCE_USE_SYMM_MEM"], env["NCCL_NVLS_ENABLE"]) == ("0", "0")
    assert env["VLLM_ALLREDUCE_USE_FLASHINFER"] == "0"
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
