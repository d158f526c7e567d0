"""Figures 11 to 13 without load: what each intent chooses, against the fixed rules, by the estimator alone.

One query at a time on an idle cluster: nothing waits, nothing is shared. What load does to it is the simulator's
to say.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from daemon.engines.registry import capabilities_for
from fingerprint.capability import EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.estimates import Estimate
from iserve.planning.engine_choice import by_preference
from iserve.planning.pipeline import PlanOptions, hypothetical_hardware, make_plan
from notebooks.figures.effects import point
from notebooks.figures.figure import NOT_GIVEN, Chart, Figure, Finding, Table
from notebooks.figures.setting import (
    GPU,
    INTENTS,
    MODELS,
    NUM_GPUS,
    PAPER_ENGINE,
    WORKLOAD,
    config_of,
    estimator_of,
    spec_of,
)
from planner.costs import total_bytes
from planner.intent import Intent, IntentKind, Quality
from planner.plan import Plan
from planner.space import MAX_PP, TP_DEGREES, shape_refusal

__all__ = ["METRICS", "RULES", "SETS", "Rule", "figure_11_to_13", "plan_of", "today"]

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Metric:
    """Metric that an intent is judged by."""

    name: str
    of: Callable[[Estimate], float]


METRICS: Mapping[IntentKind, Metric] = {
    IntentKind.MIN_LATENCY: Metric("latency s", lambda e: e.e2e_s.value),
    IntentKind.MIN_COST: Metric("cost GiB*s", lambda e: total_bytes(e.memory) / GIB * e.e2e_s.value),
    IntentKind.MIN_MEMORY: Metric("memory GiB", lambda e: total_bytes(e.memory) / GIB),
    IntentKind.MIN_GPU_HOURS: Metric("GPU-seconds", lambda e: e.config.num_gpus * e.e2e_s.value),
}
# The paper's sets of models: figures 11 and 13, and figure 12.
SETS = {
    "large (figures 11, 13)": ("Llama-2-70b-hf", "falcon-40b", "falcon-40b", "Llama-2-7b-hf"),
    "small (figure 12)": (
        *("Llama-2-13b-hf",) * 2,
        *("Llama-2-7b-hf",) * 2,
        *("falcon-40b",) * 2,
        *("gpt-j-6b",) * 2,
    ),
}

Rule = Callable[[str], DeploymentConfig]


def max_tp(model: str) -> DeploymentConfig:
    """The paper's TensorRT-LLM_TP: the largest TP that the model's shape allows, 16 bits."""
    able = (config_of(tp) for tp in reversed(TP_DEGREES))
    return next(config for config in able if shape_refusal(spec_of(model), config, NUM_GPUS) is None)


def max_pp(model: str) -> DeploymentConfig:
    """The paper's TensorRT-LLM_PP: the largest PP, 16 bits."""
    return config_of(1, MAX_PP)


RULES: Mapping[str, Rule] = {"max TP": max_tp, "max PP": max_pp}


def plan_of(
    model: str,
    kind: IntentKind,
    engines: tuple[EngineCapabilities, ...] = (PAPER_ENGINE,),
    *,
    quality: Quality = Quality.ANY,
) -> Plan:
    """iServe's plan on the idle cluster. ``any`` quality: the paper leaves a model's answers out of account."""
    options = PlanOptions(intent=Intent(kind=kind, quality=quality), workload=WORKLOAD, policy="hybrid")
    return make_plan(spec_of(model), hypothetical_hardware(GPU, NUM_GPUS), estimator_of(model), engines, options)


def today() -> tuple[EngineCapabilities, ...]:
    """The engines that iServe plans for now, in its order of preference."""
    return by_preference(capabilities_for("auto"), GPU)


def figure_11_to_13() -> Figure:
    """Every intent's choice for every model, and the reductions against the rules over the paper's sets."""
    plans = {(kind, model): plan_of(model, kind) for kind in INTENTS for model in MODELS}
    return Figure(
        number="11-13",
        title="Each intent against maximum TP and maximum PP, without load",
        source="roofline, 8 idle A6000, one query of 512 tokens in, 100 out; the paper's engine and formats",
        tables=(_choices(plans), _reductions(plans), _not_best(plans)),
        findings=_findings(plans),
        charts=tuple(
            Chart(
                f"{kind}: {METRICS[kind].name}",
                "log scale where it spans much",
                MODELS,
                (
                    ("iServe", tuple(_value(plans, kind, m) for m in MODELS)),
                    *(
                        (n, tuple(METRICS[kind].of(point(m, r(m)).estimate) for m in MODELS))
                        for n, r in RULES.items()
                    ),
                ),
            )
            for kind in INTENTS
        ),
    )


_Plans = Mapping[tuple[IntentKind, str], Plan]


def _value(plans: _Plans, kind: IntentKind, model: str) -> float:
    best = plans[kind, model].best
    assert best is not None, f"nothing is feasible for {model}"
    assert best.estimate is not None
    return METRICS[kind].of(best.estimate)


def _choices(plans: _Plans) -> Table:
    rows: list[tuple[str | float, ...]] = []
    for (kind, model), plan in plans.items():
        best = plan.best
        assert best is not None
        rules = [METRICS[kind].of(point(model, rule(model)).estimate) for rule in RULES.values()]
        rows.append((str(kind), model, _short(best.config), _value(plans, kind, model), *rules))
    return Table(
        "the choice, and each rule, in the intent's own metric",
        ("intent", "model", "iServe", "", *RULES),
        tuple(rows),
    )


def _short(config: DeploymentConfig) -> str:
    kv = "" if config.kv == "16bit" else f" kv {config.kv}"
    return (
        f"({config.tp},{config.pp}) {config.weights}{kv}{'' if config.pruning == 'none' else f' {config.pruning}'}"
    )


def _reduction(plans: _Plans, kind: IntentKind, models: tuple[str, ...], rule: Rule) -> float:
    """Return the reduction of the mean over the set's models."""
    ours = statistics.mean(_value(plans, kind, model) for model in models)
    theirs = statistics.mean(METRICS[kind].of(point(model, rule(model)).estimate) for model in models)
    return ours / theirs - 1


def _reductions(plans: _Plans) -> Table:
    rows = [
        (str(kind), name, *(f"{_reduction(plans, kind, models, rule):+.1%}" for rule in RULES.values()))
        for kind in INTENTS
        for name, models in SETS.items()
    ]
    return Table("mean over a set, iServe against each rule", ("intent", "set", *RULES), tuple(rows))


def _not_best(plans: _Plans) -> Table:
    """Cells where another would have been better in the intent's own metric, and why it was refused."""
    near = {key: plan_of(key[1], key[0], today(), quality=Quality.NEAR) for key in plans}
    rows: list[tuple[str | float, ...]] = []
    for setting, found in (("paper's engine, any quality", plans), ("today's engines, near", near)):
        for (kind, model), plan in found.items():
            for better in plan.why_not.better[:1]:
                best = plan.best
                assert best is not None
                assert best.objective is not None
                loss = f"{best.objective / better.objective - 1:+.1%}"
                chosen, other = _short(best.config), _short(better.config)
                rows.append((setting, str(kind), model, chosen, loss, other, better.reason[:70]))
    columns = ("setting", "intent", "model", "chosen", "worse by", "better one", "refused because")
    return Table(
        "cells where the choice is not the best of the space on its intent's own metric", columns, tuple(rows)
    )


_PAPER = {
    IntentKind.MIN_LATENCY: "-77.62% on average, all baselines and loads",
    IntentKind.MIN_COST: "-86.70% on average, all baselines and loads",
    IntentKind.MIN_MEMORY: "-75.97% on average; -74.36 to -83.92% in figure 13",
    IntentKind.MIN_GPU_HOURS: "-86.31% on average, all baselines and loads",
}


def _findings(plans: _Plans) -> tuple[Finding, ...]:
    found = []
    for kind in INTENTS:
        changes = [_reduction(plans, kind, models, rule) for models in SETS.values() for rule in RULES.values()]
        ours = f"{statistics.mean(changes):.1%} on average, {min(changes):.1%} to {max(changes):.1%}; no load"
        found.append(Finding(f"{kind}: {METRICS[kind].name}", _PAPER[kind], ours))
    chosen = plans[IntentKind.MIN_LATENCY, "Llama-2-7b-hf"].best
    large = plans[IntentKind.MIN_LATENCY, "falcon-40b"].best
    assert chosen is not None
    assert large is not None
    return (
        *found,
        Finding(
            "min-latency, (tp,pp): Llama-2-7B; Falcon-40B",
            "(4,1); (4,1)",
            f"{_short(chosen.config)}; {_short(large.config)}",
        ),
        Finding(
            "GPU throughput; queries served while others wait", "4.72 times on average", "figure 11, under load"
        ),
        Finding("against Accelerate and AlpaServe", "in the averages above", "figure 11, under load"),
        Finding("share of int4 in min-memory's choices", f"heavily ({NOT_GIVEN})", _share_of_int4(plans)),
    )


def _share_of_int4(plans: _Plans) -> str:
    best = [plans[IntentKind.MIN_MEMORY, model].best for model in MODELS]
    quantized = sum(b is not None and b.config.weights in ("int4", "gptq4") for b in best)
    return f"{quantized} of {len(best)} models"
