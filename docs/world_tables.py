"""Tables of the page on worlds: fields of the schema, contestants, and what was recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from iserve.report.markdown import markdown_table

if TYPE_CHECKING:
    from iserve.evaluation.document import ContestantResult, EvaluationDocument, SeedResult, WorldResult

__all__ = [
    "against_table",
    "aiconfigurator_table",
    "alpaserve_table",
    "best_table",
    "contestants_table",
    "fields_table",
    "kept_table",
    "oracle_table",
    "promise_table",
    "slots_table",
    "summary_table",
    "tight_table",
    "variants_table",
]

_OURS, _RULE, _AIC, _ALPASERVE, _ORACLE = "ours", "rule-min-tp-full", "aiconfigurator", "alpaserve", "oracle"
_SHOWN = (
    "ours",
    "ours-by-number",
    "ours-hybrid",
    "rule-min-tp",
    "rule-replicas",
    "rule-more-tp",
    "max-tp",
    "first-fit",
)
_SHORT = {_RULE: "rule", _AIC: "AIConfigurator", _ALPASERVE: "AlpaServe"}
_BASES = {
    "with-aiconfigurator": "as-stated",
    "with-aiconfigurator-rates": "rates-given",
    "with-aiconfigurator-slow-all-reduce": "slow-all-reduce",
    "with-alpaserve": "as-stated",
    "with-oracle": "rates-given",
}
_NAMED = {
    "with-aiconfigurator": "no rate given",
    "with-aiconfigurator-rates": "rates given",
    "with-aiconfigurator-slow-all-reduce": "no rate; all-reduce x 4",
}
_GOAL, _NEAR = 1.02, 1.05
_OF_SLOTS = (  # what is shown of worlds with variants: contestants, and under which intent
    (_OURS, "min-latency"),
    ("ours-round-robin", "min-latency"),
    ("ours-fcfs", "min-latency"),
    (_OURS, "min-cost"),
    (_OURS, "min-gpu-hours"),
    (_RULE, "min-latency"),
    ("rule-replicas", "min-latency"),
    ("rule-merged", "min-latency"),
    ("first-fit-merged", "min-latency"),
)


def fields_table() -> str:
    """Return every field of a world file, by object."""
    from iserve.evaluation.world_file import world_schema

    definitions = world_schema()["$defs"]
    parts = []
    for name, of in definitions.items():
        if "properties" not in of:
            continue
        needed = of.get("required", ())
        rows = [
            [f"`{field}`", _kind(part), _default(part, needed=field in needed), _words(part)]
            for field, part in of["properties"].items()
        ]
        parts.append(f"**{name}**\n\n" + markdown_table(("field", "type", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _words(part: dict[str, Any]) -> str:
    return str(part["description"]).replace("|", "\\|").replace("\n", " ")


def _default(part: dict[str, Any], *, needed: bool) -> str:
    if needed:
        return "needed"
    if "$ref" in part and "default" not in part:
        return "its defaults"
    value = part.get("default")
    if value is None or value in ((), [], {}, ""):
        return "none"
    return ", ".join(f"`{one}`" for one in (value if isinstance(value, list | tuple) else [value]))


def _kind(part: dict[str, Any]) -> str:
    if "$ref" in part:
        return str(part["$ref"]).rpartition("/")[2]
    if "anyOf" in part:
        return " or ".join(kind for each in part["anyOf"] if (kind := _kind(each)) != "null")
    if part.get("type") == "array":
        return f"list of {_kind(part['items'])}"
    if isinstance(part.get("additionalProperties"), dict) and part["additionalProperties"]:
        return f"name to {_kind(part['additionalProperties'])}"
    return str(part.get("type", "any"))


def contestants_table() -> str:
    """Return the contestants, and what each knows."""
    from iserve.evaluation.contestants import CONTESTANTS

    rows = [
        [
            f"`{name}`",
            kind.about,
            "trace" if kind.has_trace else "as the world says",
            "yes" if kind.by_intent else "no",
        ]
        for name, kind in CONTESTANTS.items()
    ]
    return markdown_table(("contestant", "decides", "knows", "by intent"), rows)


@cache
def _recorded(variant: str) -> EvaluationDocument:
    """Return a variant's recording; that of one baseline with the results of all for its seeds.

    Raises:
        ValueError: the strong rule has other scores in the two recordings.
    """
    from notebooks.figures.worlds import read

    document = read(variant).document
    base = _BASES.get(variant)
    if base is None:
        return document
    own = {world.name: world for world in document.worlds}
    return replace(document, worlds=tuple(_joined(world, own[world.name]) for world in read(base).document.worlds))


def _joined(base: WorldResult, own: WorldResult) -> WorldResult:
    """Return ``base`` for the seeds of ``own``, with the baseline's results of that."""
    seeds = range(len(own.requests))
    results = [replace(one, seeds=tuple(one.seeds[number] for number in seeds)) for one in base.results]
    for one in own.results:
        if one.contestant == _RULE:
            again = next(r for r in results if (r.contestant, r.intent) == (_RULE, one.intent))
            if [seed.score for seed in again.seeds] != [seed.score for seed in one.seeds]:
                raise ValueError(f"{base.name}: recorded with and without the baseline in different worlds")
    added = (one for one in own.results if one.contestant in (_AIC, _ALPASERVE, _ORACLE))
    return replace(base, requests=own.requests, results=(*results, *added))


def _result(world: WorldResult, contestant: str, intent: str) -> ContestantResult:
    return next(r for r in world.results if r.contestant == contestant and r.intent == intent)


def against_table(variant: str = "as-stated", other: str = _RULE) -> str:
    """Return ours against another contestant, by world and intent; means over the seeds."""
    rows, named = [], "the rule" if other == _RULE else "AIConfigurator"
    for world in _recorded(variant).worlds:
        cost, latency, slo, hours = (
            (_result(world, _OURS, intent), _result(world, other, intent))
            for intent in ("min-cost", "min-latency", "latency-slo", "min-gpu-hours")
        )
        if not _answers(cost[1]):
            rows.append([world.name, *["no answer"] * 6])
            continue
        guards = [_mean([seed.metrics.guard_ratio for seed in result.seeds]) for result in cost]
        p95 = _mean_ratio([(a.metrics.e2e.p95_s, b.metrics.e2e.p95_s) for a, b in _pairs(*latency)])
        rows.append(
            [
                world.name,
                _either(*cost),
                " and ".join(guards),
                _either(*latency),
                "-" if p95 is None else f"{p95:.2f}",
                f"{_share(slo[0].seeds)} for {_share(slo[1].seeds)}",
                _either(*hours),
            ]
        )
    head = (
        "world",
        "`min-cost`",
        f"guard, its own and {named}'s",
        "`min-latency` P50",
        "P95",
        "`latency-slo`",
        "`min-gpu-hours`",
    )
    return markdown_table(head, rows)


def aiconfigurator_table() -> str:
    """Return ours, AIConfigurator and the strong rule against one another, where AIConfigurator has answers."""
    rows = []
    for variant, named in _NAMED.items():
        for own, other in ((_OURS, _AIC), (_AIC, _RULE), (_OURS, _RULE)):
            intents = ("min-latency", "latency-slo", "min-cost", "min-gpu-hours")
            cells = [_held(_cells(variant, own, intent, other, answered=True)) for intent in intents]
            rows.append([named, f"`{own}` over `{other}`", *cells])
    return markdown_table(("information", "ratio", "P50 of E2E", "SLOs kept", "cost", "GPU hours"), rows)


def kept_table() -> str:
    """Return the guards and SLOs that each keeps where AIConfigurator has answers."""
    rows = []
    for variant, named in _NAMED.items():
        worlds = [one for one in _recorded(variant).worlds if _answers(_result(one, _AIC, "min-cost"))]
        for name in (_OURS, _AIC, _RULE):
            costs = [seed for world in worlds for seed in _result(world, name, "min-cost").seeds]
            slos = [seed for world in worlds for seed in _result(world, name, "latency-slo").seeds]
            guards = f"{sum(seed.score is not None for seed in costs)} of {len(costs)}"
            least = min(seed.metrics.slo_fraction for seed in slos)
            rows.append([named, f"`{name}`", guards, _share(slos), f"{least:.1%}"])
    return markdown_table(("information", "contestant", "guards kept", "SLOs kept, mean", "least"), rows)


def _answers(result: ContestantResult) -> bool:
    return any(seed.plan for seed in result.seeds)


def variants_table() -> str:
    """Return for each contestant in how many cells (world, seed) it loses nothing to the strong rule."""
    rows = []
    for variant in ("as-stated", "rates-given", "slow-all-reduce", "slow-steps", "costly-sharing"):
        for contestant in _SHOWN:
            cells = [_cells(variant, contestant, intent) for intent in ("min-latency", "latency-slo", "min-cost")]
            rows.append([variant.replace("-", " "), f"`{contestant}`", *map(_held, cells)])
    head = ("variant", "contestant", "P50 of E2E", "SLOs kept", "cost")
    return markdown_table(head, rows)


def summary_table() -> str:
    """Return what the product gains over the strong rule: with no rate, with rates, and with other truths."""
    variants = {
        "no rate given": ("as-stated",),
        "rates given": ("rates-given",),
        "no rate; all-reduce x 4, steps x 1.5 or sharing 1.5": ("slow-all-reduce", "slow-steps", "costly-sharing"),
    }
    rows = []
    for named, of in variants.items():
        p50, cost = ([c for one in of for c in _cells(one, "ours", f"min-{what}")] for what in ("latency", "cost"))
        tails = [
            a.metrics.e2e.p95_s / b.metrics.e2e.p95_s
            for one in of
            for world in _recorded(one).worlds
            for a, b in _pairs(_result(world, "ours", "min-latency"), _result(world, _RULE, "min-latency"))
            if a.metrics.e2e.p95_s and b.metrics.e2e.p95_s
        ]
        rows.append([named, _held(p50), _held(tails), _held(cost)])
    return markdown_table(("", "P50 of E2E", "P95", "cost, where the rule keeps its guard"), rows)


def slots_table(variant: str, *, only_cost: bool = False) -> str:
    """Return how models with adapters or deltas are served, on slots and with a deployment of each variant.

    Args:
        only_cost: ours at least cost alone.
    """
    rows = []
    for world in _recorded(variant).worlds:
        for contestant, intent in ((_OURS, "min-cost"),) if only_cost else _OF_SLOTS:
            seeds = _result(world, contestant, intent).seeds
            metrics = [seed.metrics for seed in seeds]
            hours = [1000 * m.gpu_hours / (m.requests * m.answered_fraction) for m in metrics]
            loads = [sum(one.figures.loads for one in seed.variants) for seed in seeds]
            rows.append(
                [
                    world.name,
                    f"`{contestant}`" + (f", `{intent}`" if contestant == _OURS else ""),
                    f"{sum(hours) / len(hours):.3g}",
                    _mean([m.cost_gpu_s for m in metrics], 2),
                    _mean([m.e2e.p50_s for m in metrics], 2),
                    _mean([m.e2e.p95_s for m in metrics]),
                    _mean([m.guard_ratio for m in metrics]),
                    _share(seeds),
                    f"{sum(loads) / len(loads):,.0f}" if seeds[0].variants else "",
                ]
            )
    head = ("world", "served by", "GPU-hours", "GPU-s held", "P50, s", "P95, s", "guard", "SLOs kept", "loads")
    return markdown_table(head, rows)


def best_table() -> str:
    """Return ours against the best contestant with the same information, AIConfigurator included."""
    rows = []
    for variant in ("with-aiconfigurator", "with-aiconfigurator-rates"):
        cells = [_against_best(variant, intent) for intent in ("min-latency", "latency-slo", "min-cost")]
        rows.append([_NAMED[variant], *(_held(one, _NEAR) for one in cells)])
    return markdown_table(("information", "P50 of E2E", "SLOs kept", "cost"), rows)


def _against_best(variant: str, intent: str) -> list[float]:
    """Return ours over the best score of each cell that any contestant does not lose; infinite: ours is lost."""
    found = []
    for world in _recorded(variant).worlds:
        results = [_result(world, name, intent) for name in (_OURS, *_SHOWN[3:], _AIC)]
        for number in range(len(world.requests)):
            seeds = [result.seeds[number] for result in results]
            if intent == "latency-slo":
                shares = [seed.metrics.slo_fraction for seed in seeds]
                found.append(max(shares) / shares[0] if shares[0] else math.inf)
                continue
            scores = [seed.score for seed in seeds]
            known = [score for score in scores if score is not None]
            if known:
                found.append(math.inf if scores[0] is None else scores[0] / min(known))
    return found


def promise_table() -> str:
    """Return the SLOs that plans with a rate promise, and those that the simulation kept."""
    rows = []
    for variant, multiple in (("rates-given", "5"), ("tight-slo-rates", "1.5")):
        promises = [
            promise
            for world in _recorded(variant).worlds
            for seed in _result(world, _OURS, "latency-slo").seeds
            for promise in seed.promises
        ]
        kept = [promise.is_kept for promise in promises if promise.is_given]
        other = [promise.is_kept for promise in promises if not promise.is_given]
        rows.append([multiple, str(len(promises)), f"{sum(kept)} of {len(kept)}", f"{sum(other)} of {len(other)}"])
    head = ("SLO, times one request alone", "plans", "promised and kept", "not promised, and kept")
    return markdown_table(head, rows)


def tight_table() -> str:
    """Return the shares of tight SLOs that ours, the strong rule and the best other rule keep."""
    rows = []
    for world in _recorded("tight-slo").worlds:
        rates = next(one for one in _recorded("tight-slo-rates").worlds if one.name == world.name)
        shares = [
            _share(_result(one, name, "latency-slo").seeds)
            for one, name in (
                (world, _OURS),
                (rates, _OURS),
                (world, _RULE),
                (world, _SHOWN[4]),
                (world, _SHOWN[5]),
            )
        ]
        rows.append([world.name, *shares])
    return markdown_table(
        ("world", "ours", "ours, rates given", *(f"`{name}`" for name in (_RULE, *_SHOWN[4:6]))), rows
    )


def oracle_table() -> str:
    """Return ours, the strong rule and AIConfigurator over the oracle, with rates given."""
    rows = []
    for world in _recorded("with-oracle").worlds:
        row = [world.name]
        for intent in ("min-cost", "min-latency", "latency-slo"):
            oracle = _result(world, _ORACLE, intent)
            row += [_either(_result(world, name, intent), oracle) for name in (_OURS, _RULE, _AIC)]
        rows.append(row)
    cells = [_cells("with-oracle", _OURS, f"min-{what}", _ORACLE) for what in ("cost", "latency")]
    rows.append(["cells, mean", _held(cells[0], 1.15), "", "", _held(cells[1], 1.1), *[""] * 5])
    names = ("ours", "rule", "AIConfigurator")
    return markdown_table(
        ("world", *(f"{what}: {name}" for what in ("cost", "P50", "SLO") for name in names)), rows
    )


def alpaserve_table() -> str:
    """Return ours over AlpaServe, which is given the trace, with no rate known."""
    rows = []
    for world in _recorded("with-alpaserve").worlds:
        pairs = (
            (_result(world, _OURS, intent), _result(world, _ALPASERVE, intent))
            for intent in ("min-cost", "min-latency", "latency-slo")
        )
        rows.append([world.name, *(_either(*pair) for pair in pairs)])
    return markdown_table(("world", "cost", "P50 of E2E", "SLOs kept"), rows)


def _pairs(own: ContestantResult, other: ContestantResult) -> list[tuple[SeedResult, SeedResult]]:
    return list(zip(own.seeds, other.seeds, strict=True))


def _either(own: ContestantResult, other: ContestantResult) -> str:
    """Return the ratio, or which of the two is lost."""
    from iserve.evaluation.document import ratio

    lost = [any(seed.score is None for seed in result.seeds) for result in (own, other)]
    if all(lost):
        return "both lost"
    if any(lost):
        return "lost" if lost[0] else f"{_SHORT.get(other.contestant, other.contestant)} lost"
    found = ratio(own.seeds, other.seeds, own.intent)
    return "lost" if found is None else f"{found:.2f}"


def _cells(
    variant: str, contestant: str, intent: str, other: str = _RULE, *, answered: bool = False
) -> list[float]:
    """Return the ratio to ``other`` of every cell that it does not lose; infinite: lost.

    Args:
        answered: only worlds in which AIConfigurator has answers.
    """
    from iserve.evaluation.document import ratio

    found = []
    for world in _recorded(variant).worlds:
        if answered and not _answers(_result(world, _AIC, intent)):
            continue
        for own, theirs in _pairs(_result(world, contestant, intent), _result(world, other, intent)):
            if theirs.score is None or (intent == "latency-slo" and theirs.metrics.slo_fraction == 0):
                continue
            value = ratio([own], [theirs], _result(world, contestant, intent).intent)
            found.append(math.inf if value is None else value)
    return found


def _held(cells: list[float], goal: float = _GOAL) -> str:
    finite = [cell for cell in cells if math.isfinite(cell)]
    mean = math.exp(sum(map(math.log, finite)) / len(finite)) if finite else math.inf
    lost = len(cells) - len(finite)
    words = f"{sum(cell <= goal for cell in cells)} of {len(cells)}"
    if finite:
        words += f"; {mean:.2f}, worst {max(finite):.2f}"
    return words + (f"; {lost} lost" if lost else "")


def _mean_ratio(pairs: list[tuple[float | None, float | None]]) -> float | None:
    logs = [math.log(own / other) for own, other in pairs if own and other]
    return math.exp(sum(logs) / len(logs)) if len(logs) == len(pairs) else None


def _share(seeds: Sequence[SeedResult]) -> str:
    return f"{sum(seed.metrics.slo_fraction for seed in seeds) / len(seeds):.1%}"


def _mean(values: Sequence[float | None], digits: int = 1) -> str:
    known = [value for value in values if value is not None]
    return "-" if len(known) < len(values) else f"{sum(known) / len(known):.{digits}f}"
