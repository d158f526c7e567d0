"""Command ``replay``: sends a trace's requests to running deployments at the trace's times, and prints the
outcome.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o
from iserve.cli.groups import grouped

if TYPE_CHECKING:
    from iserve.replay.document import ReplayDocument
    from iserve.replay.endpoint import Endpoint
    from iserve.replay.runner import Replay, ReplayOptions
    from iserve.replay.schedule import Schedule, ScheduleOptions
    from planner.intent import Slo
    from traces.outcomes import Outcomes

__all__ = ["register"]


class Prompt(StrEnum):
    """Form in which prompts are sent."""

    IDS = "ids"
    TEXT = "text"
    CHAT = "chat"


@dataclass(frozen=True, kw_only=True)
class Load:
    """Options on which of the trace's requests are sent, when, and to which deployment."""

    rate_factor: Annotated[
        float, typer.Option("--rate-factor", help="Times the trace's request rate: its times are divided by it.")
    ] = 1.0
    duration: Annotated[
        float | None, typer.Option("--duration", help="Seconds of sending; what is scheduled later is left out.")
    ] = None
    limit: Annotated[int | None, typer.Option("--limit", help="Only the first so many requests.")] = None
    ignore_models: Annotated[
        bool, typer.Option("--ignore-models", help="Spread all requests, whatever models the trace names.")
    ] = False
    trace_format: Annotated[str | None, typer.Option("--format", help="Of the trace; else it is recognised.")] = (
        None
    )
    seed: Annotated[
        int, typer.Option("--seed", help="Seed of the prompts, and of the deployment that each request goes to.")
    ] = 0

    def options(self) -> ScheduleOptions:
        """Return the core's options. Raises BadInputError: a value that cannot be."""
        from iserve.replay.schedule import ScheduleOptions

        return ScheduleOptions(
            rate_factor=self.rate_factor,
            duration_s=self.duration,
            limit=self.limit,
            seed=self.seed,
            ignore_models=self.ignore_models,
        )

    def schedule(self, trace: str, names: tuple[str, ...]) -> Schedule:
        from iserve.replay.schedule import make_schedule
        from traces.trace_argument import requests_of

        requests = requests_of(trace, format=self.trace_format, seed=self.seed)
        return make_schedule(requests, names, self.options())


@dataclass(frozen=True, kw_only=True)
class Sending:
    """Options on how a request is made and sent."""

    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds a request may take, from its send to its last token.")
    ] = 600.0
    max_inflight: Annotated[
        int,
        typer.Option(
            "--max-inflight", help="Requests in flight at once; beyond, they are counted as refused, not sent."
        ),
    ] = 2000
    prompts: Annotated[
        Prompt, typer.Option("--prompts", help="ids: token ids of the exact length; text: words; chat: a message.")
    ] = Prompt.IDS
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Token ids are drawn below this.")] = 256
    allow_eos: Annotated[
        bool, typer.Option("--allow-eos", help="Let answers end early; for engines that do not know ignore_eos.")
    ] = False
    key: Annotated[str | None, typer.Option("--key", envvar="OPENAI_API_KEY", help="An API key, if needed.")] = (
        None
    )

    def options(self, seed: int) -> ReplayOptions:
        """Return the core's options. Raises BadInputError: a value that cannot be."""
        from iserve.replay.prompts import PromptOptions
        from iserve.replay.runner import ReplayOptions

        prompts = PromptOptions(
            kind="ids" if self.prompts is Prompt.IDS else "text",
            chat=self.prompts is Prompt.CHAT,
            vocabulary=self.vocabulary,
            ignore_eos=not self.allow_eos,
            seed=seed,
        )
        return ReplayOptions(
            timeout_s=self.timeout, max_in_flight=self.max_inflight, key=self.key, prompts=prompts
        )


@dataclass(frozen=True, kw_only=True)
class Output:
    """Options on what is shown of the run, and where."""

    slo: Annotated[
        str | None, typer.Option("--slo", help="Latency limits in seconds, such as ttft=0.5,tpot=0.05,e2e=10.")
    ] = None
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML page to this file, too.")] = None
    as_json: o.JsonOption = False

    def checked(self) -> Slo | None:
        """Return the latency limits.

        Raises:
            BadInputError: limits that cannot be read, or a page that cannot be written.
        """
        from fingerprint.output_file import output_file
        from planner.intent import parse_slo

        limits = None if self.slo is None else parse_slo(self.slo)
        if self.report is not None:
            output_file(self.report)
        return limits

    def show(self, document: ReplayDocument) -> None:
        from iserve.cli.replay_text import print_replay
        from iserve.cli.report import show_document
        from iserve.report.replay import render_replay

        show_document(document, self.report, render_replay, print_replay, as_json=self.as_json)


def register(app: typer.Typer) -> None:
    app.command(
        "replay",
        epilog="Example: iserve replay azure_conv.csv --deployment iserve-demo --duration 60 --report r.html",
    )(grouped(replay))


def replay(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or synthetic:NAME.")],
    *,
    deployment: Annotated[
        str,
        typer.Option(
            "--deployment",
            metavar="NAME[,NAME...]",
            help="What is asked for. Requests whose row names no model are spread over all by the seed.",
            callback=o.not_empty,
        ),
    ],
    url: Annotated[
        str | None, typer.Option("--url", help="An OpenAI-compatible endpoint instead of this home's gateway.")
    ] = None,
    load: Load,
    sending: Sending,
    output: Output,
) -> None:
    """Send TRACE's requests to running deployments at the trace's times; show latencies, throughput, failures.

    The load is open-loop: a slow server slows no send down. Prompts are synthetic, of the trace's lengths; answers
    are made as long as the trace's. Latencies count from the scheduled send. Ctrl-C ends the run and shows what
    there is.
    """
    from iserve.replay.document import ReplayRun, make_document
    from iserve.replay.runner import Replay

    names = tuple(name.strip() for name in deployment.split(","))
    with o.usage_errors():
        limits = output.checked()
        when = load.options()
        how = sending.options(load.seed)
    schedule = load.schedule(trace, names)
    endpoint = _endpoint(url, names, sending.key)
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    run = Replay(schedule, endpoint, how)
    outcomes, by_signal = _run(run, quiet=output.as_json)
    facts = ReplayRun(
        trace=trace,
        url=endpoint.url,
        started_at=started_at,
        planned_requests=len(schedule),
        elapsed_s=run.elapsed_s,
        interrupted=run.interrupted,
        rate_factor=when.rate_factor,
        seed=when.seed,
        timeout_s=how.timeout_s,
        max_in_flight=how.max_in_flight,
        prompts="chat" if how.prompts.chat else how.prompts.kind,
        ignore_eos=how.prompts.ignore_eos,
        deployed=_deployed(names) if url is None else (),
    )
    document = make_document(facts, outcomes, limits, run.examples)
    output.show(document)
    if by_signal:
        raise typer.Exit(128 + by_signal)
    if not document.summary.completed:
        raise typer.Exit(1)


def _endpoint(url: str | None, names: tuple[str, ...], key: str | None) -> Endpoint:
    """Return the endpoint, once it was seen to serve ``names``."""
    from iserve.cli.connection import gateway_url
    from iserve.replay.endpoint import check_models, resolve_endpoint

    if url is None:
        endpoint = resolve_endpoint(gateway_url())
    else:
        with o.usage_errors("--url"):
            endpoint = resolve_endpoint(url)
    check_models(endpoint, names, key)
    return endpoint


def _deployed(names: tuple[str, ...]) -> tuple[str, ...]:
    """Print what each deployment of this home was planned by and for; nothing where that is unknown."""
    from fingerprint.errors import IserveError
    from iserve.cli.connection import client
    from iserve.cli.render import short, workload_words
    from iserve.planning.document import PlanDocument

    told = []
    for name in names:
        try:
            plan = client(start=False).get(f"/api/v1/deployments/{name}/plan", PlanDocument)
        except IserveError:
            continue
        rate = (
            "no rate given"
            if plan.load_forecast is None
            else f"{plan.load_forecast.rate_per_s * plan.replicas:g} requests/s"
        )
        chosen = None if plan.chosen is None else plan.candidates[plan.chosen].config
        config = "" if chosen is None else f"; {short(chosen)} on {chosen.engine}"
        told.append(f"{name}: intent {plan.intent}, {rate}, planned for {workload_words(plan.workload)}{config}")
    return tuple(told)


def _run(run: Replay, *, quiet: bool) -> tuple[Outcomes, int]:
    """Run, and return the outcomes and the signal that ended the run, or 0."""
    import asyncio
    import signal

    from iserve.cli.replay_text import ProgressLine

    ended_by = 0

    def end(number: int) -> None:
        nonlocal ended_by
        ended_by = number
        run.stop()

    async def all_of_it() -> Outcomes:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, end, number)
        with ProgressLine(sys.stderr, quiet=quiet) as line:
            return await run.run(line.show)

    return asyncio.run(all_of_it()), ended_by
