"""Command ``verify``: compares a running configuration with what was predicted of it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.api_types import VerifyBody
from iserve.cli import options as o
from iserve.cli.groups import checked, grouped

if TYPE_CHECKING:
    from iserve.api_documents import ProgressDocument
    from iserve.cli.progress import StepDisplay
    from iserve.client import ControllerClient
    from iserve.settings import Settings
    from iserve.verify.documents import MetricDocument, VerificationDocument

__all__ = ["register"]

_POLL_S = 0.3
_MOST_SECONDS = 3600
_NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "memory_bytes_per_gpu": "memory, fullest GPU",
    "kv_tokens": "KV cache room",
}


def register(app: typer.Typer) -> None:
    app.command("verify", epilog="Example: iserve verify ./my-model --batch 8 --max-seconds 60")(grouped(verify))


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A running deployment's name, or a model as `deploy` takes it.",
            callback=o.not_empty,
        ),
    ],
    *,
    request: VerifyBody,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", help="Longest check; the launch is not counted.")
    ] = 60.0,
    forget: Annotated[
        bool, typer.Option("--forget", help="Correct nothing by MODEL's checks any more; checks nothing.")
    ] = False,
    as_json: o.JsonOption = False,
) -> None:
    """Check a configuration against its prediction, and correct the model's estimates.

    A running deployment is checked as it is, its clients waiting in line with the check. Of any other MODEL the
    configuration that `deploy` would choose is launched for the check and ended with it.
    """
    from fingerprint.errors import EngineError
    from iserve.cli.connection import client
    from iserve.cli.progress import StepDisplay
    from iserve.settings import load_settings
    from iserve.verify.documents import VerificationJobDocument

    if not 0 < max_seconds <= _MOST_SECONDS:
        raise typer.BadParameter(f"must be above 0 and at most {_MOST_SECONDS}", param_hint="'--max-seconds'")
    settings = load_settings()
    checked(request, settings)  # here already: a bad value must not start a controller
    o.warn_of_code(model, trusted=request.trust_remote_code)
    controller = client(settings)
    request = replace(_target(request, controller, model, settings), max_seconds=max_seconds)
    if forget:
        controller.delete("/api/v1/verifications", model=_model_of(controller, request))
        typer.echo(f"{model} is no longer corrected")
        return
    job = controller.post("/api/v1/verifications", request.given(), VerificationJobDocument)
    with StepDisplay(quiet=as_json) as display:
        try:
            while job.status == "running":
                _show(display, job.progress)
                time.sleep(_POLL_S)
                job = controller.get(f"/api/v1/verifications/jobs/{job.job_id}", VerificationJobDocument)
        except KeyboardInterrupt:
            typer.echo("iserve: the check goes on and ends by itself, with what was launched for it", err=True)
            raise
    if job.result is None:
        raise EngineError(job.error or "the check failed")
    if as_json:
        o.print_json(job.result)
    else:
        print_verification(job.result, model)


def _target(request: VerifyBody, controller: ControllerClient, model: str, settings: Settings) -> VerifyBody:
    """Return the request for the deployment of that name where there is one, else for the model."""
    from iserve.api_documents import DeploymentDocument
    from iserve.cli.connection import model_argument

    deployments = controller.get("/api/v1/deployments", tuple[DeploymentDocument, ...])
    if any(deployment.name == model for deployment in deployments):
        return replace(request, deployment=model)
    return replace(request, model=model_argument(model, settings))


def _model_of(controller: ControllerClient, request: VerifyBody) -> str | None:
    from iserve.api_documents import DeploymentDocument

    if request.deployment is None:
        return request.model
    return controller.get(f"/api/v1/deployments/{request.deployment}", DeploymentDocument).model


def _show(display: StepDisplay, progress: ProgressDocument | None) -> None:
    if progress is not None:
        step, _, detail = progress.step.partition(": ")
        display.show(step, replace(progress, step=detail) if progress.total else None)


def print_verification(document: VerificationDocument, model: str) -> None:
    from iserve.cli.render import console, correction_words, print_rows, short, workload_words

    where = "launched for the check" if document.deployment is None else f"deployment {document.deployment}"
    typer.echo(
        f"{document.model} on {document.hardware}: {short(document.config)} on {document.config.engine}, {where}, "
        f"{workload_words(document.workload)}"
    )
    header = ("", "predicted", "90% interval", "", "measured", "spread", "error", "inside")
    print_rows(header, [_row(metric) for metric in document.metrics])
    out = console()
    for method in dict.fromkeys(metric.method for metric in document.metrics):
        alike = [metric for metric in document.metrics if metric.method == method]
        repeats = f"; spread is the mean's 90% interval over {alike[0].repeats}" if alike[0].repeats > 1 else ""
        out.print(f"  {' and '.join(_NAMES[metric.name] for metric in alike)}: {method}{repeats}")
    for note in document.notes:
        out.print(f"note: {note}")
    if document.correction_before is not None:
        out.print(f"predictions include the correction {correction_words(document.correction_before)}")
    for sentence in _kept(document.metrics, model):
        out.print(sentence)


def _kept(metrics: tuple[MetricDocument, ...], model: str) -> list[str]:
    """Return what the check is good for: which figures of other answers it changes, and why not the rest."""
    corrected, vague = [], []
    for metric in metrics:
        name = _NAMES[metric.name].partition(",")[0]
        full, alone = f"{name} of the full batch", f"{name} of one request alone"
        timed = metric.measured_low is not None
        if metric.corrects and metric.corrects_single_request is not False:
            corrected.append(name)
        elif timed and not metric.corrects and not metric.corrects_single_request:
            vague.append(name)
        elif timed:
            corrected.append(full if metric.corrects else alone)
            vague.append(alone if metric.corrects else full)
    until = f"until `iserve verify {model} --forget`"
    if corrected:
        said = [f"kept: it corrects {', '.join(corrected)} in `iserve plan` and `report` {until}"]
    else:
        said = [f"kept {until}, but it corrects nothing"]
    if vague:
        said.append(
            f"not corrected, for what was read is less certain than what was predicted: {', '.join(vague)}"
        )
    return said


def _row(metric: MetricDocument) -> tuple[str, ...]:
    from iserve.cli.render import gib, seconds

    def figure(value: float | None) -> str:
        if value is None:
            return ""
        if metric.name == "kv_tokens":
            return f"{value:,.0f} tokens"
        return gib(value) if metric.name == "memory_bytes_per_gpu" else seconds(value)

    interval = f"[{figure(metric.low)}, {figure(metric.high)}]" if metric.high is not None else "at least that"
    spread = ""
    if metric.measured_low is not None:
        spread = f"[{figure(metric.measured_low)}, {figure(metric.measured_high)}]"
    return (
        _NAMES[metric.name],
        figure(metric.predicted),
        interval,
        "ordered" if metric.source is None else str(metric.source),
        "not reported" if metric.measured is None else figure(metric.measured),
        spread,
        "" if metric.error is None else f"{metric.error:+.1%}",
        "" if metric.within_interval is None else "yes" if metric.within_interval else "no",
    )
