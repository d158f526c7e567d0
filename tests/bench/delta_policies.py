"""Deltas at one worker: how many run at once, and DeltaZip's order of the queue against ours, in replays.

Run: ``python -m tests.bench.delta_policies [--seeds N] [--requests N] [--load-s S] [--out FILE]``.

One worker, 32 deltas by Zipf's law, answers of 350 tokens on average (service times exponential), prompts of 256.
Steps are Llama-3.1-8B's on an H200 and vLLM 0.33, with what int2 deltas add as their kernels were timed alone
(``fingerprint.estimators.delta_slots``; decision 47): no engine has run them. A delta that takes a slot is copied
from the host's memory first, ``COPY_S`` at 50 GB/s, next to the steps; neither that nor a resumed request's copy
was measured. ``--load-s`` is another duration, such as the 2 s of a measured load from disk. Batches have up to
64 rows.

First part: a closed loop, our order, tokens/s by the number N of slots (in brackets what ``planner.delta_slots``
expects), and the N that ``planner.delta_slots`` takes from the step times alone. Second part: as many slots as
memory may leave, fewer than are asked for; Poisson arrivals at a share of what DeltaZip's order completes with
them in a closed loop of 64, each policy with the same requests. *Closed* is our order as it was: past the bound
none passes.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from fingerprint.estimators.delta_slots import MEASURED_DELTA_BYTES, added_delta_step_s, delta_prompt_s
from placement.variant_routing import (
    DeltaZip,
    FirstComeFirstServed,
    LeastLoaded,
    PreemptingDeltaZip,
    VariantPolicy,
)
from planner.adapter_slots import VariantLoad
from planner.delta_slots import StepSlots, flow_with_slots, slots_by_step_time
from traces.simulator.variants import VariantArrival, VariantWorkers, replay_variants

DELTAS, ROWS, INPUT, OUTPUT = 32, 64, 256, 350
SKEWS, CLIENTS, NUMBERS = (1.0, 1.5, 4.0), (16, 32, 64, 128), (2, 4, 8, 16, 32)
SCARCE, LOADS = ((1.0, 8), (1.5, 8), (4.0, 2)), (0.6, 0.9)  # exponent and slots
COPY_S = MEASURED_DELTA_BYTES / 50e9
RESUME_S = 2 * 600 * 131e3 / 50e9  # 600 tokens of KV cache out and in again
_ALONE_S, _ROW_S, _PROMPT_S = 4.87e-3, (5.54e-3 - 4.87e-3) / 31, 10.5e-3  # as ``tests.bench.variant_routing``
_WARM_UP = 0.1


def step_s(rows: float, deltas: float) -> float:
    """Return a step of ``rows`` sequences, with their share of the prompts that are read meanwhile."""
    prompt_s = (_PROMPT_S + delta_prompt_s(MEASURED_DELTA_BYTES, INPUT)) / OUTPUT
    return (
        _ALONE_S + _ROW_S * (rows - 1) + rows * prompt_s + added_delta_step_s(MEASURED_DELTA_BYTES, rows, deltas)
    )


class DeltaSteps:
    """Slowdown of a worker's requests (``traces.simulator.variants.StepSlowdown``)."""

    @staticmethod
    @functools.cache
    def slowdown(requests: int, variants: int) -> float:
        return step_s(requests, variants) / step_s(1, 1)


@dataclass(frozen=True, slots=True)
class Closed(LeastLoaded):
    """Ours before decision 49: no request is admitted before one that has waited for the bound."""

    is_strict: ClassVar[bool] = True


POLICIES: tuple[tuple[str, VariantPolicy, float], ...] = (
    ("ours", LeastLoaded(), 0.0),
    ("ours, closed", Closed(), 0.0),
    ("deltazip", DeltaZip(), 0.0),
    ("deltazip, preempting", PreemptingDeltaZip(), RESUME_S),
    ("the same, resumed in no time", PreemptingDeltaZip(), 0.0),
    ("fcfs", FirstComeFirstServed(), 0.0),
)


def workers(slots: int, resume_s: float = 0.0, load_s: float = COPY_S) -> VariantWorkers:
    return VariantWorkers(
        num_workers=1,
        slots=slots,
        max_loaded=slots,
        max_outstanding=ROWS,
        variant_bytes=MEASURED_DELTA_BYTES,
        load_bytes_per_s=MEASURED_DELTA_BYTES / load_s,
        step=DeltaSteps(),
        resume_s=resume_s,
    )


def arrivals(seed: int, skew: float, rate_per_s: float, requests: int) -> list[VariantArrival]:
    rng = np.random.default_rng(seed)
    weights = np.arange(1.0, DELTAS + 1) ** -skew
    at_s = np.cumsum(rng.exponential(1 / rate_per_s, requests))
    drawn = rng.choice(DELTAS, requests, p=weights / weights.sum())
    service_s = rng.exponential(OUTPUT * step_s(1, 1), requests)
    return [
        VariantArrival(arrived_s=float(at), variant=f"d{one}", service_s=float(service))
        for at, one, service in zip(at_s, drawn, service_s, strict=True)
    ]


def chosen(skew: float, clients: int) -> StepSlots:
    return slots_by_step_time(VariantLoad(DELTAS, skew), clients, step_s, steps=OUTPUT, max_rows=ROWS)


def expected(skew: float, clients: int, slots: int) -> StepSlots:
    return flow_with_slots(VariantLoad(DELTAS, skew), clients, slots, step_s, steps=OUTPUT, max_rows=ROWS)


@functools.cache
def completed_per_s(
    skew: float, clients: int, slots: int, requests: int, seeds: int, policy: VariantPolicy, load_s: float
) -> float:
    """Return the requests that a closed loop completes each second, mean over the seeds."""
    found = [
        requests
        / replay_variants(
            arrivals(seed, skew, 1.0, requests), workers(slots, 0.0, load_s), policy, clients=clients
        ).ended_s
        for seed in range(seeds)
    ]
    return float(np.mean(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """Closed loop by the number of slots."""

    skew: float
    clients: int
    tokens_per_s: dict[int, float]
    expected_tokens_per_s: dict[int, float]
    chosen: int

    @property
    def best(self) -> int:
        return max(self.tokens_per_s, key=lambda number: self.tokens_per_s[number])

    @property
    def of_best(self) -> float:
        return self.tokens_per_s[self.chosen] / self.tokens_per_s[self.best]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Policy under Poisson arrivals: means over the seeds."""

    skew: float
    load: float
    slots: int
    policy: str
    mean_s: float
    p95_s: float
    p99_s: float
    waited_p99_s: float
    loads: float
    preemptions: float


def numbers(skew: float, clients: int, requests: int, seeds: int, load_s: float) -> Numbers:
    return Numbers(
        skew=skew,
        clients=clients,
        tokens_per_s={
            one: OUTPUT * completed_per_s(skew, clients, one, requests, seeds, LeastLoaded(), load_s)
            for one in NUMBERS
        },
        expected_tokens_per_s={one: expected(skew, clients, one).rows_per_s for one in NUMBERS},
        chosen=chosen(skew, clients).slots,
    )


def cells(skew: float, load: float, slots: int, requests: int, seeds: int, load_s: float) -> Iterable[Cell]:
    rate_per_s = load * completed_per_s(skew, ROWS, slots, requests, seeds, DeltaZip(), load_s)
    for name, policy, resume_s in POLICIES:
        rows = []
        for seed in range(seeds):
            found = replay_variants(
                arrivals(seed, skew, rate_per_s, requests), workers(slots, resume_s, load_s), policy
            )
            kept = slice(int(_WARM_UP * requests), None)
            e2e_s, waited_s = np.array(found.latency_s[kept]), np.array(found.waiting_s[kept])
            p95_s, p99_s = np.quantile(e2e_s, (0.95, 0.99))
            rows.append((e2e_s.mean(), p95_s, p99_s, np.quantile(waited_s, 0.99), found.loads, found.preemptions))
        mean, p95, p99, waited, loads, preemptions = (float(one) for one in np.mean(rows, axis=0))
        yield Cell(
            skew=skew,
            load=load,
            slots=slots,
            policy=name,
            mean_s=mean,
            p95_s=p95,
            p99_s=p99,
            waited_p99_s=waited,
            loads=loads,
            preemptions=preemptions,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--load-s", type=float, default=COPY_S, help="of a delta into its slot, in seconds")
    parser.add_argument("--out", type=Path, help="a .json.gz file with all figures")
    args = parser.parse_args(arguments)
    found = [
        numbers(skew, clients, args.requests, args.seeds, args.load_s) for skew in SKEWS for clients in CLIENTS
    ]
    heads = (f"N = {number}" for number in NUMBERS)
    print("| Zipf | requests at once | " + " | ".join(heads) + " | chosen | of the best |")
    print("|---" * (4 + len(NUMBERS)) + "|")
    for one in found:
        figures = (f"{one.tokens_per_s[n]:,.0f} ({one.expected_tokens_per_s[n]:,.0f})" for n in NUMBERS)
        row = " | ".join(figures)
        print(f"| {one.skew:g} | {one.clients} | {row} | {one.chosen} | {one.of_best:.0%} |", flush=True)
    print("\n| Zipf, slots | load | policy | mean, P95, P99 of E2E | P99 of the wait | copies | preempted |")
    print("|---" * 7 + "|")
    played = []
    for skew, slots in SCARCE:
        for load in LOADS:
            for cell in cells(skew, load, slots, args.requests, args.seeds, args.load_s):
                played.append(cell)
                e2e = f"{cell.mean_s:.2f}, {cell.p95_s:.2f}, {cell.p99_s:.2f} s"
                print(
                    f"| {skew:g}, {slots} | {load:.0%} | {cell.policy} | {e2e} | {cell.waited_p99_s:.2f} s | "
                    f"{cell.loads:.0f} | {cell.preemptions:.0f} |",
                    flush=True,
                )
    if args.out is not None:
        document = {"numbers": [asdict(one) for one in found], "cells": [asdict(one) for one in played]}
        args.out.write_bytes(
            gzip.compress(
                json.dumps(
                    document | {"seeds": args.seeds, "requests": args.requests, "load_s": args.load_s}
                ).encode(),
                mtime=0,
            )
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
