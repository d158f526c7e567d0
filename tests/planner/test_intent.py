"""Values that an intent accepts, and what each quality allows."""

from __future__ import annotations

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, SlotFormat, WeightFormat
from fingerprint.errors import ConfigError
from planner.intent import (
    MOST_BASE_SHARE,
    CostModel,
    Intent,
    IntentKind,
    Quality,
    Slo,
    Traffic,
    parse_slo,
    quality_needed,
)
from tests.golden_words import Golden


def test_defaults_are_the_contract_s() -> None:
    intent = Intent()
    assert (intent.kind, intent.cost_model, intent.quality) == ("min-cost", "memory-latency", "near")
    assert intent.percentile == 95
    assert (intent.slo, intent.budget, intent.rate_per_s) == (None, None, None)


def test_names_are_the_command_line_s() -> None:
    assert {str(kind) for kind in IntentKind} == {
        "min-latency",
        "min-cost",
        "min-memory",
        "min-gpu-hours",
        "max-throughput",
        "min-energy",
        "latency-slo",
        "cost-slo",
    }
    assert {str(model) for model in CostModel} == {"memory-latency", "memory", "gpu-hours", "dollars"}
    assert [str(quality) for quality in Quality] == ["exact", "near", "any"], "strictest first"


@pytest.mark.parametrize(
    ("text", "slo"),
    [
        ("ttft=0.5,tpot=0.05,e2e=10", Slo(ttft_s=0.5, tpot_s=0.05, e2e_s=10.0)),
        ("e2e=1e1", Slo(e2e_s=10.0)),
        (" ttft = 2 , tpot=1,", Slo(ttft_s=2.0, tpot_s=1.0)),
    ],
)
def test_slo_is_read(text: str, slo: Slo) -> None:
    assert parse_slo(text) == slo


@pytest.mark.parametrize(
    "text",
    [
        "",
        ",",
        "ttft",
        "itl=0.1",
        "ttft=1,ttft=2",
        "ttft=fast",
        "ttft=",
        "tpot=1_0",
        "tpot=٠.٥",
        "ttft=0",
        "ttft=-1",
        "tpot=nan",
        "e2e=inf",
        "e2e=1e999",
    ],
)
def test_slo_refuses(text: str, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        parse_slo(text)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": IntentKind.LATENCY_SLO},
        {"kind": IntentKind.COST_SLO},
        {"kind": IntentKind.COST_SLO, "cost_model": CostModel.DOLLARS},
        {"percentile": 0.0},
        {"percentile": 100.0},
        {"percentile": float("nan")},
        {"rate_per_s": 0.0},
        {"rate_per_s": float("nan")},
        {"rate_per_s": float("inf")},
        {"budget": -1.0},
        {"budget": float("nan")},
    ],
)
def test_intent_refuses(options: dict[str, object], golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        Intent(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("weights", "kv", "pruning", "needed"),
    [
        ("16bit", "16bit", "none", Quality.EXACT),
        ("16bit", "int8", "none", Quality.NEAR),
        ("16bit", "fp8", "none", Quality.NEAR),
        ("int8", "16bit", "none", Quality.NEAR),
        ("int8", "int8", "none", Quality.NEAR),
        ("fp8", "fp8", "none", Quality.NEAR),
        ("int4", "16bit", "none", Quality.ANY),
        ("gptq4", "int8", "none", Quality.ANY),
        ("16bit", "16bit", "wanda-2:4", Quality.ANY),
        ("16bit", "16bit", "sparsegpt", Quality.ANY),
        ("16bit", "16bit", "llm-pruner-25", Quality.ANY),
    ],
)
def test_quality_needed(weights: str, kv: str, pruning: str, needed: Quality) -> None:
    config = DeploymentConfig(weights=WeightFormat(weights), kv=KvFormat(kv), pruning=Pruning(pruning))
    assert quality_needed(config) is needed


@pytest.mark.parametrize("share", [-0.1, 1.0, 0.9999999999999999, float("nan")])
def test_requests_for_the_base_are_a_share_below_one(share: float, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        Traffic(variants=8, base_share=share)
    assert Traffic(variants=8, base_share=MOST_BASE_SHARE).base_share == 0.999


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_ranks_of_adapters(rank: int, golden: Golden) -> None:
    with golden.raises("planning", ConfigError):
        Traffic(variants=8, variant_rank=rank)
    assert Traffic(variants=8, variant_rank=0, delta_format=SlotFormat.INT2).variant_rank == 0


@pytest.mark.parametrize("hits", [-0.1, 1.0, float("nan")])
def test_prefix_hits_are_a_share_below_one(hits: float, golden: Golden) -> None:
    with pytest.raises(ConfigError, match="share"):
        Traffic(prefix_hits=hits)
    with golden.raises("planning", ConfigError):
        Traffic(draft_acceptance=hits)
