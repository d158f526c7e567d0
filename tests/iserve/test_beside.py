"""Choices on shared GPUs: nothing changes on idle ones, and everywhere else the choice is that of a full search.

The search is through every configuration, or every configuration and place.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.engines.registry import capabilities_for
from fingerprint.config import Workload
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.gpus import gpu_spec
from iserve.cli.render import print_plan
from iserve.planning.pipeline import Hardware, PlanOptions, make_plan, ranked_anywhere, space
from iserve.planning.plan_document import plan_document
from iserve.planning.ranking_cache import RankedModel
from iserve.planning.runner_up import runner_up
from iserve.simulation.running import idle_cluster
from placement.load_model import stretch
from placement.types import ClusterSnapshot, Placement
from planner.costs import total_bytes
from planner.intent import CostModel, Intent, IntentKind, Slo
from planner.plan import LimitKind, Plan
from tests.fingerprint.step_timed_machine import llama_7b

GIB = 2**30
A6000 = gpu_spec("a6000")
SPEC = llama_7b()
ESTIMATOR = RooflineEstimator(SPEC, A6000)
ENGINES = tuple(capabilities_for("auto"))
WORK = Workload(batch=4, input_tokens=512, output_tokens=128)
INTENTS = {
    "min-cost": Intent(),
    "min-latency": Intent(kind=IntentKind.MIN_LATENCY),
    "min-gpu-hours": Intent(kind=IntentKind.MIN_GPU_HOURS),
    "max-throughput": Intent(kind=IntentKind.MAX_THROUGHPUT),
    "min-memory": Intent(kind=IntentKind.MIN_MEMORY),
    "min-energy": Intent(kind=IntentKind.MIN_ENERGY),
    "dollars": Intent(cost_model=CostModel.DOLLARS),
    "latency-slo": Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(ttft_s=0.5, tpot_s=0.03)),
    "latency-slo at a rate": Intent(kind=IntentKind.LATENCY_SLO, slo=Slo(e2e_s=6.0), rate_per_s=0.3),
    "cost-slo": Intent(kind=IntentKind.COST_SLO, budget=40.0),
}
POLICIES = ("hybrid", "packing", "least-loaded", "ilp")
MODELS = {
    (name, policy): RankedModel(
        SPEC, A6000, ESTIMATOR, ENGINES, PlanOptions(intent=intent, workload=WORK, policy=policy)
    )
    for name, intent in INTENTS.items()
    for policy in POLICIES
}
LOADS = st.sampled_from([0.0, 0.0, 0.3, 0.45, 0.6, 0.8, 0.97, 1.0])


def cluster(loads: list[float], free_gib: list[int] | None = None) -> ClusterSnapshot:
    free = free_gib or [48] * len(loads)
    return ClusterSnapshot(
        tuple(
            replace(gpu, load_fraction=load, free_bytes=min(gib * GIB, gpu.total_bytes))
            for gpu, load, gib in zip(idle_cluster(A6000, len(loads)).gpus, loads, free, strict=True)
        )
    )


def planned(name: str, policy: str, snapshot: ClusterSnapshot, *, weigh_load: bool = True) -> Plan:
    options = replace(MODELS[name, policy].options, weigh_load=weigh_load)
    return make_plan(SPEC, Hardware(label="", gpu=A6000, snapshot=snapshot), ESTIMATOR, ENGINES, options)


def value(plan: Plan) -> float:
    """Return what the best is ranked by, less is better; infinite where there is none."""
    if plan.best is None or plan.best.weight is None:
        return float("inf")
    return -plan.best.weight if plan.maximize else plan.best.weight


LATENCIES = ("min-latency", "cost-slo")  # other deployments' times count in them


def _lost(load: float) -> float:
    """Return what requests on a GPU lose per second of one more: ``d(r s(r + u)) / du`` at 0, by a difference."""
    step = 1e-7
    return load * (stretch(load + step) - stretch(load)) / step


names, policies = st.sampled_from(sorted(INTENTS)), st.sampled_from(POLICIES)
orders = st.sampled_from(POLICIES[:3])  # the exact placement solves for each of a hundred configurations


@settings(max_examples=15)
@given(name=names, policy=policies, free=st.lists(st.integers(0, 48), min_size=1, max_size=6))
def test_on_idle_gpus_nothing_changes(name: str, policy: str, free: list[int]) -> None:
    idle = cluster([0.0] * len(free), free)
    assert planned(name, policy, idle) == planned(name, policy, idle, weigh_load=False)


@settings(max_examples=20)
@given(name=names, policy=orders, loads=st.lists(LOADS, min_size=1, max_size=4), data=st.data())
def test_every_figure_is_that_of_the_place(
    name: str, policy: str, loads: list[float], data: st.DataObject
) -> None:
    """The objective of each candidate is that of idle GPUs times its slowdown, that of its GPUs' loads; what is
    feasible is so on idle GPUs too, and is in order; the kept order gives the same choice."""
    free = data.draw(st.lists(st.integers(4, 48), min_size=len(loads), max_size=len(loads)))
    snapshot, model = cluster(loads, free), MODELS[name, policy]
    plan = planned(name, policy, snapshot)
    load_of = {gpu.device_id: gpu.load_fraction for gpu in snapshot.gpus}
    made = space(SPEC, A6000, len(loads), ESTIMATOR, ENGINES, model.options)
    alone = {one.config: one for one in ranked_anywhere(made, model.options, A6000).candidates}
    timed = name not in ("min-memory", "min-energy")
    for one in plan.candidates:
        if one.objective is None:
            continue
        idle = alone[one.config].objective
        assert idle is not None
        grown = (1 / one.slowdown if plan.maximize else one.slowdown) if timed else 1.0
        assert one.objective == pytest.approx(idle * grown)
        if one.feasible:
            assert isinstance(one.layout, Placement)
            stages = one.layout.stages
            told = sum(
                stage.num_layers * stretch(max(load_of[device] for device in stage.device_ids)) for stage in stages
            )
            assert one.slowdown == pytest.approx(told / sum(stage.num_layers for stage in stages))
            assert alone[one.config].feasible
        assert one.weight is not None
        if name not in LATENCIES:
            assert one.weight == one.objective
        elif isinstance(one.layout, Placement):
            lost = 0.0
            for stage in one.layout.stages:
                lost += stage.num_layers * sum(_lost(load_of[device]) for device in stage.device_ids)
            assert one.weight == pytest.approx(one.objective + idle * lost / 32, rel=1e-5)
    values = [
        -one.weight if plan.maximize else one.weight for one in plan.candidates if one.feasible and one.weight
    ]
    assert values == sorted(values)
    chosen = model.choose(snapshot)
    assert (chosen is None) == (plan.best is None)
    if chosen is not None and plan.best is not None:
        assert (chosen.config, chosen.placement) == (plan.best.config, plan.best.layout)


JOINED = replace(A6000, link_group_size=4)  # no pair is better joined than another
JOINED_ESTIMATOR = RooflineEstimator(SPEC, JOINED)


def _joined(name: str, policy: str, loads: list[float]) -> Plan:
    hardware = Hardware(label="", gpu=JOINED, snapshot=cluster(loads))
    return make_plan(SPEC, hardware, JOINED_ESTIMATOR, ENGINES, MODELS[name, policy].options)


def _exhaustive(name: str, loads: list[float]) -> float:
    """The best value of every configuration on every choice of GPUs, layers split evenly."""
    options = MODELS[name, "ilp"].options
    made = space(SPEC, JOINED, len(loads), JOINED_ESTIMATOR, ENGINES, options)
    plan = ranked_anywhere(made, options, JOINED)
    best = float("inf")
    for one in plan.candidates:
        if not one.feasible or one.estimate is None or one.objective is None:
            continue
        tp, pp = one.config.tp, one.config.pp
        for order in permutations(range(len(loads)), tp * pp):
            layers = [32 // pp + (stage < 32 % pp) for stage in range(pp)]
            groups = [order[stage * tp : (stage + 1) * tp] for stage in range(pp)]
            late = (
                sum(n * stretch(max(loads[g] for g in group)) for n, group in zip(layers, groups, strict=True))
                / 32
            )
            weight = late * (1 / one.objective if plan.maximize else one.objective)
            if name in LATENCIES:
                lost = sum(n * sum(_lost(loads[g]) for g in some) for n, some in zip(layers, groups, strict=True))
                weight += one.objective * lost / 32
            if _keeps(name, one.estimate, late):
                best = min(best, -1 / weight if plan.maximize else weight)
    return best


def _keeps(name: str, seen: Estimate, late: float) -> bool:
    if name == "latency-slo":
        return seen.ttft_s.high * late <= 0.5 and seen.tpot_s.high * late <= 0.03
    if name == "cost-slo":
        held_gib = total_bytes(seen.memory) * (1 + seen.memory.relative_error) / GIB
        return held_gib * seen.e2e_s.high * late / seen.workload.batch <= 40.0
    return True


SEARCHED = ("min-cost", "min-latency", "max-throughput", "latency-slo", "cost-slo")


@settings(max_examples=15)
@given(name=st.sampled_from(SEARCHED), loads=st.lists(LOADS, min_size=1, max_size=2))
def test_on_a_tiny_cluster_it_equals_exhaustive_search(name: str, loads: list[float]) -> None:
    """The search is of configurations and places, with the exact placement.

    What splits unevenly, away from the load, may even be better than all that splits evenly.
    """
    plan = _joined(name, "ilp", loads)
    found, searched = value(plan), _exhaustive(name, loads)
    split = plan.best.layout.layers_per_stage if plan.best is not None and plan.best.layout is not None else (0,)
    if max(split) - min(split) <= 1:
        assert found == pytest.approx(searched, rel=1e-5)
    else:
        assert found <= searched


@settings(max_examples=8)
@given(
    name=names,
    policy=st.sampled_from(("ilp", "least-loaded")),
    loads=st.lists(LOADS, min_size=1, max_size=3),
    quieter=st.floats(0, 1),
    data=st.data(),
)
def test_a_quieter_gpu_never_makes_the_choice_worse(
    name: str, policy: str, loads: list[float], quieter: float, data: st.DataObject
) -> None:
    """The law does not hold for hybrid and packing, which join the busiest on purpose."""
    which = data.draw(st.integers(0, len(loads) - 1))
    better = [load * quieter if i == which else load for i, load in enumerate(loads)]
    after, before = value(_joined(name, policy, better)), value(_joined(name, policy, loads))
    assert after <= before or after == pytest.approx(before)


@settings(max_examples=12)
@given(
    name=st.sampled_from(["latency-slo", "latency-slo at a rate", "cost-slo"]),
    loads=st.lists(LOADS, min_size=1, max_size=6),
)
def test_no_limit_is_broken_by_a_policy_that_shares(name: str, loads: list[float]) -> None:
    """Every policy finds a place that keeps a limit which the quietest GPUs keep."""
    snapshot = cluster(loads)
    if planned(name, "least-loaded", snapshot).best is not None:
        assert planned(name, "hybrid", snapshot).best is not None
        assert planned(name, "packing", snapshot).best is not None


def test_it_tells_that_what_runs_beside_it_decided() -> None:
    """Three of four GPUs are idle; tp=4 would have to take the busy one too."""
    plan = planned("min-latency", "least-loaded", cluster([0.0, 0.0, 0.0, 0.9]))
    assert plan.best is not None
    assert plan.better_idle is not None
    assert plan.better_idle.config.num_gpus == 4 > plan.best.config.num_gpus
    assert plan.best.slowdown == 1.0
    assert plan.better_idle.slowdown == pytest.approx(10.0, rel=0.75)
    document = plan_document(plan, model="m", hardware="h", workload=WORK)
    (note,) = document.notes
    assert note == plan.better_idle.text
    chosen = document.candidates[0]
    assert (chosen.slowdown, chosen.config) == (1.0, plan.best.config)
    assert f"{plan.better_idle.config} would be best on idle GPUs" in note
    assert "times as slow" in note
    alike = planned("min-cost", "least-loaded", cluster([0.5] * 4))
    assert alike.better_idle is None
    (note,) = plan_document(alike, model="m", hardware="h", workload=WORK).notes
    assert "2 times as slow" in note


def test_a_refusal_says_that_the_load_broke_the_limit_and_its_advice_is_true() -> None:
    """Alone every limit is kept. Relaxed as it says, one is kept on the shared GPUs."""
    limits = Slo(ttft_s=0.5)
    intent = Intent(kind=IntentKind.LATENCY_SLO, slo=limits)
    options = PlanOptions(intent=intent, workload=WORK)

    def plan(wish: Intent, load: float) -> Plan:
        hardware = Hardware(label="", gpu=A6000, snapshot=cluster([load] * 2))
        return make_plan(SPEC, hardware, ESTIMATOR, ENGINES, replace(options, intent=wish))

    assert plan(intent, 0.0).best is not None
    refused = plan(intent, 0.95)
    assert refused.best is None
    nearest = refused.why_not.nearest
    assert nearest is not None
    assert any("20 times as slow" in (one.reason or "") for one in refused.candidates)
    (relaxed,) = (r for r in refused.why_not.relaxations if r.limit is LimitKind.TTFT)
    assert plan(replace(intent, slo=Slo(ttft_s=relaxed.needed)), 0.95).best is not None
    assert plan(replace(intent, slo=Slo(ttft_s=relaxed.needed * 0.9)), 0.95).best is None


@settings(max_examples=10)
@given(name=st.sampled_from(LATENCIES), loads=st.lists(st.sampled_from([0.3, 0.6, 0.8]), min_size=2, max_size=4))
def test_what_cannot_be_told_apart_overlaps_in_what_is_ranked_by(name: str, loads: list[float]) -> None:
    """Every number reported with it is of what was ranked by, the delays of other deployments included."""
    plan = planned(name, "hybrid", cluster(loads))
    document = plan_document(plan, model="m", hardware="h", workload=WORK)
    feasible = [one for one in document.candidates if one.feasible]
    for one in feasible:
        assert one.ranked_by is not None
        assert one.ranked_low is not None
        assert one.ranked_high is not None
        assert one.objective is not None
        assert one.ranked_low <= one.ranked_by <= one.ranked_high
        assert one.ranked_by >= one.objective
    if not feasible:
        return
    low, high = feasible[0].ranked_low or 0.0, feasible[0].ranked_high or 0.0
    alike = [
        at
        for at, one in enumerate(feasible)
        if at and one.ranked_low is not None and one.ranked_low <= high and low <= (one.ranked_high or 0.0)
    ]
    assert list(document.indistinguishable) == alike
    rival = runner_up(plan)
    if rival is not None:
        told = next(one for one in feasible if one.config == rival.config)
        assert (rival.objective, rival.chosen_objective) == (told.ranked_by, feasible[0].ranked_by)


def test_the_line_on_what_cannot_be_told_apart_says_what_is_ranked_by(capsys: pytest.CaptureFixture[str]) -> None:
    for load, included in ((0.6, True), (0.0, False)):
        plan = planned("min-latency", "hybrid", cluster([load] * 4))
        assert plan.indistinguishable
        print_plan(plan_document(plan, model="m", hardware="h", workload=WORK))
        shown = " ".join(capsys.readouterr().out.split())
        assert ("delays of other deployments included, their intervals of s overlap" in shown) == included


def test_what_runs_there_may_be_a_former_worker_of_the_same_deployment() -> None:
    plan = planned("min-latency", "hybrid", cluster([0.6] * 4))
    assert plan.best is not None
    assert plan.best.slowdown > 1
    (note,) = (n for n in plan_document(plan, model="m", hardware="h", workload=WORK).notes if "are busy" in n)
    assert note.startswith(f"its GPUs are busy: with what runs there now {plan.best.config} is ")
    of_cpus = plan_document(plan, model="m", hardware="2 x cpu (node0)", workload=WORK)
    assert note.replace("GPUs", "CPU devices") in of_cpus.notes
