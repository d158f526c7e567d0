"""LoRA variants through iServe against vLLM's own server with the same adapters, in turns on one GPU.

    python -m tests.bench.variant_contest_run play CONFIG_JSON OUT --python VLLM_PYTHON [--gpu I]
    python -m tests.bench.variant_contest_run table OUT/variant_contest.json.gz

``play`` writes a checkpoint of random weights and adapters of ranks 8, 16 and 64 (``CONTENTS`` of each, one after
the other under ``MOST`` names), starts ``vllm serve --enable-lora`` with all of them named at its start, and a
home of iServe that deploys the same folder with ``iserve deploy --variants`` and gets the same adapters by REST.
Then:

* ``arms``: ``CLIENTS`` clients in a closed loop for ``ARM_S`` seconds, each request for one of 1, 8, 32 or 128
  adapters drawn evenly, the sides in turn, ``ROUNDS`` times. Both sides get the same requests in the same order.
* ``alone``: one request at a time, for each content, on each side twice.
* ``cold``: ``COLD`` further adapters (rank 8 of q and v), registered with iServe only, asked for by Zipf's law
  with exponent 1 for ``COLD_S`` seconds; then those that were never asked for, one at a time next to
  ``CLIENTS // 2`` clients in a loop, so that each of these is cold.

``table`` also replays what iServe's side was asked for, all arms included, in the simulator
(``traces.simulator.variants``), and says how many loads and evictions that predicts.

Requests have ``INPUT`` tokens and ``OUTPUT`` tokens of answer, greedy. Results are kept after each part.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from tests.bench.engine_contest_run import FOLDER, Worker, _nvidia, _version, _wait_for, write_models
from tests.bench.kept import read_kept, write_kept
from tests.bench.lora_adapters import write_adapter, write_checkpoint
from tests.bench.variant_clients import Answer, Asked, answer_all, in_a_loop
from tests.bench.variant_contest import (
    BATCH,
    DIRECT,
    MOST,
    OURS,
    OUTPUT,
    Arm,
    Cold,
    VariantContest,
    adapter_names,
    table,
)

RANKS, CONTENTS = (64, 16, 8), 4
COUNTS, CLIENTS, ARM_S, ROUNDS = (1, 8, 32, 128), 32, 30.0, 2
INPUT = 256
COLD_RANK = 8  # of q and v
COLD, COLD_S, COLD_ALONE = 1000, 60.0, 100
SLOTS, RANK, CONTEXT = 32, 64, 1024
KV_GIB = 10
NAME = "model"
FILE = "variant_contest.json.gz"
START_S, ADD_S = 720.0, 240.0
FIRST_PORT = 18_300  # of three: the gateway's, the controller's, that of vLLM by itself


class Home:
    """An installation of iServe for one GPU, in a folder of its own."""

    def __init__(
        self, folder: Path, python: str, gpu: int, command: Sequence[str], port: int = FIRST_PORT
    ) -> None:
        self._command = list(command)
        self.folder, self.port = folder, port
        self._env = os.environ | {
            "ISERVE_HOME": str(folder),
            "ISERVE_PORT": str(port),
            "ISERVE_API_PORT": str(port + 1),
            "ISERVE_VLLM_PYTHON": python,
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "HF_HUB_OFFLINE": "1",
        }
        self.gateway, self.api = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"

    def start(self, *words: object) -> subprocess.Popen[str]:
        log = (self.folder.parent / f"iserve-{words[0]}.log").open("w")
        return subprocess.Popen(
            [*self._command, *map(str, words)], env=self._env, stdout=log, stderr=log, text=True
        )

    def run(self, *words: object) -> str:
        done = subprocess.run(
            [*self._command, *map(str, words)], env=self._env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"iserve {words}: {done.stdout}{done.stderr}")
        return done.stdout

    def down(self) -> None:
        subprocess.run([*self._command, "down"], env=self._env, check=False)

    def key(self) -> str:
        """Return the key by which the command line speaks to the controller, "" where it has none."""
        record = self.folder / "run" / "controller.json"
        return str(json.loads(record.read_text()).get("token", ""))

    def register(self, name: str, base: str, folder: Path) -> Any:
        """Add a variant; return the answer."""
        body = {"name": name, "base": base, "path": str(folder)}
        headers = {"Authorization": f"Bearer {self.key()}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.api}/api/v1/variants", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=ADD_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise SystemExit(f"adding {name}: {error.read().decode()[:500]}") from error

    async def add(self, session: aiohttp.ClientSession, name: str, base: str, folder: Path) -> None:
        body = {"name": name, "base": base, "path": str(folder)}
        headers = {"Authorization": f"Bearer {self.key()}"}
        async with session.post(f"{self.api}/api/v1/variants", json=body, headers=headers) as answer:
            if answer.status != 201:
                raise SystemExit(f"adding {name}: {answer.status} {(await answer.text())[:500]}")


def content_of(number: int) -> Path:
    """Return the folder of the adapter's content."""
    rank = RANKS[number % len(RANKS)]
    return FOLDER / f"rank-{rank}-{number // len(RANKS) % CONTENTS}"


def cold_names(count: int) -> list[str]:
    return [f"cold-{number}" for number in range(count)]


def play(
    config: Path, out: Path, python: str, gpu: int, command: Sequence[str], port: int, *, cold: int, rounds: int
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    text = config.read_text()
    write_models([(NAME, text)], FOLDER)
    write_checkpoint(FOLDER / NAME, json.loads(text))
    for number in range(len(RANKS) * CONTENTS):
        folder = content_of(number)
        write_adapter(folder, json.loads(text), RANKS[number % len(RANKS)], seed=number, deviation=0.05)
    print(f"{time.strftime('%H:%M:%S')} files written", flush=True)
    found = VariantContest(
        model=config.parent.name or config.stem,
        date=time.strftime("%Y-%m-%d"),
        machine=_nvidia("name")[gpu],
        versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
    )
    with ExitStack() as stack:
        home = Home(FOLDER / "home", python, gpu, command, port)
        begun = time.monotonic()
        home.run("up")
        stack.callback(home.down)

        def start_direct() -> Direct:
            direct = Direct(python, gpu, FOLDER / "direct.log", direct_words(), adapters_of(MOST), port + 2)
            stack.callback(direct.end)
            return direct

        play_ = _Play(found, home, start_direct, out / FILE, json.loads(text), cold, rounds, begun)
        asyncio.run(play_.run())


def adapters_of(count: int) -> list[str]:
    """Return NAME=FOLDER of the first adapters."""
    return [f"{name}={content_of(number)}" for number, name in enumerate(adapter_names(count))]


def direct_words() -> tuple[str, ...]:
    return (
        *("serve", str(FOLDER / NAME), "--served-model-name", NAME),
        *("--enable-lora", "--max-loras", str(SLOTS), "--max-lora-rank", str(RANK)),
        *("--max-cpu-loras", str(MOST), "--max-num-seqs", str(BATCH), "--max-model-len", str(CONTEXT)),
        *("--kv-cache-memory-bytes", str(KV_GIB * 2**30), "--gpu-memory-utilization", "0.4"),
    )


class Direct(Worker):
    """``vllm serve`` as a person starts it, every adapter named at its start."""

    def __init__(
        self,
        python: str,
        gpu: int,
        log: Path,
        words: Sequence[str],
        adapters: Sequence[str],
        port: int,
    ) -> None:
        self.deployment, self.log, self.port = "vllm serve", log, port
        self.url = f"http://127.0.0.1:{port}"
        self.words = (*words, "--host", "127.0.0.1", "--port", str(port))
        env = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONPATH": "", "HF_HUB_OFFLINE": "1"}
        self.begun, self.ready_s = time.monotonic(), None
        with log.open("wb") as stream:
            self._process = subprocess.Popen(
                [python, "-m", "vllm.entrypoints.cli.main", *self.words, "--lora-modules", *adapters],
                env=env,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )


class _Play:
    """The parts in their order; what was measured is kept after each."""

    def __init__(
        self,
        found: VariantContest,
        home: Home,
        start_direct: Callable[[], Direct],
        file: Path,
        config: Mapping[str, Any],
        cold: int,
        rounds: int,
        begun_s: float,
    ) -> None:
        self._found, self._home, self._start_direct, self._file = found, home, start_direct, file
        self._config, self._cold, self._rounds, self._begun_s = config, cold, rounds, begun_s
        self._urls = {DIRECT: f"http://127.0.0.1:{home.port + 2}"} if rounds else {}
        self._urls[OURS] = home.gateway

    def keep(self, **parts: Any) -> None:
        self._found = replace(self._found, **parts)
        write_kept(self._file, json.dumps(json.loads(to_json(self._found)), indent=0))
        print(f"{time.strftime('%H:%M:%S')} {', '.join(parts)} kept", flush=True)

    async def run(self) -> VariantContest:
        timeout = aiohttp.ClientTimeout(total=300)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            add_s = await self._start(session)
            await self._alone(session)
            await self._arms(session)
            if self._cold:
                await self._measure_cold(session, add_s)
        return self._found

    async def _start(self, session: aiohttp.ClientSession) -> float:
        """Deploy, register all adapters meanwhile, wait for both servers; return the seconds of the cold ones."""
        home = self._home
        deploying = home.start(
            *("deploy", FOLDER / NAME, "--name", NAME, "--engine", "vllm", "--quality", "exact"),
            *("--policy", "packing", "--batch", BATCH, "--context", CONTEXT),
            *("--input-tokens", INPUT, "--output-tokens", OUTPUT),
            *("--variants", MOST, "--rank", RANK, "--popularity", "even"),
        )
        base = str(FOLDER / NAME)
        names = list(enumerate(adapter_names(MOST)))

        async def add(part: int) -> None:
            for number, name in names[part::2]:
                await home.add(session, name, base, content_of(number))

        await asyncio.gather(add(0), add(1))
        print(f"{time.strftime('%H:%M:%S')} {MOST} variants added", flush=True)
        begun = time.monotonic()
        await asyncio.gather(*(self._add_cold(session, base, part, 2) for part in range(2)))
        add_s = time.monotonic() - begun
        print(f"{time.strftime('%H:%M:%S')} {self._cold} more added in {add_s:.0f} s", flush=True)
        code = await asyncio.to_thread(deploying.wait, START_S)
        ours_s = time.monotonic() - self._begun_s
        print(f"{time.strftime('%H:%M:%S')} deployed after {ours_s:.0f} s", flush=True)
        if code:
            log = self._home.folder.parent / "iserve-deploy.log"
            raise SystemExit(f"iserve deploy ended with {code}:\n{log.read_text()[-3000:]}")
        if not self._rounds:
            self.keep(ready_s=((OURS, ours_s),))
            return add_s
        direct = self._start_direct()  # after it: what iServe measures and plans is of a GPU of its own
        await asyncio.to_thread(_wait_for, [direct])
        self.keep(
            ready_s=((DIRECT, direct.ready_s or 0.0), (OURS, ours_s)),
            direct_words=tuple(direct.words),
        )
        return add_s

    async def _add_cold(self, session: aiohttp.ClientSession, base: str, part: int, parts: int) -> None:
        for number, name in list(enumerate(cold_names(self._cold)))[part::parts]:
            folder = FOLDER / f"adding-{part}"
            write = partial(write_adapter, folder, self._config, COLD_RANK, seed=1000 + number, deviation=0.05)
            await asyncio.to_thread(write, modules=("q_proj", "v_proj"))
            await self._home.add(session, name, base, folder)

    async def _alone(self, session: aiohttp.ClientSession) -> None:
        """Ask for every adapter once, so that both sides have loaded them; then for each content by itself."""
        names = adapter_names(MOST)
        kept = []
        for url in self._urls.values():
            warm = [_asked(name, 77) for name in names]
            await asyncio.gather(*(answer_all(session, url, warm[part::8]) for part in range(8)))
        for side in [*self._urls] * 2:
            asked = [_asked(name, 5) for name in [NAME, *names[: len(RANKS) * CONTENTS]]]
            kept.append((side, tuple(await answer_all(session, self._urls[side], asked))))
        self.keep(alone=tuple(kept))

    async def _arms(self, session: aiohttp.ClientSession) -> None:
        for round_ in range(self._rounds):
            for count in COUNTS:
                for side, url in list(self._urls.items())[:: 1 - 2 * (round_ % 2)]:
                    asked = requests(count, round_)
                    begun = time.monotonic()
                    answers = await in_a_loop(url, asked, CLIENTS, ARM_S)
                    arm = Arm(
                        side=side,
                        adapters=count,
                        round=round_,
                        seconds=time.monotonic() - begun,
                        answers=tuple(map(_short, answers)),
                    )
                    print(f"{side} {count}: {arm.tokens_per_s:.0f} tokens/s, {len(answers)} answers", flush=True)
                    self.keep(arms=(*self._found.arms, arm))

    async def _measure_cold(self, session: aiohttp.ClientSession, add_s: float) -> None:
        url, names = self._urls[OURS], cold_names(self._cold)
        before = await _counters(session, url)
        rng = random.Random(11)
        weights = [1 / (1 + rank) for rank in range(len(names))]
        drawn = rng.choices(names, weights, k=CLIENTS * 200)
        zipf = await in_a_loop(
            url, [_asked(name, 10_000 + row) for row, name in enumerate(drawn)], CLIENTS, COLD_S
        )
        after = await _counters(session, url)
        seen = {answer.model for answer in zipf}
        unseen = [name for name in names if name not in seen][:COLD_ALONE]
        ending = asyncio.Event()
        noise = asyncio.ensure_future(in_a_loop(url, requests(MOST, 9), CLIENTS // 2, 600.0, ending))
        alone = await answer_all(session, url, [_asked(name, 20_000, tokens=8) for name in unseen])
        ending.set()
        clients = await noise
        adapter_bytes = sum(one.stat().st_size for one in (FOLDER / "adding-0").iterdir())
        self.keep(
            cold=Cold(
                registered=self._cold,
                slots=SLOTS,
                max_loaded=4 * SLOTS,  # places
                adapter_bytes=adapter_bytes,
                add_s=add_s,
                loads=round(after["loads_count"] - before["loads_count"]),
                load_s=after["loads_sum"] - before["loads_sum"],
                evictions=round(after["evictions_total"] - before["evictions_total"]),
                zipf=tuple(map(_short, zipf)),
                clients=tuple(map(_short, clients)),
                alone=tuple(map(_short, alone)),
                share=_share(COLD_RANK),
                arm_shares=tuple(map(_share, RANKS)),
            )
        )


def _share(rank: int) -> float:
    return DeploymentConfig(engine="vllm", adapter_slots=SLOTS, adapter_rank=RANK).place_share(rank)


def _short(answer: Answer) -> Answer:
    """Return the answer with a hash of its words, which is as good for comparing."""
    return replace(answer, text=hashlib.sha256(answer.text.encode()).hexdigest()[:12])


def asked_models(count: int, round_: int) -> list[str]:
    """Return the models of the requests of an arm, in their order; more than can be answered within it."""
    rng, names = random.Random(100 * round_ + count), adapter_names(count)
    return [rng.choice(names) for _ in range(CLIENTS * 200)]


def requests(count: int, round_: int) -> list[Asked]:
    """Return the requests of an arm in their order."""
    first = 1_000_000 * round_ + 10_000 * count
    return [_asked(model, first + row) for row, model in enumerate(asked_models(count, round_))]


def _asked(model: str, seed: int, tokens: int = OUTPUT) -> Asked:
    rng = random.Random(seed)
    return Asked(model=model, prompt=tuple(rng.randrange(10, 2000) for _ in range(INPUT)), tokens=tokens)


async def _counters(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return the gateway's counters of variants, over all of them."""
    async with session.get(f"{url}/metrics") as answer:
        text = await answer.text()
    prefix, totals = "iserve_gateway_variant_", {"loads_count": 0.0, "loads_sum": 0.0, "evictions_total": 0.0}
    for line in text.splitlines():
        if line.startswith(prefix):
            name = line[len(prefix) :].partition("{")[0]
            for wanted in totals:
                if name.endswith(wanted) or name == f"load_seconds{wanted[5:]}":
                    totals[wanted] += float(line.rpartition(" ")[2])
    return totals


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    orders = parser.add_subparsers(dest="order", required=True)
    one = orders.add_parser("play")
    one.add_argument("config", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--python", default=sys.executable)
    one.add_argument("--gpu", type=int, default=0)
    one.add_argument("--iserve", default="iserve", help="command of iServe")
    one.add_argument("--port", type=int, default=FIRST_PORT, help="the first of three")
    one.add_argument("--cold", type=int, default=COLD, help="further adapters")
    one.add_argument("--rounds", type=int, default=ROUNDS, help="of the arms; 0: iServe alone, and no arms")
    one = orders.add_parser("table")
    one.add_argument("kept", type=Path)
    options = parser.parse_args()
    if options.order == "play":
        command = options.iserve.split()
        play(
            options.config,
            options.out,
            options.python,
            options.gpu,
            command,
            options.port,
            cold=options.cold,
            rounds=options.rounds,
        )
        return
    print(table(from_json(read_kept(options.kept), VariantContest, what=str(options.kept))))


if __name__ == "__main__":
    main()
