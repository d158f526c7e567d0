"""Reading a PEFT ``adapter_config.json``: which update of the base's weights the tensors are.

Every field is one of four kinds: read here, known to matter to training alone, refused by name when it is on, or
unknown, which is refused as well: an adapter that does more than iServe computes is never applied in part. Of the
fields that are read some say that more than W + scale * B @ A is changed: such an adapter is merged, and no engine
serves it as an adapter.
Source of the fields: peft 0.21.2, ``tuners/lora/config.py``, ``tuners/ia3/config.py`` and ``config.py``.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fingerprint.config_json import read_json_object, show
from fingerprint.errors import ConfigError
from fingerprint.lora.module_patterns import ModulePatterns, Targets

__all__ = [
    "CONFIG_FILE",
    "IA3",
    "LORA",
    "MERGE_ELSEWHERE",
    "AdapterConfig",
    "MergedPart",
    "parse_adapter_config",
    "read_adapter_config",
]

CONFIG_FILE = "adapter_config.json"
LORA, IA3 = "LORA", "IA3"
_MAX_RANK = 2**20
_MAX_ENTRIES = 20_000  # of a pattern or a list
_MAX_ENDS = 256  # of names of modules, each of which is compared with each tensor's
_MAX_UNKNOWN = 8  # unknown fields that are named
_TRAINING_ONLY = frozenset(
    {
        *("auto_mapping", "corda_config", "eva_config", "inference_mode", "lora_dropout", "lora_ga_config"),
        *("loftq_config", "megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
        *("torch_dtype", "velora_config"),
    }
)
_READ = frozenset(
    {
        *(
            "alpha_pattern",
            "base_model_name_or_path",
            "bias",
            "exclude_modules",
            "init_lora_weights",
            "layers_pattern",
        ),
        *("layers_to_transform", "lora_alpha", "peft_type", "r", "rank_pattern", "target_modules", "task_type"),
        *("lora_bias", "modules_to_save", "trainable_token_indices", "use_dora", "use_rslora"),
    }
)
_IA3_TRAINING_ONLY = frozenset(
    {"auto_mapping", "inference_mode", "init_ia3_weights", "peft_version", "revision", "torch_dtype"}
)
_IA3_READ = frozenset(
    {
        *("base_model_name_or_path", "exclude_modules", "feedforward_modules", "modules_to_save", "peft_type"),
        *("target_modules", "task_type"),
    }
)
MERGE_ELSEWHERE = (
    "merge it with PEFT (merge_and_unload), and deploy the result or add it as a delta (iserve variant add)"
)
_DEPLOY_MERGED = "merge it with PEFT (merge_and_unload) and deploy the result"  # of which no delta is made
_NOT_MERGEABLE = "no merged checkpoint computes the same, and no engine of this release serves it"
# Fields that change more than W + scale * B @ A, with what they do and the way out.
_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": f"the update holds from certain tokens on (aLoRA); {_NOT_MERGEABLE}",
    "arrow_config": f"several adapters are mixed token by token (Arrow); {_NOT_MERGEABLE}",
    "ensure_weight_tying": f"tied weights are updated together; {MERGE_ELSEWHERE}",
    "fan_in_fan_out": f"the base keeps its matrices transposed (Conv1D, as GPT-2); {_DEPLOY_MERGED}",
    "kasa_config": f"the base's weights are truncated before the update (KaSA); {MERGE_ELSEWHERE}",
    "layer_replication": f"layers of the base are repeated; {_DEPLOY_MERGED}",
    "megatron_config": f"the adapter is of Megatron's layers; {MERGE_ELSEWHERE}",
    "monteclora_config": f"the update is sampled (MonteCLoRA); {MERGE_ELSEWHERE}",
    "target_parameters": f"stacked parameters (experts) were adapted; {_DEPLOY_MERGED}",
    "use_bdlora": f"the matrices are block-diagonal (BD-LoRA); {MERGE_ELSEWHERE}",
    "use_qalora": f"inputs are pooled in groups (QA-LoRA); {MERGE_ELSEWHERE}",
}
# Fields that say what is changed as well, with the kind's name and what they do.
_MERGED: Mapping[str, tuple[str, str]] = {
    "lora_bias": ("biases of updates", "biases were trained"),
    "modules_to_save": ("whole modules", "whole modules were trained"),
    "trainable_token_indices": ("trained tokens", "embeddings of tokens were trained"),
    "use_dora": ("DoRA", "the merged rows are rescaled (DoRA)"),
}
_SAME_BASE = ("gaussian", "eva", "orthogonal", "mica")  # initial values that leave the base's weights as they are
_Check = Callable[[object, str], float]
_NAME = re.compile(r"\w+")
_CHANGED_BASE = re.compile(r"pissa(?:_niter_\d{1,6})?|olora|corda|loftq|lora_ga")


@dataclass(frozen=True, slots=True)
class MergedPart:
    """Part of an adapter that no engine serves unmerged."""

    kind: str  # such as "DoRA"
    why: str  # for a message: what says that it is there, and what it does


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterConfig:
    """Checked content of an ``adapter_config.json``; rank, alpha and patterns are meaningful for LoRA only."""

    method: str  # PEFT's name, e.g. "LORA"
    base_model: str | None  # name or path of the base, as stated; nothing vouches for it
    rank: int
    alpha: float
    rank_stabilized: bool  # scale is alpha / sqrt(rank), else alpha / rank
    rank_pattern: ModulePatterns
    alpha_pattern: ModulePatterns
    targets: Targets
    use_dora: bool
    lora_bias: bool  # the B of each update has a bias
    bias: str  # which biases of the base were trained: "none", "all" or "lora_only"
    saved_modules: tuple[str, ...]  # ends of names of the modules that were trained whole
    token_rows: tuple[tuple[str | None, tuple[int, ...]], ...]  # rows by the end of a name; None: the embeddings
    feedforward: tuple[str, ...] | None  # IA3: ends of names of modules whose inputs are scaled; None: not listed
    merged_only: tuple[MergedPart, ...]  # why it is merged and not served as an adapter
    unsupported: tuple[str, ...]  # why it is not applied, each with the way out

    def scale(self, rank: int, alpha: float) -> float:
        """Return the factor of B @ A."""
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


def read_adapter_config(file: Path) -> AdapterConfig:
    """Return what ``file`` says.

    Raises:
        NotFoundError: there is no such file.
        ConfigError: not readable, larger than 4 MiB, no JSON object, or a field of a wrong type or value.
    """
    found = read_json_object(file, f"there is no file {file}; give the folder of an adapter", f"an {CONFIG_FILE}")
    try:
        return parse_adapter_config(found)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def parse_adapter_config(fields: Mapping[str, object]) -> AdapterConfig:
    """Return the checked ``fields``; errors of :func:`read_adapter_config`."""
    method, base = fields.get("peft_type"), fields.get("base_model_name_or_path")
    if not isinstance(method, str) or not method:
        raise ConfigError(f"peft_type must name a method such as LORA, got {show(method)}")
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"base_model_name_or_path must be a name or a path, got {show(base)}")
    is_lora = method == LORA
    feedforward = fields.get("feedforward_modules")
    return AdapterConfig(
        method=method,
        base_model=base or None,
        rank=_rank(fields.get("r"), "r") if is_lora else 0,
        alpha=_number(fields.get("lora_alpha"), "lora_alpha") if is_lora else 0.0,
        rank_stabilized=_flag(fields, "use_rslora"),
        rank_pattern=_pattern(fields, "rank_pattern", _rank),
        alpha_pattern=_pattern(fields, "alpha_pattern", _number),
        targets=_targets(fields),
        use_dora=_flag(fields, "use_dora"),
        lora_bias=_flag(fields, "lora_bias"),
        bias=_text(fields, "bias") or "none",
        saved_modules=_names(fields.get("modules_to_save") or [], "modules_to_save", _MAX_ENDS),
        token_rows=_token_rows(fields.get("trainable_token_indices")),
        feedforward=_names(feedforward, "feedforward_modules", _MAX_ENDS) if _is_listed(feedforward) else None,
        merged_only=tuple(_merged_only(method, fields)),
        unsupported=tuple(_unsupported(method, fields)),
    )


def _merged_only(method: str, fields: Mapping[str, object]) -> Iterator[MergedPart]:
    if method == IA3:
        yield MergedPart("scaling", "peft_type is 'IA3': inputs and outputs of matrices are scaled")
    for name, (kind, why) in _MERGED.items():
        if _is_on(fields.get(name)):
            yield MergedPart(kind, f"{name} is set: {why}")
    bias = fields.get("bias")
    if bias not in (None, "none"):
        yield MergedPart("biases of the base", f"bias is {show(bias)}: biases of the base were trained")


def _unsupported(method: str, fields: Mapping[str, object]) -> Iterator[str]:
    if method not in (LORA, IA3):
        yield f"peft_type is {show(method)}; only LORA and IA3 are applied: merge it with PEFT, or train a LoRA"
        return
    yield from (f"{name} is set: {why}" for name, why in _REFUSED.items() if _is_on(fields.get(name)))
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        yield f"task_type is {show(task)}; only adapters of text generation (CAUSAL_LM) are applied"
    if method == LORA:
        yield from _unsupported_lora(fields)
    read, training = (_IA3_READ, _IA3_TRAINING_ONLY) if method == IA3 else (_READ, _TRAINING_ONLY)
    known = read | training | _REFUSED.keys()
    unknown = sorted(name for name, value in fields.items() if name not in known and _is_on(value))
    if unknown:
        named = ", ".join(f"{show(name)[1:-1]}={show(fields[name])}" for name in unknown[:_MAX_UNKNOWN])
        yield f"{named}: unknown to this release, so what the adapter computes is not known; {MERGE_ELSEWHERE}"


def _unsupported_lora(fields: Mapping[str, object]) -> Iterator[str]:
    bias = fields.get("bias")
    if bias not in (None, "none", "all", "lora_only"):
        yield f"bias is {show(bias)}, which this release does not know; {MERGE_ELSEWHERE}"
    if _is_on(fields.get("use_dora")) and _is_on(fields.get("lora_bias")):
        yield "use_dora and lora_bias are both set, which PEFT does not train; fetch the configuration again"
    lists = fields.get("layers_pattern")
    if not all(isinstance(each, str) and _NAME.fullmatch(each) for each in _as_list(lists)):
        yield f"layers_pattern is {show(lists)}; only plain names are matched; {MERGE_ELSEWHERE}"
    initial = fields.get("init_lora_weights", True)
    if isinstance(initial, str) and _CHANGED_BASE.fullmatch(initial.lower()):
        yield (
            f"init_lora_weights is {show(initial)}: training began on changed weights of the base; save the "
            "adapter again with PEFT's path_initial_model_for_weight_conversion"
        )
    elif not (isinstance(initial, bool) or initial is None or initial in _SAME_BASE):
        yield f"init_lora_weights is {show(initial)}, which this release does not know; {MERGE_ELSEWHERE}"


def _is_on(value: object) -> bool:
    return not (value is None or value is False or value in ([], {}, ""))


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{name} must be true or false, got {show(value)}")
    return bool(value)


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if not isinstance(value, str | None):
        raise ConfigError(f"{name} must be a text, got {show(value)}")
    return value


def _token_rows(value: object) -> tuple[tuple[str | None, tuple[int, ...]], ...]:
    """Return the rows of ``trainable_token_indices``, in the order of the trained tensor's."""
    if isinstance(value, dict):
        if len(value) > _MAX_ENDS:
            raise ConfigError(f"trainable_token_indices must name at most {_MAX_ENDS} modules, got {len(value):,}")
        return tuple((name, _rows(rows, f"trainable_token_indices[{show(name)}]")) for name, rows in value.items())
    return ((None, _rows(value, "trainable_token_indices")),) if _is_on(value) else ()


def _rows(value: object, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int and each >= 0 for each in value):
        raise ConfigError(f"{field} must be a list of numbers of tokens, got {show(value)}")
    twice = next((each for each, count in Counter(value).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(f"{field} has token {twice} twice; which of its rows counts is not known")
    return tuple(value)


def _rank(value: object, name: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise ConfigError(f"{name} must be a rank from 1 to {_MAX_RANK:,}, got {show(value)}")
    return value


def _number(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e30:
        raise ConfigError(f"{name} must be a finite number, got {show(value)}")
    return float(value)


def _pattern(fields: Mapping[str, object], name: str, check: _Check) -> ModulePatterns:
    value = fields.get(name) or {}
    if not isinstance(value, dict) or len(value) > _MAX_ENTRIES:
        raise ConfigError(f"{name} must be an object of at most {_MAX_ENTRIES:,} entries, got {show(value)}")
    return ModulePatterns(name, tuple((key, check(each, f"{name}[{show(key)}]")) for key, each in value.items()))


def _targets(fields: Mapping[str, object]) -> Targets:
    modules, excluded = fields.get("target_modules"), fields.get("exclude_modules")
    layers = fields.get("layers_to_transform")
    numbers = [layer for layer in _as_list(layers) if type(layer) is int]
    if len(numbers) != len(_as_list(layers)):
        raise ConfigError(f"layers_to_transform must be numbers of layers, got {show(layers)}")
    return Targets(
        modules=frozenset(_names(modules, "target_modules")) if _is_listed(modules) else None,
        excluded=frozenset(_names(excluded or [], "exclude_modules") if _is_listed(excluded) else ()),
        layers=frozenset(numbers),
        layers_lists=_names(_as_list(fields.get("layers_pattern")), "layers_pattern"),
    )


def _is_listed(value: object) -> bool:
    """Return whether modules are given otherwise than by one expression."""
    return value is not None and not isinstance(value, str)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [] if value in (None, "") else [value]


def _names(value: object, field: str, most: int = _MAX_ENTRIES) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ConfigError(f"{field} must be a list of names, got {show(value)}")
    if len(value) > most:
        raise ConfigError(f"{field} must have at most {most:,} names, got {len(value):,}")
    return tuple(value)
