"""Names of models for people: a variant's merged checkpoint is in a folder whose name is a hash."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from iserve.api_documents import ModelDocument
from iserve.merged_keys import is_merged
from iserve.model_source import ModelSource
from iserve.state.rows import DeploymentRow
from iserve.state.variant_table import VariantTable

__all__ = ["merged_variant", "model_document", "with_variant_name"]


def with_variant_name(source: ModelSource, variants: VariantTable) -> ModelSource:
    """Return ``source`` under the name of the variant whose merged checkpoint it is, if it is one."""
    variant = variants.merged_in(source.directory)
    return source if variant is None else replace(source, name=variant.name, merged_into=variant.base)


def merged_variant(
    row: DeploymentRow, variants: VariantTable, folder: Path
) -> tuple[str, str | None] | tuple[None, None]:
    """Return the variant whose merged checkpoint in ``folder`` a deployment serves, and its base's name.

    The base is None where the variant was removed; both are where the deployment serves something else.
    """
    return (row.name, variants.base_of(row.name)) if is_merged(row.request, folder) else (None, None)


def model_document(name: str, source: ModelSource) -> ModelDocument:
    return ModelDocument(
        name=name,
        directory=str(source.directory),
        family=source.spec.family,
        num_layers=source.spec.num_layers,
        num_params=source.spec.num_params,
        has_weights=source.has_weights,
    )
