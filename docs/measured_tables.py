"""Tables of the pages that come from recorded results: each stands between two marks, ``<!-- table: NAME -->``."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decision_tables import decision_table, ranking_table
from delta_tables import DELTA_TABLES
from placement_tables import exact_gaps, exact_gaps_in_part, named_policies, of_policies, of_replicas
from serving_tables import gateway_table, late_table
from world_tables import (
    against_table,
    aiconfigurator_table,
    alpaserve_table,
    best_table,
    contestants_table,
    fields_table,
    kept_table,
    oracle_table,
    promise_table,
    slots_table,
    summary_table,
    tight_table,
    variants_table,
)

if TYPE_CHECKING:
    from tests.bench.accuracy_measure import Recorded
    from tests.bench.accuracy_rows import Row
    from tests.bench.delta_quality import DeltaStudy

__all__ = ["with_tables"]

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/bench/results"
AICONFIGURATOR = "AIConfigurator 0.12.0"
sys.path.insert(0, str(ROOT))  # the benches that made the results


def with_tables(page: str) -> str:
    """Return ``page`` with every table between marks as the results are now."""

    def table(block: re.Match[str]) -> str:
        return f"{block[1]}\n\n{TABLES[block[2]]()}\n\n<!-- end -->"

    return re.sub(r"(<!-- table: (.+?) -->)\n.*?<!-- end -->", table, page, flags=re.DOTALL)


@cache
def _recorded(file: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress((RESULTS / file).read_bytes()))
    return found


def _plain(file: str) -> Any:
    return json.loads((RESULTS / file).read_bytes())


def _decisions() -> tuple[Any, ...]:
    from fingerprint.codec import from_json
    from tests.bench.decisions import Group, family

    recorded = json.dumps(_recorded("decisions.json.gz")["groups"]).encode()
    groups = from_json(recorded, tuple[Group, ...], what="decisions.json.gz")
    families = {family(group.table) for group in groups}
    return tuple(group for group in groups if group.table in families)  # single tables are in the file


def _regret(*, supported: bool, limited: bool) -> str:
    from tests.bench.decisions import as_markdown

    return as_markdown([g for g in _decisions() if g.supported is supported and ("slo" in g.intent) is limited])


def _in_short() -> str:
    groups = [g for g in _decisions() if g.table == "all" and g.supported and "AIConfigurator" in g.choosers]
    names = ("iServe", "rule", "AIConfigurator")
    lines = [f"| intent | choices | {' | '.join(names)} |", "|---|--:|---|---|---|"]
    for group in groups:
        found = [group.choosers[name] for name in names]
        cells = [
            f"{one.best:.0%} best, {100 * one.mean:.1f}% regret"
            + "".join(
                f", {n:,} {what}" for n, what in ((one.refused, "rejected"), (one.missed, "limits broken")) if n
            )
            for one in found
        ]
        lines.append(f"| `{group.intent}` | {found[0].count:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _bias() -> str:
    from fingerprint.codec import from_json
    from tests.bench.decisions import Bias, bias_table

    recorded = json.dumps(_recorded("decisions.json.gz")["biases"]).encode()
    return bias_table(from_json(recorded, tuple[Bias, ...], what="decisions.json.gz"))


@cache
def _predicted(folder: str) -> tuple[list[Recorded], list[Row]]:
    """Return a folder's recordings with what is predicted of their whole models, which several tables show."""
    from fingerprint.estimators.calibration import Calibration
    from tests.bench.accuracy import load, measured_errors, predict_l3

    recorded = load(RESULTS / folder)
    calibration = Calibration(measured_errors(recorded))
    return recorded, [row for one in recorded for row in predict_l3(one, calibration)]


@cache
def _by_other_methods(folder: str) -> list[Row]:
    from tests.bench.accuracy import by_other_methods

    return by_other_methods(_predicted(folder)[0])


def _accuracy(folder: str) -> str:
    from tests.bench.accuracy import cost_row, memory_row, timer_rows
    from tests.bench.accuracy_tables import markdown

    recorded, rows = _predicted(folder)
    return markdown(
        rows,
        [memory_row(one) for one in recorded],
        [cost_row(one) for one in recorded],
        [row for one in recorded for row in timer_rows(one)],
        _by_other_methods(folder),
    )


def _strategies(model: str) -> str:
    from fingerprint.codec import from_json
    from tests.bench.kept import read_kept
    from tests.bench.strategies import StrategyRecord, markdown

    kept = RESULTS / "strategies.json.xz"
    text = markdown(from_json(read_kept(kept), StrategyRecord, what=kept.name))
    return text.partition(f"### {model}\n")[2].strip().partition("\n\n")[0]


def _served() -> str:
    from tests.bench.fidelity_anew import SERVED
    from tests.bench.fidelity_table import table

    return table(SERVED)


def _served_anew() -> str:
    from tests.bench.fidelity_anew import table

    return table()


def _served_steps() -> str:
    from fingerprint.codec import from_json
    from tests.bench.served_steps import ServedSteps, summary

    files = sorted((RESULTS / "served_steps_h200").glob("*.json"))
    return summary([from_json(file.read_bytes(), ServedSteps, what=file.name) for file in files])


def _by_family() -> str:
    from tests.bench.accuracy_families import table

    return table()


def _goals() -> str:
    from tests.bench.accuracy_families import goals_table

    return goals_table()


def _other_methods(*, by_model: bool) -> str:
    from tests.bench.accuracy_families import others_tables

    return others_tables()[by_model]


def _graphs_of_mixtures() -> str:
    from tests.bench.graph_sizes import recorded_table

    return recorded_table()


def _graphs_in_one_run() -> str:
    from fingerprint.codec import from_json
    from tests.bench.graph_sizes import GraphSizes, table

    files = sorted((RESULTS / "graph_sizes_h200").glob("*.json"))
    return table([from_json(file.read_bytes(), GraphSizes, what=file.name) for file in files])


def _skewed_draw() -> str:
    from tests.bench.accuracy_routing import table

    return table()


def _by_size() -> str:
    from tests.bench.accuracy_families import size_table

    return size_table()


def _against_others() -> str:
    """iServe, AIConfigurator and vLLM's defaults: errors by fingerprints, and picks by datasheets alone."""
    from tests.bench.accuracy_tables import summary

    theirs = [row for row in _by_other_methods("h200") if row.method == AICONFIGURATOR]

    answered = {row.point for row in theirs}
    ours = [row for row in _predicted("h200")[1] if row.point in answered]
    errors = {
        (method, metric): rest for method, metric, *rest in summary([*ours, *theirs], lambda row: row.method)
    }
    picks = {g.intent: g.choosers for g in _decisions() if g.table == "all" and g.supported}

    def error(method: str, metric: str) -> str:
        _, median, worst, _ = errors[method, metric]
        return f"{median:.1%} / {worst:.1%}"

    def pick(name: str, intent: str) -> str:
        found = picks[intent][name]
        return f"{found.best:.0%} best, {100 * found.mean:.1f}% regret"

    def limit(name: str) -> str:
        found = picks["latency-slo"][name]
        return f"{found.best:.0%} best, {found.refused:,} rejected, {found.missed:,} broken"

    lines = [
        f"| | iServe | {AICONFIGURATOR} | vLLM's defaults |",
        "|---|---|---|---|",
        "| rests on | one and two layers, and other models' errors, measured here "
        "| measured operators of listed GPUs | nothing: one GPU, the checkpoint's format |",
    ]
    lines += [
        f"| {metric.upper()} of whole models, {errors['L3', metric][0]} points: median / worst error "
        f"| {error('L3', metric)} | {error(AICONFIGURATOR, metric)} | none predicted |"
        for metric in ("tpot", "ttft")
    ]
    inside = " and ".join(f"{errors['L3', metric][3]:.0%}" for metric in ("tpot", "ttft"))
    lines.append(f"| 90% intervals, there | hold {inside} | none | none |")
    for intent in ("min-latency", "min-gpu-hours", "max-throughput"):
        count = picks[intent]["iServe"].count
        lines.append(
            f"| `{intent}`, {count} choices | {pick('iServe', intent)} "
            f"| {pick('AIConfigurator', intent)} | no choice |"
        )
    count = picks["latency-slo"]["iServe"].count
    lines.append(
        f"| `latency-slo`, {count:,} choices | {limit('iServe')} | {limit('AIConfigurator')} | no choice |"
    )
    return "\n".join(lines)


def _risk() -> str:
    from tests.bench.risk import kept, table

    return "\n".join(table(kept(RESULTS / "risk_independent.json.gz")))


def _placed() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = _recorded("placement_under_load.json.gz")["rows"]
    return rows


def _quality_by_rank() -> str:
    from fingerprint.codec import from_json
    from tests.bench.variant_quality import Study, table

    file = "variant_quality.json"
    return table(from_json((RESULTS / file).read_bytes(), Study, what=file))


def _of_adapters(name: str) -> str:
    from tests.bench import variant_pages

    make: Callable[[], str] = getattr(variant_pages, f"{name}_table")
    return make()


def _families_with_deltas() -> str:
    from daemon.torch_engine.model.capabilities import FAMILIES, ONE_STAGE

    rows = {"compressed and served": FAMILIES - ONE_STAGE.keys(), "refused": FAMILIES & ONE_STAGE.keys()}
    head = "| deltas | families (`model_type`) |\n|---|---|"
    return "\n".join([head, *(f"| {what} | {', '.join(sorted(families))} |" for what, families in rows.items())])


def _delta_study() -> DeltaStudy:
    from fingerprint.codec import from_json
    from tests.bench.delta_quality import DeltaStudy

    file = "delta_quality.json"
    return from_json((RESULTS / file).read_bytes(), DeltaStudy, what=file)


def _quality_by_delta_format() -> str:
    from tests.bench.delta_quality import quality_table

    return quality_table(_delta_study())


def _delta_costs() -> str:
    from tests.bench.delta_quality import cost_table

    return cost_table(_delta_study())


def _packed_tensors() -> str:
    from tests.bench.packed_tensors_tables import read_study, saved_table

    return saved_table(read_study(RESULTS / "packed_tensors.json.xz"))


def _formats_at_scale() -> str:
    from tests.bench.quality_at_scale_studies import read_studies
    from tests.bench.quality_at_scale_tables import formats_table

    return formats_table(read_studies(RESULTS / "quality_at_scale_h200"))


def _ranks_at_scale() -> str:
    from tests.bench.quality_at_scale_studies import read_studies
    from tests.bench.quality_at_scale_tables import ranks_table

    return ranks_table(read_studies(RESULTS / "quality_at_scale_h200"))


def _gpu_hours_of_deltas() -> str:
    from tests.bench.delta_gpu_hours import gpu_hours, table

    return table(gpu_hours())


def _formats() -> str:
    from tests.bench.accuracy import load
    from tests.bench.format_table import FOLDER, markdown

    return markdown(load(FOLDER))


TABLES: dict[str, Callable[[], str]] = {
    **DELTA_TABLES,
    "quality by rank": _quality_by_rank,
    "steps with adapters": lambda: _of_adapters("steps"),
    "loads of adapters": lambda: _of_adapters("loads"),
    "loads of adapters, three ways": lambda: _of_adapters("ways"),
    "parts of loads of adapters": lambda: _of_adapters("parts"),
    "loads of adapters by a thread": lambda: _of_adapters("threads"),
    "contest of adapters": lambda: _of_adapters("contest"),
    "contest of adapters, again": lambda: _of_adapters("again"),
    "memory and prompts of slots": lambda: _of_adapters("slots"),
    "goals of the contest of adapters": lambda: _of_adapters("goals"),
    "words of the contest of adapters": lambda: _of_adapters("words"),
    "cold adapters": lambda: _of_adapters("cold"),
    "quality by delta format": _quality_by_delta_format,
    "quality of formats at a larger scale": _formats_at_scale,
    "quality of ranks at a larger scale": _ranks_at_scale,
    "cost of a delta": _delta_costs,
    "packed tensors": _packed_tensors,
    "GPU-hours of deltas": _gpu_hours_of_deltas,
    "families with deltas": _families_with_deltas,
    "world contestants": contestants_table,
    "world fields": fields_table,
    "ours in worlds": against_table,
    "ours under load": summary_table,
    "ours in worlds, rates given": partial(against_table, "rates-given"),
    "worlds with aiconfigurator": aiconfigurator_table,
    "kept with aiconfigurator": kept_table,
    "ours and aiconfigurator": partial(against_table, "with-aiconfigurator", "aiconfigurator"),
    "ours and aiconfigurator, rates given": partial(against_table, "with-aiconfigurator-rates", "aiconfigurator"),
    "worlds by variant": variants_table,
    "worlds and the oracle": oracle_table,
    "promises in worlds": promise_table,
    "tight SLOs": tight_table,
    "worlds and alpaserve": alpaserve_table,
    "ours and the best": best_table,
    "variants in worlds": partial(slots_table, "of-variants"),
    "variants in worlds, rates given": partial(slots_table, "of-variants-rates"),
    "variants in worlds, loads free": partial(slots_table, "of-variants-loads-free", only_cost=True),
    "regret without a limit": lambda: _regret(supported=False, limited=False),
    "regret without a limit, AIConfigurator": lambda: _regret(supported=True, limited=False),
    "regret with a limit": lambda: _regret(supported=False, limited=True),
    "regret with a limit, AIConfigurator": lambda: _regret(supported=True, limited=True),
    "strategies, iserve-demo": lambda: _strategies("iserve-demo"),
    "strategies, llama-16x25MB": lambda: _strategies("llama-16x25MB"),
    "bias": _bias,
    "goals of predictions": _goals,
    "accuracy by family": _by_family,
    "other methods on 0.33": lambda: _other_methods(by_model=False),
    "other methods on 0.33, by model": lambda: _other_methods(by_model=True),
    "accuracy by prompt tokens": _by_size,
    "a skewed draw of experts": _skewed_draw,
    "graphs of mixtures": _graphs_of_mixtures,
    "graphs of mixtures in one run": _graphs_in_one_run,
    "served on vLLM 0.33": _served,
    "served on vLLM 0.33, simulated anew": _served_anew,
    "steps of a server": _served_steps,
    "formats on vLLM": _formats,
    "regret in short": _in_short,
    "against others": _against_others,
    "risk on new loads": _risk,
    "policies by name": named_policies,
    "policies of figure 10": lambda: of_policies(_placed()),
    "replicas on 16 GPUs": lambda: of_replicas(_placed(), 16),
    "replicas on 8 GPUs": lambda: of_replicas(_placed(), 8),
    "gateway": lambda: gateway_table(_recorded("gateway.json.gz")["runs"]),
    "late rejection on an H200": lambda: late_table(_plain("refusing_h200.json")),
    "times of rankings": lambda: ranking_table(_plain("rank.json")),
    "times of rankings with loads spared": lambda: ranking_table(_plain("rank_spared.json")),
    "times of decisions": lambda: decision_table(_plain("decide.json")),
    "distance to exact placement": lambda: exact_gaps(_recorded("exact_gap.json.gz")),
    "distance to exact placement in part": lambda: exact_gaps_in_part(_recorded("exact_gap.json.gz")),
    "accuracy of vLLM 0.24 on an H200": lambda: _accuracy("h200"),
}
