"""A verdict in words, for terminals and pages: a sentence, then a few lines, each under a label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fingerprint.config import DeploymentConfig, Workload
from fingerprint.estimates import Source
from iserve.planning.deployability import DeployableDocument
from iserve.planning.document import (
    CacheSizesDocument,
    CandidateDocument,
    CapacityBound,
    EstimateDocument,
    JointPlanDocument,
    PlanDocument,
)
from iserve.planning.joint_text import joint_lines
from iserve.planning.runner_up import MOST_BATCH, BatchRange, IntentLead, RunnerUpDocument
from iserve.planning.verdict import FiguresDocument, VerdictDocument
from iserve.planning.words import (
    device_kind,
    differences,
    dollars,
    figure,
    gib,
    interval,
    rounded,
    seconds,
    workload_words,
)
from planner.plan import LoadForecast, RefusedFor, WhyNot

__all__ = [
    "HERE",
    "REFUSED_FOR",
    "Line",
    "alike_words",
    "conditions_left",
    "estimate_lines",
    "note_lines",
    "plan_lines",
    "refused_words",
    "state_sizes",
]

Line = tuple[str, str]  # label and text; a label that is empty belongs to the one before

REFUSED_FOR = {
    RefusedFor.SHAPE: "cannot be split so",
    RefusedFor.ENGINE: "no engine",
    RefusedFor.UNKNOWN: "figures not known",
    RefusedFor.QUALITY: "quality",
    RefusedFor.BUDGET: "over budget",
    RefusedFor.RATE: "rate not served",
    RefusedFor.LATENCY: "too slow",
    RefusedFor.MEMORY: "memory",
}
HERE = "Deploy here"
_OWN = {  # of a configuration that was run
    Source.MEASURED: "measured here",
    Source.EXTRAPOLATED: "extrapolated from fingerprints of this configuration measured here",
    Source.SHARDED: "one rank measured alone on one GPU, its all-reduces modelled",
    Source.SCALED: "scaled from measurements of this configuration at other loads",
}
_ANOTHER = {  # of one that was not, from the measurements of another
    Source.EXTRAPOLATED: "extrapolated from fingerprints of",
    Source.SHARDED: "modelled from one rank of",
    Source.SCALED: "scaled from measurements of",
}
_NOT_MEASURED = "this configuration was not measured"
_BOUND = {
    CapacityBound.GIVEN: "the options fix both",
    CapacityBound.INTENT: "min-memory takes no memory for more",
    CapacityBound.RATE: "the rate was judged with so many requests at once",
    CapacityBound.LOAD: "memory is reserved for the load that it was planned for",
    CapacityBound.MEMORY: "more does not fit the free memory",
    CapacityBound.NOT_MEASURED: "the memory of more was not measured",
    CapacityBound.LARGEST: "workers are started for no more",
}
_MOST_LEADS = 2


def plan_lines(document: PlanDocument) -> list[Line]:
    """Return all that a plan's verdict says below its sentence; nothing of a plan that was stored without one."""
    verdict = document.verdict
    if verdict is None:
        return []
    if document.chosen is None or verdict.figures is None:
        return _infeasible_lines(document.why_not, verdict)
    chosen = document.candidates[document.chosen]
    assert chosen.estimate is not None, "a feasible candidate has an estimate"
    remarks = _remarks(document, chosen)
    return [
        *_labelled(
            "At this load",
            _load_words(document, chosen.estimate, chosen.config, verdict.figures)
            if document.joint is None or document.load_forecast is None
            else _rated_words(document.joint, document.load_forecast, verdict.figures, document),
        ),
        *_labelled("Serves", [*_capacity_words(document, chosen), *_slo_words(verdict, document, chosen)]),
        (
            "How sure",
            _sure_words(
                verdict.figures,
                [_basis_words(chosen.config, chosen.estimate, chosen.measured), *remarks],
                under_load=document.load_forecast is not None,
            ),
        ),
        *(
            [("Runner-up", _runner_up_words(verdict.runner_up, chosen.config, document))]
            if document.joint is None
            else joint_lines(document.joint)
        ),
        *_deployable_lines(verdict.deployable),
    ]


def estimate_lines(
    work: Workload, verdict: VerdictDocument, estimate: EstimateDocument, config: DeploymentConfig
) -> list[Line]:
    """Return what the verdict on one configuration says below its sentence."""
    assert verdict.figures is not None, "one configuration has figures, whether or not it runs"
    measured = estimate.measured_config == config or _is_checked(estimate)
    return [
        *_labelled("At this load", _batch_load_words(work, estimate, config, verdict.figures)),
        ("How sure", _sure_words(verdict.figures, [_basis_words(config, estimate, measured)])),
        *_deployable_lines(verdict.deployable),
    ]


def refused_words(verdict: VerdictDocument) -> str:
    """Return all refusals in one line: ``179 refused: 105 quality, 42 rate not served, 32 no engine``."""
    total = sum(refusal.count for refusal in verdict.refusals)
    counts = ", ".join(f"{refusal.count} {REFUSED_FOR[refusal.reason]}" for refusal in verdict.refusals)
    return f"{total} refused: {counts}" if total else ""


def note_lines(document: PlanDocument) -> list[str]:
    """Return notes below the table: conditions of the chosen configuration, then those on the whole plan."""
    conditions = () if document.chosen is None else document.candidates[document.chosen].conditions
    return [*conditions_left(conditions, document.verdict), *document.notes]


def alike_words(document: PlanDocument, shown: int) -> str:
    """Describe rows whose intervals overlap that of the first, of which ``shown`` are listed."""
    rows = [index + 1 for index in document.indistinguishable]
    listed, more = [row for row in rows if row <= shown], sum(row > shown for row in rows)
    if listed == rows and len(rows) == 1:
        subject = f"1 and {rows[0]} cannot be told apart"
    else:
        others = " and ".join(filter(None, [_ranges(listed), f"{more} that are not shown" if more else ""]))
        subject = f"1 cannot be told apart from {others}"
    return f"{subject}: their intervals of {document.objective_unit} overlap"


def _ranges(rows: Sequence[int]) -> str:
    """Return ascending numbers, runs of three and more as ``2-9``."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and row == runs[-1][-1] + 1:
            runs[-1].append(row)
        else:
            runs.append([row])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def conditions_left(conditions: Iterable[str], verdict: VerdictDocument | None) -> list[str]:
    """Return conditions of running a configuration, without those that its verdict lists as missing here."""
    deployable = None if verdict is None else verdict.deployable
    missing = () if deployable is None else deployable.missing
    return [condition for condition in conditions if not any(condition.endswith(text) for text in missing)]


def _rated_words(
    joint: JointPlanDocument, served: LoadForecast, figures: FiguresDocument, document: PlanDocument
) -> list[str]:
    """Describe a joint plan at its rate: the mean request, utilisation, and how many miss a limit."""
    work, found = document.workload, joint.forecast
    rate = _rate_words(served.rate_per_s, document.replicas, ".4g")
    mean = "no place" if found.e2e_s is None else f"mean request {seconds(found.e2e_s)}"
    missed = "".join(f"; {words}" for words in _missed_words(served))
    most = 1 - served.percentile / 100
    if served.miss_probability is not None and served.miss_probability > most:
        missed += f", more than the {most:.3g} that may; no plan was found that keeps it"
    return [
        f"{rate}, {work.input_words} + {work.output_tokens} tokens each: {mean}{_price_words(figures)}",
        f"utilisation {found.utilisation:.0%}{missed}",
    ]


def _capacity_words(document: PlanDocument, chosen: CandidateDocument) -> list[str]:
    """Describe the requests that one worker serves, and why no more; nothing of a plan stored without."""
    capacity, work = document.capacity, document.workload
    if capacity is None:
        return []
    each, in_all, most = "", "", capacity.requests_at_once
    if document.replicas > 1:
        each, in_all = "each replica ", f" ({most * document.replicas} in total)"
    bound = _slots_words(most, chosen.estimate, chosen.config)
    served = (
        f"{each}up to {_requests(most)} at once{bound}{in_all}{',' * bool(bound)} of up to "
        f"{capacity.context_tokens:,} tokens each, in {gib(capacity.memory_bytes_per_gpu)} of each "
        f"{device_kind(document.hardware)}"
    )
    why = "" if capacity.bound is None else _BOUND[capacity.bound]
    step, kept = _step_words(capacity.step_tokens), _kept_words(capacity.cache_sizes)
    if (most, capacity.context_tokens) == (work.batch, work.context_tokens):
        return [f"{served}, no more than planned{': ' * bool(why)}{why}{step}", *kept]
    limited = f" ({why})" if capacity.bound in (CapacityBound.MEMORY, CapacityBound.NOT_MEASURED) else ""
    return [f"{served}{limited}; the figures are for {workload_words(work)}{step}", *kept]


def _step_words(step_tokens: int | None) -> str:
    return "" if step_tokens is None else f"; steps of up to {step_tokens:,} tokens"


def state_sizes(kept: CacheSizesDocument | None) -> list[tuple[str, str]]:
    """Return what is kept of a request, of a model with states; nothing of another."""
    if kept is None or not kept.state_bytes_per_request:
        return []
    states = [("of each request whatever its length", gib(kept.state_bytes_per_request))]
    tokens = f"{kept.kv_bytes_per_token / 1024:,.1f} KiB"
    return ([("of each token", tokens)] if kept.kv_bytes_per_token else []) + states


def _kept_words(kept: CacheSizesDocument | None) -> list[str]:
    sizes = " and ".join(f"{size} {of_what}" for of_what, size in state_sizes(kept))
    return [f"a replica keeps {sizes}"] if sizes else []


def _slots_words(requests: int, estimate: EstimateDocument | None, config: DeploymentConfig) -> str:
    """Describe how many of ``requests`` at once run; empty: no slots for their variants bound them."""
    most = None if estimate is None else estimate.most_at_once
    if most is None or round(most) >= requests:
        return ""
    slots, running = config.adapter_slots, rounded(most, 2)
    run = "runs" if running == "1" else "run"
    return f", of which {running} {run} on average with {slots} slot{'s' * (slots > 1)}"


def _slo_words(verdict: VerdictDocument, document: PlanDocument, chosen: CandidateDocument) -> list[str]:
    """Load at which the SLO was judged, where no rate says it."""
    judged, capacity = verdict.slo_batch, document.capacity
    if judged is None:
        return []
    on_each = "" if document.replicas == 1 else " on each replica"
    bound = _slots_words(judged, chosen.estimate, chosen.config)
    said = f"the SLO was judged at {_requests(judged)} at once{on_each}{bound}"
    if capacity is None or capacity.requests_at_once <= judged:
        return [said]
    return [
        f"{said}, not at the {capacity.requests_at_once} that may be served; --rate or --batch judges it at more"
    ]


def _requests(count: int) -> str:
    return "1 request" if count == 1 else f"{count} requests"


def _labelled(label: str, lines: Iterable[str]) -> list[Line]:
    return [("" if number else label, line) for number, line in enumerate(lines)]


def _load_words(
    document: PlanDocument, estimate: EstimateDocument, config: DeploymentConfig, figures: FiguresDocument
) -> list[str]:
    """Return what requests get and how many are served; with a rate, how many miss a limit."""
    work, replicas = document.workload, document.replicas
    if document.load_forecast is None:
        return _batch_load_words(work, estimate, config, figures, replicas)
    bound = _slots_words(work.batch, estimate, config)
    return _served_words(work, document.load_forecast, bound, _price_words(figures), replicas)


def _batch_load_words(
    work: Workload,
    estimate: EstimateDocument,
    config: DeploymentConfig,
    figures: FiguresDocument,
    replicas: int = 1,
) -> list[str]:
    each, bound = f"{work.input_words} + {work.output_tokens} tokens", _slots_words(work.batch, estimate, config)
    at_once = f"{_requests(work.batch)} at once{bound}, {each}{' each' * (work.batch > 1)}"
    on_each = "" if replicas == 1 else f", on each of {replicas} replicas"
    times = f"TTFT {seconds(figures.ttft_s.value)}, TPOT {seconds(figures.tpot_s.value)}"
    rate = _rate_words(figures.requests_per_s / replicas, replicas, ".3g")
    return [f"{at_once}{on_each}: {times}, {rate}{_price_words(figures)}"]


def _rate_words(one_per_s: float, replicas: int, form: str) -> str:
    """Describe the rate of all replicas and, of several, of one: ``12 requests/s in total (6 per replica)``."""
    in_all = f"{one_per_s * replicas:{form}} requests/s"
    return in_all if replicas == 1 else f"{in_all} in total ({one_per_s:{form}} per replica)"


def _price_words(figures: FiguresDocument) -> str:
    """Describe dollars per million output tokens; empty where the GPU has no known price."""
    if figures.usd_per_million_output_tokens is None or figures.usd_per_gpu_hour is None:
        return ""
    cost, per_hour = dollars(figures.usd_per_million_output_tokens), dollars(figures.usd_per_gpu_hour)
    return f", {cost} per million output tokens (at {per_hour} per GPU-hour)"


def _served_words(work: Workload, served: LoadForecast, bound: str, price: str, replicas: int) -> list[str]:
    gaps = "Poisson" if served.burstiness == 1 else f"gaps' deviation {served.burstiness:.3g} times their mean"
    if served.rate_levels:
        moves = [level.relative_rate for level in served.rate_levels]
        gaps += f", the rate moving between {min(moves):.2g} and {max(moves):.2g} times its mean"
    times = [("TTFT", served.ttft), ("TPOT", served.tpot), ("E2E", served.e2e)]
    quantiles = ", ".join(
        f"{name} {'without end' if time.quantile_s is None else seconds(time.quantile_s)}" for name, time in times
    )
    missed = _missed_words(served)
    what = "keeps the SLO" if missed else "is served"
    on_each = "" if replicas == 1 else " on each"
    tokens = f"{work.input_words} + {work.output_tokens} tokens, {work.batch} at once at most{on_each}{bound}"
    rate = _rate_words(served.rate_per_s, replicas, "g")
    highest = _rate_words(served.highest_rate_per_s, replicas, ".3g")
    return [
        f"{rate} ({gaps}; {tokens}): p{served.percentile:g} {quantiles}{price}",
        f"utilisation {served.utilisation:.0%}; up to {highest} {what}"
        + "".join(f"; {words}" for words in missed),
    ]


def _missed_words(served: LoadForecast) -> list[str]:
    """Describe the limits of the SLO with the probability of missing each, in one text; none without an SLO."""
    times = [("TTFT", served.ttft), ("TPOT", served.tpot), ("E2E", served.e2e)]
    missed = [
        f"{name} of {time.limit_s:g} s: {time.miss_probability:.2g}"
        for name, time in times
        if time.limit_s is not None and time.miss_probability is not None
    ]
    return [f"probability of missing {', '.join(missed)}"] if missed else []


def _sure_words(figures: FiguresDocument, remarks: Iterable[str], *, under_load: bool = False) -> str:
    what = "90% intervals of the batch by itself" if under_load else "90% intervals"
    ends = f"{what}: TTFT {interval(figures.ttft_s)}, TPOT {interval(figures.tpot_s)}"
    return "; ".join([ends, *remarks])


def _basis_words(config: DeploymentConfig, estimate: EstimateDocument, measured: bool) -> str:
    """Describe measurements behind an estimate; "measured" is said of the configuration only where it was run."""
    source, basis = estimate.tpot_s.source, estimate.measured_config
    if measured:
        if _is_checked(estimate):
            return "the whole model was measured at this load by a check"
        return _OWN.get(source, f"{source}, this configuration measured here")
    if source in _ANOTHER:
        plain = config.without_slots
        if basis is None or basis == plain:
            other = "the base without adapters" if basis and config.adapter_slots else "another configuration"
        else:
            other = differences(basis, plain)
        return f"{_ANOTHER[source]} {other}; {_NOT_MEASURED}"
    return "from datasheets (roofline); nothing was measured" if source is Source.ROOFLINE else _NOT_MEASURED


def _is_checked(estimate: EstimateDocument) -> bool:
    """Return whether a check timed the whole model at the estimate's own load."""
    return estimate.correction is not None and estimate.correction.exact


def _remarks(document: PlanDocument, chosen: CandidateDocument) -> list[str]:
    """Return what the figures rest on besides: a check, a model of waiting, a profile that was cut short."""
    found = []
    if chosen.estimate is not None and chosen.estimate.correction is not None:
        found.append("corrected by a check (below)")
    if document.profile is not None and document.profile.cut_short:
        found.append("the profile was cut short (below)")
    if document.queueing is not None:
        found.append(f"under load by {document.queueing}")
    return found


def _runner_up_words(rival: RunnerUpDocument | None, chosen: DeploymentConfig, document: PlanDocument) -> str:
    """Return what is second, by how much, and what would make it the first."""
    if rival is None:
        others = sum(candidate.feasible for candidate in document.candidates) - 1
        return (
            "none: the other feasible ones have the same figures" if others else "none: all the rest are refused"
        )
    wins = [*_batch_words(rival.wins_at_batch), *map(_lead_words, rival.wins_by[:_MOST_LEADS])]
    said = f"{differences(rival.config, chosen)}: {_behind_words(rival, document)}"
    if rival.is_ahead:
        wins.insert(0, "once it is measured, if that bears its estimate out")
    if wins:
        said += f"; wins {', '.join(wins)}"
    elif rival.is_tried:
        said += "; no batch or intent that was tried makes it win"
    if rival.equivalent:
        said += f"; {differences(rival.equivalent[0], chosen)} has the same figures as the chosen one"
    return said


def _behind_words(rival: RunnerUpDocument, document: PlanDocument) -> str:
    unit, own, chosen = document.objective_unit, rival.objective, rival.chosen_objective
    if own is None or chosen is None:
        return f"{figure(own)} {unit}"
    gap = abs(own / chosen - 1) if chosen else 0.0
    by = "the same" if gap < 5e-4 else f"{gap:.1%}" if gap < 0.1 else f"{gap:.0%}"
    side = "" if gap < 5e-4 else " ahead" if rival.is_ahead else " behind"
    guessed = document.candidates[document.chosen or 0].measured and not rival.is_measured
    alike = "" if rival.is_distinguishable else ", which the intervals do not tell apart"
    return f"{figure(own)} for {figure(chosen)} {unit}, {by}{side}{' but not measured' if guessed else ''}{alike}"


def _batch_words(found: BatchRange | None) -> list[str]:
    if found is None:
        return []
    if found.last == MOST_BATCH:
        return [f"from batch {found.first} on"]
    if found.first == 1:
        return [f"up to batch {found.last}"]
    return [f"at batch {found.first}" if found.first == found.last else f"at batch {found.first} to {found.last}"]


def _lead_words(lead: IntentLead) -> str:
    if lead.unit == "s":
        return f"by {lead.intent} ({seconds(lead.value)} for {seconds(lead.chosen_value)})"
    return f"by {lead.intent} ({figure(lead.value)} for {figure(lead.chosen_value)} {lead.unit})"


def _deployable_lines(found: DeployableDocument | None) -> list[Line]:
    if found is None:
        return []
    if found.here:
        return [(HERE, "yes: `iserve deploy` with the same options")]
    return [(HERE, f"no: {'; '.join(found.missing)}" if found.missing else "no")]


def _infeasible_lines(why: WhyNot, verdict: VerdictDocument) -> list[Line]:
    """Return what is nearest, and the ways out, the least change first."""
    nearest = [] if why.nearest is None else [("Nearest", why.nearest.text)]
    first = [] if verdict.first_relaxation is None else [verdict.first_relaxation]
    others = [advice for advice in why.advice if advice not in first]
    return [*nearest, *_labelled("Relax first", first), *_labelled("Or", others)]
