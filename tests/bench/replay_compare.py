"""Capacity and accuracy of `iserve replay`: against known delays, and compared with guidellm.

    python -m tests.bench.replay_compare hold [--streams 500 1000 2000]
    python -m tests.bench.replay_compare compare --guidellm /path/to/its/python [--rounds 3] [--keep FILE]
    python -m tests.bench.replay_compare table FILE

`compare` sends the same load with both, in turn: first to a stand-in whose delays are set and which notes what it
did, then, through the gateway of an installation of its own, to the demo model on the embedded engine. `table`
prints what docs/decisions/0029 shows. All runs on one machine, and what that does to both sides is in the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from fingerprint.codec import from_json, to_json
from iserve.replay.endpoint import resolve_endpoint
from iserve.replay.runner import Replay, ReplayOptions
from iserve.replay.schedule import ScheduleOptions, make_schedule
from tests.bench.kept import read_kept, write_kept
from tests.bench.replay_clients import ClientRun, Load, Quantiles, guidellm, quantiles_of, replay
from tests.bench.replay_stand_in import Notes, endpoint, notes
from traces.request import Request
from traces.summary import summarize

KEPT = Path(__file__).parent / "results" / "replay_compare.json.gz"
TTFT_S, GAP_S = 0.08, 0.025
STAND_IN_LOAD = Load(requests_per_s=10, count=200, words=30, output_tokens=32)
DEMO_LOAD = Load(requests_per_s=2, count=120, words=30, output_tokens=32)
DEMO = "the demo model on the embedded engine, through the gateway"
HEAD_START_S = 15.0  # about what guidellm takes from its start to its first request
STREAM_GAP_S, STREAM_TOKENS, SENDING_S = 0.05, 300, 4


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return (
        f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before, "
        f"Python {platform.python_version()}"
    )


# What one process holds


def hold(streams: int) -> Iterator[tuple[str, float]]:
    """All begin within four seconds; each has 20 tokens a second for 15 s, so that all are open together."""
    trace = [Request(SENDING_S * i / streams, 64, STREAM_TOKENS) for i in range(streams)]
    with endpoint(STREAM_GAP_S, STREAM_GAP_S) as url:
        schedule = make_schedule(trace, ("m",), ScheduleOptions())
        run = Replay(schedule, resolve_endpoint(url), ReplayOptions(timeout_s=120, max_in_flight=streams))
        busy_s = time.process_time()
        outcomes = asyncio.run(run.run())
        busy_s = time.process_time() - busy_s
        noted = notes(url)
    found = summarize(outcomes)
    yield "completed", found.completed
    yield "failed", found.requests - found.completed
    for name, value in (("lateness", found.lateness), ("TTFT", found.ttft_from_send), ("ITL", found.itl)):
        if value is not None:
            yield f"{name} P50, ms", value.p50_s * 1e3
            yield f"{name} P99, ms", value.p99_s * 1e3
            yield f"{name} most, ms", value.max_s * 1e3
    gaps = quantiles_of(noted.gaps_s)
    yield "the server's gaps P50, ms", gaps.p50_s * 1e3
    yield "the server's gaps P99, ms", gaps.p99_s * 1e3
    yield "of one core", busy_s / run.elapsed_s
    yield "per token, µs", busy_s / max(int(outcomes.output_tokens.sum()), 1) * 1e6


# The same load from both


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Record of a run by the stand-in, by the names of ``ClientRun``.

    It does not know when a request was due: ``late`` is its arrival after a steady rate that begins with the
    promptest of all.
    """

    ttft: Quantiles
    tpot: Quantiles
    e2e_last_token: Quantiles
    late: Quantiles


@dataclass(frozen=True, kw_only=True)
class Run:
    said: ClientRun
    truth: Truth | None  # of an endpoint that notes it


@dataclass(frozen=True, kw_only=True)
class Compared:
    endpoint: str
    load: Load
    date: str
    machine: str
    runs: tuple[Run, ...]  # in their order


def truth_of(noted: Notes, load: Load) -> Truth:
    after_s = [at_s - i / load.requests_per_s for i, at_s in enumerate(sorted(noted.arrived_s))]
    answers = zip(noted.ttft_s, noted.e2e_s, strict=True)
    return Truth(
        ttft=quantiles_of(noted.ttft_s),
        tpot=quantiles_of([(e2e_s - ttft_s) / (load.output_tokens - 1) for ttft_s, e2e_s in answers]),
        e2e_last_token=quantiles_of(noted.e2e_s),
        late=quantiles_of([value - min(after_s) for value in after_s]),
    )


Client = Callable[[str, str, Load], ClientRun]


def compare_stand_in(clients: Sequence[Client], rounds: int) -> list[Compared]:
    before, runs, prompts = machine(), [], set()
    with endpoint(TTFT_S, GAP_S) as url:
        for client in list(clients) * rounds:
            said = client(url, "m", STAND_IN_LOAD)
            noted = notes(url)
            prompts.add(tuple(sorted(noted.prompts)))
            runs.append(_told(Run(said=said, truth=truth_of(noted, STAND_IN_LOAD))))
    if len(prompts) > 1:
        raise SystemExit("the clients have not sent the same prompts")
    name = f"the stand-in, TTFT {TTFT_S * 1e3:g} ms, {GAP_S * 1e3:g} ms between tokens"
    return [_compared(name, STAND_IN_LOAD, before, runs)]


def compare_demo(clients: Sequence[Client], rounds: int) -> list[Compared]:
    """In turn, and then both at once at half of the rate, so that they see the same minutes of the endpoint."""
    before = machine()
    half = replace(DEMO_LOAD, requests_per_s=DEMO_LOAD.requests_per_s / 2)
    with demo() as (url, model):
        replay(url, model, replace(DEMO_LOAD, count=9))  # pays what only the first requests do
        in_turn = [_told(Run(said=client(url, model, DEMO_LOAD), truth=None)) for client in list(clients) * rounds]
        together = [run for _ in range(rounds) for run in at_once(clients, url, model, half)]
    return [
        _compared(f"{DEMO}, in turn", DEMO_LOAD, before, in_turn),
        _compared(f"{DEMO}, both at once", half, before, together),
    ]


def at_once(clients: Sequence[Client], url: str, model: str, load: Load) -> list[Run]:
    """The last begins first: guidellm takes a while until it sends."""
    with ThreadPoolExecutor(len(clients)) as pool:
        begun = []
        for number, client in enumerate(reversed(clients)):
            time.sleep(HEAD_START_S if number else 0)
            begun.append(pool.submit(client, url, model, load))
        return [_told(Run(said=future.result(), truth=None)) for future in reversed(begun)]


def _told(run: Run) -> Run:
    said = run.said
    print(f"{said.client}: {said.completed} completed, TTFT P50 {said.ttft.p50_s * 1e3:.1f} ms", flush=True)
    return run


def _compared(name: str, load: Load, before: str, runs: Sequence[Run]) -> Compared:
    """Raises SystemExit: the server has not counted the same tokens for all that completed everything."""
    counted = {
        (run.said.prompt_tokens, run.said.output_tokens) for run in runs if run.said.completed == load.count
    }
    if len(counted) > 1:
        raise SystemExit(f"{name}: not the same load, prompt and output tokens were {sorted(counted)}")
    return Compared(endpoint=name, load=load, date=time.strftime("%Y-%m-%d"), machine=before, runs=tuple(runs))


@contextmanager
def demo() -> Iterator[tuple[str, str]]:
    """The demo model deployed in a home of its own: URL of the gateway, name."""
    from tests.iserve.conftest import Installation

    with tempfile.TemporaryDirectory() as folder:
        home = Installation(Path(folder) / "home", {"ISERVE_PROFILE_SECONDS": "60"})
        try:
            work = ("--batch", "8", "--input-tokens", "256", "--output-tokens", "64")
            yield home.json("deploy", "--name", "demo", *work)["base_url"], "demo"
        finally:
            home.clear()


# The table


LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "e2e": "E2E",
    "e2e_last_token": "E2E to the last token",
    "late": "sent late",
}
COUNTS = {
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tokens/s",
    "failed": "failed",
    "unsaid": "of which nothing is said",
}


def table(found: Compared) -> Iterator[str]:
    """Median over the rounds [least, most], milliseconds; the stand-in's notes are of the run to their right."""
    columns: list[tuple[str, list[Any]]] = []
    for client in dict.fromkeys(run.said.client for run in found.runs):
        runs = [run for run in found.runs if run.said.client == client]
        if runs[0].truth is not None:
            columns.append(("the server's notes", [run.truth for run in runs]))
        columns.append((client, [run.said for run in runs]))
    yield f"| ms | {' | '.join(head for head, _ in columns)} |"
    yield "|---" * (len(columns) + 1) + "|"
    for name, label in LATENCIES.items():
        for point in ("p50", "p90", "p99"):
            cells = [_cell(records, f"{name}.{point}_s", 1e3) for _, records in columns]
            yield f"| {label}, {point.upper()} | {' | '.join(cells)} |"
    for name, label in COUNTS.items():
        yield f"| {label} | {' | '.join(_cell(records, name, 1) for _, records in columns)} |"


def _cell(records: Sequence[Any], path: str, unit: float) -> str:
    """Empty where such a record has no such figure."""
    if not hasattr(records[0], path.partition(".")[0]):
        return ""
    values = [attrgetter(path)(record) * unit for record in records]
    middle, least, most = (f"{value:.4g}" for value in (statistics.median(values), min(values), max(values)))
    return middle if least == most else f"{middle} [{least}, {most}]"


def kept(path: Path) -> list[Compared]:
    return from_json(read_kept(path), list[Compared], what=str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    holding = commands.add_parser("hold")
    holding.add_argument("--streams", type=int, nargs="+", default=[500, 1000, 2000])
    comparing = commands.add_parser("compare")
    comparing.add_argument("--guidellm", type=Path, required=True, help="the Python of an environment that has it")
    comparing.add_argument("--rounds", type=int, default=3)
    comparing.add_argument("--endpoint", choices=["stand-in", "demo"], nargs="+", default=["stand-in", "demo"])
    comparing.add_argument("--keep", type=Path, help=f"write the results there, such as {KEPT.name}")
    showing = commands.add_parser("table")
    showing.add_argument("file", type=Path)
    options = parser.parse_args()
    if options.command == "hold":
        for streams in options.streams:
            print(f"{machine()}\n{streams} streams of {1 / STREAM_GAP_S:g} tokens/s", flush=True)
            for name, value in hold(streams):
                print(f"    {name:<28} {value:10.2f}")
    elif options.command == "compare":
        clients: list[Client] = [replay, lambda *load: guidellm(options.guidellm, *load)]
        found: list[Compared] = []
        for name, compare in (("stand-in", compare_stand_in), ("demo", compare_demo)):
            if name in options.endpoint:
                found += compare(clients, options.rounds)
        for one in found:
            show(one)
        if options.keep:
            write_kept(options.keep, to_json(found).decode())
    else:
        for one in kept(options.file):
            show(one)


def show(found: Compared) -> None:
    print(f"{found.endpoint}\n{found.load}; {found.date}, {found.machine}\n")
    print("\n".join(table(found)) + "\n", flush=True)


if __name__ == "__main__":
    main()
