"""Reading a PEFT adapter's folder: the changes of its base that its tensors hold.

The tensors say which modules are changed; ``adapter_config.json`` says by how much, and must agree. Only headers
are read but for :func:`check_values`. Nothing is unpickled, and no file outside the folder is opened.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from pathlib import Path

import numpy as np

from fingerprint.checkpoint import CHUNK_BYTES, SINGLE_FILE, Checkpoint, TensorEntry
from fingerprint.errors import CheckpointError, NotFoundError, UnsupportedAdapterError
from fingerprint.float_bytes import FLOAT_DTYPES, decode_floats
from fingerprint.folder_file import file_within
from fingerprint.lora.adapter_config import CONFIG_FILE, IA3, LORA, AdapterConfig, MergedPart, read_adapter_config
from fingerprint.lora.changes import Change, LoraModule, changes_of
from fingerprint.lora.tensor_kinds import merged_parts, sort_tensors, why_unsupported
from fingerprint.safetensors_header import INDEX_FILE

__all__ = [
    "WEIGHTS_FILE",
    "LoraAdapter",
    "LoraModule",
    "check_values",
    "content_sha256",
    "open_weights",
    "read_adapter",
    "require_mergeable",
    "require_supported",
]

WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt", "adapter_model.pth")
_MAX_NAME_CHARS = 500  # of a module
_MAX_SHOWN = 200  # characters of a name in a message
_AS_DELTA = "`iserve variant add` makes a delta of it, `iserve variant merge` a model"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.(lora_[AB])\.weight", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraAdapter:
    """A PEFT adapter on disk, as far as headers tell."""

    folder: Path
    config: AdapterConfig
    modules: tuple[LoraModule, ...]  # of linears, in the order of the names; empty where the method is not LoRA
    changes: tuple[Change, ...]  # of tensors of the base, these updates among them; empty where it is unsupported
    dtypes: tuple[str, ...]  # of all tensors, as safetensors names them
    num_params: int
    num_bytes: int  # of all tensors
    merged_only: tuple[MergedPart, ...]  # why it is merged and not served as an adapter; empty: a plain LoRA
    unsupported: tuple[str, ...]  # why it is not applied

    @property
    def max_rank(self) -> int:
        return max((module.rank for module in self.modules), default=0)


def read_adapter(folder: Path, *, max_rank: int | None = None) -> LoraAdapter:
    """Return the adapter in ``folder``.

    Args:
        max_rank: ranks above are among what is not supported; None: any.

    Raises:
        NotFoundError: no such folder, or no adapter in it.
        ConfigError: ``adapter_config.json`` cannot be read, or has a field of a wrong type or value.
        CheckpointError: no safetensors file (pickle is never loaded), one that is truncated or contradicts itself
            or the configuration, or a file that lies outside the folder.
        UnsupportedAdapterError: expressions in a pattern that are not matched.
    """
    config = read_adapter_config(_own_file(folder, CONFIG_FILE))
    tensors, file = open_weights(folder).tensors, folder / WEIGHTS_FILE
    modules = _modules(tensors, config, file) if config.method == LORA else ()
    is_known, found = config.method in (LORA, IA3), sort_tensors(tensors)
    unsupported = [*config.unsupported, *(why_unsupported(found, config) if is_known else ())]
    if is_known and not tensors:
        unsupported.append(f"{WEIGHTS_FILE} has no tensor; train the adapter, and save it again")
    changes = () if unsupported else changes_of(found, modules, tensors, config, file)
    high = max(modules, key=lambda module: module.rank, default=None)
    if max_rank is not None and high is not None and high.rank > max_rank:
        unsupported.append(f"{high.name} has rank {high.rank}, at most {max_rank} is allowed; merge it")
    return LoraAdapter(
        folder=folder,
        config=config,
        modules=modules,
        changes=changes,
        dtypes=tuple(sorted({entry.dtype for entry in tensors.values()})),
        num_params=sum(prod(entry.shape) for entry in tensors.values()),
        num_bytes=sum(entry.num_bytes for entry in tensors.values()),
        merged_only=tuple(merged_parts(found, config)) if is_known else (),
        unsupported=tuple(unsupported),
    )


def require_mergeable(adapter: LoraAdapter) -> None:
    """Raise UnsupportedAdapterError with the first reason why no merge computes ``adapter``, if there is one."""
    if adapter.unsupported:
        more = len(adapter.unsupported) - 1
        raise UnsupportedAdapterError(f"{adapter.folder} cannot be merged: {adapter.unsupported[0]}{_rest(more)}")


def require_supported(adapter: LoraAdapter) -> None:
    """Raise UnsupportedAdapterError with the first reason why ``adapter`` is no plain LoRA, if there is one."""
    merged = [f"{part.why}; {_AS_DELTA}" for part in adapter.merged_only]
    reasons = (*adapter.unsupported, *merged)
    if reasons:
        raise UnsupportedAdapterError(
            f"{adapter.folder} is not a plain LoRA: {reasons[0]}{_rest(len(reasons) - 1)}"
        )


def _rest(more: int) -> str:
    return f" ({more} more: `iserve variant inspect`)" if more else ""


def check_values(adapter: LoraAdapter) -> None:
    """Read all values of ``adapter``, in small pieces.

    Raises:
        CheckpointError: one is NaN or infinite, or the file changed since its header was read.
    """
    weights = open_weights(adapter.folder)
    for name, entry in weights.tensors.items():
        for piece in weights.chunks(name) if entry.dtype in FLOAT_DTYPES else ():
            if not np.isfinite(decode_floats(piece, entry.dtype)).all():
                raise CheckpointError(
                    f"tensor {name[:_MAX_SHOWN]!r} of {adapter.folder / WEIGHTS_FILE} has NaN or infinite values; "
                    "the training diverged, or the file is damaged: take an earlier one"
                )


def content_sha256(adapter: LoraAdapter) -> str:
    """Return the hash of all that ``adapter`` computes: of its configuration and its file of tensors.

    Raises:
        NotFoundError, CheckpointError: a file is gone, or lies outside the folder.
    """
    digest = sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        file = _own_file(adapter.folder, name)
        digest.update(f"{name} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(CHUNK_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def open_weights(folder: Path) -> Checkpoint:
    """Return the tensors of the adapter in ``folder``; errors of :func:`read_adapter`."""
    return Checkpoint.of_file(_own_file(folder, WEIGHTS_FILE))


def _own_file(folder: Path, name: str) -> Path:
    """Return the file ``name`` of ``folder``. Links may lead within the folder, and to the blobs of a hub's cache.

    Raises:
        NotFoundError, CheckpointError: it is not there, or lies outside.
    """
    if not folder.is_dir():
        raise NotFoundError(f"there is no directory {folder}; give the folder of an adapter")
    if not os.path.lexists(folder / name):
        raise _why_missing(folder, name)
    return file_within(folder, name, "adapter")


def _why_missing(folder: Path, name: str) -> NotFoundError | CheckpointError:
    try:
        names = set(os.listdir(folder))
    except OSError as error:
        return CheckpointError(f"cannot read {folder}: {error.strerror}")
    pickles = sorted(names.intersection(_PICKLES))
    if name == WEIGHTS_FILE and pickles:
        return CheckpointError(
            f"{folder} has its weights as pickle only ({pickles[0]}), which is never loaded; save it again with "
            "safe_serialization=True"
        )
    if name == WEIGHTS_FILE:
        return NotFoundError(f"{folder} has {CONFIG_FILE} and no {WEIGHTS_FILE}; fetch it, in one file")
    if "config.json" in names and names.intersection((SINGLE_FILE, INDEX_FILE)):
        return NotFoundError(
            f"{folder} is a whole model, not an adapter: it has no {CONFIG_FILE}; deploy it as it is: "
            f"iserve deploy {shlex.quote(str(folder))}; or compress it (iserve variant compress), add its delta"
        )
    return NotFoundError(f"{folder} has no {CONFIG_FILE}; give the folder that PEFT's save_pretrained wrote")


def _modules(tensors: Mapping[str, TensorEntry], config: AdapterConfig, file: Path) -> tuple[LoraModule, ...]:
    """Return the checked updates; none where they differ from a plain LoRA's for a reason that is known."""
    try:
        return tuple(_checked_modules(tensors, config, file))
    except (CheckpointError, UnsupportedAdapterError):
        if config.unsupported:
            return ()
        raise


def _checked_modules(
    tensors: Mapping[str, TensorEntry], config: AdapterConfig, file: Path
) -> Iterator[LoraModule]:
    pairs: dict[str, dict[str, TensorEntry]] = {}
    for tensor, entry in tensors.items():
        found = _FACTOR.fullmatch(tensor)
        if found is not None:
            pairs.setdefault(found[1], {})[found[2]] = entry
    names = sorted(pairs)
    longest = max(names, key=len, default="")
    if len(longest) > _MAX_NAME_CHARS:
        raise CheckpointError(
            f"{file} names a module of {len(longest)} characters ({longest[:_MAX_SHOWN]!r}...), at most "
            f"{_MAX_NAME_CHARS} are read; fetch it again"
        )
    ranks = config.rank_pattern.of_modules(names, config.rank)
    alphas = config.alpha_pattern.of_modules(names, config.alpha)
    for name, rank, alpha in zip(names, ranks, alphas, strict=True):
        module = _module(name, pairs[name], config.scale(int(rank), alpha), file)
        if module.rank != rank:
            raise CheckpointError(
                f"{name[:_MAX_SHOWN]!r} of {file} has rank {module.rank}, {CONFIG_FILE} says {int(rank)}; the two "
                "files are not of one adapter, fetch both again"
            )
        if not config.targets.contain(name):
            raise CheckpointError(
                f"{file} updates {name[:_MAX_SHOWN]!r}, which {CONFIG_FILE} does not name among its "
                "target_modules; the two files are not of one adapter, fetch both again"
            )
        yield module


def _module(name: str, pair: Mapping[str, TensorEntry], scale: float, file: Path) -> LoraModule:
    missing = {"lora_A", "lora_B"} - pair.keys()
    if missing:
        raise CheckpointError(
            f"{file} has no {missing.pop()} for {name[:_MAX_SHOWN]!r}, whose other half is there; save it again"
        )
    a, b = pair["lora_A"], pair["lora_B"]
    if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1] or 0 in a.shape + b.shape:
        raise CheckpointError(
            f"{name[:_MAX_SHOWN]!r} of {file} has lora_A {list(a.shape)} and lora_B {list(b.shape)}; they must be "
            "[rank, inputs] and [outputs, rank]: a sharded training has to gather them before it saves"
        )
    odd = next((entry.dtype for entry in (a, b) if entry.dtype not in FLOAT_DTYPES), None)
    if odd is not None:
        raise CheckpointError(
            f"{name[:_MAX_SHOWN]!r} of {file} is of {odd}; known are {', '.join(FLOAT_DTYPES)}: convert it"
        )
    return LoraModule(name, a.shape[0], scale, a.shape[1], b.shape[0])
