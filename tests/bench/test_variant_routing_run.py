"""The bench of routing over real workers: its requests, its words, and its recording."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest

from daemon.variants.store import VariantStore
from fingerprint.codec import from_json
from fingerprint.estimators.adapter_slots import requests_within
from fingerprint.lora.adapter import read_adapter
from iserve.route_table import RouteTable
from tests.bench import engine_contest_run, variant_stops
from tests.bench import variant_routing_run as run
from tests.bench import variant_routing_served as workers
from tests.bench.kept import read_kept
from tests.bench.variant_routing_run import (
    CLIENTS,
    END_S,
    LOADS,
    OVERHEAD_S,
    POLICIES,
    RoutingRun,
    Turn,
    client_seeds,
    fits,
    measure,
    requests,
    simulated,
    simulated_table,
    table,
)
from tests.bench.variant_routing_served import CASES, NAME, RoutingCase, Served, on_vllm, replica, route_table
from tests.golden_words import Golden

RESULTS = Path(__file__).parent / "results"
CPU, VLLM = CASES["torch"], CASES["vllm"]
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 2, "vocab_size": 64}
PAGE = Path(__file__).parents[2] / "docs" / "adapters-measured.md"


def recording() -> RoutingRun:
    return from_json(read_kept(RESULTS / CPU.file), RoutingRun, what="recording")


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_requests_are_poisson_arrivals_of_variants_by_zipfs_law(case: RoutingCase) -> None:
    asked, at_s = requests(case, 3, 50.0, 200.0)
    assert len(asked) == len(at_s) == pytest.approx(10_000, rel=0.05)
    assert list(at_s) == sorted(at_s)
    assert 0 < at_s[0] < at_s[-1] < 200.0
    gaps = [later - sooner for sooner, later in pairwise(at_s)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.1)
    counts = Counter(one.model for one in asked)
    total = sum(1 / rank for rank in range(1, case.variants + 1))
    for rank in (1, 2, 5):
        assert counts[f"v{rank - 1}"] / len(asked) == pytest.approx(1 / rank / total, rel=0.15)
    assert {(len(one.prompt), one.tokens) for one in asked} == {(case.input_tokens, case.output_tokens)}


def test_the_same_seed_is_the_same_requests() -> None:
    assert requests(CPU, 3, 5.0, 20.0) == requests(CPU, 3, 5.0, 20.0)
    assert requests(CPU, 3, 5.0, 20.0) != requests(CPU, 4, 5.0, 20.0)


def test_no_two_turns_of_a_policy_have_the_same_requests() -> None:
    seeds = [seed for round_ in range(4) for load in LOADS for seed in client_seeds(load, round_)]
    assert len(set(seeds)) == len(seeds) == 4 * len(LOADS) * CLIENTS


def test_a_table_has_medians_over_the_rounds_and_counts_what_has_no_text(golden: Golden) -> None:
    turns = tuple(
        Turn(policy=policy, load=0.3, round=round_, loads=loads, evictions=1, ttft_s=(0.01, 0.02, -1.0))
        for policy, numbers in zip(POLICIES, ((3, 5, 9), (10, 20, 30)), strict=True)
        for round_, loads in enumerate(numbers)
    )
    found = RoutingRun(machine="m", date="d", slots=4, loaded=16, capacity_per_s=1.0, seconds=1.0, turns=turns)
    golden("reports", table(found))


def vllm_run(*turns: Turn) -> RoutingRun:
    return RoutingRun(
        machine="m", date="d", slots=8, loaded=32, capacity_per_s=20.0, seconds=5.0, turns=turns, engine="vllm"
    )


def turn(policy: str, round_: int, num_requests: int, load: float = 0.3) -> Turn:
    times = tuple(0.1 * (number + 1) for number in range(num_requests))
    return Turn(
        policy=policy,
        load=load,
        round=round_,
        loads=10 + round_,
        evictions=round_,
        ttft_s=times,
        e2e_s=tuple(10 * one for one in times),
        loading_s=1.2,
    )


def test_a_table_has_ends_and_loads_where_they_were_kept_and_pairs_alone(golden: Golden) -> None:
    whole = [turn(policy, round_, 3) for round_ in range(2) for policy in POLICIES]
    cut_off = turn(POLICIES[1], 2, 200)
    assert table(vllm_run(*whole, cut_off)) == table(vllm_run(*whole))
    golden("reports", table(vllm_run(*whole)))
    failed = [replace(one, ttft_s=(-1.0,) * 3, e2e_s=(-1.0,) * 3) for one in whole]
    assert table(vllm_run(*failed)).count("| 6 | 6 |") == 2


def drawn(load: float, round_: int) -> list[str]:
    """Return the models of a turn's requests in ``vllm_run``."""
    rate_per_s = load * vllm_run().capacity_per_s / CLIENTS
    parts = [requests(VLLM, seed, rate_per_s, vllm_run().seconds)[0] for seed in client_seeds(load, round_)]
    return [asked.model for part in parts for asked in part]


def test_the_simulator_has_the_same_requests_and_the_workers_that_are_started() -> None:
    models = drawn(0.6, 1)
    found = [simulated(vllm_run(), turn(policy, 1, len(models), 0.6)) for policy in POLICIES]
    for one in found:
        assert len(one.whole_s) == len(one.answered_s) == len(models)
        assert len(set(models)) <= one.loads <= len(models)
        assert all(0 < first_s < last_s for first_s, last_s in zip(one.ttft_s, one.e2e_s, strict=True))
    assert found[0].loads < found[1].loads
    with pytest.raises(SystemExit):
        simulated(vllm_run(), turn(POLICIES[0], 1, len(models) + 1, 0.6))
    limits = replica(VLLM, 0, 2**37).limits
    config = replica(VLLM, 0, 2**37).config
    assert (config.adapter_slots, config.loaded_adapters) == (variant_stops.SLOTS, 4 * variant_stops.SLOTS)
    assert limits.max_batch == variant_stops.STEPS.limits.max_batch
    assert limits.max_batched_tokens == variant_stops.STEPS.limits.max_batched_tokens
    assert VLLM.input_tokens == variant_stops.INPUT


def test_the_closed_loop_has_twice_the_requests_that_both_workers_run_at_once() -> None:
    weights = [1 / rank for rank in range(1, VLLM.variants + 1)]
    shares = [one / sum(weights) for one in weights]
    slots = replica(VLLM, 0, 2**37).config.adapter_slots
    at_once = requests_within(lambda count: sum(1 - math.exp(-count * share) for share in shares), slots)
    assert at_once is not None
    assert at_once < VLLM.batch
    assert VLLM.loop_clients == round(4 * at_once)
    assert CPU.loop_clients == 4 * CPU.batch


def test_what_was_measured_is_compared_with_what_is_simulated() -> None:
    turns = [turn(policy, 0, len(drawn(0.3, 0))) for policy in POLICIES]
    as_simulated = [simulated(vllm_run(), one) for one in turns]
    rows = simulated_table(vllm_run(*as_simulated)).splitlines()[2:]
    assert [row.count("(+0%)") for row in rows] == [4, 4]
    twice = [replace(one, loads=2 * one.loads) for one in as_simulated]
    rows = simulated_table(vllm_run(*twice)).splitlines()[2:]
    assert [(row.count("(+0%)"), row.count("(-50%)")) for row in rows] == [(3, 1), (3, 1)]


def test_a_pair_of_turns_begins_where_both_end_in_time() -> None:
    assert fits(2 * (30 + OVERHEAD_S) + END_S, [], 30.0)
    assert not fits(2 * (30 + OVERHEAD_S) + END_S - 0.1, [], 30.0)
    assert fits(2 * 35 + END_S, [33.0, 35.0, 34.0], 30.0)
    assert not fits(2 * 35 + END_S - 0.1, [33.0, 35.0, 34.0], 30.0)
    assert fits(math.inf, [], 30.0)


class Clock:
    """Clock that turns alone move."""

    def __init__(self, patch: pytest.MonkeyPatch, turn_s: float, stops_at: int | None = None) -> None:
        self.now_s, self.turn_s, self.stops_at, self.played = 0.0, turn_s, stops_at, list[tuple[object, ...]]()
        patch.setattr(run.time, "monotonic", lambda: self.now_s)
        patch.setattr(run, "_capacity_per_s", lambda home, case: 20.0)
        patch.setattr(run, "_turn", self.play)

    def play(self, served: Served, policy: str, load: float, round_: int, found: RoutingRun) -> Turn:
        if len(self.played) == self.stops_at:
            raise SystemExit("stopped")
        self.played.append((round_, load, policy))
        self.now_s += self.turn_s
        return turn(policy, round_, 3, load)


def served(home: Path) -> Served:
    return Served(home=home, route=route_table(VLLM, ["http://a", "http://b"], []).routes[0], machine="m")


ORDER = [
    *((0, load, policy) for load in LOADS for policy in POLICIES),
    *((1, load, policy) for load in LOADS for policy in POLICIES[::-1]),
]


@pytest.mark.parametrize(("ends_s", "pairs"), [(math.inf, 4), (331.0, 4), (329.0, 3), (170.0, 2), (80.0, 0)])
def test_only_whole_pairs_are_played_before_the_end(
    ends_s: float, pairs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, turn_s=40.0)
    measure(tmp_path, "vllm", served(tmp_path), 2, 30.0, ends_s)
    assert clock.played == ORDER[: 2 * pairs]
    assert clock.now_s <= ends_s - END_S


def test_a_stop_in_the_middle_leaves_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, turn_s=40.0, stops_at=3)
    with pytest.raises(SystemExit):
        measure(tmp_path, "vllm", served(tmp_path), 2, 30.0)
    found = from_json(read_kept(tmp_path / VLLM.file), RoutingRun, what="recording")
    assert [(one.round, one.load, one.policy) for one in found.turns] == ORDER[:3]
    assert found.paired == found.turns[:2]
    assert (found.engine, found.slots, found.loaded) == ("vllm", 8, 32)


class Started:
    """Process of vLLM that was started, by its words alone."""

    all: ClassVar[list[Started]] = []

    def __init__(self, words: list[str], *, env: dict[str, str], **_: object) -> None:
        self.words, self.env = words, env
        self.all.append(self)


def test_both_workers_are_started_as_the_daemon_starts_them_before_any_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, waited = list[workers.Worker](), list[tuple[int, int]]()
    monkeypatch.setattr(Started, "all", [])
    monkeypatch.setattr(engine_contest_run.subprocess, "Popen", Started)
    monkeypatch.setattr(workers.Worker, "end", lambda worker: ended.append(worker))
    monkeypatch.setattr(workers, "LLAMA_8B", {**workers.LLAMA_8B, **TINY})
    monkeypatch.setattr(workers, "_nvidia", lambda query: ["143771"] * 2)
    monkeypatch.setattr(workers, "_version", lambda python: "0.33.0")
    monkeypatch.setattr(workers, "_wait_for", lambda some: waited.append((len(some), len(Started.all))))

    async def warm_up(urls: list[str], case: RoutingCase) -> None:
        assert case == VLLM
        assert len(urls) == 2

    monkeypatch.setattr(workers, "_warm_up", warm_up)
    with on_vllm(tmp_path, "vllm-python", [0, 1]) as found:
        assert waited == [(2, 2)]
        assert not ended
    assert len(ended) == 2
    for number, one in enumerate(Started.all):
        assert one.words[:5] == ["vllm-python", "-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / NAME)]
        for option in (
            *("--max-loras=8", "--max-lora-rank=16", "--max-cpu-loras=32", "--enable-lora", "--max-num-seqs=32"),
            *("--max-model-len=512", "--max-num-batched-tokens=8192", "--load-format=dummy"),
            *("--no-enable-prefix-caching", f"--served-model-name={NAME}", f"--port={18_200 + number}"),
        ):
            assert option in one.words
        assert one.env["CUDA_VISIBLE_DEVICES"] == str(number)
        assert one.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
        assert found.route.workers[number].url.endswith(f":{18_200 + number}")
    kept = from_json((tmp_path / "run" / "routes.json").read_bytes(), RouteTable)
    assert kept.routes == (found.route,)
    assert (found.route.adapter_slots, found.route.loaded_adapters) == (8, 32)
    assert {one.max_outstanding for one in found.route.workers} == {2 * VLLM.batch}
    variants = found.route.variants
    assert [one.name for one in variants] == [f"v{number}" for number in range(VLLM.variants)]
    assert len({one.engine_name for one in variants}) == VLLM.variants
    assert len({one.content_hash for one in variants}) == 4
    store = VariantStore(tmp_path / "variants")
    for one in variants[:4]:
        assert one.engine_name == f"{one.name}@{one.content_hash[:16]}"
        assert read_adapter(store.loadable(one.content_hash)).max_rank == 16


def test_the_kept_recording_has_both_policies_in_turn_on_the_same_requests() -> None:
    found = recording()
    assert found.slots < CPU.variants
    assert found.loaded < CPU.variants
    by_round = {(turn.round, turn.load): [] for turn in found.turns}
    for turn in found.turns:
        by_round[turn.round, turn.load].append(turn)
    assert {load for _, load in by_round} == set(LOADS)
    for (round_, _), turns in by_round.items():
        assert [turn.policy for turn in turns] == list(POLICIES[:: 1 - 2 * (round_ % 2)])
        assert len({len(turn.ttft_s) for turn in turns}) == 1
    assert CLIENTS == 2


def test_the_page_has_the_table_of_the_recording() -> None:
    assert table(recording()) in PAGE.read_text()
