"""Deltas and a LoRA on vLLM through plan, daemon, gateway and store: real processes, HTTP, kill -9 of the worker.

Stand-ins are two GPUs, the profile's numbers, and vLLM's server with the answers of our plug-in. Before any of it,
``sitecustomize`` of these processes has a release with which deltas were not run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from daemon.engines.vllm.variant_plug_in import PLUG_IN_PATH
from iserve.demo import demo_model_path
from iserve.merged_keys import merged_key
from tests.daemon.engines.vllm_stand_in.answers import BASE, content_of, letters_of
from tests.daemon.tiny_deltas import write_tiny_delta
from tests.golden_words import Golden
from tests.iserve.conftest import Installation
from tests.iserve.test_e2e_variant_burst import write_adapters
from tests.iserve.test_e2e_vllm import on_two_gpus, take_to_be_measured

pytestmark = pytest.mark.process
NAME = "base"  # of the deployment
MANY = tuple(f"tuned-{number:02}" for number in range(20))
WORK = ("--input-tokens", "48", "--output-tokens", "16", "--batch", "64", "--context", "64")
ONE_GPU = ("--engine", "vllm", *WORK[:4], "--batch", "4", "--context", "64")
SLOTS = ("--variants", 20, "--popularity", "even", "--rank", 0)
NOT_RUN = """
from daemon.engines.vllm import release

release.RUN_WITH_DELTAS = frozenset()
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """A deployment with slots for adapters alone, of a release with which deltas were not run."""
    folder = tmp_path_factory.mktemp("vllm")
    settings = on_two_gpus(folder / "node", "0.33.0")
    (folder / "node" / "env" / "behaviour.json").write_text(json.dumps({"delta_asks": 2}))
    home = Installation(folder / "home", settings, as_installed=True)  # a fork reads no sitecustomize
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("ISERVE_VLLM_PYTHON", settings["ISERVE_VLLM_PYTHON"])
            take_to_be_measured(home, 64)
        (folder / "node" / "nvml" / "sitecustomize.py").write_text(NOT_RUN)
        refused = home.run("deploy", "--engine", "vllm", *SLOTS, "--delta-format", "int2", *WORK, check=False)
        assert refused.returncode == 1
        assert "serves no deltas of full fine-tunes" in refused.stdout + refused.stderr
        home.json("deploy", "--name", "plain", *ONE_GPU, "--variants", "2", "--rank", "8")
        yield home
    finally:
        home.clear()


@pytest.fixture(scope="module")
def serving(plain: Installation) -> Installation:
    """A deployment with slots for deltas in int2, and twenty of them, in place of the plain one."""
    home, folder = plain, plain.home.parent
    serve_merged(home, folder)
    home.run("down")
    (folder / "node" / "nvml" / "sitecustomize.py").unlink()
    home.as_installed = False  # nothing is left that a fork would not read
    home.json("deploy", "--name", NAME, "--engine", "vllm", *SLOTS, "--delta-format", "int2", *WORK)
    for seed, name in enumerate(MANY):
        delta = write_tiny_delta(
            demo_model_path(),
            folder / name,
            "int2",
            seed,
            is_changed=lambda tensor: tensor == "model.layers.0.self_attn.o_proj.weight",
            change=2.0,
        )
        body = {"name": name, "base": NAME, "path": str(delta)}
        assert home.controller().post("/api/v1/variants", body, dict)["deployments"] == [NAME]
    return home


def serve_merged(home: Installation, folder: Path) -> None:
    """Have the release that serves no deltas serve one merged, by a deployment of its own, and take it down."""
    delta = write_tiny_delta(
        demo_model_path(),
        folder / "apart",
        "int2",
        77,
        is_changed=lambda tensor: tensor.endswith("0.mlp.up_proj.weight"),
    )
    home.run("variant", "add", "apart", "--base", "plain", delta)
    shown = home.json("variant", "show", "apart")
    assert shown["why_not_served"].split()[-4:] == ["iserve", "variant", "deploy", "apart"]
    deployed = home.json("variant", "deploy", "apart", *ONE_GPU)
    assert (deployed["name"], deployed["config"]["engine"]) == ("apart", "vllm")
    commands = [words for words in home.processes().values() if "--python-path" in words]
    assert any(merged_key(shown["content_hash"], shown["base_directory"]) in words for words in commands)
    assert answer(home, "apart") == "apart"
    home.run("variant", "rm", "apart")
    assert [one["name"] for one in home.json("ps")] == ["plain"]
    home.run("rm", "plain")


def answer(home: Installation, model: str) -> str:
    return home.openai().completions.create(model=model, prompt="hello", max_tokens=4).model


def command(home: Installation) -> str:
    return next(
        line for line in home.processes().values() if "vllm.entrypoints" in line and "--python-path" in line
    )


def test_a_lora_with_other_content_answers_by_its_own_weights_and_kv(plain: Installation, tmp_path: Path) -> None:
    """The stand-in keeps KV by the name of a load, as vLLM does: one that served other content would show it."""
    one, other = write_adapters(tmp_path, 2)

    def answered(add: Callable[[], Any]) -> str:
        added = add()
        done = plain.openai().completions.create(model="style", prompt="hello", max_tokens=len(BASE))
        folder = plain.home / "variants" / "loadable" / added["content_hash"]
        text = done.choices[0].text
        assert (text, done.model) == (letters_of(added["engine_name"], content_of(folder)), "style")
        return text

    def replace(adapter: Path) -> Any:
        body = {"name": "style", "base": "plain", "path": str(adapter), "replace": True}
        return plain.controller().post("/api/v1/variants", body, dict)

    first = answered(lambda: plain.json("variant", "add", "style", "--base", "plain", one))
    assert answered(lambda: replace(other)) != first
    assert answered(lambda: replace(one)) == first
    done = plain.openai().completions.create(model="plain", prompt="hello", max_tokens=len(BASE))
    assert done.choices[0].text == BASE


def test_the_worker_is_started_with_the_plug_in_and_its_slots(serving: Installation) -> None:
    words = command(serving)
    assert PLUG_IN_PATH in words
    for option in ("--enable-lora", "--max-loras=16 ", "--max-lora-rank=1 ", "--max-cpu-loras=32 "):
        assert option in f"{words} "
    config = json.loads(re.findall(r"--additional-config=(\{.*?\}\})", words)[0])["iserve_deltas"]
    assert (config["format"], config["adapters"], config["background"]) == ("int2", False, True)


def test_twenty_are_served_and_are_back_after_their_worker_was_killed(
    serving: Installation, kill: Any, until: Any
) -> None:
    with ThreadPoolExecutor(len(MANY)) as clients:
        assert list(clients.map(lambda name: answer(serving, name), MANY)) == list(MANY)
    (worker_id,) = serving.worker_pids()
    before = serving.worker_pids()[worker_id]
    kill(before)
    until(lambda: serving.worker_pids().get(worker_id) not in (None, before), "the worker is started again")

    def asked() -> list[str] | None:
        try:
            return [answer(serving, name) for name in (NAME, *MANY)]
        except openai.APIError:  # until the worker is back
            return None

    assert until(asked, "the worker is back and answers for all") == [NAME, *MANY]
    assert "read and dropped" not in serving.run("logs", NAME).stdout


def test_twenty_are_served_by_a_worker_whose_memory_holds_three(
    serving: Installation, kill: Any, until: Any
) -> None:
    """The worker is started with 32 slots, and refuses the fourth delta: requests wait, and it stays as it is."""
    behaviour = serving.home.parent / "node" / "env" / "behaviour.json"
    kept = behaviour.read_text()
    behaviour.write_text(json.dumps({**json.loads(kept), "most_deltas": 3}))
    try:
        (worker_id,) = serving.worker_pids()
        before = serving.worker_pids()[worker_id]
        kill(before)
        until(lambda: serving.worker_pids().get(worker_id) not in (None, before), "the worker is started again")

        def asked() -> bool | None:
            try:
                return answer(serving, NAME) == NAME
            except openai.APIError:  # until the worker is back
                return None

        until(asked, "the worker is back")
        pid = serving.worker_pids()[worker_id]
        with ThreadPoolExecutor(len(MANY)) as clients:
            assert list(clients.map(lambda name: answer(serving, name), (*MANY, *MANY))) == [*MANY, *MANY]
        assert answer(serving, NAME) == NAME
        assert serving.worker_pids()[worker_id] == pid
    finally:
        behaviour.write_text(kept)


def test_one_whose_bytes_were_changed_in_the_workers_folder_is_mended(serving: Installation) -> None:
    content = serving.controller().get("/api/v1/variants/tuned-03", dict)["content_hash"]
    (weights,) = (serving.home / "variants" / "loadable" / content).glob("*.safetensors")
    kept = weights.read_bytes()
    weights.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    serving.kill("gateway")
    serving.run("up")
    serving.run("rm", NAME)
    serving.json("deploy", "--name", NAME, "--engine", "vllm", *SLOTS, "--delta-format", "int2", *WORK)
    assert answer(serving, "tuned-03") == "tuned-03"
    assert weights.read_bytes() == kept


def test_a_plan_says_what_the_slots_take(serving: Installation, golden: Golden) -> None:
    plan = serving.json("plan", "iserve-demo", "--engine", "vllm", *SLOTS, "--delta-format", "int2", *WORK)
    said = "\n".join(note for note in plan["notes"] if "delta" in note)
    golden("cli", re.sub(r"\d{4}-\d\d-\d\d|[\d.]+(?= s \(estimated\))", "N", said))
