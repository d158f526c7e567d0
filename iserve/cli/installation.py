"""The installation: ``up``, ``down``, ``status``, ``nodes``, ``doctor``, ``register``, ``profile``, ``keys``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.config import SlotFormat
from fingerprint.profile_plan import Shards
from iserve.cli import options as o

if TYPE_CHECKING:
    from fingerprint.measurements import Profile
    from iserve.api_documents import ProfileJobDocument
    from iserve.client import ControllerClient

__all__ = ["register"]

_POLL_S = 0.5


def register(app: typer.Typer) -> None:
    app.command("up", epilog="Example: ISERVE_PORT=9000 iserve up")(up)
    app.command("down", epilog="Example: iserve down")(down)
    app.command("status", epilog="Example: iserve status --json")(status)
    app.command("nodes", epilog="Example: iserve nodes --json")(nodes)
    app.command("doctor", epilog="Example: iserve doctor")(doctor)
    app.command("register", epilog="Example: iserve register my-llama ./checkpoints/llama")(register_model)
    app.command("profile", epilog="Example: iserve profile my-llama --max-seconds 120")(profile)
    keys = typer.Typer(
        cls=o.CommandGroup,
        help="API keys for clients and administrators.",
        epilog="Example: iserve keys create --label laptop",
        no_args_is_help=True,
    )
    keys.command("create", epilog="Example: iserve keys create --label laptop")(keys_create)
    keys.command("ls", epilog="Example: iserve keys ls")(keys_list)
    keys.command("revoke", epilog="Example: iserve keys revoke key-1a2b3c")(keys_revoke)
    app.add_typer(keys, name="keys")


def up() -> None:
    """Start controller, daemon and gateway of this home, and bring its deployments back.

    Settings (ISERVE_*) are read when a process starts: if those of a running home differ, exit code 1 says which.
    """
    from iserve.cli.connection import client, gateway_url
    from iserve.client import check_running_settings
    from iserve.settings import load_settings

    settings = load_settings()
    check_running_settings(settings)
    client(settings)
    check_running_settings(settings)  # another command may have started them meanwhile
    typer.echo(f"OpenAI API: {gateway_url()}/v1")


def down() -> None:
    """End every process of this home, workers too. Its deployments come back with `iserve up`."""
    from iserve.cli.home_processes import take_down
    from iserve.settings import load_settings

    for line in take_down(load_settings()):
        typer.echo(line)


def status(as_json: o.JsonOption = False) -> None:
    """Show which processes of this home live, and how its deployments are."""
    from iserve.cli.home_processes import process_states
    from iserve.cli.render import print_rows
    from iserve.settings import load_settings

    states = process_states(load_settings())
    if as_json:
        o.print_json(states)
    else:
        print_rows(
            ("process", "pid", "url"),
            [(s.name, "not running" if s.pid is None else str(s.pid), s.url or "") for s in states],
        )


def nodes(as_json: o.JsonOption = False) -> None:
    """List nodes and devices with their free memory and load."""
    from iserve.api_documents import NodeDocument
    from iserve.cli.connection import client
    from iserve.cli.render import gib, print_rows
    from iserve.planning.words import links_times

    documents = client(start=False).get("/api/v1/nodes", tuple[NodeDocument, ...])
    if as_json:
        o.print_json(documents)
        return
    print_rows(
        ("node", "device", "name", "free", "total", "load", "power"),
        [
            (
                node.node_id if node.reachable else f"{node.node_id} (unreachable)",
                device.device_id,
                device.name,
                gib(device.free_bytes),
                gib(device.total_bytes),
                f"{device.load_fraction:.0%}",
                "" if device.power_w is None else f"{device.power_w:.0f} W",
            )
            for node in documents
            for device in node.devices
        ],
    )
    for links in (links for node in documents for links in node.interconnect):
        typer.echo(f"links of {links.gpus} GPUs, measured: {links_times(links)}")


def doctor(fix: Annotated[bool, typer.Option("--fix", help="End what is left over.")] = False) -> None:
    """Look for what is wrong with this installation. Exit code 1 if anything is.

    Each check is ok, a PROBLEM, or absent: an engine that is not installed and that no setting asks for, or links
    between GPUs that are not measured yet.
    """
    from fingerprint.errors import UnavailableError
    from iserve.cli.home_checks import examine
    from iserve.settings import load_settings

    findings = examine(load_settings(), fix=fix)
    for finding in findings:
        typer.echo(f"{finding.verdict}: {finding.text}")
    wrong = sum(not finding.ok for finding in findings)
    if wrong:
        raise UnavailableError(f"{wrong} of {len(findings)} checks found a problem; each says what to do")


def register_model(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name to give it.")],
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Its checkpoint folder.")],
    as_json: o.JsonOption = False,
) -> None:
    """Give a checkpoint folder a name that every other command understands."""
    from iserve.api_documents import ModelDocument
    from iserve.cli.connection import client, folder_argument

    body = {"name": name, "directory": folder_argument(directory)}
    document = client().post("/api/v1/models", body, ModelDocument)
    if as_json:
        o.print_json(document)
    else:
        typer.echo(
            f"{document.name}: {document.family}, {document.num_layers} layers, "
            f"{document.num_params:,} parameters, {'with weights' if document.has_weights else 'config only'}"
        )


def profile(
    model: o.OptionalModel = None,
    engine: o.EngineOption = "auto",
    max_seconds: Annotated[
        float,
        typer.Option(
            "--max-seconds",
            help="Budget; on torch launches included, on vllm without them and of all GPUs together (of an "
            "unknown release by the clock).",
        ),
    ] = 60.0,
    quality: o.QualityOption = o.DEFAULT_INTENT.quality,
    shards: Annotated[
        Shards,
        typer.Option(
            "--shards",
            help="TP degrees run as one rank on one GPU (vllm): auto: whose GPUs are not free; "
            "always: also beyond the node's GPUs.",
        ),
    ] = Shards.AUTO,
    expert_parallel: Annotated[
        bool,
        typer.Option(
            "--expert-parallel",
            help="Also measure TP with a mixture's experts divided as wholes (vllm), in half as much time again.",
        ),
    ] = False,
    input_tokens: o.InputTokens = o.DEFAULT_WORKLOAD.input_tokens,
    output_tokens: o.OutputTokens = o.DEFAULT_WORKLOAD.output_tokens,
    batch: o.Batch = o.DEFAULT_WORKLOAD.batch,
    rank: Annotated[
        int,
        typer.Option(
            "--rank",
            metavar="R",
            min=0,
            help="Also measure what LoRA adapters of this rank take (torch). 0: none.",
        ),
    ] = 0,
    delta_format: Annotated[
        SlotFormat,
        typer.Option(
            "--delta-format", help="Also measure what deltas of full fine-tunes in this format take (torch)."
        ),
    ] = SlotFormat.NONE,
    trust_remote_code: o.TrustRemoteCode = False,
    as_json: o.JsonOption = False,
) -> None:
    """Measure MODEL's fingerprints (one and two of its layers) on the devices that are free now."""
    from iserve.api_documents import ProfileJobDocument
    from iserve.cli.connection import client, model_argument
    from iserve.cli.profile_text import print_profile
    from iserve.cli.progress import StepDisplay
    from iserve.planning.estimator_factory import estimator_for
    from iserve.settings import load_settings

    if not 0 < max_seconds <= 86_400:
        raise typer.BadParameter("must be above 0 and at most 86400", param_hint="'--max-seconds'")
    workload = o.workload_of(batch, input_tokens, output_tokens)
    settings = load_settings()
    o.warn_of_code(model, trusted=trust_remote_code)
    model = None if model is None else model_argument(model, settings)
    controller = client(settings)
    body = {"model": model, "engine": engine, "max_seconds": max_seconds, "quality": quality.value}
    body |= {"shards": shards.value, "batch": batch, "input_tokens": input_tokens, "output_tokens": output_tokens}
    body |= {"trust_remote_code": trust_remote_code, "variant_rank": rank, "delta_format": delta_format.value}
    body |= {"expert_parallel": expert_parallel}
    job = controller.post("/api/v1/profiles", body, ProfileJobDocument)
    with StepDisplay(quiet=as_json) as display:
        while job.status == "running":
            display.show("profiling", job.progress)
            time.sleep(_POLL_S)
            job = controller.get(f"/api/v1/profiles/jobs/{job.job_id}", ProfileJobDocument)
    measured = _taken(controller, job)
    if as_json:
        o.print_json(measured)
        return
    print_profile(measured, estimator_for(measured), workload)
    for note in (*job.notes, *measured.notes):
        typer.echo(f"note: {note}")
    typer.echo(f"see it: iserve report {measured.model} -o report.html")


def _taken(controller: ControllerClient, job: ProfileJobDocument) -> Profile:
    """Return what the job, which has ended, measured.

    Raises:
        EngineError: it failed.
        UnavailableError: the profile was removed since.
    """
    from fingerprint.errors import EngineError, UnavailableError
    from fingerprint.measurements import Profile

    if job.status == "failed":
        raise EngineError(job.error or "the profile failed")
    known = controller.get("/api/v1/profiles", tuple[Profile, ...])
    taken = [p for p in known if (p.model, p.engine) == (job.model, job.engine)]
    measured = max(taken, key=lambda p: p.created_at, default=None)  # another driver may have an older one
    if measured is None:
        raise UnavailableError(f"the profile of {job.model} was taken and is gone again; take it once more")
    return measured


def keys_create(
    label: Annotated[str, typer.Option("--label", help="To recognise it by.")] = "unnamed",
    scope: Annotated[str, typer.Option("--scope", help="inference or admin.")] = "inference",
) -> None:
    """Make an API key. It is shown once."""
    from iserve.api_documents import NewKeyDocument
    from iserve.api_types import check_label
    from iserve.cli.connection import client

    with o.usage_errors("--label"):
        check_label(label)
    if scope not in {"inference", "admin"}:
        raise typer.BadParameter("must be inference or admin", param_hint="'--scope'")
    made = client().post("/api/v1/keys", {"label": label, "scope": scope}, NewKeyDocument)
    typer.echo(made.key)
    typer.echo(f"id {made.key_id}, scope {scope}; this is the only time the key is shown", err=True)


def keys_list(as_json: o.JsonOption = False) -> None:
    """List the API keys, never the keys themselves."""
    from iserve.api_documents import KeyDocument
    from iserve.cli.connection import client
    from iserve.cli.render import print_rows

    documents = client(start=False).get("/api/v1/keys", tuple[KeyDocument, ...])
    if as_json:
        o.print_json(documents)
    else:
        print_rows(
            ("id", "label", "scope", "state"),
            [(d.key_id, d.label, d.scope, "revoked" if d.revoked else "valid") for d in documents],
        )


def keys_revoke(key_id: Annotated[str, typer.Argument(metavar="ID", help="From `iserve keys ls`.")]) -> None:
    """Revoke an API key; the gateway refuses it within a second."""
    from iserve.cli.connection import client

    client(start=False).delete(f"/api/v1/keys/{key_id}")
    typer.echo(f"{key_id} is revoked")
