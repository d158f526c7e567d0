"""Cache and state that a layer keeps of a sequence, by names and shapes of the matrices that mix its tokens.

Elements a token: K and V of the KV heads, or the latent that replaces them. Elements a sequence: the state of
linear attention and state-space layers and the last inputs of their convolutions, whatever the length.

Sources: the classes of transformers 5.23 for the names; for the sizes vLLM 0.33, ``v1/kv_cache_interface.py``
and, in ``model_executor``, ``layers/mamba/mamba_utils.py`` (states), ``models/deepseek_v2.py`` (keys of the
indexer) and ``layers/attention/mla_attention.py`` (656 bytes of a sparse latent in fp8).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from fingerprint.description.facts import Facts
from fingerprint.errors import UnsupportedModelError

__all__ = ["QUERIES_ALONE", "Kept", "kept_of_layer"]

Shapes = Mapping[str, tuple[int, ...]]

_NAMES = r"attn|attention|mamba\w*|mixer|temporal_block|mlstm_layer|short_?conv|\bconv|sconv"
_MIXER = re.compile(rf"^(.*?(?:{_NAMES})(?:\.\d+)?)\.(.+)$")
_OTHER = re.compile(r"(^|[._])(cross_attn|encoder_attn|mlp|experts?|shared_experts?|feed_forward)([._]|$)")
_MLP = re.compile(r"(^|\.)(up_proj|down_proj|gate|gate_proj|\w*norm\w*)$")
_K = re.compile(r"(^|\.)(k_proj|project_k|to_k|[wW]k(_dv)?)(\.linear)?$")
_V = re.compile(r"(^|\.)(v_proj\w*|project_v|to_v|[wW]v(_dv)?)(\.linear)?$")
_Q = re.compile(r"(^|\.)(q_proj|q_b_proj|project_q|to_q|[wW]q)(\.linear)?$")
_OUT = re.compile(r"(^|\.)(o_proj|out_proj|dense|c_proj|wo)(\.linear)?$")
_FUSED = re.compile(r"(^|\.)(query_key_value|qkv_proj|c_attn|Wqkv|W_pack|wqkv|qkv)$")
_STATE_BYTES = 2
_INDEX_SCALED = 128  # elements of an indexer's key that share a float32 scale
_SPARSE_FP8_BYTES = 656  # of a token's latent: 512 of fp8, 4 float32 scales, 64 rotary elements of 16 bits
QUERIES_ALONE = "attention to another layer's KV"
_LOOKING_BACK = frozenset({"attention", "latent attention", QUERIES_ALONE})  # of every token, at each before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Memory that one layer keeps of a sequence, by token and in all."""

    mixer: str  # "attention", "latent attention", "gated delta", "mamba2" ...; joined by " and " where several
    kv_elements: int = 0  # of a token
    doubled_params: int = 0  # of a matrix of K that is V's too
    kv_heads: int = 0  # that the elements, or the state, are of
    query_width: int = 0  # query heads times the width of their values, in attention to every token
    kv_fp8_bytes: int = 0  # of a token in an fp8 cache, where that is no byte for each element
    state_bytes: int = 0  # of a sequence
    state_heads: int = 0  # which TP ranks divide evenly
    state_group_bytes: int = 0  # of these, in one of ``state_groups``, which TP ranks have whole
    state_groups: int = 0


def kept_of_layer(layer: Shapes, facts: Facts) -> Kept:
    """Return what a layer with the matrices ``layer`` keeps (shapes as torch has them: outputs, inputs).

    Raises:
        UnsupportedModelError: it mixes tokens in a way that is not known.
    """
    owners: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in layer.items():
        found = _MIXER.match(name)
        if found is not None and (found[1].endswith("sconv") or not _OTHER.search(found[1])):
            leaf = found[1].rpartition(".")[2] if found[2] == "weight" else found[2].removesuffix(".weight")
            owners[found[1]][leaf] = shape
    try:
        mixing = [(leaves, each) for leaves in owners.values() if (each := _kept(leaves, facts)) is not None]
    except (IndexError, ZeroDivisionError) as error:  # a vector in a matrix's place, more heads than channels
        shapes = ", ".join(f"{name} {list(shape)}" for name, shape in sorted(layer.items())[:6])
        raise UnsupportedModelError(
            f"the matrices of a layer of {facts.family} are of shapes that mix no tokens: {shapes[:300]}"
        ) from error
    kept = [each for _, each in mixing]
    unknown = [name for leaves in owners.values() for name, shape in leaves.items() if _may_mix(name, shape)]
    if not kept and len(unknown) > 1:
        names = ", ".join(sorted(unknown)[:6])
        raise UnsupportedModelError(
            f"what a layer of {facts.family} keeps of a sequence is not known: it mixes tokens by {names}"
        )
    mixers = [each.mixer for each in kept]
    return Kept(
        mixer=" and ".join(sorted(set(mixers))) or "none",
        kv_elements=sum(each.kv_elements for each in kept),
        kv_heads=max(kept, key=lambda each: each.kv_elements).kv_heads if kept else 0,
        doubled_params=sum(each.doubled_params for each in kept),
        query_width=sum(_summed_width(leaves, facts) for leaves, each in mixing if each.mixer in _LOOKING_BACK),
        kv_fp8_bytes=sum(each.kv_fp8_bytes or each.kv_elements for each in kept)
        if any(each.kv_fp8_bytes for each in kept)
        else 0,
        state_bytes=sum(each.state_bytes for each in kept),
        state_group_bytes=sum(each.state_group_bytes for each in kept),
        state_heads=max((each.state_heads for each in kept), default=0),
        state_groups=max((each.state_groups for each in kept), default=0),
    )


def _may_mix(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and not _OTHER.search(name) and _MLP.search(name) is None


def _kept(leaves: Shapes, facts: Facts) -> Kept | None:
    """Return what one mixer keeps; None: it keeps nothing, or is none."""
    lasts = {name.rpartition(".")[2] for name in leaves}
    if "kv_a_proj_with_mqa" in lasts:
        return _latent(leaves, facts)
    if any(name.endswith("A_log") for name in leaves):
        return _state_space(leaves, facts)
    if any(name.startswith("compressor.") for name in leaves) or {"kv_proj", "o_a_proj"} <= lasts:
        return _compressed(leaves, facts)
    if any(map(_FUSED.search, leaves)) and ("output_gate" in lasts or {"g_proj", "g_norm"} <= lasts):
        return _lightning(facts)
    if any("rg_lru" in name for name in leaves):
        width = _one(leaves, r"(^|\.)conv_?1d$")
        return Kept(mixer="recurrent", state_bytes=(4 + _STATE_BYTES * (width[-1] - 1)) * width[0])
    if any(map(_K.search, leaves)):
        return _attention(leaves, facts)
    if any(map(_FUSED.search, leaves)):
        return _fused(leaves, facts)
    if "kv_proj" in lasts:  # K and V in one
        rows = _one(leaves, r"(^|\.)kv_proj$")[0]
        heads = max(1, rows // (2 * (facts.head_dim or rows)))
        return Kept(mixer="attention", kv_elements=rows, kv_heads=heads)
    if any(map(_Q.search, leaves)):
        return Kept(mixer=QUERIES_ALONE)
    convolution = [shape for name, shape in leaves.items() if _is_convolution(name, shape)]
    if convolution:
        return Kept(mixer="short convolution", state_bytes=sum(_tail_bytes(shape) for shape in convolution))
    return None


def _one(leaves: Shapes, pattern: str) -> tuple[int, ...]:
    found = next((shape for name, shape in leaves.items() if re.search(pattern, name)), None)
    if found is None:
        names = ", ".join(sorted(leaves)[:6])
        raise UnsupportedModelError(f"a layer mixes tokens by {names}, and nothing that is like {pattern}")
    return found


def _is_convolution(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] == 1 and "conv" in name


def _tail_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of the last inputs of a causal convolution of (channels, 1, width)."""
    return _STATE_BYTES * shape[0] * (shape[-1] - 1)


def _tails(leaves: Shapes) -> int:
    return sum(_tail_bytes(shape) for name, shape in leaves.items() if _is_convolution(name, shape))


def _latent(leaves: Shapes, facts: Facts) -> Kept:
    """Multi-head latent attention: the compressed K and V and the rotary part, one for all heads.

    With sparse attention an fp8 cache has a layout of its own (``fp8_ds_mla``), whatever the latent's width.
    """
    elements = sum(shape[0] for name, shape in leaves.items() if name.endswith("kv_a_proj_with_mqa"))
    index_bytes = _index_bytes(leaves)
    is_sparse = index_bytes > 0 or bool(facts.count("index_topk"))
    return Kept(
        mixer="latent attention",
        kv_elements=elements + index_bytes // 2,
        kv_heads=1,
        kv_fp8_bytes=_SPARSE_FP8_BYTES + index_bytes if is_sparse else 0,
        state_bytes=_tails(leaves),
    )


def _index_bytes(leaves: Shapes) -> int:
    """Return the bytes of the keys by which a sparse attention chooses tokens, fp8 and their scales."""
    keys = [shape[0] for name, shape in leaves.items() if re.search(r"indexer\.wk$", name)]
    return sum(key + key // _INDEX_SCALED * 4 for key in keys)


def _attention(leaves: Shapes, facts: Facts) -> Kept:
    of_keys = [shape for name, shape in leaves.items() if _K.search(name) and "indexer" not in name]
    keys = sum(shape[0] for shape in of_keys)
    values = sum(shape[0] for name, shape in leaves.items() if _V.search(name)) or keys  # V may be K itself
    head_dim = _normed_width(leaves) or facts.head_dim or keys
    heads = keys // head_dim if keys % head_dim == 0 else facts.kv_heads or 1
    elements, index_bytes = keys + values, _index_bytes(leaves)
    return Kept(
        mixer="attention",
        kv_elements=elements + index_bytes // 2,
        kv_heads=heads,
        doubled_params=0 if any(map(_V.search, leaves)) else sum(map(prod, of_keys)),
        kv_fp8_bytes=elements + index_bytes if index_bytes else 0,
        state_bytes=_tails(leaves),
    )


def _normed_width(leaves: Shapes) -> int | None:
    """Return the width of a query head where each is normed by itself; layers may differ in it (Gemma 4)."""
    queries = sum(shape[0] for name, shape in leaves.items() if _Q.search(name))
    norms = {shape for name, shape in leaves.items() if re.search(r"(^|\.)q_norm$", name)}
    width = next(iter(norms))[0] if len(norms) == 1 and {len(shape) for shape in norms} == {1} else 0
    return width if width and width < queries and queries % width == 0 else None


def _summed_width(leaves: Shapes, facts: Facts) -> int:
    """Return the inputs of the matrix behind the attention: the sums of values, of all query heads."""
    width = sum(shape[1] for name, shape in leaves.items() if _OUT.search(name) and len(shape) == 2)
    return width or (facts.heads or 0) * (facts.head_dim or 0)


def _fused(leaves: Shapes, facts: Facts) -> Kept:
    """Q, K and V in one matrix, of which Q is heads * head_dim."""
    shape = _one(leaves, _FUSED.pattern)
    hidden, heads, head_dim = facts.hidden_size, facts.heads, facts.head_dim
    if heads is None or head_dim is None:
        raise UnsupportedModelError(
            f"the heads of {facts.family} are not given, and its Q, K and V are one matrix"
        )
    rows = shape[1] if shape[0] == hidden and shape[1] != hidden else shape[0]  # GPT-2 keeps inputs first
    elements = rows - heads * head_dim
    if elements < 2 * head_dim or elements % (2 * head_dim):
        raise UnsupportedModelError(
            f"{rows} outputs of Q, K and V of {facts.family} hold no heads of K and V beside {heads} of {head_dim}"
        )
    return Kept(mixer="attention", kv_elements=elements, kv_heads=elements // (2 * head_dim))


def _compressed(leaves: Shapes, facts: Facts) -> Kept:
    """Compressed attention (DeepSeek V4): one entry for some tokens, and a window of the last ones as they are."""
    width = _one(leaves, r"^(kv_proj|wkv)$")[0]
    window = facts.first(("sliding_window",)) or 0
    rates = facts.config.get("compress_rates")
    has_index = any("indexer" in name for name in leaves)
    key = "compressed_sparse_attention" if has_index else "heavily_compressed_attention"
    rate = rates.get(key) if isinstance(rates, Mapping) else None
    if not isinstance(rate, int) or rate < 1:
        raise UnsupportedModelError(f"compress_rates of {facts.family} do not say {key}")
    index = facts.count("index_head_dim") or 0 if has_index else 0
    per_entry = width + (index + 4) // 2
    return Kept(
        mixer="compressed attention",
        kv_elements=-(-per_entry // rate),
        kv_heads=1,
        state_bytes=_STATE_BYTES * window * width,
        state_group_bytes=_STATE_BYTES * window * width,  # a latent, which every rank has whole
        state_groups=1,
    )


def _lightning(facts: Facts) -> Kept:
    """Linear attention of MiniMax and Bailing: a square of the head's width for each head, in the model's type."""
    heads, head_dim = facts.heads or 1, facts.head_dim or 1
    state_bytes = _STATE_BYTES * heads * head_dim * head_dim
    return Kept(mixer="lightning attention", kv_heads=heads, state_bytes=state_bytes)


def _state_space(leaves: Shapes, facts: Facts) -> Kept:
    log = _one(leaves, r"A_log$")
    if any("x_proj" in name for name in leaves):  # Mamba: a state for each channel
        state_bytes = facts.state_element_bytes * prod(log) + _tails(leaves)
        return Kept(mixer="mamba", kv_heads=log[0], state_bytes=state_bytes)
    if any("in_proj" in name for name in leaves) and any(re.search(r"(^|\.)D$", name) for name in leaves):
        return _mamba2(leaves, facts, prod(log))
    return _gated_delta(leaves, facts, prod(log))


def _mamba2(leaves: Shapes, facts: Facts, heads: int) -> Kept:
    """State-space layer with heads, and groups of heads that share the inputs B and C of its convolution."""
    inner, convolution = _one(leaves, r"out_proj$")[1], _one(leaves, r"conv1d$")
    shared = convolution[0] - inner  # channels of B and C
    groups = facts.first(("mamba_n_groups", "mamba_ngroups", "n_groups")) or 1
    state = facts.state_size or shared // (2 * groups)
    if inner % heads:
        raise UnsupportedModelError(f"{inner} channels of {facts.family} are not of {heads} heads")
    return Kept(
        mixer="mamba2",
        kv_heads=heads,
        state_bytes=facts.state_element_bytes * inner * state + _tails(leaves),
        state_heads=heads,
        state_group_bytes=_tail_bytes((shared, *convolution[1:])) // groups,
        state_groups=groups,
    )


def _gated_delta(leaves: Shapes, facts: Facts, heads: int) -> Kept:
    """Delta-rule linear attention: a matrix of key width by value width for each head of V."""
    inner = _one(leaves, r"(^|\.)(o_proj|out_proj|dense)$")[1]
    convolved = sum(shape[0] for name, shape in leaves.items() if _is_convolution(name, shape))
    value_width = inner // heads
    keys = (convolved - inner) // 2
    key_width = facts.count("linear_key_head_dim") or facts.count("linear_head_dim")
    if not key_width:
        key_width = keys // (facts.count("linear_num_key_heads") or heads)
    state = heads * key_width * value_width
    has_gates = any(re.search(r"(^|\.)(forget_gate|f_a_proj|f_proj)(\.|$)", name) for name in leaves)
    element_bytes = 4 if has_gates else facts.state_element_bytes  # Kimi's is float32 whatever the config says
    state_bytes = element_bytes * state + _tails(leaves)
    return Kept(mixer="gated delta", kv_heads=heads, state_bytes=state_bytes, state_heads=heads)
