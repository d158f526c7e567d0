"""``trace show`` and ``trace write``: what a workload is like, and another one made of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import BadInputError
from iserve.cli import options as o
from iserve.cli.groups import grouped

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from iserve.cli.progress import StepDisplay
    from traces.request import Request

__all__ = ["register"]

# Some seconds of reading.
_TOLD_EVERY = 1_000_000

FormatOption = Annotated[
    str | None, typer.Option("--format", help="Of the files read; else it is recognised (docs/traces.md).")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="Refuse a file in which two requests share a time (docs/traces.md).")
]
SeedOption = Annotated[int, typer.Option("--seed", help="Of synthetic traces and of what is drawn.", min=0)]


def register(app: typer.Typer) -> None:
    trace = typer.Typer(
        cls=o.CommandGroup,
        help="Workload traces: files of many formats, and synthetic ones.",
        epilog="Example: iserve trace show synthetic:azure-code",
        no_args_is_help=True,
    )
    trace.command("show", epilog="Example: iserve trace show synthetic:azure-code")(show)
    trace.command(
        "write",
        epilog="Example: iserve trace write synthetic:azure-conv --out high.csv.gz --rate-factor 0.4 --interval 1 "
        "--models llama,falcon --popularity zipf:1.5",
    )(grouped(write))
    app.add_typer(trace, name="trace")


def show(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="A trace file, or synthetic:NAME.")],
    trace_format: FormatOption = None,
    strict: StrictOption = False,
    seed: SeedOption = 0,
    as_json: o.JsonOption = False,
) -> None:
    """Show a trace's rate, burstiness and lengths, and its rate over time. Reads it once, in constant memory."""
    from iserve.cli.progress import StepDisplay
    from iserve.cli.trace_text import print_statistics
    from traces.statistics import statistics_of
    from traces.trace_argument import requests_of

    requests = requests_of(trace, format=trace_format, strict=strict, seed=seed)
    with StepDisplay(quiet=as_json) as display:
        found = statistics_of(_told(requests, display))
    if as_json:
        o.print_json(found)
    else:
        print_statistics(trace, requests, found)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Options on what the written trace is of the ones that are read."""

    window: Annotated[
        str | None, typer.Option("--window", help="START:END in seconds; the clock starts at START.")
    ] = None
    rate_factor: Annotated[
        float | None, typer.Option("--rate-factor", help="Compress as the paper does; needs --interval.")
    ] = None
    interval: Annotated[
        float | None, typer.Option("--interval", help="Seconds of one interval of the compression.")
    ] = None
    aggregate: Annotated[
        int, typer.Option("--merge-intervals", help="Neighbouring intervals that compression makes one.")
    ] = 1
    models: Annotated[
        str | None, typer.Option("--models", help="NAME,...: assign requests to these, most popular first.")
    ] = None
    popularity: Annotated[
        str,
        typer.Option(
            "--popularity", help="Of --models: uniform, identical, distinct, zipf[:ALPHA], geometric[:RATIO]."
        ),
    ] = "uniform"
    context: Annotated[
        int | None, typer.Option("--context", help="Cut prompts, then answers, to this many tokens together.")
    ] = None

    def check(self) -> None:
        """Check the values, before a trace is opened.

        Raises:
            BadInputError: a value that cannot be.
        """
        from traces.popularity import popularity_named

        popularity_named(self.popularity)
        if self.window is not None:
            _window(self.window)
        if (self.rate_factor is None) != (self.interval is None):
            raise BadInputError("compressing needs both --rate-factor and --interval")

    def applied(self, stream: Iterator[Request], seed: int) -> Iterator[Request]:
        """Return the requests with the changes made, in the order of the fields.

        Raises:
            BadInputError: as :meth:`check`.
        """
        from traces.popularity import popularity_named
        from traces.rate_scaling import compress
        from traces.transforms import assign_models, cap_lengths, clip

        if self.window is not None:
            stream = clip(stream, *_window(self.window))
        if self.rate_factor is not None and self.interval is not None:
            stream = compress(
                stream,
                rate_factor=self.rate_factor,
                interval_s=self.interval,
                aggregate=self.aggregate,
                seed=seed,
            )
        if self.models is not None:
            names, law = [name.strip() for name in self.models.split(",")], popularity_named(self.popularity)
            stream = assign_models(stream, names, law, seed=seed)
        if self.context is not None:
            stream = cap_lengths(stream, context_tokens=self.context)
        return stream


def write(
    traces: Annotated[
        list[str], typer.Argument(metavar="TRACE", help="Trace files or synthetic:NAME; several are merged.")
    ],
    *,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write; gzip if it ends in .gz.")],
    changes: Changes,
    trace_format: FormatOption = None,
    strict: StrictOption = False,
    to: Annotated[str, typer.Option("--to", help="Format written (docs/traces.md).")] = "csv",
    seed: SeedOption = 0,
) -> None:
    """Make a trace of traces: merged, cut to a window, compressed, given models, cut in length, in that order.

    Of several synthetic traces each has a seed of its own, counted from --seed: one merged with itself makes two
    tenants, not one twice.
    """
    from traces.trace_argument import requests_of
    from traces.transforms import merge
    from traces.writing import write_trace

    with o.usage_errors():
        changes.check()
    merged = merge(
        *(
            requests_of(name, format=trace_format, strict=strict, seed=seed + index)
            for index, name in enumerate(traces)
        )
    )
    with o.usage_errors():
        stream = changes.applied(merged, seed)
    count = write_trace(out, stream, to)
    typer.echo(f"{count} requests written to {out}")


def _told(requests: Iterable[Request], display: StepDisplay) -> Iterator[Request]:
    """Yield the same, and print now and then how far it is: a whole reading of some traces takes an hour."""
    for count, request in enumerate(requests, start=1):
        if count % _TOLD_EVERY == 0:
            display.show(f"{count:,} requests read, {request.arrival_s:,.0f} s of the trace", None)
        yield request


def _window(text: str) -> tuple[float, float]:
    start, _, end = text.partition(":")
    try:
        return float(start), float(end)
    except ValueError as error:
        raise BadInputError(f"--window must be START:END in seconds, got {text!r}") from error
