"""Sections of the page, but for the rankings."""

from __future__ import annotations

from collections.abc import Sequence

from fingerprint.estimates import Estimate, StageMemory
from fingerprint.measurements import MachineInfo
from iserve.report import charts
from iserve.report.latency_fit import TPOT, TTFT, TimePanel
from iserve.report.markup import Child, Markup, el, join
from iserve.report.tables import bullets, facts, fold, legend, table, time_cell, verdict
from iserve.report.text import gib, label, number, range_of, seconds, workload_text
from iserve.report.values import Configuration, Report, Verdict

__all__ = ["head", "layer_effects", "memory", "model_and_machine", "pareto", "reading", "times"]

_QUANTITIES = {TTFT: "Time to the first token (TTFT)", TPOT: "Time per output token (TPOT)"}
_BARS_SHOWN = 16
_VISIBLE = 0.25  # of the longest bar: below it the engine's own bytes get a bar of their own


def head(report: Report) -> Markup:
    """Return the title, what it rests on, and the figures to begin with."""
    spec, profile = report.spec, report.profile
    tiles = [("parameters", f"{spec.num_params:,}"), ("layers", str(spec.num_layers))]
    if profile is not None:
        runs = sum(len(point.runs) for point in profile.timing)
        spent = "GPU time after engine starts" if report.whole else "time spent"
        tiles += [
            ("runs measured", f"{runs:,}"),
            (spent, f"{profile.spent_s:.0f} of {profile.budget_s:.0f} s"),
        ]
    feasible = sum(c.feasible for c in report.configurations)
    tiles.append(("configurations would work", f"{feasible} of {len(report.configurations)}"))
    basis = (
        "from fingerprints measured on this machine"
        if profile is not None
        else "from datasheets alone (roofline); nothing was measured"
    )
    first = report.rankings[0] if report.rankings else None
    said = None if first is None else first.verdict
    return join(
        el("h1", report.model),
        None if said is None else _verdict(report, said),
        el("p", f"On {report.hardware}: {workload_text(report.workload)}. Estimates {basis}.", class_="lead"),
        el(
            "div",
            [el("div", el("b", value), el("span", name), class_="tile") for name, value in tiles],
            class_="tiles",
        ),
    )


def _verdict(report: Report, said: Verdict) -> Markup:
    """Return what the first of the intents chooses, before everything else."""
    refused = f" {said.refused}." if said.refused else ""
    return el(
        "div",
        el("p", el("b", said.sentence), class_="lead"),
        verdict(said),
        el("p", f"By {report.rankings[0].intent}; the other intents are below.{refused}", class_="soft"),
        class_="card verdict",
    )


def model_and_machine(report: Report) -> Markup:
    """Describe model and machine, and what the profile left out."""
    spec, profile, device = report.spec, report.profile, report.device
    experts = [("experts", f"{spec.num_experts}, {spec.experts_per_token} per token")] if spec.num_experts else []
    model = facts(
        [
            ("family", f"{spec.family} ({spec.architecture})"),
            ("parameters", f"{spec.num_params:,} ({spec.layer_params:,} a layer)"),
            ("layers", str(spec.num_layers)),
            ("hidden, MLP", f"{spec.hidden_size:,}, {spec.intermediate_size:,}"),
            ("heads, KV heads", f"{spec.num_heads}, {spec.num_kv_heads} of {spec.head_dim}"),
            *experts,
            ("vocabulary", f"{spec.vocab_size:,}{', tied embeddings' if spec.tied_embeddings else ''}"),
            ("context", f"{spec.max_context_tokens:,} tokens"),
        ]
    )
    compute = f"{number(device.flops_16bit_per_s / 1e12)} TFLOP/s in 16 bits"
    machine = [
        ("devices", report.hardware),
        ("memory", f"{gib(device.memory_bytes)} each, {number(device.memory_bytes_per_s / 1e9)} GB/s"),
        ("compute", compute),
    ]
    if profile is not None:
        after = " after engine starts" if report.whole else ""
        machine += [("engine", profile.engine), *_machine(profile.machine)]
        machine += [
            ("profiled", profile.created_at),
            ("budget", f"{profile.spent_s:.1f} of {profile.budget_s:g} s spent{after}"),
            ("finished", _finished(report, complete=profile.complete)),
        ]  # fmt: skip
    remarks = () if profile is None else profile.notes
    said = [line for line in report.warnings if line not in remarks]
    return join(
        el(
            "div",
            el("div", el("h3", "Model"), model, class_="card"),
            el("div", el("h3", "Machine"), facts(machine), class_="card"),
            class_="pair",
        ),
        (el("h3", "Notes of the profile"), bullets(remarks)) if remarks else None,
        (el("h3", "Warnings"), bullets(said)) if said else None,
    )


def _finished(report: Report, *, complete: bool) -> str:
    if report.whole:
        return "everything planned was run" if complete else "not all that was planned was run, see the notes"
    return "every interval is tight" if complete else "the budget ended first"


def _machine(machine: MachineInfo) -> list[tuple[str, str]]:
    driver = [("driver", machine.driver)] if machine.driver else []
    devices = f"{machine.num_devices} device{'' if machine.num_devices == 1 else 's'}"
    cores = f"{machine.cpu_model}, {devices} of {machine.cores_per_device} cores"
    return [("CPU", cores), *driver, ("versions", ", ".join(" ".join(pair) for pair in machine.versions))]


# Times


def times(report: Report) -> Markup | None:
    """Return charts for the burst nearest the workload; the remaining ones and the numbers to open."""
    if not report.panels:
        return None
    shapes = sorted({(p.batch, p.input_tokens) for p in report.panels})
    work = report.workload
    first = min(shapes, key=lambda s: (abs(s[0] - work.batch), abs(s[1] - work.input_tokens)))
    others = [fold(f"batch {b}, {n} tokens in", _burst(report, b, n)) for b, n in shapes if (b, n) != first]
    weights = sorted({str(s.weights) for p in report.panels for s in p.series})
    return join(
        el(
            "p",
            "Each dot is the trimmed mean of the repeated runs of one fingerprint (the first few layers of the "
            "model), with its 90% interval. The line is the fit of L2 through all of them, dashed where it goes "
            "beyond the deepest fingerprint, with its 90% band; it ends at the whole model, in an open circle.",
        ),
        legend(
            [
                *[(f"c-{w}", "round", f"{w} weights") for w in weights],
                *([("", "turned", "measured on the whole model")] if report.accuracy else []),
            ]
        ),
        el("h3", f"Batch {first[0]}, {first[1]} tokens in"),
        _burst(report, *first),
        others,
        fold("All measured points as a table", _points_table(report.panels)),
    )


def _burst(report: Report, batch: int, prompt: int) -> Markup:
    parts: list[Child] = []
    for name, title in _QUANTITIES.items():
        panels = [p for p in report.panels if (p.quantity, p.batch, p.input_tokens) == (name, batch, prompt)]
        if not panels:
            continue
        truths = [_truths(report, panel) for panel in panels]
        most = _top(panels, [value for known in truths for _, value, _ in known])
        figures = [
            el(
                "figure",
                el("figcaption", f"{name.removesuffix('_s').upper()}, tp={panel.tp} pp={panel.pp}"),
                charts.time_chart(panel, num_layers=report.spec.num_layers, most_s=most, truths=known),
            )
            for panel, known in zip(panels, truths, strict=True)
        ]
        parts.append(el("div", el("p", title, class_="soft"), el("div", figures, class_="panels")))
    return el("div", parts, class_="pair" if len(panels) == 1 else None)


def _top(panels: Sequence[TimePanel], truths: Sequence[float]) -> float:
    """Return the top of the shared axis: all values, and intervals as far as they leave the values readable."""
    times = [t for p in panels for s in p.series for t in (*s.points, *s.line)]
    values = max([*(t.value_s for t in times), *truths, 1e-9])
    return min(max(max(t.high_s for t in times), values), 2 * values) * 1.05


def _truths(report: Report, panel: TimePanel) -> list[tuple[str, float, float]]:
    rows = [] if report.accuracy is None else report.accuracy.rows
    return [
        (str(row.config.weights), row.measured, row.num_layers)
        for row in rows
        if row.shape_hash == report.spec.shape_hash
        and row.workload is not None
        and (row.quantity, row.config.tp, row.config.pp) == (panel.quantity, panel.tp, panel.pp)
        and (row.workload.batch, row.workload.input_tokens) == (panel.batch, panel.input_tokens)
    ]


def _points_table(panels: Sequence[TimePanel]) -> Markup:
    rows = [
        el(
            "tr",
            el("td", f"tp={p.tp} pp={p.pp}, {s.weights} weights, {s.kv} KV", class_="l"),
            el("td", str(p.batch)),
            el("td", str(p.input_tokens)),
            el("td", f"{t.num_layers:g}"),
            el("td", p.quantity.removesuffix("_s").upper()),
            time_cell(t.value_s, t.low_s, t.high_s),
            el("td", str(t.num_runs)),
        )
        for p in panels
        for s in p.series
        for t in s.points
    ]
    return table(("configuration", "batch", "tokens in", "layers", "quantity", "time", "runs"), rows)


def layer_effects(report: Report) -> Markup | None:
    """Return one layer's time in prefill and decode, and whether the runs distinguish it from zero."""
    effects = report.layer_effects
    if not effects:
        return None
    parts: list[Child] = [
        el(
            "p",
            "The device time that one hidden layer adds, with its 90% interval, at the largest burst that was "
            "run. An interval that reaches zero is below resolution: these runs do not tell one layer from none, "
            "and estimates that rest on it are as wide as that says. One wholly below zero says that something "
            "else changed between the runs of different depths.",
        )
    ]
    for title, name in (("of a prefill", "first_s"), ("of a decode step", "next_s")):
        found = [(effect, getattr(effect, name)) for effect in effects]
        least, most = min(0.0, *(i.low for _, i in found)), max(i.high for _, i in found)
        rows = []
        for effect, interval in found:
            key = effect.key
            said = f"tp={key.tp} pp={key.pp}, {key.weights} weights, {key.kv} KV"
            if interval.high < 0:
                verdict = el("span", "below zero", class_="bad")
            elif interval.low <= 0:
                verdict = el("span", "below resolution", class_="bad")
            else:
                verdict = el("span", "resolved", class_="good")
            chart = charts.whisker(interval, most, least, f"{said}: {seconds(interval.value)}")
            rows.append(
                el(
                    "tr",
                    el(
                        "td",
                        said,
                        el("small", f"batch {effect.batch}, {effect.input_tokens} tokens in"),
                        class_="l",
                    ),
                    time_cell(interval.value, interval.low, interval.high),
                    el("td", chart, class_="draw"),
                    el("td", verdict),
                )
            )
        parts.append(el("h3", f"One layer {title}"))
        parts.append(table(("configuration", "time", "from zero", "verdict"), rows, left=(0, 2)))
    return join(parts)


# Memory


def memory(report: Report) -> Markup | None:
    """Draw stacked bars of the fullest GPU, the feasible first."""
    predicted = [
        (found, found.estimate, stage)
        for found in report.configurations
        if found.estimate is not None and (stage := found.fullest_stage) is not None
    ]
    if not predicted:
        return None
    shown, rest = predicted[:_BARS_SHOWN], predicted[_BARS_SHOWN:]
    rows, has_thin = _bar_rows(shown)
    names = ("configuration", "fullest GPU", "total", *(said for _, said in charts.MEMORY_PARTS))
    small = " The thin bar below shows the same without the runtime, on a scale of its own." if has_thin else ""
    return join(
        el(
            "p",
            f"Bytes on the fullest GPU of each configuration, for {workload_text(report.workload)}. A device has "
            f"{gib(report.device.memory_bytes)}. The interval is on the whole.{small}",
        ),
        legend([(f"m-{part}", "", said) for part, said in charts.MEMORY_PARTS]),
        table(names, rows, left=(0, 1)),
        fold(f"{len(rest)} more configurations", table(names, _bar_rows(rest)[0], left=(0, 1))) if rest else None,
    )


def _bar_rows(predicted: Sequence[tuple[Configuration, Estimate, StageMemory]]) -> tuple[list[Markup], bool]:
    """Return one row each, on one scale, and whether the runtime hides the rest, which then has its own bar."""
    most = max(stage.total_bytes for _, _, stage in predicted)
    most_counted = max(stage.total_bytes - stage.runtime_bytes for _, _, stage in predicted)
    has_thin = most_counted < _VISIBLE * most
    return [_bar_row(*each, most, most_counted if has_thin else None) for each in predicted], has_thin


def _bar_row(
    found: Configuration, estimate: Estimate, stage: StageMemory, most: int, most_counted: int | None
) -> Markup:
    name = label(found.config)
    bars = [charts.memory_bar(stage, most, name)]
    if most_counted is not None:
        bars.append(charts.memory_bar(stage, most_counted, name, with_runtime=False))
    error = f"± {estimate.memory.relative_error:.1%}, {estimate.memory.source}"
    return el(
        "tr",
        el("td", name, None if found.feasible else el("small", "refused"), class_="l"),
        el("td", bars, class_="draw"),
        el("td", gib(stage.total_bytes), el("small", error), class_="n"),
        [el("td", gib(getattr(stage, f"{part}_bytes")), class_="n") for part, _ in charts.MEMORY_PARTS],
        class_=None if found.feasible else "refused",
    )


# Latency against cost


def pareto(report: Report) -> Markup | None:
    """Return all configurations that have both figures; the front among the feasible ones."""
    drawn = [c for c in report.configurations if c.estimate is not None and c.cost is not None and c.cost > 0]
    if not drawn:
        return None
    feasible = [c for c in drawn if c.feasible]
    front = [feasible[i] for i in charts.pareto_front([_plane(c) for c in feasible])]
    points = [_point(c, report, front.index(c) + 1 if c in front else None) for c in drawn]
    wide = charts.pareto_chart(points, cost_unit=report.cost_unit, width=880, height=470)
    narrow = charts.pareto_chart(points, cost_unit=report.cost_unit, width=340, height=360)
    blank = len(report.configurations) - len(drawn)
    return join(
        el(
            "p",
            f"Cost of a request ({report.cost_model}, {report.cost_unit}) against its end-to-end latency, for "
            f"{workload_text(report.workload)}. Towards the lower left is better; the stepped line is the Pareto "
            "front of the configurations that would work, numbered from the cheapest, with the 90% interval of "
            "their latency."
            + (f" {blank} configurations have no estimate and are only in the table of all." if blank else ""),
        ),
        legend(
            [
                *[
                    (f"c-{w}", "round", f"{w} weights")
                    for w in dict.fromkeys(str(c.config.weights) for c in drawn)
                ],
                ("", "cross", "refused"),
            ]
        ),
        el("figure", el("div", wide, class_="wide"), el("div", narrow, class_="narrow")),
        el("ol", [el("li", _on_front(c, report)) for c in front], class_="front")
        if front
        else el("p", "No configuration is feasible, so that there is no front."),
    )


def _plane(found: Configuration) -> tuple[float, float]:
    assert found.estimate is not None
    assert found.cost is not None
    return found.cost, found.estimate.e2e_s.value


def _point(found: Configuration, report: Report, number_on_front: int | None) -> charts.ParetoPoint:
    cost, e2e = _plane(found)
    assert found.estimate is not None
    whole = found.estimate.e2e_s
    figures = f"{seconds(e2e)} ({range_of(whole)}, {whole.source}), {number(cost)} {report.cost_unit}"
    title = f"{label(found.config)}: {figures}"
    if not found.feasible:
        title += f"; refused: {found.reason}"
    return charts.ParetoPoint(
        cost, e2e, whole.low, whole.high, str(found.config.weights), found.feasible, title, number_on_front
    )


def _on_front(found: Configuration, report: Report) -> str:
    cost, e2e = _plane(found)
    return f"{label(found.config)}: {number(cost)} {report.cost_unit}, {seconds(e2e)}"


def reading(report: Report) -> Markup:
    """Return the words of the page."""
    return facts(
        [
            ("TTFT, TPOT", "seconds until the first token of the whole batch; seconds per further token"),
            ("E2E", "TTFT + (output tokens - 1) × TPOT"),
            ("interval", "90%: the true value is expected inside nine times in ten"),
            ("measured", "this very configuration and workload was run"),
            ("extrapolated", "from fingerprints of the same configuration, to all layers"),
            *(
                [("repeated", "a fingerprint whose every forward is run again, to the model's depth")]
                if report.whole
                else []
            ),
            ("sharded", "from one tensor-parallel rank's shape run alone, and modelled all-reduces"),
            ("scaled", "the nearest measured configuration times the ratio of the roofline's figures"),
            ("roofline", "from datasheets alone"),
            ("refused", "listed with its reason and never deployed"),
            (
                "runtime",
                "process and libraries beside the counted tensors (GPU: the context, and captured graphs)",
            ),
        ]
    )
