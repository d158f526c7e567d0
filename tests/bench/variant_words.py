"""Answers of trained adapters through iServe against vLLM's own server, for the demo model on one GPU.

    python -m tests.bench.variant_words play OUT --python VLLM_PYTHON [--gpu I] [--iserve COMMAND]
    python -m tests.bench.variant_words table OUT/variant_words.json.gz

The contest of random weights (``variant_contest_run``) cannot compare words, for the first tokens of random
weights are close and a batch of other size decides between them. The demo model and its adapters are trained.
Each of the base and the adapters is asked ``QUESTIONS`` questions, half of an adapter's of its own task and of
its training, all else held out. The base is asked an adapter's own as well, and must answer otherwise: else
adapters change nothing, and equal words show nothing. Greedy, to the end that the model says. Both servers run on
one GPU, and take turns: one request at a time, then the same ones by ``CLIENTS`` clients in a mixed order, twice.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import aiohttp
from tokenizers import Tokenizer

from fingerprint.codec import from_json, to_json
from iserve.demo import DEMO_MODEL_NAME, demo_adapter_path, demo_model_path
from iserve.demo.adapter_tasks import ADAPTERS, draw_kept, draw_new
from iserve.demo.training_tasks import Example, draw
from tests.bench.engine_contest_run import FOLDER, _nvidia, _version, _wait_for
from tests.bench.kept import read_kept, write_kept
from tests.bench.variant_clients import Answer, Asked, answer_all, in_a_loop
from tests.bench.variant_contest import DIRECT, OURS
from tests.bench.variant_contest_run import FIRST_PORT, START_S, Direct, Home

__all__ = ["Question", "Turn", "VariantWords", "questions", "rows", "table"]

QUESTIONS, CLIENTS, ROUNDS = 96, 32, 2
BATCH, CONTEXT, MOST_TOKENS, RANK = 64, 512, 96, 16
FILE = "variant_words.json.gz"


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Question to a model, and the answer that training aims at."""

    model: str
    text: str
    answer: str
    of_adapter: str = ""  # whose task it is of, where the base is asked


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Answers of one side to all questions, in their order."""

    side: str
    clients: int
    texts: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class VariantWords:
    """Recording of both sides."""

    date: str
    machine: str
    versions: str
    questions: tuple[Question, ...]
    turns: tuple[Turn, ...]


def questions(count: int = QUESTIONS) -> tuple[Question, ...]:
    """Return the questions to the base, to each adapter, and an adapter's own to the base."""
    rng = random.Random("variant words")

    def ask(model: str, example: Example, of_adapter: str = "") -> Question:
        text = f"<s>Q: {example.question}\nA: "
        return Question(model=model, text=text, answer=example.answer, of_adapter=of_adapter)

    found = [ask(DEMO_MODEL_NAME, example) for example in _distinct(partial(draw, rng, held_out=True), count)]
    for name, task in ADAPTERS.items():
        own = _distinct(partial(draw_new, task, rng, held_out=False), count // 2)
        kept = _distinct(partial(draw_kept, task, rng, held_out=True), count - count // 2)
        found += [ask(name, example) for example in (*own, *kept)]
        found += [ask(DEMO_MODEL_NAME, example, name) for example in own]
    return tuple(found)


def _distinct(one: Callable[[], Example], count: int) -> list[Example]:
    """Draw until there are as many different questions."""
    found: dict[str, Example] = {}
    while len(found) < count:
        example = one()
        found.setdefault(example.question, example)
    return list(found.values())


def play(out: Path, python: str, gpu: int, command: Sequence[str], port: int) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    home = Home(FOLDER / "home", python, gpu, command, port)
    adapters = {name: demo_adapter_path(name) for name in ADAPTERS}
    words = (
        *("serve", str(demo_model_path()), "--served-model-name", DEMO_MODEL_NAME),
        *("--enable-lora", "--max-loras", str(len(adapters)), "--max-lora-rank", str(RANK)),
        *("--max-num-seqs", str(BATCH), "--max-model-len", str(CONTEXT)),
        *("--kv-cache-memory-bytes", str(2**30), "--gpu-memory-utilization", "0.2"),
    )
    with ExitStack() as stack:
        home.run("up")
        stack.callback(home.down)
        home.run(
            *("deploy", demo_model_path(), "--name", DEMO_MODEL_NAME, "--engine", "vllm", "--quality", "exact"),
            *("--policy", "packing", "--batch", BATCH, "--context", CONTEXT),
            *("--input-tokens", 64, "--output-tokens", 32),
            *("--variants", len(adapters), "--rank", RANK, "--popularity", "even"),
        )
        for name, folder in adapters.items():
            home.run("variant", "add", name, "--base", DEMO_MODEL_NAME, folder)
        print(f"{time.strftime('%H:%M:%S')} deployed", flush=True)
        direct = Direct(
            python,
            gpu,
            FOLDER / "direct.log",
            words,
            [f"{name}={folder}" for name, folder in adapters.items()],
            port + 2,
        )
        stack.callback(direct.end)
        _wait_for([direct])
        asked = questions()
        turns = asyncio.run(_turns({DIRECT: direct.url, OURS: home.gateway}, asked))
    found = VariantWords(
        date=time.strftime("%Y-%m-%d"),
        machine=_nvidia("name")[gpu],
        versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
        questions=asked,
        turns=turns,
    )
    out.mkdir(parents=True, exist_ok=True)
    write_kept(out / FILE, json.dumps(json.loads(to_json(found)), indent=0))
    print(table(found))


async def _turns(urls: dict[str, str], asked: Sequence[Question]) -> tuple[Turn, ...]:
    tokenizer = Tokenizer.from_file(str(demo_model_path() / "tokenizer.json"))
    requests = [
        Asked(
            model=one.model,
            prompt=tuple(tokenizer.encode(one.text, add_special_tokens=False).ids),
            tokens=MOST_TOKENS,
            ends=True,
        )
        for one in asked
    ]
    turns: list[Turn] = []
    for round_ in range(ROUNDS):
        mixed = random.Random(round_).sample(range(len(asked)), len(asked))
        for side in [*urls][:: 1 - 2 * (round_ % 2)]:
            url = urls[side]
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
                turns.append(_turn(side, 1, await answer_all(session, url, requests), range(len(asked))))
            answers = await in_a_loop(url, [requests[row] for row in mixed], CLIENTS, START_S)
            turns.append(_turn(side, CLIENTS, answers, mixed))
            print(f"{side}: {sum(map(bool, turns[-1].errors))} of {len(asked)} failed", flush=True)
    return tuple(turns)


def _turn(side: str, clients: int, answers: Sequence[Answer], rows_: Sequence[int]) -> Turn:
    """Return the answers in the order of the questions; ``rows_`` has the question of each request."""
    by_row = {rows_[answer.row]: answer for answer in answers}
    ordered = [by_row[row] for row in sorted(by_row)]
    return Turn(
        side=side,
        clients=clients,
        texts=tuple(answer.text for answer in ordered),
        errors=tuple(answer.error or ("" if answer.is_whole else "not whole") for answer in ordered),
    )


def rows(found: VariantWords) -> list[tuple[str, int, int]]:
    """Return what is compared, the equal answers, and how many there are: of what each was trained for."""
    meant = [row for row, one in enumerate(found.questions) if not one.of_adapter]

    def turns(side: str, clients: int) -> list[tuple[str, ...]]:
        return [turn.texts for turn in found.turns if (turn.side, turn.clients) == (side, clients)]

    def equal(first: Sequence[tuple[str, ...]], second: Sequence[tuple[str, ...]]) -> tuple[int, int]:
        same = [one[row] == two[row] for one, two in zip(first, second, strict=True) for row in meant]
        return sum(same), len(same)

    vllm, ours = turns(DIRECT, 1), turns(OURS, 1)
    vllm_loop, ours_loop = turns(DIRECT, CLIENTS), turns(OURS, CLIENTS)
    by_question = {(one.model, one.text): row for row, one in enumerate(found.questions)}
    changed = [
        (ours[0][row], ours[0][by_question[one.of_adapter, one.text]])
        for row, one in enumerate(found.questions)
        if one.of_adapter
    ]
    right = {
        side: sum(texts[0][row].strip() == found.questions[row].answer for row in meant)
        for side, texts in ((DIRECT, vllm), (OURS, ours))
    }
    return [
        ("vLLM, asked again one at a time", *equal(vllm[:1], vllm[1:])),
        ("iServe, asked again one at a time", *equal(ours[:1], ours[1:])),
        ("iServe against vLLM, one at a time", *equal(ours, vllm)),
        (f"vLLM with {CLIENTS} clients against one at a time", *equal(vllm_loop, vllm)),
        (f"iServe with {CLIENTS} clients against one at a time", *equal(ours_loop, ours)),
        (f"iServe against vLLM, both with {CLIENTS} clients", *equal(ours_loop, vllm_loop)),
        ("right answers of vLLM", right[DIRECT], len(meant)),
        ("right answers of iServe", right[OURS], len(meant)),
        ("the base to what adapters were trained for, as they", sum(a == b for a, b in changed), len(changed)),
    ]


def table(found: VariantWords) -> str:
    """Return the comparisons as a table."""
    lines = ["| compared | same answers | of |", "|---|--:|--:|"]
    lines += [f"| {what} | {same} | {of} |" for what, same, of in rows(found)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    one = orders.add_parser("play")
    one.add_argument("out", type=Path)
    one.add_argument("--python", default=sys.executable)
    one.add_argument("--gpu", type=int, default=0)
    one.add_argument("--iserve", default="iserve", help="command of iServe")
    one.add_argument("--port", type=int, default=FIRST_PORT, help="the first of three")
    one = orders.add_parser("table")
    one.add_argument("kept", type=Path)
    options = parser.parse_args()
    if options.order == "play":
        play(options.out, options.python, options.gpu, options.iserve.split(), options.port)
        return
    print(table(from_json(read_kept(options.kept), VariantWords, what=str(options.kept))))


if __name__ == "__main__":
    main()
