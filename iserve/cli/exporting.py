"""``deploy --export``: the worker that a deploy would start, as files for other tools. Starts no worker."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fingerprint.errors import ConfigError, ConflictError, NotFoundError
from fingerprint.full_disk import why_not_written
from fingerprint.output_file import output_file
from iserve.cli import options as o

if TYPE_CHECKING:
    from iserve.export.worker import ExportedWorker
    from iserve.planning.launching import LaunchDocument

__all__ = ["Export", "ExportGpus", "ExportImage", "ExportOption", "ExportOutput", "ExportVolume", "export"]

_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


class ExportKind(StrEnum):
    COMPOSE = "compose"
    K8S = "k8s"

    @property
    def default_output(self) -> Path:
        return Path(f"{'compose' if self is ExportKind.COMPOSE else 'k8s'}.yaml")


ExportOption = Annotated[
    ExportKind | None, typer.Option("--export", help="Write what starts the same worker there; deploy nothing.")
]
ExportOutput = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="With --export: the file, a new one; else compose.yaml or k8s.yaml."),
]
ExportGpus = Annotated[
    str | None, typer.Option("--gpus", help="With --export: for these instead, such as a6000:8. Needs no GPU.")
]
ExportImage = Annotated[
    str | None, typer.Option("--image", help="With --export: instead of the engine's own of the planned release.")
]
ExportVolume = Annotated[
    str | None,
    typer.Option(
        "--volume",
        help="With --export: the checkpoint's folder there (compose; else that of MODEL), or the claim that has "
        "it (k8s; else the deployment's name and -model).",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Export:
    """Where to and with what. As typed."""

    kind: ExportKind
    output: Path | None
    gpus: str | None
    image: str | None
    volume: str | None


def export(asked: Export, model: str | None, name: str | None, wish: o.Wish, replicas: int) -> None:
    """Plan as a deploy does, and write.

    Raises:
        typer.BadParameter: several replicas in a Compose file.
        InfeasibleError: a deploy would be refused.
        NotMeasuredError: a deploy would measure first.
        ConflictError: the file is there already.
    """
    from daemon.engines.registry import get_engine
    from iserve.export.worker import exported_worker
    from iserve.settings import load_settings

    output = asked.output or asked.kind.default_output
    _check_target(output)
    if asked.volume is not None:
        with o.usage_errors("--volume"):
            _check_volume(asked.kind, asked.volume)
    if replicas > 1 and asked.kind is ExportKind.COMPOSE:
        raise typer.BadParameter(
            f"a Compose file starts one worker on one port, {replicas} were asked for; export them as k8s, or "
            "leave --replicas out and start the file elsewhere too",
            param_hint="'--replicas'",
        )
    settings = load_settings()
    launch = _launch(asked, model, name, wish, replicas)
    worker = exported_worker(
        launch,
        get_engine(launch.worker.config.engine),
        elsewhere=asked.gpus is not None,
        start_timeout_s=settings.start_timeout_s,
        image=asked.image,
    )
    _write_new(output, _text(asked, worker))
    start = "docker compose -f {} up" if asked.kind is ExportKind.COMPOSE else "kubectl apply -f {}"
    typer.echo(f"{output}: {launch.worker.config} on {worker.image}, not run here; start it with")
    typer.echo(f"  {start.format(output)}")


def _launch(asked: Export, model: str | None, name: str | None, wish: o.Wish, replicas: int) -> LaunchDocument:
    """By the stored profile on what is free here, or by datasheets on GPUs that are not here."""
    from fingerprint.gpus import parse_gpus
    from iserve.cli.live import client, model_argument, registered_models
    from iserve.demo import DEMO_MODEL_NAME
    from iserve.planning.hypothetical import launch_for_gpus
    from iserve.planning.launching import LaunchDocument
    from iserve.settings import load_settings

    settings = load_settings()
    options = o.replicated(wish.checked(settings), replicas)
    if asked.gpus is None:
        given = None if model is None else model_argument(model, settings)
        body = wish.body() | {"model": given, "name": name, "replicas": replicas}
        return client(settings).post("/api/v1/plans/launch", body, LaunchDocument)
    with o.usage_errors("--gpus"):
        gpu, count = parse_gpus(asked.gpus)
    model = model or DEMO_MODEL_NAME
    registered = registered_models(model, settings)
    return launch_for_gpus(model, gpu, count, options, wish.engine, name=name, registered=registered)


def _text(asked: Export, worker: ExportedWorker) -> str:
    if asked.kind is ExportKind.COMPOSE:
        from iserve.export.compose import compose_file

        return compose_file(worker, asked.volume or worker.checkpoint)
    from iserve.export.kubernetes import kubernetes_objects

    return kubernetes_objects(worker, asked.volume or f"{worker.label}-model")


def _check_volume(kind: ExportKind, volume: str) -> None:
    if kind is ExportKind.COMPOSE:
        if not os.path.isabs(volume) or not volume.isprintable():
            raise ConfigError(f"the folder {volume[:200]!r} must be a whole path on the machine that runs it")
    elif not _CLAIM.fullmatch(volume):
        raise ConfigError(f"the claim {volume[:80]!r} must be lower-case letters, digits, '-' and '.'")


def _check_target(target: Path) -> None:
    """Before anything slow: whether a new file can be put there."""
    with o.usage_errors("--output"):
        output_file(target)
    if target.is_symlink() or target.exists():
        raise ConflictError(f"{target} is there already; remove it or give another file with --output")


def _write_new(target: Path, text: str) -> None:
    """Put ``text`` there whole or not at all.

    Raises:
        NotFoundError: the directory cannot be written to.
        ConflictError: someone else has made the file meanwhile.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.absolute().parent, prefix=".export-", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
        temporary.chmod(0o644)
        os.link(temporary, target)
    except FileExistsError as error:
        raise ConflictError(f"{target} is there already; give another file with --output") from error
    except OSError as error:
        why = why_not_written(error, target.absolute().parent)
        raise NotFoundError(f"cannot write {target}: {why}") from error
    except UnicodeEncodeError as error:
        raise NotFoundError(f"cannot write {target}: {error}") from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
