"""The config.json of a model that is what one rank of a tensor-parallel group computes. Values in, values out.

A rank of t holds 1/t of the query heads, KV heads (at least one: below that they are replicated), MLP width and
vocabulary; hidden size, head_dim and every expert's place stay (Shoeybi et al. 2019, arXiv:1909.08053; as vLLM and
TensorRT-LLM divide a model, experts not being dealt out whole). An engine that loads it on one GPU does a rank's
arithmetic with a rank's shapes, without the two all-reduces of each layer. Its answers mean nothing.

It can be written for a family whose classes take head_dim from config.json; where they take it from hidden size
and heads, fewer heads would mean wider ones (``Family.explicit_head_dim``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

from fingerprint.config_json import divides
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.families import FAMILIES, read_spec

__all__ = ["refuses_shards", "shard_config"]

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def refuses_shards(family: str) -> str | None:
    """Return why no shard of a model of ``family`` can be written; None when it can be."""
    if family in FAMILIES and FAMILIES[family].explicit_head_dim:
        return None
    return (
        f"the classes of {family} take head_dim from hidden size and heads, so config.json cannot describe one "
        "tensor-parallel rank; measure it on as many GPUs"
    )


def shard_config(config: Mapping[str, object], tp: int) -> dict[str, object]:
    """Return ``config`` for one rank of ``tp``.

    The vocabulary is rounded up, as engines pad it until it divides. Special tokens beyond it are dropped.

    Args:
        config: parsed config.json of the whole model, of any number of layers.

    Raises:
        ConfigError: ``tp`` does not divide the heads or the MLP width, or neither of it and the KV heads divides
            the other; or as ``families.read_spec``.
        UnsupportedModelError: config.json of this family cannot say it; or as ``families.read_spec``.
    """
    spec = read_spec(config)
    if tp < 1:
        raise ConfigError(f"tp must be at least 1, got {tp}")
    refusal = refuses_shards(spec.family)
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    divides("tp", tp, "num_attention_heads", spec.num_heads)
    divides("tp", tp, "intermediate_size", spec.intermediate_size)
    if max(tp, spec.num_kv_heads) % min(tp, spec.num_kv_heads):
        raise ConfigError(f"neither of tp={tp} and num_key_value_heads={spec.num_kv_heads} divides the other")
    shard = copy.deepcopy(dict(config))
    vocab = -(-spec.vocab_size // tp)
    shard["num_attention_heads"] = spec.num_heads // tp
    shard["num_key_value_heads"] = max(1, spec.num_kv_heads // tp)
    shard["head_dim"] = spec.head_dim
    for name in FAMILIES[spec.family].width_keys:
        shard[name] = spec.intermediate_size // tp
    shard["vocab_size"] = vocab
    for name in _SPECIAL_TOKENS:
        if name in shard:
            _keep_below(shard, name, vocab)
    return shard


def _keep_below(shard: dict[str, object], name: str, vocab: int) -> None:
    """Keep the token ids of ``name`` that the shard's vocabulary has; engines index its logits with them."""
    given = shard[name]
    kept = [token for token in (given if isinstance(given, list) else [given]) if _is_below(token, vocab)]
    if not kept:
        del shard[name]
        if (
            name == "pad_token_id"
        ):  # embeddings are built with it, and a class's own default may lie beyond as well
            shard[name] = None
    elif isinstance(given, list):
        shard[name] = kept


def _is_below(token: object, vocab: int) -> bool:
    return token is None or (isinstance(token, int) and token < vocab)
