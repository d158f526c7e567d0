"""``deploy`` and what one does with deployments: ``ps``, ``logs``, ``rm``, ``chat``."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import exporting as e
from iserve.cli import options as o

if TYPE_CHECKING:
    from iserve.api_types import DeploymentDocument
    from iserve.client import ControllerClient

__all__ = ["register"]


def _may_be_named(name: str) -> str:
    """Raises NotFoundError: no deployment can have it; in a path it would ask for something else (``a/log``)."""
    from fingerprint.errors import ConfigError, NotFoundError
    from iserve.api_types import check_name

    try:
        return check_name(name)
    except ConfigError as error:
        raise NotFoundError(f"no deployment is named {name[:80]!r}") from error


NameArgument = Annotated[
    str, typer.Argument(metavar="NAME", help="The deployment's name.", callback=_may_be_named)
]
_POLL_S = 0.15
_PROFILING_POLL_S = 0.5  # a CPU that is being measured should not be asked more often than people read


def register(app: typer.Typer) -> None:
    app.command("deploy", epilog="Example: iserve deploy ./my-model --intent latency-slo --slo tpot=0.05")(
        o.grouped(deploy)
    )
    app.command("ps", epilog="Example: iserve ps --json")(ps)
    app.command("logs", epilog="Example: iserve logs iserve-demo --lines 50")(logs)
    app.command("rm", epilog="Example: iserve rm iserve-demo")(rm)
    app.command("chat", epilog="Example: iserve chat iserve-demo '123+456='")(chat)


def deploy(
    model: o.OptionalModel = None,
    *,
    wish: o.Wish,
    name: Annotated[str | None, typer.Option("--name", help="What clients put in `model`.")] = None,
    replicas: o.Replicas = 1,
    scale_to_zero: Annotated[
        float | None,
        typer.Option(
            "--scale-to-zero",
            metavar="SECONDS",
            help="End the workers after so long without a request; the next one starts them again.",
        ),
    ] = None,
    refuse_late: Annotated[
        bool,
        typer.Option(
            "--refuse-late",
            help="Answer 503 at once to a request that would miss --slo, in place of a late answer.",
        ),
    ] = False,
    export: e.ExportOption = None,
    output: e.ExportOutput = None,
    gpus: e.ExportGpus = None,
    image: e.ExportImage = None,
    volume: e.ExportVolume = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Name this request: sent again with its KEY within a day it starts nothing twice.",
            show_default="a new one, for this command's own retries",
        ),
    ] = None,
    as_json: o.JsonOption = False,
) -> None:
    """Serve MODEL on the configuration that fits the intent best, and print its OpenAI-compatible endpoint.

    Starts the embedded controller if none runs. The first deployment of a model on a machine measures it.
    With --export it writes a Compose file or Kubernetes objects instead, which start the same worker with the same
    limits elsewhere; it then uses the profile that `iserve profile` took, or --gpus.
    """
    import secrets

    from iserve.api_types import DeploymentDocument, check_idempotency_key, check_name, check_refuse_late
    from iserve.cli.live import client, model_argument
    from iserve.client import post_once
    from iserve.settings import load_settings
    from placement.scaling import Scaling

    settings = load_settings()
    o.replicated(wish.checked(settings), replicas)  # here already: a bad value must not start a controller
    if name is not None:
        with o.usage_errors("--name"):
            check_name(name)
    with o.usage_errors("--scale-to-zero"):
        Scaling(idle_s=scale_to_zero)
    with o.usage_errors("--refuse-late"):
        check_refuse_late(refuse_late, wish.limits)
    if idempotency_key is not None:
        with o.usage_errors("--idempotency-key"):
            check_idempotency_key(idempotency_key)
    if export is not None:
        if as_json:
            raise typer.BadParameter("--export writes a file; leave --json out")
        if scale_to_zero is not None:
            raise typer.BadParameter("nobody watches what is exported; leave --scale-to-zero out")
        if refuse_late:
            raise typer.BadParameter("there is no gateway before what is exported; leave --refuse-late out")
        where = e.Export(kind=export, output=output, gpus=gpus, image=image, volume=volume)
        e.export(where, model, name, wish, replicas)
        return
    given = {"--output": output, "--gpus": gpus, "--image": image, "--volume": volume}
    if alone := [option for option, value in given.items() if value is not None]:
        raise typer.BadParameter(f"{', '.join(alone)} goes with --export")
    model = None if model is None else model_argument(model, settings)
    controller, accepted = post_once(
        lambda: client(settings),
        "/api/v1/deployments",
        wish.body()
        | {"model": model, "name": name, "scale_to_zero_s": scale_to_zero, "replicas": replicas}
        | {"refuse_late": refuse_late},
        DeploymentDocument,
        secrets.token_hex(16) if idempotency_key is None else idempotency_key,
    )
    try:
        _follow(controller, accepted, as_json=as_json)
    except KeyboardInterrupt:
        what_now = f"`iserve ps` tells how far, `iserve rm {accepted.name}` ends it"
        typer.echo(f"iserve: {accepted.name} goes on being deployed; {what_now}", err=True)
        raise


def _follow(controller: ControllerClient, accepted: DeploymentDocument, *, as_json: bool) -> None:
    """Show the steps until the deployment serves or is refused."""
    from fingerprint.codec import to_json
    from fingerprint.errors import EngineError, InfeasibleError, NotFoundError
    from iserve.api_types import DeploymentDocument
    from iserve.cli.progress import StepDisplay
    from iserve.cli.render import console, print_plan
    from iserve.planning.document import PlanDocument

    path = f"/api/v1/deployments/{accepted.name}"
    with StepDisplay(quiet=as_json) as display:
        document = accepted
        while document.status not in {"ready", "asleep", "refused", "failed"}:
            display.show(document.status, document.progress)
            time.sleep(_PROFILING_POLL_S if document.status == "profiling" else _POLL_S)
            with contextlib.suppress(NotFoundError):
                document = controller.get(path, DeploymentDocument)
                if document.created_at == accepted.created_at:
                    continue
            # Accepted long ago, under the same key; what has its name now is of another.
            raise NotFoundError(f"{accepted.name} was accepted, and has been removed since")
    if document.status in {"refused", "failed"}:
        _remove(controller, accepted.name)  # a deploy that was refused leaves nothing behind, its name included
        kind = InfeasibleError if document.status == "refused" else EngineError
        raise kind(document.error or f"the deployment {document.name} {document.status}")
    if as_json:
        typer.echo(to_json(document, indent=2).decode())
        return
    print_plan(controller.get(f"{path}/plan", PlanDocument))
    console().print(
        f"{document.name} is ready at {document.base_url} (OpenAI API, model {document.name})", style="bold"
    )
    typer.echo(f"try it: iserve chat {document.name} 'What is a fingerprint?'")


def ps(as_json: o.JsonOption = False) -> None:
    """List the deployments and how they are now."""
    from fingerprint.codec import to_json
    from iserve.api_types import DeploymentDocument
    from iserve.cli.live import client
    from iserve.cli.render import print_rows, short

    documents = client(start=False).get("/api/v1/deployments", tuple[DeploymentDocument, ...])
    if as_json:
        typer.echo(to_json(documents, indent=2).decode())
        return
    print_rows(
        ("name", "model", "intent", "status", "ready", "configuration", "devices", "restarts", "error"),
        [
            (
                d.name,
                d.model,
                f"{d.intent}, refuses late" if d.refuses_late else d.intent,
                d.status,
                f"{d.num_ready}/{d.num_replicas}",
                "" if d.config is None else short(d.config),
                " | ".join(" ".join(replica.device_ids) for replica in d.replicas),
                str(d.restarts),
                d.error or "",
            )
            for d in documents
        ],
    )


def logs(
    name: NameArgument,
    lines: Annotated[int, typer.Option("--lines", min=1, max=10_000, help="How many.")] = 100,
    replica: Annotated[int, typer.Option("--replica", min=1, help="Of several replicas, which.")] = 1,
) -> None:
    """Print the end of a deployment's worker log."""
    from iserve.cli.live import client

    path = f"/api/v1/deployments/{name}/log"
    typer.echo(client(start=False).text(path, lines=lines, replica=replica), nl=False)


def rm(name: NameArgument) -> None:
    """End a deployment and give its memory back."""
    from iserve.cli.live import client

    _remove(client(start=False), name)
    typer.echo(f"{name} is removed")


def _remove(controller: ControllerClient, name: str, *, patience_s: float = 120.0) -> None:
    """Returns when the deployment and its worker are gone."""
    from fingerprint.errors import NotFoundError, UnavailableError
    from iserve.api_types import DeploymentDocument

    path = f"/api/v1/deployments/{name}"
    controller.delete(path)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            controller.get(path, DeploymentDocument)
        except NotFoundError:
            return
        time.sleep(_POLL_S)
    raise UnavailableError(f"{name} is still being removed after {patience_s:.0f} s; `iserve ps` tells")


def chat(
    name: NameArgument,
    message: Annotated[
        str | None, typer.Argument(help="One message; else lines are read from standard input.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", help="Longest answer.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, max=2.0)] = 0.0,
    key: Annotated[
        str | None, typer.Option("--key", envvar="OPENAI_API_KEY", help="An API key, if needed.")
    ] = None,
) -> None:
    """Talk to a deployment through its OpenAI endpoint, streaming."""
    from iserve.cli.chat import ChatLine
    from iserve.cli.live import gateway_url

    line = ChatLine(gateway_url(), name, key=key, max_tokens=max_tokens, temperature=temperature)
    if message is not None:
        line.say(message, sys.stdout)
        return
    if sys.stdin.isatty():
        typer.echo("one line per message; end with Ctrl-D", err=True)
    for text in sys.stdin:
        if text.strip():
            line.say(text.rstrip("\n"), sys.stdout)
