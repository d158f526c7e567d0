"""Blueprint of a model: its counts and the tensors that they follow from, as a family's reader makes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fingerprint.config_json import Fields
from fingerprint.families.sliding_window import Windows
from fingerprint.model_spec import ModelSpec
from fingerprint.tensor_shapes import Role, TensorShape, elements, linear, norm

__all__ = ["Blueprint", "Ends", "Family", "ModuleLayout", "blueprint_of", "ends_of"]


@dataclass(frozen=True)
class ModuleLayout:
    """Names of the modules, in the checkpoint and in the transformers causal-LM class alike."""

    layers: str  # the list of hidden layers: tensors are "<layers>.<index>.<rest>"
    embedding: tuple[str, ...]
    final_norm: tuple[str, ...]
    head: str  # its weight is absent from the checkpoint when the embeddings are tied
    stored_head: str | None = None  # its name in checkpoints, where that is another


@dataclass(frozen=True)
class Blueprint:
    """A model's counts and the tensors they come from."""

    spec: ModelSpec
    layer: tuple[TensorShape, ...]  # of each hidden layer; names follow "<layers>.<index>."
    rest: tuple[TensorShape, ...]  # all other tensors, full names; no head weight when tied


@dataclass(frozen=True)
class Family:
    """Row of the table of families.

    Attributes:
        explicit_head_dim: whether every engine's class takes head_dim from config.json, so that a model with fewer
            heads can be described. vLLM's Qwen2, Qwen2-MoE and Falcon, and all classes of GPT-J, GPT-NeoX and OPT,
            compute it as hidden size / heads.
    """

    architectures: tuple[str, ...]  # of the causal-LM class; the first is transformers' own
    layout: ModuleLayout
    layers_keys: tuple[str, ...]  # names under which config.json may give the number of layers
    read: Callable[[Fields], Blueprint]
    width_keys: tuple[str, ...] = ("intermediate_size",)  # MLP widths in config.json, of which a rank has a part
    explicit_head_dim: bool = False


@dataclass(frozen=True, kw_only=True)
class Ends:
    """Tensors before and after the hidden layers."""

    embedding: list[TensorShape]
    final_norm: list[TensorShape]
    head: list[TensorShape]


def ends_of(
    layout: ModuleLayout, vocab: int, hidden: int, *, tied: bool, norm_bias: bool, head_bias: bool
) -> Ends:
    head = linear(layout.stored_head or layout.head, vocab, hidden, bias=head_bias, role=Role.HEAD)
    return Ends(
        embedding=[TensorShape(f"{layout.embedding[0]}.weight", (vocab, hidden), Role.EMBEDDING)],
        final_norm=norm(layout.final_norm[0], hidden, bias=norm_bias),
        head=head[1:] if tied else head,  # a bias is the head's own even when its matrix is the embedding
    )


def blueprint_of(
    fields: Fields,
    architecture: str,
    layer: list[TensorShape],
    ends: Ends,
    *,
    num_layers: int,
    intermediate_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_context_tokens: int,
    tied: bool,
    num_experts: int = 0,
    experts_per_token: int = 0,
    layer_windows: Windows | None = None,
    gated_mlp: bool = True,
) -> Blueprint:
    """Return the blueprint: sizes as read, counts from the tensors.

    Args:
        layer_windows: how far back each layer looks; None: all to the beginning.
    """
    windows = layer_windows or (None,) * num_layers
    several = len(set(windows)) > 1
    vocab_size, hidden_size = ends.embedding[0].shape
    spec = ModelSpec(
        family=fields.family,
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_context_tokens=max_context_tokens,
        tied_embeddings=tied,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        sliding_window=None if several else windows[0],
        layer_windows=windows if several else (),
        gated_mlp=gated_mlp,
        layer_params=elements(layer),
        layer_linear_params=elements(layer, Role.LINEAR, Role.EXPERT),
        layer_expert_params=elements(layer, Role.EXPERT),
        embedding_params=elements(ends.embedding),
        head_params=elements(ends.head),
        final_norm_params=elements(ends.final_norm),
    )
    return Blueprint(spec, tuple(layer), (*ends.embedding, *ends.final_norm, *ends.head))
