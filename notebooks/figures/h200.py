"""The same comparison on four H200s: today's models, profiles measured on one with vLLM, continuous batching.

Measured is one GPU in 16 bits; other degrees and formats are scaled from that by the roofline, and what is
simulated takes as long as that says. So iServe chooses by value here, as the baselines do and as where all is
measured: a user with such a profile alone gets what was measured first (``planner.evidence``). Decided before the
results: two deployments each of the two current models that were recorded, one every half minute; requests are the
Azure traces with eight intervals of a second added up, which offers about a quarter to all of what four H200s
serve (batch 32: 3,500 output and 40,000 prompt tokens a second each) at rate factors of 0.25 to 1; until one
minute after the last deployment; quality ``near``, iServe's default; SLO as in figure 11. (Three deployments each
were tried in one cell: AlpaServe's search took too long.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Estimate, Estimator
from fingerprint.gpus import gpu_spec
from iserve.planning.pipeline import PlanOptions
from iserve.simulation.baselines import Baseline
from iserve.simulation.running import SimulatedModel, measured_model
from notebooks.figures.comparison import (
    COST,
    LATENCY,
    OWN,
    Place,
    Scene,
    against_each,
    cells_of,
    chart,
    lost,
    table,
)
from notebooks.figures.contest import BASELINES, Contestant, iserve
from notebooks.figures.figure import Figure, Finding
from notebooks.figures.load import INTERVAL_S, SEED, Site, azure, trace_source
from notebooks.figures.recommended import recommendations
from notebooks.figures.recordings import recording_of
from planner.intent import IntentKind, Quality
from traces.rate_scaling import compress
from traces.request import Request
from traces.simulator.scenario import Service
from traces.transforms import clip

__all__ = ["ADVISED", "H200_SITE", "SCENE", "figure_h200"]

GPU = gpu_spec("h200-sxm")
MODELS = ("Llama-3.1-8B", "Mistral-7B-v0.1") * 2
FACTORS = (0.25, 0.75)
TRACES = ("code", "conv")
_AGGREGATE = 8
_DEPLOY_EVERY_S = 30.0


class _Remembered:
    """An estimator that is asked each question once: AlpaServe's search asks for each deployment anew. All its
    answers count as equally well known."""

    def __init__(self, estimator: Estimator) -> None:
        self.name, self._estimator = estimator.name, estimator
        self._answers: dict[tuple[DeploymentConfig, Workload], Estimate] = {}

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        key = (config, workload)
        if key not in self._answers:
            self._answers[key] = replace(self._estimator.estimate(config, workload), measured_config=None)
        return self._answers[key]


@cache
def _remembered(name: str) -> SimulatedModel:
    model = measured_model(name, recording_of(name).profile, GPU, PlanOptions())
    return replace(model, estimator=_Remembered(model.estimator))


def _measured(name: str, options: PlanOptions) -> SimulatedModel:
    return replace(_remembered(name), options=options)


H200_SITE = Site(
    gpu=GPU,
    num_gpus=4,
    workload=Workload(batch=32, input_tokens=2048, output_tokens=512),
    service=Service.CONTINUOUS,
    quality=Quality.NEAR,
    model=_measured,
)


def _requests(trace: str, factor: float, seed: int) -> Iterator[Request]:
    """More of them at once than the paper's (module docstring), until a minute after the last deployment."""
    requests = compress(azure(trace), rate_factor=factor, interval_s=INTERVAL_S, aggregate=_AGGREGATE, seed=seed)
    return clip(requests, 0.0, _DEPLOY_EVERY_S * (len(MODELS) - 1) + 60.0)


SCENE = Scene(site=H200_SITE, models=MODELS, deploy_every_s=_DEPLOY_EVERY_S, requests=_requests)


_INTENTS = tuple(replace(iserve(kind, Quality.NEAR), name=str(kind)) for kind in OWN)
_FASTEST = _INTENTS[0]
# Planned for the mean request, which the rate is of; without the rate where it is not served for sure.
_RATES = replace(
    _FASTEST,
    name="min-latency, rates given",
    longest_apart=True,
    told_demand=True,
    refused=IntentKind.MIN_LATENCY,
)
# Other information than the number of deployments and the rates of those that run; and other placement.
_SEEN = (
    replace(_FASTEST, name="min-latency, number not given", told_number=False),
    replace(_FASTEST, name="min-latency, no rates", knows_rates=False),
    replace(_FASTEST, name="min-latency, hybrid", policy="hybrid"),
    replace(_FASTEST, name="min-latency, least-loaded", policy="least-loaded"),
    _RATES,
)
_LEAST_GPU_HOURS = _INTENTS[-1]
_SPREAD = replace(_LEAST_GPU_HOURS, name="min-gpu-hours, least-loaded", policy="least-loaded")
_RULES = tuple(
    Contestant(name=f"rule: {degree} TP, 8 bits", baseline=Baseline.RULE, kind=kind, quality=Quality.NEAR)
    for degree, kind in (("max", IntentKind.MIN_LATENCY), ("min", IntentKind.MIN_COST))
)
# What AIConfigurator recommends: most throughput within its own limits, and within a tight one; it supports Llama
# only and takes Mistral-7B for one, whose shape it has.
ADVISED = tuple(
    Contestant(
        name=f"AIConfigurator, {bits} bits{limit}", baseline=Baseline.AICONFIGURATOR, kind=kind, quality=quality
    )
    for bits, quality in ((16, Quality.EXACT), (8, Quality.NEAR))
    for limit, kind in (("", IntentKind.MIN_COST), (", E2E in 5 s", IntentKind.MIN_LATENCY))
)


def figure_h200(places: Sequence[Place] | None = None) -> Figure:
    """Every intent against every baseline."""
    places = places or [Place(trace, factor, SCENE) for trace in TRACES for factor in FACTORS]
    cells = cells_of(places, (*_INTENTS, *_SEEN, _SPREAD, *_RULES, *ADVISED, *BASELINES), seeds=(SEED,))
    findings = []
    for kind, (unit, of) in OWN.items():
        findings += [
            Finding(f"{found.what}: {unit}", found.paper, found.ours)
            for found in against_each(cells, str(kind), of, {}, [who.name for who in (*BASELINES, *ADVISED)])
        ]
    days = sorted({recording_of(model).measured_at[:10] for model in MODELS})
    engine = dict(recording_of(MODELS[0]).profile.machine.versions)["engine"]
    return Figure(
        number="h200",
        title="Today's models on four H200s: two Llama-3.1-8B, two Mistral-7B, batches of 32",
        source=f"simulated; times measured on one H200 with {engine}, {' and '.join(days)}, 16 bits, other "
        f"degrees and formats scaled; {trace_source()}, one seed; AIConfigurator "
        f"{recommendations().aiconfigurator} refuses Mistral and was asked for a Llama of its shape; of the other "
        "figures' A6000s it has no data",
        tables=(
            table("latency of answered requests, from arrival", cells, LATENCY),
            table("what requests cost", cells, {name: of for name, of in COST.items() if name not in LATENCY}),
            *(lost(cells, str(kind), of) for kind, (_, of) in OWN.items()),
        ),
        findings=tuple(findings),
        charts=(
            chart(
                "median latency",
                "s",
                cells,
                (_INTENTS[0], *BASELINES, ADVISED[2]),
                LATENCY["p50 s"],
                trace=places[-1].trace,
            ),
        ),
    )
