"""Shrink a config by one rule, so that its class runs on the CPU in a second and every kind of layer is left.

Sizes become small and, where the class leaves them free, different from one another, so that two that are mixed up
give different counts. Ratios that make a kind (one KV head, as many as heads, fewer) stay. The depth is the fewest
layers, four at least, that hold every kind of the per-layer lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, MOST_LAYERS = 64, 4, 12
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
_NAMES_BY_SIZE = {
    HIDDEN: "hidden_size out_hidden_size n_embd d_model word_embed_proj_dim dim_model_base",
    256: "max_position_embeddings n_positions max_seq_len model_max_length",
    200: "ngram_vocab_size_base",
    128: "vocab_size vocab_size_per_layer_input attention_hidden_size mamba_d_ssm "
    "index_head_dim",  # quantized in blocks of 128
    112: "dense_intermediate_size intermediate_size_mlp",
    96: "intermediate_size ffn_dim ffn_hidden_size n_inner",
    56: "shared_expert_intermediate_size shared_intermediate_size moe_shared_expert_intermediate_size",
    40: "moe_intermediate_size expert_ffn_hidden_size q_lora_rank",
    32: "kv_lora_rank kv_channels attention_head_dim",
    24: "qk_head_dim o_lora_rank linear_value_head_dim",
    20: "indexer_head_dim",
    16: "sliding_window sliding_window_size attention_chunk_size window_size qk_nope_head_dim mamba_head_dim "
    "mamba_d_head mamba_headdim chunk_size mamba_chunk_size linear_key_head_dim linear_head_dim "
    "hidden_size_per_layer_input ple_embed_dim rel_extent",
    12: "v_head_dim state_size ssm_state_size mamba_d_state",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts num_heads mamba_num_heads mamba_n_heads "
    "n_mamba_heads qk_rope_head_dim rotary_dim index_topk indexer_budget adapter_rank laurel_rank hc_lowrank "
    "heavily_compressed_attention make_ngram_vocab_size_divisible_by block_multiple_of",
    HEADS: "num_attention_heads n_head n_heads swa_num_attention_heads linear_num_heads num_query_groups "
    "encoder_attention_heads decoder_attention_heads "
    "zero_expert_num mamba_dt_rank time_step_rank index_block_size compressed_sparse_attention d_rel",
    2: "o_groups index_kpool index_n_heads indexer_n_heads indexer_compress_ratio index_topk_blocks "
    "split_ngram_parts heads_per_ngram",
}
SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names.split()}
AT_MOST = {"n_group": 2, "num_expert_group": 2, "topk_group": 1, "top_k_group": 1}
AT_MOST |= dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k"), 2)
INDEXES = {
    "deepstack_visual_indexes",
    "fullatt_block_indexes",
    "full_attn_idxs",
    "moe_layers",
    "mlp_only_layers",
    "hybrid_layer_ids",
}
_HEADS, _HIDDEN = ("num_attention_heads", "n_heads"), ("hidden_size", "d_model")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "swa_num_key_value_heads")
_STATE_HEADS = ("linear_num_key_heads", "linear_num_value_heads", "mamba_n_groups", "mamba_ngroups", "n_groups")
KEEP_RATIO = {*_KV_HEADS, *_STATE_HEADS, "num_global_key_value_heads"}


def shrunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a small model of the same kinds of layers; ``config`` is a whole ``to_dict()``."""
    depth_name = next((name for name in DEPTHS if config.get(name)), None)
    old = int(config[depth_name]) if depth_name else 0
    depth = _depth(config, old)
    small: dict[str, Any] = {}
    for name, value in config.items():
        small[name] = _value(name, value, config, old, depth)
    if config.get("num_layers_per_stack"):  # HRM: as many layers as its two stacks are run through
        passes = config["H_cycles"] * (config["L_cycles"] + 1)
        small |= {"num_layers_per_stack": 2, "num_hidden_layers": 2 * passes}
    elif depth_name:
        small |= {name: depth for name in DEPTHS if config.get(name) == old}
    return small


def _depth(config: Mapping[str, Any], old: int) -> int:
    lists = [v for v in config.values() if isinstance(v, list) and len(v) == old and old]
    kinds = [tuple(str(v[i]) for v in lists) for i in range(old)]
    fewest = next((n for n in range(1, old + 1) if set(kinds[:n]) == set(kinds)), old)
    return min(max(4, fewest, _period(config)), MOST_LAYERS, old or 4)


def _period(config: Mapping[str, Any]) -> int:
    names = ("attn_layer_period", "sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval")
    found = [int(config[name]) for name in names if isinstance(config.get(name), int)]
    dense = [int(config[n]) + 1 for n in ("first_k_dense_replace", "num_dense_layers") if config.get(n)]
    return max([0, *found, *dense])


def _value(name: str, value: Any, config: Mapping[str, Any], old: int, depth: int) -> Any:
    if isinstance(value, Mapping):
        if "rope" in name:
            return _rope(value, config)
        if any(value.get(depth_name) for depth_name in DEPTHS):
            return shrunk(value)
        kept = {k: v for k, v in value.items() if not str(k).isdigit() or int(k) < depth}
        return {k: _value(str(k), v, value, old, depth) for k, v in kept.items()}
    if isinstance(value, list):
        if name in INDEXES:
            return [index for index in value if index < depth]
        cut = value[:depth] if len(value) == old else value
        return [_value(name, item, config, old, depth) for item in cut] if name in SIZES else cut
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith(("_token_id", "_token_index")):
        return value if value < 3 else 2
    if name in KEEP_RATIO:
        return _heads(name, value, config)
    if name.endswith("head_dim") and name not in SIZES:
        return _head_dim(name, value, config)
    if name == "num_kv_shared_layers":
        return min(value, depth // 3)
    if name.endswith("layer_end_index"):
        return depth - 1
    if name in AT_MOST and value:
        return min(AT_MOST[name], value)
    return SIZES[name] if name in SIZES and value else value


def _head_dim(name: str, value: int, config: Mapping[str, Any]) -> int:
    """Return the size of the same part: rotated, whole, of a common width or of its own."""
    for part in ("qk_rope_head_dim", "qk_head_dim"):
        if value == config.get(part):
            return SIZES[part]
    heads, hidden = (next((int(config[n]) for n in names if config.get(n)), 0) for names in (_HEADS, _HIDDEN))
    if not hidden:  # of some layers only
        return 32
    if config.get("expand"):
        return _mamba_head(config)
    return HIDDEN // HEADS if value * heads == hidden else (32 if "global" in name else 24)


def _mamba_head(config: Mapping[str, Any]) -> int:
    """Return the width of a head of Mamba 2: all heads are as wide together as the expanded hidden state."""
    return HIDDEN * int(config["expand"]) // SIZES["num_heads"]


def _heads(name: str, value: int, config: Mapping[str, Any]) -> int:
    if value == 1:
        return 1
    if name == "linear_num_value_heads":
        return HEADS
    wholes = {
        "linear_num_key_heads": "linear_num_value_heads",
        "swa_num_key_value_heads": "swa_num_attention_heads",
    }
    whole = config.get(wholes.get(name, "num_attention_heads"))
    return HEADS if value == whole and "groups" not in name else 2


def _rope(value: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same rotation for a context of 256 tokens and narrower heads."""
    small: dict[str, Any] = {}
    for name, item in value.items():
        if isinstance(item, Mapping):
            small[name] = _rope(item, config)
        elif name == "mrope_section" and item:
            small[name] = _sections(sum(item), config)
        else:
            lengths = ("original_max_position_embeddings", "max_position_embeddings")
            small[name] = 256 if name in lengths and item else item
    return small


def _sections(pairs: int, config: Mapping[str, Any]) -> list[int]:
    """Return time, height and width of a rotation of as large a part of a head as ``pairs`` are."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    old = int(config.get("head_dim") or hidden // heads)
    new = _head_dim("head_dim", old, config) if config.get("head_dim") else HIDDEN // HEADS
    left = pairs * new // old
    return [left - 2 * (left // 3), left // 3, left // 3]
