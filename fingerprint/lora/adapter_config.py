"""Reading a PEFT ``adapter_config.json``: which update of the base's weights the tensors are.

Every field is one of four kinds: read here, known to matter to training alone, refused by name when it is on, or
unknown, which is refused as well: an adapter that does more than iServe computes is never applied in part.
Source of the fields: peft 0.21.2, ``tuners/lora/config.py`` and ``config.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fingerprint.config_json import read_json_object, show
from fingerprint.errors import ConfigError
from fingerprint.lora.module_patterns import ModulePatterns, Targets

__all__ = ["CONFIG_FILE", "AdapterConfig", "parse_adapter_config", "read_adapter_config"]

CONFIG_FILE = "adapter_config.json"
LORA = "LORA"
_MAX_RANK = 2**20
_MAX_ENTRIES = 20_000  # of a pattern or a list
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
        *("use_rslora",),
    }
)
_MERGE_ELSEWHERE = (
    "merge it with PEFT (merge_and_unload), and deploy the result or add it as a delta (iserve variant add)"
)
_DEPLOY_MERGED = "merge it with PEFT (merge_and_unload) and deploy the result"  # of which no delta is made
_NOT_MERGEABLE = "no merged checkpoint computes the same, and no engine of this release serves it"
# Fields that change more than W + scale * B @ A, with what they do and the way out.
_REFUSED: Mapping[str, str] = {
    "alora_invocation_tokens": f"the update holds from certain tokens on (aLoRA); {_NOT_MERGEABLE}",
    "arrow_config": f"several adapters are mixed token by token (Arrow); {_NOT_MERGEABLE}",
    "ensure_weight_tying": f"tied weights are updated together; {_MERGE_ELSEWHERE}",
    "fan_in_fan_out": f"the base keeps its matrices transposed (Conv1D, as GPT-2); {_DEPLOY_MERGED}",
    "kasa_config": f"the base's weights are truncated before the update (KaSA); {_MERGE_ELSEWHERE}",
    "layer_replication": f"layers of the base are repeated; {_DEPLOY_MERGED}",
    "lora_bias": f"biases were trained; {_MERGE_ELSEWHERE}",
    "megatron_config": f"the adapter is of Megatron's layers; {_MERGE_ELSEWHERE}",
    "modules_to_save": f"whole modules were trained; {_MERGE_ELSEWHERE}",
    "monteclora_config": f"the update is sampled (MonteCLoRA); {_MERGE_ELSEWHERE}",
    "target_parameters": f"stacked parameters (experts) were adapted; {_DEPLOY_MERGED}",
    "trainable_token_indices": f"embeddings of tokens were trained; {_MERGE_ELSEWHERE}",
    "use_bdlora": f"the matrices are block-diagonal (BD-LoRA); {_MERGE_ELSEWHERE}",
    "use_dora": f"the merged rows are rescaled (DoRA); {_MERGE_ELSEWHERE}",
    "use_qalora": f"inputs are pooled in groups (QA-LoRA); {_MERGE_ELSEWHERE}",
}
_SAME_BASE = ("gaussian", "eva", "orthogonal", "mica")  # initial values that leave the base's weights as they are
_Check = Callable[[object, str], float]
_NAME = re.compile(r"\w+")
_CHANGED_BASE = re.compile(r"pissa(?:_niter_\d{1,6})?|olora|corda|loftq|lora_ga")


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
    unsupported: tuple[str, ...]  # why it is not applied, each with the way out; empty: a plain LoRA

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
    return AdapterConfig(
        method=method,
        base_model=base or None,
        rank=_rank(fields.get("r"), "r") if is_lora else 0,
        alpha=_number(fields.get("lora_alpha"), "lora_alpha") if is_lora else 0.0,
        rank_stabilized=_flag(fields, "use_rslora"),
        rank_pattern=_pattern(fields, "rank_pattern", _rank),
        alpha_pattern=_pattern(fields, "alpha_pattern", _number),
        targets=_targets(fields),
        unsupported=tuple(_unsupported(method, fields)),
    )


def _unsupported(method: str, fields: Mapping[str, object]) -> Iterator[str]:
    if method != LORA:
        yield f"peft_type is {show(method)}; only LORA is applied: merge it with PEFT, or train a LoRA"
        return
    yield from (f"{name} is set: {why}" for name, why in _REFUSED.items() if _is_on(fields.get(name)))
    task = fields.get("task_type")
    if task not in (None, "CAUSAL_LM"):
        yield f"task_type is {show(task)}; only adapters of text generation (CAUSAL_LM) are applied"
    bias = fields.get("bias")
    if bias not in (None, "none"):
        yield f"bias is {show(bias)}: biases of the base were trained; {_MERGE_ELSEWHERE}"
    lists = fields.get("layers_pattern")
    if not all(isinstance(each, str) and _NAME.fullmatch(each) for each in _as_list(lists)):
        yield f"layers_pattern is {show(lists)}; only plain names are matched; {_MERGE_ELSEWHERE}"
    initial = fields.get("init_lora_weights", True)
    if isinstance(initial, str) and _CHANGED_BASE.fullmatch(initial.lower()):
        yield (
            f"init_lora_weights is {show(initial)}: training began on changed weights of the base; save the "
            "adapter again with PEFT's path_initial_model_for_weight_conversion"
        )
    elif not (isinstance(initial, bool) or initial is None or initial in _SAME_BASE):
        yield f"init_lora_weights is {show(initial)}, which this release does not know; {_MERGE_ELSEWHERE}"
    known = _READ | _TRAINING_ONLY | _REFUSED.keys()
    unknown = sorted(name for name, value in fields.items() if name not in known and _is_on(value))
    if unknown:
        named = ", ".join(f"{show(name)[1:-1]}={show(fields[name])}" for name in unknown[:_MAX_UNKNOWN])
        yield f"{named}: unknown to this release, so what the adapter computes is not known; {_MERGE_ELSEWHERE}"


def _is_on(value: object) -> bool:
    return not (value is None or value is False or value in ([], {}, ""))


def _flag(fields: Mapping[str, object], name: str) -> bool:
    value = fields.get(name)
    if not isinstance(value, bool | None):
        raise ConfigError(f"{name} must be true or false, got {show(value)}")
    return bool(value)


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


def _names(value: object, field: str) -> tuple[str, ...]:
    if (
        not isinstance(value, list)
        or len(value) > _MAX_ENTRIES
        or not all(isinstance(each, str) for each in value)
    ):
        raise ConfigError(f"{field} must be a list of names, got {show(value)}")
    return tuple(value)
