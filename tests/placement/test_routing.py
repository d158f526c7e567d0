"""Which replica takes a request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from placement.harvesting import spare_gpu
from placement.routing import DEFAULT_ROUTER, ROUTERS, make_router
from placement.types import ClusterSnapshot, GpuState


@dataclass(frozen=True)
class Load:
    num_running: int
    num_waiting: int = 0
    max_batch: int = 4


_LOADS = st.lists(st.builds(Load, st.integers(0, 4), st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=6)


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
        ("least-outstanding", [Load(3), Load(1), Load(1)], 1),
        ("least-outstanding", [Load(1, 5), Load(4, 1)], 1),
        ("busiest", [Load(1), Load(3), Load(4)], 1),
        ("busiest", [Load(3), Load(3)], 0),
        ("busiest", [Load(4, 2), Load(4, 1)], 1),
    ],
)
def test_choices_by_hand(name: str, loads: list[Load], expected: int) -> None:
    assert make_router(name).choose(loads, 0) == expected


def test_round_robin_takes_turns() -> None:
    assert [make_router("round-robin").choose([Load(0)] * 3, turn) for turn in range(5)] == [0, 1, 2, 0, 1]


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no routing policy 'x'; choose one of least-outstanding, round-robin"):
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
