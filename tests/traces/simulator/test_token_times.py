"""Gaps between an answer's tokens: against the engine's own scheduler, by laws, and by hand."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, PolicyError
from iserve.simulation.running import EngineBatcher
from placement.types import ClusterSnapshot
from tests.golden_words import Golden
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.test_continuous import _ASKED, _curved, _requests
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, limits, placed_on
from traces.outcomes import Outcomes
from traces.request import Request
from traces.simulator.scenario import Deployed, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel

LOADS = given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    max_batch=st.integers(1, 6),
    more_tokens=st.integers(0, 40),
    pace=st.sampled_from([0.05, 0.3, 1.0]),
)


def served(
    requests: list[Request], steps: StepModel, service: Service = Service.CONTINUOUS, *, prefix_cache: bool = False
) -> Outcomes:
    scenario = Scenario(
        cluster=cluster(),
        actions=deploy_all(""),
        service=service,
        most_waiting=10**9,
        token_times=True,
        prefix_cache=prefix_cache,
    )
    return simulate(requests, scenario, Policies(deployer=OnTheFirst(steps), make_batcher=EngineBatcher)).outcomes


def gaps_of(outcomes: Outcomes) -> list[list[float]]:
    assert outcomes.num_gaps is not None
    return [part.tolist() for part in np.split(outcomes.gaps_s, np.cumsum(outcomes.num_gaps)[:-1])]


def assert_laws(outcomes: Outcomes) -> None:
    """Every token but the first has a gap, and the gaps of an answer are its E2E less its TTFT."""
    assert outcomes.completed.all()
    assert outcomes.num_gaps is not None
    assert outcomes.num_gaps.tolist() == (outcomes.output_tokens - 1).tolist()
    assert (outcomes.gaps_s > 0).all()
    sums_s = [sum(gaps) for gaps in gaps_of(outcomes)]
    np.testing.assert_allclose(sums_s, outcomes.e2e_s - outcomes.ttft_s, rtol=1e-9, atol=1e-9)


@settings(max_examples=150, deadline=None)
@LOADS
def test_gaps_are_those_of_the_scheduler_step_by_step(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    steps = _curved(limits(max_batch, 100, max_batch + more_tokens), pace)
    fast, true = (served(_requests(asked), steps, s) for s in (Service.CONTINUOUS, Service.STEPPED))
    assert_laws(fast)
    assert fast.num_gaps is not None
    assert true.num_gaps is not None
    assert fast.num_gaps.tolist() == true.num_gaps.tolist()
    np.testing.assert_allclose(fast.gaps_s, true.gaps_s, rtol=1e-7, atol=1e-9)


@settings(max_examples=150, deadline=None)
@LOADS
def test_the_laws_hold_where_sequences_are_preempted(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    bounds = limits(max_batch, 100, max_batch + more_tokens)
    steps = _curved(replace(bounds, kv_tokens=110, preempts=True), pace)
    assert_laws(served(_requests(asked), steps))


@settings(max_examples=50, deadline=None)
@LOADS
def test_looking_at_tokens_changes_no_time(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    steps = _curved(limits(max_batch, 100, max_batch + more_tokens), pace)
    seen, plain = (
        simulate(
            _requests(asked),
            Scenario(cluster=cluster(), actions=deploy_all(""), most_waiting=10**9, token_times=looks),
            Policies(deployer=OnTheFirst(steps)),
        ).outcomes
        for looks in (True, False)
    )
    assert plain.num_gaps is None
    assert seen.first_token_s.tolist() == plain.first_token_s.tolist()
    assert seen.last_token_s.tolist() == plain.last_token_s.tolist()


def test_the_chunks_of_a_prompt_make_the_gaps_of_another_answer_longer() -> None:
    """Steps take 1 s and 0.01 s for each token next to a prompt; 250 tokens arrive in the second step.

    They go in chunks of 99, 99 and 52 with the token that decodes.
    """
    steps = linear_steps(limits(2, 4096, 100), step_s=1.0, prompt_token_s=0.01)
    found = served([Request(0.0, 10, 6), Request(1.5, 250, 1)], steps)
    first, second = gaps_of(found)
    assert first == pytest.approx([1.0, 2.0, 2.0, 1.53, 1.0])
    assert second == []  # a single token has no gap


def test_a_preempted_answer_has_one_long_gap() -> None:
    """Two of 10 tokens and 8 of answer meet in 26 tokens of KV, as in test_preempting; the first goes on alone."""
    bounds = replace(limits(4), kv_tokens=26, preempts=True)
    first, second = gaps_of(served([Request(0.0, 10, 8), Request(0.0, 10, 8)], linear_steps(bounds, step_s=1.0)))
    assert first == [1.0] * 7
    assert sorted(second) == [1.0] * 6 + [max(second)]
    assert max(second) > 1.0


def test_a_cached_prefix_is_not_computed_again() -> None:
    """1,024 of 1,124 tokens are there for the second request, 512 for the third, whose second block differs."""
    steps = linear_steps(limits(4, 4096, 2048), step_s=1.0, prompt_token_s=0.001)
    blocks = [(1, 2), (1, 2), (1, 3), ()]
    requests = [Request(10.0 * i, 1124, 1, prefix_blocks=each) for i, each in enumerate(blocks)]
    cold, cached = (served(requests, steps, prefix_cache=keeps).ttft_s.tolist() for keeps in (False, True))
    assert cold == pytest.approx([2.124] * 4)
    assert cached == pytest.approx([2.124, 1.1, 1.612, 2.124])


def test_a_prompt_that_is_cached_whole_has_one_token_computed() -> None:
    steps = linear_steps(limits(4, 4096, 2048), step_s=1.0, prompt_token_s=0.001)
    requests = [Request(10.0 * i, 1024, 2, prefix_blocks=(1, 2)) for i in range(2)]
    found = served(requests, steps, prefix_cache=True)
    assert found.ttft_s.tolist() == pytest.approx([2.024, 1.001])
    assert_laws(found)


@settings(max_examples=100, deadline=None)
@LOADS
def test_a_cache_without_a_repeated_block_changes_nothing(
    asked: list[tuple[float, int, int]], max_batch: int, more_tokens: int, pace: float
) -> None:
    steps = _curved(limits(max_batch, 100, max_batch + more_tokens), pace)
    requests = [replace(r, prefix_blocks=(row,)) for row, r in enumerate(_requests(asked))]
    with_it, without = (served(requests, steps, prefix_cache=keeps) for keeps in (True, False))
    assert with_it.last_token_s.tolist() == without.last_token_s.tolist()


@dataclass(frozen=True)
class Pipeline:
    """A replica of two stages on two GPUs."""

    keeps_full: bool
    name: str = "pipeline"

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed:
        steps = linear_steps(limits(), step_s=1.0)
        return Deployed(
            placement=placed_on("gpu0", "gpu1", pp=2), steps=steps, what="two", pipelined=self.keeps_full
        )


@pytest.mark.parametrize("token_times", [True, False], ids=["tokens", "prefixes"])
def test_what_is_not_simulated_is_refused(golden: Golden, token_times: bool) -> None:
    with golden.raises("simulator-errors", ConfigError):
        Scenario(
            cluster=cluster(),
            actions=deploy_all(""),
            service=Service.FCFS,
            token_times=token_times,
            prefix_cache=not token_times,
        )
    scenario = Scenario(
        cluster=cluster(2), actions=deploy_all(""), token_times=token_times, prefix_cache=not token_times
    )
    requests = [Request(0.0, 10, 2)]
    one_at_a_time = simulate(requests, scenario, Policies(deployer=Pipeline(keeps_full=False)))
    assert one_at_a_time.outcomes.completed.all()
    with golden.raises("simulator-errors", PolicyError):
        simulate(requests, scenario, Policies(deployer=Pipeline(keeps_full=True)))
