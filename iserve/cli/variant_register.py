"""``variant add``, ``ls``, ``show``, ``rm``, ``pin``, ``unpin``: LoRA adapters that are served next to a base."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o
from iserve.cli.groups import grouped
from iserve.cli.variant import BASE_HELP, RegisteredArgument, size_text
from iserve.cli.variant_delta import (
    CalibrationOption,
    DeviceOption,
    FormatOption,
    MaxErrorOption,
    MaxLossOption,
    TextOption,
    loss_lines,
    options_of,
    show_units,
)
from iserve.cli.variant_deploy import deploy

if TYPE_CHECKING:
    from iserve.api_documents import VariantDocument
    from iserve.client import ControllerClient
    from iserve.deltas import CompressOptions
    from iserve.rest_bodies import VariantBody
    from iserve.settings import Settings

__all__ = ["register"]

_PATH = "/api/v1/variants"
_ADD_TIMEOUT_S = 3600.0  # as many adapters as are being added may be first
_POLL_S = 0.2
_NOT_FOLLOWED = "the gateway has not taken the change over within 10 s (`iserve status` looks)"


def register(variant: typer.Typer) -> None:
    variant.command(
        "add", epilog="Example: iserve variant add my-style --base iserve-demo ./my-dora --format int4"
    )(add)
    variant.command("ls", epilog="Example: iserve variant ls --json")(list_variants)
    variant.command("show", epilog="Example: iserve variant show my-style")(show)
    variant.command("rm", epilog="Example: iserve variant rm my-style")(rm)
    variant.command("deploy", epilog="Example: iserve variant deploy my-style --intent max-throughput")(
        grouped(deploy)
    )
    variant.command("pin", epilog="Example: iserve variant pin my-style")(pin)
    variant.command("unpin", epilog="Example: iserve variant unpin my-style")(unpin)


def _new_name(name: str) -> str:
    from iserve.api_types import check_name

    return check_name(name)


NewNameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name that clients give as the model; no deployment or model has it.",
        callback=_new_name,
    ),
]
PathArgument = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="Folder of a PEFT adapter, of a delta that `compress` wrote, or of a full fine-tune.",
        callback=o.not_empty,
    ),
]
BaseOption = Annotated[str, typer.Option("--base", metavar="MODEL", help=BASE_HELP, callback=o.not_empty)]
ReplaceOption = Annotated[
    bool, typer.Option("--replace", help="Give NAME, which has other content, this one in one step.")
]
PinOption = Annotated[bool, typer.Option("--pin", help="Have workers load it at once and keep it loaded.")]
OwnOption = Annotated[
    bool,
    typer.Option(
        "--as-deployment", help="Merge it, and serve it by a deployment of its own, as `variant deploy`."
    ),
]


def add(
    context: typer.Context,
    name: NewNameArgument,
    adapter: PathArgument,
    base: BaseOption,
    replace: ReplaceOption = False,
    pin: PinOption = False,
    as_deployment: OwnOption = False,
    format_: FormatOption = "int2",
    calibration: CalibrationOption = None,
    max_error: MaxErrorOption = None,
    max_quality_loss: MaxLossOption = None,
    text: TextOption = None,
    device: DeviceOption = "cpu",
    as_json: o.JsonOption = False,
) -> None:
    """Register the adapter or the delta in PATH as NAME, to be served next to its base.

    It is checked and copied into iServe's home; tensors that variants share are kept once. Every deployment of the
    base with slots for it serves it from then on. The same command again changes nothing.

    A full fine-tune is compressed first, as by `compress`, with its options. So is an adapter that no engine
    serves as one (DoRA, IA3, trained embeddings or biases, a rank above 256), once it is merged. Killed at any
    moment, the same command goes on with the layers that are done. An engine that serves no deltas serves one
    merged: --as-deployment.
    """
    from iserve.api_types import DeployBody
    from iserve.cli.connection import client, folder_argument, model_argument
    from iserve.cli.variant_deploy import deploy_merged
    from iserve.rest_bodies import VariantBody
    from iserve.settings import load_settings

    options = options_of(format_, calibration, max_error, max_quality_loss, text, device)
    settings, path = load_settings(), folder_argument(adapter)
    controller = client(settings)
    body = VariantBody(name=name, base=model_argument(base, settings), path=path, replace=replace, pinned=pin)
    added = _added(context, controller, settings, base, body, options, quiet=as_json)
    if as_deployment:
        controller, _ = deploy_merged(controller, settings, added, DeployBody(), quiet=as_json)
        added = _with_deployment(controller, added)
    if as_json:
        o.print_json(added)
    else:
        typer.echo("\n".join(_added_lines(added)))


def _added(
    context: typer.Context,
    controller: ControllerClient,
    settings: Settings,
    base: str,
    body: VariantBody,
    options: CompressOptions,
    *,
    quiet: bool,
) -> VariantDocument:
    """Return the variant of ``body`` as it is registered then; what no engine serves as it is becomes a delta."""
    from iserve.api_documents import VariantDocument
    from iserve.client import post_when_free
    from iserve.deltas import is_fine_tune, replaced_companions
    from iserve.variants import kept_as_delta

    path = body.path
    with ExitStack() as held:
        parts = kept_as_delta(path)
        if parts:
            why = "; ".join(part.why for part in parts)
            typer.echo(f"iserve: {path} is kept as a delta, as no engine serves it as an adapter: {why}", err=True)
        if parts or is_fine_tune(path):
            path = held.enter_context(
                _compressed(controller, settings, body.name, base, path, options, quiet=quiet)
            )
        elif parts is not None:
            _check_unused(context)
        given = body.model_copy(update={"path": path}).model_dump()
        with _progress(controller, body.name, quiet=quiet or not is_terminal()):
            patient = controller.patient(_ADD_TIMEOUT_S)
            added = post_when_free(patient, _PATH, given, VariantDocument, patience_s=_ADD_TIMEOUT_S)
        companions = replaced_companions(path)
    if companions:
        typer.echo(
            f"iserve: answers use the base's {', '.join(companions)}, not those of the fine-tune; "
            "`iserve variant export` makes a model that has them",
            err=True,
        )
    if added.base_warning is not None:
        typer.echo(f"iserve: {added.base_warning}", err=True)
    return added


def _with_deployment(controller: ControllerClient, added: VariantDocument) -> VariantDocument:
    """Return the variant as it is now, with what only its addition knows."""
    from dataclasses import replace

    from iserve.api_documents import VariantDocument

    return replace(controller.get(f"{_PATH}/{added.name}", VariantDocument), new_bytes=added.new_bytes)


def _added_lines(added: VariantDocument) -> Iterator[str]:
    shared = "" if added.new_bytes is None else f", {size_text(added.new_bytes)} of them new"
    yield f"{added.name}: a variant of {added.base}, {_kind(added)}, {size_text(added.size_bytes)}{shared}"
    yield _serving(added)
    yield from (cost.text for cost in added.costs)
    if added.merge_advice is not None:
        yield added.merge_advice.text


def _check_unused(context: typer.Context) -> None:
    """Refuse options of a compression where nothing is compressed."""
    for name in ("format_", "calibration", "max_error", "max_quality_loss", "text", "device"):
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.strip('_').replace('_', '-')}"
            raise typer.BadParameter("is for a full fine-tune; PATH is none", param_hint=f"'{option}'")


@contextmanager
def _compressed(
    controller: ControllerClient,
    settings: Settings,
    name: str,
    base: str,
    finetuned: str,
    options: CompressOptions,
    *,
    quiet: bool,
) -> Iterator[str]:
    """Hold the folder, in iServe's home, of the delta of a full fine-tune; it is gone when the block ends well."""
    from fingerprint.errors import CheckpointError
    from iserve.cli.connection import check_variant_name, registered_models
    from iserve.cli.progress import StepDisplay
    from iserve.deltas import compress_variant
    from iserve.fine_tune_folders import compression_key, held_delta, remove_whole
    from iserve.model_source import resolve

    check_variant_name(name, settings)  # before a compression that takes hours
    model = base if base in registered_models(base, settings) else _model_of(controller, base)
    registered = registered_models(model, settings)

    def make(folder: Path) -> None:
        with StepDisplay(quiet=quiet) as display:
            done = compress_variant(
                model,
                finetuned,
                str(folder),
                registered,
                options,
                lambda what, at, total: show_units(display, "compressing", what, at, total),
            )
        if not (done.matrices or done.num_exact):
            remove_whole(folder)
            raise CheckpointError(f"{finetuned} changes nothing of {base}; ask for the base itself")
        if done.judgement is not None and not quiet:
            typer.echo("\n".join(loss_lines(done.judgement)))

    def wait() -> None:
        typer.echo("iserve: waiting for another command that adds this fine-tune", err=True)

    key = compression_key(resolve(model, registered).directory, Path(finetuned), options)
    with held_delta(settings, key, make, wait) as folder:
        yield str(folder)


def _model_of(controller: ControllerClient, base: str) -> str:
    """Return the model of the deployment named ``base``, or ``base``, where it is a folder or names none."""
    from fingerprint.errors import ConfigError, NotFoundError
    from iserve.api_documents import DeploymentDocument
    from iserve.api_types import check_name
    from iserve.model_source import existing_path

    if existing_path(base) is None:
        with suppress(NotFoundError, ConfigError):
            return controller.get(f"/api/v1/deployments/{check_name(base)}", DeploymentDocument).model
    return base


def list_variants(as_json: o.JsonOption = False) -> None:
    """List the variants of all bases, and the deployments that serve them."""
    from iserve.api_documents import VariantDocument
    from iserve.cli.connection import client
    from iserve.cli.render import print_rows

    documents = client(start=False).get(_PATH, tuple[VariantDocument, ...])
    if as_json:
        o.print_json(documents)
        return
    print_rows(
        ("name", "base", "rank", "size", "on disk", "pinned", "served by", "loaded at"),
        [
            (
                one.name,
                one.base,
                str(one.rank or "delta"),
                size_text(one.size_bytes),
                size_text(one.disk_bytes),
                "yes" if one.pinned else "",
                one.deployments[0] if one.deployments else "",
                _counted_places(one),
            )
            for one in documents
        ],
    )


def show(name: RegisteredArgument, as_json: o.JsonOption = False) -> None:
    """Show one variant: base, content, the deployment that serves it, measured quality."""
    from iserve.api_documents import VariantDocument
    from iserve.cli.connection import client
    from iserve.cli.quality import quality_words

    found = client(start=False).get(f"{_PATH}/{name}", VariantDocument)
    if as_json:
        o.print_json(found)
        return
    trained = "" if found.trained_on is None else f", trained on {found.trained_on}"
    for label, text in (
        ("variant", f"{found.name}{', pinned' if found.pinned else ''}"),
        ("base", f"{found.base} in {found.base_directory}{trained}"),
        ("updates", f"{_updates(found)}, {size_text(found.size_bytes)}, {size_text(found.disk_bytes)} on disk"),
        *([] if found.made_of is None else [("made of", f"an adapter, {found.made_of}")]),
        *([] if found.base_warning is None else [("warning", found.base_warning)]),
        ("content", found.content_hash),
        ("at engines", found.engine_name),
        ("status", _serving(found)),
        ("loaded", _places(found)),
        *(
            ("costs" if not number else "", one.text.removeprefix("costs "))
            for number, one in enumerate(found.costs)
        ),
        *([] if found.merge_advice is None else [("advice", found.merge_advice.text)]),
        *(("quality" if not number else "", quality_words(one)) for number, one in enumerate(found.quality)),
    ):
        typer.echo(f"{label:<12}{text}")


def rm(name: RegisteredArgument) -> None:
    """Forget a variant. Requests under way are answered; tensors that no other variant has are removed.

    A deployment of its own ends, and its merged checkpoint is removed.
    """
    from iserve.cli.connection import client
    from iserve.cli.deploy import wait_until_gone

    controller = client(start=False)
    is_in_force = controller.delete(f"{_PATH}/{name}")
    wait_until_gone(controller, name)
    late = "" if is_in_force else f", but {_NOT_FOLLOWED}: it may still answer requests for {name}"
    typer.echo(f"{name} is removed{late}")


def pin(name: RegisteredArgument, as_json: o.JsonOption = False) -> None:
    """Have workers load a variant at once and keep it loaded; pinned ones are never unloaded for another."""
    _pin(name, pinned=True, as_json=as_json)


def unpin(name: RegisteredArgument, as_json: o.JsonOption = False) -> None:
    """Have workers load a variant when it is asked for, and unload it for another."""
    _pin(name, pinned=False, as_json=as_json)


def _pin(name: str, *, pinned: bool, as_json: bool) -> None:
    from iserve.api_documents import VariantDocument
    from iserve.cli.connection import client
    from iserve.rest_bodies import VariantPinBody

    body = VariantPinBody(pinned=pinned).model_dump()
    found = client(start=False).patch(f"{_PATH}/{name}", body, VariantDocument)
    if as_json:
        o.print_json(found)
        return
    typer.echo(f"{name} is {'pinned' if found.pinned else 'not pinned'}; {_serving(found)}")


def _kind(variant: VariantDocument) -> str:
    return f"rank {variant.rank}" if variant.rank else "a delta"


def _updates(variant: VariantDocument) -> str:
    if not variant.rank:
        return f"a delta of {variant.num_modules} tensors"
    return f"{variant.num_modules} matrices, rank {variant.rank}"


def _serving(variant: VariantDocument) -> str:
    if variant.why_not_served is not None:
        return f"not served: {variant.why_not_served}"
    if _is_merged(variant):
        return f"served by a deployment of its own, as model {variant.name}"
    if variant.in_force is False:
        return f"to be served by {variant.deployments[0]}, as model {variant.name}, but {_NOT_FOLLOWED}"
    return f"served by {variant.deployments[0]}, as model {variant.name}"


def _is_merged(variant: VariantDocument) -> bool:
    """Return whether it is served by a deployment of its own."""
    return variant.name in variant.deployments


def _places(variant: VariantDocument) -> str:
    """Return where a variant is: each worker, or the disk alone."""
    if _is_merged(variant):
        return "as part of the model of its own deployment"
    if not variant.places:
        return "nowhere; its tensors are on disk" if variant.on_disk else "nowhere, nor are its tensors on disk"
    words = {"gpu": "on the device of", "host": "in the host's memory of", "loading": "being loaded at"}
    return "; ".join(f"{words.get(one.place, one.place)} {one.worker_id}" for one in variant.places)


def _counted_places(variant: VariantDocument) -> str:
    """Return at how many workers a variant is in each place, such as ``2 gpu, 1 host``."""
    if _is_merged(variant):
        return "merged"
    counts = Counter(one.place for one in variant.places)
    return ", ".join(f"{counts[place]} {place}" for place in ("gpu", "host", "loading") if counts[place])


def is_terminal() -> bool:
    """Return whether a person sees what is written to standard error."""
    return sys.stderr.isatty()


@contextmanager
def _progress(controller: ControllerClient, name: str, *, quiet: bool) -> Iterator[None]:
    """Show the progress of an addition while the block runs."""
    from fingerprint.errors import IserveError
    from iserve.api_documents import ProgressDocument
    from iserve.cli.progress import StepDisplay

    if quiet:
        yield
        return
    done = threading.Event()

    def look() -> None:
        while not done.wait(_POLL_S):
            with suppress(IserveError):  # it waits for its turn, or is done
                display.show("adding", controller.get(f"{_PATH}/{name}/progress", ProgressDocument))

    thread = threading.Thread(target=look, daemon=True)
    with StepDisplay(quiet=False) as display:
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
