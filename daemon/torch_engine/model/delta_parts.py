"""Reading of a delta for one rank: which module of the stage each tensor belongs to, and the rank's part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from daemon.torch_engine.model.adapters import DTYPES, Update, Updates
from daemon.torch_engine.model.delta_updates import EmbeddingUpdate, ExactUpdate, LinearUpdate, PackedMatrix
from daemon.torch_engine.model.stage_model import StageModel, StageShape
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.model.weights import WeightReader
from fingerprint.config import WeightFormat
from fingerprint.delta import FORMATS, BaseHashes, Delta
from fingerprint.delta.manifest import ExactTensor, MatrixRecord
from fingerprint.delta.reader import codes_name, scales_name
from fingerprint.errors import CheckpointError

__all__ = ["Place", "holds_exact", "on_device", "places_of", "read_delta_updates"]

_MAX_SHOWN = 200


def read_delta_updates(delta: Delta, model: StageModel, base: BaseHashes | None) -> Mapping[str, list[Update]]:
    """Return this rank's part of a delta, by module, on the CPU.

    Args:
        base: what the model was loaded from, to be compared with the delta's base; None: another rank does that.

    Raises:
        CheckpointError: its base has other tensors, a tensor belongs to no module that a variant can have for
            itself, has another shape, was changed, or has values that are not finite in the model's type.
    """
    if base is not None:
        base.check(delta.manifest.base)
    return _Reader(delta, model).read()


def on_device(updates: Updates, device: torch.device) -> Updates:
    """Return ``updates`` with their tensors on ``device``; what two modules share stays one."""
    if device.type == "cpu":
        return updates
    found: dict[int, torch.Tensor] = {}

    def there(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in found:
            found[id(tensor)] = tensor.to(device)
        return found[id(tensor)]

    def moved(update: Update) -> Update:
        if isinstance(update, ExactUpdate):
            values = {name: value.to(device) for name, value in update.parameters.items()}
            return ExactUpdate({name: nn.Parameter(value, requires_grad=False) for name, value in values.items()})
        assert isinstance(update, LinearUpdate | EmbeddingUpdate)
        own = update.matrix
        return replace(update, matrix=replace(own, words=there(own.words), scales=there(own.scales)))

    return {name: [moved(update) for update in of_module] for name, of_module in updates.items()}


@dataclass(frozen=True, slots=True)
class Place:
    """Parameter of the stage."""

    module: str
    leaf: str


class _Reader:
    def __init__(self, delta: Delta, model: StageModel) -> None:
        self._delta, self._model = delta, model
        self._updates: dict[str, list[Update]] = {}
        self._exact: dict[str, dict[str, nn.Parameter]] = {}

    def read(self) -> Mapping[str, list[Update]]:
        manifest, here = self._delta.manifest, places_of(self._model)
        is_whole = self._model.shape.is_first and self._model.shape.is_last
        known = here if is_whole else places_of(_whole(self._model))
        for each in manifest.changed:
            if each.name not in known:
                raise self._unfit(each.name, "is no parameter that a variant can have for itself")
        for tensor in manifest.exact:
            for place in here.get(tensor.name, ()):
                self._add_exact(tensor, place)
        for module, parameters in self._exact.items():  # before D: it computes outputs anew
            self._updates[module] = [ExactUpdate(parameters)]
        for matrix in manifest.matrices:
            if places := here.get(matrix.name, ()):
                self._add_matrix(matrix, places)
        return self._updates

    def _add_exact(self, tensor: ExactTensor, place: Place) -> None:
        model, module = self._model, self._model.module(place.module)
        name = f"{place.module}.{place.leaf}"
        if not holds_exact(model, place):
            raise self._unfit(tensor.name, f"is a {place.leaf} of {type(module).__name__}, neither norm nor bias")
        self._check_shape(tensor, name)
        is_added_up = model.is_linear(place.module) and model.parallel.adds_up(place.module)
        if is_added_up and not model.parallel.keeps_bias:
            return
        raw = self._delta.read(tensor.file, tensor.name, tensor.sha256)
        if tensor.dtype not in DTYPES:
            raise self._unfit(tensor.name, f"is of type {tensor.dtype}, known are {', '.join(DTYPES)}")
        stored = torch.frombuffer(bytearray(raw), dtype=DTYPES[tensor.dtype]).reshape(tensor.shape)
        shard = model.parallel.shard(name, tensor.shape)
        part = stored[shard.slices(tensor.shape)] if shard else stored
        value = torch.empty(part.shape, dtype=model.source.dtype).copy_(part)
        if not value.isfinite().all():
            raise self._unfit(tensor.name, f"has values that are not finite in {model.source.dtype}")
        self._exact.setdefault(place.module, {})[place.leaf] = nn.Parameter(value, requires_grad=False)

    def _packed(self, matrix: MatrixRecord) -> tuple[torch.Tensor, torch.Tensor]:
        """Return words and scales of a matrix, whose bytes have their hashes."""
        format_, read = FORMATS[matrix.format], self._delta.read
        codes = read(matrix.file, codes_name(matrix.name), matrix.codes)
        scales = read(matrix.file, scales_name(matrix.name), matrix.scales)
        found = torch.frombuffer(bytearray(scales), dtype=torch.bfloat16)
        if not (found.isfinite().all() and (found >= 0).all()):
            raise self._unfit(scales_name(matrix.name), "has values that are no scales")
        words = torch.frombuffer(bytearray(codes), dtype=torch.int16)
        shapes = format_.codes_shape(matrix.shape), format_.scales_shape(matrix.shape)
        return words.reshape(shapes[0]), found.reshape(shapes[1])

    def _add_matrix(self, matrix: MatrixRecord, places: Sequence[Place]) -> None:
        """Add the change of a matrix to its module, or two: embeddings that are the output layer as well.

        Embeddings are whole on every rank. Of several, the output layer's part is of their memory.
        """
        model, format_ = self._model, FORMATS[matrix.format]
        words, scales = self._packed(matrix)
        has_whole = any(isinstance(model.module(place.module), nn.Embedding) for place in places)
        whole = PackedMatrix.of(words, scales, format_, matrix.shape, None) if has_whole else None
        for place in places:
            module, name = model.module(place.module), f"{place.module}.{place.leaf}"
            is_embedding = isinstance(module, nn.Embedding)
            if place.leaf != "weight" or not (is_embedding or model.is_linear(place.module)):
                kind = type(module).__name__
                raise self._unfit(matrix.name, f"is a {place.leaf} of {kind}, neither linear nor embedding")
            self._check_shape(matrix, name)
            shard = None if is_embedding else model.parallel.shard(name, matrix.shape)
            if whole is None:
                part = PackedMatrix.of(words, scales, format_, matrix.shape, shard)
            else:
                part = whole if shard is None else whole.part(shard, matrix.shape)
            update = EmbeddingUpdate(part) if is_embedding else LinearUpdate(part)
            self._updates.setdefault(place.module, []).append(update)

    def _check_shape(self, tensor: MatrixRecord | ExactTensor, name: str) -> None:
        of_base = self._model.full_shapes[name]
        if of_base != tensor.shape:
            raise self._unfit(tensor.name, f"is {list(tensor.shape)}, the base's {list(of_base)}")

    def _unfit(self, tensor: str, what: str) -> CheckpointError:
        return CheckpointError(
            f"the delta in {self._delta.folder} cannot be served next to {self._model.source.spec.architecture}: "
            f"tensor {tensor[:_MAX_SHOWN]!r} {what}; export it (`iserve variant export`) and deploy the result"
        )


def places_of(model: StageModel) -> Mapping[str, list[Place]]:
    """Return the parameters that each stored tensor of the base is, on this stage.

    An output layer that is stored, and tied to the embeddings, is none: the embeddings are read in its place.
    """
    found: dict[str, list[Place]] = {}
    layout = model.source.layout
    with WeightReader(model.source.checkpoint, model.source.spec.family) as reader:
        head = reader.stored_name(f"{layout.stored_head or layout.head}.weight")
        if model.source.spec.tied_embeddings and head is not None:
            found[head] = []
        for name in model.full_shapes:
            stored = reader.stored_name(model.checkpoint_name(name))
            if stored is not None:
                module, _, leaf = name.rpartition(".")
                found.setdefault(stored, []).append(Place(module, leaf))
    return found


def holds_exact(model: StageModel, place: Place) -> bool:
    """Return whether a variant can have this parameter for itself as it is: of a norm, or the bias of a linear."""
    is_bias = place.leaf == "bias" and model.is_linear(place.module)
    return is_bias or _is_norm(model.module(place.module))


def _whole(model: StageModel) -> StageModel:
    """Return all of the model, on the meta device."""
    shape = StageShape(0, model.source.spec.num_layers, is_first=True, is_last=True)
    return StageModel(model.source, shape, WeightFormat.BITS16, TensorParallel(1, 0, {}))


def _is_norm(module: nn.Module) -> bool:
    """Return whether a module has no more than parameters of one axis, and is one that is called itself."""
    parameters = tuple(module.parameters())
    return not any(True for _ in module.children()) and all(each.dim() == 1 for each in parameters)
