"""Routing of variants over two workers of the embedded engine: ``least-loaded`` against ``round-robin``, on a CPU.

    python -m tests.bench.variant_routing_run measure OUT [--rounds N] [--seconds S]
    python -m tests.bench.variant_routing_run table OUT/variant_routing_cpu.json.gz

``measure`` deploys the demo model with two replicas through iServe and registers ``VARIANTS`` variants, of two
contents in turn. For each turn all adapters are unloaded, and a gateway process of its own, with one policy,
serves the same two workers by the deployment's route table. Requests are sent by ``CLIENTS`` further processes:
Poisson arrivals at a share of what a closed loop completed before the first turn, variants by Zipf's law with
exponent 1. Both policies get the same requests, one right after the other, the first of a round being last in the
next one. Loads are those that the gateway counts, from none loaded. The result is kept after each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from daemon.process import read_record
from fingerprint.codec import from_json, to_json
from iserve.client import ControllerClient
from iserve.demo import demo_adapter_path
from iserve.route_table import RouteTable, WorkerTarget
from tests.bench.kept import read_kept, write_kept
from tests.bench.variant_clients import Answer, Asked, at_times, in_a_loop, p

POLICIES = ("least-loaded", "round-robin")
VARIANTS, CONTENTS, BATCH, CLIENTS = 60, ("capitals", "shout"), 4, 2
INPUT, OUTPUT = 24, 8
LOADS = (0.3, 0.6)  # of the closed loop's rate
NAME, FILE = "base", "variant_routing_cpu.json.gz"
CALIBRATION_S, PATIENCE_S = 15.0, 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Turn of one policy."""

    policy: str
    load: float
    round: int
    loads: int
    evictions: int
    ttft_s: tuple[float, ...]  # of the requests in their order; -1: an answer without text, or none

    @property
    def answered_s(self) -> list[float]:
        return [one for one in self.ttft_s if one >= 0]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRun:
    """Recording on one machine."""

    machine: str
    date: str
    slots: int  # of each worker
    loaded: int  # adapters that each keeps
    capacity_per_s: float
    seconds: float
    turns: tuple[Turn, ...] = ()


def requests(seed: int, rate_per_s: float, seconds: float) -> tuple[list[Asked], list[float]]:
    """Return Poisson arrivals for ``seconds``, and the requests of them."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, int(3 * rate_per_s * seconds) + 50))
    at_s = at_s[at_s < seconds]
    weights = 1.0 / np.arange(1, VARIANTS + 1)
    drawn = rng.choice(VARIANTS, len(at_s), p=weights / weights.sum())
    prompts = rng.integers(10, 90, (len(at_s), INPUT))
    asked = [
        Asked(model=f"v{one}", prompt=tuple(prompt), tokens=OUTPUT)
        for one, prompt in zip(drawn.tolist(), prompts.tolist(), strict=True)
    ]
    return asked, at_s.tolist()


class Home:
    """Installation in a folder of its own, by the command line."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("ISERVE_")}
        own = {"ISERVE_HOME": str(folder), "ISERVE_PORT": "0", "ISERVE_API_PORT": "0", "HF_HUB_OFFLINE": "1"}
        self._environment = kept | own | {"ISERVE_CPU_DEVICES": "2", "ISERVE_PROFILE_SECONDS": "120"}

    def run(self, *words: object) -> None:
        command = [str(Path(sys.executable).with_name("iserve")), *map(str, words)]
        subprocess.run(command, env=self._environment, check=True, timeout=PATIENCE_S)

    def controller(self) -> ControllerClient:
        record = read_record(self.folder / "run" / "controller.json")
        assert record is not None, "the controller runs"
        return ControllerClient(record.url, record.token).patient(PATIENCE_S)

    def table(self) -> RouteTable:
        return from_json((self.folder / "run" / "routes.json").read_bytes(), RouteTable)


def deploy(home: Home) -> RouteTable:
    """Deploy the model and register all variants; return the table once it has them all."""
    home.run(
        *("deploy", "iserve-demo", "--name", NAME, "--engine", "torch", "--replicas", 2, "--policy", "packing"),
        *("--quality", "exact", "--batch", BATCH, "--context", 2 * (INPUT + OUTPUT)),
        *("--input-tokens", INPUT, "--output-tokens", OUTPUT, "--variants", VARIANTS, "--rank", 16),
    )
    for number in range(VARIANTS):
        adapter = str(demo_adapter_path(CONTENTS[number % len(CONTENTS)]))
        body = {"name": f"v{number}", "base": NAME, "path": adapter}
        home.controller().post("/api/v1/variants", body, dict[str, Any])
    deadline = time.monotonic() + PATIENCE_S
    while True:
        table = home.table()
        (route,) = table.routes
        if len(route.variants) == VARIANTS and [one.ready for one in route.workers] == [True, True]:
            return table
        assert time.monotonic() < deadline, "the table has two workers and all variants"
        time.sleep(0.5)


def unload_all(workers: Sequence[WorkerTarget]) -> None:
    for worker in workers:
        models = json.loads(_ask(worker, "GET", "/v1/models"))["data"]
        for model in models:
            if model.get("parent"):
                _ask(worker, "POST", "/v1/unload_lora_adapter", {"lora_name": model["id"]})


def _ask(worker: WorkerTarget, method: str, path: str, body: dict[str, str] | None = None) -> bytes:
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {worker.token}"} if worker.token else {}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(worker.url + path, data, headers, method=method), timeout=PATIENCE_S) as answer:
        return bytes(answer.read())


@contextmanager
def gateway(home: Home, policy: str) -> Iterator[str]:
    """Yield the URL of a gateway process with this policy, before the deployment's workers."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "run").mkdir()
        (own / "variants").symlink_to(home.folder / "variants")
        (own / "run" / "routes.json").symlink_to(home.folder / "run" / "routes.json")
        words = ["--home", folder, "--port", "0", "--variant-policy", policy]
        with (own / "log").open("w") as log:
            process = subprocess.Popen([sys.executable, "-m", "iserve.gateway", *words], stderr=log)
        try:
            deadline = time.monotonic() + PATIENCE_S
            while (record := read_record(own / "run" / "gateway.json")) is None or not _is_ready(record.url):
                assert process.poll() is None, (own / "log").read_text()
                assert time.monotonic() < deadline, "the gateway is ready"
                time.sleep(0.1)
            yield record.url
        finally:
            process.terminate()
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def counted(url: str, series: str) -> int:
    """Return the sum over variants of a series of the gateway."""
    with urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series}{{")))


def sent(url: str, seed: int, rate_per_s: float, seconds: float) -> list[Answer]:
    """Have each client process send its part of the rate; return all answers, by client."""
    words = [sys.executable, "-m", "tests.bench.variant_routing_run", "client", url]
    clients = [
        subprocess.Popen(
            [*words, str(CLIENTS * seed + number), str(rate_per_s / CLIENTS), str(seconds)],
            stdout=subprocess.PIPE,
        )
        for number in range(CLIENTS)
    ]
    found: list[Answer] = []
    for client in clients:
        said, _ = client.communicate(timeout=PATIENCE_S)
        found += from_json(said, list[Answer], what="the answers of a client")
    return found


def measure(out: Path, rounds: int, seconds: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        home = Home(Path(folder))
        try:
            table = deploy(home)
            (route,) = table.routes
            found = RoutingRun(
                machine=f"{platform.machine()}, {os.cpu_count()} CPUs",
                date=time.strftime("%Y-%m-%d"),
                slots=route.adapter_slots,
                loaded=route.loaded_adapters,
                capacity_per_s=_capacity_per_s(home),
                seconds=seconds,
            )
            print(f"{found.slots} slots, {found.loaded} loaded, {found.capacity_per_s:.2f} requests/s", flush=True)
            for round_ in range(rounds):
                for load in LOADS:
                    for policy in POLICIES[:: 1 - 2 * (round_ % 2)]:
                        turn = _turn(home, route.workers, policy, load, round_, found)
                        found = replace(found, turns=(*found.turns, turn))
                        write_kept(out / FILE, json.dumps(json.loads(to_json(found)), indent=0))
                        print(_words(turn), flush=True)
        finally:
            home.run("down")


def _capacity_per_s(home: Home) -> float:
    """Return what a closed loop completes, of twice the requests that both workers run at once."""
    asked, _ = requests(999, 100.0, CALIBRATION_S)
    with gateway(home, POLICIES[0]) as url:
        answers = asyncio.run(in_a_loop(url, asked, 4 * BATCH, CALIBRATION_S))
    return sum(one.is_whole for one in answers) / CALIBRATION_S


def _turn(
    home: Home, workers: Sequence[WorkerTarget], policy: str, load: float, round_: int, found: RoutingRun
) -> Turn:
    unload_all(workers)
    with gateway(home, policy) as url:
        answers = sent(url, 100 * round_ + round(10 * load), load * found.capacity_per_s, found.seconds)
        loads = counted(url, "iserve_gateway_variant_load_seconds_count")
        evictions = counted(url, "iserve_gateway_variant_evictions_total")
    ttft_s = tuple(one.first_s if one.is_whole else -1.0 for one in answers)
    return Turn(policy=policy, load=load, round=round_, loads=loads, evictions=evictions, ttft_s=ttft_s)


def _words(turn: Turn) -> str:
    times = [1e3 * one for one in turn.answered_s]
    without = len(turn.ttft_s) - len(times)
    return (
        f"{turn.policy} {turn.load:.0%} round {turn.round}: {turn.loads} loads, {turn.evictions} evictions, TTFT "
        f"{p(times, 50):.0f} and {p(times, 99):.0f} ms, {len(times)} answered, {without} without text"
    )


def table(found: RoutingRun) -> str:
    """Return medians over the rounds as a Markdown table, and the range of P99."""
    rows = [
        "| load | policy | requests | without text | loads | evictions | TTFT P50 | TTFT P99, by round |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for load in sorted({turn.load for turn in found.turns}):
        for policy in POLICIES:
            turns = [turn for turn in found.turns if (turn.load, turn.policy) == (load, policy)]
            asked = sum(len(turn.ttft_s) for turn in turns)
            late = [1e3 * p(turn.answered_s, 99) for turn in turns]
            half = statistics.median(1e3 * p(turn.answered_s, 50) for turn in turns)
            loads, evictions = (
                statistics.median(numbers)
                for numbers in ([turn.loads for turn in turns], [turn.evictions for turn in turns])
            )
            without = asked - sum(len(turn.answered_s) for turn in turns)
            rows.append(
                f"| {load:.0%} | {policy} | {asked:,} | {without} | {loads:g} | {evictions:g} | {half:.0f} ms | "
                f"{statistics.median(late):.0f} ms ({min(late):.0f} to {max(late):.0f}) |"
            )
    return "\n".join(rows)


def _client(url: str, seed: int, rate_per_s: float, seconds: float) -> None:
    asked, at_s = requests(seed, rate_per_s, seconds)
    sys.stdout.buffer.write(to_json(asyncio.run(at_times(url, asked, at_s))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure")
    run.add_argument("out", type=Path)
    run.add_argument("--rounds", type=int, default=4)
    run.add_argument("--seconds", type=float, default=30.0, help="of each turn")
    shown = commands.add_parser("table")
    shown.add_argument("kept", type=Path)
    client = commands.add_parser("client")
    client.add_argument("url")
    client.add_argument("seed", type=int)
    client.add_argument("rate_per_s", type=float)
    client.add_argument("seconds", type=float)
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.out, options.rounds, options.seconds)
    elif options.command == "table":
        print(table(from_json(read_kept(options.kept), RoutingRun, what="recording")))
    else:
        _client(options.url, options.seed, options.rate_per_s, options.seconds)


if __name__ == "__main__":
    main()
