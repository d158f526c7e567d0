"""Routing of variants over two workers: ``least-loaded`` against ``round-robin``, on a CPU or on two GPUs.

    python -m tests.bench.variant_routing_run measure OUT [--rounds N] [--seconds S]
    python -m tests.bench.variant_routing_run measure OUT --engine vllm --python VLLM_PYTHON --within SECONDS
    python -m tests.bench.variant_routing_run table OUT/FILE

``variant_routing_served`` has the workers and the two cases: the demo model on the embedded engine, and
Llama-3.1-8B's shape on vLLM. For each turn all adapters are unloaded, and a gateway process of its own, with one
policy, serves the same two workers by the deployment's route table. Requests are sent by ``CLIENTS`` further
processes: Poisson arrivals at a share of what a closed loop completed before the first turn, variants by Zipf's
law with exponent 1. Both policies get the same requests, one right after the other, the first of a round being
last in the next one. Loads are those that the gateway counts, from none loaded. The result is kept after each
turn; with ``--within`` no pair of turns begins that would not end in time.

``table`` has pairs of turns alone, and for vLLM also what the simulator of the cluster makes of the same requests
(``variant_stops``: steps and loads of other recordings, nothing fitted here).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import FrameType
from urllib.request import Request, urlopen

import numpy as np

from daemon.process import read_record
from fingerprint.codec import from_json, to_json
from iserve.route_table import WorkerTarget
from tests.bench.kept import read_kept, write_kept
from tests.bench.variant_clients import Answer, Asked, at_times, in_a_loop, p
from tests.bench.variant_routing_served import CASES, PATIENCE_S, RoutingCase, Served, on_torch, on_vllm

POLICIES = ("least-loaded", "round-robin")
CLIENTS = 2
LOADS = (0.3, 0.6)  # of the closed loop's rate
CALIBRATION_S = 15.0
WORK = Path(tempfile.gettempdir()) / "variant-routing"
OVERHEAD_S, END_S = 10.0, 10.0  # of a turn beyond its requests, as long as none was seen; of the end of all


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Turn of one policy."""

    policy: str
    load: float
    round: int
    loads: int
    evictions: int
    ttft_s: tuple[float, ...]  # of the requests in their order; -1: an answer without text, or none
    e2e_s: tuple[float, ...] = ()  # likewise; of the first recording none were kept
    loading_s: float = 0.0  # of all loads together

    @property
    def answered_s(self) -> list[float]:
        return [one for one in self.ttft_s if one >= 0]

    @property
    def whole_s(self) -> list[float]:
        return [one for one in self.e2e_s if one >= 0]

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.whole_s) if self.whole_s else math.nan


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
    engine: str = "torch"
    versions: str = ""
    start_s: tuple[float, ...] = ()

    @property
    def paired(self) -> tuple[Turn, ...]:
        """Return the turns of which each policy has one."""
        keys = [(turn.round, turn.load) for turn in self.turns]
        return tuple(turn for turn, key in zip(self.turns, keys, strict=True) if keys.count(key) == len(POLICIES))


def requests(case: RoutingCase, seed: int, rate_per_s: float, seconds: float) -> tuple[list[Asked], list[float]]:
    """Return Poisson arrivals for ``seconds``, and the requests of them."""
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, int(3 * rate_per_s * seconds) + 50))
    at_s = at_s[at_s < seconds]
    weights = 1.0 / np.arange(1, case.variants + 1)
    drawn = rng.choice(case.variants, len(at_s), p=weights / weights.sum())
    prompts = rng.integers(*case.token_ids, (len(at_s), case.input_tokens))
    asked = [
        Asked(model=f"v{one}", prompt=tuple(prompt), tokens=case.output_tokens)
        for one, prompt in zip(drawn.tolist(), prompts.tolist(), strict=True)
    ]
    return asked, at_s.tolist()


def client_seeds(load: float, round_: int) -> list[int]:
    """Return the seed of each client's requests in a turn."""
    return [CLIENTS * (100 * round_ + round(10 * load)) + number for number in range(CLIENTS)]


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
def gateway(home: Path, policy: str) -> Iterator[str]:
    """Yield the URL of a gateway process with this policy, before the deployment's workers."""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder)
        (own / "run").mkdir()
        (own / "variants").symlink_to(home / "variants")
        (own / "run" / "routes.json").symlink_to(home / "run" / "routes.json")
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
            process.kill()  # asked to end, it would wait for streams that a stop has left
            process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urlopen(f"{url}/readyz", timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def counted(url: str, series: str) -> float:
    """Return the sum over variants of a series of the gateway."""
    with urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{series}{{"))


def sent(url: str, engine: str, seeds: Sequence[int], rate_per_s: float, seconds: float) -> list[Answer]:
    """Have each client process send its part of the rate; return all answers, by client."""
    words = [sys.executable, "-m", "tests.bench.variant_routing_run", "client", url, engine]
    found: list[Answer] = []
    with ExitStack() as stack:
        clients = []
        for seed in seeds:
            own = [str(seed), str(rate_per_s / CLIENTS), str(seconds)]
            clients.append(subprocess.Popen([*words, *own], stdout=subprocess.PIPE))
            stack.callback(clients[-1].kill)
        for client in clients:
            answers, _ = client.communicate(timeout=PATIENCE_S)
            found += from_json(answers, list[Answer], what="the answers of a client")
    return found


def measure(out: Path, engine: str, served: Served, rounds: int, seconds: float, ends_s: float = math.inf) -> None:
    """Measure the closed loop's rate and turns of both policies, until all are done or ``ends_s`` is near.

    Args:
        ends_s: on the monotonic clock.
    """
    out.mkdir(parents=True, exist_ok=True)
    case, route = CASES[engine], served.route
    found = RoutingRun(
        machine=served.machine,
        date=time.strftime("%Y-%m-%d"),
        slots=route.adapter_slots,
        loaded=route.loaded_adapters,
        capacity_per_s=_capacity_per_s(served.home, case),
        seconds=seconds,
        engine=engine,
        versions=served.versions,
        start_s=served.start_s,
    )
    _print(f"{found.slots} slots, {found.loaded} loaded, {found.capacity_per_s:.2f} requests/s")
    turns_s: list[float] = []
    for round_, load in product(range(rounds), LOADS):
        if not fits(ends_s - time.monotonic(), turns_s, seconds):
            _print(f"no time for a pair of turns in {ends_s - time.monotonic():.0f} s")
            return
        for policy in POLICIES[:: 1 - 2 * (round_ % 2)]:
            began_s = time.monotonic()
            turn = _turn(served, policy, load, round_, found)
            turns_s.append(time.monotonic() - began_s)
            found = replace(found, turns=(*found.turns, turn))
            write_kept(out / case.file, json.dumps(json.loads(to_json(found)), indent=0))
            _print(f"{_words(turn)}, {turns_s[-1]:.0f} s")


def fits(rest_s: float, turns_s: Sequence[float], seconds: float) -> bool:
    """Return whether a turn of each policy fits into ``rest_s``, each as long as the longest so far.

    Args:
        seconds: for which requests of a turn arrive.
    """
    return rest_s >= len(POLICIES) * max(turns_s, default=seconds + OVERHEAD_S) + END_S


def _print(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, flush=True)


def _capacity_per_s(home: Path, case: RoutingCase) -> float:
    """Return what a closed loop completes."""
    with gateway(home, POLICIES[0]) as url:
        if case.warm_up_s:
            asyncio.run(in_a_loop(url, requests(case, 998, 100.0, case.warm_up_s)[0], case.batch, case.warm_up_s))
        asked, _ = requests(case, 999, 100.0, CALIBRATION_S)
        answers = asyncio.run(in_a_loop(url, asked, case.loop_clients, CALIBRATION_S))
    if not any(one.is_whole and one.tokens for one in answers):
        errors = sorted({one.error for one in answers if one.error})
        raise SystemExit(f"none of {len(answers)} answers was whole and had text: {errors[:3]}")
    return sum(one.is_whole for one in answers) / CALIBRATION_S


def _turn(served: Served, policy: str, load: float, round_: int, found: RoutingRun) -> Turn:
    unload_all(served.route.workers)
    with gateway(served.home, policy) as url:
        rate_per_s = load * found.capacity_per_s
        answers = sent(url, found.engine, client_seeds(load, round_), rate_per_s, found.seconds)
        series = "iserve_gateway_variant"
        loads, loading_s, evictions = (
            counted(url, f"{series}_{name}")
            for name in ("load_seconds_count", "load_seconds_sum", "evictions_total")
        )
    if errors := sorted({one.error for one in answers if one.error}):
        _print(f"errors: {errors[:3]}")
    return Turn(
        policy=policy,
        load=load,
        round=round_,
        loads=round(loads),
        evictions=round(evictions),
        ttft_s=tuple(one.first_s if one.is_whole else -1.0 for one in answers),
        e2e_s=tuple(one.last_s if one.is_whole else -1.0 for one in answers),
        loading_s=round(loading_s, 3),
    )


def _words(turn: Turn) -> str:
    times = [1e3 * one for one in turn.answered_s]
    without = len(turn.ttft_s) - len(times)
    return (
        f"{turn.policy} {turn.load:.0%} round {turn.round}: {turn.loads} loads, {turn.evictions} evictions, TTFT "
        f"{p(times, 50):.0f} and {p(times, 99):.0f} ms, {len(times)} answered, {without} without text"
    )


def table(found: RoutingRun) -> str:
    """Return medians over the rounds as a Markdown table, and the range of P99."""
    has_ends = any(turn.e2e_s for turn in found.turns)
    rows = [
        "| load | policy | requests | without text | loads | evictions | TTFT P50 | TTFT P99, by round |"
        + (" E2E mean | E2E P95 | a load |" if has_ends else ""),
        "|---|---|--:|--:|--:|--:|--:|--:|" + ("--:|--:|--:|" if has_ends else ""),
    ]
    for load, policy, turns in _cells(found):
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
            + (_ends(turns) if has_ends else "")
        )
    return "\n".join(rows)


def _cells(found: RoutingRun) -> Iterator[tuple[float, str, list[Turn]]]:
    """Yield load, policy and their turns, of pairs alone."""
    for load, policy in product(sorted({turn.load for turn in found.paired}), POLICIES):
        yield load, policy, [turn for turn in found.paired if (turn.load, turn.policy) == (load, policy)]


def _ends(turns: Sequence[Turn]) -> str:
    """Return the cells of E2E latency and of a load's time."""
    mean_s = statistics.median(turn.mean_s for turn in turns)
    p95_s = statistics.median(p(turn.whole_s, 95) for turn in turns)
    load_s = sum(turn.loading_s for turn in turns) / max(1, sum(turn.loads for turn in turns))
    return f" {1e3 * mean_s:.0f} ms | {1e3 * p95_s:.0f} ms | {1e3 * load_s:.0f} ms |"


def simulated(found: RoutingRun, turn: Turn) -> Turn:
    """Return the turn as the simulator of the cluster has it, with the same requests.

    Steps, adapters' part of them and loads are those of ``variant_stops``, which knows vLLM's alone. It loads
    nothing ahead, as the gateway does for idle workers.
    """
    from tests.bench import variant_stops  # on the GPU machine nothing is simulated
    from tests.traces.simulator.variant_worlds import variants_of
    from traces.request import Request as Simulated

    case, rate_per_s = CASES[found.engine], turn.load * found.capacity_per_s / CLIENTS
    arrivals = sorted(
        (at_s, asked.model)
        for seed in client_seeds(turn.load, turn.round)
        for asked, at_s in zip(*requests(case, seed, rate_per_s, found.seconds), strict=True)
    )
    if len(arrivals) != len(turn.ttft_s):
        raise SystemExit(f"{len(turn.ttft_s)} requests were recorded, and {len(arrivals)} are drawn now")
    result = variant_stops.Case(variant_stops.LOAD_S, len(arrivals)).served(
        [Simulated(at_s, case.input_tokens, case.output_tokens, model=model) for at_s, model in arrivals],
        turn.policy,
        outstanding_per_slot=2,
    )
    figures, outcomes = variants_of(result), result.outcomes
    return replace(
        turn,
        loads=figures.loads,
        evictions=figures.evictions,
        ttft_s=tuple(outcomes.ttft_s.tolist()),
        e2e_s=tuple(outcomes.e2e_s.tolist()),
    )


def simulated_table(found: RoutingRun) -> str:
    """Return what was measured next to what is simulated, medians over the rounds, as a Markdown table."""
    head = ("loads", "TTFT P50", "TTFT P99", "E2E mean")
    rows = ["| load | policy |" + "".join(f" {one} | simulated |" for one in head), "|---|---|" + "--:|--:|" * 4]
    of_turn = (
        lambda turn: turn.loads,
        lambda turn: 1e3 * p(turn.answered_s, 50),
        lambda turn: 1e3 * p(turn.answered_s, 99),
        lambda turn: 1e3 * turn.mean_s,
    )
    for load, policy, turns in _cells(found):
        replayed = [simulated(found, turn) for turn in turns]
        cells = []
        for number, value in enumerate(of_turn):
            true, said = (statistics.median(value(turn) for turn in some) for some in (turns, replayed))
            unit, off = (" ms" if number else ""), (f"{said / true - 1:+.0%}" if true else "-")
            cells.append(f"{true:.{0 if number else 1}f}{unit} | {said:.{0 if number else 1}f}{unit} ({off})")
        rows.append(f"| {load:.0%} | {policy} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _client(url: str, engine: str, seed: int, rate_per_s: float, seconds: float) -> None:
    asked, at_s = requests(CASES[engine], seed, rate_per_s, seconds)
    sys.stdout.buffer.write(to_json(asyncio.run(at_times(url, asked, at_s))))


def _stop(signal_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(f"stopped by {signal.Signals(signal_number).name}; what was measured is kept")


def _measure(options: argparse.Namespace) -> None:
    """Start the workers and measure; end all of it in time, and on SIGTERM."""
    ends_s, case = time.monotonic() + options.within, CASES[options.engine]
    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, _stop)
    if options.within < math.inf:
        signal.setitimer(signal.ITIMER_REAL, max(1.0, options.within - END_S))
    rounds, seconds = options.rounds or case.rounds, options.seconds or case.turn_s
    with ExitStack() as stack:
        if options.engine == "vllm":
            served = stack.enter_context(on_vllm(options.work, options.python, options.gpus))
        else:
            served = stack.enter_context(on_torch(Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        measure(options.out, options.engine, served, rounds, seconds, ends_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("measure")
    run.add_argument("out", type=Path)
    run.add_argument("--engine", choices=tuple(CASES), default="torch")
    run.add_argument("--rounds", type=int)
    run.add_argument("--seconds", type=float, help="of each turn")
    run.add_argument("--within", type=float, default=math.inf, help="seconds for all, the start included")
    run.add_argument("--python", default=sys.executable, help="vLLM's")
    run.add_argument("--work", type=Path, default=WORK, help="folder of vLLM's files and logs")
    run.add_argument("--gpus", type=int, nargs="+", default=[0, 1], help="indexes; one worker on each")
    shown = commands.add_parser("table")
    shown.add_argument("kept", type=Path)
    client = commands.add_parser("client")
    client.add_argument("url")
    client.add_argument("engine", choices=tuple(CASES))
    client.add_argument("seed", type=int)
    client.add_argument("rate_per_s", type=float)
    client.add_argument("seconds", type=float)
    options = parser.parse_args()
    if options.command == "measure":
        _measure(options)
    elif options.command == "table":
        found = from_json(read_kept(options.kept), RoutingRun, what="recording")
        print(table(found))
        if found.engine == "vllm":
            print(f"\n{simulated_table(found)}")
    else:
        _client(options.url, options.engine, options.seed, options.rate_per_s, options.seconds)


if __name__ == "__main__":
    main()
