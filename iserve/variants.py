"""Variants of a base model: what an adapter is, whether it fits a base or can be served, and its merge.

Commands' and controller's one door to ``fingerprint.lora``: it finds the base as every MODEL argument is found.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fingerprint.checkpoint import Checkpoint, stored_tensors
from fingerprint.companion_files import differing_companions
from fingerprint.config import ADAPTER_RANKS
from fingerprint.config_json import read_config
from fingerprint.delta import Delta, check_base, is_delta, read_delta
from fingerprint.errors import (
    BadInputError,
    CheckpointError,
    IserveError,
    NotFoundError,
    UnsupportedAdapterError,
)
from fingerprint.lora import (
    BaseTensors,
    LoraAdapter,
    MergedPart,
    check_fit,
    check_values,
    merge_adapter,
    read_adapter,
    require_supported,
)
from fingerprint.lora.adapter_config import CONFIG_FILE
from iserve.model_source import ModelSource, existing_path, is_hub_id, plain_path, resolve

__all__ = [
    "AdapterDocument",
    "AdapterModuleDocument",
    "MergeDocument",
    "adapter_for_serving",
    "adapter_in",
    "delta_parts",
    "inspect_adapter",
    "is_adapter",
    "kept_as_delta",
    "merge_variant",
    "variant_for_serving",
]

# Modules that engines keep without room for an update.
_HEADS_AND_EMBEDDINGS = frozenset({"lm_head", "embed_out", "embed_tokens", "embed_in", "tok_embeddings", "wte"})


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterModuleDocument:
    """Update of one matrix of the base."""

    name: str
    """Name of the module within the base."""
    rank: int
    """Rank of the update."""
    scale: float
    """Factor of the product of its two matrices."""
    in_features: int
    """Inputs of the base's matrix."""
    out_features: int
    """Outputs of the base's matrix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterDocument:
    """Content of an adapter, and what can be done with it."""

    folder: str
    """Folder of the adapter."""
    method: str
    """PEFT's name of the method, such as LORA."""
    trained_on: str | None
    """Base model that the adapter's configuration names; not checked."""
    modules: tuple[AdapterModuleDocument, ...]
    """Updated matrices; empty where the method is not a LoRA that is understood."""
    num_params: int
    """Parameters of the adapter."""
    size_bytes: int
    """Bytes of its tensors."""
    dtypes: tuple[str, ...]
    """Types of its tensors, as safetensors names them."""
    base: str | None
    """Base that it was compared with; null: none was given."""
    can_merge: bool
    """Whether it can be merged, into the given base where there is one."""
    why_not_merged: tuple[str, ...]
    """Every reason why it cannot be merged, each with the way out."""
    can_serve: bool
    """Whether an engine can load it next to its base, unmerged."""
    why_not_served: str | None
    """Reasons why no engine can; null: an engine with adapter slots of its rank can."""
    becomes_delta: bool
    """Whether `iserve variant add` makes a delta of it, as it can be merged and no engine serves it unmerged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeDocument:
    """Checkpoint that a merge wrote."""

    folder: str
    """Folder of the merged checkpoint."""
    base: str
    """Model that the adapter was merged into."""
    adapter: str
    """Folder of the adapter."""
    trained_on: str | None
    """Base model that the adapter's configuration names; not checked."""
    num_merged: int
    """Tensors that were changed."""
    num_tensors: int
    """Tensors of the checkpoint."""
    num_files: int
    """Safetensors files of the checkpoint."""
    size_bytes: int
    """Bytes of its tensors."""
    files_not_taken: tuple[str, ...]
    """Tokenizer files of the adapter's folder that differ from the base's, which were kept."""


def inspect_adapter(adapter: str, base: str | None, registered: Mapping[str, Path]) -> AdapterDocument:
    """Return what the adapter in the folder ``adapter`` is, and whether it fits ``base``, a MODEL argument.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedAdapterError: as ``fingerprint.lora.read_adapter``;
            values that are not finite; ``base`` is not found (``model_source.resolve``).
    """
    found = adapter_in(adapter)
    check_values(found)
    not_served = "; ".join(part.why for part in delta_parts(found)) or None
    reasons = list(found.unsupported)
    if base is not None:
        tensors = _base_tensors(resolve(base, registered, need_weights=False))
        try:
            check_fit(found, tensors)
        except BadInputError as error:
            reasons.append(str(error))
    return AdapterDocument(
        folder=str(found.folder),
        method=found.config.method,
        trained_on=found.config.base_model,
        modules=tuple(
            AdapterModuleDocument(
                name=module.name,
                rank=module.rank,
                scale=module.scale,
                in_features=module.in_features,
                out_features=module.out_features,
            )
            for module in found.modules
        ),
        num_params=found.num_params,
        size_bytes=found.num_bytes,
        dtypes=found.dtypes,
        base=base,
        can_merge=not reasons,
        why_not_merged=tuple(reasons),
        can_serve=not reasons and not_served is None,
        why_not_served="for the same reasons" if reasons else not_served,
        becomes_delta=not reasons and not_served is not None,
    )


def variant_for_serving(path: str, base: ModelSource) -> LoraAdapter | Delta:
    """Return the adapter or the delta in the folder ``path``, all of it checked, to be served next to ``base``.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedAdapterError: as :func:`adapter_for_serving` and
            ``read_delta``; a delta was made of another base, or changes nothing.
    """
    folder = existing_path(path)
    if folder is None or not is_delta(folder if folder.is_dir() else folder.parent):
        return adapter_for_serving(path, base)
    delta = read_delta(_adapter_folder(path))
    if not delta.manifest.changed:
        raise CheckpointError(f"the delta in {delta.folder} changes nothing; ask for the base itself")
    if not base.has_weights:
        raise _no_weights(base)
    check_base(Checkpoint.open(base.directory), delta.manifest)
    return delta


def adapter_for_serving(adapter: str, base: ModelSource) -> LoraAdapter:
    """Return the adapter in the folder ``adapter``, all of it checked, which an engine can load next to ``base``.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedAdapterError: as ``inspect_adapter``; it is not a
            plain LoRA, is of another base, or cannot be served.
    """
    found = adapter_in(adapter)
    require_supported(found)
    parts = delta_parts(found)
    if parts:
        raise UnsupportedAdapterError(
            f"{found.folder} cannot be served next to its base: {parts[0].why}; `iserve variant add` makes a "
            "delta of it, `iserve variant merge` a model"
        )
    check_fit(found, _base_tensors(base))
    check_values(found)
    return found


def delta_parts(adapter: LoraAdapter) -> tuple[MergedPart, ...]:
    """Return what no engine serves of ``adapter``, which is kept as a delta then; empty: an engine serves it."""
    return (*adapter.merged_only, *_parts_without_slots(adapter))


def _parts_without_slots(adapter: LoraAdapter) -> Iterator[MergedPart]:
    for name in (module.name for module in adapter.modules):
        if name.rpartition(".")[2] in _HEADS_AND_EMBEDDINGS:
            yield MergedPart(
                "output layer",
                f"it updates {name[:200]}, and engines have adapter slots for the matrices of layers only",
            )
            break
    if adapter.max_rank > ADAPTER_RANKS[-1]:
        ranks = ", ".join(map(str, ADAPTER_RANKS))
        yield MergedPart(
            f"rank {adapter.max_rank}",
            f"its rank is {adapter.max_rank}, and engines have adapter slots of ranks {ranks}",
        )


def is_adapter(folder: str) -> bool:
    """Return whether a folder has the configuration of an adapter."""
    path = existing_path(folder)
    return path is not None and path.is_dir() and (path / CONFIG_FILE).exists()


def kept_as_delta(folder: str) -> tuple[MergedPart, ...] | None:
    """Return why ``variant add`` makes a delta of the adapter in ``folder``.

    Empty: it is no adapter, or one that an engine serves. None: it is refused, and the controller says why.
    """
    if not is_adapter(folder):
        return ()
    try:
        adapter = adapter_in(folder)
    except IserveError:
        return None
    return None if adapter.unsupported else delta_parts(adapter)


def merge_variant(
    base: str,
    adapter: str,
    target: str,
    registered: Mapping[str, Path],
    progress: Callable[[int, int], None] | None = None,
) -> MergeDocument:
    """Write to the folder ``target`` the model of ``base``, a MODEL argument, with ``adapter`` merged into it.

    Raises:
        NotFoundError: a folder that is not there.
        BadInputError, ConflictError, UnavailableError: as ``fingerprint.lora.merge_adapter`` and
            ``model_source.resolve``.
    """
    found = adapter_in(adapter)
    folder = Path(plain_path(os.path.realpath(os.path.expanduser(target))))
    source = resolve(base, registered)
    if not source.has_weights:
        raise _no_weights(source)
    merged = merge_adapter(source.directory, found, folder, progress=progress)
    return MergeDocument(
        folder=str(folder),
        base=source.name,
        adapter=str(found.folder),
        trained_on=found.config.base_model,
        num_merged=merged.num_merged,
        num_tensors=merged.num_tensors,
        num_files=merged.num_files,
        size_bytes=merged.bytes_written,
        files_not_taken=differing_companions(found.folder, source.directory),
    )


def adapter_in(path: str) -> LoraAdapter:
    """Return the adapter in the folder ``path``.

    Raises:
        NotFoundError, ConfigError, CheckpointError, UnsupportedAdapterError: as ``fingerprint.lora.read_adapter``;
            it is a delta.
    """
    folder = _adapter_folder(path)
    if is_delta(folder):
        shown = shlex.quote(path[:200])
        raise UnsupportedAdapterError(
            f"{folder} is the delta of a full fine-tune, not an adapter: serve it next to its base "
            f"(`iserve variant add NAME --base BASE {shown}`), or write both out as a model "
            f"(`iserve variant export BASE {shown} OUT`)"
        )
    return read_adapter(folder)


def _adapter_folder(adapter: str) -> Path:
    path = existing_path(adapter)
    if path is not None:
        return Path(plain_path(str(path if path.is_dir() else path.parent)))
    fetch = (
        f"; fetch it from the hub first: hf download {adapter} --local-dir FOLDER" if is_hub_id(adapter) else ""
    )
    raise NotFoundError(f"there is no directory {adapter[:200]!r}; give the folder of an adapter{fetch}")


def _base_tensors(source: ModelSource) -> BaseTensors:
    """Return what headers say of a base, on the hub where its weights are not here."""
    if source.has_weights:
        tensors = stored_tensors(source.directory)
    elif source.given is None and is_hub_id(source.name) and source.directory.parent.name == "snapshots":
        from iserve.hub_tensors import hub_tensors  # asyncio, for bases on a hub only

        found = hub_tensors(source.name, source.directory)
        if found is None:
            raise CheckpointError(f"{source.name} has no safetensors on the hub; give a base that has")
        tensors = found
    else:
        raise _no_weights(source)
    return BaseTensors(str(source.directory), read_config(source.directory), tensors)


def _no_weights(source: ModelSource) -> CheckpointError:
    return CheckpointError(
        f"{source.directory} has a config and no weights; give the whole checkpoint of the base"
    )
