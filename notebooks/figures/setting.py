"""Setting of the paper's evaluation: eight A6000, its six models, its engine, one query at a time.

Decided before any figure was drawn, and used by all of them. Nothing here predicts.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from fingerprint.architectures import Architectures, Listed
from fingerprint.capability import EngineCapabilities, Exclusion
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat, Workload
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.families import read_spec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import ModelSpec
from planner.intent import IntentKind
from planner.space import MAX_PP, TP_DEGREES

__all__ = [
    "DEGREES",
    "ENGINE",
    "GPU",
    "INTENTS",
    "MODELS",
    "NUM_GPUS",
    "PAPER_ENGINE",
    "WORKLOAD",
    "config_of",
    "estimator_of",
    "spec_of",
]

GPU = gpu_spec("a6000")
NUM_GPUS = 8
# A single query that generates 100 tokens, as behind the paper's figure 1; its prompts' length is not given ("max
# 1K tokens"), so iServe's own default is taken.
WORKLOAD = Workload(batch=1, input_tokens=512, output_tokens=100)
INTENTS = (IntentKind.MIN_LATENCY, IntentKind.MIN_COST, IntentKind.MIN_MEMORY, IntentKind.MIN_GPU_HOURS)
DEGREES = tuple(
    (tp, pp)
    for tp in TP_DEGREES
    for pp in (1, 2, 4, MAX_PP)  # of the paper's axis; the planner has 3, 5, 6 and 7 as well
    if tp * pp <= NUM_GPUS
)
ENGINE = "tensorrt-llm-2024"
_OTHERS = frozenset({"falcon", "gptj"})
_NOT_IN_TABLE = "not in the paper's table 1"

# What the paper's TensorRT-LLM ran, by its table 1. That flow is gone from today's engines, and so from iServe's
# own tables; the choices are made under both. The table's merged cells are read so: the falcons and GPT-J have
# int8 and int4; the Llamas gptq4, int8 KV and pruning too. Falcon-7B's 71 heads rule out TP by themselves.
PAPER_ENGINE = EngineCapabilities(
    engine=ENGINE,
    architectures=Architectures(
        source="the paper's TensorRT-LLM",
        listed=dict.fromkeys(("LlamaForCausalLM", "FalconForCausalLM", "GPTJForCausalLM"), Listed()),
        otherwise=_NOT_IN_TABLE,
    ),
    weights=dict.fromkeys((WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.INT4, WeightFormat.GPTQ4)),
    kv=dict.fromkeys((KvFormat.BITS16, KvFormat.INT8)),
    pruning=dict.fromkeys((Pruning.NONE, Pruning.SPARSEGPT, Pruning.WANDA, Pruning.WANDA_2_4, Pruning.WANDA_4_8)),
    max_tp=max(TP_DEGREES),
    max_pp=MAX_PP,
    unprofiled="the paper's engine is not here",
    exclusions=(
        Exclusion(families=_OTHERS, weights=frozenset({WeightFormat.GPTQ4}), reason=_NOT_IN_TABLE),
        Exclusion(families=_OTHERS, kv=frozenset({KvFormat.INT8}), reason=_NOT_IN_TABLE),
        Exclusion(families=_OTHERS, pruning=frozenset(Pruning) - {Pruning.NONE}, reason=_NOT_IN_TABLE),
    ),
)


@cache
def _models() -> dict[str, ModelSpec]:
    found = json.loads((Path(__file__).parent / "models.json").read_text())
    return {name: read_spec(config) for name, config in found["models"].items()}


MODELS = ("Llama-2-7b-hf", "Llama-2-13b-hf", "Llama-2-70b-hf", "falcon-7b", "falcon-40b", "gpt-j-6b")


def spec_of(model: str) -> ModelSpec:
    """Return the model's shape."""
    return _models()[model]


@cache
def estimator_of(model: str) -> RooflineEstimator:
    """Calibrated on public measurements (decision 2); none of them is of an A6000."""
    return RooflineEstimator(spec_of(model), GPU)


def config_of(
    tp: int = 1,
    pp: int = 1,
    weights: WeightFormat = WeightFormat.BITS16,
    pruning: Pruning = Pruning.NONE,
    kv: KvFormat = KvFormat.BITS16,
) -> DeploymentConfig:
    """A configuration on the paper's engine."""
    return DeploymentConfig(tp=tp, pp=pp, weights=weights, kv=kv, pruning=pruning, engine=ENGINE)
