"""The worker as a process: the real engine's answers over HTTP, how it ends, and what its exit code says."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from daemon import exit_codes
from daemon.worker_spec import StageAssignment
from fingerprint.config import DeploymentConfig
from tests.daemon.tiny_models import generate
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S, wait_until

PROMPTS = [[5, 9, 33], [7], list(range(20, 60)), [90, 2, 2, 2, 41, 17, 8], [64, 3]]
OUTPUT = 12


@pytest.fixture(scope="module")
def tiny_worker(launch, tiny_checkpoint, tiny_stages, tiny_limits, module_spec):
    """``tiny_worker(family, **degrees)``: a running worker with a random model, computing in float32."""
    running: dict[tuple, Any] = {}

    def start(family: str, num_layers: int):
        if family not in running:
            worker = launch(
                module_spec(
                    served_model=family,
                    checkpoint=str(tiny_checkpoint(family)),
                    stages=tiny_stages(num_layers),
                    limits=tiny_limits,
                ),
                float32=True,
            )
            worker.wait_ready()
            running[family] = worker
        return running[family]

    return start


def complete(worker, **body: Any) -> list[list[int]]:
    """Token ids of each choice."""
    api = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    extra = {"return_token_ids": True}
    model = api.models.list().data[0].id
    done = api.completions.create(model=model, max_tokens=OUTPUT, extra_body=extra, **body)
    return [choice.token_ids for choice in done.choices]


@pytest.mark.parametrize(
    ("family", "num_layers"),
    [
        ("llama", 4),
        pytest.param("qwen3", 3, marks=pytest.mark.long),
        pytest.param("mistral", 3, marks=pytest.mark.long),
    ],
)
def test_greedy_equals_transformers_generate(tiny_worker, tiny_checkpoint, family: str, num_layers: int) -> None:
    """Alone, as one batch of prompts of all lengths, and from clients of their own."""
    worker = tiny_worker(family, num_layers)
    expected = [generate(tiny_checkpoint(family), prompt, OUTPUT) for prompt in PROMPTS]
    assert [complete(worker, prompt=prompt, temperature=0)[0] for prompt in PROMPTS] == expected
    assert complete(worker, prompt=PROMPTS, temperature=0) == expected
    with ThreadPoolExecutor(5) as pool:
        assert [
            done[0] for done in pool.map(lambda p: complete(worker, prompt=p, temperature=0), PROMPTS)
        ] == expected


def test_a_seed_gives_the_same_alone_and_in_a_batch(tiny_worker) -> None:
    worker = tiny_worker("llama", 4)
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    alone = [complete(worker, prompt=prompt, **sampling)[0] for prompt in PROMPTS]
    assert complete(worker, prompt=PROMPTS, **sampling) == alone
    assert complete(worker, prompt=PROMPTS[0], **sampling | {"seed": 8})[0] != alone[0]


def test_the_demo_answers_a_chat_and_drains_on_a_signal(launch, spec) -> None:
    worker = launch(spec())
    worker.wait_ready()
    api = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    messages = [{"role": "user", "content": "sort: 3 1 2"}]
    done = api.chat.completions.create(model="demo", messages=messages, temperature=0)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("1 2 3", "stop")
    with urllib.request.urlopen(f"{worker.url}/stats", timeout=PATIENCE_S) as answer:
        stats = json.load(answer)
    assert stats["memory"][0]["weights_bytes"] > 3_000_000
    assert stats["busy"][0]["busy_s"] > 0
    extra = {"ignore_eos": True}
    stream = api.completions.create(model="demo", prompt="a", max_tokens=120, stream=True, extra_body=extra)
    first = next(stream)
    worker.process.send_signal(signal.SIGTERM)
    finishes = [first.choices[0].finish_reason, *(chunk.choices[0].finish_reason for chunk in stream)]
    assert finishes[-1] == "length", "what runs is finished"
    assert worker.process.wait(PATIENCE_S) == 0
    assert not (worker.folder / exit_codes.STARTUP_ERROR_FILE).exists()


def test_a_signal_to_the_whole_process_group_lets_all_ranks_finish(launch, spec) -> None:
    """The shim ends a worker by its process group: the other ranks get the signal too."""
    stages = (StageAssignment(device_ids=("cpu:0", "cpu:1"), num_layers=8),)
    worker = launch(spec(config=DeploymentConfig(tp=2), stages=stages))
    worker.wait_ready()
    api = openai.OpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
    extra = {"ignore_eos": True}
    stream = api.completions.create(model="demo", prompt="a", max_tokens=120, stream=True, extra_body=extra)
    next(stream)
    ranks = psutil.Process(worker.process.pid).children()
    for process in (*ranks, worker.process):
        process.send_signal(signal.SIGTERM)
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    assert worker.process.wait(PATIENCE_S) == 0
    assert len(ranks) == 1
    assert not ranks[0].is_running()


def test_a_cache_that_no_machine_holds_is_out_of_memory(launch, spec) -> None:
    """More than an address space, and the limit lets it pass."""
    good = spec()
    limits = replace(good.limits, max_context_tokens=10**13, memory_bytes_per_device=2**62)
    worker = launch(replace(good, limits=limits))
    code, said = failed(worker)
    assert (code, said["error"]) == (exit_codes.OUT_OF_MEMORY, "EngineError")
    assert "Traceback" not in worker.log()


def test_a_lease_nobody_renews_ends_it(launch, spec, tmp_path: Path, golden: Golden) -> None:
    lease = tmp_path / "lease.json"
    lease.write_text("{}")
    enough = threading.Event()

    def renew() -> None:
        while not enough.wait(0.05):
            os.utime(lease)

    renewing = threading.Thread(target=renew, daemon=True)
    renewing.start()
    try:
        worker = launch(spec(lease_ttl_s=2.0), lease=lease)
        wait_until(lambda: "listens on" in worker.log(), "it watches its lease")
        outlived_s = time.monotonic() + 3.0  # more than its time to live
        worker.wait_ready()
        time.sleep(max(0.0, outlived_s - time.monotonic()))
        assert "lease has run out" not in worker.log()
        assert worker.process.poll() is None
    finally:
        enough.set()
        renewing.join()
    assert worker.process.wait(PATIENCE_S) == 0
    golden("daemon", worker.log().splitlines()[-1].partition(" INFO ")[2])


def failed(worker) -> tuple[int, dict[str, str]]:
    code = worker.process.wait(PATIENCE_S)
    return code, json.loads((worker.folder / exit_codes.STARTUP_ERROR_FILE).read_text())


def test_a_port_in_use(launch, spec) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = failed(launch(spec(port=port)))
    assert (code, said["error"]) == (exit_codes.PORT_IN_USE, "ConflictError")
    assert f"127.0.0.1:{port}" in said["message"]


@pytest.mark.parametrize(
    "where",
    [pytest.param({"host": "203.0.113.1"}, id="another-machine's"), pytest.param({"port": 70_000}, id="no-port")],
)
def test_an_address_that_cannot_be_is_not_a_port_in_use(launch, spec, where: dict[str, Any]) -> None:
    """The daemon would try port after port."""
    code, said = failed(launch(spec(**where)))
    assert (code, said["error"]) == (exit_codes.BAD_CHECKPOINT, "ConfigError")
    assert "cannot listen on" in said["message"]


def test_a_stop_during_a_long_load_is_no_failure(launch, spec, golden: Golden) -> None:
    """A load cannot be broken off; its process is."""
    worker = launch(spec(), slow_load=True)
    wait_until(lambda: "loading" in worker.log(), "it loads")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(PATIENCE_S) == 0
    golden("daemon", worker.log().splitlines()[-1].partition(" INFO ")[2])
    assert not (worker.folder / exit_codes.STARTUP_ERROR_FILE).exists()


def test_checkpoints_that_cannot_be_served(launch, spec, tmp_path: Path) -> None:
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"\x80")
    workers = [launch(spec(checkpoint=str(tmp_path / name))) for name in ("missing", "pickle")]
    for worker in workers:
        code, said = failed(worker)
        assert code == exit_codes.BAD_CHECKPOINT, worker.log()
        assert str(tmp_path) in said["message"]
        assert "Traceback" not in worker.log()


def test_a_spec_that_is_none(launch, spec) -> None:
    good = spec(port=1)
    worker = launch(replace(good, limits=replace(good.limits, max_batch="many")))
    code, said = failed(worker)
    assert (code, said["error"]) == (exit_codes.BAD_CHECKPOINT, "BadInputError")
