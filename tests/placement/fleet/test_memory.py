"""KV cache of the replicas of a fleet plan."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement.fleet.memory import kv_room
from placement.fleet.types import Fleet, FleetDeployment, FleetPlan, FleetReplica
from tests.placement.fleet.fleets import GIB, fleet, gpus, option


def on_one_gpu(one: Fleet) -> FleetPlan:
    return FleetPlan(tuple(FleetReplica(number, 0, (0,)) for number in range(len(one.deployments))))


def test_equal_replicas_share_what_is_free_equally() -> None:
    one = fleet(2, 1)
    room = kv_room(one, on_one_gpu(one), all_free=True)
    # 76 GiB usable, 20 GiB of each are fixed
    assert room is not None
    assert room.kv_tokens == pytest.approx([18 * GIB / 100_000] * 2)


def test_what_one_does_not_need_goes_to_the_other() -> None:
    one = fleet(2, 1)
    room = kv_room(one, on_one_gpu(one), wanted_tokens=[4000, 1e9])
    assert room is not None
    assert room.kv_tokens[0] == 4000
    assert room.kv_tokens[1] == pytest.approx((36 * GIB - 4000 * 100_000) / 100_000)


def test_four_that_do_not_fit_on_one_gpu_are_refused() -> None:
    one = fleet(4, 1)
    assert kv_room(one, on_one_gpu(one)) is None


def test_a_request_of_the_longest_kind_must_fit() -> None:
    one = fleet(1, 1, longest_tokens=610_000)  # 61 GB of KV next to 20 GiB, of 76 GiB (81.6 GB)
    assert kv_room(one, on_one_gpu(one)) is None


def test_a_running_replica_keeps_what_it_has_and_takes_nothing_more() -> None:
    runs = FleetReplica(0, 0, (0,), kv_tokens=1234.0)
    one = Fleet(
        (
            FleetDeployment(name="old", options=(option(),), fixed=(runs,)),
            FleetDeployment(name="new", options=(option(),)),
        ),
        gpus(1),
    )
    room = kv_room(one, FleetPlan((runs, FleetReplica(1, 0, (0,)))), all_free=True)
    assert room is not None
    assert room.kv_tokens == pytest.approx([1234.0, 56 * GIB / 100_000])


def test_no_more_is_taken_than_is_of_use() -> None:
    one = fleet(1, 1, kv_bytes_per_token=10_000)
    room = kv_room(one, on_one_gpu(one))
    assert room is not None
    assert room.kv_tokens == (option().useful_kv_tokens,)


@given(st.integers(1, 3), st.floats(10, 24), st.floats(1_000, 200_000))
def test_memory_is_never_promised_twice(models: int, fixed_gib: float, per_token: float) -> None:
    one = fleet(models, 1, fixed_gib=fixed_gib, kv_bytes_per_token=per_token)
    plan = on_one_gpu(one)
    for all_free in (False, True):
        room = kv_room(one, plan, all_free=all_free)
        if room is not None:
            taken = sum(one.option(r).bytes_per_gpu(t) for r, t in zip(plan.replicas, room.kv_tokens, strict=True))
            assert taken <= one.gpus[0].usable_bytes + models


def test_unlike_requests_share_what_the_longest_of_each_leave() -> None:
    """Equal shares of 36 GiB would not hold 250,000 tokens (25 GB)."""
    options = (option(longest_tokens=10_000), option(longest_tokens=250_000))
    one = Fleet(tuple(FleetDeployment(name=str(n), options=(o,)) for n, o in enumerate(options)), gpus(1))
    room = kv_room(one, on_one_gpu(one), all_free=True)
    left_bytes = 0.95 * 80 * GIB - 40 * GIB - 260_000 * 100_000
    assert room is not None
    assert room.kv_tokens == pytest.approx([10_000 + left_bytes / 2 / 1e5, 250_000 + left_bytes / 2 / 1e5])
