"""Figures 3 to 5: what TP, PP, quantization and pruning do to memory and latency, by the roofline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, Pruning, WeightFormat, even_split
from fingerprint.estimates import Estimate
from fingerprint.estimators.roofline import CALIBRATED
from iserve.planning.pipeline import FitsOn, PlanOptions, hypothetical_hardware
from notebooks.figures.figure import NOT_GIVEN, NOT_MEASURED, Chart, Figure, Finding, Table
from notebooks.figures.pairs import pairs_table, turning_hop_s
from notebooks.figures.setting import DEGREES, GPU, MODELS, NUM_GPUS, WORKLOAD, config_of, estimator_of, spec_of
from placement.types import Placement
from planner.costs import total_bytes
from planner.space import shape_refusal

__all__ = ["Point", "figure_3", "figure_4", "figure_5", "point"]

GIB = 2**30
SOURCE = "roofline, 8 x A6000, one query of 512 tokens in, 100 out"


@dataclass(frozen=True, slots=True)
class Point:
    """Configuration of one model, in the units of the paper's axes."""

    config: DeploymentConfig
    estimate: Estimate
    fits: bool  # on 8 A6000 by placement, at the upper end of memory's interval

    @property
    def latency_s(self) -> float:
        return self.estimate.e2e_s.value

    @property
    def total_gib(self) -> float:
        return total_bytes(self.estimate.memory) / GIB

    @property
    def gpu_gib(self) -> float:
        """The fullest GPU."""
        memory = self.estimate.memory
        return memory.per_gpu_bytes(even_split(memory.num_layers, memory.pp)) / GIB

    @property
    def cost_gib_s(self) -> float:
        return self.total_gib * self.latency_s

    @property
    def gpu_s(self) -> float:
        return self.config.num_gpus * self.latency_s


_FITS = FitsOn(hypothetical_hardware(GPU, NUM_GPUS), PlanOptions(policy="hybrid"))


def point(model: str, config: DeploymentConfig) -> Point:
    """``config`` of ``model`` by the roofline."""
    estimate = estimator_of(model).estimate(config, WORKLOAD)
    return Point(config, estimate, isinstance(_FITS(estimate), Placement))


def _grid(model: str) -> dict[tuple[int, int], Point]:
    spec = spec_of(model)
    configs = {degree: config_of(*degree) for degree in DEGREES}
    return {at: point(model, c) for at, c in configs.items() if shape_refusal(spec, c, NUM_GPUS) is None}


# Figure 3

_PAPER_BEST = {
    "Llama-2-7b-hf": {"latency": "(4,2)", "cost": "(4,1)", "memory": "(1,1)"},
    "falcon-40b": {"latency": "(8,1)", "cost": "(4,1)", "memory": "(1,2)"},
}
_METRICS: Mapping[str, Callable[[Point], float]] = {
    "latency": lambda p: p.latency_s,
    "cost": lambda p: p.cost_gib_s,
    "memory": lambda p: p.total_gib,
    "GPU-hours": lambda p: p.gpu_s,
}


def figure_3() -> Figure:
    """TP and PP, 16 bits: Llama-2-7B and Falcon-40B."""
    grids = {model: _grid(model) for model in _PAPER_BEST}
    tables = tuple(
        Table(
            f"{model}, 16 bits",
            ("(tp,pp)", "latency s", "total GiB", "GiB a GPU", "GiB*s", "GPU-s", "fits"),
            tuple(
                (
                    f"({tp},{pp})",
                    p.latency_s,
                    p.total_gib,
                    p.gpu_gib,
                    p.cost_gib_s,
                    p.gpu_s,
                    "yes" if p.fits else "no",
                )
                for (tp, pp), p in sorted(grid.items(), key=lambda item: (item[0][1], item[0][0]))
            ),
        )
        for model, grid in grids.items()
    )
    return Figure(
        number="3",
        title="Effect of TP and PP",
        source=SOURCE,
        tables=(*tables, pairs_table(tuple(_PAPER_BEST))),
        findings=(*_pipeline(grids), *_tensor(grids), *_best(grids)),
        charts=tuple(
            Chart(
                name,
                unit,
                tuple(f"({tp},{pp})" for tp, pp in DEGREES),
                tuple((model, tuple(metric(grid[at]) for at in DEGREES)) for model, grid in grids.items()),
            )
            for (name, metric), unit in zip(_METRICS.items(), ("s", "GiB*s", "GiB", "GPU-s"), strict=True)
        ),
    )


def _pipeline(grids: dict[str, dict[tuple[int, int], Point]]) -> list[Finding]:
    def each(of: Callable[[Point, Point], float], unit: str) -> str:
        return "; ".join(f"{model}: {of(g[1, 1], g[1, 8]):.3g} {unit}" for model, g in grids.items())

    grows = each(lambda one, eight: eight.latency_s - one.latency_s, "s")
    total = each(lambda one, eight: eight.total_gib / one.total_gib, "times")
    gpu = each(lambda one, eight: one.gpu_gib / eight.gpu_gib, "times")
    return [
        Finding("PP 1 to 8: latency grows by", "0.02 to 0.86 s", grows),
        Finding("PP 1 to 8: total memory grows", "1.01 to 1.56 times", total),
        Finding("PP 1 to 8: memory of a GPU shrinks", "1.48 to 5.14 times", gpu),
    ]


def _tensor(grids: dict[str, dict[tuple[int, int], Point]]) -> list[Finding]:
    falcon, llama = grids["falcon-40b"], grids["Llama-2-7b-hf"]
    one, all8 = falcon[1, 1], falcon[8, 1]
    return [
        Finding(
            "Falcon-40B, TP 1 to 8: latency falls; memory, GPU-hours grow",
            f"{NOT_GIVEN}; {NOT_GIVEN}, {NOT_GIVEN}",
            f"{one.latency_s / all8.latency_s:.2f} times; {all8.total_gib / one.total_gib:.2f}, "
            f"{all8.gpu_s / one.gpu_s:.2f} times",
        ),
        Finding(
            "Falcon-40B's latency, TP 2 to 4, 4 to 8",
            "-39.75%, -11.02%",
            f"{falcon[4, 1].latency_s / falcon[2, 1].latency_s - 1:+.1%}, "
            f"{falcon[8, 1].latency_s / falcon[4, 1].latency_s - 1:+.1%}",
        ),
        Finding(
            "Llama-2-7B's latency, TP 4 to 8",
            "grows (by how much: not given)",
            f"{llama[8, 1].latency_s / llama[4, 1].latency_s - 1:+.1%}",
        ),
        Finding(
            "cost, TP 4 to 8: Llama-2-7B; Falcon-40B",
            f"1.95 times; grows ({NOT_GIVEN})",
            f"{llama[8, 1].cost_gib_s / llama[4, 1].cost_gib_s:.2f} times; "
            f"{all8.cost_gib_s / falcon[4, 1].cost_gib_s:.2f} times",
        ),
        Finding(
            "(what an all-reduce must take for TP=4 to equal TP=8, Llama-2-7B)",
            NOT_GIVEN,
            f"{turning_hop_s('Llama-2-7b-hf') * 1e6:.1f} us for every GPU beyond two; calibrated: "
            f"{CALIBRATED.all_reduce_hop_s * 1e6:.2f} us",
        ),
    ]


def _best(grids: dict[str, dict[tuple[int, int], Point]]) -> list[Finding]:
    found = []
    for model, paper in _PAPER_BEST.items():
        fitting = {degree: p for degree, p in grids[model].items() if p.fits}
        for name, metric in _METRICS.items():
            tp, pp = min(fitting, key=lambda degree: (metric(fitting[degree]), degree))
            found.append(Finding(f"{model}: least {name} at", paper.get(name, NOT_GIVEN), f"({tp},{pp})"))
    return found


# Figure 4

_FORMATS = (WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.INT4, WeightFormat.GPTQ4)


def _fewest_gpus(model: str) -> int:
    """The least TP at which 16 bits fit, so that all formats of a model are compared at one degree."""
    spec = spec_of(model)
    able = (tp for tp in (1, 2, 4, 8) if shape_refusal(spec, config_of(tp), NUM_GPUS) is None)
    return next(tp for tp in able if point(model, config_of(tp)).fits)


def figure_4() -> Figure:
    """Weight formats at the fewest GPUs that hold 16 bits."""
    rows, by_model = [], {}
    for model in MODELS:
        tp = _fewest_gpus(model)
        by_model[model] = {w: point(model, config_of(tp, weights=w)) for w in _FORMATS}
        plain = by_model[model][WeightFormat.BITS16]
        for weights, p in by_model[model].items():
            rows.append(
                (
                    f"{model} tp={tp}",
                    str(weights),
                    p.latency_s,
                    f"{p.latency_s / plain.latency_s - 1:+.1%}",
                    _weights_gib(p),
                    f"{_weights_gib(p) / _weights_gib(plain) - 1:+.1%}",
                    p.total_gib,
                    f"{p.total_gib / plain.total_gib - 1:+.1%}",
                )
            )
    columns = ("model", "weights", "latency s", "to 16bit", "weights GiB", "to 16bit", "total GiB", "to 16bit")
    return Figure(
        number="4",
        title="Effect of quantization",
        source=SOURCE,
        tables=(Table("formats at the fewest GPUs that hold 16 bits", columns, tuple(rows)),),
        findings=_quantized(by_model),
        charts=tuple(
            Chart(
                title, unit, MODELS, tuple((str(w), tuple(of(by_model[m][w]) for m in MODELS)) for w in _FORMATS)
            )
            for title, unit, of in (("latency", "s", _METRICS["latency"]), ("weights", "GiB", _weights_gib))
        ),
    )


def _weights_gib(p: Point) -> float:
    memory = p.estimate.memory
    layers = memory.num_layers * memory.layer_weight_bytes
    return memory.tp * (layers + memory.first_stage_bytes + memory.last_stage_bytes) / GIB


_ByFormat = dict[WeightFormat, Point]


def _quantized(by_model: dict[str, _ByFormat]) -> tuple[Finding, ...]:
    def change(weights: WeightFormat, of: Callable[[Point], float]) -> str:
        values = [of(p[weights]) / of(p[WeightFormat.BITS16]) - 1 for p in by_model.values()]
        return f"{min(values):.0%} to {max(values):.0%}"

    def fastest(models: tuple[str, ...]) -> str:
        return ", ".join(f"{m}: {min(by_model[m], key=lambda w: by_model[m][w].latency_s)}" for m in models)

    papers = {WeightFormat.INT8: "-50%", WeightFormat.INT4: "-75%", WeightFormat.GPTQ4: f"falls ({NOT_GIVEN})"}
    llamas = [by_model[m] for m in ("Llama-2-7b-hf", "Llama-2-13b-hf", "Llama-2-70b-hf")]
    int4 = [p[WeightFormat.INT4].latency_s / p[WeightFormat.BITS16].latency_s - 1 for p in llamas]
    slower = [
        f"{m} {w}"
        for m, p in by_model.items()
        for w in (WeightFormat.INT8, WeightFormat.GPTQ4)
        if p[w].latency_s >= p[WeightFormat.BITS16].latency_s
    ]
    return (
        *(
            Finding(
                f"memory with {w}",
                paper,
                f"weights {change(w, _weights_gib)}; all that a query needs {change(w, lambda p: p.total_gib)}",
            )
            for w, paper in papers.items()
        ),
        Finding(
            "fastest format, smaller models (PyTorch)", "16 bits", fastest(("Llama-2-7b-hf", "Llama-2-13b-hf"))
        ),
        Finding("fastest format, larger models (PyTorch)", "int4", fastest(("falcon-40b", "Llama-2-70b-hf"))),
        Finding("gptq4 and int8 slower than 16 bits (PyTorch)", "yes", ", ".join(slower) or "for no model"),
        Finding(
            "int4's latency against 16 bits, Llama-2 (section 8.2, TensorRT-LLM)",
            "-59.14%",
            f"{min(int4):.1%} to {max(int4):.1%}",
        ),
    )


# Figure 5


def figure_5() -> Figure:
    """Pruning: 2:4 and a quarter of the structure."""
    prunings = (Pruning.NONE, Pruning.WANDA, Pruning.WANDA_2_4, Pruning.LLM_PRUNER_25)
    models = ("Llama-2-7b-hf", "Llama-2-13b-hf")
    points = {(m, x): point(m, config_of(pruning=x)) for m in models for x in prunings}

    def change(model: str, pruning: Pruning, of: str) -> str:
        return f"{getattr(points[model, pruning], of) / getattr(points[model, Pruning.NONE], of) - 1:+.1%}"

    rows = tuple(
        (m, str(x), p.latency_s, change(m, x, "latency_s"), p.total_gib, change(m, x, "total_gib"))
        for (m, x), p in points.items()
    )
    paper_latency = {
        ("Llama-2-7b-hf", Pruning.WANDA_2_4): "+73.13%",
        ("Llama-2-13b-hf", Pruning.WANDA_2_4): "+31.50%",
        ("Llama-2-7b-hf", Pruning.LLM_PRUNER_25): "+33.04%",
        ("Llama-2-13b-hf", Pruning.LLM_PRUNER_25): "+3.15%",
    }
    return Figure(
        number="5",
        title="Effect of pruning",
        source=f"{SOURCE}; pruned models were {NOT_MEASURED}",
        tables=(Table("on one GPU", ("model", "pruning", "latency s", "to none", "total GiB", "to none"), rows),),
        charts=(
            Chart(
                "latency",
                "s",
                models,
                tuple((str(x), tuple(points[m, x].latency_s for m in models)) for x in prunings),
            ),
        ),
        findings=(
            *(
                Finding(f"latency, {m}, {x}", said, change(m, x, "latency_s"))
                for (m, x), said in paper_latency.items()
            ),
            *(
                Finding(
                    f"memory, {x}",
                    f"falls ({NOT_GIVEN})",
                    ", ".join(f"{m} {change(m, x, 'total_gib')}" for m in models),
                )
                for x in (Pruning.WANDA_2_4, Pruning.LLM_PRUNER_25)
            ),
        ),
    )
