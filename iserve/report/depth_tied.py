"""The sections about a depth-tied profile: the whole model's time, a decode step's parts, memory as counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fingerprint.estimates import Quantity
from iserve.report.accuracy import AccuracyRow
from iserve.report.batch_charts import STEP_PARTS, BatchCurve, batch_chart, step_bar
from iserve.report.full_model import KV_SHARE, CountedItems, CountedModel, RunPoint, TimeAt, WholeModel
from iserve.report.latency_fit import TPOT, TTFT
from iserve.report.markup import Child, Markup, el, join
from iserve.report.tables import fold, legend, table, time_cell
from iserve.report.text import gib, seconds
from iserve.report.values import Report

__all__ = ["counted_memory", "whole_times"]

_COLORS = ("s-0", "s-1", "s-2", "s-3", "s-4", "s-5")  # of input lengths, shortest first
_QUANTITIES: tuple[tuple[str, str, Callable[[TimeAt], Quantity]], ...] = (
    (TTFT, "Time to the first token of the whole batch (TTFT)", lambda time: time.ttft_s),
    (TPOT, "Time per output token (TPOT)", lambda time: time.tpot_s),
)


def whole_times(report: Report) -> Markup | None:
    """Return a block per configuration that was run, the first one open."""
    if not report.whole:
        return None
    first, *others = report.whole
    truths = [row for model in report.whole for row in _truths(report, model)]
    return join(
        el(
            "p",
            "A fingerprint of a few layers ran every forward again and again on the same inputs, until it had run "
            "as many layers as the whole model has: the whole model's time, in a fingerprint's memory, with the "
            "engine's own scheduler, clocks and power. Nothing is extrapolated over layers; what a repeat costs "
            "beside its layers was told by a second depth and is taken off.",
        ),
        el(
            "p",
            "One line for each input length. Dots are batches that were run, between them the line follows the "
            "roofline's shape; bands, and the smaller figures in the table, are 90% intervals. "
            f"{_answers(report)}",
            class_="soft",
        ),
        legend([("", "turned open", _truth_words(truths))]) if truths else None,
        el("h3", _label(first)) if others else None,
        _model(report, first),
        [fold(_label(model), _model(report, model)) for model in others],
    )


def _answers(report: Report) -> str:
    ran = sorted({point.run_tokens for model in report.whole for point in model.points})
    told = f"Times are for answers of {report.workload.output_tokens} tokens"
    return f"{told}; the runs generated {' to '.join(map(str, dict.fromkeys((ran[0], ran[-1]))))}."


def _label(model: WholeModel) -> str:
    alone = " (one rank alone, what its group adds is modelled)" if model.shard else ""
    return f"tp={model.tp} pp={model.pp}, {model.weights} weights, {model.kv} KV{alone}"


def _model(report: Report, model: WholeModel) -> Markup:
    truths = _truths(report, model)
    return join(
        el("div", [_figure(model, truths, *each) for each in _QUANTITIES], class_="pair"),
        _times_table(model),
        el("h3", "A decode step on the GPU's timeline"),
        el("p", _gap_text(model)),
        legend([(f"p-{class_}", "", said) for class_, said, _ in STEP_PARTS]),
        _steps_table(model),
        el("h3", "What a repeat costs"),
        _cost(model),
    )


def _figure(
    model: WholeModel, truths: Sequence[AccuracyRow], name: str, title: str, of: Callable[[TimeAt], Quantity]
) -> Markup:
    """Return the chart of one quantity, drawn for wide and for narrow pages."""

    def true_at(input_tokens: int) -> tuple[tuple[int, float], ...]:
        known = [(row.workload, row.measured) for row in truths if row.quantity == name]
        return tuple(
            (at.batch, value) for at, value in known if at is not None and at.input_tokens == input_tokens
        )

    curves = [
        BatchCurve(
            input_tokens=found.input_tokens,
            color=_COLORS[index % len(_COLORS)],
            estimated=tuple((time.batch, of(time)) for time in found.times),
            ran=tuple(p.time.batch for p in model.points if p.time.input_tokens == found.input_tokens),
            truths=true_at(found.input_tokens),
        )
        for index, found in enumerate(model.lines)
    ]
    said = f"{name.removesuffix('_s').upper()} of the whole model over the batch, {_label(model)}"

    def drawn(width: float, height: float) -> Markup:
        return batch_chart(curves, name=said, logarithmic=name == TTFT, width=width, height=height)

    return el(
        "figure",
        el("figcaption", title),
        el("div", drawn(520, 330), class_="wide"),
        el("div", drawn(340, 280), class_="narrow"),
    )


def _truths(report: Report, model: WholeModel) -> list[AccuracyRow]:
    """Return the times measured on the whole model in this configuration."""
    rows = () if report.accuracy is None else report.accuracy.rows
    return [
        row
        for row in rows
        if row.shape_hash == report.spec.shape_hash
        and row.is_time
        and row.workload is not None
        and (row.config.tp, row.config.pp, row.config.weights, row.config.kv)
        == (model.tp, model.pp, model.weights, model.kv)
    ]


def _truth_words(truths: Sequence[AccuracyRow]) -> str:
    lengths = sorted({row.workload.output_tokens for row in truths if row.workload is not None})
    return f"measured on the whole model, answers of {' or '.join(map(str, lengths))} tokens"


def _times_table(model: WholeModel) -> Markup:
    """Return a table of every point that was run; of the driver's readings only those that were taken."""
    taken = [reading for reading in _READINGS if any(reading[1](p) is not None for p in model.points)]
    missing = [reading[0] for reading in _READINGS if reading not in taken]
    rows = [
        el(
            "tr",
            el("td", str(point.time.batch)),
            el("td", f"{point.time.input_tokens:,}"),
            [time_cell(found.value, found.low, found.high) for found in (point.time.ttft_s, point.time.tpot_s)],
            el("td", str(point.num_runs)),
            [el("td", _shown(of(point), words), class_="n") for _, of, words in taken],
        )
        for point in model.points
    ]
    columns = ["batch", "tokens in", "TTFT", "TPOT", "runs", *(name for name, _, _ in taken)]
    unsaid = el("p", f"Not recorded in this profile: {', '.join(missing)}.", class_="soft") if missing else None
    return join(table(columns, rows), unsaid)


def _shown(value: float | None, words: Callable[[float], str]) -> str:
    return "not recorded" if value is None else words(value)


# Of the runs that generated: the driver's own figures
_READINGS: tuple[tuple[str, Callable[[RunPoint], float | None], Callable[[float], str]], ...] = (
    ("SM clock", lambda p: p.readings.sm_clock_mhz, lambda mhz: f"{mhz:,.0f} MHz"),
    ("power", lambda p: p.readings.power_w, lambda watts: f"{watts:,.0f} W"),
    ("memory held", lambda p: p.readings.held_bytes, gib),
)


def _gap_text(model: WholeModel) -> str:
    waits = sorted(point.decode.gap_s for point in model.points)
    told = (
        f"Medians over the later half of each run ({_layers(model.num_layers)}, each forward {model.repeat} "
        "times), when the clock has recovered from the prefill. Before a step the GPU waits "
        f"{_range(waits[0], waits[-1])} for the host."
    )
    if model.plain_gap_s is None:
        return told
    once = f"{told} Where a forward was run once only, it waited {_range(*model.plain_gap_s)}"
    hidden = model.plain_gap_s[0] > waits[-1]
    return f"{once}: its few layers were done before the host had the next step ready." if hidden else f"{once}."


def _range(low_s: float, high_s: float) -> str:
    low, high = seconds(low_s), seconds(high_s)
    return low if low == high else f"{low} to {high}"


def _steps_table(model: WholeModel) -> Markup:
    most = max(point.decode.total_s for point in model.points)
    rows = []
    for point in model.points:
        step = point.decode
        name = f"batch {point.time.batch}, {point.time.input_tokens} tokens in"
        rows.append(
            el(
                "tr",
                el("td", str(point.time.batch)),
                el("td", f"{point.time.input_tokens:,}"),
                el("td", step_bar(step, most, name), class_="draw"),
                [el("td", seconds(float(getattr(step, field))), class_="n") for _, _, field in STEP_PARTS],
                el("td", str(step.num_steps)),
            )
        )
    names = [*(class_ for class_, _, _ in STEP_PARTS), "steps"]
    return table(["batch", "tokens in", "a decode step", *names], rows, left=(0, 2))


def _cost(model: WholeModel) -> Markup:
    cost = model.cost
    depths = " and ".join(str(depth) for depth in cost.depths)
    rows = [
        el("tr", el("td", what), [el("td", seconds(each) if each else "none found") for each in costs])
        for what, costs in (
            ("until the first token", (cost.first_per_pass_s, cost.first_per_token_s)),
            ("in a decode step", (cost.step_per_pass_s, cost.step_per_token_s)),
        )
    ]
    return join(
        el(
            "p",
            f"Beside its layers (embedding, last norm, a graph's start, the host's call), told by fingerprints of "
            f"{depths} layers. {model.repeat - 1} times this is taken off.",
        ),
        table(("one repeat more", "for each pass of the forward", "and for each token in it"), rows),
    )


# Memory


_ITEMS: tuple[tuple[str, Callable[[CountedItems], float]], ...] = (
    ("weights", lambda items: items.weights_bytes),
    ("activations, peak of the largest step", lambda items: items.activation_bytes),
    ("outside the allocator (CUDA context, communication)", lambda items: items.context_bytes),
    ("pipeline buffers", lambda items: items.pp_buffer_bytes),
    ("captured graphs", lambda items: items.graph_bytes),
    ("together", lambda items: items.total_bytes),
    ("KV cache, each token", lambda items: items.kv_bytes_per_token),
)


def counted_memory(report: Report) -> Markup | None:
    """Return the engine's items of each fingerprint, and the whole model's."""
    counted = [(model, model.memory) for model in report.whole if model.memory is not None]
    if not counted:
        return None
    parts: list[Child] = [
        el(
            "p",
            "On the fullest GPU, as the engine itself counts. Activations and what is outside the allocator do "
            "not grow with depth; weights and KV cache do, layer by layer, and graphs a little.",
        )
    ]
    for model, memory in counted:
        parts.append(el("h3", _label(model)) if len(counted) > 1 else None)
        parts.append(_counted(memory))
    return join(parts)


def _counted(memory: CountedModel) -> Markup:
    columns = [*memory.fingerprints, memory.whole]
    rows = [
        el("tr", el("td", name), [el("td", gib(of(items)), class_="n") for items in columns])
        for name, of in _ITEMS
        if any(of(items) for items in columns)
    ]
    heads = [
        *(f"{_layers(items.num_layers)}, counted" for items in memory.fingerprints),
        f"whole model ({_layers(memory.whole.num_layers)}), predicted",
    ]
    room = memory.blocks * memory.block_tokens
    return join(
        table(["", *heads], rows),
        el(
            "p",
            f"If it may take {gib(memory.budget_bytes)} of each GPU ({KV_SHARE:.0%}), the engine is predicted to "
            f"make {memory.blocks:,} KV blocks of {memory.block_tokens} tokens: room for {room:,} tokens. It "
            "captures its graphs after that, beside this budget.",
        ),
    )


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"
