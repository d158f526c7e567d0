"""Specification of an architecture, in counts. Values only: reading config.json is ``fingerprint.families``."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass, replace

from fingerprint.codec import to_builtins, to_json
from fingerprint.config import KvFormat, WeightFormat

__all__ = ["KV_ELEMENT_BYTES", "LayerKind", "LayerShape", "ModelSpec", "Stored"]

KV_ELEMENT_BYTES = {KvFormat.BITS16: 2.0, KvFormat.INT8: 1.0, KvFormat.FP8: 1.0}


_SAID_LATER = ("kv_heads", "query_width", "state_heads", "whole_params", "doubled_params")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Parts of a layer and what it keeps of a sequence, in a model whose layers differ in that."""

    mixer: str
    """Kind of token mixing, such as `attention`, `latent attention` or `mamba2`."""
    params: int
    """Parameters of the layer, all experts included."""
    linear_params: int
    """Parameters in linear matrices."""
    whole_params: int = 0
    """Parameters in linear matrices that TP ranks have whole, such as those to latents; 0: by KV heads alone."""
    doubled_params: int = 0
    """Parameters of K's matrix where it is V's too, of which vLLM holds two copies."""
    expert_params: int = 0
    """Parameters of the experts."""
    kv_elements: int
    """KV-cache elements of one token, over all KV heads; 0: none of its own."""
    kv_read_elements: int = 0
    """Elements read of a token's KV cache that another layer keeps."""
    kv_heads: int = 0
    """KV heads of these elements, which TP ranks never split; 0: as many as the model's `num_kv_heads`."""
    query_width: int = 0
    """Query heads times the width of the values that each sums up, in attention to every token; 0: not known."""
    kv_fp8_bytes: int = 0
    """Bytes of one token in an fp8 cache, where they are not one for each element; 0: they are."""
    state_bytes: int = 0
    """Bytes of state per request whatever its length, over all ranks."""
    state_heads: int = 0
    """Heads of the state, of which TP ranks have equal numbers; 0: none, or not known."""
    state_group_bytes: int = 0
    """Bytes of these in one group, of which a TP rank keeps at least one."""
    state_groups: int = 0
    """Number of groups of that size."""

    def state_bytes_of_rank(self, tp: int) -> float:
        """Return what one of ``tp`` ranks keeps of a sequence: heads are divided, a single group is not."""
        grouped = self.state_groups * self.state_group_bytes
        return (self.state_bytes - grouped) / tp + grouped / max(1, min(tp, self.state_groups))


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers of one shape that look equally far back."""

    window: int | None  # tokens, the query's own included; None: to the beginning
    count: int
    shape: LayerShape | None = None  # None: all layers of the model have one
    kv_share: float = 1.0  # of ``ModelSpec.kv_elements``, what a token takes in one of them
    read_share: float = 1.0  # likewise what one of them looks at, be it kept by another
    query_share: float = 1.0  # of the model's heads x width, that of its queries; else as it reads

    def attended(self, context: float) -> float:
        """Return how many of ``context`` tokens the last one looks at."""
        return context if self.window is None else min(context, self.window)

    def attended_pairs(self, length: int) -> float:
        """Return (query, key) pairs of one causal prompt of ``length`` tokens, in one head."""
        window = min(self.window or length, length)
        return window * (window + 1) / 2 + (length - window) * window


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """Storage of the linear matrices in an already quantized checkpoint (``fingerprint.quantized``)."""

    method: str
    """Value of `quant_method` in config.json, such as `gptq`."""
    form: str
    """Variant of the method, such as `4-bit, groups of 128`."""
    bits: int
    """Bits of one element."""
    group_inputs: int = 0
    """Elements of a row that share a scale; 0: one scale for a whole row or more."""
    group_outputs: int = 1
    """Rows that share a scale."""
    layer_linear_bytes: float
    """Bytes of the linear matrices of the mean layer, scales, zeros and all experts included."""
    layer_expert_bytes: float
    """Bytes of the experts among them."""
    layer_scale_bytes: float = 0.0
    """Bytes of the linear matrices' scales; 0: none, or not known."""
    layer_zero_bytes: float = 0.0
    """Bytes of the zero points of matrices outside experts; 0: none, or not known."""
    layer_index_bytes: float = 0.0
    """Bytes of the linear matrices' group indexes; 0: none, or not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Architecture facts of a decoder-only model with one stack of hidden layers.

    Parameter counts are numbers of elements, not bytes. ``linear`` parameters are the matrices of the layer's
    linear modules (the ones that quantization and pruning change); norms, biases and MoE routers are the rest.
    Where layers differ in more than their windows, ``layer_shapes`` tells each; the counts of "one layer" are then
    of the mean layer, rounded, and heads are those of the layers that keep most of a token.
    """

    family: str
    """Value of `model_type` in config.json, such as `llama`."""
    architecture: str
    """Architecture class, such as `LlamaForCausalLM`."""
    num_layers: int
    """Number of hidden layers."""
    hidden_size: int
    """Width of the hidden state."""
    intermediate_size: int
    """Inner width of one MLP or one expert."""
    num_heads: int
    """Number of query heads."""
    num_kv_heads: int
    """Number of key-value heads."""
    head_dim: int
    """Width of one head."""
    vocab_size: int
    """Number of tokens in the vocabulary."""
    max_context_tokens: int
    """Longest request that the model takes, prompt and answer together."""
    tied_embeddings: bool
    """Whether input embedding and output head share one matrix."""
    num_experts: int = 0
    """Number of experts per layer; 0: a dense model."""
    experts_per_token: int = 0
    """Number of experts that each token uses."""
    sliding_window: int | None = None
    """Attention window in tokens of all layers; None: none."""
    layer_windows: tuple[int | None, ...] = ()
    """Attention window of each layer, where they differ; None within: none."""
    gated_mlp: bool = True
    """Whether the MLP has a gate matrix."""
    layer_params: int
    """Parameters of one hidden layer, all experts included."""
    layer_linear_params: int
    """Parameters of one layer in linear matrices."""
    layer_expert_params: int = 0
    """Parameters of one layer in experts, all of them."""
    embedding_params: int
    """Parameters of the input embedding, position embedding included."""
    head_params: int
    """Parameters of the output head with its bias; 0: tied to the input embedding."""
    final_norm_params: int
    """Parameters of the last norm."""
    stored: Stored | None = None
    """Quantization that the checkpoint already has; None: stored in 16 bits."""
    kv_head_elements: int = 0
    """KV-cache elements of one token in one KV head; 0: K and V of `head_dim` each."""
    layer_shapes: tuple[LayerShape, ...] = ()
    """Distinct shapes of layers, where layers differ in more than their windows or keep a state."""
    layer_shape_indexes: tuple[int, ...] = ()
    """Index into `layer_shapes` of each layer."""
    tower_params: int = 0
    """Parameters of towers for images, video and sound, part of those of the embedding and the last norm."""
    tower_vector_params: int = 0
    """Parameters of towers in vectors, part of those of the last norm."""
    own_code: tuple[str, ...] = ()
    """Kinds of classes whose Python code the checkpoint brings, such as `AutoConfig`."""

    @property
    def layers_params(self) -> int:
        """Every parameter of the hidden layers."""
        if not self.layer_shapes:
            return self.num_layers * self.layer_params
        return sum(self.layer_shapes[index].params for index in self.layer_shape_indexes)

    @property
    def num_params(self) -> int:
        """Every parameter of the model."""
        return self.layers_params + self.embedding_params + self.head_params + self.final_norm_params

    @property
    def kv_elements(self) -> int:
        """Elements that a token takes in a layer that keeps most of it, over all KV heads."""
        return self.num_kv_heads * (self.kv_head_elements or 2 * self.head_dim)

    @property
    def is_mixture(self) -> bool:
        """True when some layer has experts."""
        return self.num_experts > 0

    @property
    def experts_read_by(self) -> float:
        """Tokens in a step by which nine of ten experts are read, chosen uniformly; 1 of a dense model."""
        if not 0 < self.experts_per_token < self.num_experts:
            return 1.0
        return max(1.0, math.log(1 - 0.9) / math.log(1 - self.experts_per_token / self.num_experts))

    @property
    def keeps_state(self) -> bool:
        """True when some layer keeps something of a sequence that does not grow with its length."""
        return any(shape.state_bytes for shape in self.layer_shapes)

    @property
    def keeps_tokens(self) -> bool:
        """True when some layer keeps something of each token."""
        return not self.layer_shapes or any(shape.kv_elements for shape in self.layer_shapes)

    def kv_bytes_per_token_per_layer(self, kv: KvFormat) -> float:
        """Return bytes of one token in a layer that keeps most of it, over all TP ranks if none is replicated.

        Scales of quantized formats are not included (at most 4 / head_dim of an element), but for those of sparse
        attention, whose fp8 cache has a layout of its own.
        """
        packed = max((shape.kv_fp8_bytes for shape in self.layer_shapes), default=0)
        if kv is KvFormat.FP8 and packed:
            return float(packed)
        return self.kv_elements * KV_ELEMENT_BYTES[kv]

    def kv_heads_of(self, kind: LayerKind) -> int:
        """Return the KV heads of a layer of ``kind``."""
        return (kind.shape.kv_heads if kind.shape else 0) or self.num_kv_heads

    def kv_share(self, kind: LayerKind, kv: KvFormat) -> float:
        """Return a token's part in a layer of ``kind``, of :meth:`kv_bytes_per_token_per_layer`."""
        packed = kind.shape.kv_fp8_bytes if kind.shape and kv is KvFormat.FP8 else 0
        most = self.kv_bytes_per_token_per_layer(kv)
        if packed:
            return packed / most
        if most == self.kv_elements * KV_ELEMENT_BYTES[kv]:
            return kind.kv_share
        return kind.kv_share * self.kv_elements * KV_ELEMENT_BYTES[kv] / most

    @property
    def text_alone(self) -> ModelSpec:
        """The model without its towers."""
        vectors = self.tower_vector_params
        return replace(
            self,
            embedding_params=self.embedding_params - (self.tower_params - vectors),
            final_norm_params=self.final_norm_params - vectors,
            tower_params=0,
            tower_vector_params=0,
        )

    @property
    def as_given(self) -> WeightFormat:
        """The format of the checkpoint's own weights."""
        return WeightFormat.BITS16 if self.stored is None else WeightFormat.STORED

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, the first layer's kind first."""
        if not (self.layer_shapes or self.layer_windows):
            return (LayerKind(self.sliding_window, self.num_layers),)
        if not self.layer_shapes:
            return tuple(LayerKind(window, count) for window, count in Counter(self.layer_windows).items())
        counts = Counter(zip(self.windows, self.layer_shape_indexes, strict=True))
        shapes = self.layer_shapes
        shares = [shape.kv_elements / self.kv_elements for shape in shapes]
        read = [(shape.kv_elements + shape.kv_read_elements) / self.kv_elements for shape in shapes]
        width = self.num_heads * self.head_dim
        queries = [shape.query_width / width or share for shape, share in zip(shapes, read, strict=True)]
        return tuple(
            LayerKind(window, count, shapes[index], shares[index], read[index], queries[index])
            for (window, index), count in counts.items()
        )

    @property
    def kind_indexes(self) -> tuple[int, ...]:
        """The kind of each layer, among :attr:`kinds`."""
        each = tuple(zip(self.windows, self.layer_shape_indexes or (0,) * self.num_layers, strict=True))
        places = {identity: place for place, identity in enumerate(dict.fromkeys(each))}
        return tuple(places[identity] for identity in each)

    @property
    def kept_by_layer(self) -> tuple[tuple[int | None, float, int], ...]:
        """Kinds of layers by what they keep: how far back they look, bytes of a token, and of a sequence."""
        of_kinds = [
            (kind.window, kind.kv_share, 0 if kind.shape is None else kind.shape.state_bytes)
            for kind in self.kinds
        ]
        return tuple(of_kinds[index] for index in self.kind_indexes)

    @property
    def several_kinds(self) -> bool:
        """True when the layers are of more than one kind."""
        return bool(self.layer_windows) or len(set(self.layer_shape_indexes)) > 1

    @property
    def shape_hash(self) -> str:
        """Equal for models of one shape: a profile of one serves the other.

        What a shape does not have is left out, so that a field added later changes no hash that is kept somewhere.
        Towers count in other sizes, and code is no shape. What earlier profiles do not say of layers is
        left out: the model that they are used for does.
        """
        facts = to_builtins(self)
        for name in ("tower_params", "tower_vector_params", "own_code"):
            del facts[name]
        for name in ("layer_windows", "stored", "kv_head_elements", "layer_shapes", "layer_shape_indexes"):
            if not facts[name]:
                del facts[name]
        for shape in facts.get("layer_shapes", ()):
            for name in _SAID_LATER:
                del shape[name]
            for name in ("kv_fp8_bytes", "state_group_bytes", "state_groups"):
                if not shape[name]:
                    del shape[name]
        if "stored" in facts:  # bytes are of single matrices that a checkpoint leaves out, too
            kept = facts["stored"].items()
            facts["stored"] = {name: value for name, value in kept if not name.endswith("_bytes")}
        return hashlib.sha256(to_json(facts)).hexdigest()[:16]
