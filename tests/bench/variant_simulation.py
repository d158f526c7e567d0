"""Simulator next to the recorded contest of LoRA variants: loads, throughput and TTFT, predicted and measured.

Run: ``python -m tests.bench.variant_simulation [--times profile|roofline] [--tensors N]``.

The worker is what a plan for the contest's deployment launches, with steps by the profile of the same model, GPU
and release (or the roofline); what adapters and loads add is ``fingerprint.estimators.adapter_slots``, of
another recording (``lora_steps_h200.json.gz``). Nothing is fitted on the contest. Its clients are simulated as
they were: all adapters once, then each arm of iServe's side at its time, 32 clients that each send the next
request once their last one is answered, then the requests for 1,000 further adapters. Only which adapter each
request is for is given.

Loads take what the product's law (``fingerprint.load_time``) says of the bytes and tensors of the cold adapters,
which update the matrices of q and v alone. A plan or ``iserve simulate`` is given a rank and no choice of
matrices, and counts all of them: ``--tensors 448``.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fingerprint.codec import from_json
from fingerprint.config import Workload
from fingerprint.estimators.adapter_slots import load_s
from fingerprint.gpus import gpu_spec
from iserve.planning.pipeline import PlanOptions, with_traffic
from iserve.simulation.running import (
    PlannedDeployer,
    SimulatedModel,
    idle_cluster,
    measured_model,
    roofline_model,
)
from placement.types import ClusterSnapshot
from planner.intent import Intent, Quality, Traffic
from tests.bench.accuracy import RESULTS, load
from tests.bench.kept import read_kept
from tests.bench.variant_clients import Answer, p
from tests.bench.variant_contest import BATCH, MOST, OURS, OUTPUT, Arm, VariantContest, adapter_names
from tests.bench.variant_contest_run import (
    ARM_S,
    CLIENTS,
    COLD,
    COLD_S,
    CONTEXT,
    INPUT,
    NAME,
    RANK,
    SLOTS,
    asked_models,
    cold_names,
)
from traces.request import Request
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario
from traces.simulator.simulation import _World

RECORDING, TIMES = "variant_contest_h200.json.gz", ("profile", "roofline")
MODEL, STEPS_OF, GPU = "Llama-3.1-8B", "h200-vllm-0.33", "h200"
COLD_TENSORS = 2 * 2 * 32  # of an adapter of q and v
DRAIN_S = 100.0  # before the first arm, for the requests that load all adapters


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Clients in a closed loop: each sends the next of ``models`` once its last one is answered."""

    name: str
    begins_s: float
    seconds: float
    clients: int
    models: Sequence[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """Figures of a phase."""

    phase: str
    tokens_per_s: float
    requests: int  # begun
    answers: int  # whole within its seconds
    ttft_p50_s: float
    ttft_p99_s: float
    loads: int
    evictions: int

    @property
    def hit_rate(self) -> float:
        """Share of the requests that no load was made for."""
        return 1 - self.loads / self.requests


def simulated_model(times: str) -> SimulatedModel:
    """Return the contest's model as its plan had it, with steps of the base by ``times``."""
    options = PlanOptions(
        intent=Intent(traffic=Traffic(variants=MOST, variant_rank=RANK, variant_skew=0.0), quality=Quality.EXACT),
        workload=Workload(batch=BATCH, input_tokens=INPUT, output_tokens=OUTPUT, longest_tokens=CONTEXT),
        adapter_slots=SLOTS,
        policy="packing",
    )
    (recorded,) = (one for one in load(RESULTS / STEPS_OF) if one.model == MODEL)
    gpu = gpu_spec(GPU)
    if times == "profile":
        model = measured_model(NAME, recorded.profile, gpu, options)
    else:
        model = roofline_model(NAME, recorded.profile.spec, gpu, options, "vllm")
    engines = tuple(table.unprepared() for table in model.engines)
    return replace(model, estimator=with_traffic(model.estimator, model.spec, options), engines=engines)


class OneWorker:
    """The planner's worker, whose loads take ``load_s`` each."""

    name = "one-worker"

    def __init__(self, model: SimulatedModel, load_s: float) -> None:
        self._planned = PlannedDeployer(gpu_spec(GPU), [model])
        self._load_s = load_s

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed | NotDeployed:
        found = self._planned(model, snapshot)
        if isinstance(found, Deployed) and found.adapters is not None:
            found = replace(found, adapters=replace(found.adapters, load_s=self._load_s))
        return found


def phases(found: VariantContest) -> Iterator[Phase]:
    """Return what iServe's side was asked, at the time of each part; the adapters are checked."""
    yield Phase(name="all once", begins_s=0.0, seconds=1e9, clients=1, models=adapter_names(MOST))
    at_s = 3.0 * MOST + DRAIN_S
    for arm in found.arms:
        if arm.side == OURS:
            models = asked_models(arm.adapters, arm.round)
            _check(models, arm.answers)
            name = f"{arm.adapters} adapters, round {arm.round}"
            yield Phase(name=name, begins_s=at_s, seconds=ARM_S, clients=CLIENTS, models=models)
        at_s += arm.seconds
    if found.cold is not None:
        names = cold_names(COLD)
        weights = [1 / (1 + rank) for rank in range(len(names))]
        models = random.Random(11).choices(names, weights, k=CLIENTS * 200)
        _check(models, found.cold.zipf)
        yield Phase(name="cold", begins_s=at_s, seconds=COLD_S, clients=CLIENTS, models=models)


def _check(models: Sequence[str], answers: Sequence[Answer]) -> None:
    if any(models[one.row] != one.model for one in answers):
        raise SystemExit("the recording was asked for other adapters than its bench draws now")


class ClosedLoop:
    """Clients of a simulated deployment."""

    def __init__(self, deployer: OneWorker) -> None:
        deploy = Deploy(at_s=0.0, name=NAME, model=NAME, variants=True)
        cluster = idle_cluster(gpu_spec(GPU), 1)
        scenario = Scenario(cluster=cluster, actions=(deploy,), startup_s=0.0)
        self._world = _World(scenario, Policies(deployer=deployer))
        self._world.advance(math.nextafter(0.0, 1.0))

    def play(self, phase: Phase) -> Played:
        """Play one phase, and go on until its last request has ended."""
        world, models = self._world, iter(phase.models)
        asked = world.requests
        first_row, ends_s = len(asked), phase.begins_s + phase.seconds
        before = self._counts()
        sending = [phase.begins_s] * phase.clients  # when each client sends its next
        running: set[int] = set()
        while sending or running:
            event_s = world.events[0][0] if world.events else math.inf
            if sending and sending[0] <= event_s:
                at_s = heapq.heappop(sending)
                model = next(models, None) if at_s < ends_s else None
                if model is not None:
                    running.add(len(asked))
                    world.arrive(Request(at_s, INPUT, OUTPUT, model=model), len(asked))
                continue
            world.advance(math.nextafter(event_s, math.inf))
            for row in [row for row in running if asked.last_s[row] == asked.last_s[row]]:
                running.remove(row)
                heapq.heappush(sending, asked.last_s[row])
        return self._played(phase, range(first_row, len(asked)), before)

    def _counts(self) -> tuple[int, int]:
        traffic = self._world._deployments.by_name[NAME].traffic
        assert traffic is not None
        found = traffic.figures()
        return found.loads, found.evictions

    def _played(self, phase: Phase, rows: range, before: tuple[int, int]) -> Played:
        asked, loads = self._world.requests, self._counts()
        ends_s = phase.begins_s + min(phase.seconds, max(asked.last_s[row] for row in rows) - phase.begins_s)
        tokens = 0.0
        for row in rows:
            first_s, last_s = asked.first_s[row], asked.last_s[row]
            if first_s <= ends_s:
                tokens += 1 + (OUTPUT - 1) * min(1.0, (ends_s - first_s) / (last_s - first_s))
        whole = [row for row in rows if asked.last_s[row] <= ends_s]
        ttft_s = [asked.first_s[row] - asked.arrival_s[row] for row in whole]
        return Played(
            phase=phase.name,
            tokens_per_s=tokens / (ends_s - phase.begins_s),
            requests=len(rows),
            answers=len(whole),
            ttft_p50_s=p(ttft_s, 50),
            ttft_p99_s=p(ttft_s, 99),
            loads=loads[0] - before[0],
            evictions=loads[1] - before[1],
        )


def measured(found: VariantContest) -> Iterator[Played]:
    """Return what the phases brought about on the GPU, the first one left out."""
    parts = [
        (f"{arm.adapters} adapters, round {arm.round}", arm.answers, arm.seconds, 0, 0) for arm in _ours(found)
    ]
    if (cold := found.cold) is not None:
        parts.append(("cold", cold.zipf, COLD_S, cold.loads, cold.evictions))
    for name, answers, seconds, loads, evictions in parts:
        ttft_s = [one.first_s for one in answers if one.is_whole]
        yield Played(
            phase=name,
            tokens_per_s=sum(one.tokens for one in answers) / seconds,
            requests=len(answers),
            answers=len(ttft_s),
            ttft_p50_s=p(ttft_s, 50),
            ttft_p99_s=p(ttft_s, 99),
            loads=loads,
            evictions=evictions,
        )


def _ours(found: VariantContest) -> list[Arm]:
    return [arm for arm in found.arms if arm.side == OURS]


def predicted(found: VariantContest, times: str, tensors: int = COLD_TENSORS) -> list[Played]:
    """Return what the simulator makes of the phases, the first one left out."""
    assert found.cold is not None
    each_s = load_s(found.cold.adapter_bytes, tensors)
    loop = ClosedLoop(OneWorker(simulated_model(times), each_s))
    return [loop.play(phase) for phase in phases(found)][1:]


def table(true: Sequence[Played], said: Sequence[Played]) -> str:
    """Return figures of the phases, rounds of the same adapters in one row, as Markdown."""
    assert [one.phase for one in true] == [one.phase for one in said]
    parts = ("tokens/s", "TTFT P50", "P99", "loads", "hit rate")
    head = ("adapters", *(name for part in parts for name in (part, "predicted")))
    lines = [f"| {' | '.join(head)} |", f"|---|{'--:|' * (len(head) - 1)}"]
    rounds: dict[str, list[tuple[Played, Played]]] = {}
    for pair in zip(true, said, strict=True):
        rounds.setdefault(pair[0].phase.split()[0], []).append(pair)
    for adapters, pairs in rounds.items():
        name = f"{COLD:,}, Zipf's law" if adapters == "cold" else adapters
        sides = [_cells(side) for side in zip(*pairs, strict=True)]
        cells = [cell for both in zip(*sides, strict=True) for cell in both]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(rounds: Sequence[Played]) -> list[str]:
    loads, hits = sum(one.loads for one in rounds), sum(one.requests - one.loads for one in rounds)
    return [
        ", ".join(f"{one.tokens_per_s:,.0f}" for one in rounds),
        ", ".join(f"{1e3 * one.ttft_p50_s:,.0f}" for one in rounds) + " ms",
        ", ".join(f"{1e3 * one.ttft_p99_s:,.0f}" for one in rounds) + " ms",
        str(loads),
        f"{hits / (hits + loads):.1%}",
    ]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", choices=TIMES, default=TIMES[0], help="of the base's steps")
    parser.add_argument("--tensors", type=int, default=COLD_TENSORS, help="of a cold adapter")
    options = parser.parse_args(arguments)
    content = read_kept(RESULTS / RECORDING)
    found = from_json(content, VariantContest, what=RECORDING)
    print(table([*measured(found)], predicted(found, options.times, options.tensors)))


if __name__ == "__main__":
    main(sys.argv[1:])
