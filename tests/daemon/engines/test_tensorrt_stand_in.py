"""The stand-in itself refuses what ``trtllm-serve`` is documented to refuse; a lenient one would prove nothing."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.daemon.engines.tensorrt_environment import make_checkpoint
from tests.daemon.engines.tensorrt_stand_in.engine import Behaviour, Engine
from tests.daemon.engines.tensorrt_stand_in.flags import parse
from tests.daemon.engines.tensorrt_stand_in.options import merged
from tests.daemon.engines.tensorrt_stand_in.refusal import RefusedError
from tests.daemon.engines.tensorrt_stand_in.server import serve
from tests.golden_words import Golden


@pytest.mark.parametrize(
    "line",
    [
        "serve m --unheard-of 1",
        "serve m --tp-size 2",
        "serve m --served_model_name x",
        "serve m --grpc",
        "serve m --tp_size two",
        "serve m --backend vllm",
        "serve m --port",
        "serve",
        "serve m n",
        "m --dtype float16",
    ],
)
def test_an_undocumented_command_line_is_refused(line: str, golden: Golden) -> None:
    with golden.raises("engines", RefusedError) as caught:
        parse(line.split())
    assert caught.value.exit_code == 2


def test_documented_names_mean_the_same() -> None:
    short = "m --tp_size 2 --pp_size=3 --config f --kv_cache_free_gpu_memory_fraction 0.5"
    long = "serve m --tensor_parallel_size 2 --pipeline_parallel_size 3 --extra_llm_api_options f"
    assert parse(short.split()) == parse([*long.split(), "--free_gpu_memory_fraction", "0.5"])


@pytest.mark.parametrize(
    "text",
    [
        "no_such_key: 1",
        "quant_config: {}",
        "build_config: {}",
        "kv_cache_config: {no_such: 1}",
        "kv_cache_config: {dtype: int8}",
        "kv_cache_config: {max_tokens: many}",
        "max_batch_size: 1.5",
        "orchestrator_type: mpi",
        "scheduler_config: {capacity_scheduler_policy: FAIR}",
        "cuda_graph_config: {batch_sizes: [1, 4], max_batch_size: 8}",
        "lora_config: {max_rank: 8}",
        "lora_config: {lora_target_modules: attn_q}",
        "peft_cache_config: {slots: 8}",
        "- a list",
    ],
)
def test_undocumented_options_are_refused(text: str, golden: Golden) -> None:
    with golden.raises("engines", RefusedError):
        merged(parse(["m"])[2], text)


def test_the_file_overrides_the_command_line_and_its_kv_block_is_merged() -> None:
    line = "m --max_batch_size 4 --max_seq_len 50 --free_gpu_memory_fraction 0.5"
    flags = parse(line.split())[2]
    held = merged(flags, "max_batch_size: 9\nkv_cache_config: {max_tokens: 64}\nscheduler_config: {}")
    assert (held["max_batch_size"], held["max_seq_len"]) == (9, 50)
    assert held["kv_cache_config"]["free_gpu_memory_fraction"] == 0.5
    assert held["kv_cache_config"]["max_tokens"] == 64
    assert held["scheduler_config"] == {}  # replaced whole: the server's preset is gone
    assert merged(flags, None)["scheduler_config"]["dynamic_batch_config"]["enable_batch_size_tuning"]


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["FalconForCausalLM"]},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"modelopt": {"quant_algo": "W8A8_SQ_PER_CHANNEL"}},
    ],
    ids=repr,
)
def test_checkpoints_that_it_does_not_read_are_refused(tmp_path: Path, changes: dict, golden: Golden) -> None:
    with golden.raises("engines", RefusedError):
        load(make_checkpoint(tmp_path / "m", **changes))


@pytest.mark.parametrize("text", ["pp_partition: [5]", "pp_partition: [3, 4]", "pp_partition: [2, 2, 2]"])
def test_a_partition_must_fit_stages_and_layers(tmp_path: Path, text: str, golden: Golden) -> None:
    with golden.raises("engines", RefusedError):
        load(make_checkpoint(tmp_path / "m"), f"pipeline_parallel_size: 2\n{text}")


def load(folder: Path, text: str | None = None, **behaviour: object) -> Engine:
    return Engine(folder, merged(parse(["m"])[2], text), Behaviour(metrics_wait_s=0.05, **behaviour))


def test_a_cache_below_one_sequence_shortens_it_without_an_error(tmp_path: Path, capsys, golden: Golden) -> None:
    engine = load(make_checkpoint(tmp_path / "m"), "kv_cache_config: {max_tokens: 64}")
    assert engine.max_seq_len == 64
    golden("engines", capsys.readouterr().out)


LORA = "cuda_graph_config: null\nlora_config: {max_loras: 1, max_cpu_loras: 4, max_lora_rank: 8"


@pytest.mark.parametrize(
    "text",
    [
        LORA + "}",
        LORA + "}\npeft_cache_config: {max_adapter_size: 16}",
        LORA + ", lora_target_modules: [q_proj]}\npeft_cache_config: {max_adapter_size: 8}",
        "lora_config: {max_lora_rank: 8}",
    ],
    ids=["largest-by-default", "largest-above-rank", "names-of-peft", "graphs"],
)
def test_adapters_that_it_would_not_start_with_are_refused(tmp_path: Path, text: str, golden: Golden) -> None:
    with golden.raises("engines", RefusedError):
        load(make_checkpoint(tmp_path / "m"), text)


@pytest.mark.parametrize(
    "asked",
    [
        {"lora_name": "a", "lora_int_id": 1, "lora_path": "/", "base": "m"},
        {"lora_int_id": 1, "lora_path": "/"},
        {"lora_name": "a", "lora_path": "/"},
        {"lora_name": "a", "lora_int_id": "1", "lora_path": "/"},
        {"lora_name": "a", "lora_int_id": 1, "lora_path": "/none/such"},
        {"lora_name": "a", "lora_int_id": 1, "lora_path": "/", "lora_ckpt_source": "peft"},
        "a",
    ],
)
def test_an_undocumented_adapter_of_a_request_is_refused(ask: Ask, asked: object, golden: Golden) -> None:
    status, answer = ask({"prompt": "a", "lora_request": asked})
    assert status == 400
    golden("engines", answer["message"])


def test_an_adapter_is_left_out_silently_where_none_are_configured(ask: Ask) -> None:
    asked = {"lora_name": "a", "lora_int_id": 0, "lora_path": "/"}  # no adapter is there
    status, answer = ask({"prompt": "a", "max_tokens": 1, "lora_request": asked})
    assert (status, answer["choices"][0]["text"]) == (200, "tok ")


Ask = Callable[..., tuple[int, dict]]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """POST to a server with the default options but 60 tokens a step and 100 a sequence."""
    engine = load(
        make_checkpoint(tmp_path / "m"), "max_num_tokens: 60\nmax_seq_len: 100\nenable_iter_perf_stats: true"
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=serve, args=(server, engine))
    thread.start()

    def post(body: dict | None, path: str = "/v1/completions") -> tuple[int, dict]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}{path}", data) as answer:
                text = answer.read()
                return answer.status, json.loads(text) if text.startswith((b"{", b"[")) else text.decode()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    try:
        yield post
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "guided_json": "{}"},
        {"prompt": "a", "top_k": -1},
        {"prompt": "a", "top_k": None},
        {"prompt": "a", "use_beam_search": True, "best_of": 4},
        {"prompt": [1] * 100},
        {"prompt": [1] * 61},
    ],
)
def test_a_bad_request_gets_a_flat_400(ask: Ask, body: dict, golden: Golden) -> None:
    status, answer = ask(body)
    assert status == 400
    golden("engines", answer.pop("message"))
    assert answer == {"object": "error", "type": "BadRequestError", "param": None, "code": 400}


def test_max_tokens_left_out_is_all_the_room_and_too_many_are_cut(ask: Ask) -> None:
    assert ask({"prompt": [1] * 10})[1]["usage"]["completion_tokens"] == 90
    assert ask({"prompt": [1] * 10, "max_tokens": 1000})[1]["usage"]["completion_tokens"] == 90


def test_usage_of_a_stream_comes_only_when_asked_for(ask: Ask) -> None:
    _, plain = ask({"prompt": "a", "max_tokens": 2, "stream": True})
    _, counted = ask({"prompt": "a", "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}})
    assert "usage" not in plain
    assert plain.endswith("data: [DONE]\n\n")
    last = json.loads(counted.split("\n\n")[-3].removeprefix("data: "))
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 2)


def test_each_iteration_is_told_once(ask: Ask) -> None:
    ask({"prompt": [1] * 10, "max_tokens": 3})
    _, records = ask(None, "/metrics")
    assert [record["iter"] for record in records] == [1, 2, 3]
    assert ask(None, "/metrics") == (200, [])


def test_the_reported_name_is_the_folders(ask: Ask) -> None:
    assert ask(None, "/v1/models")[1]["data"][0]["id"] == "m"
    assert ask({"prompt": "a", "max_tokens": 1, "model": "anything"})[1]["model"] == "m"
    assert ask(None, "/version") == (200, {"version": "1.2.1"})
