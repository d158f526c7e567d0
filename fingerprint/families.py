"""From a Hugging Face config.json to a :class:`ModelSpec`, by one table of families.

It knows which sizes a family's config.json holds and which matrices a layer is made of; it imports no model code,
runs none (``auto_map`` is ignored), and knows nothing of weights, formats or devices. A new family is one row of
``FAMILIES`` and, where no present reader fits, one function. Parameter counts follow the modules that the
transformers classes build; the tests compare each with the class on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from fingerprint.errors import ConfigError, NotFoundError, UnsupportedModelError
from fingerprint.model_spec import ModelSpec

__all__ = ["FAMILIES", "Family", "ModuleLayout", "load_spec", "module_layout", "read_config", "read_spec"]

MAX_CONFIG_BYTES = 4 * 2**20
# Bounds on what a config.json may claim: far above any model there is, low enough that no sum of them is absurd.
MAX_LAYERS = 10_000
MAX_WIDTH = 2**22  # hidden, intermediate, heads, head_dim, experts
MAX_VOCAB = 2**27
MAX_CONTEXT = 2**31


@dataclass(frozen=True)
class ModuleLayout:
    """Names of the modules, in the checkpoint and in the transformers causal-LM class alike."""

    layers: str  # the list of hidden layers: tensors are "<layers>.<index>.<rest>"
    embedding: tuple[str, ...]
    final_norm: tuple[str, ...]
    head: str  # absent from the checkpoint when the embeddings are tied


@dataclass(frozen=True)
class Family:
    """One row of the table."""

    architectures: tuple[str, ...]  # of the causal-LM class; the first is transformers' own
    layout: ModuleLayout
    layers_key: tuple[str, ...]  # names under which config.json may give the number of layers
    read: Callable[[_Fields], ModelSpec]


def read_config(path: Path) -> dict[str, object]:
    """The parsed config.json at ``path`` (the file, or a directory that holds it).

    Raises:
        NotFoundError: no such file or directory, or a directory without config.json.
        ConfigError: larger than 4 MiB, not JSON, or not a JSON object.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no config.json" if path.is_dir() else f"there is no file {file}"
        raise NotFoundError(f"{what}; give a model directory or its config.json")
    try:
        with file.open("rb") as stream:
            raw = stream.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_CONFIG_BYTES} bytes; that is not a model's config.json")
    try:
        config = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} holds a JSON {type(config).__name__}, a config.json holds an object")
    return config


def load_spec(path: Path) -> ModelSpec:
    """:func:`read_spec` of the config.json at ``path`` (the file, or a directory that holds it).

    Raises:
        NotFoundError, ConfigError, UnsupportedModelError: as :func:`read_config` and :func:`read_spec`.
    """
    return read_spec(read_config(path))


def read_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a parsed config.json describes. Offline; no model code is imported or run.

    Raises:
        ConfigError: a size is missing, of the wrong type, out of bounds, or contradicts another.
        UnsupportedModelError: another family, an encoder-decoder, multimodal, non-generating or already quantized
            model.
    """
    name = _family_name(config)
    family = FAMILIES[name]
    _refuse_other_tasks(config, name, family)
    return family.read(_Fields(config, name))


def module_layout(family: str) -> ModuleLayout:
    """Where a family keeps its layers, embedding, final norm and head.

    Raises:
        UnsupportedModelError: no such family.
    """
    if family not in FAMILIES:
        raise UnsupportedModelError(f"model_type {_show(family)} is not supported; {_supported()}")
    return FAMILIES[family].layout


# --- what is refused ---

# Families people ask for, so that the refusal can say what the model is; all others are refused as unknown.
_ENCODER_DECODERS = {"t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "m2m_100", "whisper"}
_ENCODERS = {"bert", "roberta", "xlm-roberta", "distilbert", "electra", "deberta-v2", "modernbert"}
_PART_CONFIGS = ("vision_config", "audio_config", "text_config", "speech_config")


def _supported() -> str:
    return "supported are decoder-only " + ", ".join(FAMILIES)


def _family_name(config: Mapping[str, object]) -> str:
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ConfigError(f"model_type must be a string that names the family, got {_show(name)}; {_supported()}")
    if config.get("is_encoder_decoder") is True or name in _ENCODER_DECODERS:
        raise UnsupportedModelError(f"model_type {_show(name)} is an encoder-decoder model; {_supported()}")
    parts = [key for key in _PART_CONFIGS if config.get(key)]
    if parts:
        raise UnsupportedModelError(
            f"model_type {_show(name)} is a vision or multimodal model (its config.json has {', '.join(parts)}); "
            f"{_supported()}"
        )
    if name in _ENCODERS:
        raise UnsupportedModelError(
            f"model_type {_show(name)} is an encoder that generates no text; {_supported()}"
        )
    if name not in FAMILIES:
        raise UnsupportedModelError(f"model_type {_show(name)} is not supported; {_supported()}")
    return name


def _refuse_other_tasks(config: Mapping[str, object], name: str, family: Family) -> None:
    architectures = config.get("architectures")
    if architectures is not None:
        if not isinstance(architectures, list) or not all(isinstance(entry, str) for entry in architectures):
            raise ConfigError(f"architectures must be a list of class names, got {_show(architectures)}")
        if architectures and not set(architectures) & set(family.architectures):
            raise UnsupportedModelError(
                f"architecture {_show(architectures[0])} does not generate text; of {name}, "
                f"{family.architectures[0]} is supported"
            )
    quantization = config.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise UnsupportedModelError(
            f"the checkpoint is already quantized ({_show(method)}); iServe plans and makes the formats itself: "
            "give the 16-bit model"
        )


# --- reading fields ---


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


class _Fields:
    """Checked reading of one config.json: every fault is a ConfigError with field, value and what is allowed."""

    def __init__(self, config: Mapping[str, object], family: str) -> None:
        self._config = config
        self.family = family

    def given(self, *names: str) -> tuple[str, object]:
        """Name and value of the field that goes by any of ``names``; ``(names[0], None)`` when absent or null."""
        found = [(name, self._config[name]) for name in names if self._config.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(
                    f"{found[0][0]}={_show(found[0][1])} and {name}={_show(value)} mean the same field of "
                    f"{self.family} and differ; keep one"
                )
        return found[0] if found else (names[0], None)

    def count(self, *names: str, default: int | None = None, most: int = MAX_WIDTH) -> int:
        """An integer in 1..most; ``default`` None makes the field required."""
        name, value = self.given(*names)
        if value is None:
            if default is None:
                raise ConfigError(f"{name} is missing; a {self.family} config.json needs it (1 to {most:,})")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{name} must be an integer from 1 to {most:,}, got {_show(value)}")
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        _, value = self.given(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {_show(value)}")
        return value

    def has(self, name: str) -> bool:
        """Whether the key is there, be it null."""
        return name in self._config

    def layer_types(self, num_layers: int) -> list[str] | None:
        _, value = self.given("layer_types")
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != num_layers or not all(isinstance(t, str) for t in value):
            raise ConfigError(f"layer_types must name a type for each of {num_layers} layers, got {_show(value)}")
        return value


def _divides(name: str, small: int, whole_name: str, whole: int) -> None:
    if whole % small:
        raise ConfigError(f"{name}={small} must divide {whole_name}={whole}; {whole} / {small} is not whole")


# --- the families ---


def _llama_like(
    fields: _Fields,
    *,
    kv_heads_default: int | None = None,
    head_dim_default: int | None = None,
    has_attention_bias: bool = False,
    has_mlp_bias: bool = False,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    experts: bool = False,
    window: Callable[[_Fields, int], int | None] = lambda fields, num_layers: None,
) -> ModelSpec:
    """RMSNorm, rotary attention with q, k, v, o matrices, gated MLP or experts. Source: the transformers classes.

    Args:
        kv_heads_default: of the config class, for a config.json that leaves it out; None: as many as heads.
        head_dim_default: likewise; None: hidden_size / heads.
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
    _divides("num_key_value_heads", kv_heads, "num_attention_heads", heads)
    head_dim = fields.count("head_dim", default=head_dim_default or 0)
    if head_dim == 0:
        _divides("num_attention_heads", heads, "hidden_size", hidden)
        head_dim = hidden // heads
    if head_dim % 2:
        raise ConfigError(f"head_dim must be even for rotary embeddings, got {head_dim}")
    num_experts = fields.count("num_local_experts", "num_experts", default=8) if experts else 0
    per_token = fields.count("num_experts_per_tok", default=2, most=num_experts) if experts else 0
    tied = fields.flag("tie_word_embeddings", default=False)

    mlp = 3 * hidden * inner
    attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
    linear = attention + mlp * max(1, num_experts)
    rest = 2 * hidden + hidden * num_experts  # two norms, the router
    if has_attention_bias and fields.flag("attention_bias", default=False):
        rest += (heads + 2 * kv_heads) * head_dim + hidden
    if qkv_bias:
        rest += (heads + 2 * kv_heads) * head_dim
    if has_mlp_bias and fields.flag("mlp_bias", default=False):
        rest += 2 * inner + hidden
    if qk_norm:
        rest += 2 * head_dim
    return ModelSpec(
        family=fields.family,
        architecture=FAMILIES[fields.family].architectures[0],
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=fields.count(
            "max_position_embeddings", default=_CONTEXT_DEFAULTS[fields.family], most=MAX_CONTEXT
        ),
        tied_embeddings=tied,
        num_experts=num_experts,
        experts_per_token=per_token,
        sliding_window=window(fields, num_layers),
        layer_params=linear + rest,
        layer_linear_params=linear,
        layer_expert_params=mlp * num_experts,
        embedding_params=vocab * hidden,
        head_params=0 if tied else vocab * hidden,
        final_norm_params=hidden,
    )


# What the config classes assume when the field is absent; Falcon's published config.json files leave it out.
_CONTEXT_DEFAULTS = {"llama": 2048, "mistral": 131072, "mixtral": 131072, "qwen2": 32768, "qwen3": 32768}


def _window(fields: _Fields, num_layers: int, *, default: int | None) -> int | None:
    """One window for all layers; a null switches it off, an absent field means the class's default."""
    if fields.given("sliding_window")[1] is None:
        return None if fields.has("sliding_window") else default
    return fields.count("sliding_window", most=MAX_CONTEXT)


def _qwen_window(fields: _Fields, num_layers: int) -> int | None:
    """The window if every layer slides. With layers of both kinds all count as full, so KV is not underestimated."""
    if not fields.flag("use_sliding_window", default=False):
        return None
    window = _window(fields, num_layers, default=4096)
    types = fields.layer_types(num_layers)
    if types is not None:
        return window if all(kind == "sliding_attention" for kind in types) else None
    _, first_sliding = fields.given("max_window_layers")
    if isinstance(first_sliding, bool) or not isinstance(first_sliding, int | None) or (first_sliding or 0) < 0:
        raise ConfigError(f"max_window_layers must be an integer from 0, got {_show(first_sliding)}")
    return window if first_sliding == 0 else None


def _falcon(fields: _Fields) -> ModelSpec:
    """LayerNorms with bias, fused query_key_value, plain MLP. Three attention layouts, as in FalconAttention."""
    num_layers = fields.count("num_hidden_layers", most=MAX_LAYERS)
    hidden = fields.count("n_embed", "hidden_size")
    heads = fields.count("num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("ffn_hidden_size", default=4 * hidden, most=4 * MAX_WIDTH)
    _divides("num_attention_heads", heads, "hidden_size", hidden)
    head_dim = hidden // heads
    if head_dim % 2 and not fields.flag("alibi", default=False):
        raise ConfigError(f"hidden_size / num_attention_heads must be even for rotary embeddings, got {head_dim}")
    grouped = fields.flag("new_decoder_architecture", default=False)
    parallel = fields.flag("parallel_attn", default=True)
    if grouped:
        kv_heads = fields.count("num_kv_heads", default=heads)
        _divides("num_kv_heads", kv_heads, "num_attention_heads", heads)
    else:  # num_kv_heads is not read here: one head with multi_query, else as many as queries
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    norms = fields.count("num_ln_in_parallel_attn", default=2 if grouped else 1, most=2) if parallel else 2
    if grouped and not parallel:
        raise ConfigError(
            "parallel_attn must be true with new_decoder_architecture: such layers have no other form"
        )
    if parallel and norms == 2 and not grouped:
        raise ConfigError("num_ln_in_parallel_attn must be 1 without new_decoder_architecture, got 2")
    qkv_out = (heads + 2 * kv_heads) * head_dim
    linear = hidden * qkv_out + hidden * hidden + 2 * hidden * inner
    biases = qkv_out + hidden + inner + hidden if fields.flag("bias", default=False) else 0
    tied = fields.flag("tie_word_embeddings", default=True)
    return ModelSpec(
        family=fields.family,
        architecture=FAMILIES[fields.family].architectures[0],
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=fields.count("max_position_embeddings", default=2048, most=MAX_CONTEXT),
        tied_embeddings=tied,
        gated_mlp=False,
        layer_params=linear + biases + norms * 2 * hidden,
        layer_linear_params=linear,
        embedding_params=vocab * hidden,
        head_params=0 if tied else vocab * hidden,
        final_norm_params=2 * hidden,
    )


def _gptj(fields: _Fields) -> ModelSpec:
    """One LayerNorm per layer, attention without biases, MLP and head with biases."""
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    vocab = fields.count("vocab_size", most=MAX_VOCAB)
    inner = fields.count("n_inner", default=4 * hidden, most=4 * MAX_WIDTH)
    _divides("n_head", heads, "n_embd", hidden)
    head_dim = hidden // heads
    rotary = fields.count("rotary_dim", default=64)
    if rotary > head_dim or rotary % 2:
        raise ConfigError(f"rotary_dim must be even and at most n_embd / n_head = {head_dim}, got {rotary}")
    tied = fields.flag("tie_word_embeddings", default=False)
    linear = 4 * hidden * hidden + 2 * hidden * inner
    return ModelSpec(
        family=fields.family,
        architecture=FAMILIES[fields.family].architectures[0],
        num_layers=fields.count("n_layer", "num_hidden_layers", most=MAX_LAYERS),
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_context_tokens=fields.count("n_positions", "max_position_embeddings", default=2048, most=MAX_CONTEXT),
        tied_embeddings=tied,
        gated_mlp=False,
        layer_params=linear + inner + hidden + 2 * hidden,
        layer_linear_params=linear,
        embedding_params=vocab * hidden,
        head_params=vocab + (0 if tied else vocab * hidden),  # the head's bias is its own even when tied
        final_norm_params=2 * hidden,
    )


_LLAMA_LAYOUT = ModuleLayout("model.layers", ("model.embed_tokens",), ("model.norm",), "lm_head")
_FALCON_LAYOUT = ModuleLayout("transformer.h", ("transformer.word_embeddings",), ("transformer.ln_f",), "lm_head")
_GPTJ_LAYOUT = ModuleLayout("transformer.h", ("transformer.wte",), ("transformer.ln_f",), "lm_head")
_LAYERS = ("num_hidden_layers",)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            ("LlamaForCausalLM",),
            _LLAMA_LAYOUT,
            _LAYERS,
            partial(_llama_like, has_attention_bias=True, has_mlp_bias=True),
        ),
        "mistral": Family(
            ("MistralForCausalLM",),
            _LLAMA_LAYOUT,
            _LAYERS,
            partial(_llama_like, kv_heads_default=8, window=partial(_window, default=4096)),
        ),
        "mixtral": Family(
            ("MixtralForCausalLM",),
            _LLAMA_LAYOUT,
            _LAYERS,
            partial(_llama_like, kv_heads_default=8, experts=True, window=partial(_window, default=None)),
        ),
        "qwen2": Family(
            ("Qwen2ForCausalLM",),
            _LLAMA_LAYOUT,
            _LAYERS,
            partial(_llama_like, kv_heads_default=32, qkv_bias=True, window=_qwen_window),
        ),
        "qwen3": Family(
            ("Qwen3ForCausalLM",),
            _LLAMA_LAYOUT,
            _LAYERS,
            partial(
                _llama_like,
                kv_heads_default=32,
                head_dim_default=128,
                has_attention_bias=True,
                qk_norm=True,
                window=_qwen_window,
            ),
        ),
        "falcon": Family(("FalconForCausalLM", "RWForCausalLM"), _FALCON_LAYOUT, _LAYERS, _falcon),
        "gptj": Family(("GPTJForCausalLM",), _GPTJ_LAYOUT, ("n_layer", "num_hidden_layers"), _gptj),
    }
)
