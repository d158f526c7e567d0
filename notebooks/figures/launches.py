"""Figure 15: what profiling launches, counted from shapes, and what that costs.

Nothing was profiled on A6000s. Counts are exact; memory and the runs' times are the roofline's; what an engine's
start takes was measured on an H200, for one of the two models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fingerprint.config import WeightFormat, Workload, even_split
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.profile_plan import fingerprint_layers
from notebooks.figures.figure import NOT_GIVEN, NOT_MEASURED, Chart, Figure, Finding, Table
from notebooks.figures.recordings import recorded
from notebooks.figures.setting import GPU, NUM_GPUS, PAPER_ENGINE, WORKLOAD, config_of, spec_of
from planner.costs import total_bytes
from planner.space import MAX_PP, TP_DEGREES, shape_refusal

__all__ = ["Cost", "Launch", "alpaserve", "cost_of", "figure_15", "fingerprints"]

GIB = 2**30
PAPER_MODELS = ("gpt-j-6b", "falcon-40b")


@dataclass(frozen=True, slots=True)
class Launch:
    """Start of an engine for profiling."""

    tp: int
    pp: int
    weights: WeightFormat
    num_layers: int

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp


def _degrees(model: str) -> list[tuple[int, int]]:
    spec = spec_of(model)
    pairs = [(tp, pp) for tp in TP_DEGREES for pp in range(1, MAX_PP + 1) if tp * pp <= NUM_GPUS]
    return [pair for pair in pairs if shape_refusal(spec, config_of(*pair), NUM_GPUS) is None]


def _formats(model: str) -> tuple[WeightFormat, ...]:
    """Return the formats of the paper's table 1. KV formats and pruning need no start of their own."""
    llama = spec_of(model).family == "llama"
    return tuple(w for w in PAPER_ENGINE.weights if llama or w is not WeightFormat.GPTQ4)


def fingerprints(model: str, *, everywhere: bool = False) -> list[Launch]:
    """Return what (L2,M2) launches, one and two layers a stage: every tp at pp=1, and (1,2).

    Args:
        everywhere: what (L2,M3) launches.
    """
    wanted = [(tp, pp) for tp, pp in _degrees(model) if everywhere or pp == 1 or (tp, pp) == (1, 2)]
    return [
        Launch(tp, pp, weights, layers)
        for weights in _formats(model)
        for tp, pp in wanted
        for layers in fingerprint_layers(spec_of(model).num_layers, pp)
    ]


def alpaserve(model: str, *, full: bool = False) -> list[Launch]:
    """The whole model at every degree at which it fits; ``full``: in every weight format too."""
    formats = _formats(model) if full else (WeightFormat.BITS16,)
    whole = [Launch(tp, pp, w, spec_of(model).num_layers) for w in formats for tp, pp in _degrees(model)]
    return [launch for launch in whole if _gpu_bytes(model, launch) <= GPU.memory_bytes]


def _roofline(model: str, launch: Launch) -> RooflineEstimator:
    return RooflineEstimator(replace(spec_of(model), num_layers=launch.num_layers), GPU)


def _gpu_bytes(model: str, launch: Launch) -> int:
    config = config_of(launch.tp, launch.pp, launch.weights)
    memory = _roofline(model, launch).estimate(config, WORKLOAD).memory
    return memory.per_gpu_bytes(even_split(launch.num_layers, launch.pp))


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of all launches of one strategy. ``start_s``: None where no start of such a model was measured."""

    launches: int
    gpu_launches: int  # each as often as it takes GPUs
    most_gib: float  # over all GPUs of one launch
    runs_s: float  # one answer of one token and one of 100 at every launch, by the roofline
    runs_gpu_s: float
    start_s: float | None  # of one launch

    @property
    def time_s(self) -> float | None:
        return None if self.start_s is None else self.runs_s + self.launches * self.start_s

    @property
    def gpu_s(self) -> float | None:
        return None if self.start_s is None else self.runs_gpu_s + self.gpu_launches * self.start_s


def cost_of(model: str, launches: Sequence[Launch], start_s: float | None) -> Cost:
    """Sums over ``launches``, one after the other."""
    most, runs_s, runs_gpu_s = 0.0, 0.0, 0.0
    for launch in launches:
        estimator = _roofline(model, launch)
        config = config_of(launch.tp, launch.pp, launch.weights)
        short = Workload(1, WORKLOAD.input_tokens, 1)
        took = sum(estimator.estimate(config, w).e2e_s.value for w in (short, WORKLOAD))
        runs_s, runs_gpu_s = runs_s + took, runs_gpu_s + launch.num_gpus * took
        most = max(most, total_bytes(estimator.estimate(config, WORKLOAD).memory) / GIB)
    return Cost(len(launches), sum(x.num_gpus for x in launches), most, runs_s, runs_gpu_s, start_s)


def _starts_s(model: str) -> tuple[float | None, float | None]:
    """Return the starts of a fingerprint and of the whole model on an H200; the first, cold, is left out."""
    one = recorded().get(model)
    return (None, None) if one is None else (one.start_s[1], one.start_s[-1])


def figure_15() -> Figure:
    """iServe's fingerprints against AlpaServe's whole models."""
    rows, costs = [], {}
    for model in PAPER_MODELS:
        fingerprint_s, whole_s = _starts_s(model)
        costs[model] = {
            "iServe (L2,M2)": cost_of(model, fingerprints(model), fingerprint_s),
            "iServe (L2,M3)": cost_of(model, fingerprints(model, everywhere=True), fingerprint_s),
            "AlpaServe": cost_of(model, alpaserve(model), whole_s),
            "AlpaServe (full)": cost_of(model, alpaserve(model, full=True), whole_s),
        }
        rows += [
            (model, name, c.launches, c.gpu_launches, c.most_gib, c.runs_s, c.runs_gpu_s, c.time_s, c.gpu_s)
            for name, c in costs[model].items()
        ]
    columns = ("model", "strategy", "launches", "x GPUs", "most GiB", "runs s", "runs GPU-s", "time s", "GPU-s")
    return Figure(
        number="15",
        title="Cost of profiling, iServe and AlpaServe",
        source="counts; memory and runs by the roofline on A6000; time = runs + launches x one start, as measured "
        "on an H200 with vLLM (GPT-J-6B only)",
        tables=(Table("profiling one model", columns, tuple(rows)),),
        findings=_against_alpaserve(costs),
        charts=tuple(
            Chart(
                title,
                unit,
                PAPER_MODELS,
                tuple(
                    (name, tuple(getattr(costs[m][name], of) for m in PAPER_MODELS))
                    for name in costs[PAPER_MODELS[0]]
                ),
            )
            for title, unit, of in (
                ("most memory of a launch", "GiB over its GPUs", "most_gib"),
                ("launches, each as often as it takes GPUs", "launches", "gpu_launches"),
                ("runs alone, by the roofline", "GPU-s", "runs_gpu_s"),
            )
        ),
    )


def _against_alpaserve(costs: dict[str, dict[str, Cost]]) -> tuple[Finding, ...]:
    def ratios(name: str, of: str) -> str:
        texts = []
        for model, found in costs.items():
            other, ours = getattr(found[name], of), getattr(found["iServe (L2,M2)"], of)
            texts.append(f"{model} {NOT_MEASURED if other is None or ours is None else f'{other / ours:.2f}'}")
        return ", ".join(texts)

    papers = (
        ("most memory", "AlpaServe", "most_gib", "1.37 to 3.04 times"),
        ("time", "AlpaServe", "time_s", "1.16 to 4.36 times"),
        ("GPU-hours", "AlpaServe", "gpu_s", "1.22 to 4.60 times"),
        ("time", "AlpaServe (full)", "time_s", "2.70 to 8.92 times"),
        ("GPU-hours", "AlpaServe (full)", "gpu_s", "2.89 to 9.20 times"),
        ("time of the runs alone", "AlpaServe (full)", "runs_s", NOT_GIVEN),
        ("launches", "AlpaServe", "launches", NOT_GIVEN),
        ("launches", "AlpaServe (full)", "launches", NOT_GIVEN),
    )
    return tuple(
        Finding(f"{what}, {name} over iServe", paper, ratios(name, of)) for what, name, of, paper in papers
    )
