"""AIConfigurator as a contestant: what it is asked, what is placed of its answers, and the recorded ones."""

from __future__ import annotations

import gzip
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import BadInputError, ConfigError, NotFoundError
from iserve.evaluation.aiconfigurator import (
    ANSWERS,
    Advice,
    Answer,
    Question,
    Recommended,
    RecordedAnswers,
    gpu_parts,
    questions,
    read_answers,
)
from iserve.evaluation.arena import Arena, make_arena
from iserve.evaluation.contestants import make_contestant
from iserve.evaluation.play import play
from iserve.evaluation.situation import Decision, Situation
from iserve.evaluation.world import Information
from iserve.evaluation.world_file import read_world
from placement.types import ClusterSnapshot
from planner.intent import IntentKind
from tests.golden_words import Golden
from tests.iserve.evaluation.worlds import LLAMA_8B, small_world

LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
LLAMA_70B |= {"num_attention_heads": 64}
WORLDS = Path(__file__).parents[3] / "notebooks" / "worlds"


@cache
def arena(small: int, large: int = 0, *, cluster: str = "h200:4", later: int = 0, rates: bool = False) -> Arena:
    models: list[dict[str, Any]] = [
        {"name": f"s{number}", "config": LLAMA_8B, "deploy_at_s": 10 if number >= small - later else 0}
        for number in range(small)
    ]
    models += [{"name": f"l{number}", "config": LLAMA_70B} for number in range(large)]
    information = "rates" if rates else "none"
    return make_arena(small_world(models=models, cluster=cluster, information=information), 1, Path())


def situation(of: Arena, intent: IntentKind = IntentKind.MIN_LATENCY) -> Situation:
    return of.situation(of.groups[0][1], intent, of.cluster)


def advice(tp: int = 1, replicas: int = 1, pp: int = 1) -> Advice:
    return Advice(
        gpus=tp * pp * replicas,
        tp=tp,
        pp=pp,
        replicas=replicas,
        batch=16,
        ttft_ms=50.0,
        tpot_ms=10.0,
        e2e_ms=1000.0,
        tokens_per_s_per_gpu=1000.0,
    )


def recorded(answers: dict[Question, Advice | None]) -> RecordedAnswers:
    return RecordedAnswers(
        aiconfigurator="0.12.0",
        backend="vllm",
        date="2026-11-24",
        machine="none",
        seconds=0.0,
        as_llama={},
        answers=tuple(
            Answer(question=question, advice=given, reason=None if given else "it does not know this")
            for question, given in answers.items()
        ),
    )


def decided(of: Situation, given: dict[str, Advice | None]) -> Decision:
    """Return what is placed of the advice for each deployment."""
    there = len({replica.deployment for replica in of.running})
    asked = questions(of, there)
    return Recommended("aiconfigurator", recorded({one: given[name] for name, one in asked.items()}))(of)


def places(found: Decision) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(one.deployment, one.config.tp, one.placement.stages[0].device_ids) for one in found.replicas]


@pytest.mark.parametrize(
    ("cluster", "small", "large", "parts"),
    [
        ("h200:4", 4, 0, {"s0": 1, "s1": 1, "s2": 1, "s3": 1}),
        ("h200:8", 2, 0, {"s0": 4, "s1": 4}),
        ("h200:8", 2, 1, {"s0": 2, "s1": 2, "l0": 4}),  # what is left goes to the largest
        ("h200:2", 3, 0, {"s0": 1, "s1": 1, "s2": 1}),
    ],
)
def test_each_deployment_has_an_equal_part_of_the_gpus(
    cluster: str, small: int, large: int, parts: dict[str, int]
) -> None:
    assert gpu_parts(situation(arena(small, large, cluster=cluster)), 0) == parts


def test_what_is_left_of_the_gpus_goes_to_the_first_that_are_asked_for() -> None:
    of = situation(arena(6, cluster="h200:8", later=5))
    assert len(of.asked) == 1
    assert [gpu_parts(of, there)["s0"] for there in range(4)] == [2, 2, 1, 1]


def test_what_is_asked_follows_the_intent_and_the_rate() -> None:
    with_rates = arena(2, rates=True)
    asked = {intent: questions(situation(with_rates, intent), 0)["s0"] for intent in with_rates.world.intents}
    slo_s = with_rates.asked("s0").slo.e2e_s
    assert slo_s is not None
    for intent in (IntentKind.MIN_COST, IntentKind.MIN_GPU_HOURS):
        assert asked[intent].request_latency_ms is None
        assert asked[intent].rate_per_s == pytest.approx(with_rates.loads["s0"].rate_per_s, rel=0.005)
    for intent in (IntentKind.MIN_LATENCY, IntentKind.LATENCY_SLO):
        assert asked[intent].request_latency_ms == pytest.approx(1e3 * slo_s, rel=0.005)
    assert asked[IntentKind.MIN_LATENCY].tightest
    assert asked[IntentKind.MIN_LATENCY].rate_per_s is not None
    assert not asked[IntentKind.LATENCY_SLO].tightest
    assert asked[IntentKind.LATENCY_SLO].rate_per_s is None
    unknown = [questions(situation(arena(2), intent), 0)["s0"] for intent in with_rates.world.intents]
    assert [one.rate_per_s for one in unknown] == [None] * 4


def test_one_gpu_leaves_nothing_to_tighten() -> None:
    assert not questions(situation(arena(4)), 0)["s0"].tightest


def test_replicas_go_to_the_least_used_gpus() -> None:
    found = decided(situation(arena(2)), {"s0": advice(replicas=2), "s1": advice(replicas=2)})
    assert found.reasons == ()
    assert sorted(gpu for _, _, gpus in places(found) for gpu in gpus) == sorted(
        gpu.device_id for gpu in arena(2).cluster.gpus
    )
    assert [one.deployment for one in found.replicas].count("s0") == 2
    for replica in found.replicas:  # all free room, as the strong rule has it
        assert replica.placement.stages[0].bytes_per_gpu / 141e9 > 0.9
        assert replica.limits.max_batch == 256


def test_no_two_replicas_of_a_deployment_are_on_one_gpu() -> None:
    found = decided(situation(arena(1)), {"s0": advice(replicas=7)})
    assert len(places(found)) == len(arena(1).cluster.gpus)  # fewer, where there is room for fewer
    assert len({gpus for _, _, gpus in places(found)}) == len(found.replicas)


def test_a_recommended_tp_is_taken_and_gpus_are_shared_by_what_does_not_fit_apart() -> None:
    found = decided(situation(arena(1, 1, cluster="h200:2")), {"s0": advice(tp=1), "l0": advice(tp=2)})
    assert {(name, tp) for name, tp, _ in places(found)} == {("s0", 1), ("l0", 2)}
    assert found.reasons == ()


def test_a_deployment_leaves_room_to_those_that_are_expected(golden: Golden) -> None:
    of = arena(4, later=3)
    found = decided(situation(of), {"s0": advice(replicas=4)})
    assert len(found.replicas) == 1
    taken = found.replicas[0].placement.stages[0]
    gpus = tuple(
        replace(gpu, free_bytes=gpu.free_bytes - taken.bytes_per_gpu if gpu.device_id in taken.device_ids else 0)
        for gpu in of.cluster.gpus
    )
    later = of.situation(of.groups[1][1], IntentKind.MIN_LATENCY, ClusterSnapshot(gpus), running=found.replicas)
    refused = decided(later, {name: advice() for name in of.groups[1][1]})
    assert refused.replicas == ()
    golden("reports", refused.reasons)


@pytest.mark.parametrize("given", [None, advice(pp=2), advice(tp=3)], ids=["unknown", "stages", "degree"])
def test_what_has_no_answer_or_cannot_be_deployed_is_not_placed(given: Advice | None, golden: Golden) -> None:
    found = decided(situation(arena(1)), {"s0": given})
    assert found.replicas == ()
    golden("reports", found.reasons)


def test_another_load_or_a_limit_that_differs_was_not_asked() -> None:
    question = questions(situation(arena(2)), 0)["s0"]
    limit = question.request_latency_ms
    assert limit is not None
    answers = recorded({question: advice(tp=2)})
    assert answers.answer(replace(question, request_latency_ms=1.05 * limit)).advice == advice(tp=2)
    for other in (
        replace(question, request_latency_ms=1.2 * limit),
        replace(question, request_latency_ms=None),
        replace(question, rate_per_s=1.0),
        replace(question, input_tokens=question.input_tokens + 1),
        replace(question, gpu="a6000"),
        replace(question, gpus=1),
    ):
        found = answers.answer(other)
        assert found.advice is None
        assert found.reason is not None
        assert "was not asked" in found.reason


def test_answers_are_read_from_the_folder_of_the_world_or_the_file_that_it_names(tmp_path: Path) -> None:
    of = replace(arena(1), folder=tmp_path)
    question = questions(situation(of), 0)["s0"]
    data = to_json(recorded({question: advice(tp=4)}))
    assert make_contestant("aiconfigurator", of)(situation(of)).reasons
    (tmp_path / ANSWERS).write_bytes(gzip.compress(data))
    (replica,) = make_contestant("aiconfigurator", of)(situation(of)).replicas
    assert replica.config.tp == 4
    (tmp_path / "own.json").write_bytes(data)
    named = replace(of, world=replace(of.world, aiconfigurator_answers="own.json"))
    assert make_contestant("aiconfigurator", named)(situation(of)).replicas == (replica,)
    missing = replace(of, world=replace(of.world, aiconfigurator_answers="none.json"))
    with pytest.raises(NotFoundError, match="cannot be read"):
        make_contestant("aiconfigurator", missing)


def test_a_file_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    for name, data in (("a.json.gz", b"{}"), ("b.json.gz", gzip.compress(b"{}")), ("c.json", b"{}")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises((BadInputError, ConfigError)) as caught:
            read_answers(tmp_path / name)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["even-conversations", "three-on-eight", "arrive-over-time", "mixed-sizes"])
@pytest.mark.parametrize("information", [Information.NONE, Information.RATES])
def test_the_recording_answers_everything_that_is_asked_in_worlds_of_h200(
    name: str, information: Information
) -> None:
    world = replace(read_world(WORLDS / f"{name}.yaml"), information=information)
    answers = read_answers(WORLDS / ANSWERS)
    assert answers.aiconfigurator == "0.12.0"
    of = make_arena(world, world.seeds[0], WORLDS)
    for intent in world.intents:
        there = 0
        for _, names in of.groups:
            for deployment, question in questions(of.situation(names, intent, of.cluster), there).items():
                found = answers.answer(question)
                assert found.advice is not None, f"{deployment}: {found.reason}"
            there += len(names)


def test_the_recording_has_no_answer_for_the_a6000() -> None:
    path = WORLDS / "slow-all-reduce.yaml"
    of = make_arena(read_world(path), 1, WORLDS)
    played = play(of, make_contestant("aiconfigurator", of), IntentKind.MIN_COST)
    assert played.replicas == ()
    assert len(played.reasons) == len(of.world.models)
    assert all("a6000" in reason for reason in played.reasons)
