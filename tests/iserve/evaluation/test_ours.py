"""Product as a contestant: what it places, what it leaves alone, and what it launches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from iserve.evaluation.arena import Arena, make_arena
from iserve.evaluation.contestants import OURS, STRONG_RULE, make_contestant
from iserve.evaluation.play import play
from iserve.evaluation.situation import Decision
from placement.types import ClusterSnapshot
from planner.intent import IntentKind
from tests.iserve.evaluation.test_rules import LLAMA_70B, arena, devices
from tests.iserve.evaluation.worlds import LLAMA_8B, small_world

MAMBA = {
    "model_type": "mamba2",
    "architectures": ["Mamba2ForCausalLM"],
    "hidden_size": 2560,
    "num_hidden_layers": 64,
    "state_size": 128,
    "num_heads": 80,
    "head_dim": 64,
    "vocab_size": 50288,
    "tie_word_embeddings": True,
    "expand": 2,
    "n_groups": 1,
    "conv_kernel": 4,
}


def ours(of: Arena, intent: IntentKind = IntentKind.MIN_LATENCY, group: int = 0) -> Decision:
    return make_contestant(OURS, of)(of.situation(of.groups[group][1], intent, of.cluster))


def test_even_load_on_as_many_gpus_is_the_rules_plan() -> None:
    of = arena(4)
    rule = make_contestant(STRONG_RULE, of)(of.situation(of.groups[0][1], IntentKind.MIN_LATENCY, of.cluster))
    found = ours(of).replicas
    assert [replica.config.tp for replica in found] == [replica.config.tp for replica in rule.replicas] == [1] * 4
    assert devices(found) == devices(rule.replicas)


def test_idle_gpus_are_used() -> None:
    assert len(devices(ours(arena(2)).replicas)) == 4


def test_a_cheap_plan_reserves_less_than_the_rule() -> None:
    of = arena(4)
    cheap = ours(of, IntentKind.MIN_COST).replicas
    rule = make_contestant(STRONG_RULE, of)(
        of.situation(of.groups[0][1], IntentKind.MIN_COST, of.cluster)
    ).replicas

    def held(replicas):
        return sum(stage.bytes_per_gpu for one in replicas for stage in one.placement.stages)

    assert held(cheap) < 0.6 * held(rule)


def test_deployments_that_run_stay_and_the_next_is_placed_next_to_them() -> None:
    of = arena(4, later=1)
    contestant = make_contestant(OURS, of)
    first = contestant(of.situation(of.groups[0][1], IntentKind.MIN_LATENCY, of.cluster)).replicas
    taken = devices(first)
    used = {stage.device_ids: stage.bytes_per_gpu for one in first for stage in one.placement.stages}
    gpus = tuple(
        replace(gpu, free_bytes=gpu.free_bytes - sum(size for ids, size in used.items() if gpu.device_id in ids))
        for gpu in of.cluster.gpus
    )
    assert len(taken) == 3  # one is left to the deployment that is expected
    later = contestant(
        of.situation(of.groups[1][1], IntentKind.MIN_LATENCY, ClusterSnapshot(gpus), running=first)
    ).replicas
    assert {replica.deployment for replica in later} == set(of.groups[1][1])


def test_three_that_fit_by_two_gpus_each_alone_are_all_placed() -> None:
    """The rule takes the least TP, where a third model of that size finds no room."""
    models = [{"name": f"l{number}", "config": LLAMA_70B} for number in range(3)]
    of = make_arena(small_world(models=models, cluster="h200:4", quality="near"), 1, Path())
    found = ours(of)
    assert {replica.deployment for replica in found.replicas} == {"l0", "l1", "l2"}
    assert found.reasons == ()


def test_what_fits_nowhere_has_a_reason() -> None:
    of = arena(1)
    no_memory = ClusterSnapshot(tuple(replace(gpu, free_bytes=2**30) for gpu in of.cluster.gpus))
    found = make_contestant(OURS, of)(of.situation(of.groups[0][1], IntentKind.MIN_LATENCY, no_memory))
    assert found.replicas == ()
    assert found.reasons


@pytest.mark.parametrize("intent", [IntentKind.MIN_LATENCY, IntentKind.MIN_COST])
def test_a_model_of_states_runs_as_many_sequences_as_it_has_memory_for(intent: IntentKind) -> None:
    models = [{"name": "states", "config": MAMBA}, {"name": "chat", "config": LLAMA_8B}]
    of = make_arena(small_world(models=models, cluster="h200:2"), 1, Path())
    found = {replica.deployment: replica for replica in ours(of, intent).replicas}
    states = found["states"]
    assert states.limits.kv_tokens is None
    one_bytes = of.models["states"].spec.kinds[0].shape.state_bytes * 64
    free = states.placement.stages[0].bytes_per_gpu - 2 * of.models["states"].spec.num_params
    assert states.limits.max_batch * one_bytes <= free


def test_a_whole_world_is_served() -> None:
    of = arena(2)
    played = play(of, make_contestant(OURS, of), IntentKind.MIN_COST)
    assert played.result.outcomes.completed.all()
