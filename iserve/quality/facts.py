"""Facts of a model that this home serves: its weights' hash, its configuration, its engine's release."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import CheckpointError, IserveError
from iserve.quality.document import ModelFacts
from iserve.quality.kept_file import KEPT_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iserve.client import ControllerClient

__all__ = ["model_facts", "tensors_sha256", "weights_stamp"]

_STAMPED = (".safetensors", ".json")  # weights, their index, what the model and its tokenizer are
_MOST_FILES = 10_000


def tensors_sha256(folder: Path) -> str:
    """Return the hash of a checkpoint's tensors, the same however they are divided into files."""
    checkpoint, digest = Checkpoint.open(folder), hashlib.sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode())
        for piece in checkpoint.chunks(name):
            digest.update(piece)
    return digest.hexdigest()


def weights_stamp(folder: Path) -> str:
    """Return a hash of names, sizes and times of a checkpoint's files, which takes no reading of them.

    The file of results next to the checkpoint is left out.

    Raises:
        CheckpointError: the folder cannot be read, or has too many files.
    """
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(_STAMPED) and name != KEPT_FILE)
        if len(names) > _MOST_FILES:
            raise CheckpointError(f"{folder} has {len(names):,} files; a checkpoint has {_MOST_FILES:,} at most")
        files = [(name, os.stat(folder / name)) for name in names]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}") from error
    found = [(name, status.st_size, status.st_mtime_ns) for name, status in files]
    return hashlib.sha256(repr(found).encode()).hexdigest()


def model_facts(name: str, controller: ControllerClient, registered: Mapping[str, Path]) -> ModelFacts:
    """Return what the home knows of the deployment or variant ``name``; only its name where there is none."""
    from iserve.api_documents import VariantDocument

    try:
        variant = controller.get(f"/api/v1/variants/{name}", VariantDocument)
    except IserveError:
        return _deployment_facts(name, controller, registered)
    if name in variant.deployments:  # its own, of its merged checkpoint
        return _deployment_facts(name, controller, registered)
    if not variant.deployments:
        return ModelFacts(name=name, variant_hash=variant.content_hash)
    facts = _deployment_facts(variant.deployments[0], controller, registered)
    return replace(facts, name=name, variant_hash=variant.content_hash)


def _deployment_facts(name: str, controller: ControllerClient, registered: Mapping[str, Path]) -> ModelFacts:
    from iserve.api_documents import DeploymentDocument, EngineDocument
    from iserve.model_source import resolve

    try:
        deployed = controller.get(f"/api/v1/deployments/{name}", DeploymentDocument)
        engines = controller.get("/api/v1/engines", tuple[EngineDocument, ...])
        folder = resolve(deployed.model, registered, need_weights=False).directory
        stamp, sha256 = weights_stamp(folder), tensors_sha256(folder)
    except IserveError:
        return ModelFacts(name=name)
    config = deployed.config
    used = (e.version for e in engines if config is not None and e.engine == config.engine and e.is_used)
    return ModelFacts(
        name=name,
        checkpoint=str(folder),
        sha256=sha256,
        weights_stamp=stamp,
        config=config,
        engine_version=next(used, None),
    )
