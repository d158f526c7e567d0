"""The table of model families: from a parsed config.json to the tensors a model consists of.

A family is described once, by the list of its tensors; the counts of :class:`ModelSpec` and the files of a dummy
checkpoint both come from that list. No model code is imported or run (``auto_map`` is ignored). It knows nothing
of formats, devices or engines. A new family is one row of ``FAMILIES`` and, where no present reader fits, one
function. The tests compare names, shapes and counts with what the transformers classes build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from fingerprint.config_json import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    divides,
    read_config,
    show,
)
from fingerprint.errors import ConfigError, UnsupportedModelError
from fingerprint.model_spec import ModelSpec
from fingerprint.tensor_shapes import Role, TensorShape, elements, linear, norm

__all__ = [
    "FAMILIES",
    "Blueprint",
    "Family",
    "ModuleLayout",
    "load_spec",
    "module_layout",
    "read_blueprint",
    "read_config",
    "read_spec",
]

MAX_EXPERTS = 4096


@dataclass(frozen=True)
class ModuleLayout:
    """Names of the modules, in the checkpoint and in the transformers causal-LM class alike."""

    layers: str  # the list of hidden layers: tensors are "<layers>.<index>.<rest>"
    embedding: tuple[str, ...]
    final_norm: tuple[str, ...]
    head: str  # its weight is absent from the checkpoint when the embeddings are tied


@dataclass(frozen=True)
class Blueprint:
    """A model's counts and the tensors they come from."""

    spec: ModelSpec
    layer: tuple[TensorShape, ...]  # of each hidden layer; names follow "<layers>.<index>."
    rest: tuple[TensorShape, ...]  # all other tensors, full names; no head weight when tied


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    architectures: tuple[str, ...]  # of the causal-LM class; the first is transformers' own
    layout: ModuleLayout
    layers_keys: tuple[str, ...]  # names under which config.json may give the number of layers
    read: Callable[[Fields], Blueprint]


def load_spec(path: Path) -> ModelSpec:
    """:func:`read_spec` of the config.json at ``path`` (the file, or a directory that holds it).

    Raises:
        NotFoundError: no such file, or a directory without config.json.
        ConfigError, UnsupportedModelError: as :func:`read_spec`, or not a JSON object of at most 4 MiB.
    """
    return read_spec(read_config(path))


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a parsed config.json describes. Offline; no model code is imported or run.

    Raises:
        ConfigError: a size is missing, of the wrong type, out of bounds, or contradicts another.
        UnsupportedModelError: another family, an encoder-decoder, multimodal, non-generating or already quantized
            model.
    """
    return read_blueprint(config).spec


def read_blueprint(config: Mapping[str, object]) -> Blueprint:
    """:func:`read_spec` with the tensors that the counts come from; same errors."""
    name = _family_name(config)
    _refuse_other_tasks(config, name)
    return FAMILIES[name].read(Fields(config, name))


def module_layout(family: str) -> ModuleLayout:
    """Where a family keeps its layers, embedding, final norm and head.

    Raises:
        UnsupportedModelError: no such family.
    """
    if family not in FAMILIES:
        raise UnsupportedModelError(f"model_type {show(family)} is not supported; {_supported()}")
    return FAMILIES[family].layout


# --- what is refused ---

# Families people ask for, so that the refusal can say what the model is; all others are refused as unknown.
_ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2", "modernbert"}
_VISION = {
    "clip",
    "siglip",
    "vit",
    "llava",
    "llava_next",
    "mllama",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "blip-2",
}
_PART_CONFIGS = ("vision_config", "audio_config", "text_config", "speech_config")


def _supported() -> str:
    return "supported are decoder-only " + ", ".join(FAMILIES)


def _family_name(config: Mapping[str, object]) -> str:
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(f"model_type must be a string that names the family, got {show(name)}; {_supported()}")
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise UnsupportedModelError(f"model_type {show(name)} is an encoder-decoder model; {_supported()}")
    if name in _VISION or any(config.get(key) for key in _PART_CONFIGS):
        raise UnsupportedModelError(f"model_type {show(name)} is a vision or multimodal model; {_supported()}")
    if name in _ENCODERS:
        raise UnsupportedModelError(
            f"model_type {show(name)} is an encoder that generates no text; {_supported()}"
        )
    if name not in FAMILIES:
        raise UnsupportedModelError(f"model_type {show(name)} is not supported; {_supported()}")
    return name


def _refuse_other_tasks(config: Mapping[str, object], name: str) -> None:
    family = FAMILIES[name]
    architectures = config.get("architectures")
    if architectures is not None:
        if not isinstance(architectures, list) or not all(isinstance(entry, str) for entry in architectures):
            raise ConfigError(f"architectures must be a list of class names, got {show(architectures)}")
        if architectures and not set(architectures) & set(family.architectures):
            raise UnsupportedModelError(
                f"architecture {show(architectures[0])} does not generate text; of {name}, "
                f"{family.architectures[0]} is supported"
            )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"the checkpoint is already quantized ({show(method)}); iServe plans and makes the formats itself: "
            "give the 16-bit model"
        )


# --- the two ends ---


@dataclass(frozen=True, kw_only=True)
class _Ends:
    """What lies before and after the hidden layers."""

    embedding: list[TensorShape]
    final_norm: list[TensorShape]
    head: list[TensorShape]


def _ends(layout: ModuleLayout, vocab: int, hidden: int, *, tied: bool, norm_bias: bool, head_bias: bool) -> _Ends:
    head = linear(layout.head, vocab, hidden, bias=head_bias, role=Role.HEAD)
    return _Ends(
        embedding=[TensorShape(f"{layout.embedding[0]}.weight", (vocab, hidden), Role.EMBEDDING)],
        final_norm=norm(layout.final_norm[0], hidden, bias=norm_bias),
        head=head[1:] if tied else head,  # a bias is the head's own even when its matrix is the embedding
    )


def _blueprint(
    fields: Fields,
    layer: list[TensorShape],
    ends: _Ends,
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
    sliding_window: int | None = None,
    gated_mlp: bool = True,
) -> Blueprint:
    """Sizes as read, counts from the tensors."""
    vocab_size, hidden_size = ends.embedding[0].shape
    spec = ModelSpec(
        family=fields.family,
        architecture=FAMILIES[fields.family].architectures[0],
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
        sliding_window=sliding_window,
        gated_mlp=gated_mlp,
        layer_params=elements(layer),
        layer_linear_params=elements(layer, Role.LINEAR, Role.EXPERT),
        layer_expert_params=elements(layer, Role.EXPERT),
        embedding_params=elements(ends.embedding),
        head_params=elements(ends.head),
        final_norm_params=elements(ends.final_norm),
    )
    return Blueprint(spec, tuple(layer), (*ends.embedding, *ends.final_norm, *ends.head))


# --- the families ---


def _llama_like(
    fields: Fields,
    *,
    context_default: int,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: bool = False,
    window: Callable[[Fields, int], int | None] = lambda fields, num_layers: None,
) -> Blueprint:
    """RMSNorm, rotary attention with q, k, v, o matrices, gated MLP or experts.

    Args:
        context_default, kv_heads_default, head_dim_default: what the config class assumes when the field is left
            out; None: as many KV heads as heads, hidden_size / heads.
        has_attention_bias, has_mlp_bias: the family reads ``attention_bias`` (q, k, v, o) or ``mlp_bias``.
        qkv_bias: q, k and v always have a bias, o never.
        qk_norm: queries and keys are normalised per head.
    """
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("hidden_size")
    inner = fields.count("intermediate_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    class_default = heads if fields.has("num_key_value_heads") else (kv_heads_default or heads)  # null: as heads
    kv_heads = fields.count("num_key_value_heads", default=class_default)
    divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = _head_dim(fields, hidden, heads, head_dim_default)
    num_experts = fields.count("num_local_experts", "num_experts", default=8, most=MAX_EXPERTS) if experts else 0
    tied = fields.flag("tie_word_embeddings", default=False)
    all_bias = has_attention_bias and fields.flag("attention_bias", default=False)
    mlp_bias = has_mlp_bias and fields.flag("mlp_bias", default=False)
    layer = [
        *norm("input_layernorm", hidden, bias=False),
        *_attention(hidden, heads * head_dim, kv_heads * head_dim, qkv_bias=qkv_bias or all_bias, o_bias=all_bias),
        *(norm("self_attn.q_norm", head_dim, bias=False) if qk_norm else []),
        *(norm("self_attn.k_norm", head_dim, bias=False) if qk_norm else []),
        *norm("post_attention_layernorm", hidden, bias=False),
        *(_experts(num_experts, hidden, inner) if experts else _gated_mlp(hidden, inner, bias=mlp_bias)),
    ]
    return _blueprint(
        fields,
        layer,
        _ends(_LLAMA_LAYOUT, vocab, hidden, tied=tied, norm_bias=False, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=fields.count("max_position_embeddings", default=context_default, most=MAX_CONTEXT),
        tied=tied,
        num_experts=num_experts,
        experts_per_token=fields.count("num_experts_per_tok", default=2, most=num_experts) if experts else 0,
        sliding_window=window(fields, num_layers),
    )


def _head_dim(fields: Fields, hidden: int, heads: int, class_default: int | None) -> int:
    head_dim = fields.count("head_dim", default=class_default or 0)
    if head_dim == 0:
        divides("num_attention_heads", heads, "hidden_size", hidden)
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    return head_dim


def _attention(hidden: int, q_width: int, kv_width: int, *, qkv_bias: bool, o_bias: bool) -> list[TensorShape]:
    return [
        *linear("self_attn.q_proj", q_width, hidden, bias=qkv_bias),
        *linear("self_attn.k_proj", kv_width, hidden, bias=qkv_bias),
        *linear("self_attn.v_proj", kv_width, hidden, bias=qkv_bias),
        *linear("self_attn.o_proj", hidden, q_width, bias=o_bias),
    ]


def _gated_mlp(hidden: int, inner: int, *, bias: bool) -> list[TensorShape]:
    return [
        *linear("mlp.gate_proj", inner, hidden, bias=bias),
        *linear("mlp.up_proj", inner, hidden, bias=bias),
        *linear("mlp.down_proj", hidden, inner, bias=bias),
    ]


def _experts(count: int, hidden: int, inner: int) -> list[TensorShape]:
    """Mixtral's published names; transformers stacks the experts only in memory."""
    tensors = [TensorShape("block_sparse_moe.gate.weight", (count, hidden), Role.ROUTER)]
    for expert in range(count):
        name = f"block_sparse_moe.experts.{expert}"
        tensors += linear(f"{name}.w1", inner, hidden, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w2", hidden, inner, bias=False, role=Role.EXPERT)
        tensors += linear(f"{name}.w3", inner, hidden, bias=False, role=Role.EXPERT)
    return tensors


def _window(fields: Fields, num_layers: int, *, default: int | None) -> int | None:
    """One window for all layers; a null switches it off, an absent field means the class's default."""
    if fields.given("sliding_window")[1] is None:
        return None if fields.has("sliding_window") else default
    return fields.count("sliding_window", most=MAX_CONTEXT)


def _qwen_window(fields: Fields, num_layers: int) -> int | None:
    """The window if every layer slides. With layers of both kinds all count as full, so KV is never too small."""
    first_sliding = fields.count("max_window_layers", default=28, least=0, most=MAX_WIDTH)
    types = fields.layer_types(num_layers)
    if not fields.flag("use_sliding_window", default=False):
        return None
    every = all(kind == "sliding_attention" for kind in types) if types is not None else first_sliding == 0
    return _window(fields, num_layers, default=4096) if every else None


def _falcon(fields: Fields) -> Blueprint:
    """LayerNorms with bias, fused query_key_value, plain MLP. Three attention layouts, as in FalconAttention."""
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("n_embed", "hidden_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("ffn_hidden_size", default=4 * hidden, most=4 * MAX_WIDTH)
    divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads
    if head_dim % 2 and not fields.flag("alibi", default=False):
        raise ConfigError(f"hidden_size / num_attention_heads must be even for rotary embeddings, got {head_dim}")
    tied = fields.flag("tie_word_embeddings", default=True)
    bias = fields.flag("bias", default=False)
    kv_heads = _falcon_kv_heads(fields, heads)
    layer = [
        *(tensor for name in _falcon_norms(fields) for tensor in norm(name, hidden, bias=True)),
        *linear("self_attention.query_key_value", (heads + 2 * kv_heads) * head_dim, hidden, bias=bias),
        *linear("self_attention.dense", hidden, hidden, bias=bias),
        *linear("mlp.dense_h_to_4h", inner, hidden, bias=bias),
        *linear("mlp.dense_4h_to_h", hidden, inner, bias=bias),
    ]
    return _blueprint(
        fields,
        layer,
        _ends(_FALCON_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=False),
        num_layers=num_layers,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=fields.count("max_position_embeddings", default=2048, most=MAX_CONTEXT),
        tied=tied,
        gated_mlp=False,
    )


def _falcon_kv_heads(fields: Fields, heads: int) -> int:
    if not fields.flag("new_decoder_architecture", default=False):
        # num_kv_heads is not read here: one head with multi_query, else as many as queries
        return 1 if fields.flag("multi_query", default=True) else heads
    kv_heads = fields.count("num_kv_heads", default=heads)
    divides("num_kv_heads", kv_heads, "num_attention_heads", heads)
    return kv_heads


def _falcon_norms(fields: Fields) -> tuple[str, ...]:
    grouped = fields.flag("new_decoder_architecture", default=False)
    if not fields.flag("parallel_attn", default=True):
        if grouped:
            raise ConfigError("parallel_attn must be true with new_decoder_architecture, got False")
        return ("input_layernorm", "post_attention_layernorm")
    count = fields.count("num_ln_in_parallel_attn", default=2 if grouped else 1, most=2)
    if count == 2 and not grouped:
        raise ConfigError("num_ln_in_parallel_attn must be 1 without new_decoder_architecture, got 2")
    return ("ln_attn", "ln_mlp") if count == 2 else ("input_layernorm",)


def _gptj(fields: Fields) -> Blueprint:
    """One LayerNorm per layer, attention without biases, MLP and head with biases."""
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("n_inner", default=4 * hidden, most=4 * MAX_WIDTH)
    divides("n_head", heads, "n_embd", hidden)
    head_dim = hidden // heads
    rotary = fields.count("rotary_dim", default=64)
    if rotary > head_dim or rotary % 2:
        raise ConfigError(f"rotary_dim must be even and at most n_embd / n_head = {head_dim}, got {rotary}")
    tied = fields.flag("tie_word_embeddings", default=False)
    layer = [
        *norm("ln_1", hidden, bias=True),
        *(t for name in ("q", "k", "v", "out") for t in linear(f"attn.{name}_proj", hidden, hidden, bias=False)),
        *linear("mlp.fc_in", inner, hidden, bias=True),
        *linear("mlp.fc_out", hidden, inner, bias=True),
    ]
    return _blueprint(
        fields,
        layer,
        _ends(_GPTJ_LAYOUT, vocab, hidden, tied=tied, norm_bias=True, head_bias=True),
        num_layers=fields.count("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        max_context_tokens=fields.count("n_positions", "max_position_embeddings", default=2048, most=MAX_CONTEXT),
        tied=tied,
        gated_mlp=False,
    )


_LLAMA_LAYOUT = ModuleLayout("model.layers", ("model.embed_tokens",), ("model.norm",), "lm_head")
_FALCON_LAYOUT = ModuleLayout("transformer.h", ("transformer.word_embeddings",), ("transformer.ln_f",), "lm_head")
_GPTJ_LAYOUT = ModuleLayout("transformer.h", ("transformer.wte",), ("transformer.ln_f",), "lm_head")


def _llama_row(architecture: str, read: Callable[[Fields], Blueprint]) -> Family:
    return Family((architecture,), _LLAMA_LAYOUT, ("num_hidden_layers",), read)


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": _llama_row(
            "LlamaForCausalLM",
            partial(_llama_like, context_default=2048, has_attention_bias=True, has_mlp_bias=True),
        ),
        "mistral": _llama_row(
            "MistralForCausalLM",
            partial(
                _llama_like, context_default=131072, kv_heads_default=8, window=partial(_window, default=4096)
            ),
        ),
        "mixtral": _llama_row(
            "MixtralForCausalLM",
            partial(
                _llama_like,
                context_default=131072,
                kv_heads_default=8,
                experts=True,
                window=partial(_window, default=None),
            ),
        ),
        "qwen2": _llama_row(
            "Qwen2ForCausalLM",
            partial(_llama_like, context_default=32768, kv_heads_default=32, qkv_bias=True, window=_qwen_window),
        ),
        "qwen3": _llama_row(
            "Qwen3ForCausalLM",
            partial(
                _llama_like,
                context_default=32768,
                kv_heads_default=32,
                head_dim_default=128,
                has_attention_bias=True,
                qk_norm=True,
                window=_qwen_window,
            ),
        ),
        "falcon": Family(("FalconForCausalLM", "RWForCausalLM"), _FALCON_LAYOUT, ("num_hidden_layers",), _falcon),
        "gptj": Family(("GPTJForCausalLM",), _GPTJ_LAYOUT, ("n_layer", "num_hidden_layers"), _gptj),
    }
)
