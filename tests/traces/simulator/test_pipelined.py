"""A pipeline with a batch in flight per stage: against the same stage by stage, and what must hold in any case."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.types import ClusterSnapshot, Placement, StagePlacement
from tests.traces.simulator.linear_steps import linear_steps
from tests.traces.simulator.pipeline_reference import flow_shop
from tests.traces.simulator.test_continuous import _ASKED, _assert_same, _curved, _requests
from tests.traces.simulator.worlds import OnTheFirst, cluster, deploy_all, limits, serve
from traces.outcomes import Failure
from traces.request import Request
from traces.simulator import worker_kinds
from traces.simulator.cluster import Cluster
from traces.simulator.contention import processor_sharing
from traces.simulator.pipelined import PipelinedWorker, UnbatchedPipeline
from traces.simulator.requests import Requests
from traces.simulator.result import SimulationResult
from traces.simulator.scenario import Action, Deployed, NodeFails, NodeReturns, Policies, Scenario, Service
from traces.simulator.simulation import simulate
from traces.simulator.step_model import StepModel


class Pipeline(OnTheFirst):
    """Every model on the same GPUs, so many layers on each."""

    def __init__(self, steps: StepModel, layers: tuple[int, ...], *, pipelined: bool) -> None:
        super().__init__(steps)
        self.layers, self.pipelined = layers, pipelined

    def __call__(self, model: str, snapshot: ClusterSnapshot) -> Deployed:
        return Deployed(placement=staged(self.layers), steps=self.steps, what=model, pipelined=self.pipelined)


def staged(layers: tuple[int, ...]) -> Placement:
    return Placement(
        tuple(
            StagePlacement(
                node_id="node0",
                device_ids=(f"gpu{i}",),
                first_layer=sum(layers[:i]),
                num_layers=n,
                bytes_per_gpu=1,
            )
            for i, n in enumerate(layers)
        )
    )


def run(
    requests: list[Request],
    steps: StepModel,
    layers: tuple[int, ...],
    *,
    pipelined: bool = True,
    actions: tuple[Action, ...] | None = None,
    service: Service = Service.CONTINUOUS,
) -> SimulationResult:
    scenario = Scenario(
        cluster=cluster(len(layers)),
        actions=deploy_all("") if actions is None else actions,
        service=service,
        most_waiting=10**9,
        outstanding_per_slot=10**6,
    )
    deployer = Pipeline(steps, layers, pipelined=pipelined)
    return simulate(requests, scenario, Policies(deployer=deployer, contention=processor_sharing))


# By hand


def test_a_second_request_enters_as_soon_as_the_first_stage_is_free() -> None:
    """Steps of 1 s on two stages hold 5 tokens: the second prompt enters half a second behind the first."""
    steps = linear_steps(limits(4, 100, 5), step_s=1.0)
    outcomes = run([Request(0.0, 5, 3), Request(0.0, 5, 3), Request(0.2, 4, 1)], steps, (4, 4)).outcomes
    assert outcomes.first_token_s.tolist() == pytest.approx([1.0, 1.5, 2.0])  # the third joins the first's batch
    assert outcomes.last_token_s.tolist() == pytest.approx([3.0, 3.5, 2.0])


def test_who_decodes_does_not_overtake_a_long_prompt() -> None:
    """The second's prompt takes 5 s; the first, a step of 1 s, gets one token in that time."""
    steps = linear_steps(limits(4, 100, 100), step_s=1.0, prompt_token_s=0.1)
    outcomes = run([Request(0.0, 1, 13), Request(1.1 + 2, 40, 1)], steps, (4, 4)).outcomes
    assert outcomes.first_token_s.tolist() == pytest.approx([1.1, 8.1])
    assert outcomes.last_token_s[0] == pytest.approx(1.1 + 12 + 4)


def test_the_busiest_stage_bounds_what_passes() -> None:
    """Five of eight layers on one GPU: two steps of 1 s there take 1.25 s, in which both batches get a token."""
    steps = linear_steps(limits(2, 5000, 2), step_s=1.0)
    result = run([Request(0.0, 2, 1000), Request(0.0, 2, 1000)], steps, (5, 3))
    assert result.end_s == pytest.approx(1250, abs=2)
    assert [gpu.busy_fraction for gpu in result.gpus] == pytest.approx([1.0, 0.6], abs=2e-3)


def test_others_on_the_gpus_slow_all_of_it() -> None:
    """Two pipelines with one request each: each asks for half of either GPU's time, so a step takes 1.5 s."""
    steps = linear_steps(limits(2, 5000, 100), step_s=1.0)
    asked = [Request(0.0, 1, 100, model="a"), Request(0.0, 1, 100, model="b")]
    outcomes = run(asked, steps, (4, 4), actions=deploy_all("a", "b")).outcomes
    assert outcomes.last_token_s.tolist() == pytest.approx([150.0, 150.0])


def unbatched(
    requests: list[Request], steps: StepModel, layers: tuple[int, ...], **more: bool
) -> SimulationResult:
    return run(requests, steps, layers, service=Service.FCFS_PIPELINED, **more)


def test_without_batching_each_stage_has_a_request_of_its_own() -> None:
    """Two stages: the second enters half a second behind the first, the third when the first has left; in their
    batch it would have been served at once."""
    steps = linear_steps(limits(1, 100, 50), step_s=1.0)
    asked = [Request(0.0, 1, 3), Request(0.0, 1, 3), Request(0.2, 1, 2)]
    outcomes = unbatched(asked, steps, (4, 4)).outcomes
    assert outcomes.first_token_s.tolist() == pytest.approx([1.0, 1.5, 4.0])
    assert outcomes.last_token_s.tolist() == pytest.approx([3.0, 3.5, 5.0])
    one_by_one = unbatched(asked, steps, (4, 4), pipelined=False).outcomes
    assert one_by_one.last_token_s.tolist() == pytest.approx([3.0, 6.0, 8.0])


# Laws


@settings(max_examples=40, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=15), p=st.integers(2, 5))
def test_without_batching_as_many_are_served_as_there_are_stages_and_no_more(
    asked: list[tuple[float, int, int]], p: int
) -> None:
    """p equal requests are served in the time of one when saturated.

    For all arrivals, all requests end, never more than p at once, and none sooner than alone.
    """
    steps, requests = _curved(limits(1, 100, 100), 0.3), _requests(asked)
    outcomes = unbatched(requests, steps, (1,) * p).outcomes
    assert outcomes.completed.all()
    alone_s = np.array(
        [
            steps.prompt_s(r.input_tokens) + steps.run_s(1, r.input_tokens + 1, r.output_tokens - 1)
            for r in requests
        ]
    )
    assert (outcomes.e2e_s >= alone_s - 1e-9).all()
    ends = np.sort(outcomes.last_token_s)
    for row, arrival_s in enumerate(outcomes.arrival_s):
        earliest = ends[row - p] if row >= p else 0.0  # when the (row - p + 1)th of all had ended
        assert outcomes.first_token_s[row] >= max(arrival_s, earliest) - 1e-9
    burst = [Request(0.0, 20, 10)] * (4 * p)
    together, one_by_one = (unbatched(burst, steps, (1,) * p, pipelined=on).end_s for on in (True, False))
    assert one_by_one / p <= together + 1e-9
    assert together <= one_by_one * (1 / p + 0.25)


@settings(max_examples=30, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=15))
def test_without_batching_and_with_one_stage_it_is_first_come_first_served(
    asked: list[tuple[float, int, int]],
) -> None:
    steps, requests = _curved(limits(1, 100, 100), 0.3), _requests(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_kinds, "FcfsWorker", UnbatchedPipeline)
        by_pipeline = serve(requests, steps, service=Service.FCFS)
    _assert_same(by_pipeline, serve(requests, steps, service=Service.FCFS))


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(_ASKED, min_size=1, max_size=25), max_batch=st.integers(1, 6), more=st.integers(0, 40))
def test_one_stage_is_continuous_batching(asked: list[tuple[float, int, int]], max_batch: int, more: int) -> None:
    steps, requests = _curved(limits(max_batch, 100, max_batch + more), 0.3), _requests(asked)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_kinds, "ContinuousWorker", PipelinedWorker)
        by_pipeline = serve(requests, steps)
    _assert_same(by_pipeline, serve(requests, steps))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=6),
    p=st.integers(2, 8),
)
def test_a_lone_requests_times_do_not_change(lengths: list[tuple[int, int]], p: int) -> None:
    steps = _curved(limits(4, 100, 16), 0.3)
    requests = [Request(1000.0 * i, *asked) for i, asked in enumerate(lengths)]
    _assert_same(*(run(requests, steps, (1,) * p, pipelined=on) for on in (True, False)))


def _saturated(seed: int) -> tuple[list[Request], StepModel, int]:
    """A hundred requests at once, step times, and how many stages."""
    chance = random.Random(seed)
    max_batch = chance.choice([2, 4, 8, 16])
    steps = linear_steps(
        limits(max_batch, 200, max_batch + chance.choice([4, 40, 200])),
        step_s=0.1,
        sequence_s=chance.choice([0.0, 0.02]),
        context_token_s=chance.choice([0.0, 2e-4]),
        prompt_token_s=0.01,
    )
    asked = [Request(0.0, chance.randint(1, 100), chance.randint(1, 100)) for _ in range(100)]
    return asked, steps, chance.choice([2, 3, 4, 8])


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), layers=st.lists(st.integers(1, 5), min_size=2, max_size=8).map(tuple))
def test_no_more_passes_than_the_busiest_stage_lets_through(seed: int, layers: tuple[int, ...]) -> None:
    requests, steps, _ = _saturated(seed)
    piped, one = (run(requests, steps, layers, pipelined=on) for on in (True, False))
    assert piped.outcomes.completed.all()
    assert max(gpu.busy_fraction for gpu in piped.gpus) <= 1 + 1e-9
    assert piped.end_s >= one.end_s * max(layers) / sum(layers) * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_saturated_it_serves_between_once_and_p_times_what_one_batch_does(seed: int) -> None:
    """The bounds hold for stages alike.

    They do not for a few tokens on stages that differ much: there two batches of one sequence each pass the
    longest more slowly than one batch of both, in truth too.
    """
    requests, steps, p = _saturated(seed)
    piped, one = (run(requests, steps, (1,) * p, pipelined=on) for on in (True, False))
    assert one.end_s / p <= piped.end_s <= one.end_s


@settings(max_examples=25, deadline=None)
@given(
    asked=st.lists(_ASKED, min_size=1, max_size=25),
    p=st.integers(2, 4),
    whose=st.lists(st.sampled_from("ab"), min_size=25, max_size=25),
    fails_s=st.floats(0.1, 30.0),
)
def test_every_request_ends_once_and_the_same_way_again(
    asked: list[tuple[float, int, int]], p: int, whose: list[str], fails_s: float
) -> None:
    """Two pipelines share their GPUs, whose node fails and returns."""
    steps = _curved(limits(3, 100, 20), 0.3)
    requests = [replace(r, model=name) for r, name in zip(_requests(asked), whose, strict=False)]
    fails, returns = NodeFails(at_s=fails_s, node_id="node0"), NodeReturns(at_s=fails_s + 1, node_id="node0")
    actions = (*deploy_all("a", "b"), fails, returns)
    first, again = (run(requests, steps, (2,) * p, actions=actions).outcomes for _ in range(2))
    np.testing.assert_array_equal(first.last_token_s, again.last_token_s)
    assert ((first.failure == Failure.NONE) == first.completed).all()
    done = first.completed
    assert (first.first_token_s[done] <= first.last_token_s[done]).all()
    assert not (first.last_token_s[done] < [r.arrival_s for r, d in zip(requests, done, strict=True) if d]).any()


@settings(max_examples=40, deadline=None)
@given(
    asked=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=12),
    p=st.integers(2, 4),
    runs=st.integers(0, 30),
    share=st.floats(0.0, 1.0),
)
def test_evicted_sequences_keep_their_tokens(
    asked: list[tuple[int, int]], p: int, runs: int, share: float
) -> None:
    requests, whole = Requests(), Cluster(cluster(p), processor_sharing)
    server = PipelinedWorker("w", whole.stages(staged((1,) * p)), 0.0, _curved(limits(6, 100, 16), 0.3), requests)
    for tokens in asked:
        server.submit(requests.add(0.0, *tokens, 0), *tokens)
    work_s = server.begin()
    for _ in range(runs):
        if work_s:
            server.finish(1.0)
            work_s = server.begin()
    ended = [row for row, last_s in enumerate(requests.last_s) if last_s == last_s]
    waiting = server.give_back()
    left = server.evict(work_s * share)
    assert sorted([*ended, *waiting, *(row for row, _, _ in left)]) == list(range(len(asked)))
    assert server.outstanding == 0
    for row, input_tokens, output_tokens in left:
        assert input_tokens + output_tokens == sum(asked[row])
        assert 1 <= output_tokens <= asked[row][1]


# Against the truth


def test_it_is_near_the_same_pipeline_stage_by_stage() -> None:
    """Saturated: how long 100 requests take, over what they take when every step passes every stage by itself. One
    batch at a time takes 1.4 times as long in the median, 3.4 at most."""
    ratios = []
    for seed in range(24):
        requests, steps, p = _saturated(seed)
        truth = flow_shop(requests, steps, [1 / p] * p)
        assert max(truth.stage_work_s) <= max(truth.last_s)
        ratios.append(run(requests, steps, (1,) * p).end_s / max(truth.last_s))
    assert np.median(ratios) == pytest.approx(1.0, abs=0.02)
    assert np.percentile(np.abs(np.array(ratios) - 1), 90) < 0.15


def test_without_batching_it_is_near_the_same_stage_by_stage() -> None:
    """At loads from a third of what it serves to three times that."""
    lasts, means = [], []
    for seed in range(24):
        chance = random.Random(seed)
        p, load = chance.choice([2, 3, 4, 8]), chance.choice([0.3, 0.6, 0.9, 3.0])
        steps = linear_steps(limits(1, 300, 300), step_s=0.1, context_token_s=2e-4, prompt_token_s=0.005)
        each_s = 25 * 0.1 + 50 * 0.005
        times_s = itertools.accumulate(chance.expovariate(load * p / each_s) for _ in range(60))
        requests = [Request(t, chance.randint(1, 100), chance.randint(1, 50)) for t in times_s]
        truth = np.array(flow_shop(requests, steps, [1 / p] * p, unbatched=True).last_s)
        outcomes = unbatched(requests, steps, (1,) * p).outcomes
        lasts.append(outcomes.last_token_s.max() / truth.max())
        means.append(outcomes.e2e_s.mean() / (truth - outcomes.arrival_s).mean())
    assert lasts == pytest.approx([1.0] * 24, abs=0.1)
    assert np.median(means) == pytest.approx(1.0, abs=0.02)
    assert means == pytest.approx([1.0] * 24, abs=0.2)
