"""Slowdown of vLLM engines that share GPUs: pairs of loads, TP groups, an idle neighbour, MPS.

    python -m tests.bench.gpu_sharing PLANS OUT --python VLLM_PYTHON [--run pairs,mps,...]

Engines of an 8B shape with random weights (the first model of a contest's PLANS, ``tests.bench.engine_contest``),
launched as the product launches them: two on one GPU, four over both as TP groups. Each scene runs closed loops
on some of them for a few seconds; what an engine gets done is read from its own counters of tokens, before and
after. Written as it falls: one JSON with every scene.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from fingerprint.codec import from_json, to_json
from fingerprint.config import DeploymentConfig
from tests.bench.engine_contest import Contest, PlacedReplica
from tests.bench.engine_contest_run import FOLDER, START_S, Worker, _nvidia, _version, write_models
from tests.bench.kept import read_kept, write_kept
from traces.simulator.step_model import Limits

__all__ = ["Scene", "Sharing", "slowdowns", "table"]

SETTLE_S, WINDOW_S = 1.5, 5.0
PROMPT_TOKENS, ANSWER_TOKENS = 4000, 1000
RARE_TOKENS_PER_S = 64  # asked for
GPU_OF = {"a": (0,), "b": (0,), "d": (0, 1), "e": (0, 1), "f": (0, 1), "g": (0, 1)}
BYTES = {1: 26_000_000_000, 2: 20_000_000_000}  # of a GPU, by TP

# Engine -> load, in the order they run. decodeN: N answers at once; prefill: prompts of 4,000 tokens, one after
# the other; rare: an answer of 64 tokens begun every second.
ALONE: tuple[Mapping[str, str], ...] = ({"a": "decode1"}, {"a": "decode16"}, {"a": "prefill"})
TOGETHER: tuple[Mapping[str, str], ...] = (
    {"a": "decode1"},
    {"a": "decode16"},
    {"a": "decode16", "b": "decode16"},
    {"a": "decode1", "b": "decode16"},
    {"a": "decode16", "b": "prefill"},
    {"a": "prefill", "b": "prefill"},
    {"b": "rare"},
    {"a": "decode16", "b": "rare"},
    {"d": "decode1"},
    {"d": "decode16"},
    {"d": "prefill"},
    {"d": "decode16", "e": "decode16"},
    {"d": "decode1", "e": "decode1"},
    {"d": "decode16", "e": "prefill"},
    {"d": "prefill", "e": "prefill"},
    {"d": "decode16", "e": "decode16", "f": "decode16"},
    {"d": "decode16", "e": "decode16", "f": "decode16", "g": "decode16"},
    {"d": "prefill", "e": "prefill", "f": "prefill", "g": "prefill"},
    {"d": "decode16", "a": "decode16"},
    {"d": "decode16", "e": "rare"},
)
WITH_MPS: tuple[Mapping[str, str], ...] = (
    {"a": "decode1"},
    {"a": "decode16"},
    {"a": "prefill"},
    {"a": "decode16", "b": "decode16"},
    {"a": "decode1", "b": "decode16"},
    {"a": "decode16", "b": "prefill"},
    {"a": "prefill", "b": "prefill"},
    {"d": "decode16"},
    {"d": "decode16", "e": "decode16"},
    {"d": "decode16", "e": "prefill"},
)


GROUPS: tuple[Mapping[str, str], ...] = (
    {"d": "decode16"},
    {"d": "prefill"},
    {"d": "decode16", "e": "decode16"},
    {"d": "decode16", "e": "decode16", "f": "decode16"},
    {"d": "decode16", "e": "decode16", "f": "decode16", "g": "decode16"},
    {"d": "prefill", "e": "prefill", "f": "prefill"},
    {"d": "rare", "e": "rare", "f": "rare"},
)
_LOADS = {"decode1": "1 answer", "decode16": "16 answers", "prefill": "prompts", "rare": "an answer each second"}
_RUNS = {"pairs": "", "groups": "", "pairs-mps": "MPS", "groups-mps": "MPS", "groups-nccl": "NCCL"}
NCCL = ("--disable-custom-all-reduce",)
# Name of a run -> whether with MPS, options of vLLM, engines and their scenes; later engines are added.
RUNS: dict[str, tuple[bool, tuple[str, ...], tuple[tuple[str, tuple[Mapping[str, str], ...]], ...]]] = {
    "pairs": (False, (), (("a", ALONE), ("bdefg", TOGETHER))),
    "pairs-mps": (True, (), (("abde", WITH_MPS),)),
    "groups": (False, (), (("defg", GROUPS),)),
    "groups-mps": (True, (), (("defg", GROUPS),)),
    "groups-nccl": (False, NCCL, (("defg", GROUPS),)),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """Engines under load, and what each got done a second. ``loaded``: all that were up, idle ones included."""

    run: str
    loaded: str
    loads: dict[str, str]
    generated_per_s: dict[str, float]
    prompt_tokens_per_s: dict[str, float]
    busy: dict[str, float]  # share of the window in which the engine had a request, by the client

    def pace(self, engine: str) -> float:
        """Tokens a second of the engine's load, prompts or answers."""
        rates = self.prompt_tokens_per_s if self.loads[engine] == "prefill" else self.generated_per_s
        return rates[engine]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Result of one run."""

    date: str
    machine: str
    versions: str
    start_s: dict[str, float]
    scenes: tuple[Scene, ...]


def slowdowns(sharing: Sharing, scene: Scene) -> dict[str, float]:
    """Return of each engine how many times as long as alone its load takes; nothing of rare loads."""
    found = {}
    for engine, load in scene.loads.items():
        alike = [
            (one, *one.loads)
            for one in sharing.scenes
            if one.run == scene.run and list(one.loads.values()) == [load]
        ]
        alone = [one.pace(name) for one, name in alike if len(GPU_OF[name]) == len(GPU_OF[engine])]
        if load != "rare" and alone:
            found[engine] = alone[-1] / scene.pace(engine)
    return found


def table(sharing: Sharing) -> str:
    """Return a Markdown table of the scenes with several engines."""
    lines = [
        "| engines on the same GPUs, and their load | how | how many times as long as alone |",
        "| --- " * 3 + "|",
    ]
    for scene in sharing.scenes:
        times = slowdowns(sharing, scene)
        is_rare = set(scene.loads.values()) == {"rare"}
        if len(scene.loads) > 1 and (times or is_rare):
            engines = ", ".join(f"TP {len(GPU_OF[name])}: {_LOADS[load]}" for name, load in scene.loads.items())
            slowed = ", ".join(_told(times[name]) if name in times else "-" for name in scene.loads)
            if is_rare:
                parts = (f"{pace / RARE_TOKENS_PER_S:.0%}" for pace in scene.generated_per_s.values())
                slowed = f"get {', '.join(parts)} of the answers done"
            lines.append(f"| {engines} | {_RUNS[scene.run]} | {slowed} |")
    return "\n".join(lines)


def _told(times: float) -> str:
    return f"{times:.1f}" if times < 10 else f"{times:.0f}"


class Load:
    """Closed loop on one engine, until it is ended; connections are closed then, which aborts what runs."""

    def __init__(self, worker: Worker, kind: str) -> None:
        self._worker, self._kind, self._ended = worker, kind, threading.Event()
        self.spans: list[tuple[float, float]] = []
        self._open: dict[int, HTTPConnection] = {}
        count = int(kind.removeprefix("decode")) if kind.startswith("decode") else 1
        self._threads = [
            threading.Thread(target=self._loop, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def _loop(self, number: int) -> None:
        inputs, outputs = {"prefill": (PROMPT_TOKENS, 1), "rare": (100, RARE_TOKENS_PER_S)}.get(
            self._kind, (100, ANSWER_TOKENS)
        )
        begin, turn = time.monotonic(), 0
        while not self._ended.is_set():
            if self._kind == "rare":
                self._ended.wait(max(0.0, begin + turn - time.monotonic()))
            turn += 1
            prompt = [(7 * number + 13 * turn + k) % 1900 + 2 for k in range(inputs)]
            body = {"model": self._worker.deployment, "prompt": prompt, "max_tokens": outputs, "ignore_eos": True}
            started = time.monotonic()
            connection = self._open[number] = HTTPConnection("127.0.0.1", self._worker.port, timeout=120)
            with suppress(OSError, HTTPException, AttributeError):
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                answer.read()
                if answer.status != 200:
                    print(self._kind, answer.status, flush=True)
            connection.close()
            if number == 0:
                self.spans.append((started, time.monotonic()))

    def end(self) -> None:
        self._ended.set()
        for connection in list(self._open.values()):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)

    def busy(self, begin_s: float, end_s: float) -> float:
        """Share of that time in which a request of the first loop ran."""
        return sum(max(0.0, min(b, end_s) - max(a, begin_s)) for a, b in self.spans) / (end_s - begin_s)


def counters(worker: Worker) -> dict[str, float]:
    """Return the engine's counters by name, summed over labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def play(run: str, scene: Mapping[str, str], workers: Mapping[str, Worker]) -> Scene:
    """Run one scene, and wait until its engines are idle again."""
    loads = {name: Load(workers[name], kind) for name, kind in scene.items()}
    time.sleep(SETTLE_S)
    begin_s, before = time.monotonic(), {name: counters(workers[name]) for name in scene}
    time.sleep(WINDOW_S)
    end_s, after = time.monotonic(), {name: counters(workers[name]) for name in scene}
    for load in loads.values():
        load.end()
    limit = time.monotonic() + 20
    while any(counters(workers[name])["vllm:num_requests_running"] for name in scene) and time.monotonic() < limit:
        time.sleep(0.1)

    def per_s(counter: str) -> dict[str, float]:
        window_s = end_s - begin_s
        return {name: round((after[name][counter] - before[name][counter]) / window_s, 2) for name in scene}

    found = Scene(
        run=run,
        loaded="".join(sorted(workers)),
        loads=dict(scene),
        generated_per_s=per_s("vllm:generation_tokens_total"),
        prompt_tokens_per_s=per_s("vllm:prompt_tokens_total"),
        busy={name: round(load.busy(begin_s, end_s), 3) for name, load in loads.items() if load.spans},
    )
    print(found.loaded, found.loads, {name: found.pace(name) for name in scene}, found.busy, flush=True)
    return found


def start(
    names: Sequence[str], contest: Contest, python: str, more: Sequence[str], stack: ExitStack
) -> dict[str, Worker]:
    """Start engines at once, and wait until they answer."""
    workers = {}
    for name in names:
        devices = GPU_OF[name]
        replica = PlacedReplica(
            deployment=contest.models[0][0],
            config=DeploymentConfig(tp=len(devices), pp=1, engine="vllm"),
            devices=devices,
            bytes_per_gpu=BYTES[len(devices)],
            limits=Limits(
                max_batch=32, max_context_tokens=4200, max_batched_tokens=8192, kv_tokens=40_000, preempts=True
            ),
        )
        workers[name] = Worker(list(GPU_OF).index(name), replica, contest.total_bytes, FOLDER, python, more)
        stack.callback(workers[name].end)
    limit = time.monotonic() + START_S
    while [worker for worker in workers.values() if not worker.is_ready()]:
        if time.monotonic() > limit:
            raise SystemExit(f"not ready within {START_S:g} s")
        time.sleep(0.5)
    return workers


@contextmanager
def mps_daemon() -> Iterator[None]:
    """Run NVIDIA's MPS control daemon; workers that are started meanwhile share GPUs through it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for name in ("pipe", "log"):
            (Path(folder) / name).mkdir()
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
        try:
            yield
        finally:
            log = Path(folder) / "log" / "server.log"
            print(log.read_text()[-1500:] if log.exists() else "the MPS server did not start", flush=True)
            subprocess.run(["nvidia-cuda-mps-control"], input=b"quit -t 5\n", timeout=60)
            for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
                del os.environ[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--run", default="pairs", help=f"of {', '.join(RUNS)}; several with commas")
    options = parser.parse_args()
    contest = from_json(read_kept(options.plans), Contest, what=str(options.plans))
    write_models(contest.models, FOLDER)
    scenes: list[Scene] = []
    started: dict[str, float] = {}
    for run in options.run.split(","):
        mps, more, groups = RUNS[run]
        with ExitStack() as stack:
            if mps:
                stack.enter_context(mps_daemon())
            workers: dict[str, Worker] = {}
            for names, wanted in groups:
                workers |= start(tuple(names), contest, options.python, more, stack)
                started |= {f"{run} {name}": round(workers[name].ready_s or 0.0, 1) for name in names}
                print("ready", started, flush=True)
                for scene in wanted:
                    scenes.append(play(run, scene, workers))
                    keep(options, started, scenes)


def keep(options: argparse.Namespace, started: Mapping[str, float], scenes: Sequence[Scene]) -> None:
    found = Sharing(
        date=time.strftime("%Y-%m-%d"),
        machine=", ".join(_nvidia("name")),
        versions=f"vllm {_version(options.python)}, driver {_nvidia('driver_version')[0]}",
        start_s=dict(started),
        scenes=tuple(scenes),
    )
    write_kept(options.out / "gpu-sharing.json", to_json(found).decode())


if __name__ == "__main__":
    main()
