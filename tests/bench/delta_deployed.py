"""Deltas on vLLM through iServe, on one GPU: deployed, loaded ahead, asked, and back after the worker was killed.

    python -m tests.bench.delta_deployed OUT --python VLLM_PYTHON [--work FOLDER] [--gpu I] [--iserve COMMAND]
    python -m tests.bench.delta_deployed OUT --only-write --work FOLDER

Writes a small Llama with random weights and random fine-tunes of it as deltas in int2 (linears, embeddings, norms
and output layer), deploys it with ``iserve deploy --engine vllm --delta-format int2``, registers the deltas by
REST, and asks the OpenAI API. Answers of a batch are compared with each request alone, and those of one delta with
``vllm serve`` of the checkpoint that ``iserve variant export`` writes. ``OUT/delta_deployed.json`` is written
after each part.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.bench.delta_agreement import agreement, allowed_margin
from tests.bench.delta_served import Kept
from tests.bench.delta_served_files import LLAMA_8B
from tests.bench.engine_contest_run import _nvidia, _version, write_models
from tests.bench.lora_adapters import write_checkpoint
from tests.bench.variant_contest_run import Home
from tests.daemon.tiny_deltas import write_tiny_delta

__all__ = ["CONFIG", "main"]

CONFIG = {
    **LLAMA_8B,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
}
NAME, NUM_DELTAS, PROMPTS = "model", 6, 3
INPUT, OUTPUT, CONTEXT, BATCH = 64, 32, 1024, 32
_PATIENCE_S = 240.0
_DIRECT_PORT = 18_309

Words = list[tuple[Any, float, float]]  # token, its log-probability, its margin above the next


def delta_name(number: int) -> str:
    """Return the name of delta ``number`` from 1 on; 0: of the base."""
    return f"tuned-{number}" if number else NAME


def write_files(work: Path) -> None:
    """Write the base and its deltas, those that are not there."""
    (work / NAME).mkdir(parents=True, exist_ok=True)
    if not (work / NAME / "config.json").exists():
        write_checkpoint(work / NAME, CONFIG)
        write_models([(NAME, json.dumps(CONFIG))], work)
    missing = [number for number in range(1, NUM_DELTAS + 1) if not (work / delta_name(number) / "delta").exists()]
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(_write_delta, [work] * len(missing), missing))


def _write_delta(work: Path, number: int) -> None:
    write_tiny_delta(work / NAME, work / delta_name(number), "int2", number)


def ask(url: str, model: str, prompt: int) -> Words:
    """Return the greedy answer to prompt ``prompt`` with log-probabilities; raise URLError where none is given."""
    tokens = random.Random(prompt).choices(range(10, CONFIG["vocab_size"]), k=INPUT)
    body = {"model": model, "prompt": tokens, "max_tokens": OUTPUT, "temperature": 0.0, "logprobs": 2}
    body |= {"ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
        found = json.load(answer)["choices"][0]["logprobs"]
    words = []
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        ranked = sorted(top.values(), reverse=True)
        words.append((token, float(logprob), float(ranked[0] - ranked[1])))
    return words


def ask_until_answered(url: str, model: str, prompt: int) -> tuple[Words, float]:
    """Return the answer and the seconds until it was there."""
    begin = time.monotonic()
    while True:
        try:
            return ask(url, model, prompt), time.monotonic() - begin
        except (urllib.error.URLError, ConnectionError) as error:
            is_refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
            if is_refused or time.monotonic() - begin > _PATIENCE_S:
                text = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                raise SystemExit(f"{model} was not answered: {error} {text}") from error
            time.sleep(0.05)


def ask_together(url: str, asked: Sequence[tuple[str, int]]) -> list[Words]:
    """Return the answers to requests that are sent at once."""
    with ThreadPoolExecutor(len(asked)) as clients:
        return list(clients.map(lambda one: ask(url, *one), asked))


def worker_pid(home: Home) -> int:
    """Return the process id of the worker's vLLM server."""
    (pid,) = re.findall(r'"pid": (\d+)', json.dumps(worker_states(home)))
    return int(pid)


def worker_states(home: Home) -> list[Any]:
    """Return the workers as ``iserve status --json`` has them."""
    found = json.loads(home.run("status", "--json"))
    processes = found["processes"] if isinstance(found, dict) else found
    return [one for one in processes if one["name"].startswith("worker ")]


def play(work: Path, out: Path, python: str, gpu: int, command: Sequence[str]) -> None:
    """Measure all parts."""
    write_files(work)
    kept = Kept(
        out / "delta_deployed.json",
        {
            "machine": _nvidia("name")[gpu], "driver": _nvidia("driver_version")[0], "vllm": _version(python),
            "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        },
    )  # fmt: skip
    home = Home(work / "home", python, gpu, command)
    with ExitStack() as stack:
        home.run("up")
        stack.callback(home.down)
        begin = time.monotonic()
        home.run(
            *("deploy", work / NAME, "--name", NAME, "--engine", "vllm", "--quality", "exact"),
            *("--policy", "packing", "--batch", BATCH, "--context", CONTEXT),
            *("--input-tokens", INPUT, "--output-tokens", OUTPUT),
            *("--variants", NUM_DELTAS, "--rank", 0, "--popularity", "even", "--delta-format", "int2"),
        )
        kept.add("deployed", seconds=time.monotonic() - begin)
        for number in range(1, NUM_DELTAS + 1):
            added = home.register(delta_name(number), NAME, work / delta_name(number) / "delta")
            kept.add("added", delta=number, deployments=added.get("deployments"))
        compare(home, kept)
        kill_and_ask(home, kept)
        compare_exported(work, home, kept, python, gpu)


def compare(home: Home, kept: Kept) -> None:
    """Compare the answers of one batch with each alone, and a delta's with the base's."""
    asked = [(delta_name(number), prompt) for prompt in range(PROMPTS) for number in range(NUM_DELTAS + 1)]
    alone: dict[tuple[str, int], Words] = {}
    for name, prompt in asked:
        alone[name, prompt], seconds = ask_until_answered(home.gateway, name, prompt)
        if prompt == 0:
            kept.add("first", name=name, seconds=seconds)
    together = ask_together(home.gateway, asked)
    compared = [agreement(mine, alone[one]) for one, mine in zip(asked, together, strict=True)]
    for (name, prompt), found in zip(asked, compared, strict=True):
        kept.add("alone", name=name, prompt=prompt, **found)
    kept.add("allowed", margin=allowed_margin(compared))
    for name, prompt in asked:
        if name != NAME:
            kept.add("control", name=name, prompt=prompt, **agreement(alone[name, prompt], alone[NAME, prompt]))


def kill_and_ask(home: Home, kept: Kept) -> None:
    """Kill the worker with -9 and ask for all until they answer."""
    os.kill(worker_pid(home), signal.SIGKILL)
    begin = time.monotonic()
    for number in range(NUM_DELTAS + 1):
        ask_until_answered(home.gateway, delta_name(number), 0)
        kept.add("back", name=delta_name(number), seconds=time.monotonic() - begin)


def compare_exported(work: Path, home: Home, kept: Kept, python: str, gpu: int) -> None:
    """Compare a delta's answers with those of the checkpoint that it means, served by vLLM alone."""
    home.run("variant", "export", work / NAME, work / delta_name(1) / "delta", work / "exported")
    with ExitStack() as stack:
        log = stack.enter_context((work / "direct.log").open("wb"))
        words: list[object] = ["serve", work / "exported", "--served-model-name", "exported"]
        words += ["--port", _DIRECT_PORT, "--max-model-len", CONTEXT, "--gpu-memory-utilization", "0.2"]
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        direct = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.cli.main", *map(str, words)], env=env, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
        stack.callback(lambda: os.killpg(direct.pid, signal.SIGKILL))
        url = f"http://127.0.0.1:{_DIRECT_PORT}"
        ours = [ask_until_answered(home.gateway, delta_name(1), prompt)[0] for prompt in range(PROMPTS)]
        wrong = [ask_until_answered(home.gateway, delta_name(2), prompt)[0] for prompt in range(PROMPTS)]
        for prompt in range(PROMPTS):
            exported, _ = ask_until_answered(url, "exported", prompt)
            kept.add("exported", name=delta_name(1), prompt=prompt, **agreement(ours[prompt], exported))
            kept.add("exported", name=delta_name(2), prompt=prompt, **agreement(wrong[prompt], exported))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default="python3", help="vLLM's")
    parser.add_argument("--only-write", action="store_true", help="the base and its deltas, which takes minutes")
    parser.add_argument("--work", type=Path, default=Path("/tmp/delta-deployed"))
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--iserve", default="iserve", help="command of iServe")
    options = parser.parse_args(arguments)
    if options.only_write:
        write_files(options.work)
        return
    play(options.work, options.out, options.python, options.gpu, options.iserve.split())


if __name__ == "__main__":
    main()
