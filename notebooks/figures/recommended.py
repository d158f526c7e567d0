"""Recommendations of AIConfigurator, as a deployer: its own search, objective and limits, recorded beforehand.

Asked by ``tests/bench/aiconfigurator_choice.py`` for the four H200s: most output tokens a second and GPU within
its own limits (TTFT 2 s, TPOT 30 ms) or, for latency, within an E2E of 5 s; of a checkpoint in 16 bits or in fp8.
It is deployed as it says, its batch too, once per deployment, on the least loaded GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from fingerprint.codec import from_json
from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from iserve.simulation.baselines import Baseline, World, knowledge_of
from planner.intent import IntentKind, Quality
from tests.bench.accuracy import RESULTS
from tests.bench.kept import read_kept
from traces.baselines.aiconfigurator import AIC_BACKENDS, AIC_SYSTEMS
from traces.baselines.first_fit import FirstFit, Preference
from traces.baselines.model_info import Knowledge, Places, StepTimes

__all__ = ["Advice", "Answer", "Asked", "Recorded", "recommendations", "recommended"]

_OWN_MS = {"ttft": 2000.0, "tpot": 30.0}
_TIGHT_MS = {"request_latency": 5000.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """Question put to AIConfigurator. ``architecture``: in place of the model's own, which it refuses."""

    model: str
    architecture: str | None
    checkpoint: str
    limits_ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A configuration and the batch to launch it for; times and throughputs by AIConfigurator's own figures."""

    backend_version: str
    tp: int
    pp: int
    weights: WeightFormat
    kv: KvFormat
    batch: int
    ttft_s: float
    tpot_s: float
    e2e_s: float
    tokens_per_s_per_gpu: float
    disaggregated_tokens_per_s_per_gpu: float  # of workers for prompts and workers for answers; not deployed


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """``reason``: why there is no advice."""

    asked: Asked
    advice: Advice | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recorded:
    """All that was asked, of one machine and length."""

    aiconfigurator: str  # its version
    date: str
    python: str
    wall_s: float
    system: str
    backend: str
    gpus: int
    input_tokens: int
    output_tokens: int
    answers: tuple[Answer, ...]


@cache
def recommendations() -> Recorded:
    """Return the recommendations that are committed."""
    path = RESULTS / "aiconfigurator_choices.json"
    return from_json(read_kept(path), Recorded, what=str(path))


def recommended(world: World, kind: IntentKind, quality: Quality) -> FirstFit:
    """Deploys ``world``'s models as AIConfigurator recommends.

    Args:
        kind: ``min-latency``: within the tight limit; any other: within AIConfigurator's own.
        quality: ``exact``: of a checkpoint in 16 bits; any other: of one in fp8.
    """
    limits = _TIGHT_MS if kind is IntentKind.MIN_LATENCY else _OWN_MS
    weights = WeightFormat.BITS16 if quality is Quality.EXACT else WeightFormat.FP8
    preferences = []
    for name, model in world.models.items():
        known = knowledge_of(model, world.gpu, world.scenario.cluster)
        advice = None if _other_question(known, world) else _advice(name, weights, limits)
        configs = () if advice is None else tuple(c for c in known.configs if _is(advice, c))
        batch = 1 if advice is None else advice.batch
        preferences.append(Preference(known, configs, batch, f"no recommendation for {name} was recorded"))
    return FirstFit(Baseline.AICONFIGURATOR, preferences, Places(world.gpu.link_group_size), StepTimes())


def _other_question(known: Knowledge, world: World) -> bool:
    """Return whether the recorded question is not what this world would ask."""
    asked, workload = recommendations(), known.workload
    return (asked.system, asked.gpus, asked.input_tokens, asked.output_tokens) != (
        AIC_SYSTEMS.get(world.gpu.name), len(world.scenario.cluster.gpus), workload.input_tokens,
        workload.output_tokens,
    )  # fmt: skip


def _advice(model: str, weights: WeightFormat, limits_ms: Mapping[str, float]) -> Advice | None:
    """Return the advice for the architecture that it takes the model for: its own, or one of the same shape."""
    return next(
        (
            answer.advice
            for answer in recommendations().answers
            if answer.asked.model.rpartition("/")[2] == model
            and (answer.asked.checkpoint, answer.asked.limits_ms) == (weights, limits_ms)
            and answer.advice is not None
        ),
        None,
    )


def _is(advice: Advice, config: DeploymentConfig) -> bool:
    return (AIC_BACKENDS.get(config.engine), config.tp, config.pp, config.weights, config.kv, config.pruning) == (
        recommendations().backend, advice.tp, advice.pp, advice.weights, advice.kv, Pruning.NONE
    )  # fmt: skip
