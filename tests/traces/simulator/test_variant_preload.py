"""Simulated replicas that load registered variants before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from fingerprint.errors import ConfigError
from placement.variant_routing import make_variant_policy
from tests.golden_words import Golden
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.variant_worlds import WithSlots
from tests.traces.simulator.worlds import cluster, limits
from traces.request import Request
from traces.simulator.adapter_cost import AdapterCost
from traces.simulator.result import SimulationResult, VariantFigures
from traces.simulator.scenario import Deploy, Policies, Scenario
from traces.simulator.simulation import simulate
from traces.simulator.variant_fleet import VariantFleet

STEPS = linear_steps(limits(4, 200, 64), step_s=0.05, sequence_s=0.01, prompt_token_s=0.001)
VARIANTS = tuple(f"m/{index}" for index in range(1, 5))
READY_S, LOAD_S = 5.0, 0.3


def run(
    *asked: tuple[float, str], replicas: int = 1, load_s: float = LOAD_S, registered: tuple[str, ...] = VARIANTS
) -> tuple[SimulationResult, VariantFigures]:
    cost = AdapterCost(slots=2, max_loaded=4, load_s=load_s)
    scenario = Scenario(
        cluster=cluster(replicas, per_node=1),
        actions=(Deploy(at_s=0.0, name="m", model="m", replicas=replicas),),
        variants=dict.fromkeys(VARIANTS, "m"),
        registered=registered,
        startup_s=READY_S,
    )
    requests = [Request(at_s, 10, 2, model=name) for at_s, name in asked]
    policies = Policies(deployer=WithSlots(STEPS, cost), variant_policy=make_variant_policy())
    found = simulate(requests, scenario, policies)
    (deployment,) = found.deployments
    assert deployment.variants is not None
    return found, deployment.variants


def ttft_s(found: SimulationResult) -> list[float]:
    return (found.outcomes.first_token_s - found.outcomes.arrival_s).tolist()


@pytest.mark.parametrize("load_s", [LOAD_S, 0.0])
def test_an_idle_replica_fills_its_slots_in_order_from_when_it_is_ready(load_s: float) -> None:
    """The third registered variant, which has no slot, is loaded when it is asked for."""
    found, variants = run((7.0, "m/1"), (8.0, "m/2"), (9.0, "m/3"), load_s=load_s)
    alone_s = ttft_s(run((7.0, "m"))[0])[0]
    assert ttft_s(found) == pytest.approx([alone_s, alone_s, alone_s + load_s])
    assert (variants.loads, variants.hits, variants.evictions) == (3, 2, 0)


def test_a_request_waits_for_the_load_under_way_and_its_own_before_the_rest() -> None:
    """Ready at 5 s: the first variant until 5.3 s, then the one that is asked for."""
    found, variants = run((READY_S + 0.1, "m/4"), (9.0, "m/2"))
    alone_s = ttft_s(run((7.0, "m"))[0])[0]
    assert ttft_s(found) == pytest.approx([2 * LOAD_S - 0.1 + alone_s, alone_s + LOAD_S])
    assert variants.loads == 3, "the slots are full: the second registered variant is not loaded ahead"


def test_a_busy_replica_loads_nothing_ahead() -> None:
    """Requests of the base follow one another from when it is ready; else the second variant would be there."""
    base = [(READY_S + 0.04 * index, "m") for index in range(40)]
    _, busy = run(*sorted([*base, (6.0, "m/2")]))
    _, idle = run((6.0, "m/2"))
    assert (busy.loads, idle.loads) == (2, 2)
    assert busy.ttft_cold is not None
    assert busy.ttft_warm is None
    assert idle.ttft_cold is None


def test_replicas_share_what_they_load_ahead() -> None:
    found, variants = run(*((8.0 + index, name) for index, name in enumerate(VARIANTS)), replicas=2)
    alone_s = ttft_s(run((7.0, "m"))[0])[0]
    assert ttft_s(found) == pytest.approx([alone_s] * 4)
    assert (variants.loads, variants.hits) == (4, 4)


def test_without_registered_variants_nothing_is_loaded_ahead() -> None:
    _, variants = run((9.0, "m/1"), registered=())
    assert (variants.loads, variants.hits) == (1, 0)


def test_a_registered_name_that_is_no_variant_is_refused(golden: Golden) -> None:
    with golden.raises("simulator-errors", ConfigError):
        run((9.0, "m/1"), registered=("x",))


@dataclass(eq=False)
class Worker:
    outstanding: int = 0
    max_outstanding: int = 4
    last_turn: int = -1


@dataclass(eq=False)
class Asked:
    variant: str
    arrived_s: float


@dataclass
class Sends:
    """Sender whose loads end when the test says so."""

    loads: list[tuple[Any, str]] = field(default_factory=list)

    def choose_base(self, rooms: Sequence[Worker]) -> int:
        return 0

    def load(self, worker: Worker, variant: str, now_s: float) -> None:
        self.loads.append((worker, variant))

    def send(self, request: Any, worker: Worker, now_s: float) -> None: ...


def fleet_of(workers: Sequence[Worker], slots: int, *registered: str) -> tuple[VariantFleet[Any, Worker], Sends]:
    sends = Sends()
    fleet = VariantFleet[Any, Worker](make_variant_policy(), slots, slots, sends, registered)
    for worker in workers:
        fleet.enter(worker)
    return fleet, sends


def test_one_of_several_replicas_loads_nothing_ahead_at_any_time() -> None:
    workers = [Worker(), Worker(), Worker()]
    fleet, sends = fleet_of(workers, 2, *"abcdef")
    fleet.preload(workers[:2], 0.0)
    fleet.preload(workers[:2], 0.0)
    assert sends.loads == [(workers[0], "a")]
    fleet.preload(workers, 0.0)
    assert len({worker for worker, _ in sends.loads}) == len(sends.loads) == 2
    fleet.loaded(*sends.loads[0])
    fleet.preload(workers, 0.1)
    assert len({worker for worker, _ in sends.loads}) == len(sends.loads) == 3


def test_of_what_was_loaded_ahead_the_least_wanted_goes_first() -> None:
    worker = Worker()
    fleet, sends = fleet_of([worker], 2, "a", "b")
    for at_s in (0.0, 1.0):
        fleet.preload([worker], at_s)
        fleet.loaded(*sends.loads[-1])
    request = Asked("c", 2.0)
    assert list(fleet.serve([request], [worker], 2.0)) == [request]
    fleet.loaded(worker, "c")
    fleet.ended(worker, request)
    again = Asked("a", 3.0)
    fleet.serve([again], [worker], 3.0)
    assert [variant for _, variant in sends.loads] == ["a", "b", "c"], "a is there: b was evicted"
