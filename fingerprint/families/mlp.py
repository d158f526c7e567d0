"""Part of a layer after attention: one gated MLP, or experts with a router before them.

Experts are named as published checkpoints name them, one by one; transformers stacks them in memory only.
"""

from __future__ import annotations

from dataclasses import dataclass

from fingerprint.config_json import MAX_LAYERS, Fields, show
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.tensor_shapes import Role, TensorShape, linear

__all__ = ["MAX_EXPERTS", "Mlp", "gated", "mixtral_experts", "qwen_experts"]

MAX_EXPERTS = 4096


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """The tensors of one layer's MLP, and the sizes that a ModelSpec names."""

    tensors: list[TensorShape]
    intermediate_size: int  # of the MLP or of one expert
    num_experts: int = 0
    experts_per_token: int = 0


def gated(fields: Fields, hidden: int, *, reads_bias: bool = False) -> Mlp:
    """Return gate, up and down; ``reads_bias``: the family reads ``mlp_bias``."""
    inner = fields.count("intermediate_size")
    bias = reads_bias and fields.flag("mlp_bias", default=False)
    return Mlp(tensors=_gated("mlp", hidden, inner, bias=bias), intermediate_size=inner)


def _gated(
    name: str, hidden: int, inner: int, *, bias: bool = False, role: Role = Role.LINEAR
) -> list[TensorShape]:
    return [
        *linear(f"{name}.gate_proj", inner, hidden, bias=bias, role=role),
        *linear(f"{name}.up_proj", inner, hidden, bias=bias, role=role),
        *linear(f"{name}.down_proj", hidden, inner, bias=bias, role=role),
    ]


def mixtral_experts(fields: Fields, hidden: int) -> Mlp:
    inner = fields.count("intermediate_size")
    count = fields.count("num_local_experts", "num_experts", default=8, most=MAX_EXPERTS)
    tensors = [TensorShape("block_sparse_moe.gate.weight", (count, hidden), Role.ROUTER)]
    for expert in range(count):
        name = f"block_sparse_moe.experts.{expert}"
        tensors += linear(f"{name}.w1", inner, hidden, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w2", hidden, inner, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w3", inner, hidden, bias=False, role=Role.EXPERT)
    return Mlp(
        tensors=tensors,
        intermediate_size=inner,
        num_experts=count,
        experts_per_token=fields.count("num_experts_per_tok", default=2, most=count),
    )


def qwen_experts(
    fields: Fields, hidden: int, *, count_default: int, inner_default: int, per_token_default: int, shared: bool
) -> Mlp:
    """Return experts for every layer; ``shared``: and one MLP with a gate of its own that works on every token.

    Raises:
        UnsupportedModelError: some layers have experts and some one MLP.
    """
    _refuse_dense_between(fields)
    count = fields.count("num_experts", "num_local_experts", default=count_default, most=MAX_EXPERTS)
    inner = fields.count("moe_intermediate_size", default=inner_default)
    tensors = [TensorShape("mlp.gate.weight", (count, hidden), Role.ROUTER)]
    for expert in range(count):
        tensors += _gated(f"mlp.experts.{expert}", hidden, inner, role=Role.EXPERT)
    if shared:
        width = fields.count("shared_expert_intermediate_size", default=5632)
        tensors += _gated("mlp.shared_expert", hidden, width)
        tensors += linear("mlp.shared_expert_gate", 1, hidden, bias=False)
    return Mlp(
        tensors=tensors,
        intermediate_size=inner,
        num_experts=count,
        experts_per_token=fields.count("num_experts_per_tok", default=per_token_default, most=count),
    )


def _refuse_dense_between(fields: Fields) -> None:
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    step = fields.count("decoder_sparse_step", default=1)
    _, dense = fields.given("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        raise ConfigError(f"mlp_only_layers must be a list of layer indexes, got {show(dense)}")
    named = set(dense or ())
    sparse = sum(layer not in named and (layer + 1) % step == 0 for layer in range(num_layers))
    if sparse != num_layers:
        raise UnsupportedModelError(
            f"{num_layers - sparse} of the {num_layers} layers of this {fields.family} model have no experts "
            "(decoder_sparse_step, mlp_only_layers) and the others do; supported are models whose layers all have"
        )
