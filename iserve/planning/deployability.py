"""Check of whether this machine could run what was planned for GPUs that need not be here. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from daemon.nvml import gpu_names
from fingerprint.capability import PLANNED_ONLY, EngineCapabilities
from fingerprint.config import DeploymentConfig
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import match_device
from fingerprint.model_spec import ModelSpec
from iserve.planning.words import devices

__all__ = ["DeployableDocument", "deployable", "deployable_now", "gpus_here"]

_NO_WEIGHTS = "only the model's config.json is here, not its weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployableDocument:
    """Deployability of the chosen configuration here, and all that is missing where it cannot be deployed."""

    here: bool
    """Whether the configuration can be deployed on this machine."""
    missing: tuple[str, ...] = ()
    """Requirements that are missing here."""


def gpus_here() -> Mapping[str, int]:
    """Return the number of GPUs on this machine, by name in the datasheet table or the driver's name."""
    names = gpu_names()
    specs = [match_device(name) for name in names]
    return Counter(name if spec is None else spec.name for spec, name in zip(specs, names, strict=True))


def deployable_now(*, has_weights: bool) -> DeployableDocument:
    """Judge what was planned for this machine's devices, on an engine that is installed."""
    return DeployableDocument(here=has_weights, missing=() if has_weights else (_NO_WEIGHTS,))


def deployable(
    spec: ModelSpec,
    config: DeploymentConfig,
    gpu: GpuSpec,
    tables: Sequence[EngineCapabilities],
    found: Mapping[str, int],
    *,
    replicas: int = 1,
    has_weights: bool,
) -> DeployableDocument:
    """Judge ``config`` on ``gpu`` by what is installed and present here.

    Args:
        tables: of the engines; the one that ``config`` names among them.
        found: GPUs of this machine (:func:`gpus_here`).
        has_weights: the checkpoint's weights are here, not only its config.json.
    """
    table = next(table for table in tables if table.engine == config.engine)
    needed = config.num_gpus * replicas
    if gpu.vendor in PLANNED_ONLY:
        return DeployableDocument(here=False, missing=(PLANNED_ONLY[gpu.vendor],))
    missing = []
    if found.get(gpu.name, 0) < needed:
        there = ", ".join(f"{count} {devices(name, count)}" for name, count in found.items())
        asked = f"it takes {needed} {devices(gpu.name, needed)}"
        missing.append(f"{asked}, {f'this machine has {there}' if there else 'no GPU is seen here'}")
    if table.unavailable is not None:
        missing.append(table.unavailable)
    missing += [note.text for note in table.notes if note.needs_another(spec, config, gpu)]
    if not has_weights:
        missing.append(_NO_WEIGHTS)
    return DeployableDocument(here=not missing, missing=tuple(missing))
