"""Held share of GPUs, worked out by hand, and the cost under load."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.traces.simulator.worlds import (
    GPU_BYTES,
    AsTold,
    OnTheFirst,
    cluster,
    deploy_all,
    placed_on,
    second_per_step,
)
from traces.request import Request
from traces.simulator.held import HELD_WINDOW_S, HeldGpu, cost_under_load
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Action, Deployer, Policies, Profile, Remove, Scenario
from traces.simulator.simulation import simulate

ONE = second_per_step(1)


def run(
    requests: list[Request], actions: tuple[Action, ...], deployer: Deployer, *, num_gpus: int = 1
) -> SimulationResult:
    scenario = Scenario(cluster=cluster(num_gpus), actions=actions)
    return simulate(requests, scenario, Policies(deployer=deployer))


def of(result: SimulationResult, name: str) -> HeldGpu:
    (held,) = [held for held in result.held if held.deployment == name]
    return held


def test_time_counts_where_it_is_the_larger_share() -> None:
    """Ten seconds of steps, then nothing until the one step at 20 s: 11 s busy of 21 s, a tenth of the memory."""
    result = run([Request(0.0, 1, 10, "a"), Request(20.0, 1, 1, "a")], deploy_all("a"), OnTheFirst(ONE))
    held = of(result, "a")
    assert held.busy_s == pytest.approx(11.0)
    assert held.placed_s == pytest.approx(21.0)
    assert held.reserved_byte_s == pytest.approx(21 * 10)
    assert held.held_gpu_s == pytest.approx(11.0)


def test_bytes_count_where_they_are_the_larger_share() -> None:
    result = run(
        [Request(0.0, 1, 1, "a"), Request(20.0, 1, 1, "a")], deploy_all("a"), OnTheFirst(ONE, size_bytes=80)
    )
    held = of(result, "a")
    assert held.busy_s == pytest.approx(2.0)
    assert held.held_gpu_s == pytest.approx(0.8 * 21)


def test_the_larger_share_is_chosen_in_every_window() -> None:
    """Busy for all of the first 120 s, idle in the next: 120 GPU-seconds, then half of the last 120."""
    result = run(
        [Request(0.0, 1, 120, "a"), Request(239.0, 1, 1, "a")], deploy_all("a"), OnTheFirst(ONE, size_bytes=50)
    )
    held = of(result, "a")
    assert (held.busy_s, held.reserved_byte_s) == (pytest.approx(121.0), pytest.approx(240 * 50))
    assert held.held_gpu_s == pytest.approx(120.0 + 60.0)


def test_windows_in_which_nothing_changes_count_too() -> None:
    """A request of 600 s, from 60 s on: the first and the last window are half idle, four are busy throughout."""
    held = of(run([Request(60.0, 1, 600, "a")], deploy_all("a"), OnTheFirst(ONE, size_bytes=50)), "a")
    assert held.held_gpu_s == pytest.approx(60 + 4 * 120 + 60)
    assert held.busy_s == pytest.approx(600.0)


def test_workers_that_run_at_once_divide_the_gpu() -> None:
    """Two requests of five steps at once on one GPU: whatever sharing costs, each takes half of the busy time."""
    result = run([Request(0.0, 1, 5, "a"), Request(0.0, 1, 5, "b")], deploy_all("a", "b"), OnTheFirst(ONE))
    assert of(result, "a").busy_s == pytest.approx(result.end_s / 2)
    assert of(result, "b").busy_s == pytest.approx(result.end_s / 2)
    assert result.gpus[0].busy_fraction == pytest.approx(1.0)


def test_a_profile_takes_time_that_no_deployment_is_charged_with() -> None:
    actions = (*deploy_all("a"), Profile(at_s=0.0, name="profile", memory_bytes=10, work_s=10.0))
    scenario = Scenario(cluster=cluster(1), actions=actions)
    policies = Policies(deployer=OnTheFirst(ONE), harvest=lambda snapshot, _: snapshot.gpus[0])
    result = simulate([Request(0.0, 1, 10, "a")], scenario, policies)
    assert [held.deployment for held in result.held] == ["a"]
    assert of(result, "a").busy_s == pytest.approx(result.end_s / 2)


def test_what_was_taken_down_holds_nothing_any_more() -> None:
    actions = (*deploy_all("a"), Remove(at_s=30.0, name="a"), *deploy_all("b"))
    result = run([Request(0.0, 1, 1, "a"), Request(49.0, 1, 1, "b")], actions, OnTheFirst(ONE, size_bytes=40))
    assert (of(result, "a").placed_s, of(result, "b").placed_s) == (pytest.approx(30.0), pytest.approx(50.0))
    assert of(result, "a").reserved_byte_s == pytest.approx(30 * 40)


def test_a_tensor_parallel_group_holds_each_of_its_gpus() -> None:
    places = {"a": placed_on("gpu0", "gpu1", size_bytes=20)}
    result = run([Request(0.0, 1, 7, "a")], deploy_all("a"), AsTold(ONE, places), num_gpus=3)
    assert [(held.device_id, held.busy_s) for held in result.held] == [("gpu0", 7.0), ("gpu1", 7.0)]


_ASKED = st.lists(
    st.tuples(st.floats(0, 100), st.integers(1, 5), st.integers(1, 60), st.sampled_from("abc")), min_size=1
)


@settings(max_examples=100, deadline=None)
@given(asked=_ASKED, size_bytes=st.integers(1, GPU_BYTES // 3))
def test_deployments_together_take_the_busy_time_of_the_gpu(
    asked: list[tuple[float, int, int, str]], size_bytes: int
) -> None:
    requests = [Request(*each) for each in sorted(asked)]
    result = run(requests, deploy_all(*"abc"), OnTheFirst(ONE, size_bytes=size_bytes))
    busy_s = sum(held.busy_s for held in result.held)
    assert busy_s == pytest.approx(result.gpus[0].busy_fraction * result.end_s)
    for held in result.held:
        least_s = max(held.busy_s, held.reserved_byte_s / GPU_BYTES)
        assert held.reserved_byte_s == pytest.approx(size_bytes * result.end_s)
        assert least_s - 1e-6 <= held.held_gpu_s <= held.busy_s + held.reserved_byte_s / GPU_BYTES + 1e-6
        if result.end_s <= HELD_WINDOW_S:
            assert held.held_gpu_s == pytest.approx(least_s)


def test_the_cost_of_a_request() -> None:
    """1,800 GPU x s at 4 dollars an hour are 2 dollars; 10 requests in a GPU-hour are 10 an hour."""
    held = [_held(1200.0), _held(600.0)]
    cost = cost_under_load(held, 10, placed_gpu_s=3600.0, usd_per_gpu_hour=4.0)
    assert (cost.gpu_s, cost.gpu_s_per_request) == (1800.0, 180.0)
    assert (cost.usd, cost.usd_per_request, cost.requests_per_gpu_hour) == (2.0, 0.2, 10.0)


def test_without_a_request_or_a_price_there_is_no_cost_of_one() -> None:
    cost = cost_under_load([_held(10.0)], 0, placed_gpu_s=10.0)
    assert (cost.gpu_s_per_request, cost.usd, cost.usd_per_request) == (None, None, None)
    assert cost.requests_per_gpu_hour == 0.0
    assert cost_under_load([], 0, placed_gpu_s=0.0).requests_per_gpu_hour is None


def _held(gpu_s: float) -> HeldGpu:
    return HeldGpu(
        deployment="a",
        node_id="node0",
        device_id="gpu0",
        placed_s=gpu_s,
        busy_s=gpu_s,
        reserved_byte_s=0.0,
        held_gpu_s=gpu_s,
    )
