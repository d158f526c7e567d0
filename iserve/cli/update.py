"""``update``: change a deployment while it serves."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fingerprint.config import SlotFormat
from iserve.cli import options as o
from iserve.cli.groups import grouped
from planner.intent import IntentKind, parse_slo

if TYPE_CHECKING:
    from iserve.api_documents import DeploymentDocument
    from iserve.client import ControllerClient
    from iserve.planning.document import CapacityDocument

__all__ = ["register"]

_POLL_S = 0.3
_SILENT_S = 60.0  # without an answer, after which the controller is not waited for any longer
_STEPS = frozenset({"draining", "replacing", "restoring"})  # shown as they are


def register(app: typer.Typer) -> None:
    app.command("update", epilog="Example: iserve update my-model --intent min-latency --replicas 2")(
        grouped(update)
    )


@dataclass(frozen=True, kw_only=True)
class Changes:
    """Options on what an update changes: a field is an option. As typed."""

    intent: Annotated[IntentKind | None, typer.Option("--intent", help="What to optimise.")] = None
    slo: Annotated[
        str | None,
        typer.Option("--slo", help="Latency limits in seconds, such as ttft=0.5,e2e=10; none: no limit any more."),
    ] = None
    replicas: Annotated[int | None, typer.Option("--replicas", metavar="N", min=1, help="Workers.")] = None
    batch: Annotated[
        str | None,
        typer.Option(
            "--batch",
            metavar="N",
            help="Requests at once of each worker; none: as many as memory holds, up to 256.",
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="TOKENS", help="Longest request; none: as long as model and memory allow."
        ),
    ] = None
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", metavar="TOKENS", min=1, help="Prompt length to plan for.")
    ] = None
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", metavar="TOKENS", min=1, help="Answer length to plan for.")
    ] = None
    model: Annotated[
        str | None, typer.Option("--model", help="A checkpoint folder, a hub id or a registered name.")
    ] = None
    variants: Annotated[int | None, typer.Option("--variants", metavar="N", min=0, help=o.HELP["variants"])] = None
    variant_rank: Annotated[
        int | None, typer.Option("--rank", metavar="R", min=0, help=o.HELP["variant_rank"])
    ] = None
    delta_mib: Annotated[
        int | None, typer.Option("--delta-mib", metavar="MIB", min=0, help=o.HELP["delta_mib"])
    ] = None
    delta_format: Annotated[SlotFormat | None, typer.Option("--delta-format", help=o.HELP["delta_format"])] = None
    variant_popularity: Annotated[
        str | None, typer.Option("--popularity", metavar="LAW", help=o.HELP["variant_popularity"])
    ] = None
    base_share: Annotated[
        float | None, typer.Option("--base-share", metavar="SHARE", help=o.HELP["base_share"])
    ] = None
    text_only: Annotated[
        bool | None,
        typer.Option("--text-only/--with-towers", help="vLLM: without a multimodal model's towers, or with them."),
    ] = None
    images: Annotated[
        int | None, typer.Option("--images", metavar="N", min=0, help="Images in each planned prompt; 0: none.")
    ] = None
    image_tokens: o.ImageTokens = None
    trust_remote_code: Annotated[
        bool | None,
        typer.Option(
            "--trust-remote-code/--no-trust-remote-code",
            help="vLLM: run Python code of the model's repository. Kept until --model names another.",
        ),
    ] = None

    def body(self) -> dict[str, Any]:
        """Return the fields as the REST API takes them; what is not given is left out.

        Raises:
            typer.BadParameter: a value that cannot be used.
        """
        from iserve.cli.connection import model_argument
        from iserve.settings import load_settings

        changes = {name: value for name, value in asdict(self).items() if value is not None}
        if self.model is not None:
            changes["model"] = model_argument(self.model, load_settings())
        if self.slo is not None:
            changes["slo"] = _limits(self.slo)
        for option, field in (("batch", "batch"), ("context", "context_tokens")):
            if option in changes:
                changes[field] = _number(f"--{option}", changes.pop(option))
        return changes


def update(
    name: o.NameArgument,
    *,
    changes: Changes,
    engine: o.EngineSettings,
    stop_first: Annotated[
        bool,
        typer.Option(
            "--stop-first",
            help="End the former workers before the new ones start, where memory does not hold both; requests "
            "wait meanwhile. If the new ones do not start, the former ones start again.",
        ),
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Change a deployment while it serves; what is not given stays as it is.

    New workers start beside the former ones, which serve until then and end when they have no request left. If the
    new ones do not come up, the former ones stay. --engine-arg replaces all that were given before.

    Without --batch and --context each worker goes on serving as many and as long requests: where memory next to
    the former workers is too small for that, the update is refused, unless --stop-first is given.
    """
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import client

    body = changes.body() | engine.body()
    if not body:
        raise typer.BadParameter(
            "nothing is changed; give --intent, --slo, --replicas, --batch, --context, --input-tokens, "
            "--output-tokens, --variants, --rank, --delta-mib, --delta-format, --popularity, --base-share, "
            "--text-only, --images, --image-tokens, --trust-remote-code, --model, --engine-version, --engine-arg, "
            "--tool-call-parser or --reasoning-parser"
        )
    if stop_first:
        body["stop_first"] = True
    o.warn_of_code(changes.model or name, trusted=bool(changes.trust_remote_code))
    controller = client(start=False)
    before = _capacity(controller, name)
    accepted = controller.patch(f"/api/v1/deployments/{name}", body, DeploymentDocument)
    controller = _follow(controller, accepted, stop_first=stop_first, as_json=as_json)
    _warn_of_less(name, before, _capacity(controller, name))


def _number(option: str, value: str) -> int | None:
    """Return the number that ``option`` was given; None for ``none``."""
    if value == "none":
        return None
    try:
        number = int(value)
    except ValueError:
        number = 0
    if number < 1:
        raise typer.BadParameter(f"give a number of at least 1, or none; got {value!r}", param_hint=option)
    return number


def _limits(slo: str) -> dict[str, float | None] | None:
    if slo == "none":
        return None
    with o.usage_errors("--slo"):
        limits = parse_slo(slo)
    return {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s, "e2e_s": limits.e2e_s}


def _capacity(controller: ControllerClient, name: str) -> CapacityDocument | None:
    """Return the capacity of each worker of the deployment; None where no plan says so."""
    from fingerprint.errors import IserveError
    from iserve.planning.document import PlanDocument

    try:
        return controller.get(f"/api/v1/deployments/{name}/plan", PlanDocument).capacity
    except IserveError:
        return None


def _warn_of_less(name: str, before: CapacityDocument | None, after: CapacityDocument | None) -> None:
    """Name both capacities where the second is less."""
    if before is None or after is None:
        return
    if after.requests_at_once < before.requests_at_once or after.context_tokens < before.context_tokens:
        new, old = (
            f"up to {one.requests_at_once} at once of up to {one.context_tokens:,} tokens"
            for one in (after, before)
        )
        less = f"{name} serves fewer or shorter requests: {new}; before {old}"
        typer.echo(f"warning: each worker of {less}", err=True)


def _updated(
    controller: ControllerClient, accepted: DeploymentDocument, path: str, *, quiet: bool
) -> tuple[ControllerClient, DeploymentDocument]:
    """Show the steps until the update ends; return the controller that said so. Raises as :func:`_follow`."""
    from fingerprint.errors import UnavailableError
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import client
    from iserve.cli.progress import StepDisplay

    document, answered_s = accepted, time.monotonic()
    with StepDisplay(quiet=quiet) as display:
        while document.updating:
            display.show(document.status if document.status in _STEPS else "updating", document.progress)
            time.sleep(_POLL_S)
            try:
                document = controller.get(path, DeploymentDocument)
                answered_s = time.monotonic()
            except UnavailableError:  # a controller that was killed goes on when it is back
                if time.monotonic() > answered_s + _SILENT_S:
                    raise
                with contextlib.suppress(UnavailableError):
                    controller = client(start=False)
    return controller, document


def _follow(
    controller: ControllerClient, accepted: DeploymentDocument, *, stop_first: bool, as_json: bool
) -> ControllerClient:
    """Wait until the new workers serve; return the controller that said so, which may be a new one.

    Raises:
        EngineError: they did not start.
        NotFoundError: the deployment was removed meanwhile.
        UnavailableError: the controller has not answered for ``_SILENT_S``.
    """
    from fingerprint.errors import EngineError
    from iserve.cli.render import print_plan
    from iserve.planning.document import PlanDocument

    path = f"/api/v1/deployments/{accepted.name}"
    try:
        controller, document = _updated(controller, accepted, path, quiet=as_json)
    except KeyboardInterrupt:
        typer.echo(
            f"iserve: {accepted.name} goes on being updated; `iserve show {accepted.name}` says how far", err=True
        )
        raise
    if document.error is not None:
        raise EngineError(document.error)
    if document.status == "launching":  # neither the new workers nor the former ones started
        raise EngineError(f"{document.name} was not updated and is started anew; `iserve show {document.name}`")
    if as_json:
        o.print_json(document)
        return controller
    print_plan(controller.get(f"{path}/plan", PlanDocument), deployed=True)
    later = "" if stop_first else "; its former workers end when they have no request left"
    typer.echo(f"{document.name} is updated{later}")
    return controller
