"""Gap between the heuristics and the exact placement. Run: ``python -m tests.bench.exact_gap [--json FILE]``.

1,000 random small clusters: one or two nodes of two to four A6000 in link pairs (two to six GPUs); half the GPUs
idle, the rest with 10% to 90% of their memory free and a load of up to 0.9. On each, one to three of the paper's
six LLMs (one may occur twice), all under one intent (five in turn); their configurations, times and memory are the
planner's own by the roofline. Everything follows from the seed. Needs ISERVE_REFERENCE_DATA for the shapes.

*   Cost: that of ``placement.multi_model``, the intent's objective under the load that is there, over all models.
*   One by one: the models in the order of the draw, each as the cheapest configuration that fits, where a policy
    puts it. That is what deploying them one after the other does.
    *By load*: as the cheapest where it would be placed. *Largest first*: in the order of the memory they need at
    least. Costs are compared where both place every model.
*   Same configurations: the exact place for those that the policy ended up with. What is left of the gap is the
    choice of configurations, which is made for no other model's sake.
*   Seconds: the solver and the program's statement, CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from daemon.engines.registry import capabilities_for
from fingerprint.codec import to_json
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.planning.engine_choice import by_preference
from iserve.planning.pipeline import PlanOptions, ranked_anywhere, space
from placement.fit import demand
from placement.ilp_placer import Layout, place_together
from placement.multi_model import Choice, Wanted, largest_first, one_by_one
from placement.policies import POLICIES, make_policy
from placement.types import ClusterSnapshot, GpuState
from planner.intent import Intent, IntentKind
from tests.bench.kept import read_kept, write_kept
from tests.bench.place import cluster
from tests.bench.placement_under_load import PAPERS, spec, workload
from tests.bench.rank import machine

A6000 = gpu_spec("a6000")
INTENTS = (
    IntentKind.MIN_COST,
    IntentKind.MIN_LATENCY,
    IntentKind.MIN_GPU_HOURS,
    IntentKind.MIN_MEMORY,
    IntentKind.MAX_THROUGHPUT,
)
CLUSTERS, TIME_LIMIT_S = 1000, 10.0
OPTIMAL = 1e-3  # of the cost: what breaks ties of min-memory does not count

# What one by one is measured with: where a model goes, and how its configuration is chosen, and in which order.
WAYS = ("as ranked", "by load", "by load, largest first")
RULES = tuple((policy, way) for policy in POLICIES for way in WAYS)  # kept with the results


@dataclass(frozen=True, kw_only=True)
class Heuristic:
    models: int  # that it placed
    cost: float | None  # in exact costs; None: one of the two did not place all
    same_configs: float | None  # the exact place of its own configurations, likewise


@dataclass(frozen=True, kw_only=True)
class Case:
    seed: int
    intent: str
    gpus: int
    models: int
    placed: int  # by the exact placement
    proven: bool
    bound: float  # of the exact cost
    seconds: float
    by: tuple[Heuristic, ...]  # in the order of RULES


@cache
def wanted(model: str, kind: IntentKind, num_gpus: int) -> Wanted:
    """The ranking's configurations of ``model``, whatever is free; of a throughput the inverse is the cost."""
    options = PlanOptions(intent=Intent(kind=kind), workload=workload(1))
    engines = by_preference(capabilities_for("auto"), A6000)
    shape = spec(model)
    made = space(shape, A6000, num_gpus, RooflineEstimator(shape, A6000), engines, options)
    plan = ranked_anywhere(made, options, A6000)
    choices = tuple(
        Choice(
            label=str(one.config),
            demand=demand(one.estimate.memory),
            cost=1 / one.objective if plan.maximize else one.objective,
            timed=kind is not IntentKind.MIN_MEMORY,
        )
        for one in plan.candidates
        if one.feasible and one.estimate is not None and one.objective is not None
    )
    return Wanted(model=model, choices=choices)


def drawn(seed: int) -> tuple[IntentKind, list[Wanted], ClusterSnapshot]:
    rng = random.Random(seed)
    sizes = rng.choice([(2,), (3,), (4,), (2, 2), (3, 2), (4, 2)])
    gpus = []
    for node, size in enumerate(sizes):
        for index in range(size):
            idle = rng.random() < 0.5
            gpus.append(
                GpuState(
                    device_id=f"{node}:{index}",
                    node_id=f"node{node}",
                    gpu_index=index,
                    total_bytes=A6000.memory_bytes,
                    free_bytes=A6000.memory_bytes if idle else int(A6000.memory_bytes * rng.uniform(0.1, 0.9)),
                    load_fraction=0.0 if idle else round(rng.uniform(0.0, 0.9), 3),
                )
            )
    kind = INTENTS[seed % len(INTENTS)]
    models = [rng.choice(PAPERS) for _ in range(rng.randint(1, 3))]
    asked = [
        Wanted(model=f"{i} {model}", choices=wanted(model, kind, len(gpus)).choices)
        for i, model in enumerate(models)
    ]
    return kind, asked, ClusterSnapshot(tuple(gpus))


def measure(seed: int) -> Case:
    kind, asked, snapshot = drawn(seed)
    link = A6000.link_group_size
    start = time.process_time()
    exact = place_together(asked, snapshot, link_group_size=link, time_limit_s=TIME_LIMIT_S)
    seconds = time.process_time() - start
    return Case(
        seed=seed,
        intent=kind,
        gpus=len(snapshot.gpus),
        models=len(asked),
        placed=len(exact.placed),
        proven=exact.proven,
        bound=exact.bound / exact.cost if exact.placed else 1.0,
        seconds=seconds,
        by=tuple(heuristic(*rule, asked, snapshot, exact) for rule in RULES),
    )


def heuristic(
    policy: str, way: str, asked: Sequence[Wanted], snapshot: ClusterSnapshot, exact: Layout
) -> Heuristic:
    link = A6000.link_group_size
    placed, _ = one_by_one(
        largest_first(asked) if way == WAYS[2] else asked,
        snapshot,
        make_policy(policy),
        link_group_size=link,
        weigh_load=way != WAYS[0],
    )
    if len(placed) < len(asked):
        return Heuristic(models=len(placed), cost=None, same_configs=None)
    own = [Wanted(model=one.model, choices=(one.choice,)) for one in placed]
    same = place_together(own, snapshot, link_group_size=link, time_limit_s=TIME_LIMIT_S)
    cost = sum(one.cost for one in placed) / exact.cost
    return Heuristic(models=len(placed), cost=cost, same_configs=same.cost / exact.cost)


def show(cases: Sequence[Case], machine_line: str, rules: Sequence[tuple[str, str]] = RULES) -> None:
    print(machine_line)
    seconds = sorted(case.seconds for case in cases)
    print(
        f"{len(cases)} clusters; proven {sum(case.proven for case in cases)}; solved in a median of "
        f"{statistics.median(seconds):.3f} s, p90 {seconds[int(0.9 * len(seconds))]:.2f} s, "
        f"worst {seconds[-1]:.1f} s"
    )
    loosest = min((case.bound for case in cases), default=1.0)
    print(f"where not proven, the bound is at least {loosest:.3f} of the cost")
    print(
        f"{sum(case.placed < case.models for case in cases)} where not even the exact placement has room for all"
    )
    groups = {"all": list(cases)}
    for kind in INTENTS:
        groups[kind] = [case for case in cases if case.intent == kind]
    for models in (1, 2, 3):
        groups[f"{models} model" + "s" * (models > 1)] = [case for case in cases if case.models == models]
    print(
        "| clusters | policy | configuration | fewer models | optimal | mean gap | p90 | worst | mean, by place |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for group, members in groups.items():
        for index, rule in enumerate(rules):
            print(_line(group, rule, members, index))


def _line(group: str, rule: tuple[str, str], members: Sequence[Case], index: int) -> str:
    own = [case.by[index] for case in members]
    fewer = sum(one.models < case.placed for one, case in zip(own, members, strict=True))
    both = [(one.cost, one.same_configs) for one in own if one.cost is not None and one.same_configs is not None]
    gaps = sorted(cost - 1 for cost, _ in both)
    optimal = sum(gap < OPTIMAL for gap in gaps)
    place = statistics.fmean(cost - same for cost, same in both)
    return (
        f"| {group} ({len(both)}) | {rule[0]} | {rule[1]} | {fewer} | "
        f"{optimal / len(both):.0%} | {statistics.fmean(gaps):.1%} | {gaps[int(0.9 * len(gaps))]:.1%} | "
        f"{gaps[-1]:.0%} | {place:.1%} |"
    )


def show_decisions() -> None:
    """Print what choosing by load costs: one model on 1,000 GPUs of ``tests.bench.place``, CPU time."""
    rng = random.Random(20261121)
    clusters = [cluster(rng, "mixed") for _ in range(len(PAPERS))]
    for policy in POLICIES:
        for weigh_load in (False, True):
            times_s = []
            for model, snapshot in zip(PAPERS, clusters, strict=True):
                for kind in INTENTS:
                    asked = [wanted(model, kind, 64)]
                    start = time.process_time()
                    one_by_one(
                        asked,
                        snapshot,
                        make_policy(policy),
                        link_group_size=A6000.link_group_size,
                        weigh_load=weigh_load,
                    )
                    times_s.append(time.process_time() - start)
            times_s.sort()
            way = WAYS[weigh_load]
            print(
                f"{policy:13s} {way:10s} median {statistics.median(times_s) * 1e3:6.1f} ms, "
                f"p90 {times_s[int(0.9 * len(times_s))] * 1e3:6.1f} ms, worst {times_s[-1] * 1e3:6.1f} ms"
            )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results there, gzipped if it ends in .gz")
    parser.add_argument("--clusters", type=int, default=CLUSTERS)
    parser.add_argument("--first", type=int, default=0, help="seed")
    parser.add_argument("--show", type=Path, help="only print what is kept there")
    parser.add_argument("--decisions", action="store_true", help="only time decisions on 1,000 GPUs")
    options = parser.parse_args(arguments)
    if options.decisions:
        show_decisions()
        return
    if options.show:
        kept = json.loads(read_kept(options.show))
        show([_case(one) for one in kept["cases"]], kept["machine"], kept["rules"])
        return
    cases = []
    for seed in range(options.first, options.first + options.clusters):
        cases.append(measure(seed))
        print(f"seed {seed}: {cases[-1].seconds:.2f} s", file=sys.stderr, flush=True)
    show(cases, machine())
    if options.json:
        rows = ",\n".join(json.dumps(_rounded(one)) for one in json.loads(to_json(cases)))
        head = f'"machine": {json.dumps(machine())}, "rules": {json.dumps(RULES)}'
        write_kept(options.json, f'{{{head}, "cases": [\n{rows}\n]}}\n')


def _case(row: dict[str, object]) -> Case:
    by = row.pop("by")
    assert isinstance(by, list)
    return Case(by=tuple(Heuristic(**one) for one in by), **row)  # type: ignore[arg-type]


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 5) if isinstance(value, float) else value


if __name__ == "__main__":
    main(sys.argv[1:])
