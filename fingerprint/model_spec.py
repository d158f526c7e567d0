"""What an architecture is made of, in counts. Values only: reading config.json is ``fingerprint.families``."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from fingerprint.codec import to_builtins, to_json
from fingerprint.config import KvFormat, WeightFormat

__all__ = ["KV_ELEMENT_BYTES", "LayerKind", "ModelSpec"]

KV_ELEMENT_BYTES = {KvFormat.BITS16: 2.0, KvFormat.INT8: 1.0, KvFormat.FP8: 1.0}


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that look equally far back."""

    window: int | None  # tokens, the query's own included; None: to the beginning
    count: int

    def attended(self, context: float) -> float:
        """Of ``context`` tokens, those that the last one looks at."""
        return context if self.window is None else min(context, self.window)

    def attended_pairs(self, length: int) -> float:
        """(query, key) pairs of one causal prompt of ``length`` tokens, in one head."""
        window = min(self.window or length, length)
        return window * (window + 1) / 2 + (length - window) * window


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """How an already quantized checkpoint holds the linear matrices of its layers (``fingerprint.quantized``)."""

    method: str  # quant_method of config.json, e.g. "gptq"
    form: str  # of that method, e.g. "4-bit, groups of 128"
    bits: int  # of an element
    group_inputs: int = 0  # of a row of a matrix, that share a scale; 0: one is of a whole row or more
    group_outputs: int = 1  # rows that share it with them
    layer_linear_bytes: float  # of the mean layer, scales and zeros with them, all experts
    layer_expert_bytes: float  # of these, the experts'


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Architecture facts of a decoder-only model with one stack of hidden layers, equal but for their windows.

    Parameter counts are numbers of elements, not bytes. ``linear`` parameters are the matrices of the layer's
    linear modules (the ones that quantization and pruning change); norms, biases and MoE routers are the rest.
    """

    family: str  # the config's model_type, e.g. "llama"
    architecture: str  # e.g. "LlamaForCausalLM"
    num_layers: int
    hidden_size: int
    intermediate_size: int  # of one MLP or one expert
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context_tokens: int
    tied_embeddings: bool
    num_experts: int = 0  # 0: dense
    experts_per_token: int = 0
    sliding_window: int | None = None  # of all layers
    layer_windows: tuple[int | None, ...] = ()  # of each layer, where they differ
    gated_mlp: bool = True
    layer_params: int  # every parameter of one hidden layer, all experts
    layer_linear_params: int  # of these, the linear matrices
    layer_expert_params: int = 0  # of these, the experts' (all of them)
    embedding_params: int  # input embedding, position embedding included
    head_params: int  # output head with its bias; 0 when tied (the input embedding is then read twice)
    final_norm_params: int
    stored: Stored | None = None  # None: in 16 bits

    @property
    def num_params(self) -> int:
        """Every parameter of the model."""
        return (
            self.num_layers * self.layer_params + self.embedding_params + self.head_params + self.final_norm_params
        )

    def kv_bytes_per_token_per_layer(self, kv: KvFormat) -> float:
        """Bytes of K and V that one token occupies in one layer, over all TP ranks when none is replicated.

        Scales of quantized formats are not included (at most 4 / head_dim of an element).
        """
        return 2 * self.num_kv_heads * self.head_dim * KV_ELEMENT_BYTES[kv]

    @property
    def as_given(self) -> WeightFormat:
        """The format of the checkpoint's own weights."""
        return WeightFormat.BITS16 if self.stored is None else WeightFormat.STORED

    @property
    def windows(self) -> tuple[int | None, ...]:
        """How far back each layer looks."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers, the first layer's kind first."""
        return tuple(LayerKind(window, count) for window, count in Counter(self.windows).items())

    @property
    def shape_hash(self) -> str:
        """Equal for models of one shape: a profile of one serves the other.

        What a shape does not have is left out, so that a field added later changes no hash that is kept somewhere.
        """
        facts = to_builtins(self)
        for name in ("layer_windows", "stored"):
            if not facts[name]:
                del facts[name]
        return hashlib.sha256(to_json(facts)).hexdigest()[:16]
