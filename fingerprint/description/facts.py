"""Facts that a config.json gives of the text model, whatever its family calls them.

Names differ between families; each fact is read under all that are in use. Values are bounded as in
``fingerprint.config_json``; a fact that is not given is None, for the tensors may tell it.
"""

from __future__ import annotations

from collections.abc import Mapping

from fingerprint.config_json import MAX_CONTEXT, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, Fields, show
from fingerprint.context_length import CONTEXT_KEYS, context_tokens
from fingerprint.errors import ConfigError

__all__ = ["LAYERS_KEYS", "TEXT_PARTS", "Facts", "text_config"]

TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")
LAYERS_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers")
_SUB_PARTS = ("attn_config", "ffn_config")  # DBRX's
_FLOAT32_STATES = frozenset({"nemotron_h"})  # vLLM's NemotronHForCausalLMConfig, unless the config says otherwise
_PER_LAYER = ("layers_block_type", "layer_types", "hybrid_override_pattern")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv", "num_attention_groups")
_HEAD_DIMS = ("head_dim", "attention_head_dim", "kv_channels")
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "inner_dim")
_EXPERT_INNER = ("moe_intermediate_size", "expert_ffn_hidden_size", "expert_intermediate_size")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "top_k_experts",
    "moe_k",
)
_WINDOWS = ("sliding_window", "sliding_window_size", "attention_window_size")
_STATES = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
_SLIDING = frozenset({"sliding_attention", "hybrid_sliding", "sliding"})
_CHUNKED = "chunked_attention"


def text_config(config: Mapping[str, object]) -> Mapping[str, object]:
    """Return the part of a multimodal config that describes the text model; else the config itself."""
    for name in TEXT_PARTS:
        part = config.get(name)
        if isinstance(part, Mapping):
            whole = {key: config[key] for key in ("quantization_config", "dtype", "torch_dtype") if key in config}
            inner = text_config(part)
            return whole | {"tie_word_embeddings": config.get("tie_word_embeddings")} | dict(inner)
    return config


class Facts:
    """The text model's sizes, as far as its config gives them."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = text_config(config)
        self.family = str(config.get("model_type", "unknown"))
        self._fields = Fields(self.config, self.family)

    def first(self, names: tuple[str, ...], most: int = MAX_WIDTH, least: int = 1) -> int | None:
        """Return the first of ``names`` that is given, the largest where it is given layer by layer.

        Raises:
            ConfigError: it is no integer within bounds.
        """
        parts = [self.config, *(part for key in _SUB_PARTS if isinstance(part := self.config.get(key), Mapping))]
        for part in parts:
            for name in names:
                value = part.get(name)
                if isinstance(value, list) and value and all(type(each) is int for each in value):
                    value = max(value)  # given layer by layer
                if value is not None:
                    return Fields({name: value}, self.family).count(name, most=most, least=least)
        return None

    @property
    def num_layers(self) -> int:
        """Number of layers as given, or the length of a list or a pattern with an entry per layer."""
        found = self.first(LAYERS_KEYS, MAX_LAYERS)
        if found is not None:
            return found
        each = next((self.config[name] for name in _PER_LAYER if self.config.get(name)), None)
        if isinstance(each, list | str) and len(each) <= MAX_LAYERS:
            return len(each)
        return self._fields.count(LAYERS_KEYS[0])  # which says that it is missing

    @property
    def heads(self) -> int | None:
        return self.first(_HEADS)

    @property
    def kv_heads(self) -> int | None:
        """Return the number of KV heads: as many as heads where nothing is said."""
        return self.given_kv_heads or self.heads

    @property
    def given_kv_heads(self) -> int | None:
        if self.config.get("multi_query") is True and self.config.get("new_decoder_architecture") is not True:
            return 1
        return self.first(_KV_HEADS)

    @property
    def head_dim(self) -> int | None:
        given = self.first(_HEAD_DIMS, least=0)
        hidden, heads = self.hidden_size, self.heads
        return given or (hidden // heads if hidden and heads else None)

    @property
    def hidden_size(self) -> int | None:
        return self.first(("hidden_size", "n_embd", "d_model", "dim"))

    @property
    def vocab_size(self) -> int | None:
        return self.first(("vocab_size",), MAX_VOCAB)

    @property
    def max_context_tokens(self) -> int:
        """2**20 where a model has no such bound, as state-space models have none."""
        given = self.first(CONTEXT_KEYS, MAX_CONTEXT)
        return 2**20 if given is None else context_tokens(self._fields, default=given)

    @property
    def inner(self) -> int | None:
        return self.first(_INNER)

    @property
    def expert_inner(self) -> int | None:
        return self.first(_EXPERT_INNER)

    @property
    def num_experts(self) -> int:
        return self.first(_EXPERTS, least=0) or 0

    @property
    def experts_per_token(self) -> int:
        return self.first(_PER_TOKEN, least=0) or 0

    @property
    def state_size(self) -> int | None:
        return self.first(_STATES)

    @property
    def state_element_bytes(self) -> int:
        """Bytes per state element of state-space layers: 2, or 4 where the config, or vLLM, asks for float32."""
        said = [self.config.get(name) for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")]
        given = next((value for value in said if isinstance(value, str)), None)
        if given is None:
            return 4 if self.family in _FLOAT32_STATES else 2
        return 4 if given == "float32" else 2

    @property
    def shared_kv_layers(self) -> int:
        """The last so many layers look into the KV of layers before them."""
        return self.first(("num_kv_shared_layers",), MAX_LAYERS, least=0) or 0

    @property
    def leaves_out(self) -> tuple[str, ...]:
        """Names of needed fields that the config.json leaves to the defaults of the family's class."""
        windows = self._window or self.first(("attention_chunk_size",), MAX_CONTEXT, least=0)
        told = any(self.config.get(name) is not None for name in ("layer_types", "sliding_window_pattern"))
        switched_off = self.config.get("use_sliding_window") is False
        only_states = self.heads is None and self.state_size is not None
        missing = {
            "num_attention_heads": self.heads is None and not only_states,
            "layer_types": bool(windows) and not told and not switched_off,
            "max_position_embeddings": self.first(CONTEXT_KEYS, MAX_CONTEXT) is None and not only_states,
            "num_experts_per_tok": self.num_experts > 0 and not self.experts_per_token,
        }
        return tuple(name for name, is_missing in missing.items() if is_missing)

    def count(self, name: str) -> int | None:
        return self.first((name,), least=0)

    @property
    def _window(self) -> int | None:
        return self.first(_WINDOWS, MAX_CONTEXT, least=0) or None

    def windows(self, num_layers: int) -> tuple[int | None, ...]:
        """Return each layer's attention window, by ``layer_types``; None (unlimited) where nothing limits it."""
        types = self._fields.layer_types(num_layers)
        if types is None:
            return self._windows_by_turns(num_layers)
        sliding, chunk = self._window, self.first(("attention_chunk_size",), MAX_CONTEXT, least=0) or None
        return tuple(sliding if t in _SLIDING else chunk if t == _CHUNKED else None for t in types)

    def _windows_by_turns(self, num_layers: int) -> tuple[int | None, ...]:
        """Return windows by turns: the last layer of each ``sliding_window_pattern`` layers is unlimited."""
        turn, window = self.first(("sliding_window_pattern",), MAX_LAYERS), self._window
        if turn is None or window is None:
            return (None,) * num_layers
        return tuple(window if (layer + 1) % turn else None for layer in range(num_layers))

    def layer_list(self, name: str, num_layers: int) -> list[object] | None:
        """A list with an entry per layer; None: the config has none.

        Raises:
            ConfigError: not such a list.
        """
        value = self.config.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) < num_layers:
            raise ConfigError(
                f"{name} must be a list with an entry for each of {num_layers} layers, {show(value)}"
            )
        return value[:num_layers]
