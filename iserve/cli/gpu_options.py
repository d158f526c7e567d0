"""Options on the GPUs of a plan, where they need not be here: ``--gpus`` and ``--gpu-file``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from iserve.cli import options as o

if TYPE_CHECKING:
    from fingerprint.gpu_spec import GpuSpec

__all__ = ["GpuFile", "named_gpus", "one_gpu"]

GpuFile = Annotated[
    Path | None,
    typer.Option(
        "--gpu-file",
        metavar="FILE.json",
        help="Describes a GPU that is not listed, by name for --gpus (docs/gpus.md); without that, one of it.",
    ),
]


def named_gpus(gpus: str | None, gpu_file: Path | None) -> tuple[GpuSpec, int] | None:
    """Return the kind and the number of GPUs; None where neither option was given: those of this machine."""
    from fingerprint.gpu_file import read_gpu_file
    from fingerprint.gpus import parse_gpus

    if gpu_file is None:
        if gpus is None:
            return None
        with o.usage_errors("--gpus"):
            return parse_gpus(gpus)
    with o.usage_errors("--gpu-file"):
        described = read_gpu_file(gpu_file)
        if gpus is None:
            return parse_gpus(described.name, described)
    with o.usage_errors("--gpus"):
        return parse_gpus(gpus, described)


def one_gpu(gpu: str | None, gpu_file: Path | None) -> GpuSpec:
    """Return the kind of GPU that ``--gpu`` names or the file describes; both only where they agree."""
    from fingerprint.gpus import gpu_spec

    if gpu is not None and gpu_file is None:
        with o.usage_errors("--gpu"):
            return gpu_spec(gpu)
    found = named_gpus(gpu, gpu_file)
    if found is None:
        raise typer.BadParameter("give one, such as h200, or describe it with --gpu-file", param_hint="'--gpu'")
    return found[0]
