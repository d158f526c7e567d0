"""Variants in worlds: names and shares of requests, slots of each contestant, deployments that are merged."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fingerprint.config import DeploymentConfig
from fingerprint.errors import BadInputError, ConfigError, InfeasibleError, PolicyError
from fingerprint.lora.slot_bytes import reserved_bytes
from iserve.evaluation.arena import Arena, make_arena
from iserve.evaluation.contestants import (
    CONTESTANTS,
    FIRST_FIT_MERGED,
    OF_VARIANTS,
    OURS,
    OURS_FCFS,
    OURS_ROUND_ROBIN,
    RULE_MERGED,
    STANDARD,
    STRONG_RULE,
    check_names,
    make_contestant,
)
from iserve.evaluation.metrics import metrics_of, quantile
from iserve.evaluation.oracle import rank_of, search
from iserve.evaluation.play import Placed, Played, play
from iserve.evaluation.runner import WorldRun, evaluate
from iserve.evaluation.workload import load_of, make_requests
from iserve.evaluation.world import OracleBudget
from iserve.evaluation.world_file import read_world
from planner.intent import IntentKind
from tests.golden_words import Golden
from tests.iserve.evaluation.test_evaluation import run
from tests.iserve.evaluation.worlds import LLAMA_8B, small_world, world_values
from traces.request import Request

HERE = Path()
WORLDS = Path(__file__).parents[3] / "notebooks" / "worlds" / "variants"
LATENCY = IntentKind.MIN_LATENCY
ADAPTERS = {"number": 8, "rank": 16}
DELTAS = {"number": 8, "delta_format": "int2", "popularity": "zipf:1.5", "base_share": 0.2}


def models(*variants: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return models `chat` and `mail`, with the variants that are given for each."""
    named = zip(("chat", "mail"), variants, strict=False)
    return [{"name": name, "config": LLAMA_8B} | ({"variants": own} if own else {}) for name, own in named]


def arena_of(*variants: dict[str, Any] | None, **changed: Any) -> Arena:
    return make_arena(small_world(models=models(*variants), **changed), 1, HERE)


def played_by(arena: Arena, name: str, intent: IntentKind = LATENCY) -> Played:
    """Return the course of a contestant as the runner has it."""
    own = arena.merged if CONTESTANTS[name].is_merged else arena
    return play(own, make_contestant(name, own), intent, routing=CONTESTANTS[name].routing)


class TestRequests:
    def test_variants_change_names_alone(self) -> None:
        plain = make_requests(small_world(), 1, HERE)
        varied = make_requests(small_world(models=models(ADAPTERS, DELTAS)), 1, HERE)
        of = small_world(models=models(ADAPTERS, DELTAS)).model_of
        assert tuple(replace(one, model=of[one.model]) for one in varied) == plain

    def test_variants_of_one_model_do_not_change_those_of_another(self) -> None:
        one, both = (
            (make_requests(small_world(models=models(None, of)), 1, HERE) for of in (ADAPTERS, ADAPTERS)),
            make_requests(small_world(models=models(DELTAS, ADAPTERS)), 1, HERE),
        )
        first, second = one
        assert first == second
        assert [r.model for r in first if "mail" in r.model] == [r.model for r in both if "mail" in r.model]

    def test_a_longer_horizon_begins_with_the_same_variants(self) -> None:
        short, long = (
            make_requests(small_world(models=models(DELTAS), horizon_s=seconds), 1, HERE) for seconds in (20, 40)
        )
        assert long[: len(short)] == short

    @pytest.mark.parametrize(
        ("law", "ratio"), [({"popularity": "even"}, 1.0), ({}, 2.0), ({"popularity": "zipf:1.5"}, 2.83)]
    )
    def test_shares_are_those_of_the_law(self, law: dict[str, Any], ratio: float) -> None:
        world = small_world(models=models({"number": 2, "rank": 8, "base_share": 0.25} | law), horizon_s=2000)
        counts = Counter(one.model for one in make_requests(world, 1, HERE))
        assert counts["chat/1"] / counts["chat/2"] == pytest.approx(ratio, rel=0.06)
        assert counts["chat"] / counts.total() == pytest.approx(0.25, rel=0.06)

    def test_without_a_share_no_request_is_for_the_base(self) -> None:
        requests = make_requests(small_world(models=models(ADAPTERS), horizon_s=2000), 1, HERE)
        assert "chat" not in {one.model for one in requests}

    def test_a_trace_that_names_variants_decides(self, tmp_path: Path) -> None:
        names = ["chat", "chat/2", "mail", "chat/2", "mail", "chat"] * 5
        lines = [f"{row},10,5,{name}" for row, name in enumerate(names)]
        (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens,model\n" + "\n".join(lines))
        world = small_world(models=models(ADAPTERS, ADAPTERS), requests={"trace": "t.csv"}, horizon_s=28)
        found = [one.model for one in make_requests(world, 1, tmp_path)]
        own = [name for name in names if "chat" in name][: sum("chat" in name for name in found)]
        assert [name for name in found if "chat" in name] == own
        assert all(name.startswith("mail/") for name in found if "mail" in name)  # drawn: the trace names none

    def test_a_trace_that_names_no_such_variant_is_refused(self, tmp_path: Path) -> None:
        lines = [f"{row},10,5,chat/9" for row in range(30)]
        (tmp_path / "t.csv").write_text("arrival_s,input_tokens,output_tokens,model\n" + "\n".join(lines))
        world = small_world(models=models(ADAPTERS), requests={"trace": "t.csv"})
        with pytest.raises(ConfigError, match="calls chat/9"):
            make_requests(world, 1, tmp_path)

    def test_load_of_a_model_is_that_of_all_its_variants(self) -> None:
        arena = arena_of(DELTAS, ADAPTERS)
        merged = load_of(arena.world, arena.requests, arena.merged.deployed)
        of_chat = sum(one.rate_per_s for name, one in merged.items() if arena.model_of[name] == "chat")
        assert arena.loads["chat"].rate_per_s == pytest.approx(of_chat)


class TestSlots:
    @pytest.mark.parametrize("variants", [ADAPTERS, DELTAS, {"number": 8, "delta_mib": 500, "slots": 3}])
    @pytest.mark.parametrize("name", [*STANDARD, OURS_FCFS, OURS_ROUND_ROBIN])
    def test_all_that_know_variants_have_the_same_slots(self, variants: dict[str, Any], name: str) -> None:
        arena = arena_of(variants)
        replicas = played_by(arena, name).replicas
        own = {(one.config.adapter_slots, one.config.adapter_rank, one.config.delta_mib) for one in replicas}
        slots = arena.models["chat"].options.adapter_slots
        assert own == {(slots, 16, arena.models["chat"].options.intent.traffic.delta_mib)}
        assert slots == variants.get("slots", slots) > 0

    def test_memory_of_slots_is_taken_from_the_kv_cache(self) -> None:
        """The strong rule's replica has as many bytes, of which its slots take theirs."""
        plain, varied = arena_of(None), arena_of(DELTAS)
        (without,), (with_slots,) = (played_by(arena, STRONG_RULE).replicas for arena in (plain, varied))
        assert without.placement == with_slots.placement
        assert without.limits.kv_tokens is not None
        assert with_slots.limits.kv_tokens is not None
        spec = varied.models["chat"].spec
        token_bytes = spec.kv_bytes_per_token_per_layer(without.config.kv) * spec.num_layers
        taken = (without.limits.kv_tokens - with_slots.limits.kv_tokens) * token_bytes
        assert taken == pytest.approx(reserved_bytes(spec, with_slots.config, spec.num_layers), rel=0.05)

    def test_size_of_a_delta_is_that_of_its_format(self) -> None:
        """Llama-3.1-8B in int2 (``fingerprint.delta.delta_bytes``): 2,264.4 million bytes."""
        traffic = arena_of(DELTAS).models["chat"].options.intent.traffic
        assert (traffic.delta_mib, traffic.variants, traffic.variant_skew, traffic.base_share) == (
            2160,
            8,
            1.5,
            0.2,
        )

    @pytest.mark.parametrize("name", [OURS, STRONG_RULE, OURS_FCFS, OURS_ROUND_ROBIN])
    def test_every_request_is_answered_where_its_variant_is(self, name: str) -> None:
        arena = arena_of(ADAPTERS, DELTAS, horizon_s=10)
        result = played_by(arena, name).result
        assert result.outcomes.completed.all()
        for index, model in enumerate(("chat", "mail")):
            own = [one.model for one in arena.requests if arena.model_of[one.model] == model]
            found = result.deployments[index].variants
            assert found is not None
            assert result.deployments[index].arrived == len(own)
            assert found.requests == sum(one != model for one in own)
            assert found.asked_for == len(set(own) - {model})
            assert found.loads >= found.asked_for

    def test_a_longer_step_lengthens_what_adapters_add(self) -> None:
        for variants in (ADAPTERS, DELTAS):
            plain, slow = arena_of(variants), arena_of(variants, truth={"step_times": 2.0})
            config = DeploymentConfig(
                engine="vllm",
                adapter_slots=4,
                adapter_rank=16,
                delta_mib=plain.models["chat"].options.intent.traffic.delta_mib,
            )
            one, two = plain.slot_cost("chat", config), slow.slot_cost("chat", config)
            assert one is not None
            assert two is not None
            assert two.step_s(8, 3) == pytest.approx(2 * one.step_s(8, 3)) != 0
            assert (one.load_s, one.prompt_share) == (two.load_s, two.prompt_share)
            if one.prompt_s is not None and two.prompt_s is not None:
                assert two.prompt_s(512) == pytest.approx(2 * one.prompt_s(512)) != 0

    def test_a_replica_without_slots_for_its_variants_is_refused(self, golden: Golden) -> None:
        arena = arena_of(ADAPTERS)
        (replica,) = played_by(arena, STRONG_RULE).replicas
        bare = replace(replica, config=replica.config.without_slots)
        with golden.raises("simulator-errors", PolicyError):
            play(arena, Placed("bare", (bare,)), LATENCY)

    def test_oracle_is_never_worse_than_its_starts(self) -> None:
        arena = arena_of(ADAPTERS)
        starts = [played_by(arena, name) for name in (OURS, STRONG_RULE)]
        found = search(arena, LATENCY, [one.replicas for one in starts], OracleBudget(simulations=12))
        assert rank_of(found.metrics, LATENCY) <= min(
            rank_of(metrics_of(arena, one.result), LATENCY) for one in starts
        )
        assert {one.config.adapter_slots for one in found.replicas} == {8}


class TestMerged:
    def test_each_variant_is_a_deployment_and_the_base_where_it_is_called(self) -> None:
        merged = arena_of(ADAPTERS, DELTAS).merged
        chat = [f"chat/{index}" for index in range(1, 9)]
        assert merged.names == (*chat, "mail", *(name.replace("chat", "mail") for name in chat))
        assert merged.merged is merged

    @pytest.mark.parametrize("name", [RULE_MERGED, FIRST_FIT_MERGED])
    def test_no_merged_replica_has_slots_and_all_is_answered(self, name: str) -> None:
        arena = arena_of(DELTAS)
        played = played_by(arena, name)
        assert {one.config.adapter_slots for one in played.replicas} == {0}
        assert {one.deployment for one in played.replicas} == set(arena.merged.names)
        assert played.result.outcomes.completed.all()
        assert all(one.variants is None for one in played.result.deployments)

    def test_guard_is_of_all_requests_to_a_model_and_its_variants(self) -> None:
        arena = arena_of(ADAPTERS, None)
        result = played_by(arena, RULE_MERGED).result
        ratios = result.outcomes.e2e_s / arena.all_alone_s
        is_chat = np.array([arena.model_of[one.model] == "chat" for one in arena.requests])
        assert metrics_of(arena.merged, result).guard_ratio == max(
            quantile(ratios[own], 0.95) or 0.0 for own in (is_chat, ~is_chat)
        )

    def test_what_has_no_room_stays_unanswered(self) -> None:
        """An H200 has no room for twelve copies of 16 GB; on slots they have one."""
        arena = arena_of({"number": 12, "rank": 16, "popularity": "even"}, cluster="h200:1", horizon_s=5)
        merged = played_by(arena, RULE_MERGED)
        served = {one.deployment for one in merged.replicas}
        assert len(served) + len(merged.reasons) == 12
        answered = [one.model in served for one in arena.requests]
        assert merged.result.outcomes.completed.tolist() == answered
        assert not all(answered)
        assert played_by(arena, STRONG_RULE).result.outcomes.completed.all()

    def test_more_than_a_thousand_are_refused(self, golden: Golden) -> None:
        arena = arena_of({"number": 1_001, "rank": 16})
        with golden.raises("simulator-errors", ConfigError):
            _ = arena.merged

    def test_without_variants_there_is_nothing_to_merge(self) -> None:
        arena = arena_of(None, None)
        assert arena.merged is arena


@pytest.mark.slow
def test_no_variants_are_as_no_word_of_them() -> None:
    """A world with 0 variants has the results of one that does not name any, and new contestants those of old."""
    none = {"number": 0, "rank": 16}
    names = (OURS, STRONG_RULE, "first-fit", "max-tp", *OF_VARIANTS)
    one, other = (
        evaluate([WorldRun(small_world(models=models(*of), horizon_s=5), HERE)], contestants=names).worlds[0]
        for of in ((None, None), (none, none))
    )
    assert one == other
    found = {(result.contestant, result.intent): result.seeds for result in one.results}
    for intent in small_world().intents:
        assert found[OURS_FCFS, intent] == found[OURS_ROUND_ROBIN, intent] == found[OURS, intent]
        assert found[RULE_MERGED, intent] == found[STRONG_RULE, intent]
        assert found[FIRST_FIT_MERGED, intent] == found["first-fit", intent]


def test_contestants_of_variants_are_asked_in_worlds_with_variants_alone() -> None:
    assert check_names(()) == STANDARD
    assert check_names((), variants=True) == (*STANDARD, *OF_VARIANTS)


@pytest.mark.parametrize(
    ("variants", "named"),
    [
        pytest.param({"number": 4}, "rank", id="neither adapters nor deltas"),
        pytest.param({"number": 4, "rank": 8, "delta_mib": 9}, "rank and delta_mib", id="both"),
        pytest.param({"rank": 8}, "number", id="no number"),
        pytest.param({"number": -1, "rank": 8}, "-1", id="below 0"),
        pytest.param({"number": 10_001, "rank": 8}, "10,001", id="too many"),
        pytest.param({"number": 4, "rank": 0}, "rank 1", id="no rank"),
        pytest.param({"number": 4, "rank": 5000}, "5000", id="a rank that no slot holds"),
        pytest.param({"number": 4, "rank": 1.5}, "rank", id="a rank that is not whole"),
        pytest.param({"number": 4, "delta_format": "int5"}, "int5", id="unknown format"),
        pytest.param({"number": 4, "delta_mib": 0}, "delta_mib", id="a delta of nothing"),
        pytest.param({"number": 4, "delta_mib": 2**21}, "2,097,152", id="a delta beyond all slots"),
        pytest.param({"number": 4, "rank": 8, "popularity": "geometric"}, "geometric", id="unknown law"),
        pytest.param({"number": 4, "rank": 8, "popularity": "zipf:x"}, "zipf:x", id="no exponent"),
        pytest.param({"number": 4, "rank": 8, "popularity": "zipf:-1"}, "zipf", id="an exponent below 0"),
        pytest.param({"number": 4, "rank": 8, "popularity": "zipf:nan"}, "zipf", id="not a number"),
        pytest.param({"number": 4, "rank": 8, "base_share": 1}, "base", id="only the base"),
        pytest.param({"number": 4, "rank": 8, "slots": 65}, "65", id="too many slots"),
        pytest.param({"number": 4, "rank": 8, "slots": -1}, "-1", id="slots below 0"),
        pytest.param({"number": 4, "rank": 8, "skew": 1}, "skew", id="unknown field"),
        pytest.param(3, "variants", id="a bare number"),
    ],
)
def test_wrong_variants_are_one_line(variants: Any, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        small_world(models=models(variants))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_with_the_name_of_a_variant_is_refused(golden: Golden) -> None:
    named = [*models(ADAPTERS), {"name": "chat/8", "config": LLAMA_8B}]
    with golden.raises("simulator-errors", ConfigError):
        small_world(models=named)


def test_slots_that_no_gpu_holds_are_named(golden: Golden) -> None:
    """64 slots of 2,160 MiB are 145 GB; an H200 has 141."""
    with golden.raises("simulator-errors", InfeasibleError):
        arena_of({"number": 64, "delta_format": "int2", "slots": 64})


def test_an_engine_that_serves_no_adapters_of_a_model_is_refused() -> None:
    mistral = LLAMA_8B | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    named = [{"name": "chat", "config": mistral, "variants": ADAPTERS}]
    with pytest.raises(BadInputError, match="variants of 'chat'"):
        make_arena(small_world(models=named, engine="tensorrt-llm"), 1, HERE)


def test_command_says_what_became_of_slots_and_of_what_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], golden: Golden
) -> None:
    path = tmp_path / "w.yaml"
    many = {"number": 60, "rank": 16, "popularity": "even"}
    values = world_values(models=models(many), intents=["min-latency"], cluster="h200:1", horizon_s=5)
    path.write_text(json.dumps(values))
    assert run(monkeypatch, str(path), "--contestants", f"{STRONG_RULE},{RULE_MERGED}") == 0
    printed = capsys.readouterr().out
    golden("cli", [one for one in printed.splitlines() if one.startswith(f"{STRONG_RULE}:") or "--json" in one])
    assert f"{RULE_MERGED}: " not in printed.replace(f"{RULE_MERGED}, min-latency: chat/", "")


def test_a_request_for_an_unknown_name_never_begins() -> None:
    arena = arena_of(ADAPTERS)
    asked = replace(arena, requests=(Request(60.0, 1, 1, model="chat/9"),))
    with pytest.raises(BadInputError, match="never deployed"):
        played_by(asked, STRONG_RULE)


@pytest.mark.parametrize("name", ["deltas-even", "deltas-in-bursts"])
def test_no_request_of_the_recorded_worlds_of_deltas_waits_for_a_load_in_plans(name: str) -> None:
    """All their variants stay loaded, so that what waits for loads are changes none of their recorded plans."""
    path = WORLDS / f"{name}.yaml"
    (model,) = make_arena(read_world(path), 1, path.parent).models.values()
    traffic, slots = model.options.intent.traffic, model.options.adapter_slots
    config = DeploymentConfig(engine="vllm", adapter_slots=slots, adapter_rank=8, delta_mib=traffic.delta_mib)
    assert model.estimator.estimate(config, model.options.workload).load_waits is None
    fewer = model.estimator.estimate(replace(config, adapter_slots=4), model.options.workload)
    assert fewer.load_waits is not None
