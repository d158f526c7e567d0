"""Fine-tunes that deltas are made of: models, and adapters, which are merged into their base for as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fingerprint.delta import AdapterOrigin
from fingerprint.lora import content_sha256, merge_adapter
from fingerprint.safetensors_writer import scratch_directory
from iserve.model_source import ModelSource, resolve
from iserve.variants import adapter_in, delta_parts, is_adapter

__all__ = ["FineTune", "fine_tune"]

_MERGING = "MiB merged"


@dataclass(frozen=True, slots=True)
class FineTune:
    """Checkpoint whose differences from a base are to be kept."""

    name: str
    directory: Path
    has_weights: bool
    adapter: AdapterOrigin | None  # that was merged into the base; None: it is a model


@contextmanager
def fine_tune(
    finetuned: str,
    base: ModelSource,
    target: Path,
    registered: Mapping[str, Path],
    progress: Callable[[str, int, int], None] | None,
    check_base: Callable[[Path], None],
) -> Iterator[FineTune]:
    """Yield the fine-tune ``finetuned``: a MODEL argument, or the folder of an adapter of ``base``.

    An adapter is merged next to ``target``, into a checkpoint of the size of the base that is there while the
    block runs. What a killed command leaves is removed by the next, which merges again: that takes minutes where a
    compression takes hours.

    Args:
        check_base: raises where no delta of ``base`` is made, before an adapter is merged into it.

    Raises:
        BadInputError, UnavailableError: as ``model_source.resolve``, ``merge_adapter`` and ``check_base``.
    """
    if finetuned in registered or not is_adapter(finetuned):
        model = resolve(finetuned, registered)
        yield FineTune(model.name, model.directory, model.has_weights, None)
        return
    adapter = adapter_in(finetuned)
    check_base(base.directory)  # before a merge that is for nothing
    kinds = tuple(part.kind for part in delta_parts(adapter))

    def show(done: int, total: int) -> None:
        if progress is not None:
            progress(_MERGING, done >> 20, total >> 20)

    with scratch_directory(target.with_name(f"{target.name}.merged")) as scratch:
        directory = scratch / "model"
        merge_adapter(base.directory, adapter, directory, progress=show, durable=False)
        origin = AdapterOrigin(
            method=adapter.config.method, kinds=tuple(dict.fromkeys(kinds)), sha256=content_sha256(adapter)
        )
        yield FineTune(adapter.folder.name, directory, True, origin)
