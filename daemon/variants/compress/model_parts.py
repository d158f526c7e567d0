"""Parts that the changed tensors of a model belong to, which decide how their changes are kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from daemon.torch_engine.model.delta_parts import holds_exact, places_of
from daemon.torch_engine.model.stage_model import ModelSource, StageModel, StageShape, read_source
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.model.weights import WeightReader
from daemon.variants.compress.config_pair import check_configs
from daemon.variants.compress.pair import CheckpointPair
from fingerprint.config import WeightFormat
from fingerprint.errors import CheckpointError, EngineError, UnsupportedModelError

__all__ = ["ModelParts", "check_layers", "layer_stage", "read_common_source", "sort_parts"]

_MAX_SHOWN = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelParts:
    """Changed tensors of a model by part, each by its stored name."""

    source: ModelSource  # the fine-tune in float32
    layers: tuple[Mapping[str, str], ...]  # of each layer: changed linears, by the module's name in a stage of one
    embeddings: Mapping[str, str]  # by the module's name; a head that shares them, where it is stored too
    head: str | None
    exact: tuple[str, ...]  # norms and biases

    @property
    def num_matrices(self) -> int:
        return sum(map(len, self.layers)) + len(self.embeddings) + (self.head is not None)


def read_common_source(base: Path, finetuned: Path, device: torch.device) -> ModelSource:
    """Return the fine-tune's facts, in float32.

    Raises:
        CheckpointError: the configurations disagree.
        UnsupportedModelError: the embedded engine cannot run the model layer by layer.
    """
    source = read_source(finetuned, device, torch.float32)
    check_configs(read_source(base, device, torch.float32), source)
    _check_stages(source, "deploy it as a model of its own")
    return source


def check_layers(base: Path, device: torch.device) -> None:
    """Raise UnsupportedModelError, or errors of ``read_source``, where no adapter of ``base`` becomes a delta."""
    way_out = "merge the adapter (`iserve variant merge`) and deploy the result"
    _check_stages(read_source(base, device, torch.float32), way_out)


def _check_stages(source: ModelSource, way_out: str) -> None:
    try:
        layer_stage(source, 0)
    except EngineError as error:
        raise UnsupportedModelError(f"no delta can be made of {source.checkpoint}: {error}; {way_out}") from error


def sort_parts(source: ModelSource, pair: CheckpointPair) -> ModelParts:
    """Return the parts of the model of ``pair`` that were changed.

    Raises:
        CheckpointError: a matrix was changed that is none of these parts.
    """
    whole, layout = _stage(source, 0, source.spec.num_layers, is_first=True, is_last=True), source.layout
    with WeightReader(pair.base.directory, source.spec.family) as reader:
        layers = tuple(_changed_linears(whole, reader, pair, layer) for layer in range(source.spec.num_layers))
        vocabulary = {module: reader.stored_name(f"{module}.weight") for module in layout.embedding}
        head = reader.stored_name(f"{layout.stored_head or layout.head}.weight")
    if source.spec.tied_embeddings:
        vocabulary[layout.head], head = head, None
    embeddings = {module: name for module, name in vocabulary.items() if name in pair.changed}
    linears = {name for layer in layers for name in layer.values()}
    exact = sorted(pair.changed - linears - set(embeddings.values()) - {head})
    _check_exact(exact, pair, whole)
    return ModelParts(
        source=source,
        layers=layers,
        embeddings={module: str(name) for module, name in embeddings.items()},
        head=head if head in pair.changed else None,
        exact=tuple(exact),
    )


def layer_stage(source: ModelSource, layer: int) -> StageModel:
    """Return a layer as a stage of its own, on the meta device: the first with the embeddings, the last with final
    norm and head.

    Raises:
        EngineError: as :class:`StageModel`.
    """
    return _stage(source, layer, 1, is_first=layer == 0, is_last=layer == source.spec.num_layers - 1)


def _stage(source: ModelSource, first: int, count: int, *, is_first: bool, is_last: bool) -> StageModel:
    shape = StageShape(first, count, is_first, is_last)
    return StageModel(source, shape, WeightFormat.BITS16, TensorParallel(1, 0, {}))


def _changed_linears(
    whole: StageModel, reader: WeightReader, pair: CheckpointPair, layer: int
) -> Mapping[str, str]:
    prefix = f"{whole.source.layout.layers}."
    own, found = f"{prefix}{layer}.", {}
    for module in whole.linears:
        stored = reader.stored_name(f"{module}.weight") if module.startswith(own) else None
        if stored in pair.changed:
            found[f"{prefix}0.{module.removeprefix(own)}"] = str(stored)
    return found


def _check_exact(names: Sequence[str], pair: CheckpointPair, whole: StageModel) -> None:
    """Raise CheckpointError unless each tensor is a norm's or the bias of a linear, which engines can replace."""
    places = places_of(whole) if names else {}
    for name in names:
        shape = pair.base.tensors[name].shape
        kept = places.get(name, ())
        if len(shape) > 1 or not kept or not all(holds_exact(whole, place) for place in kept):
            raise CheckpointError(
                f"tensor {name[:_MAX_SHOWN]!r} {list(shape)} was changed, and is neither a linear of a layer nor "
                "its bias, neither a norm nor embeddings nor the output layer (experts, routers and sinks are "
                "not): deploy the fine-tune as a model of its own"
            )
