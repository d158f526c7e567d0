"""Adapters in a real worker process: its answers over HTTP are those of transformers with merged weights."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from fingerprint.config import DeploymentConfig
from fingerprint.lora import merge_adapter, read_adapter
from tests.daemon.tiny_adapters import linears, write_tiny_adapter
from tests.daemon.tiny_models import generate
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.process

PROMPTS = [[5, 9, 33], [7], list(range(20, 40)), [90, 2, 2, 41]]
OUTPUT = 10
RANKS = {"poet": 8, "clerk": 2, "judge": 5}


@pytest.fixture(scope="module")
def folders(tiny_checkpoint, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    shapes, folder = linears(tiny_checkpoint("llama")), tmp_path_factory.mktemp("adapters")
    return {name: write_tiny_adapter(folder / name, shapes, rank, seed=rank) for name, rank in RANKS.items()}


@pytest.fixture(scope="module")
def expected(tiny_checkpoint, folders, tmp_path_factory) -> dict[str, list[list[int]]]:
    """Tokens that transformers generates, by model and prompt."""
    base, folder = tiny_checkpoint("llama"), tmp_path_factory.mktemp("merged")
    tokens = {"llama": [generate(base, prompt, OUTPUT) for prompt in PROMPTS]}
    for name, adapter in folders.items():
        merge_adapter(base, read_adapter(adapter), folder / name)
        tokens[name] = [generate(folder / name, prompt, OUTPUT) for prompt in PROMPTS]
    assert len({str(each) for each in tokens.values()}) == 4
    return tokens


@pytest.fixture
def worker(launch, tiny_checkpoint, tiny_stages, tiny_limits, module_spec):
    """``worker(tp=1, pp=1)``: a running worker of two slots that computes in float32."""

    def start(tp: int = 1, pp: int = 1) -> Any:
        spec = module_spec(
            served_model="llama",
            checkpoint=str(tiny_checkpoint("llama")),
            config=DeploymentConfig(tp=tp, pp=pp, adapter_slots=2, adapter_rank=8),
            stages=tiny_stages(4, tp=tp, pp=pp),
            limits=tiny_limits,
        )
        launched = launch(spec, float32=True)
        launched.wait_ready()
        return launched

    return start


def complete(worker, model: str, prompt: list[int]) -> list[int]:
    api = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    extra = {"return_token_ids": True}
    done = api.completions.create(model=model, prompt=prompt, max_tokens=OUTPUT, temperature=0, extra_body=extra)
    assert done.model == model
    return done.choices[0].token_ids


def mix(worker, models: list[str]) -> dict[str, list[list[int]]]:
    """Return the tokens of every prompt of every model, all asked at once."""
    asked = [(model, prompt) for prompt in PROMPTS for model in models]
    with ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda each: complete(worker, *each), asked))
    return {model: answers[place :: len(models)] for place, model in enumerate(models)}


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        pytest.param({"tp": 2}, id="tp2"),
        pytest.param({"pp": 2}, id="pp2", marks=pytest.mark.long),
    ],
)
def test_loaded_unloaded_and_loaded_again(
    degrees, worker, folders, expected, http_exchange, tmp_path: Path
) -> None:
    """More adapters than slots and the base at once; a bad adapter in between changes nothing."""
    running = worker(**degrees)

    def post(path: str, **body: str) -> tuple[int, bytes]:
        return http_exchange(running.url, "POST", path, body)

    def load(name: str, folder: Path) -> tuple[int, bytes]:
        return post("/v1/load_lora_adapter", lora_name=name, lora_path=str(folder))

    for name, folder in folders.items():
        status, body = load(name, folder)
        assert status == 200, body
    assert mix(running, ["llama", *folders]) == expected
    bad = write_tiny_adapter(tmp_path / "bad", {"model.layers.3.self_attn.q_proj": (32, 16)}, 2, seed=1)
    status, body = load("bad", bad)
    assert (status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
    assert post("/v1/unload_lora_adapter", lora_name="poet")[0] == 200
    with pytest.raises(openai.NotFoundError):
        complete(running, "poet", PROMPTS[0])
    assert load("poet", folders["clerk"])[0] == 200  # another one of that name
    assert mix(running, ["llama", "poet"]) == {"llama": expected["llama"], "poet": expected["clerk"]}
    assert running.process.poll() is None


def test_a_worker_dies_with_its_rank_while_adapters_are_loaded(worker, folders, http_exchange) -> None:
    import psutil

    running = worker(tp=2)
    body = {"lora_name": "poet", "lora_path": str(folders["poet"])}
    (rank,) = psutil.Process(running.process.pid).children()
    rank.kill()
    status, _ = http_exchange(running.url, "POST", "/v1/load_lora_adapter", body)
    assert status == 503
    wait_until(lambda: running.process.poll() is not None, "the worker has ended")
    assert running.process.returncode != 0


def test_a_variants_prompt_is_scored_with_its_adapter(
    worker: Any, tiny_checkpoint: Any, folders: Any, http_exchange: Any, tmp_path: Path
) -> None:
    import torch
    import transformers

    prompt = PROMPTS[2]
    running = worker()
    load = {"lora_name": "poet", "lora_path": str(folders["poet"])}
    assert http_exchange(running.url, "POST", "/v1/load_lora_adapter", load)[0] == 200
    merge_adapter(tiny_checkpoint("llama"), read_adapter(folders["poet"]), tmp_path / "poet")
    for model, folder in (("llama", tiny_checkpoint("llama")), ("poet", tmp_path / "poet")):
        body = {"model": model, "prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 0}
        status, raw = http_exchange(running.url, "POST", "/v1/completions", body)
        assert status == 200
        found = json.loads(raw)["choices"][0]["logprobs"]["token_logprobs"][1:]
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            rows = reference(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        expected = [rows[place - 1, prompt[place]].item() for place in range(1, len(prompt))]
        assert found == pytest.approx(expected, abs=1e-3)
