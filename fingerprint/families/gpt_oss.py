"""GPT-OSS in 16 bits: experts joined in one tensor with biases, a sink per head, every second layer sliding."""

from __future__ import annotations

from functools import partial

from fingerprint.config_json import Fields
from fingerprint.families.base import Blueprint, Family
from fingerprint.families.llama_like import LAYOUT, llama_like
from fingerprint.families.mlp import MAX_EXPERTS, Mlp
from fingerprint.families.sliding_window import windows_by_turns
from fingerprint.tensor_shapes import Role, TensorShape

__all__ = ["FAMILIES"]


def _experts(fields: Fields, hidden: int) -> Mlp:
    inner = fields.count("intermediate_size")
    count = fields.count("num_local_experts", "num_experts", default=128, most=MAX_EXPERTS)
    return Mlp(
        tensors=[
            TensorShape("mlp.router.weight", (count, hidden), Role.ROUTER),
            TensorShape("mlp.router.bias", (count,), Role.BIAS),
            TensorShape("mlp.experts.gate_up_proj", (count, hidden, 2 * inner), Role.EXPERT),
            TensorShape("mlp.experts.gate_up_proj_bias", (count, 2 * inner), Role.BIAS),
            TensorShape("mlp.experts.down_proj", (count, inner, hidden), Role.EXPERT),
            TensorShape("mlp.experts.down_proj_bias", (count, hidden), Role.BIAS),
        ],
        intermediate_size=inner,
        num_experts=count,
        experts_per_token=fields.count("num_experts_per_tok", "experts_per_token", default=4, most=count),
    )


def _gpt_oss(fields: Fields) -> Blueprint:
    return llama_like(
        fields,
        architecture="GptOssForCausalLM",
        context_default=131_072,
        kv_heads_default=8,
        head_dim_default=64,
        attention_bias_default=True,
        has_sinks=True,
        mlp=_experts,
        windows=partial(windows_by_turns, default=128),
    )


FAMILIES = {
    "gpt_oss": Family(("GptOssForCausalLM",), LAYOUT, ("num_hidden_layers",), _gpt_oss, explicit_head_dim=True)
}
