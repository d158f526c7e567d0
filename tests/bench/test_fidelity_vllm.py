"""The bench of the served steady state, whole, against the stand-in for vLLM; its laws, prefixes and judgment."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from tests.bench import fidelity_vllm
from tests.bench.engine_contest_run import FIRST_PORT
from tests.bench.fidelity import Target, read_profile, replayed
from tests.bench.fidelity_compare import Sent, token_gaps_s
from tests.bench.fidelity_prefixes import cached_share, share_of_counters, with_shared_prefixes
from tests.bench.fidelity_served import Turn, order, read_played
from tests.bench.fidelity_table import Figure, figures, table
from tests.daemon.engines.standin import make_vllm
from tests.iserve.replay.stand_in import stand_in
from tests.traces.outcome_makers import outcomes
from traces.request import Request
from traces.simulator.step_model import Limits
from traces.trace_argument import requests_of

RECORD = Path(__file__).parent / "results/h200-vllm-0.33/Llama-3.1-8B-16bit-tp1-pp1.json.xz"
GPU = 57  # its server's port is no other test's
TRACE_ROWS = 160


class Bench:
    """The bench's command in a folder of its own, with a stand-in for vLLM that takes ``token_s`` a token."""

    def __init__(self, folder: Path, token_s: float) -> None:
        self.folder, self.out, self.lines = folder, folder / "out", list[str]()
        self.python = make_vllm(folder / "env", "0.33.0")
        self.takes(token_s=token_s)
        rows = [f"{0.1 * row},{600 + 10 * (row % 60)},{4 + row % 9}" for row in range(TRACE_ROWS)]
        (folder / "trace.csv").write_text("\n".join(["arrival_s,input_tokens,output_tokens", *rows]))

    def takes(self, token_s: float) -> None:
        """Set the seconds that the stand-in takes for a token, from its next start on."""
        model = self.folder / "work" / "Llama-3.1-8B"
        model.mkdir(parents=True, exist_ok=True)
        model.joinpath("behaviour.json").write_text(json.dumps({"token_s": token_s, "total_bytes": 141 * 2**30}))

    def run(self, *more: object, heard: Callable[[str], None] = lambda line: None) -> None:
        words = ["--record", RECORD, "--model", "meta-llama/Llama-3.1-8B", "--python", self.python, "--gpu", GPU]
        words += ["--trace", self.folder / "trace.csv", "--work", self.folder / "work", "--batch", 2]
        words += ["--input-tokens", 1300, "--output-tokens", 12, "--loads", 0.4, 0.9, "--minutes", 0.01, *more]
        options = fidelity_vllm.parser().parse_args([str(self.out), *map(str, words)])
        options.out.mkdir(exist_ok=True)

        def tell(line: str) -> None:
            self.lines.append(line)
            heard(line)

        fidelity_vllm.Bench(options, read_profile(RECORD), tell).run()

    def files(self) -> list[str]:
        return sorted(path.name.removeprefix("Llama-3.1-8B.prefix-") for path in self.out.iterdir())


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.chdir(tmp_path)  # the stand-in notes its processes there
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "")  # which the bench sets
    return Bench(tmp_path, token_s=0.003)


@pytest.mark.process
def test_every_load_is_played_and_simulated_and_judged(bench: Bench) -> None:
    bench.run("--prefix-cache", "--repeats", 2)
    assert bench.files() == [
        "on.json", "on.load-0.4.1.json.xz", "on.load-0.4.2.json.xz", "on.load-0.9.1.json.xz",
        "on.load-0.9.2.json.xz",
    ]  # fmt: skip
    ((launch, played),) = read_played(bench.out)
    assert launch.versions.startswith("vllm 0.33.0")
    assert launch.capacity_requests_per_s > 0 < launch.simulated_capacity_requests_per_s
    for one in played:
        assert not one.failures
        assert one.found.completed == one.found.requests == len(one.requests.sent_s)
        assert [metric.name for metric in one.found.predictions[0].metrics] == ["TTFT", "ITL", "TPOT", "E2E"]
        assert one.requests.prefix_blocks
        assert one.simulated_cached_share == pytest.approx(cached_share(one.requests))
        assert one.cached_share is None  # the stand-in keeps no prefixes and has no such counters
        itl = one.found.predictions[0].metric("ITL")
        assert itl.real_s[2] > 0.003
    first, again = played[0].requests, played[1].requests
    assert (first.input_tokens, first.prefix_blocks) == (again.input_tokens, again.prefix_blocks)
    text = table(bench.out)
    assert "| 0.4 | 2 | ITL |" in text
    assert "9 judged" in text  # three metrics at three percentiles of 0.4 alone
    assert text.count("reported |") == 5  # TPOT at 0.4, all at 0.9
    started = len(Path("processes").read_text().splitlines())
    bench.run("--prefix-cache", "--repeats", 2)
    assert bench.lines[-1].startswith("all 4")
    assert len(Path("processes").read_text().splitlines()) == started
    with pytest.raises(ConfigError, match="ask for"):
        bench.run("--prefix-cache", "--shared-prefix", 0.25)


@pytest.mark.process
def test_repeats_are_left_out_where_there_is_no_time(bench: Bench) -> None:
    bench.run("--repeats", 3, "--seconds", 0.1, "--capacity", "simulator")
    assert bench.files() == ["off.json", "off.load-0.4.1.json.xz", "off.load-0.9.1.json.xz"]
    _, _, left_out = bench.lines[-1].partition(": ")
    assert left_out.split(", ") == [f"load {load} repeat {repeat}" for load in (0.4, 0.9) for repeat in (2, 3)]
    ((launch, played),) = read_played(bench.out)
    assert launch.capacity_requests_per_s == launch.simulated_capacity_requests_per_s
    assert not any(one.requests.prefix_blocks for one in played)


def kill_while_it_answers(over: threading.Event) -> None:
    """Kill the stand-in's server once it has a request under way."""
    running = b"vllm:num_requests_running"
    while not over.is_set():
        with suppress(OSError):
            text = urllib.request.urlopen(f"http://127.0.0.1:{FIRST_PORT + GPU}/metrics", timeout=5).read()
            (line,) = (line for line in text.splitlines() if line.startswith(running))
            if float(line.split()[-1]):
                os.kill(int(Path("processes").read_text().split()[0]), signal.SIGKILL)
                return
        time.sleep(0.001)


@pytest.mark.process
def test_a_server_that_dies_ends_the_bench_which_goes_on_later(
    bench: Bench, request: pytest.FixtureRequest
) -> None:
    bench.takes(token_s=0.01)
    over = threading.Event()
    request.addfinalizer(over.set)
    killer = threading.Thread(target=kill_while_it_answers, args=(over,), daemon=True)

    def heard(line: str) -> None:
        if line.startswith("plays") and line.endswith("load 0.9, repeat 1"):
            killer.start()

    with pytest.raises(SystemExit, match=r"load 0\.9, repeat 1"):
        bench.run("--repeats", 1, heard=heard)
    killer.join()
    assert bench.files() == ["off.json", "off.load-0.4.1.json.xz"]
    before = (bench.out / "Llama-3.1-8B.prefix-off.load-0.4.1.json.xz").read_bytes()
    bench.run("--repeats", 1)
    assert bench.files() == ["off.json", "off.load-0.4.1.json.xz", "off.load-0.9.1.json.xz"]
    assert (bench.out / "Llama-3.1-8B.prefix-off.load-0.4.1.json.xz").read_bytes() == before


# Inter-token latency


def test_gaps_of_a_replay_add_up_and_a_single_token_has_none() -> None:
    with stand_in() as server:
        asked = [Request(0.01 * row, 8, 1 + row % 4) for row in range(12)]
        real = replayed(_target(server.url), asked)
    gaps_s = token_gaps_s(real)
    assert len(gaps_s) == sum(one.output_tokens - 1 for one in asked)
    assert gaps_s.sum() == pytest.approx((real.e2e_from_send_s - real.ttft_from_send_s).sum(), abs=1e-5)
    single = real.select(real.output_tokens == 1)
    assert len(single) == 3
    assert len(token_gaps_s(single)) == 0


def test_tokens_that_arrive_together_have_a_gap_of_zero() -> None:
    found = outcomes(ttft_s=[1.0, 1.0], e2e_s=[2.0, 1.5], gaps=[[1.0], [0.25, 0.25]], output_tokens=[4, 3])
    assert sorted(token_gaps_s(found).tolist()) == [0.0, 0.0, 0.25, 0.25, 1.0]


# Prefixes


def test_prompts_share_what_was_asked() -> None:
    trace = list(islice(requests_of("synthetic:azure-conv"), 2000))
    found = with_shared_prefixes(trace, 0.5)
    assert [replace(one, prefix_blocks=()) for one in found] == trace
    assert all(512 * len(one.prefix_blocks) < one.input_tokens for one in found)
    blocks = 512 * sum(len(one.prefix_blocks) for one in found) / sum(one.input_tokens for one in found)
    assert 0.3 < blocks <= 0.5  # prompts under 513 tokens have none
    sent = Sent(
        sent_s=tuple(one.arrival_s for one in found),
        input_tokens=tuple(one.input_tokens for one in found),
        output_tokens=tuple(one.output_tokens for one in found),
        prefix_blocks=tuple(one.prefix_blocks for one in found),
    )
    assert cached_share(sent) == pytest.approx(blocks, abs=0.02)  # all but the first of each block
    assert sent.requests() == [replace(one, model="") for one in found]


def test_prefixes_of_a_trace_stay() -> None:
    trace = [Request(0.0, 1200, 4, prefix_blocks=(7, 8)), Request(1.0, 900, 4)]
    assert with_shared_prefixes(trace, 0.5) == trace


def test_hits_are_read_of_the_servers_counters() -> None:
    text = (
        "# TYPE vllm:prefix_cache_queries counter\n"
        'vllm:prefix_cache_queries_total{{engine="0",model_name="m"}} {}\n'
        'vllm:prefix_cache_queries_created{{engine="0",model_name="m"}} 1.7e+09\n'
        'vllm:prefix_cache_hits_total{{engine="0",model_name="m"}} {}\n'
    )
    assert share_of_counters(text.format(100.0, 10.0), text.format(1100.0, 410.0)) == 0.4
    assert share_of_counters("", "") is None


# Judgment


def test_what_is_played_last_is_dropped_first() -> None:
    turns = order([0.9, 0.4, 0.7], 3)
    assert [(turn.load, turn.repeat) for turn in turns] == [
        (0.4, 1), (0.7, 1), (0.9, 1), (0.4, 2), (0.7, 2), (0.4, 3), (0.7, 3), (0.9, 2), (0.9, 3),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("percent", "error", "spread", "within"),
    [
        (50, 0.079, None, True), (50, -0.081, None, False), (90, 0.099, 0.01, True), (90, 0.101, 0.01, False),
        (99, -0.149, None, True), (99, 0.151, None, False), (50, 0.19, 0.1, True), (50, 0.21, 0.1, False),
    ],
)  # fmt: skip
def test_an_error_is_within_its_goal_or_twice_the_spread(
    percent: int, error: float, spread: float | None, within: bool
) -> None:
    figure = Figure(
        metric="TTFT", percent=percent, measured_s=0.1, simulated_s=0.1 * (1 + error), spread=spread, judged=True
    )
    assert figure.within is within


@pytest.mark.process
def test_the_spread_is_of_the_replays_of_one_load(bench: Bench) -> None:
    bench.run("--repeats", 3)
    ((_, played),) = read_played(bench.out)
    replays = [one for one in played if one.turn.load == 0.4]
    assert [one.turn for one in replays] == [Turn(load=0.4, repeat=repeat) for repeat in (1, 2, 3)]
    found = next(one for one in figures(replays) if (one.metric, one.percent) == ("E2E", 90))
    real_s = np.array([one.found.predictions[0].metric("E2E").real_s[1] for one in replays])
    assert found.judged
    assert found.measured_s == np.median(real_s)
    assert found.spread == pytest.approx((real_s.max() - real_s.min()) / np.median(real_s))
    failed = replace(replays[0], failures=(("timeout", 1),))
    assert not any(one.judged for one in figures([failed, *replays[1:]]))


def _target(url: str) -> Target:
    return Target(
        url=url,
        model="fine",
        config=DeploymentConfig(engine="vllm"),
        workload=Workload(8, 512, 128),
        limits=Limits(max_batch=8, max_context_tokens=640, max_batched_tokens=2048),
    )
