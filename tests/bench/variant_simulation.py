"""Simulator next to the recorded contest of LoRA variants: loads, throughput and TTFT, predicted and measured.

Run: ``python -m tests.bench.variant_simulation [--times profile|roofline] [--loads-by tensors|load]``.

The worker is what a plan for the contest's deployment launches, with steps by the profile of the same model, GPU
and release (or the roofline); what adapters and loads add is ``fingerprint.estimators.adapter_slots``, of
another recording (``lora_steps_h200.json.gz``). Nothing is fitted on the contest. Its clients are simulated as
they were: all adapters once, then each arm of iServe's side at its time, 32 clients that each send the next
request once their last one is answered, then the requests for 1,000 further adapters. Only which adapter each
request is for is given.

Adapters of the other recording have 448 tensors, the cold ones of the contest 128. The fixed part of a load is its
tensors': loads of adapters of one and two layers (14 and 28 tensors, ``variant_costs_h200``, the same GPU and
release) take 4 to 11 ms where a fixed part of the load's own alone would be 53, and in vLLM's own code on a CPU a
load of 448, 128 and 8 small tensors takes 21.3, 8.6 and 3.6 ms. ``--loads-by load`` is as plans had it before.
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
    cold_names,
    requests,
)
from traces.request import Request
from traces.simulator.scenario import Deploy, Deployed, NotDeployed, Policies, Scenario
from traces.simulator.simulation import _World

RECORDING, TIMES = "variant_contest_h200.json.gz", ("profile", "roofline")
MODEL, STEPS_OF, GPU = "Llama-3.1-8B", "h200-vllm-0.33", "h200"
LOADS_BY = ("load", "tensors")
ALL_TENSORS, COLD_TENSORS = 2 * 7 * 32, 2 * 2 * 32  # of an adapter of every matrix, and of q and v
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
    answers: int
    ttft_p50_s: float
    ttft_p99_s: float
    loads: int
    evictions: int


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
            models = [one.model for one in requests(arm.adapters, arm.round)]
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
            answers=len(ttft_s),
            ttft_p50_s=p(ttft_s, 50),
            ttft_p99_s=p(ttft_s, 99),
            loads=loads,
            evictions=evictions,
        )


def _ours(found: VariantContest) -> list[Arm]:
    return [arm for arm in found.arms if arm.side == OURS]


def cold_load_s(adapter_bytes: int, loads_by: str) -> float:
    """Return the time of a load of one of the cold adapters."""
    fixed_s = load_s(0)
    share = COLD_TENSORS / ALL_TENSORS if loads_by == "tensors" else 1.0
    return share * fixed_s + load_s(adapter_bytes) - fixed_s


def predicted(found: VariantContest, times: str, loads_by: str) -> list[Played]:
    """Return what the simulator makes of the phases, the first one left out."""
    assert found.cold is not None
    each_s = cold_load_s(found.cold.adapter_bytes, loads_by)
    loop = ClosedLoop(OneWorker(simulated_model(times), each_s))
    return [loop.play(phase) for phase in phases(found)][1:]


def table(found: VariantContest, times: str, loads_by: str) -> str:
    head = ("", "tokens/s", "predicted", "TTFT P50", "predicted", "P99", "predicted", "loads", "predicted")
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for true, said in zip(measured(found), predicted(found, times, loads_by), strict=True):
        assert true.phase == said.phase
        cells = [
            *(f"{one.tokens_per_s:,.0f}" for one in (true, said)),
            *(f"{1e3 * one.ttft_p50_s:,.0f} ms" for one in (true, said)),
            *(f"{1e3 * one.ttft_p99_s:,.0f} ms" for one in (true, said)),
            *(str(one.loads) for one in (true, said)),
        ]
        lines.append(f"| {true.phase} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", choices=TIMES, default=TIMES[0], help="of the base's steps")
    parser.add_argument("--loads-by", choices=LOADS_BY, default=LOADS_BY[1], help="what a load's fixed part is of")
    options = parser.parse_args(arguments)
    content = read_kept(RESULTS / RECORDING)
    print(table(from_json(content, VariantContest, what=RECORDING), options.times, options.loads_by))


if __name__ == "__main__":
    main(sys.argv[1:])
