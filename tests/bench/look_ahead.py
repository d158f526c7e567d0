"""Comparison of look-ahead's closed form with a short simulation of the recent load.

    python -m tests.bench.look_ahead [--worlds 200] [--json FILE]

A world is eight GPUs with three to eight replicas on one, two or four of them, each called at its own rate for
answers of its own length, and one more that is to be placed. What both may know is the last two minutes: the
closed form (``placement.load_model``) the share of the time that each was busy, the simulation the very requests,
which it runs again with each candidate's place. Judged is what they chose in a long run of the same rates: the
mean number of requests under way, of all, over that at the best place. A GPU is shared by all that run on it; a
request on several goes as fast as the slowest. GPUs have no price here: both would add the same.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from placement.load_model import Key, LoadedCluster, Tenant

GPUS = tuple(("n0", f"g{i}") for i in range(8))
RECENT_S, TRUTH_S = 120.0, 4000.0
FULLEST = 0.85  # of any GPU once the newcomer is there: beyond, no run is long enough to tell the truth


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of one replica."""

    gpus: tuple[Key, ...]
    rate: float  # requests/s
    mean_s: float  # of a request alone
    cv: float  # of the times between requests; 1: Poisson

    @property
    def busy(self) -> float:
        return self.rate * self.mean_s

    def calls(self, until_s: float, draw: random.Random) -> list[tuple[float, float]]:
        """(arrival, seconds alone): gamma times between, exponential lengths."""
        shape = 1 / self.cv**2
        found, now_s = [], draw.random() / self.rate
        while now_s < until_s:
            found.append((now_s, draw.expovariate(1 / self.mean_s)))
            now_s += draw.gammavariate(shape, 1 / (shape * self.rate))
        return found


def mean_under_way(callers: Sequence[tuple[tuple[Key, ...], list[tuple[float, float]]]], until_s: float) -> float:
    """Mean number of requests under way, processor sharing, all followed to their end."""
    arrivals = sorted((at_s, work_s, gpus) for gpus, calls in callers for at_s, work_s in calls)
    running: list[list] = []  # [left_s, gpus]
    crowd = dict.fromkeys(GPUS, 0)
    total_s, now_s, coming = 0.0, 0.0, 0
    while coming < len(arrivals) or running:
        speeds = [1 / max(crowd[g] for g in gpus) for _, gpus in running]
        done_s = min((left_s / v for (left_s, _), v in zip(running, speeds, strict=True)), default=math.inf)
        next_s = arrivals[coming][0] - now_s if coming < len(arrivals) else math.inf
        step_s = min(done_s, next_s)
        total_s += step_s * len(running)
        now_s += step_s
        for one, v in zip(running, speeds, strict=True):
            one[0] -= step_s * v
        if next_s <= done_s:
            _, work_s, gpus = arrivals[coming]
            coming += 1
            running.append([work_s, gpus])
            for g in gpus:
                crowd[g] += 1
        else:
            ended = min(range(len(running)), key=lambda i: running[i][0])
            for g in running.pop(ended)[1]:
                crowd[g] -= 1
    return total_s / until_s


@dataclass(frozen=True, slots=True)
class World:
    there: tuple[Caller, ...]
    newcomer: Caller  # its gpus: the first candidate's

    @property
    def candidates(self) -> tuple[tuple[Key, ...], ...]:
        n = len(self.newcomer.gpus)
        return tuple(GPUS[i : i + n] for i in range(0, len(GPUS), n))


def world(draw: random.Random, cv: float) -> World:
    def caller(most_busy: float) -> Caller:
        n = draw.choice((1, 1, 2, 4))
        first = draw.randrange(0, len(GPUS), n)
        mean_s = math.exp(draw.uniform(math.log(0.3), math.log(6.0)))
        return Caller(GPUS[first : first + n], draw.uniform(0.05, most_busy) / mean_s, mean_s, cv)

    while True:
        there = tuple(caller(0.5) for _ in range(draw.randint(3, 8)))
        newcomer = caller(0.4)
        loads = dict.fromkeys(GPUS, newcomer.busy)
        for one in there:
            for gpu in one.gpus:
                loads[gpu] += one.busy
        if max(loads.values()) <= FULLEST:
            return World(there, newcomer)


@dataclass(frozen=True, slots=True)
class Found:
    """``excess``: by how much more is under way in the long run than at the best place."""

    cv: float
    places: int
    closed_form_excess: float
    simulation_excess: float
    random_excess: float


def judged(world: World, draw: random.Random) -> Found:
    cv, until_s = world.newcomer.cv, RECENT_S
    recent = [(c.gpus, c.calls(until_s, draw)) for c in world.there]
    # Of the newcomer both know what is said of it: its rate and length.
    expected = world.newcomer.calls(until_s, draw)
    cluster = LoadedCluster()
    for number, (gpus, calls) in enumerate(recent):
        busy = min(1.0, sum(work_s for _, work_s in calls) / until_s)
        cluster.put(str(number), Tenant(busy, ((1.0, gpus),)))

    def by_form(place: tuple[Key, ...]) -> float:
        return cluster.cost_of_adding(Tenant(world.newcomer.busy, ((1.0, place),)), 0.0)

    def by_simulation(place: tuple[Key, ...]) -> float:
        return mean_under_way([*recent, (place, expected)], until_s)

    long_run = [(c.gpus, c.calls(TRUTH_S, draw)) for c in world.there]
    own = world.newcomer.calls(TRUTH_S, draw)
    true = {place: mean_under_way([*long_run, (place, own)], TRUTH_S) for place in world.candidates}
    best = min(true.values())

    def excess(score: Callable[[tuple[Key, ...]], float]) -> float:
        return true[min(world.candidates, key=score)] / best - 1

    return Found(cv, len(true), excess(by_form), excess(by_simulation), statistics.fmean(true.values()) / best - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, default=200)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    print(
        "| times between requests | closed form | short simulation | any place | worlds |\n|---|--:|--:|--:|--:|"
    )
    for cv in (1.0, 2.0, 4.0):
        draw = random.Random(20261122)
        here = [judged(world(draw, cv), draw) for _ in range(options.worlds)]
        found += here
        cells = []
        for name in ("closed_form_excess", "simulation_excess", "random_excess"):
            each = [getattr(one, name) for one in here]
            sure = 1.96 * statistics.stdev(each) / math.sqrt(len(each))
            cells.append(f"{statistics.fmean(each):+.1%} ± {sure:.1%}, best in {sum(e == 0 for e in each)}")
        print(f"| CV {cv:g} | {' | '.join(cells)} | {len(here)} |", flush=True)
    if options.json:
        about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
        options.json.write_text(json.dumps(about | {"found": [asdict(one) for one in found]}))


if __name__ == "__main__":
    main()
