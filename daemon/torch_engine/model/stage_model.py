"""Pipeline stage as transformers' own model class, holding only its layers and only its rank's weights.

The class is built on the meta device from the model's config with the stage's number of layers; what belongs to
other stages becomes Identity. Nothing here knows how an architecture computes.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from daemon.torch_engine.model import attention, capabilities
from daemon.torch_engine.model.adapters import LoadedAdapters, Part
from daemon.torch_engine.model.architectures import architectures_of, installed_transformers
from daemon.torch_engine.model.batch import FlatBatch
from daemon.torch_engine.model.formats import FORMATS
from daemon.torch_engine.model.kv_cache import KvCache
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.model.unfilled import build_unfilled
from daemon.torch_engine.model.weights import WeightReader
from fingerprint.architectures import Listed
from fingerprint.config import WeightFormat
from fingerprint.errors import CheckpointError, EngineError, UnsupportedModelError
from fingerprint.families import ModuleLayout, family_of, read_config, read_spec
from fingerprint.lora import LoraAdapter, LoraModule
from fingerprint.model_spec import ModelSpec

__all__ = ["ModelSource", "StageModel", "StageShape", "read_source", "tensor_bytes"]


@dataclass(frozen=True)
class ModelSource:
    """A checkpoint's facts, read once per load."""

    checkpoint: Path
    spec: ModelSpec
    config: Any  # transformers' config object of the whole model
    layout: ModuleLayout
    dtype: torch.dtype
    limits: Listed


@dataclass(frozen=True, slots=True)
class StageShape:
    """Part of the model that a stage is."""

    first_layer: int
    num_layers: int
    is_first: bool
    is_last: bool


def read_source(checkpoint: Path, device: torch.device, dtype: torch.dtype | None) -> ModelSource:
    """Return what a checkpoint's config.json says. ``dtype`` None takes the checkpoint's own 16-bit type.

    float32 checkpoints are held as bfloat16; so are float16 ones on a CPU, which has no fast float16.

    Raises:
        UnsupportedModelError, ConfigError: as ``fingerprint.families``, or a family this engine does not run.
        CheckpointError: a value in config.json that transformers does not take.
    """
    raw = read_config(checkpoint)
    spec = read_spec(raw)
    known = architectures_of(installed_transformers())
    if (why_not := known.refusal(spec.architecture)) is not None:
        raise UnsupportedModelError(f"the embedded engine does not run {spec.architecture}: {why_not}")
    if spec.stored is not None:
        held, reason = f"{spec.stored.method} ({spec.stored.form})", capabilities.STORED[spec.stored.method]
        raise UnsupportedModelError(f"{checkpoint} is quantized by {held}: {reason}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            checkpoint, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"transformers cannot read {checkpoint}/config.json: {why}") from error
    if changing := _rope_types(config) - capabilities.STATIC_ROPE_TYPES:
        raise UnsupportedModelError(
            f"rope type {min(changing)!r} changes with the longest sequence of a batch, which mixed batches "
            f"cannot follow; supported are {', '.join(sorted(capabilities.STATIC_ROPE_TYPES))}"
        )
    stored = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    slow = stored is torch.float16 and device.type == "cpu"
    native = stored if stored in (torch.float16, torch.bfloat16) and not slow else torch.bfloat16
    limits = known.listed[spec.architecture]
    return ModelSource(checkpoint, spec, config, family_of(raw).layout, dtype or native, limits)


def _rope_types(config: Any) -> set[str]:
    """Return the rope types of the model, or of each of its kinds of layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    each = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    return {str(value.get("rope_type", "default")) for value in each}


class StageModel:
    """Part of one stage that one rank has: on the meta device first (sizes are right), then loaded.

    Raises:
        EngineError: the format or the split cannot be done for this model; raised before anything is read.
    """

    def __init__(
        self, source: ModelSource, shape: StageShape, weights: WeightFormat, parallel: TensorParallel
    ) -> None:
        attention.register()
        self.source, self.shape = source, shape
        self._format = FORMATS[weights]
        self.model = _build(source, shape)
        self.parallel = TensorParallel(
            parallel.tp, parallel.index, dict(self.model._tp_plan or {}), parallel.group
        )
        self._check(parallel.tp)
        self.head_is_split = self._head_is_split()
        self._full_shapes = self._plan_parameters()
        prefix = source.layout.layers + "."
        modules = self.model.named_modules()
        self._linears = {
            name: module for name, module in modules if name.startswith(prefix) and _is_linear(module)
        }
        self._layer_numbers = {str(number): number for number in range(source.spec.num_layers)}
        modules = {name: module for name, module in self.model.named_modules() if name}
        self.adapters = LoadedAdapters(modules, per_item=source.layout.head)

    def _check(self, tp: int) -> None:
        spec = self.source.spec
        family, whole = spec.family, self.shape.is_first and self.shape.is_last
        if not whole and (reason := self.source.limits.no_pp):
            raise EngineError(f"the embedded engine runs {family} with pp=1 only: {reason}")
        if tp > 1 and (reason := self.source.limits.no_tp):
            raise EngineError(f"the embedded engine runs {family} with tp=1 only: {reason}")
        if tp > 1 and (spec.num_kv_heads % tp or spec.num_heads % tp):
            raise EngineError(
                f"tp={tp} does not divide {spec.num_heads} heads and {spec.num_kv_heads} KV heads of the model"
            )
        self.parallel.check(self.model)
        if unmade := [type(module).__name__ for _, module in _with_buffers(self.model) if not _is_made(module)]:
            raise EngineError(f"the embedded engine cannot make the buffers of {unmade[0]} in {family}")
        refusal = self._format.refusal(self._layers())
        if refusal:
            raise EngineError(f"weights={self._format.name} is refused for {spec.family}: {refusal}")

    @property
    def linears(self) -> Mapping[str, nn.Module]:
        """Linears of the layers, by the names of this stage."""
        return self._linears

    @property
    def full_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of this stage's parameters over all ranks."""
        return self._full_shapes

    def module(self, name: str) -> nn.Module:
        """Return a module of this stage."""
        return self.model.get_submodule(name)

    def is_linear(self, name: str) -> bool:
        """Return whether a module is a linear of the layers, or the output layer."""
        return name in self._linears or (
            name == self.source.layout.head and isinstance(self.module(name), nn.Linear)
        )

    def _layers(self) -> nn.ModuleList:
        return self.model.get_submodule(self.source.layout.layers)

    def _head_is_split(self) -> bool:
        if not self.shape.is_last:
            return False
        name = f"{self.source.layout.head}.weight"
        return self.parallel.shard(name, tuple(self.model.get_parameter(name).shape)) is not None

    def _plan_parameters(self) -> dict[str, tuple[int, ...]]:
        """Plan the full shape of every parameter; the model's own become this rank's shards, linears their
        format's.
        """
        full = {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}
        for name, shape in full.items():
            shard = self.parallel.shard(name, shape)
            local = self.model.get_parameter(name)
            if shard:
                local = nn.Parameter(local[shard.slices(shape)].clone(), requires_grad=False)
                _set(self.model, name, local)
        prefix = self.source.layout.layers + "."
        for name, module in list(self.model.named_modules()):
            if isinstance(module, nn.Linear) and name.startswith(prefix):
                module.out_features, module.in_features = module.weight.shape
                parent, _, leaf = name.rpartition(".")
                setattr(self.model.get_submodule(parent), leaf, self._format.replace(module))
        return full

    def planned_bytes(self) -> int:
        """Return the bytes of this rank's weights, before they are read; a tied head counts once."""
        tied = self._tied_here()
        head = self.model.get_submodule(self.source.layout.head) if tied else None
        skip = {id(t) for t in head.parameters()} if head is not None else set()
        tensors = [t for t in (*self.model.parameters(), *self.model.buffers()) if id(t) not in skip]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _tied_here(self) -> bool:
        return self.source.spec.tied_embeddings and self.shape.is_first and self.shape.is_last

    def load(self, device: torch.device) -> None:
        """Read this rank's weights, quantizing one tensor at a time; peak is what is kept plus one tensor.

        Raises:
            CheckpointError: as :class:`WeightReader`.
        """
        _materialize_buffers(self.model, self.source.config, device)
        layout = self.source.layout
        with WeightReader(self.source.checkpoint, self.source.spec.family) as reader:
            for name, shape in self._full_shapes.items():
                if name == f"{layout.head}.weight" and self._tied_here():
                    continue
                self._load_one(reader, name, shape, device)
        if self._tied_here():
            # Both are split by vocabulary or neither is, so the rank's rows of one are its rows of the other.
            _set(self.model, f"{layout.head}.weight", self.model.get_submodule(layout.embedding[0]).weight)
        self.parallel.connect(self.model)
        self.model.requires_grad_(False).eval()

    def _load_one(self, reader: WeightReader, name: str, shape: tuple[int, ...], device: torch.device) -> None:
        stored, layout = self.checkpoint_name(name), self.source.layout
        module, _, leaf = name.rpartition(".")
        if leaf == "bias" and self.parallel.adds_up(module) and not self.parallel.keeps_bias:
            zeros = torch.zeros(shape, dtype=self.source.dtype, device=device)
            _set(self.model, name, nn.Parameter(zeros, requires_grad=False))
            return
        shard = self.parallel.shard(name, shape)
        value = reader.read(stored, shape, shard, self.source.dtype, device)
        target = self.model.get_submodule(module)
        if leaf == "weight" and name.startswith(layout.layers + ".") and value.dim() == 2 and _is_linear(target):
            self._format.store(target, value)
        else:
            _set(self.model, name, nn.Parameter(value, requires_grad=False))

    def stored_name(self, name: str) -> str:
        """Return the name in the checkpoint, which numbers layers over the whole model, the stage over its own."""
        prefix = self.source.layout.layers + "."
        if not name.startswith(prefix):
            return name
        index, _, rest = name.removeprefix(prefix).partition(".")
        return f"{prefix}{int(index) + self.shape.first_layer}.{rest}"

    def checkpoint_name(self, name: str) -> str:
        """Return the name of a parameter in the checkpoint; of a tied output layer, that of the embeddings."""
        layout = self.source.layout
        if name != f"{layout.head}.weight":
            return self.stored_name(name)
        if self.source.spec.tied_embeddings:
            return f"{layout.embedding[0]}.weight"
        return f"{layout.stored_head or layout.head}.weight"

    def adapter_parts(self, adapter: LoraAdapter) -> dict[str, Part]:
        """Return what this rank has of an adapter, by linear.

        Raises:
            CheckpointError: a module that is no linear of the layers, or one of another shape.
        """
        parts = {}
        for module in adapter.modules:
            name = self._own_name(module)
            if name is not None:
                shard = self.parallel.shard(f"{name}.weight", self._full_shapes[f"{name}.weight"])
                parts[name] = Part(module, shard)
        return parts

    def _own_name(self, module: LoraModule) -> str | None:
        """Return the name of the linear here that is updated; None when its layer is of another stage."""
        prefix, shown = self.source.layout.layers + ".", f"{module.name[:200]!r}"
        index, _, rest = module.name.removeprefix(prefix).partition(".")
        layer = self._layer_numbers.get(index)
        if layer is None or not module.name.startswith(prefix):
            raise CheckpointError(
                f"the adapter updates {shown}, which is in none of the {self.source.spec.num_layers} layers of "
                f"{self.source.spec.architecture}; train it on linears of this base's layers alone"
            )
        own = layer - self.shape.first_layer
        if not 0 <= own < self.shape.num_layers:
            return None
        name = f"{prefix}{own}.{rest}"
        if name not in self._linears:
            raise CheckpointError(
                f"the adapter updates {shown}, which is no linear of {self.source.spec.architecture}; train it on "
                "linears of this base's layers alone"
            )
        shape = (module.out_features, module.in_features)
        if self._full_shapes[f"{name}.weight"] != shape:
            raise CheckpointError(
                f"the adapter updates a {shown} of {list(shape)}, and that of the base is "
                f"{list(self._full_shapes[f'{name}.weight'])}: give an adapter of this base"
            )
        return name

    @torch.inference_mode()
    def forward(self, batch: FlatBatch, hidden: torch.Tensor | None, cache: KvCache) -> torch.Tensor:
        """Return hidden states [1, T, hidden] of a middle stage, or this rank's logits [len(spans), vocab or its
        part].

        ``hidden`` comes from the stage before; None on the first.
        """
        self.adapters.route(batch.spans)
        inputs = {"input_ids": batch.token_ids} if self.shape.is_first else {"inputs_embeds": hidden}
        inputs |= {
            "position_ids": batch.positions,
            "use_cache": False,
            "iserve_step": attention.AttentionStep(batch, cache),
        }
        if not self.shape.is_last:
            return self.model.base_model(**inputs).last_hidden_state
        return self.model(**inputs, logits_to_keep=batch.last_tokens).logits[0]

    def weight_bytes(self) -> int:
        """Return live bytes of the weights, buffers and adapters, by storage: what is shared counts once."""
        return tensor_bytes(self.tensors)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Weights, buffers and the variants that are loaded."""
        return (*self.model.parameters(), *self.model.buffers(), *self.adapters.tensors)


def tensor_bytes(tensors: tuple[torch.Tensor, ...]) -> int:
    """Return the bytes of the distinct storages behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is an nn.Linear, or a format's in its place: both know nothing but out and in."""
    return isinstance(module, nn.Linear) or type(module).__module__.startswith(
        "daemon.torch_engine.model.formats."
    )


def _set(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(module), leaf, parameter)


def _build(source: ModelSource, shape: StageShape) -> nn.Module:
    config = copy.deepcopy(source.config)
    config.num_hidden_layers = shape.num_layers
    layers = slice(shape.first_layer, shape.first_layer + shape.num_layers)
    if getattr(config, "layer_types", None):
        config.layer_types = list(config.layer_types[layers])
    config._attn_implementation = attention.IMPLEMENTATION
    cls = getattr(transformers, source.spec.architecture)
    model = build_unfilled(lambda: cls._from_config(config, dtype=source.dtype))
    layout = source.layout
    gone = [] if shape.is_first else list(layout.embedding)
    gone += [] if shape.is_last else [*layout.final_norm, layout.head]
    for name in gone:
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, nn.Identity())
    if shape.is_first and shape.is_last and source.spec.tied_embeddings:
        # Untied while on meta, so that each is cut to its shard by its own name; tied again by ``load``.
        head = model.get_submodule(layout.head)
        head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    return model.requires_grad_(False)


def _with_buffers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [
        (name, module)
        for name, module in model.named_modules()
        if any(True for _ in module.buffers(recurse=False)) and not _is_linear(module)
    ]


def _is_made(module: nn.Module) -> bool:
    """Return whether :func:`_materialize_buffers` can make the module anew: one made so would lose its weights."""
    if isinstance(module, nn.Embedding):  # Gemma's is scaled
        return all(hasattr(module, f"scalar_{name}") for name, _ in module.named_buffers(recurse=False))
    bare = not any(True for _ in module.parameters())
    return bare and "config" in inspect.signature(type(module)).parameters


def _materialize_buffers(model: nn.Module, config: Any, device: torch.device) -> None:
    """Build the modules that own buffers anew, for real: buffers are not in checkpoints (rotary frequencies)."""
    for name, module in _with_buffers(model):
        if isinstance(module, nn.Embedding):
            for buffer, _ in list(module.named_buffers(recurse=False)):
                scale = torch.tensor(getattr(module, f"scalar_{buffer}"), device=device)
                module.register_buffer(buffer, scale, persistent=False)
        else:
            with torch.device(device):
                made = type(module)(config=config)
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, made)
