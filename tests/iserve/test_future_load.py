"""Room for expected deployments: what a choice does now if all of them chose alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import capabilities_for
from fingerprint.config import DeploymentConfig, Workload
from fingerprint.errors import ConfigError
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.planning.future_load import UNKNOWN_LOAD, FutureLoad, expected
from iserve.planning.pipeline import Hardware, PlanOptions, make_plan, ranked_anywhere, space
from iserve.planning.plan_document import plan_document
from iserve.planning.ranking_cache import RankedModel
from iserve.simulation.running import idle_cluster
from placement.batch_load import Batching
from placement.load_model import stretch
from placement.others import Others
from placement.types import ClusterSnapshot, DeploymentState, Placement, ReplicaState, StagePlacement
from planner.intent import Intent, IntentKind
from planner.plan import Candidate, Plan
from tests.fingerprint.step_timed_machine import llama_7b
from tests.iserve.command_line import Done, iserve, model

__all__ = ["iserve", "model"]  # fixtures

GIB = 2**30
A6000 = gpu_spec("a6000")
SPEC = llama_7b()
ESTIMATOR = RooflineEstimator(SPEC, A6000)
ENGINES = tuple(capabilities_for("auto"))
WORK = Workload(batch=1, input_tokens=512, output_tokens=128)
LATENCY = Intent(kind=IntentKind.MIN_LATENCY)
INTENTS = {"min-latency": LATENCY, "cost-slo": Intent(kind=IntentKind.COST_SLO, budget=1e6)}
OPTIONS = PlanOptions(intent=LATENCY, workload=WORK)
SPACE = space(SPEC, A6000, 8, ESTIMATOR, ENGINES, OPTIONS)
ABLE = {one.config for one in ranked_anywhere(SPACE, OPTIONS, A6000).candidates if one.feasible}
CANDIDATES = [one for one in SPACE if one.config in ABLE]  # without a quality that was not allowed


def gpu_s(estimate: Estimate) -> float:
    return estimate.memory.tp * estimate.e2e_s.value


def estimate_of(one: Candidate) -> Estimate:
    assert one.estimate is not None
    return one.estimate


def planned(snapshot: ClusterSnapshot, expect: int, intent: Intent = LATENCY) -> Plan:
    hardware = Hardware(label="", gpu=A6000, snapshot=snapshot)
    return make_plan(SPEC, hardware, ESTIMATOR, ENGINES, replace(OPTIONS, intent=intent, expect=expect))


def beside(*busy: float, gpus: int = 8, tp: int = 8) -> ClusterSnapshot:
    """Deployments on the first ``tp`` GPUs, each busy so much."""
    idle = idle_cluster(A6000, gpus)
    devices = tuple(gpu.device_id for gpu in idle.gpus[:tp])
    stage = StagePlacement(node_id="node0", device_ids=devices, first_layer=0, num_layers=32, bytes_per_gpu=GIB)
    deployments = tuple(
        DeploymentState(
            name=str(number), model="m", wanted=1, moving=False, waiting=0, requests_per_s=rate, service_s=1.0,
            idle_s=0.0, steady_s=1000.0,
            replicas=(
                ReplicaState(
                    replica_id=str(number), placement=Placement((stage,)), ready=True, outstanding=0, max_batch=1
                ),
            ),
        )
        for number, rate in enumerate(busy)
    )  # fmt: skip
    free = {device: A6000.memory_bytes - len(busy) * GIB for device in devices}
    held = tuple(replace(gpu, free_bytes=free.get(gpu.device_id, gpu.free_bytes)) for gpu in idle.gpus)
    return ClusterSnapshot(held, deployments)


RATES = st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.6]), max_size=3)


def told(plan: Plan) -> object:
    """Return what holds of each candidate for any expected ones: figures of what can be chosen, limits of the
    rest.
    """
    return {
        one.config: (one.objective, one.cost, one.slowdown) if one.feasible else (one.refusal, one.missed)
        for one in plan.candidates
    }


@settings(max_examples=8)
@given(busy=RATES, name=st.sampled_from(sorted(INTENTS)), fewer=st.integers(0, 4))
def test_nobody_to_come_is_the_plan_of_now(busy: list[float], name: str, fewer: int) -> None:
    snapshot = beside(*busy)
    now = planned(snapshot, 0, INTENTS[name])
    same = planned(snapshot, max(0, len(busy) + 1 - fewer), INTENTS[name])
    assert told(now) == told(same)
    assert [one.config for one in now.candidates] == [one.config for one in same.candidates]
    assert now.best is not None
    assert same.best is not None
    assert (now.best.layout, now.better_idle, None) == (same.best.layout, same.better_idle, same.room)


@settings(max_examples=8)
@given(busy=RATES, name=st.sampled_from(sorted(INTENTS)), expect=st.integers(0, 40))
def test_only_the_order_changes_and_the_kept_order_agrees(busy: list[float], name: str, expect: int) -> None:
    snapshot, intent = beside(*busy), INTENTS[name]
    later = planned(snapshot, expect, intent)
    assert told(planned(snapshot, 0, intent)) == told(later)
    options = replace(OPTIONS, intent=intent, expect=expect)
    chosen = RankedModel(SPEC, A6000, ESTIMATOR, ENGINES, options).choose(snapshot)
    assert later.best is not None
    assert chosen is not None
    assert (chosen.config, chosen.placement) == (later.best.config, later.best.layout)


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_more_to_come_never_takes_more_gpu_seconds(gpus: int) -> None:
    """On idle GPUs, where it also is what is best when all choose alike: by searching all."""
    snapshot, works = beside(gpus=gpus, tp=gpus), []
    among = [one for one in CANDIDATES if one.config.num_gpus <= gpus]
    least = min(gpu_s(estimate_of(one)) for one in among)
    for expect in (0, 2, 3, 4, 8, 16, 1000):
        best = planned(snapshot, expect).best
        assert best is not None
        assert best.estimate is not None
        works.append(gpu_s(best.estimate))
        if expect:
            share = UNKNOWN_LOAD * (expect - 1) / expect  # of what is asked, by the expected ones

            def slow(one: Candidate, share: float = share) -> float:
                estimate = estimate_of(one)
                return estimate.e2e_s.value * stretch(share * gpu_s(estimate) / least)

            if share * works[-1] / least < 0.95:
                assert best.weight == pytest.approx(min(map(slow, among)))
    assert works == sorted(works, reverse=True)
    assert gpus < 8 or works[-1] < works[0]


def found(in_all: int, snapshot: ClusterSnapshot, intent: Intent = LATENCY) -> FutureLoad | None:
    return expected(in_all, CANDIDATES, intent, snapshot, Others(snapshot))


def test_those_to_come_are_asked_as_those_who_are_there() -> None:
    """Two on all eight GPUs, which are busy for 0.3 together; three more bring half of that each."""
    there = found(6, beside(0.1, 0.2))
    assert there is not None
    fastest = min((one for one in CANDIDATES if one.config.tp == 8), key=lambda one: estimate_of(one).e2e_s.value)
    assert (there.num, there.load(estimate_of(fastest))) == (3, pytest.approx(3 * 0.15))
    narrow = estimate_of(next(one for one in CANDIDATES if one.config == DeploymentConfig()))
    assert there.load(narrow) == pytest.approx(0.45 * gpu_s(narrow) / gpu_s(estimate_of(fastest)))
    assert there.slowest(narrow) == pytest.approx(stretch(there.load(narrow)))


def test_where_nothing_is_seen_the_rate_that_was_told_counts_or_half_the_time() -> None:
    least = min(map(gpu_s, map(estimate_of, CANDIDATES)))
    idle, uncalled = beside(), beside(0.0)
    for snapshot, num in ((idle, 3), (uncalled, 2)):
        guessed = found(4, snapshot)
        assert guessed is not None
        assert (guessed.num, guessed.requests_per_s * least) == (num, pytest.approx(UNKNOWN_LOAD * num / 4))
        told = found(4, snapshot, replace(LATENCY, rate_per_s=0.01))
        assert told is not None
        assert told.requests_per_s * 8 == pytest.approx(num * 0.01)


def test_a_rate_that_was_told_keeps_workers_that_batch_busy_as_the_chain_says() -> None:
    options = replace(OPTIONS, workload=replace(WORK, batch=8), intent=replace(LATENCY, rate_per_s=0.2))
    made = [one for one in space(SPEC, A6000, 8, ESTIMATOR, ENGINES, options) if one.config in ABLE]
    snapshot = beside()
    least = min(made, key=lambda one: gpu_s(estimate_of(one)))
    there = expected(2, made, options.intent, snapshot, Others(snapshot))
    assert there is not None
    for one in made:
        assert one.alone is not None
        full = estimate_of(one)
        chain = Batching(0.2, one.alone.e2e_s.value, full.e2e_s.value, 8, 1, ())
        assert there.load(full) * 8 == pytest.approx(full.memory.tp * chain.under_way(1.0))
    full = estimate_of(least)
    assert there.load(full) * 8 > 0.2 * gpu_s(full) / 8  # more than a full batch would take


def test_little_asked_leaves_the_choice_and_much_takes_it() -> None:
    """A pipeline over all GPUs takes no more GPU-seconds than one GPU."""

    def work(busy: float, expect: int) -> float:
        best = planned(beside(busy), expect).best
        assert best is not None
        assert best.estimate is not None
        return gpu_s(best.estimate)

    assert work(0.001, 8) == work(0.001, 0)
    assert work(0.1, 8) < work(0.1, 0)


def test_a_plan_tells_for_whom_it_leaves_room() -> None:
    plan = planned(beside(), 8)
    assert plan.best is not None
    assert plan.better_idle is not None
    notes = plan_document(plan, model="m", hardware="h", workload=WORK).notes
    taken = plan.best.config.num_gpus
    assert taken < plan.better_idle.config.num_gpus == 8
    assert f"{plan.best.config} takes {taken} of 8 GPUs: chosen with 7 more deployments to come" in notes
    (told,) = (note for note in notes if "with those to come, all lose" in note)
    assert f"{plan.best.config} comes to {plan.best.objective:.4g} s, and loses them" in told
    assert "times as slow" not in told


def test_other_intents_and_impossible_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="min-cost with placement policy hybrid leaves no room"):
        PlanOptions(expect=4, policy="hybrid")
    with pytest.raises(ConfigError, match="-1"):
        PlanOptions(intent=LATENCY, expect=-1)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--intent", "min-latency", "--expected-deployments", "-1"), "--expected-deployments"),
        (("--intent", "min-memory", "--expected-deployments", "4"), "leaves no room"),
    ],
)
def test_the_command_refuses_them_too(
    asked: tuple[str, ...], told: str, iserve: Callable[..., Done], model: Callable[[str], Path]
) -> None:
    done = iserve("plan", model("Llama-2-7b"), "--gpus", "a6000:8", *asked)
    assert (done.code, done.out) == (2, "")
    assert told in done.err


def test_the_command_plans_for_them(iserve: Callable[..., Done], model: Callable[[str], Path]) -> None:
    asked = ("plan", model("Llama-2-7b"), "--gpus", "a6000:8", "--intent", "min-latency", "--json")
    alone, several = iserve(*asked).document, iserve(*asked, "--expected-deployments", "8").document
    assert alone["notes"] == []
    assert "8 GPUs: chosen with 7 more deployments to come" in several["notes"][-1]
    assert several["candidates"][0]["config"] != alone["candidates"][0]["config"]
