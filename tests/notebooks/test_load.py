"""The comparison under load: one world for all, and what is measured of it."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean, pstdev

import pytest

from iserve.simulation.baselines import Baseline
from notebooks.figures.comparison import Place, against_all, changes, lost
from notebooks.figures.contest import BASELINES, Contestant, Served, averaged, fewest_gpus, iserve, serve, slos_of
from notebooks.figures.h200 import MODELS as H200_MODELS
from notebooks.figures.harvest import attained
from notebooks.figures.load import PAPER_SITE, SEED, World, world_of
from notebooks.figures.recordings import recording_of
from notebooks.figures.under_load import LARGE
from planner.intent import IntentKind, Quality
from traces.request import Request
from traces.simulator.scenario import Deploy

SMALL = ("gpt-j-6b", "Llama-2-7b-hf", "gpt-j-6b")
SITE = replace(PAPER_SITE, num_gpus=2)


@pytest.fixture(scope="module")
def world() -> World:
    trace = [Request(0.5 * i, 300 + 7 * (i % 200), 1 + i % 150) for i in range(300)]
    return world_of(SITE, SMALL, trace, deploy_every_s=40.0)


def test_requests_go_to_all_models_alike_and_to_none_that_is_not_there(world: World) -> None:
    since = {action.name: action.at_s for action in world.scenario.actions if isinstance(action, Deploy)}
    assert list(since.values()) == [0.0, 40.0, 80.0]
    assert all(request.arrival_s >= since[request.model] for request in world.requests)
    late = [request.model for request in world.requests if request.arrival_s >= 80.0]
    assert all(late.count(name) == pytest.approx(len(late) / 3, rel=0.4) for name in since)
    assert max(request.output_tokens for request in world.requests) == PAPER_SITE.workload.output_tokens


def test_a_world_is_the_same_for_whoever_asks() -> None:
    place = Place("code", 0.1, LARGE)
    assert place.world(SEED).requests == place.world(SEED).requests
    assert place.world(SEED).requests != place.world(SEED + 1).requests


def test_minimum_parallelism_is_the_fewest_gpus_that_hold_the_model() -> None:
    world = world_of(PAPER_SITE, LARGE.models, [Request(0.0, 100, 10)], deploy_every_s=0.0)
    found = {model: config.num_gpus for model, config in fewest_gpus(world).items()}
    assert found["Llama-2-7b-hf"] == 1
    assert found["falcon-40b"] == 2
    assert found["Llama-2-70b-hf"] * PAPER_SITE.gpu.memory_bytes > 2 * 69e9


def test_an_slo_is_its_multiple_of_the_time_alone(world: World) -> None:
    once, thrice = (slos_of(world, factor, world.mean_request) for factor in (1.0, 3.0))
    for model, slo in once.items():
        assert slo.e2e_s is not None
        assert thrice[model].e2e_s == pytest.approx(3 * slo.e2e_s)


@pytest.mark.parametrize(
    "who",
    [
        iserve(IntentKind.MIN_GPU_HOURS),
        iserve(IntentKind.MIN_LATENCY, Quality.EXACT),
        Contestant(name="rule", baseline=Baseline.RULE, kind=IntentKind.MIN_COST),
        *(who for who in BASELINES if who.baseline is not Baseline.ALPASERVE_ALL),
    ],
    ids=lambda who: who.name,
)
def test_whoever_serves_is_measured_alike(world: World, who: Contestant) -> None:
    found = serve(world, who)
    assert found is not None
    assert 0 < found.answered <= 1
    assert 1 - found.answered <= found.missed + 1e-9
    assert found.p50_s <= found.p95_s <= found.p99_s
    assert found.p50_s <= found.p50_all_s
    assert 1 <= found.gpus <= SITE.num_gpus
    assert found.memory_gib <= SITE.num_gpus * SITE.gpu.memory_bytes / 2**30
    assert found.throughput * found.gpus * found.gpu_hours * 3600 >= found.answered
    if who.quality is Quality.EXACT:
        assert "int" not in found.what


def test_a_looser_slo_misses_no_more(world: World) -> None:
    missed = [found.missed for f in (1.2, 2.5, 7.5) if (found := serve(world, iserve(IntentKind.MIN_COST), f))]
    assert missed == sorted(missed, reverse=True)
    assert len(missed) == 3


def test_a_demand_is_the_rate_and_lengths_of_the_first_deployments_own_requests(world: World) -> None:
    rate, traffic = world.demand_of("Llama-2-7b-hf")
    own = [request for request in world.requests if request.model == "1 Llama-2-7b-hf"]
    assert rate == pytest.approx(len(own) / (world.requests[-1].arrival_s - 40.0))
    outputs = [request.output_tokens for request in own]
    assert traffic.output_cv == pytest.approx(pstdev(outputs) / fmean(outputs))


def test_what_no_configuration_keeps_at_its_rate_is_refused_and_deployed_by_what_is_asked_for_then() -> None:
    trace = [Request(1.0 * i, 300, 50) for i in range(100)]
    world = world_of(SITE, SMALL[:1], trace, deploy_every_s=0.0)
    told = replace(iserve(IntentKind.LATENCY_SLO), longest_apart=True, told_demand=True)
    refused = serve(world, told, 0.01)
    deployed = serve(world, replace(told, refused=IntentKind.MIN_LATENCY), 0.01)
    assert refused is not None
    assert deployed is not None
    assert (refused.deployed, refused.answered, refused.missed) == (0, 0, 1)
    assert (deployed.deployed, deployed.answered) == (1, 1)


def test_room_for_the_longest_is_in_the_memory_whatever_is_planned_for(world: World) -> None:
    whole = iserve(IntentKind.MIN_MEMORY)
    apart, longest = serve(world, replace(whole, longest_apart=True)), serve(world, whole)
    assert apart is not None
    assert longest is not None
    assert apart.answered == longest.answered == 1
    assert apart.memory_gib == pytest.approx(longest.memory_gib, rel=0.02)


def test_who_refuses_what_is_late_answers_fewer_and_those_sooner() -> None:
    hurry = [Request(0.02 * i, 300, 100) for i in range(300)]
    crowded = world_of(SITE, SMALL, hurry, deploy_every_s=0.0)
    patient = iserve(IntentKind.MIN_GPU_HOURS)
    all_, some = serve(crowded, patient), serve(crowded, replace(patient, refuses_late=True))
    assert all_ is not None
    assert some is not None
    assert some.answered < all_.answered == 1
    assert some.p99_s < all_.p99_s
    assert some.missed <= all_.missed


def test_the_h200s_know_what_was_measured_in_16_bits_on_one() -> None:
    for model in H200_MODELS:
        points = recording_of(model).profile.timing
        assert {(point.tp, point.pp, point.weights) for point in points} == {(1, 1, "16bit")}


_ONE = Served(
    deployed=3, answered=1.0, p50_all_s=2.0, p50_s=2.0, p95_s=3.0, p99_s=4.0, missed=0.0, cost_gib_s=1.0,
    gpu_s=1.0, memory_gib=1.0, gpu_hours=1.0, gpus=8, busy=0.5, throughput=1.0, what="(1,1) int4",
)  # fmt: skip


def test_means_over_seeds_are_of_every_number() -> None:
    both = averaged([_ONE, replace(_ONE, p50_s=4.0, gpus=4, what="another")])
    assert (both.p50_s, both.gpus, both.p95_s, both.what) == (3.0, 6.0, 3.0, "(1,1) int4")


def test_who_answers_less_is_compared_apart_and_never_wins_a_cell() -> None:
    place = Place("code", 0.1, LARGE)
    half = replace(_ONE, answered=0.5, p50_s=1.0, p50_all_s=math.inf)
    slower, faster = replace(_ONE, p50_s=4.0), replace(_ONE, p50_s=1.0)
    cells = {(place, name): one for name, one in (("us", _ONE), ("max TP", slower), ("AlpaServe", half))}
    assert changes(cells, "us", "AlpaServe", lambda s: s.p50_s) == []
    assert changes(cells, "us", "AlpaServe", lambda s: s.p50_s, as_many=False) == [1.0]
    assert against_all(cells, "us", lambda s: s.p50_s).startswith("-50.0%")
    assert lost(cells, "us", lambda s: s.p50_s).rows == ()
    cells[place, "max PP"] = faster
    assert [row[1:3] for row in lost(cells, "us", lambda s: s.p50_s).rows] == [("max PP", "+100.0%")]
    cells[place, "FSDP, offload"] = replace(_ONE, p50_s=1.5)
    assert [row[1] for row in lost(cells, "us", lambda s: s.p50_s).rows] == ["max PP"]


def test_a_profile_on_every_gpu_takes_from_the_requests_and_nothing_where_there_is_none() -> None:
    (none, busy, taken), (all_eight, busier, eight) = (attained(0.1, gpus, SEED) for gpus in (0, 8))
    assert (taken, eight) == (0, 8)
    assert all_eight <= none
    assert busier > busy
