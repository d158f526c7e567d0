"""Merge of a registered variant: its base is the register's, and its tensors are those of iServe's home."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from daemon.variants.store import VariantStore
from fingerprint.errors import ConflictError, NotFoundError
from iserve.deltas import ExportDocument, export_variant
from iserve.settings import Settings
from iserve.state.store import Store, VariantRow
from iserve.variants import MergeDocument, merge_variant

__all__ = ["merge_registered"]

Progress = Callable[[int, int], None]  # bytes done, bytes in all


def merge_registered(
    name: str,
    target: str,
    settings: Settings,
    progress: Progress | None = None,
    *,
    expected: tuple[str, str] | None = None,
) -> MergeDocument | ExportDocument:
    """Write to the folder ``target`` the base of the variant ``name`` with the variant in it; needs no controller.

    The folder that it was added from is not needed. Of a delta it is what ``export_variant`` writes.

    Args:
        expected: content hash and base folder; None: those that the variant has now.

    Raises:
        ConflictError: the variant has other content or another base than ``expected``; nothing is written.
        NotFoundError: no variant has that name, or its base has gone.
        BadInputError, ConflictError, UnavailableError: as ``merge_variant`` and ``export_variant``; a tensor in
            the store was changed.
    """
    row = _row(name, settings)
    if expected is not None and expected != (row.content_hash, row.base_directory):
        raise ConflictError(
            f"the variant {name} was replaced meanwhile, by other content or on another base; `iserve variant "
            f"show {name}` shows it, and the same command again merges it"
        )
    folder = VariantStore(settings.variant_folder).verified(row.content_hash)

    def go_on(done: int, total: int) -> None:
        with suppress(OSError):
            os.utime(folder)  # the store removes folders that were not asked for in a while
        if progress is not None:
            progress(done, total)

    if not row.max_rank:
        exported = export_variant(row.base_directory, str(folder), target, {}, go_on)
        return replace(exported, base=row.base, delta=row.name)
    merged = merge_variant(row.base_directory, str(folder), target, {}, go_on)
    return replace(merged, base=row.base, adapter=row.name, trained_on=row.trained_on)


def _row(name: str, settings: Settings) -> VariantRow:
    store = Store.read_only(settings.state)
    try:
        found = () if store.is_new() else store.variants.all()
    finally:
        store.close()
    row = next((row for row in found if row.name == name), None)
    if row is None:
        raise NotFoundError(
            f"no variant is named {name[:80]!r}; `iserve variant ls` lists them. An adapter in a folder is merged "
            "with three arguments: iserve variant merge BASE ADAPTER OUT"
        )
    return row
