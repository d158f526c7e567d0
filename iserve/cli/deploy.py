"""Commands that serve a model: ``deploy``, ``ps``, ``rm``, ``chat``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from iserve.api_types import DeployBody
from iserve.cli import export as e
from iserve.cli import options as o
from iserve.cli.groups import checked, grouped

if TYPE_CHECKING:
    from iserve.api_documents import DeploymentDocument
    from iserve.client import ControllerClient

__all__ = ["accepted_by", "check_request", "register", "show_ready", "wait_until_gone", "wait_until_ready"]


_GIVEN_UP = frozenset({"refused", "failed"})
_POLL_S = 0.15
_PROFILING_POLL_S = 0.5  # a CPU that is being measured should not be asked more often than people read


def register(app: typer.Typer) -> None:
    app.command(
        "deploy",
        epilog="Example: iserve deploy ./my-model --intent latency-slo --slo tpot=0.05; or "
        "iserve deploy ./llava-1.5-7b --images 2; or iserve deploy ./llava-1.5-7b --text-only",
    )(grouped(deploy))
    app.command("ps", epilog="Example: iserve ps --json")(ps)
    app.command("rm", epilog="Example: iserve rm iserve-demo")(rm)
    app.command("chat", epilog="Example: iserve chat iserve-demo '123+456='")(chat)


def check_request(request: DeployBody) -> None:
    """Raise typer.BadParameter for a value that cannot be used, by the option that has it."""
    from iserve.api_types import check_name, check_reject_late
    from placement.scaling import Scaling

    if request.name is not None:
        with o.usage_errors("--name"):
            check_name(request.name)
    with o.usage_errors("--scale-to-zero"):
        Scaling(idle_s=request.scale_to_zero_s)
    with o.usage_errors("--reject-late"):
        check_reject_late(request.reject_late, request.slo)


def deploy(
    model: o.OptionalModel = None,
    *,
    request: DeployBody,
    engine: o.EngineSettings,
    to: e.Export,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            metavar="KEY",
            help="Name this request: sent again with its KEY within a day it starts nothing twice.",
            show_default="a new one, for this command's own retries",
        ),
    ] = None,
    refused: o.Refused = False,
    as_json: o.JsonOption = False,
) -> None:
    """Serve MODEL on the configuration that fits the intent best, and print its OpenAI-compatible endpoint.

    Starts the embedded controller if none runs. The first deployment of a model on a machine measures it.
    With --export it writes a Compose file or Kubernetes objects instead, which start the same worker with the same
    limits elsewhere. With --gpus or --gpu-file that starts nothing; without, it plans by the profile that `iserve
    profile` took for the devices here, and as `iserve up` it starts this home with its deployments if it is down.
    """
    import secrets

    from iserve.api_types import check_idempotency_key
    from iserve.cli.connection import with_model_arguments
    from iserve.settings import load_settings

    settings, request = load_settings(), replace(request, model=model, **engine.body())
    check_request(request)
    checked(request, settings)  # here already: a bad value must not start a controller
    if idempotency_key is not None:
        with o.usage_errors("--idempotency-key"):
            check_idempotency_key(idempotency_key)
    lacks_it = "which what is exported does not have"
    to.check(
        ("--json", as_json, "--export writes a file"),
        ("--scale-to-zero", request.scale_to_zero_s is not None, f"it needs a running controller, {lacks_it}"),
        ("--reject-late", request.reject_late, f"it needs a gateway, {lacks_it}"),
        ("--engine-version", engine.engine_version is not None, "a container runs the release of its image"),
    )
    if to.export is not None:
        e.export(to, to.export, request.launch)
        return
    o.warn_of_code(model, trusted=request.trust_remote_code)
    request = with_model_arguments(request, model, settings)
    key = secrets.token_hex(16) if idempotency_key is None else idempotency_key
    controller, accepted = accepted_by(request.given(), key, quiet=as_json)
    ready = wait_until_ready(controller, accepted, quiet=as_json)
    show_ready(controller, ready, as_json=as_json, refused=refused)


def accepted_by(body: dict[str, Any], key: str, *, quiet: bool) -> tuple[ControllerClient, DeploymentDocument]:
    """Post the request, or find the deployment that the same request made; one that failed is tried again."""
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import client
    from iserve.client import post_once

    def post() -> tuple[ControllerClient, DeploymentDocument]:
        return post_once(client, "/api/v1/deployments", body, DeploymentDocument, key, attach="true")

    controller, found = post()
    if found.status in _GIVEN_UP:
        before = f"{found.name} {found.status} before: {found.error}"
        typer.echo(f"iserve: {before}; it is removed and deployed again", err=True)
        _remove(controller, found.name, created_at=found.created_at)
        controller, found = post()
    elif found.status != "accepted" and not quiet:
        typer.echo(f"{found.name} exists already by the same request ({found.status})", err=True)
    return controller, found


def wait_until_ready(
    controller: ControllerClient, accepted: DeploymentDocument, *, quiet: bool
) -> DeploymentDocument:
    """Show the steps until the deployment serves, and return it then.

    Raises:
        InfeasibleError, EngineError: it was refused, or failed; nothing of it is left.
        NotFoundError: it was removed meanwhile.
    """
    try:
        return _followed(controller, accepted, quiet=quiet)
    except KeyboardInterrupt:
        now = f"`iserve show {accepted.name}` tells how far, `iserve rm {accepted.name}` ends it"
        typer.echo(
            f"iserve: {accepted.name} goes on being deployed; the same command follows it again, {now}", err=True
        )
        raise


def _followed(controller: ControllerClient, accepted: DeploymentDocument, *, quiet: bool) -> DeploymentDocument:
    from fingerprint.errors import EngineError, InfeasibleError, NotFoundError
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.progress import StepDisplay

    path = f"/api/v1/deployments/{accepted.name}"
    with StepDisplay(quiet=quiet) as display:
        document = accepted
        while document.status not in {"ready", "scaled-to-zero"} | _GIVEN_UP:
            display.show(document.status, document.progress)
            time.sleep(_PROFILING_POLL_S if document.status == "profiling" else _POLL_S)
            with contextlib.suppress(NotFoundError):
                document = controller.get(path, DeploymentDocument)
                if document.created_at == accepted.created_at:
                    continue
            # Accepted long ago, under the same key; what has its name now is of another.
            raise NotFoundError(f"{accepted.name} was accepted, and has been removed since")
    if document.status in _GIVEN_UP:
        # A deploy that was refused leaves nothing behind, its name included; another may have the name since.
        _remove(controller, accepted.name, created_at=accepted.created_at)
        kind = InfeasibleError if document.status == "refused" else EngineError
        raise kind(document.error or f"the deployment {document.name} {document.status}")
    return document


def show_ready(
    controller: ControllerClient, document: DeploymentDocument, *, as_json: bool, refused: bool
) -> None:
    """Print a deployment that serves: its plan, its endpoint and how it is asked."""
    from iserve.cli.chat import needs_key
    from iserve.cli.render import console, print_plan
    from iserve.planning.document import PlanDocument

    if as_json:
        o.print_json(document)
        return
    plan = controller.get(f"/api/v1/deployments/{document.name}/plan", PlanDocument)
    print_plan(plan, refused=refused, deployed=True)
    console().print(
        f"{document.name} is ready at {document.base_url} (OpenAI API, model {document.name})", style="bold"
    )
    if document.base_url is not None and needs_key(document.base_url, os.environ.get("OPENAI_API_KEY")):
        typer.echo("clients need an API key: export OPENAI_API_KEY=$(iserve keys create)")
    typer.echo(f"try it: iserve chat {document.name} 'What is a fingerprint?'")


def ps(as_json: o.JsonOption = False) -> None:
    """List the deployments and how they are now."""
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import client
    from iserve.cli.render import model_words, print_rows, short

    documents = client(start=False).get("/api/v1/deployments", tuple[DeploymentDocument, ...])
    if as_json:
        o.print_json(documents)
        return
    print_rows(
        ("name", "model", "intent", "status", "ready", "configuration", "devices", "restarts", "error"),
        [
            (
                d.name,
                model_words(d),
                f"{d.intent}, rejects late" if d.rejects_late else d.intent,
                f"{d.status}, updating" if d.updating else d.status,
                f"{d.num_ready}/{d.num_replicas}",
                "" if d.config is None else short(d.config),
                " | ".join(" ".join(replica.device_ids) for replica in d.replicas),
                str(d.restarts),
                d.error or "",
            )
            for d in documents
        ],
    )


def rm(name: o.NameArgument) -> None:
    """End a deployment and give its memory back."""
    from iserve.cli.connection import client

    _remove(client(start=False), name)
    typer.echo(f"{name} is removed")


def _remove(
    controller: ControllerClient, name: str, *, created_at: float | None = None, patience_s: float = 120.0
) -> None:
    """Return when the deployment and its worker are gone; leave one alone that was not made at ``created_at``."""
    from fingerprint.errors import NotFoundError

    path = f"/api/v1/deployments/{name}"
    try:
        controller.delete(path, **({} if created_at is None else {"created_at": repr(created_at)}))
    except NotFoundError:
        if created_at is None:
            raise
        return  # another client was first
    wait_until_gone(controller, name, created_at=created_at, patience_s=patience_s)


def wait_until_gone(
    controller: ControllerClient, name: str, *, created_at: float | None = None, patience_s: float = 120.0
) -> None:
    """Return when a deployment that is being removed is gone.

    Raises:
        UnavailableError: it is there still.
    """
    from fingerprint.errors import NotFoundError, UnavailableError
    from iserve.api_documents import DeploymentDocument

    path = f"/api/v1/deployments/{name}"
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            now = controller.get(path, DeploymentDocument)
        except NotFoundError:
            return
        if created_at is not None and now.created_at != created_at:
            return
        time.sleep(_POLL_S)
    raise UnavailableError(f"{name} is still being removed after {patience_s:.0f} s; `iserve ps` tells")


def chat(
    name: o.NameArgument,
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
    from iserve.cli.connection import gateway_url

    line = ChatLine(gateway_url(), name, key=key, max_tokens=max_tokens, temperature=temperature)
    if message is not None:
        line.say(message, sys.stdout)
        return
    if sys.stdin.isatty():
        typer.echo("one line per message; end with Ctrl-D", err=True)
    for text in sys.stdin:
        if text.strip():
            line.say(text.rstrip("\n"), sys.stdout)
