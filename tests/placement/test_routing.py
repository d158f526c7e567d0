"""Choice of the replica that takes a request."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from iserve.gateway.dispatch import Deployment
from iserve.route_table import Route, WorkerTarget
from placement.harvesting import spare_gpu
from placement.routing import DEFAULT_ROUTER, ROUTERS, make_router
from placement.types import ClusterSnapshot, GpuState
from tests.golden_words import Golden


@dataclass(frozen=True)
class Load:
    outstanding: int
    last_turn: int = -1
    max_batch: int = 4


_LOADS = st.lists(
    st.builds(Load, st.integers(0, 9), st.integers(-1, 9), st.integers(1, 4)), min_size=1, max_size=6
)


@given(replicas=_LOADS, turn=st.integers(0, 100), name=st.sampled_from(sorted(ROUTERS)))
def test_every_router_chooses_one_that_is_there_and_the_same_again(
    replicas: list[Load], turn: int, name: str
) -> None:
    router = make_router(name)
    assert router.name == name
    chosen = router.choose(replicas, turn)
    assert 0 <= chosen < len(replicas)
    assert router.choose(replicas, turn) == chosen


@pytest.mark.parametrize(
    ("name", "loads", "expected"),
    [
        ("least-outstanding", [Load(3), Load(1, 7), Load(1, 5)], 2),
        ("least-outstanding", [Load(6), Load(5, 9)], 1),
        ("busiest", [Load(1), Load(3), Load(4)], 1),
        ("busiest", [Load(3), Load(3)], 0),
        ("busiest", [Load(6), Load(5)], 1),
        ("round-robin", [Load(0, 8), Load(9, 7), Load(0, 9)], 1),
    ],
)
def test_choices_by_hand(name: str, loads: list[Load], expected: int) -> None:
    assert make_router(name).choose(loads, 10) == expected


@given(seed=st.integers(0, 2**32), replicas=st.integers(1, 4), room=st.integers(1, 3))
def test_least_outstanding_is_the_gateways_rule(seed: int, replicas: int, room: int) -> None:
    """The gateway's own dispatcher chooses the same replica, while requests arrive and end at random."""
    targets = tuple(
        WorkerTarget(worker_id=str(i), url=str(i), ready=True, max_outstanding=room) for i in range(replicas)
    )
    gateway = Deployment(
        Route(name="a", model="a", created=0, max_context_tokens=1, workers=targets), max_queue=99, max_wait_s=1.0
    )
    asyncio.run(_alike(gateway, targets, random.Random(seed), room))


async def _alike(gateway: Deployment, targets: tuple[WorkerTarget, ...], rng: random.Random, room: int) -> None:
    outstanding, last_turn = [0] * len(targets), [-1] * len(targets)
    for turn in range(40):
        busy = [i for i, count in enumerate(outstanding) if count]
        roomy = [i for i, count in enumerate(outstanding) if count < room]
        if busy and (not roomy or rng.random() < 0.4):
            done = rng.choice(busy)
            outstanding[done] -= 1
            gateway.release(targets[done])
            continue
        loads = [Load(outstanding[i], last_turn[i]) for i in roomy]
        chosen = roomy[make_router().choose(loads, turn)]
        assert await gateway.acquire(turn) == targets[chosen]
        outstanding[chosen] += 1
        last_turn[chosen] = turn


def test_unknown_names_are_refused_with_those_there_are(golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        make_router("x")
    assert make_router().name == DEFAULT_ROUTER


def _gpu(index: int, free_bytes: int, load: float) -> GpuState:
    return GpuState(
        device_id=f"g{index}",
        node_id="n",
        gpu_index=index,
        total_bytes=100,
        free_bytes=free_bytes,
        load_fraction=load,
    )


def test_a_profile_goes_to_the_quietest_gpu_with_room() -> None:
    snapshot = ClusterSnapshot((_gpu(0, 80, 0.9), _gpu(1, 50, 0.1), _gpu(2, 90, 0.5)))
    assert [spare_gpu(snapshot, need) and spare_gpu(snapshot, need).gpu_index for need in (45, 46, 81)] == [
        1,
        2,
        2,
    ]
    assert spare_gpu(snapshot, 82) is None  # nine tenths of what is free may be used
