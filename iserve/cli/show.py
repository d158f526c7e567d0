"""Commands that look at one deployment: ``show``, ``logs``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o

if TYPE_CHECKING:
    from iserve.api_documents import DeploymentDocument, EventDocument
    from iserve.client import ControllerClient
    from iserve.planning.document import PlanDocument

__all__ = ["register"]

_EVENTS_ASKED = 1000  # in one request
_EVENTS_SHOWN = 20
_LOG_POLL_S = 0.3
_AWAY_S = 60.0  # deadline for a controller or daemon that is away to answer again


def register(app: typer.Typer) -> None:
    app.command("show", epilog="Example: iserve show iserve-demo")(show)
    app.command("logs", epilog="Example: iserve logs iserve-demo --follow")(logs)


def show(name: o.NameArgument, as_json: o.JsonOption = False) -> None:
    """Show one deployment: its phase and progress, workers, plan, and latest events."""
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import client

    controller = client(start=False)
    document = controller.get(f"/api/v1/deployments/{name}", DeploymentDocument)
    plan, events = _plan(controller, name), _events(controller, name)
    if as_json:
        shown = {"deployment": document, "plan": plan, "events": events}
        o.print_json(shown)
        return
    _print(document, plan, events)


def _plan(controller: ControllerClient, name: str) -> PlanDocument | None:
    """Return the plan; None before there is one."""
    from fingerprint.errors import NotFoundError
    from iserve.planning.document import PlanDocument

    try:
        return controller.get(f"/api/v1/deployments/{name}/plan", PlanDocument)
    except NotFoundError:
        return None


def _events(controller: ControllerClient, name: str) -> tuple[EventDocument, ...]:
    """Return all that are kept of the deployment, the oldest first."""
    from iserve.api_documents import EventDocument

    found: tuple[EventDocument, ...] = ()
    while True:
        after = found[-1].id if found else 0
        page = controller.get(
            "/api/v1/events", tuple[EventDocument, ...], deployment=name, after=after, limit=_EVENTS_ASKED
        )
        found += page
        if len(page) < _EVENTS_ASKED:
            return found


def _print(document: DeploymentDocument, plan: PlanDocument | None, events: tuple[EventDocument, ...]) -> None:
    from iserve.cli.render import console, model_words, print_plan, print_rows, short

    progress = document.progress
    facts = [
        ("model", model_words(document)),
        ("intent", f"{document.intent}, rejects late requests" if document.rejects_late else document.intent),
        ("status", f"{document.status}, {document.num_ready} of {document.num_replicas} workers ready"),
        ("progress", "" if progress is None else f"{progress.done} of {progress.total}, {progress.step}"),
        ("error", document.error or ""),
        ("endpoint", document.base_url or ""),
        (
            "configuration",
            "" if document.config is None else f"{short(document.config)} on {document.config.engine}",
        ),
        ("created", _time(document.created_at)),
    ]
    out = console()
    out.print(document.name, style="bold")
    print_rows(("", ""), [(name, value) for name, value in facts if value])
    if document.replicas:
        out.print()
        print_rows(
            ("worker", "status", "devices", "restarts", "error"),
            [
                (r.worker_id, r.status, " ".join(r.device_ids), str(r.restarts), r.error or "")
                for r in document.replicas
            ],
        )
    if plan is not None:
        out.print()
        print_plan(plan, deployed=bool(document.replicas))
    if events:
        out.print()
        if len(events) > _EVENTS_SHOWN:
            out.print(f"the last {_EVENTS_SHOWN} of {len(events)} events (--json lists all)")
        print_rows(("at", "event", ""), [(_time(e.at), e.kind, e.message) for e in events[-_EVENTS_SHOWN:]])


def _time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s))


def logs(
    name: o.NameArgument,
    lines: Annotated[int, typer.Option("--lines", min=1, max=10_000, help="How many.")] = 100,
    replica: Annotated[int, typer.Option("--replica", min=1, help="Of several replicas, which.")] = 1,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Go on with what it prints, over restarts, until the deployment is removed or Ctrl-C.",
        ),
    ] = False,
) -> None:
    """Print the end of a deployment's worker log."""
    from iserve.cli.connection import client

    if follow:
        try:
            _follow(name, lines, replica)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        return
    path = f"/api/v1/deployments/{name}/log"
    typer.echo(client(start=False).text(path, lines=lines, replica=replica), nl=False)


def _follow(name: str, lines: int, replica: int) -> None:
    """Print the log as it grows; return when the deployment is removed.

    Raises:
        NotFoundError: there was no such deployment or replica at the begin.
        UnavailableError: the controller or the daemon is away, since the begin or for long.
    """
    from fingerprint.errors import NotFoundError, UnavailableError
    from iserve.api_documents import LogDocument
    from iserve.cli.connection import client

    path, part, answered_s = f"/api/v1/deployments/{name}/log/part", None, time.monotonic()
    while True:
        position = None if part is None else part.position
        try:
            found = client(start=False).get(path, LogDocument, lines=lines, replica=replica, position=position)
        except NotFoundError as error:
            if part is None:
                raise
            typer.echo(f"the log ends: {error}", err=True)
            return
        except UnavailableError:
            if part is None or time.monotonic() - answered_s > _AWAY_S:
                raise
            time.sleep(_LOG_POLL_S)
            continue
        if part is not None and found.created_at != part.created_at:
            typer.echo(f"the log ends: {name} was removed, another deployment has its name", err=True)
            return
        part, answered_s = found, time.monotonic()
        typer.echo(part.text, nl=False)
        sys.stdout.flush()
        if not part.text:
            time.sleep(_LOG_POLL_S)
