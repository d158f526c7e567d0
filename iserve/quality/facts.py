"""Facts of a model that this home serves: its weights' hash, its configuration, its engine's release."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fingerprint.checkpoint import Checkpoint
from fingerprint.errors import IserveError
from iserve.quality.document import ModelFacts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from iserve.client import ControllerClient

__all__ = ["model_facts", "tensors_sha256"]


def tensors_sha256(folder: Path) -> str:
    """Return the hash of a checkpoint's tensors, the same however they are divided into files."""
    checkpoint, digest = Checkpoint.open(folder), hashlib.sha256()
    for name, entry in sorted(checkpoint.tensors.items()):
        digest.update(f"{name}\0{entry.dtype}\0{entry.shape}\0".encode())
        for piece in checkpoint.chunks(name):
            digest.update(piece)
    return digest.hexdigest()


def model_facts(name: str, controller: ControllerClient, registered: Mapping[str, Path]) -> ModelFacts:
    """Return what the home knows of the deployment or variant ``name``; only its name where there is none."""
    from iserve.api_documents import VariantDocument

    try:
        variant = controller.get(f"/api/v1/variants/{name}", VariantDocument)
    except IserveError:
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
        sha256 = tensors_sha256(folder)
    except IserveError:
        return ModelFacts(name=name)
    config = deployed.config
    used = (e.version for e in engines if config is not None and e.engine == config.engine and e.is_used)
    return ModelFacts(
        name=name, checkpoint=str(folder), sha256=sha256, config=config, engine_version=next(used, None)
    )
