"""A profile as people read it in a terminal."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from fingerprint.config import Workload
from fingerprint.estimates import Estimator, Quantity
from fingerprint.estimators.depth_tied import DepthTiedEstimator
from fingerprint.estimators.measured_variants import MeasuredVariantCost
from fingerprint.measurements import Profile
from fingerprint.variant_measurements import VariantMeasurement
from iserve.cli.render import gib, print_rows, seconds
from iserve.report.full_model import WholeModel, whole_models

__all__ = ["print_profile"]


def print_profile(measured: Profile, estimator: Estimator, workload: Workload) -> None:
    """Print what was run in how long; of a depth-tied profile also what it shows of the whole model.

    Args:
        estimator: made from ``measured``.
        workload: whose output length times are for.
    """
    runs = sum(len(point.runs) for point in measured.timing)
    head = f"{measured.model}: {runs} runs of {len(measured.timing)} points in {measured.spent_s:.1f} s"
    if not isinstance(estimator, DepthTiedEstimator):
        typer.echo(f"{head} ({'all intervals tight' if measured.complete else 'the budget ended first'})")
        _print_variants(measured, workload)
        return
    typer.echo(f"{head} after engine starts ({'all' if measured.complete else 'not all'} that was planned)")
    for model in whole_models(estimator, workload):
        by = "the whole group by one rank's" if model.shard else "the whole model by"
        typer.echo(
            f"tp={model.tp} pp={model.pp} weights={model.weights} kv={model.kv}"
            f"{' experts=parallel' * model.expert_parallel}, {by} "
            f"{model.num_layers} layers repeated {model.repeat} times, {model.output_tokens} output tokens:"
        )
        print_rows(("batch", "input", "TTFT", "90%", "TPOT", "90%"), _times(model))
        for line in _memory(model):
            typer.echo(line)
    _print_variants(measured, workload)


def _print_variants(measured: Profile, workload: Workload) -> None:
    for variants in measured.variants:
        if not variants.failure:
            typer.echo(_variants(variants, measured.spec.num_layers, workload.batch))


def _variants(measured: VariantMeasurement, num_layers: int, batch: int) -> str:
    """Return what variants of the whole model take."""
    cost = MeasuredVariantCost(measured, num_layers)
    several = sorted({1, min(measured.slots, batch)})
    steps = " and ".join(f"{_with_ends(cost.step_s(batch, number))} for {number}" for number in several)
    held = f"; {gib(cost.held_bytes)} each" if cost.held_bytes else ""  # else the engine reserved all slots
    return (
        f"{measured.kind}, the whole model by fingerprints: a step of batch {batch} takes longer by {steps}; "
        f"a load {_with_ends(cost.load)}{held}"
    )


def _with_ends(found: Quantity) -> str:
    value, ends = _both(found)
    return f"{value} ({ends})"


def _times(model: WholeModel) -> Iterator[tuple[str, ...]]:
    for point in model.points:
        time = point.time
        yield str(time.batch), str(time.input_tokens), *_both(time.ttft_s), *_both(time.tpot_s)


def _both(found: Quantity) -> tuple[str, str]:
    return seconds(found.value), f"{seconds(found.low)} to {seconds(found.high)}"


def _memory(model: WholeModel) -> Iterator[str]:
    if model.memory is None:
        return
    whole, counted = model.memory.whole, model.memory
    yield (
        f"each GPU: weights {gib(whole.weights_bytes)}, activations {gib(whole.activation_bytes)}, outside the "
        f"allocator {gib(whole.context_bytes)}, graphs {gib(whole.graph_bytes)}; if the engine may take "
        f"{gib(counted.budget_bytes)}, {counted.blocks:,} KV blocks of {counted.block_tokens} tokens"
    )
