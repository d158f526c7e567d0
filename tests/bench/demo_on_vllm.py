"""The demo model, its two adapters and its delta on vLLM through iServe, against vLLM's own server, on one GPU.

    python -m tests.bench.demo_on_vllm OUT --python VLLM_PYTHON [--work FOLDER] [--gpu I] [--iserve COMMAND]

Unlike random weights, trained ones have margins, so that answers must be the same. Each model is asked the
questions of its task that training never saw, where there are so many: alone, all models mixed in one batch, and
at ``vllm serve --enable-lora`` (base and adapters) and ``vllm serve`` of the exported delta.
``OUT/demo_on_vllm.json`` has how many answers are right, and how many are the same.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from iserve.demo import demo_adapter_path, demo_delta_path, demo_model_path, demo_quality_path
from iserve.demo.adapter_tasks import ADAPTERS, SYMBOLS, draw_new
from iserve.demo.train_delta import examples, held_out_examples
from iserve.demo.training_tasks import prompt_text
from tests.bench.delta_served import Kept
from tests.bench.engine_contest_run import _nvidia, _version
from tests.bench.variant_contest_run import Home

__all__ = ["main"]

NAME, RANK, QUESTIONS, TOKENS, CONTEXT = "demo", 16, 28, 120, 512
FOLDERS = {name: demo_adapter_path(name) for name in ADAPTERS} | {SYMBOLS.name: demo_delta_path(SYMBOLS.name)}
_PATIENCE_S = 240.0
Asked = tuple[str, str, str]  # model, prompt, right answer
Ask = Callable[[Asked], str]


def questions() -> list[Asked]:
    """Return what each variant is asked, and the base what its quality is measured by."""
    new = {SYMBOLS.name: held_out_examples(SYMBOLS)[0]}
    for name, task in ADAPTERS.items():
        new[name] = examples(draw_new, task, 40 * QUESTIONS, held_out=True, seed="held-out")
    asked = [
        (name, f"<s>{prompt_text(one.question)}", one.answer)
        for name, found in new.items()
        for one in found[:QUESTIONS]
    ]
    lines = [json.loads(line) for line in demo_quality_path().read_text().splitlines()]
    return asked + [(NAME, line["prompt"], line["answer"]) for line in lines[::2]]


def asker(url: str, names: dict[str, str]) -> Ask:
    """Return what asks the server at ``url``, where models have other ``names``; greedy, until answered."""

    def ask(asked: Asked) -> str:
        model, prompt, _ = asked
        body = {"model": names.get(model, model), "prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        begin = time.monotonic()
        while True:
            try:
                with urllib.request.urlopen(request, timeout=_PATIENCE_S) as answer:
                    return str(json.load(answer)["choices"][0]["text"])
            except (urllib.error.URLError, ConnectionError) as error:
                is_refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if is_refused or time.monotonic() - begin > _PATIENCE_S:
                    raise SystemExit(f"{model} was not answered: {error}") from error
                time.sleep(0.2)

    return ask


@contextmanager
def direct(work: Path, python: str, gpu: int, words: Sequence[object]) -> Iterator[str]:
    """Run vLLM's own server; give its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = ("--port", port, "--max-model-len", CONTEXT, "--gpu-memory-utilization", "0.1")
    env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
    with (work / "direct.log").open("ab") as log:
        server = subprocess.Popen(
            [python, "-m", "vllm.entrypoints.cli.main", "serve", *map(str, (*words, *common))],
            env=env, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def compare(kept: Kept, what: str, asked: Sequence[Asked], mine: Sequence[str], theirs: Sequence[str]) -> None:
    """Keep how many answers are the same, by model."""
    for model in dict.fromkeys(model for model, _, _ in asked):
        rows = [row for row, one in enumerate(asked) if one[0] == model]
        other = [(mine[row], theirs[row]) for row in rows if mine[row] != theirs[row]]
        kept.add("compared", of=what, model=model, answers=len(rows), same=len(rows) - len(other), other=other)


def play(options: argparse.Namespace) -> None:
    """Measure all."""
    work, python, gpu = options.work, options.python, options.gpu
    work.mkdir(parents=True, exist_ok=True)
    kept = Kept(
        options.out / "demo_on_vllm.json",
        {
            "machine": _nvidia("name")[gpu], "driver": _nvidia("driver_version")[0], "vllm": _version(python),
            "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        },
    )  # fmt: skip
    asked, home = questions(), Home(work / "home", python, gpu, options.iserve.split())
    with ExitStack() as stack:
        home.run("up")
        stack.callback(home.down)
        home.run(
            *("deploy", demo_model_path(), "--name", NAME, "--engine", "vllm", "--quality", "exact"),
            *("--batch", 64, "--context", CONTEXT, "--input-tokens", 64, "--output-tokens", TOKENS),
            *("--variants", 3, "--rank", RANK, "--popularity", "even", "--delta-format", "int2"),
        )
        for name in FOLDERS:
            kept.add("added", name=name, deployments=home.register(name, NAME, FOLDERS[name]).get("deployments"))
        ask = asker(home.gateway, {})
        alone = [ask(one) for one in asked]
        for model in (NAME, *FOLDERS):
            right = [answer == one[2] for one, answer in zip(asked, alone, strict=True) if one[0] == model]
            kept.add("right", model=model, answers=len(right), right=sum(right))
        mixed = sorted(range(len(asked)), key=lambda row: row % QUESTIONS)
        with ThreadPoolExecutor(len(asked)) as clients:
            together = dict(zip(mixed, clients.map(ask, [asked[row] for row in mixed]), strict=True))
        compare(kept, "a mixed batch", asked, alone, [together[row] for row in range(len(asked))])
        home.run("variant", "export", demo_model_path(), FOLDERS[SYMBOLS.name], work / "exported")
    lora = [f"{name}={FOLDERS[name]}" for name in ADAPTERS]
    words = (demo_model_path(), "--served-model-name", NAME, "--enable-lora", "--max-lora-rank", RANK)
    exported = (work / "exported", "--served-model-name", "exported")
    for what, models, serve in (
        ("vllm serve --enable-lora", (NAME, *ADAPTERS), (*words, "--lora-modules", *lora)),
        ("vllm serve of the export", (SYMBOLS.name,), exported),
    ):
        rows = [row for row, one in enumerate(asked) if one[0] in models]
        some = [asked[row] for row in rows]
        with direct(work, python, gpu, serve) as url:
            theirs = list(map(asker(url, {SYMBOLS.name: "exported"}), some))
        compare(kept, what, some, [alone[row] for row in rows], theirs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all on one GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", required=True, help="vLLM's")
    parser.add_argument("--work", type=Path, default=Path("/tmp/demo-on-vllm"))
    parser.add_argument("--gpu", type=int, default=0)
    parser.add_argument("--iserve", default="iserve", help="command of iServe")
    play(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
