"""The TensorRT-LLM adapter's parts: options, checkpoints, failures, refusals, statistics. No process here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.tensorrt_llm.adapter import TensorRtLlmEngine
from daemon.engines.tensorrt_llm.capabilities import TABLE
from daemon.engines.tensorrt_llm.checkpoint import StoredFormats, check_formats, stored_formats
from daemon.engines.tensorrt_llm.iterations import Iterations
from daemon.engines.tensorrt_llm.options import as_yaml, kv_blocks, llm_options
from daemon.engines.tensorrt_llm.proxy import openai_error
from daemon.worker_spec import WorkerLimits
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import (
    CheckpointError,
    ConfigError,
    EngineError,
    InfeasibleError,
    UnavailableError,
    UnsupportedModelError,
)
from fingerprint.families import read_spec
from tests.daemon.engines.tensorrt_environment import CONFIG, make_checkpoint, make_spec
from tests.daemon.engines.tensorrt_stand_in.engine import FAILURES
from tests.daemon.engines.tensorrt_stand_in.options import merged
from tests.golden_words import Golden

MODEL = read_spec(CONFIG)
NO_FLAGS = {
    "max_batch_size": 2048,
    "max_num_tokens": 8192,
    "max_seq_len": None,
    "max_beam_width": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "kv_cache_config": {"free_gpu_memory_fraction": 0.9},
}


def config(**changes: object) -> DeploymentConfig:
    return DeploymentConfig(engine="tensorrt-llm", **changes)


# --- options ---------------------------------------------------------------------------------------------------


def test_every_limit_is_in_the_options(tmp_path: Path) -> None:
    """100 tokens of a sequence fill 4 blocks of 32; a token of 6 layers, 2 KV heads of 16 takes 768 bytes."""
    assert llm_options(make_spec(tmp_path), MODEL) == {
        "max_batch_size": 8,
        "max_num_tokens": 640,
        "max_seq_len": 100,
        "max_input_len": 100,
        "max_beam_width": 1,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "enable_chunked_prefill": False,
        "kv_cache_config": {
            "dtype": "auto",
            "tokens_per_block": 32,
            "max_tokens": 1024,
            "max_gpu_total_bytes": 1024 * 768,
            "free_gpu_memory_fraction": 0.95,
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        "cuda_graph_config": {"max_batch_size": 8},
        "enable_iter_perf_stats": True,
        "load_format": "dummy",
    }


def test_real_weights_are_read_as_they_are(tmp_path: Path) -> None:
    assert "load_format" not in llm_options(make_spec(tmp_path, dummy_weights=False), MODEL)


def test_a_prompt_longer_than_a_step_is_taken_in_chunks(tmp_path: Path) -> None:
    spec = make_spec(tmp_path)
    spec = replace(spec, limits=replace(spec.limits, max_batched_tokens=64))
    assert llm_options(spec, MODEL)["enable_chunked_prefill"] is True


@pytest.mark.parametrize(
    ("layers", "partition"),
    [
        pytest.param((3, 3), None, id="even"),
        pytest.param((2, 4), [2, 4], id="uneven"),
        pytest.param((4, 2), [4, 2], id="uneven-first-longer"),
    ],
)
def test_only_an_uneven_split_is_spelled_out(tmp_path: Path, layers: tuple[int, ...], partition: object) -> None:
    options = llm_options(make_spec(tmp_path, layers=layers), MODEL)
    assert options["pipeline_parallel_size"] == 2
    assert options.get("pp_partition") == partition
    kv = options["kv_cache_config"]
    assert kv["max_gpu_total_bytes"] == kv["max_tokens"] * max(layers) * 128  # type: ignore[index]


@pytest.mark.parametrize(
    ("changes", "token_bytes"),
    [
        pytest.param({"tp": 1}, 768, id="tp1"),
        pytest.param({"tp": 2}, 384, id="tp2-splits-heads"),
        pytest.param({"kv": KvFormat.FP8}, 384, id="fp8"),
    ],
)
def test_kv_bytes_follow_tp_and_format(tmp_path: Path, changes: dict[str, object], token_bytes: int) -> None:
    kv = llm_options(make_spec(tmp_path, config=config(**changes)), MODEL)["kv_cache_config"]
    assert kv["max_gpu_total_bytes"] == 1024 * token_bytes  # type: ignore[index]
    assert kv["dtype"] == ("fp8" if "kv" in changes else "auto")  # type: ignore[index]


@given(st.integers(1, 64), st.integers(1, 5000))
def test_the_blocks_hold_a_full_batch_of_the_longest_sequences(batch: int, context: int) -> None:
    limits = WorkerLimits(
        max_batch=batch,
        max_batched_tokens=1,
        max_context_tokens=context,
        kv_tokens=batch * context,
        memory_bytes_per_device=0,
    )
    blocks_of_one = -(-context // 32)
    assert kv_blocks(limits) == batch * blocks_of_one


@settings(deadline=None)
@given(
    st.integers(1, 4096),
    st.integers(1, 10**6),
    st.integers(2, 10**6),
    st.sampled_from([(6,), (3, 3), (1, 5)]),
    st.sampled_from([KvFormat.BITS16, KvFormat.FP8]),
)
def test_the_engine_takes_whatever_is_asked_as_it_is_meant(
    batch: int, batched: int, context: int, layers: tuple[int, ...], kv: KvFormat
) -> None:
    """Through the file, YAML, and the stand-in's strict reading of it."""
    limits = WorkerLimits(
        max_batch=batch,
        max_batched_tokens=batched,
        max_context_tokens=context,
        kv_tokens=batch * context,
        memory_bytes_per_device=0,
    )
    spec = make_spec(Path("/m"), layers=layers, config=config(pp=len(layers), kv=kv), limits=limits)
    options = llm_options(spec, MODEL)
    text = as_yaml(options)
    assert yaml.safe_load(text) == options
    held = merged(NO_FLAGS, text)
    assert {key: held[key] for key in options} == options


# --- checkpoints -----------------------------------------------------------------------------------------------

FLOAT8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}


@pytest.mark.parametrize(
    ("modelopt", "quantization", "weights", "kv"),
    [
        pytest.param(None, None, WeightFormat.BITS16, None, id="16bit"),
        pytest.param({"quant_algo": "FP8"}, None, WeightFormat.FP8, None, id="fp8"),
        pytest.param(
            {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, None, WeightFormat.FP8, KvFormat.FP8, id="fp8-kv"
        ),
        pytest.param({"quant_algo": "W8A16"}, None, WeightFormat.INT8, None, id="int8"),
        pytest.param({"quant_algo": "W4A16_AWQ", "group_size": 128}, None, WeightFormat.INT4, None, id="awq"),
        pytest.param({"quant_algo": "FP8"}, {"quant_method": "gptq"}, WeightFormat.FP8, None, id="modelopt-first"),
        pytest.param(
            None, {"quant_method": "fp8", "weight_block_size": [128, 128]}, WeightFormat.FP8, None, id="fp8-block"
        ),
        pytest.param(
            None, {"quant_method": "compressed-tensors"} | FLOAT8, WeightFormat.FP8, None, id="compressed"
        ),
    ],
)
def test_formats_are_read_from_the_files(tmp_path, modelopt, quantization, weights, kv):
    folder = make_checkpoint(tmp_path / "m", modelopt=modelopt, quantization_config=quantization)
    stored = stored_formats(folder)
    assert (stored.weights, stored.kv) == (weights, kv)


INT8 = {"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "int"}}}}


@pytest.mark.parametrize(
    ("modelopt", "changes"),
    [
        pytest.param({"quant_algo": "W4A16_GPTQ"}, {}, id="gptq-modelopt"),
        pytest.param({"quant_algo": "W8A8_SQ_PER_CHANNEL"}, {}, id="smoothquant"),
        pytest.param({"quant_algo": "NVFP4"}, {}, id="nvfp4"),
        pytest.param({"quant_algo": None}, {}, id="no-algorithm"),
        pytest.param({"quant_algo": "W4A16_AWQ", "group_size": 64}, {}, id="groups"),
        pytest.param({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, {}, id="int8-kv"),
        pytest.param(None, {"quantization_config": {"quant_method": "gptq"}}, id="gptq"),
        pytest.param(None, {"quantization_config": {"quant_method": "fp8"}}, id="fp8-plain"),
        pytest.param(None, {"quantization_config": [1]}, id="no-object"),
        pytest.param(
            None, {"quantization_config": {"quant_method": "compressed-tensors"} | INT8}, id="int8-taken-for-fp8"
        ),
        pytest.param(None, {"auto_map": {"AutoModel": "m.M"}}, id="remote-code"),
    ],
)
def test_what_it_would_not_read_or_read_wrongly_is_refused(tmp_path, modelopt, changes, golden: Golden):
    folder = make_checkpoint(tmp_path / "m", modelopt=modelopt, **changes)
    with golden.raises("engines", CheckpointError):
        stored_formats(folder)


def test_a_damaged_file_is_named(tmp_path, golden: Golden):
    folder = make_checkpoint(tmp_path / "m")
    (folder / "hf_quant_config.json").write_text("{")
    with golden.raises("engines", ConfigError):
        stored_formats(folder)


@pytest.mark.parametrize("weights", WeightFormat)
@pytest.mark.parametrize("stored", WeightFormat)
def test_only_the_planned_weights_are_served(weights, stored):
    there = StoredFormats(stored, None, "X")
    as_it_is = weights is WeightFormat.STORED and stored is not WeightFormat.BITS16
    if weights is stored or as_it_is:
        check_formats(there, config(weights=weights, kv=KvFormat.FP8), Path("/m"))
    else:
        with pytest.raises(CheckpointError, match=f"weights={weights}.*stored as {stored}.*quantizes nothing"):
            check_formats(there, config(weights=weights), Path("/m"))


def test_a_kv_format_that_the_checkpoint_brings_cannot_be_undone():
    there = StoredFormats(WeightFormat.FP8, KvFormat.FP8, "FP8")
    check_formats(there, config(weights=WeightFormat.FP8, kv=KvFormat.FP8), Path("/m"))
    with pytest.raises(CheckpointError, match=r"kv=16bit.*asks for fp8"):
        check_formats(there, config(weights=WeightFormat.FP8), Path("/m"))


# --- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("Failed to bind socket to 127.0.0.1:8000: in use", UnavailableError),
        ("Only 1 GPUs are available, but 2 are required.", InfeasibleError),
        ("\n".join(FAILURES["out-of-memory"]), EngineError),
        (FAILURES["cuda-malloc"][0], EngineError),
        (f"{FAILURES['out-of-memory'][0]}\nThe following component could not be created: KV cache", EngineError),
        ("EngineError: TensorRT-LLM: its rank process 7 died", EngineError),  # our own worker's
        ("Unknown architecture for AutoModelForCausalLM: BloomForCausalLM", UnsupportedModelError),
        ("ValueError: LLM got invalid argument: pp_partition", EngineError),
        ("The following arguments are specific to TensorRT backend: ['x']", EngineError),
        ("NotImplementedError: Unsupported quantization_config: {}", CheckpointError),
        ("ValueError: unsupported quant mode: 4", CheckpointError),
        ("Overriding KV cache quantization with an invalid type 'int8'", ConfigError),
        ("KV cache quantization FP8 doesn't match the checkpoint's", ConfigError),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried", EngineError),
        ("\n".join(FAILURES["worker-died"]), EngineError),
        ("RuntimeError: Executor worker returned error", EngineError),
        ("a line\nImportError: libmpi.so.40", EngineError),
        ("", EngineError),
    ],
)
def test_documented_last_words_become_the_projects_errors(tmp_path, log, error, golden: Golden):
    explained = TensorRtLlmEngine().explain_failure(make_spec(tmp_path), 1, f"noise\n{log}\n" if log else "")
    assert type(explained) is error
    golden("engines", str(explained))


# --- refusals of requests --------------------------------------------------------------------------------------


def flat(message: str, **changes: object) -> bytes:
    body = {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}
    return json.dumps(body | changes).encode()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("prompt length (9) ... should not exceed max_num_tokens (4)", "context_length_exceeded"),
        ("`default_max_tokens` (-4) must be greater than 0, ...", "context_length_exceeded"),
        ("Request beam width 4 is not equal to max_beam_width 1.", "unsupported_value"),
        ("No chat template found for the given tokenizer", "no_chat_template"),
        ("body.foo: Extra inputs are not permitted", None),
    ],
)
def test_a_flat_refusal_gets_the_form_that_clients_parse(message, code, golden: Golden):
    answer = openai_error(flat(message, param="p"))
    assert answer is not None
    error = json.loads(answer)["error"]
    assert error["code"] == code
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "p"
    golden("engines", error["message"])


@pytest.mark.parametrize(
    "body", [b"", b"<h1>", b"[]", b'{"object": "list"}', b'{"error": {"message": "m"}}', b"\xff", b"[" * 100_000]
)
def test_what_is_not_flat_is_left_alone(body):
    assert openai_error(body) is None


# --- statistics ------------------------------------------------------------------------------------------------


def record(number: int, *, prompt: int = 0, prefilling: int = 0, decoding: int = 0, **changes: object) -> dict:
    batch = {
        "numScheduledRequests": prefilling + decoding,
        "numContextRequests": prefilling,
        "numGenRequests": decoding,
        "numCtxTokens": prompt,
    }
    kv = {"maxNumBlocks": 32, "freeNumBlocks": 20, "usedNumBlocks": 12, "tokensPerBlock": 32}
    values = {"iter": number, "iterLatencyMS": 2.5, "numActiveRequests": 3, "numQueuedRequests": 1}
    return values | {"kvCacheStats": kv, "inflightBatchingStats": batch} | changes


SPEC = make_spec(Path("/m"), layers=(3, 3))


def taken(*answers: list[dict]) -> Iterations:
    iterations = Iterations()
    for records in answers:
        iterations.add(json.dumps(records).encode())
    return iterations


def test_records_add_up_across_answers() -> None:
    """The last one scheduled nothing: no step, and no busy time."""
    iterations = taken(
        [record(1, prompt=40, prefilling=2), record(2, decoding=2)], [], [record(3, decoding=3), record(4)]
    )
    stats = iterations.stats(SPEC, idle=False)
    assert stats is not None
    assert (stats.running, stats.waiting) == (3, 1)
    assert (stats.kv_tokens_total, stats.kv_tokens_free, stats.kv_block_tokens) == (1024, 640, 32)
    assert (stats.prompt_tokens, stats.output_tokens, stats.steps) == (40, 7, 3)
    busy = {busy.device_id: busy.busy_s for busy in stats.busy}
    assert busy == pytest.approx({"GPU-aaaa": 0.0075, "GPU-bbbb": 0.0075})
    assert stats.memory == ()


def test_an_idle_worker_has_its_totals_and_all_its_room() -> None:
    stats = taken([record(1, prompt=40, prefilling=2)]).stats(SPEC, idle=True)
    assert stats is not None
    assert (stats.running, stats.waiting, stats.prompt_tokens, stats.steps) == (0, 0, 40, 1)
    assert stats.kv_tokens_free == stats.kv_tokens_total == 1024


def test_before_the_first_record_nothing_is_known() -> None:
    assert taken([]).stats(SPEC, idle=True) is None


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'[{"iter": 1}]', b"nothing", b"\xff", b"[" * 100_000])
def test_what_is_no_list_of_records_counts_for_nothing(body: bytes, golden: Golden) -> None:
    iterations = taken([record(1, prompt=40, prefilling=2)])
    before = iterations.stats(SPEC, idle=True)
    with golden.raises("engines", EngineError):
        iterations.add(body)
    assert iterations.stats(SPEC, idle=True) == before


# --- the table -------------------------------------------------------------------------------------------------


def test_nothing_of_it_counts_as_verified():
    assert not TABLE.verified
