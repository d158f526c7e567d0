"""``report``: one page about a model, to keep or to send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from fingerprint.errors import NotFoundError, UnavailableError
from fingerprint.model_use import ModelUse
from fingerprint.output_file import output_file, write_output
from iserve.cli import gpu_options as g
from iserve.cli import options as o

if TYPE_CHECKING:
    from fingerprint.config import DeploymentConfig
    from fingerprint.gpu_spec import GpuSpec
    from fingerprint.measurements import Profile
    from iserve.api_documents import NodeDocument
    from iserve.client import ControllerClient
    from iserve.planning.deployability import DeployableDocument
    from iserve.planning.pipeline import Hardware, PlanOptions
    from iserve.report.accuracy import AccuracyRecord
    from iserve.report.values import Report

__all__ = ["hardware_here", "register", "show_document"]

Document = TypeVar("Document")

DEFAULT_OUTPUT = "report.html"
_MARKDOWN = ".md"


def register(app: typer.Typer) -> None:
    app.command("report", epilog="Example: iserve report my-llama -o report.html")(report)


def report(
    model: o.ModelArgument,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="The page's file; one that is there is replaced. X.md is Markdown.",
            show_default=DEFAULT_OUTPUT,
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Markdown, to standard output, with tables for the drawings.")
    ] = False,
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="Report on these instead, such as a6000:8. Needs no profile.")
    ] = None,
    gpu_file: g.GpuFile = None,
    truth: Annotated[
        Path | None,
        typer.Option(
            "--measurements", help="Measured whole models instead of those that `make accuracy` left here."
        ),
    ] = None,
    cost: o.CostOption = o.DEFAULT_INTENT.cost_model,
    quality: o.QualityOption = o.DEFAULT_INTENT.quality,
    input_tokens: o.InputTokens = o.DEFAULT_WORKLOAD.input_tokens,
    output_tokens: o.OutputTokens = o.DEFAULT_WORKLOAD.output_tokens,
    batch: o.BatchOrMore = None,
    text_only: o.TextOnly = False,
    engine: o.EngineOption = "auto",
    as_json: o.JsonOption = False,
) -> None:
    """Write one self-contained HTML page: what was measured of MODEL, and what every intent would choose.

    The same as Markdown with --markdown or a file that ends in .md: tables take the place of the drawings.

    Uses the profile that `iserve profile MODEL` took and the devices that are free now.
    """
    from iserve.planning.pipeline import PlanOptions
    from iserve.report.accuracy import read_accuracy
    from iserve.settings import load_settings
    from planner.intent import Intent

    settings = load_settings()
    options = PlanOptions(
        workload=o.workload_of(o.DEFAULT_WORKLOAD.batch if batch is None else batch, input_tokens, output_tokens),
        intent=Intent(cost_model=cost, quality=quality),
        policy=settings.policy,
        load_threshold=settings.load_threshold,
        more_requests=batch is None,
        longer_requests=True,
    )
    if as_json and markdown:
        raise typer.BadParameter("--json and --markdown are two; give one of them")
    if (as_json or markdown) and output is not None:
        said = "--json" if as_json else "--markdown"
        raise typer.BadParameter(f"{said} prints the report, --output writes it to a file; give one of them")
    page = output or Path(DEFAULT_OUTPUT)
    if not (as_json or markdown):
        with o.usage_errors("--output"):
            output_file(page)
    accuracy = None if truth is None else read_accuracy(truth)
    there = g.named_gpus(gpus, gpu_file)
    if there is None:
        found = _live(model, engine, options, accuracy, text_only=text_only)
    else:
        found = _hypothetical(model, *there, engine, options, accuracy, text_only=text_only)
    _show(found, page, markdown=markdown, as_json=as_json)


def _show(report: Report, output: Path, *, markdown: bool, as_json: bool) -> None:
    """Print the report as JSON or Markdown, or write its page."""
    from iserve.report.markdown import render_markdown
    from iserve.report.page import render_report

    if as_json:
        o.print_json(report)
        return
    if markdown:
        typer.echo(render_markdown(report), nl=False)
        return
    render = render_markdown if output.suffix.lower() == _MARKDOWN else render_report
    write_output(output_file(output), render(report))
    typer.echo(f"{output}: {report.model} on {report.hardware}, {len(report.configurations)} configurations")


def _hypothetical(
    model: str,
    gpu: GpuSpec,
    count: int,
    engine: str,
    options: PlanOptions,
    accuracy: AccuracyRecord | None,
    *,
    text_only: bool,
) -> Report:
    from daemon.engines.registry import capabilities_for
    from iserve.cli.connection import registered_models
    from iserve.model_source import resolve
    from iserve.planning.deployability import deployable, gpus_here
    from iserve.planning.model_use import check_use, used
    from iserve.planning.offline import engine_for_gpus
    from iserve.planning.pipeline import datasheet_estimator, hypothetical_hardware
    from iserve.report.build import build_report
    from iserve.settings import load_settings

    source = resolve(model, registered_models(model, load_settings()), need_weights=False)
    source = used(source, ModelUse(text_only=text_only))
    hardware = hypothetical_hardware(gpu, count)
    tables = capabilities_for(engine)
    choice = engine_for_gpus(source.spec, gpu, count, options, engine)
    engines = [table.unprepared() for table in tables if table.engine == choice.engine]
    for table in engines:
        check_use(source, table)
    estimator = datasheet_estimator(source.spec, gpu, engines)
    found = gpus_here()

    def deployable_of(config: DeploymentConfig) -> DeployableDocument:
        return deployable(source.spec, config, gpu, engines, found, has_weights=source.has_weights)

    return build_report(
        source.name,
        source.spec,
        hardware,
        estimator,
        engines,
        options,
        accuracy=accuracy,
        deployable_of=deployable_of,
        notes=choice.passed_over,
    )


def _live(
    model: str, engine: str, options: PlanOptions, accuracy: AccuracyRecord | None, *, text_only: bool
) -> Report:
    """Return the report by the stored profile, on the devices of this home's node."""
    from daemon.engines.registry import get_engine
    from fingerprint.estimators.corrected import CorrectedEstimator
    from iserve.cli.connection import client
    from iserve.controller.engine_selection import deployable_engine
    from iserve.controller.profiling_validity import differences
    from iserve.planning.deployability import deployable
    from iserve.planning.estimator_factory import estimator_for
    from iserve.report.accuracy import find_accuracy
    from iserve.report.build import build_report
    from iserve.settings import load_settings
    from iserve.verify.documents import StoredVerification

    if engine != "auto":
        deployable_engine(engine)
    controller = client()
    profiled = _profiled(controller, model, engine, text_only=text_only)
    name, profile = profiled.name, profiled.profile
    if accuracy is None:
        accuracy = find_accuracy(load_settings().home, profile.spec.shape_hash, profile.machine)
    node, hardware = hardware_here(controller, profile.machine.device)
    measured_on = get_engine(profile.engine)
    engines = [measured_on.capabilities().unprepared()]
    checks = controller.get("/api/v1/verifications", tuple[StoredVerification, ...])
    alike = [
        c for c in checks if c.in_force and (c.shape_hash, c.engine) == (profile.spec.shape_hash, profile.engine)
    ]
    estimator = CorrectedEstimator(
        estimator_for(profile), [check.verification for check in alike], graph_tokens=profile.graph_tokens
    )
    found = {hardware.gpu.name: len(hardware.snapshot.gpus)}

    def deployable_of(config: DeploymentConfig) -> DeployableDocument:
        return deployable(profile.spec, config, hardware.gpu, engines, found, has_weights=profiled.has_weights)

    report = build_report(
        name,
        profile.spec,
        hardware,
        estimator,
        engines,
        options,
        accuracy=accuracy,
        deployable_of=deployable_of,
    )
    changed = differences(profile, node, measured_on.versions())
    stale = f"no plan or deploy here uses this profile any more: it was taken with {', '.join(changed)}"
    return replace(report, warnings=(*report.warnings, *([stale] if changed else [])))


@dataclass(frozen=True, slots=True)
class _Profiled:
    """A model with a stored profile."""

    name: str
    profile: Profile  # may be that of another model of this shape
    has_weights: bool


def _profiled(controller: ControllerClient, model: str, engine: str, *, text_only: bool) -> _Profiled:
    """Return the stored profile of ``model``, whose files need not be there any more.

    Raises:
        NotFoundError: no such model, or no profile of it.
        UnavailableError: the model's files cannot be had now, and there is no profile of that name.
    """
    from fingerprint.measurements import Profile
    from iserve.api_documents import ModelDocument
    from iserve.model_source import resolve
    from iserve.planning.estimator_factory import profile_as
    from iserve.planning.model_use import used
    from iserve.report.build import find_profile

    profiles = [p for p in controller.get("/api/v1/profiles", tuple[Profile, ...]) if engine in ("auto", p.engine)]
    registered = {m.name: Path(m.directory) for m in controller.get("/api/v1/models", tuple[ModelDocument, ...])}
    try:
        source = used(resolve(model, registered, need_weights=False), ModelUse(text_only=text_only))
    except (NotFoundError, UnavailableError):
        if all(p.model != model for p in profiles):
            raise
        profile = find_profile(profiles, model, None)
        return _Profiled(profile.model, profile, has_weights=False)
    shape = source.spec.text_alone.shape_hash
    profile = find_profile(profiles, source.name, shape, argument=source.argument)
    return _Profiled(source.name, profile_as(source.spec, profile), source.has_weights)


def hardware_here(controller: ControllerClient, gpu: GpuSpec) -> tuple[NodeDocument, Hardware]:
    """Return this home's node, and its devices as a plan sees them: what serves there, and its request rates.

    Raises:
        UnavailableError: its daemon is away.
    """
    from iserve.api_documents import NodeDocument
    from iserve.controller.snapshot import hardware_of
    from placement.types import DeploymentState

    nodes = [node for node in controller.get("/api/v1/nodes", tuple[NodeDocument, ...]) if node.reachable]
    if not nodes:
        raise UnavailableError("this node's daemon is away; `iserve status` looks, try again in a moment")
    serving = controller.get("/api/v1/serving", tuple[DeploymentState, ...])
    return nodes[0], hardware_of(nodes[0], gpu, serving)


def show_document(
    document: Document,
    page: Path | None,
    render: Callable[[Document], str],
    print_text: Callable[[Document], None],
    *,
    as_json: bool,
) -> None:
    """Print a run as JSON or in the terminal, and write its page where one is asked for."""
    if page is not None:
        write_output(output_file(page), render(document))
    if as_json:
        o.print_json(document)
        return
    print_text(document)
    if page is not None:
        typer.echo(f"page: {page}")
