"""Result of one replay as one value: printed as JSON, drawn in the terminal, made into a page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from planner.intent import Slo
from traces.outcomes import Failure, Outcomes
from traces.summary import Summary, outcome_words, summarize
from traces.timeline import Bin, CurvePoint, curve, timeline

__all__ = [
    "Curves",
    "DeploymentSummary",
    "FailureExample",
    "ReplayDocument",
    "ReplayRun",
    "answered_words",
    "make_document",
]

_EXAMPLE_SHOWN = 100  # characters of what was said at a failure, in the first line
_LATE_S = 0.01  # at p99, from which the sender's lateness is worth a note


@dataclass(frozen=True, kw_only=True, slots=True)
class DeploymentSummary:
    name: str
    summary: Summary


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureExample:
    """Message of the first failure of a kind."""

    kind: str
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Curves:
    """Quantiles of completed requests; ``ttft`` and ``e2e`` from the scheduled send."""

    ttft: tuple[CurvePoint, ...]
    ttft_from_send: tuple[CurvePoint, ...]
    tpot: tuple[CurvePoint, ...]
    itl: tuple[CurvePoint, ...]
    e2e: tuple[CurvePoint, ...]
    lateness: tuple[CurvePoint, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRun:
    """Parameters and start of one replay."""

    trace: str
    url: str
    started_at: str  # UTC, ISO 8601
    planned_requests: int
    elapsed_s: float
    interrupted: bool
    rate_factor: float
    seed: int
    timeout_s: float
    max_in_flight: int
    prompts: str  # "ids", "text" or "chat"
    ignore_eos: bool
    deployed: tuple[
        str, ...
    ] = ()  # of each deployment, where it is known: its intent, rate, plan and configuration


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDocument:
    run: ReplayRun
    summary: Summary
    deployments: tuple[DeploymentSummary, ...]
    examples: tuple[FailureExample, ...]
    notes: tuple[str, ...]
    timeline: tuple[Bin, ...]
    curves: Curves


def make_document(
    run: ReplayRun, outcomes: Outcomes, slo: Slo | None, examples: Mapping[Failure, str]
) -> ReplayDocument:
    """Return everything that is shown of a run."""
    summary = summarize(outcomes, slo)
    done = outcomes.select(outcomes.completed)
    return ReplayDocument(
        run=run,
        summary=summary,
        deployments=tuple(
            DeploymentSummary(name=name, summary=summarize(part, slo, duration_s=summary.duration_s))
            for name, part in outcomes.by_deployment()
        ),
        examples=tuple(FailureExample(kind=kind.words, words=words) for kind, words in examples.items()),
        notes=tuple(_notes(run, summary, outcomes, examples)),
        timeline=timeline(outcomes),
        curves=Curves(
            ttft=curve(done.ttft_s),
            ttft_from_send=curve(done.ttft_from_send_s),
            tpot=curve(done.tpot_s),
            itl=curve(done.gaps_s),
            e2e=curve(done.e2e_s),
            lateness=curve(outcomes.lateness_s),
        ),
    )


def answered_words(document: ReplayDocument) -> str:
    """Return one line: how many requests failed and why, and how many were answered."""
    examples = {each.kind: each.words for each in document.examples if each.words}
    return outcome_words(document.summary, {kind: f"{kind} ({_cut(words)})" for kind, words in examples.items()})


def _cut(words: str) -> str:
    return words if len(words) <= _EXAMPLE_SHOWN else f"{words[: _EXAMPLE_SHOWN - 3]}..."


def _notes(run: ReplayRun, summary: Summary, outcomes: Outcomes, examples: Mapping[Failure, str]) -> list[str]:
    lengths, notes = summary.lengths, []
    if run.interrupted:
        notes.append(f"ended early: {summary.requests} of {run.planned_requests} requests were begun")
    if summary.lateness is not None and summary.lateness.p99_s >= _LATE_S:
        notes.append(
            f"the sender itself was late, {summary.lateness.p99_s * 1e3:.0f} ms at p99: this machine is too busy "
            "for the load; latencies from the schedule include it, those from the send do not"
        )
    refused = int((outcomes.failure == Failure.REFUSED_BY_CLIENT).sum())
    if refused:
        notes.append(
            f"{refused} requests were not sent: {run.max_in_flight} were in flight already (--max-inflight)"
        )
    if "context" in examples.get(Failure.BAD_REQUEST, "").lower():  # OpenAI's words for a request's length
        notes.append(
            "requests were refused for their length: cut the trace with `iserve trace write TRACE --out FILE "
            "--context TOKENS`, or serve longer ones with `iserve update NAME --context TOKENS`"
        )
    if lengths.requests_of_other_output:
        notes.append(
            f"{lengths.requests_of_other_output} of {summary.completed} answers have not the trace's length: "
            f"{lengths.output_tokens} tokens served, {lengths.asked_output_tokens} asked"
            + ("" if run.ignore_eos else " (answers were free to end)")
        )
    if summary.completed and lengths.input_tokens is None:
        notes.append("the server does not count prompt tokens: whether they are the trace's is not known")
    elif lengths.requests_of_other_input:
        notes.append(
            f"{lengths.requests_of_other_input} of {summary.completed} prompts have not the trace's length: "
            f"{lengths.input_tokens} tokens by the server's count, {lengths.asked_input_tokens} asked"
        )
    return notes
