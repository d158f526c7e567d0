"""Time and memory of vLLM's adapter slots, as the product starts them: steps, prompts, and loads while it decodes.

    python -m tests.bench.lora_steps measure CONFIG_JSON OUT --python VLLM_PYTHON
    python -m tests.bench.lora_steps loads CONFIG_JSON OUT --python VLLM_PYTHON
    python -m tests.bench.lora_steps table OUT/lora_steps.json.gz [CONFIG_JSON]

``loads`` measures the last part alone, on three workers with 32 slots: vLLM's own loads, which stop its steps; our
plug-in's, which stop them too; and those of ``ISERVE_VLLM_BACKGROUND_LOADS=1``. About 250 s, of which the start is
the most. ``table`` prints its file as well.
``measure`` runs on the GPU machine, for a model of Llama's modules: three workers with random weights on one GPU
of 130 GiB or more (without slots, with 8, with 32 of rank 64), all started before the first call and called in
turns. The adapters are random too, of ranks 64, 16 and 8 in turn, one file for each rank, loaded by as many names
as are needed; the files were just written, so that a load reads them from the page cache. A step's time is that
of equal requests with ``OUTPUT`` tokens less that with one, over the tokens between. Results are kept after each
part. ``table`` prints them, what plans estimate of the times (``fingerprint.estimators.adapter_slots``), and the
bytes of a slot as vLLM has them against ``fingerprint.lora.slot_bytes``. No web framework is imported. It
takes about 310 s, of which the starts are 190. The bytes of graphs are those by which free memory fell
meanwhile, of which the workers that start together take parts of each other's.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import aiohttp

from daemon.engines.vllm.metrics import read_stats
from daemon.engines.vllm.variant_plug_in import BACKGROUND_LOADS
from fingerprint.codec import from_json, to_json
from tests.bench.engine_contest import PlacedReplica
from tests.bench.engine_contest_run import (
    FOLDER,
    Worker,
    _nvidia,
    _version,
    _wait_for,
    measuring_options,
    write_models,
)
from tests.bench.kept import read_kept, write_kept
from tests.bench.lora_adapters import write_adapter
from tests.bench.lora_steps_table import Burst, Load, LoraSteps, Memory, Prompt, config_of, table
from traces.simulator.step_model import Limits

SLOTS = (0, 8, 32)
RANKS = (64, 16, 8)  # of the adapters, in turn
BATCHES, ACTIVE = (32, 128), (0, 1, 8, 32)
INPUT, OUTPUT, ROUNDS = 64, 65, 2
PROMPTS, PROMPT_ROUNDS = ((1, 2048), (8, 512)), 5
LOADS, LOADING_ROWS, LOADING_TOKENS = 2, 32, 300  # per rank; the rows that decode meanwhile, and their tokens
LOAD_WAYS = ((False, False), (True, False), (True, True))  # whether our plug-in reads it, and in a thread
GIB_EACH = 42
BEING_READ = "is still being read"
FILE = "lora_steps.json.gz"
TIMEOUT = aiohttp.ClientTimeout(total=120)
_LOG = {  # of a worker, by what it says
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
    "graphs_gib": re.compile(r"Graph capturing finished in [\d.]+ secs, took (-?[\d.]+) GiB"),
    "graphs_s": re.compile(r"Graph capturing finished in ([\d.]+) secs"),
}


def measure(config: Path, out: Path, python: str, gpu: int) -> None:
    """Start the workers, and call them in turns; keep what is measured after each part."""
    text, total = config.read_text(), int(_nvidia("memory.total")[gpu]) * 2**20
    write_models([("model", text)], FOLDER)
    for rank in RANKS:
        write_adapter(FOLDER / f"rank-{rank}", json.loads(text), rank)
    with ExitStack() as stack:
        workers = {}
        for number, slots in enumerate(SLOTS):
            replica = PlacedReplica(
                deployment="model",
                config=config_of(slots),
                devices=(gpu,),
                bytes_per_gpu=GIB_EACH * 2**30,
                limits=Limits(
                    max_batch=max(BATCHES),
                    max_context_tokens=4096,
                    max_batched_tokens=8192,
                    kv_tokens=max(
                        max(BATCHES) * (INPUT + OUTPUT + 48), LOADING_ROWS * (INPUT + LOADING_TOKENS + 48)
                    ),
                ),
            )
            workers[slots] = Worker(50 + number, replica, total, FOLDER, python)
            stack.callback(workers[slots].end)
        _wait_for(list(workers.values()))
        found = LoraSteps(
            model=config.parent.name,
            date=time.strftime("%Y-%m-%d"),
            machine=_nvidia("name")[gpu],
            versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
        )
        out.mkdir(parents=True, exist_ok=True)
        asyncio.run(_measured(found, workers, out / FILE))


def measure_loads(config: Path, out: Path, python: str, gpu: int) -> None:
    """Measure loads as vLLM has them, by our plug-in, and by it in a thread."""
    text, total, slots = config.read_text(), int(_nvidia("memory.total")[gpu]) * 2**20, max(SLOTS)
    write_models([("model", text)], FOLDER)
    for rank in RANKS:
        write_adapter(FOLDER / f"rank-{rank}", json.loads(text), rank)
    limits = Limits(
        max_batch=LOADING_ROWS,
        max_context_tokens=4096,
        max_batched_tokens=8192,
        kv_tokens=LOADING_ROWS * (INPUT + LOADING_TOKENS + 48),
    )
    with ExitStack() as stack:
        workers = []
        for number, (plug_in, in_background) in enumerate(LOAD_WAYS):
            os.environ[BACKGROUND_LOADS] = str(int(in_background))
            replica = PlacedReplica(
                deployment="model",
                config=config_of(slots),
                devices=(gpu,),
                bytes_per_gpu=GIB_EACH * 2**30,
                limits=limits,
            )
            workers.append(Worker(50 + number, replica, total, FOLDER, python, plug_in=plug_in))
            stack.callback(workers[-1].end)
        _wait_for(workers)
        found = LoraSteps(
            model=config.parent.name,
            date=time.strftime("%Y-%m-%d"),
            machine=_nvidia("name")[gpu],
            versions=f"vllm {_version(python)}, driver {_nvidia('driver_version')[0]}",
        )
        out.mkdir(parents=True, exist_ok=True)
        asyncio.run(_measured_loads(found, workers, out / FILE))


async def _measured_loads(found: LoraSteps, workers: Sequence[Worker], file: Path) -> None:
    """Measure loads of the workers in turn, twice; keep them after each."""
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        clients = [_Client(session, worker) for worker in workers]
        for _ in range(2):
            for (plug_in, in_background), client in zip(LOAD_WAYS, clients, strict=True):
                loads = [load async for load in _loads(client, max(SLOTS))]
                loads = [replace(load, plug_in=plug_in, in_background=in_background) for load in loads]
                found = replace(found, loads=(*found.loads, *loads))
                write_kept(file, json.dumps(json.loads(to_json(found)), indent=0))


async def _measured(found: LoraSteps, workers: Mapping[int, Worker], file: Path) -> None:
    """Measure each part, and keep all that was measured after it."""

    def keep(**parts: tuple[object, ...]) -> None:
        nonlocal found
        changes: dict[str, Any] = {name: (*getattr(found, name), *more) for name, more in parts.items()}
        found = replace(found, **changes)
        write_kept(file, json.dumps(json.loads(to_json(found)), indent=0))
        print(f"{time.strftime('%H:%M:%S')} {', '.join(parts)} kept", flush=True)

    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        clients = {slots: _Client(session, worker) for slots, worker in workers.items()}
        keep(memory=tuple([await _memory(slots, workers[slots], one) for slots, one in clients.items()]))
        for slots, one in clients.items():
            for number in range(slots):
                await one.load(_name(number), RANKS[number % len(RANKS)])
        for batch in BATCHES:
            keep(bursts=tuple([burst async for burst in _bursts(clients, batch)]))
        keep(prompts=tuple([prompt async for prompt in _prompts(clients)]))
        for slots in SLOTS:
            if slots:
                keep(loads=tuple([load async for load in _loads(clients[slots], slots)]))


def _name(number: int) -> str:
    return f"adapter-{number}"


def reading_pause_s(waited_s: float) -> float:
    """Return the pause before the gateway asks again, which has a web framework."""
    return min(1.0, max(0.02, waited_s / 5))


class _Client:
    """Requests to one worker."""

    def __init__(self, session: aiohttp.ClientSession, worker: Worker) -> None:
        self._session, self._url = session, f"http://127.0.0.1:{worker.port}"

    async def text(self, path: str) -> bytes:
        async with self._session.get(f"{self._url}{path}") as response:
            return await response.read()

    async def post(self, path: str, body: Mapping[str, object]) -> float:
        """Return the seconds until the answer is there."""
        begun = time.monotonic()
        async with self._session.post(f"{self._url}{path}", json=body) as response:
            text = await response.text()
            if response.status != 200:
                raise SystemExit(f"{self._url}{path} answered {response.status}: {text[:500]}")
        return time.monotonic() - begun

    async def load(self, name: str, rank: int) -> float:
        folder = str(FOLDER / f"rank-{rank}")
        return await self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    async def load_asking(self, name: str, rank: int) -> tuple[float, int]:
        """Return the seconds until a load is done, and how often it was asked for, as the gateway asks."""
        begun, body = time.monotonic(), {"lora_name": name, "lora_path": str(FOLDER / f"rank-{rank}")}
        for calls in count(1):
            async with self._session.post(f"{self._url}/v1/load_lora_adapter", json=body) as response:
                text = await response.text()
            if response.status == 200:
                return time.monotonic() - begun, calls
            if BEING_READ not in text:
                raise SystemExit(f"{self._url} answered {response.status}: {text[:500]}")
            await asyncio.sleep(reading_pause_s(time.monotonic() - begun))
        raise AssertionError

    async def unload(self, name: str) -> None:
        await self.post("/v1/unload_lora_adapter", {"lora_name": name})

    async def complete(self, models: list[str], prompt: list[int], tokens: int) -> float:
        """Return the seconds until a request of each of ``models`` is answered."""
        begun = time.monotonic()
        await asyncio.gather(
            *(self.post("/v1/completions", _completion(model, prompt, tokens)) for model in models)
        )
        return time.monotonic() - begun

    async def stream(self, prompt: list[int], tokens: int, times_s: list[float]) -> None:
        """Append the time of each token of one request of the base to ``times_s``."""
        body = _completion("model", prompt, tokens) | {"stream": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times_s.append(time.monotonic())


def _completion(model: str, prompt: list[int], tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }


async def _memory(slots: int, worker: Worker, client: _Client) -> Memory:
    log = worker.log.read_text(errors="replace")
    said = {name: float(found[-1]) if (found := text.findall(log)) else -1.0 for name, text in _LOG.items()}
    stats = read_stats("model", await client.text("/metrics"))
    return Memory(slots=slots, kv_tokens=stats.kv_tokens_total, ready_s=round(worker.ready_s or 0.0, 1), **said)


def models_of(active: int, batch: int) -> list[str]:
    """Return the model of each request of a batch: the base, or so many adapters in turn."""
    return [_name(number % active) if active else "model" for number in range(batch)]


async def _bursts(clients: Mapping[int, _Client], batch: int) -> AsyncIterator[Burst]:
    prompt = [random.Random(batch).randrange(10, 2000) for _ in range(INPUT)]
    for round_ in range(ROUNDS + 1):  # the first is not kept
        for slots, active in ((slots, active) for slots in SLOTS for active in ACTIVE if active <= slots):
            models = models_of(active, batch)
            one_s = min([await clients[slots].complete(models, prompt, 1) for _ in range(2)])
            all_s = await clients[slots].complete(models, prompt, OUTPUT)
            if round_:
                yield Burst(slots=slots, active=active, batch=batch, decode_s=all_s - one_s, tokens=OUTPUT - 1)


async def _prompts(clients: Mapping[int, _Client]) -> AsyncIterator[Prompt]:
    for round_ in range(PROMPT_ROUNDS + 1):  # the first is not kept
        for requests, tokens in PROMPTS:
            prompt = [random.Random(tokens).randrange(10, 2000) for _ in range(tokens)]
            for slots in SLOTS:
                for adapter in (False, True)[: 1 + bool(slots)]:
                    took_s = await clients[slots].complete(models_of(int(adapter), requests), prompt, 1)
                    if round_:
                        yield Prompt(
                            slots=slots, requests=requests, tokens=tokens, adapter=adapter, seconds=took_s
                        )


async def _loads(client: _Client, slots: int) -> AsyncIterator[Load]:
    prompt = [random.Random(slots).randrange(10, 2000) for _ in range(INPUT)]
    for number in range(LOADS * len(RANKS)):
        rank, name, times_s = RANKS[number % len(RANKS)], f"cold-{number}", list[float]()
        models = models_of(0, LOADING_ROWS - 1)
        plain = asyncio.ensure_future(client.complete(models, prompt, LOADING_TOKENS))
        streamed = asyncio.ensure_future(client.stream(prompt, LOADING_TOKENS, times_s))
        while len(times_s) < LOADING_TOKENS // 3 and not streamed.done():
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        load_s, calls = await client.load_asking(name, rank)
        await asyncio.gather(plain, streamed)
        longest_s, usual_s = gaps_s(times_s, begun, begun + load_s)
        yield Load(
            slots=slots,
            rank=rank,
            load_s=load_s,
            longest_gap_s=longest_s,
            usual_gap_s=usual_s,
            median_gap_s=statistics.median(second - first for first, second in pairwise(times_s)),
            calls=calls,
            long_gaps=tuple(sorted(_gaps(times_s, begun), key=lambda gap: -gap[1])[:5]),
        )
        await client.unload(name)


def _gaps(times_s: Sequence[float], begun_s: float) -> list[tuple[float, float]]:
    return [(round(first - begun_s, 4), round(second - first, 5)) for first, second in pairwise(times_s)]


def gaps_s(times_s: Sequence[float], begun_s: float, ended_s: float) -> tuple[float, float]:
    """Return the longest gap between two times that touches the span, and the longest that does not; 0: none."""
    touching, apart = [0.0], [0.0]
    for first, second in pairwise(times_s):
        (touching if second > begun_s and first < ended_s else apart).append(second - first)
    return max(touching), max(apart)


def main() -> None:
    options = measuring_options(__doc__, "config", ("measure", "loads"))
    if options.order != "table":
        run = measure if options.order == "measure" else measure_loads
        run(options.config, options.out, options.python, options.gpu)
        return
    config = json.loads(options.config.read_text()) if options.config else None
    print(table(from_json(read_kept(options.kept), LoraSteps), config))


if __name__ == "__main__":
    main()
