"""Figures 7 and 8: is a model linear in its layers, and what is its memory made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import replace

from fingerprint.config import Workload
from fingerprint.estimators.engine_memory import CountedMemory
from fingerprint.estimators.m2 import MemoryTerms
from fingerprint.estimators.roofline import RooflineEstimator
from fingerprint.measurements import TimingPoint
from notebooks.figures.figure import NOT_GIVEN, Chart, Figure, Finding, Table
from notebooks.figures.recordings import config_of as recorded_config
from notebooks.figures.recordings import recorded, seconds, where
from notebooks.figures.setting import DEGREES, GPU, WORKLOAD, config_of, estimator_of, spec_of
from planner.costs import total_bytes

__all__ = ["figure_7", "figure_8", "fingerprint_against_whole", "itemised_bytes", "solved_terms"]

GIB = 2**30
POINT = (1, 128)  # batch and prompt at which the whole models' steps were timed on the GPU too


# Figure 7


def _forward_s(points: Iterable[TimingPoint], num_layers: int) -> float:
    """Median time of a decode step's layers on the GPU's own timeline, at ``POINT``."""
    return statistics.median(
        step.forward_s
        for p in points
        if (p.num_layers, p.repeat, p.batch, p.input_tokens) == (num_layers, 1, *POINT)
        for run in p.runs
        for step in run.steps
        if step.prefill_tokens == 0
    )


def _line(one: float, two: float, num_layers: int) -> float:
    """Through one and two layers, at ``num_layers``."""
    return one + (num_layers - 1) * (two - one)


def figure_7() -> Figure:
    """Memory and times of 1, 2 and all layers; the line through the first two against the truth."""
    rows = []
    errors: dict[str, list[float]] = {}
    for model, one in recorded().items():
        layers = one.profile.spec.num_layers
        weights = {m.num_layers: m.ranks[0].weights_bytes / GIB for m in one.profile.memory}
        wall = {k: seconds(one.profile.timing, k, *POINT) for k in (1, 2)}
        wall[layers] = seconds(one.whole, layers, *POINT)
        forward = {k: 1e3 * _forward_s(one.profile.timing, k) for k in (1, 2)}
        forward[layers] = 1e3 * _forward_s(one.whole_timed, layers)
        for quantity, values in (
            ("weights GiB", weights | {layers: one.whole_memory[0].weights_bytes / GIB}),
            ("GPU ms of a step's layers", forward),
            ("TPOT ms, wall", {k: 1e3 * tpot for k, (_, tpot) in wall.items()}),
            ("TTFT ms, wall", {k: 1e3 * ttft for k, (ttft, _) in wall.items()}),
        ):
            told = _line(values[1], values[2], layers)
            error = told / values[layers] - 1
            errors.setdefault(quantity, []).append(error)
            rows.append(
                (
                    model,
                    quantity,
                    values[1],
                    values[2],
                    layers,
                    values[layers],
                    told,
                    f"{error:+.1%}",
                )
            )
    columns = ("model", "quantity", "1 layer", "2 layers", "all", "of all", "line", "error")
    findings = tuple(
        Finding(f"linear in layers: {quantity}", f"yes (how nearly: {NOT_GIVEN})", f"line off by {_range(found)}")
        for quantity, found in errors.items()
    )
    return Figure(
        number="7",
        title="Memory and latency against the number of hidden layers",
        source=f"{where()}; 16 bits, batch {POINT[0]}, {POINT[1]} tokens in",
        tables=(Table("one and two layers, the line through them, and the whole model", columns, tuple(rows)),),
        findings=(*findings, *fingerprint_against_whole()),
        charts=(
            Chart(
                "how far the line through 1 and 2 layers is off at all of them",
                "% of the truth, either way",
                tuple(recorded()),
                tuple((quantity, tuple(100 * abs(e) for e in found)) for quantity, found in errors.items()),
            ),
        ),
    )


def _range(values: list[float]) -> str:
    return f"{min(values):+.1%} to {max(values):+.1%}"


def fingerprint_against_whole(model: str = "Llama-2-70b-hf") -> tuple[Finding, ...]:
    """Return how much smaller and faster than the model its fingerprints are: weights by shape, time by the
    roofline.
    """
    spec = spec_of(model)
    size, took = {}, {}
    for layers in (1, 2, spec.num_layers):
        cut = replace(spec, num_layers=layers)
        size[layers] = cut.num_params
        took[layers] = RooflineEstimator(cut, GPU).estimate(config_of(), WORKLOAD).e2e_s.value
    whole = spec.num_layers
    return (
        Finding(
            f"{model}: share of its memory that a fingerprint has",
            "2.40% (41.59 times smaller)",
            f"weights alone: {size[1] / size[whole]:.2%} (1 layer), {size[2] / size[whole]:.2%} (2 layers)",
        ),
        Finding(
            f"{model}: its fingerprint is faster by",
            "9.75 times",
            f"roofline: {took[whole] / took[1]:.1f} times (1 layer), {took[whole] / took[2]:.1f} times (2 layers)",
        ),
    )


# Figure 8


def itemised_bytes(model: str, tp: int, pp: int) -> float:
    """Return bytes by the roofline, over all GPUs; without KV cache and runtime, which the equations take off
    first.
    """
    estimate = estimator_of(model).estimate(config_of(tp, pp), WORKLOAD)
    kv = tp * estimate.memory.num_layers * estimate.memory.layer_kv_bytes
    return total_bytes(estimate.memory) - tp * pp * estimate.memory.runtime_bytes - kv


def solved_terms(model: str) -> MemoryTerms:
    """W, A and A_pp from (1,1), (2,1) and (1,2), as M1 and M2 solve them."""
    one, tensor, pipeline = (itemised_bytes(model, *degree) for degree in ((1, 1), (2, 1), (1, 2)))
    return MemoryTerms(2 * one - tensor, tensor - one, pipeline - one)


def figure_8() -> Figure:
    """The paper's equation against memory itemised by the roofline, and against what engines counted."""
    rows = []
    errors: dict[str, list[float]] = {}
    for model in ("Llama-2-7b-hf", "Llama-2-70b-hf", "falcon-40b"):
        terms = solved_terms(model)
        for degree in DEGREES:
            told, true = terms.total_bytes(*degree), itemised_bytes(model, *degree)
            errors.setdefault(model, []).append(told / true - 1)
            rows.append((model, "({},{})".format(*degree), true / GIB, told / GIB, f"{told / true - 1:+.2%}"))
    solved = tuple(
        (model, terms.weights_bytes / GIB, terms.activation_bytes / GIB, terms.pp_bytes / GIB)
        for model in errors
        for terms in (solved_terms(model),)
    )
    worst = ", ".join(f"{model} {max(map(abs, found)):.2%}" for model, found in errors.items())
    return Figure(
        number="8",
        title="Breakdown of memory: W + t A + t (p - 1) A_pp",
        source=f"roofline on A6000, and {where()}",
        charts=(
            Chart(
                "the equation's error",
                "%, either way",
                tuple("({},{})".format(*degree) for degree in DEGREES),
                tuple((model, tuple(100 * abs(e) for e in found)) for model, found in errors.items()),
            ),
        ),
        tables=(
            Table(
                "W, A and A_pp from (1,1), (2,1), (1,2), by the roofline, GiB",
                ("model", "W", "A", "A_pp"),
                solved,
            ),
            Table(
                "the equation against every degree, GiB over all GPUs, runtime and KV cache taken off",
                ("model", "(tp,pp)", "itemised", "equation", "error"),
                tuple(rows),
            ),
            _counted(),
        ),
        findings=(
            Finding(
                "the equation holds",
                f"taken as exact (how nearly: {NOT_GIVEN})",
                f"off from the roofline's items by at most {worst}",
            ),
        ),
    )


def _counted() -> Table:
    """Return the engine's own count of the whole model next to what two fingerprints predict."""
    rows = []
    for model, one in recorded().items():
        rank = one.whole_memory[0]
        memory = CountedMemory(one.profile).memory(recorded_config(one), Workload())
        told = memory.stage(0, one.profile.spec.num_layers)
        for item, true, found in (
            ("weights", rank.weights_bytes, told.weights_bytes),
            ("activations", rank.activation_peak_bytes, told.activation_bytes),
            ("runtime and graphs", rank.runtime_bytes + rank.graph_bytes, told.runtime_bytes),
        ):
            rows.append((model, item, true / GIB, found / GIB, f"{found / true - 1:+.2%}"))
    return Table(
        "whole models on an H200, GiB: counted by the engine, told from 1 and 2 layers",
        ("model", "item", "counted", "told", "error"),
        tuple(rows),
    )
