"""Price of loads under way in the choice of a worker, in the simulator of the cluster, next to round robin.

Run: ``python -m tests.bench.variant_load_price development|held-out 2|4|all [RULE ...]``: with two replicas, with
four and the requests of the run on GPUs, or both; ``RULE`` is one of ``new 1`` to ``all 8``. The cases and what
decides are in docs/decisions/0044-variant-routing.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from fingerprint.codec import from_json
from placement.variant_routing import Candidate, LeastLoaded, RoundRobin, VariantPolicy
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept
from tests.bench.variant_routing import LOADS
from tests.bench.variant_routing_run import CASES, CLIENTS, RoutingRun, client_seeds, requests
from tests.bench.variant_stops import Case, capacity_per_s
from tests.traces.simulator.variant_worlds import variants_of
from traces.request import Request

RECORDING = "variant_routing_vllm.json.gz"
LOAD_S = (0.07, 0.12)
DEVELOPMENT, HELD_OUT = range(5), range(5, 15)
PRICES = (1, 2, 4, 8)
_WARM_UP = 0.1  # of the requests, left out of figures


@dataclass(frozen=True, slots=True)
class Priced(LeastLoaded):
    """``LeastLoaded`` where a load under way counts as ``price`` requests, and decides between equals.

    Args:
        holders: also at workers that have the variant; else only where it would be loaded.
    """

    price: float = 0.0
    holders: bool = False

    def _rank(self, variant: str, candidate: Candidate, loss: float) -> tuple[float, ...]:
        requests, *rest = LeastLoaded._rank(self, variant, candidate, loss)
        if self.holders or variant not in candidate.worker.loaded:
            return (requests + self.price * candidate.loading, rest[0], candidate.loading, *rest[1:])
        return (requests, rest[0], 0, *rest[1:])


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the seeds."""

    mean_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    loads: float


def candidates() -> dict[str, VariantPolicy]:
    return {
        f"{'all' if holders else 'new'} {price}": Priced(price=price, holders=holders)
        for holders, price in product((False, True), PRICES)
    }


def long_cells(replicas: int, seeds: Sequence[int]) -> Iterator[tuple[str, list[tuple[Case, list[Request], int]]]]:
    """Yield the requests of ``variant_stops`` by seed, for each cell."""
    for variants, load_s, load in product((40, 200), LOAD_S, LOADS):
        case = Case(load_s, 1500 * replicas // 2, variants, replicas)
        rate_per_s = load * capacity_per_s(case)
        worlds = [(case, case.arrivals(seed, rate_per_s), 1) for seed in seeds]
        yield f"{replicas} replicas, {variants}, {load_s} s, {load:.0%}", worlds


def short_cells(rounds: Sequence[int]) -> Iterator[tuple[str, list[tuple[Case, list[Request], int]]]]:
    """Yield requests like those of the kept run on GPUs by round, for each cell; rounds 0 and 1 are its own."""
    found = from_json(read_kept(RESULTS / RECORDING), RoutingRun, what=RECORDING)
    asked_for = CASES[found.engine]
    for load_s, load in product(LOAD_S, (0.3, 0.6)):
        worlds = []
        for round_ in rounds:
            rate_per_s = load * found.capacity_per_s / CLIENTS
            arrivals = sorted(
                (at_s, asked.model)
                for seed in client_seeds(load, round_)
                for asked, at_s in zip(*requests(asked_for, seed, rate_per_s, found.seconds), strict=True)
            )
            made = [
                Request(at_s, asked_for.input_tokens, asked_for.output_tokens, model=model)
                for at_s, model in arrivals
            ]
            worlds.append((Case(load_s, len(made)), made, 2))
        yield f"kept run, rounds {rounds[0]} to {rounds[-1]}, {load_s} s, {load:.0%}", worlds


def figures(worlds: Sequence[tuple[Case, list[Request], int]], policy: VariantPolicy, warm_up: float) -> Figures:
    rows = []
    for case, made, per_slot in worlds:
        result = case.served(made, policy, outstanding_per_slot=per_slot)
        warm = slice(int(warm_up * len(made)), None)
        e2e_s, ttft_s = result.outcomes.e2e_s[warm], result.outcomes.ttft_s[warm]
        p95_s, p99_s = np.quantile(ttft_s, (0.95, 0.99))
        rows.append((e2e_s.mean(), p95_s, p99_s, variants_of(result).loads))
    return Figures(*(float(value) for value in np.mean(rows, axis=0)))


def cells(held_out: bool, part: str) -> Iterator[tuple[str, list[tuple[Case, list[Request], int]], float]]:
    """Yield name, requests by seed and the share that is left out of figures."""
    if part != "4":
        for cell in long_cells(2, HELD_OUT if held_out else DEVELOPMENT):
            yield (*cell, _WARM_UP)
    if part != "2":
        for rounds in [range(2), range(20, 30)] if held_out else [range(10, 15)]:
            for cell in short_cells(rounds):
                yield (*cell, 0.0)
        for cell in long_cells(4, HELD_OUT if held_out else DEVELOPMENT[:2]):
            yield (*cell, _WARM_UP)


def summary(rows: Sequence[Sequence[Figures]], names: Sequence[str]) -> str:
    """Return, for each rule, in how many cells it is no higher than the first, and how it is to the second."""
    lines = ["| rule | P95 | P99 | P99 to today's, mean | worst mean E2E | worst loads |", "|---|" + "--:|" * 5]
    for index, name in enumerate(names):
        p95 = sum(row[index].ttft_p95_s <= row[0].ttft_p95_s for row in rows)
        p99 = sum(row[index].ttft_p99_s <= row[0].ttft_p99_s for row in rows)
        ratio = np.exp(np.mean([np.log(row[index].ttft_p99_s / row[1].ttft_p99_s) for row in rows])) - 1
        mean = max(row[index].mean_s / row[1].mean_s for row in rows) - 1
        loads = max(row[index].loads / row[1].loads for row in rows) - 1
        lines.append(f"| {name} | {p95} | {p99} of {len(rows)} | {ratio:+.1%} | {mean:+.1%} | {loads:+.1%} |")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    seeds, part, *names = arguments
    policies: dict[str, VariantPolicy] = {"round-robin": RoundRobin(), "today": LeastLoaded()}
    policies |= {name: one for name, one in candidates().items() if not names or name in names}
    print("| cell | " + " | ".join(policies) + " |")
    print("|---" * (1 + len(policies)) + "|")
    rows = []
    for name, worlds, warm_up in cells(seeds == "held-out", part):
        found = [figures(worlds, policy, warm_up) for policy in policies.values()]
        rows.append(found)
        shown = (
            f"{1e3 * one.ttft_p95_s:.0f}, {1e3 * one.ttft_p99_s:.0f} ms; {one.mean_s:.3f} s; {one.loads:.0f}"
            for one in found
        )
        print(f"| {name} | " + " | ".join(shown) + " |", flush=True)
    print("\n" + summary(rows, list(policies)))


if __name__ == "__main__":
    main(sys.argv[1:])
