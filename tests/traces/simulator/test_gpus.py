"""Load and memory of one GPU, and what sharing it costs."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError
from fingerprint.gpu_sharing import GROUP_LOSS
from iserve.simulation.running import EngineBatcher
from tests.golden_words import Golden
from tests.traces.simulator.worlds import AsTold, cluster, deploy_all, placed_on, second_per_step, serve
from traces.request import Request
from traces.simulator.contention import ProcessorSharing, StageDemand, processor_sharing
from traces.simulator.gpus import Gpu
from traces.simulator.scenario import Policies, Scenario, Service
from traces.simulator.simulation import simulate


def _gpu() -> Gpu:
    return Gpu("gpu0", "node0", 0, 100)


def test_load_is_over_the_last_120_seconds() -> None:
    gpu = _gpu()
    gpu.start("a", 1.0, 10.0)
    gpu.stop("a", 40.0)
    assert gpu.load_fraction(40.0) == pytest.approx(30 / 40)  # nothing was before the beginning
    assert gpu.load_fraction(120.0) == pytest.approx(30 / 120)
    assert gpu.load_fraction(145.0) == pytest.approx(15 / 120)
    assert gpu.load_fraction(200.0) == pytest.approx(0.0)
    assert gpu.busy_s(200.0) == pytest.approx(30.0)


def test_busy_is_the_union_of_what_runs() -> None:
    gpu = _gpu()
    gpu.start("a", 1.0, 0.0)
    gpu.start("b", 1.0, 1.0)
    gpu.stop("a", 3.0)
    gpu.stop("b", 4.0)
    assert gpu.busy_s(10.0) == pytest.approx(4.0)


def test_a_stage_counts_its_own_steps_only() -> None:
    """Halves of two workers' steps, at moments that are not followed: 1 - 1/2 * 1/2."""
    gpu = _gpu()
    gpu.start("a", 0.5, 0.0)
    assert gpu.busy_s(2.0) == pytest.approx(1.0)
    gpu.start("b", 0.5, 2.0)
    assert gpu.busy_s(4.0) == pytest.approx(1.0 + 1.5)


@given(seed=st.integers(0, 2**32))
def test_load_is_within_a_sample_of_the_truth(seed: int) -> None:
    rng, gpu, now_s, spans = random.Random(seed), _gpu(), 0.0, []
    for _ in range(rng.randrange(1, 200)):
        start_s = now_s + rng.expovariate(rng.choice([10.0, 1.0, 0.05]))
        now_s = start_s + rng.expovariate(rng.choice([10.0, 1.0, 0.05]))
        gpu.start("a", 1.0, start_s)
        gpu.stop("a", now_s)
        spans.append((start_s, now_s))
    begin_s = max(0.0, now_s - 120)
    true_s = sum(max(0.0, end_s - max(start_s, begin_s)) for start_s, end_s in spans)
    # Within the sample that the window's beginning falls into, work counts as if it were even: 1 s at most, unless
    # nothing happened for longer.
    assert gpu.load_fraction(now_s) == pytest.approx(
        true_s / (now_s - begin_s), abs=1.01 / max(1.0, now_s - begin_s)
    )


def test_memory_is_never_promised_twice(golden: Golden) -> None:
    gpu = _gpu()
    gpu.take(60)
    with golden.raises("simulator-errors", ConfigError):
        gpu.take(41)
    gpu.give_back(60)
    gpu.take(100)
    assert (gpu.free_bytes, gpu.peak_bytes) == (0, 100)


@pytest.mark.parametrize(
    ("stages", "speed"),
    [
        pytest.param([(1.0, [0.0])], 1.0, id="alone"),
        pytest.param([(1.0, [1.0])], 1 / 2, id="two on one GPU"),
        pytest.param([(1.0, [2.0])], 1 / 3, id="three on one GPU"),
        pytest.param([(1.0, [0.0, 1.0])], 1 / 2, id="a TP group waits for its slowest GPU"),
        pytest.param([(0.5, [0.0]), (0.5, [1.0])], 1 / 1.5, id="the other stage of a pipeline is alone"),
        pytest.param([(0.5, [0.5]), (0.5, [0.5])], 1 / 1.5, id="two pipelines on the same GPUs"),
    ],
)
def test_processor_sharing(stages: list[tuple[float, list[float]]], speed: float) -> None:
    assert processor_sharing([StageDemand(*stage) for stage in stages]) == pytest.approx(speed)


@pytest.mark.parametrize(
    ("others", "slower"),
    [
        pytest.param(0.0, 1.0, id="co-tenants that are idle cost nothing"),
        pytest.param(1.0, 2.2, id="two busy engines, measured 2.16 to 2.24"),
        pytest.param(2.0, 3.3, id="three busy engines, measured 3.28 to 3.34"),
        pytest.param(0.5, 1.6, id="between, the loss is in proportion"),
    ],
)
def test_busy_engines_cost_each_1_1_k(others: float, slower: float) -> None:
    assert 1 / ProcessorSharing()([StageDemand(1.0, [others])]) == pytest.approx(slower)


@pytest.mark.parametrize(
    ("others", "slower"),
    [
        pytest.param([1.0, 0.0], 2.2, id="one other engine, on a GPU of the group"),
        pytest.param([2.0, 0.0], 3.3 * GROUP_LOSS, id="two"),
        pytest.param([3.0], 4.4 * GROUP_LOSS, id="three, on all alike"),
    ],
)
def test_a_tp_group_loses_more_next_to_two_others(others: list[float], slower: float) -> None:
    assert 1 / ProcessorSharing()([StageDemand(1.0, others, is_group=True)]) == pytest.approx(slower)


@pytest.mark.parametrize(("gpus", "slower"), [(("gpu0",), 3.3), (("gpu0", "gpu1"), 3.3 * GROUP_LOSS)])
def test_three_models_on_the_same_gpus(gpus: tuple[str, ...], slower: float) -> None:
    """A request of five steps of 1 s for each."""
    names = ("a", "b", "c")
    policies = Policies(
        deployer=AsTold(second_per_step(), dict.fromkeys(names, placed_on(*gpus))), make_batcher=EngineBatcher
    )
    scenario = Scenario(cluster=cluster(len(gpus)), actions=deploy_all(*names))
    result = simulate([Request(0.0, 1, 5, name) for name in names], scenario, policies)
    assert result.outcomes.last_token_s.tolist() == pytest.approx([5 * slower] * 3)


@pytest.mark.parametrize("factor", [0.9, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["overhead", "group_loss"])
def test_a_loss_is_a_factor_of_at_least_1(name: str, factor: float) -> None:
    with pytest.raises(ConfigError):
        ProcessorSharing(**{name: factor})


@pytest.mark.parametrize(
    ("service", "end_s"), [(Service.FCFS, 10.0), (Service.CONTINUOUS, 11.0), (Service.STEPPED, 11.0)]
)
def test_the_loss_is_of_engines_that_batch(service: Service, end_s: float) -> None:
    """Two requests of five steps of 1 s, of two models on one GPU."""
    asked = [Request(0.0, 1, 5, "a"), Request(0.0, 1, 5, "b")]
    result = serve(asked, second_per_step(1), service=service, actions=deploy_all("a", "b"))
    assert result.outcomes.last_token_s.tolist() == pytest.approx([end_s, end_s])


def test_uneven_stages_that_are_alone_go_at_full_speed_and_no_faster() -> None:
    """The shares of six layers over four stages add up to less than 1 in floating point."""
    shares = [2 / 6, 2 / 6, 1 / 6, 1 / 6]
    assert sum(shares) < 1
    assert processor_sharing([StageDemand(share, [0.0]) for share in shares]) == 1.0
