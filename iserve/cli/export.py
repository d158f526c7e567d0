"""``deploy --export`` and ``plan --as``: the worker that a deploy would start, as files and commands for other
tools. Starts no worker."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError, ConflictError
from fingerprint.output_file import output_file, write_output
from iserve.cli import gpu_options as g
from iserve.cli import options as o
from iserve.cli.groups import checked

if TYPE_CHECKING:
    from fingerprint.gpu_spec import GpuSpec
    from iserve.api_types import LaunchBody
    from iserve.export.worker_container import ExportedWorker
    from iserve.planning.worker_launch import LaunchDocument

__all__ = [
    "AsKind",
    "AsOption",
    "Export",
    "export",
    "print_as",
]

_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class ExportKind(StrEnum):
    COMPOSE = "compose"
    K8S = "k8s"

    @property
    def default_output(self) -> Path:
        return Path(f"{'compose' if self is ExportKind.COMPOSE else 'k8s'}.yaml")


class AsKind(StrEnum):
    VLLM = "vllm"
    DOCKER = "docker"
    COMPOSE = "compose"
    K8S = "k8s"

    @property
    def is_file(self) -> bool:
        """True when it is an export's file, not a command."""
        return self.value in tuple(ExportKind)


AsOption = Annotated[
    AsKind | None,
    typer.Option(
        "--as",
        help="Print only the ready command (vllm, docker) or file (compose, k8s) of what a deploy would start.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Export:
    """Options on what to write in place of a deployment, where to and with what. As typed."""

    export: Annotated[
        ExportKind | None,
        typer.Option("--export", help="Write what starts the same worker there; deploy nothing."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="With --export: the file, a new one; else compose.yaml or k8s.yaml."),
    ] = None
    gpus: Annotated[
        str | None,
        typer.Option("--gpus", help="With --export: for these instead, such as a6000:8. Needs no GPU."),
    ] = None
    gpu_file: g.GpuFile = None
    image: Annotated[
        str | None,
        typer.Option("--image", help="With --export: instead of the engine's own of the planned release."),
    ] = None
    volume: Annotated[
        str | None,
        typer.Option(
            "--volume",
            help="With --export: the checkpoint's folder there (compose; else that of MODEL), or the claim that "
            "has it (k8s; else the deployment's name and -model).",
        ),
    ] = None

    @property
    def there(self) -> tuple[GpuSpec, int] | None:
        """Kind and number of GPUs elsewhere; None: this node's. Raises typer.BadParameter."""
        return g.named_gpus(self.gpus, self.gpu_file)

    def check(self, *others: tuple[str, bool, str]) -> None:
        """Refuse what does not go together.

        Args:
            others: options of the deployment: a name, whether it is given, and why nothing is exported with it.
        """
        if self.export is None:
            own = {"--output": self.output, "--gpus": self.gpus, "--gpu-file": self.gpu_file}
            own |= {"--image": self.image, "--volume": self.volume}
            if alone := [option for option, value in own.items() if value is not None]:
                raise typer.BadParameter(f"{', '.join(alone)} goes with --export")
            return
        for option, is_given, why in others:
            if is_given:
                raise typer.BadParameter(f"{why}; leave {option} out")


def export(
    asked: Export,
    kind: ExportKind,
    request: LaunchBody,
) -> None:
    """Plan as a deploy does, and write.

    Raises:
        typer.BadParameter: several replicas in a Compose file.
        InfeasibleError: a deploy would be refused.
        NotMeasuredError: a deploy would measure first.
        ConflictError: the file is there already.
    """
    from daemon.engines.registry import get_engine
    from iserve.export.worker_container import exported_worker
    from iserve.settings import load_settings

    output = asked.output or kind.default_output
    _check_target(output)
    if asked.volume is not None:
        with o.usage_errors("--volume"):
            _check_volume(kind, asked.volume)
    if kind is ExportKind.COMPOSE:
        request = _alone("a Compose file", request)
    settings = load_settings()
    there = asked.there
    launch = _launch(there, request)
    worker = exported_worker(
        launch,
        get_engine(launch.worker.config.engine),
        elsewhere=there is not None,
        start_timeout_s=settings.start_timeout_s,
        image=asked.image,
    )
    write_output(output, _text(kind, worker, asked.volume), replaces=False)
    start = "docker compose -f {} up" if kind is ExportKind.COMPOSE else "kubectl apply -f {}"
    typer.echo(f"{output}: {launch.worker.config} on {worker.image}, not run here; start it with")
    typer.echo(f"  {start.format(output)}")


def print_as(
    kind: AsKind,
    there: tuple[GpuSpec, int] | None,
    request: LaunchBody,
) -> None:
    """Plan as a deploy does; the command or file goes to standard output, what it is to standard error.

    Raises:
        typer.BadParameter: several replicas of what starts one worker, or another engine's command.
        InfeasibleError: a deploy would be refused.
        NotMeasuredError: a deploy would measure first.
    """
    from daemon.engines.registry import get_engine
    from iserve.export.command import docker_command, server_command
    from iserve.export.worker_container import exported_worker
    from iserve.settings import load_settings

    if kind is not AsKind.K8S:
        request = _alone("a Compose file" if kind is AsKind.COMPOSE else "a command", request)
    if kind is AsKind.VLLM:
        if request.engine not in ("auto", "vllm"):
            raise typer.BadParameter(
                f"vllm's command starts no {request.engine}; leave --engine out, or take docker"
            )
        request = replace(request, engine="vllm")
    launch = _launch(there, request)
    worker = exported_worker(
        launch,
        get_engine(launch.worker.config.engine),
        elsewhere=there is not None,
        start_timeout_s=load_settings().start_timeout_s,
        bare=kind is AsKind.VLLM,
    )
    if kind.is_file:  # which has the remarks in its head
        typer.echo(_text(ExportKind(kind.value), worker, None), nl=False)
        return
    for remark in worker.remarks:
        typer.echo(f"# {remark}", err=True)
    typer.echo((server_command if kind is AsKind.VLLM else docker_command)(worker), nl=False)


def _alone(what: str, request: LaunchBody) -> LaunchBody:
    """Return the request for one replica. Raises typer.BadParameter: more were asked for."""
    if request.replicas is not None and request.replicas > 1:
        raise typer.BadParameter(
            f"{what} starts one worker on one port, {request.replicas} were asked for; export them as k8s, or "
            "leave --replicas out and start it elsewhere too",
            param_hint="'--replicas'",
        )
    return replace(request, replicas=1)


def _launch(there: tuple[GpuSpec, int] | None, request: LaunchBody) -> LaunchDocument:
    """Return the launch by the stored profile on what is free here, or by datasheets on GPUs that are not here."""
    from iserve.cli.connection import client_for_plan, registered_models, with_model_arguments
    from iserve.demo import DEMO_MODEL_NAME
    from iserve.planning.offline import launch_for_gpus
    from iserve.planning.worker_launch import LaunchDocument
    from iserve.settings import load_settings

    settings = load_settings()
    if there is None:
        request = with_model_arguments(request, request.model, settings)
        return client_for_plan(settings).post("/api/v1/plans/launch", request.given(), LaunchDocument)
    model = request.model or DEMO_MODEL_NAME
    return launch_for_gpus(
        model,
        *there,
        checked(request, settings),
        request.engine,
        name=request.name,
        registered=registered_models(model, settings),
        engine_options=request.engine_options,
    )


def _text(kind: ExportKind, worker: ExportedWorker, volume: str | None) -> str:
    if kind is ExportKind.COMPOSE:
        from iserve.export.compose import compose_file

        return compose_file(worker, volume or worker.checkpoint)
    from iserve.export.kubernetes import kubernetes_objects

    return kubernetes_objects(worker, volume or f"{worker.label}-model")


def _check_volume(kind: ExportKind, volume: str) -> None:
    if kind is ExportKind.COMPOSE:
        if not os.path.isabs(volume) or not volume.isprintable():
            raise ConfigError(f"the folder {volume[:200]!r} must be a whole path on the machine that runs it")
    elif not _CLAIM.fullmatch(volume):
        raise ConfigError(f"the claim {volume[:80]!r} must be lower-case letters, digits, '-' and '.'")


def _check_target(target: Path) -> None:
    """Check, before anything slow, whether a new file can be put there."""
    with o.usage_errors("--output"):
        output_file(target)
    if target.is_symlink() or target.exists():
        raise ConflictError(f"{target} is there already; remove it or give another file with --output")
