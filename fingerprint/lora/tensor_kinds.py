"""Tensors of an adapter's file by what they are. Each name is understood, or is a reason to refuse the adapter.

Source of the names: peft 0.21.2, ``utils/save_and_load.py`` and ``utils/other.py`` (ModulesToSaveWrapper,
TrainableTokensWrapper).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fingerprint.lora.adapter_config import IA3, MERGE_ELSEWHERE, AdapterConfig, MergedPart

__all__ = ["PREFIX", "SortedTensors", "merged_parts", "module_of", "sort_tensors", "why_unsupported"]

PREFIX = "base_model.model."
_SAVED_UNASKED = ("embed_tokens", "lm_head")  # PEFT saves them whole where rows may have been added
_MAX_SHOWN = 200  # characters of a name in a message
_MAX_NAME_CHARS = 600
# Kinds by the ends of names, behind the name of a module of the base.
_ENDS: Mapping[str, str] = {
    "lora_A": ".lora_A.weight",
    "lora_B": ".lora_B.weight",
    "lora_B.bias": ".lora_B.bias",
    "magnitude": ".lora_magnitude_vector",
    "embedding_A": ".lora_embedding_A",
    "embedding_B": ".lora_embedding_B",
    "tokens": ".token_adapter.trainable_tokens_delta",
    "ia3": ".ia3_l",
}
_BENEATH = (".base_layer.weight", ".base_layer.bias")  # saved whole, of a module that has an update
_RESERVED = re.compile(r"(?:^|\.)(?:lora_|ia3_|modules_to_save|token_adapter|base_layer|original_module)")
# Tensors of no known place, by a part of their names.
_WHAT = {
    "modules_to_save": "a whole module that was trained",
    "lora_": "a part of a LoRA that this release does not know",
    ".bias": "a trained bias",
    ".weight": "a whole module that was trained",
}


@dataclass(frozen=True, slots=True)
class SortedTensors:
    """Tensors of an adapter's file by what they are."""

    by_kind: Mapping[str, dict[str, str]] = field(default_factory=lambda: {kind: {} for kind in _ENDS})
    saved: dict[str, str] = field(default_factory=dict)  # by the name of the base's tensor
    beneath: dict[str, str] = field(default_factory=dict)  # saved, of modules that have updates as well
    unknown: list[str] = field(default_factory=list)

    def of(self, kind: str) -> dict[str, str]:
        """Return the tensors of a kind, by the module of the base."""
        return self.by_kind[kind]

    def updated_modules(self) -> set[str]:
        """Return the modules of the base that have an update."""
        kinds = ("lora_A", "lora_B", "embedding_A", "embedding_B", "ia3")
        return {module for kind in kinds for module in self.of(kind)}


def sort_tensors(tensors: Iterable[str]) -> SortedTensors:
    """Return ``tensors`` by what they are, in the order of their names."""
    found = SortedTensors()
    for tensor in sorted(tensors):
        name = tensor.removeprefix(PREFIX)
        if name == tensor or len(name) > _MAX_NAME_CHARS:
            found.unknown.append(tensor)
        elif (kind := next((kind for kind, end in _ENDS.items() if name.endswith(end)), None)) is not None:
            found.by_kind[kind][name.removesuffix(_ENDS[kind])] = tensor
        elif name.endswith(_BENEATH):
            module, _, parameter = name.rpartition(".base_layer.")
            found.beneath[f"{module}.{parameter}"] = tensor
        elif _RESERVED.search(name):
            found.unknown.append(tensor)
        else:
            found.saved[name] = tensor
    return found


def module_of(target: str) -> str:
    """Return the module of the base that has the tensor ``target``."""
    return target.rpartition(".")[0]


def is_named(module: str, ends: Iterable[str]) -> bool:
    """Return whether ``module``, or a module that it is part of, ends in one of ``ends``, as PEFT matches them."""
    parts = module.split(".")
    names = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(name.endswith(end) for end in ends for name in names)


def why_unsupported(found: SortedTensors, config: AdapterConfig) -> Iterator[str]:
    """Yield a reason, with the way out, for each kind of tensor that ``config`` does not explain, or asks for."""
    yield from _not_explained(found, config)
    yield from _missing(found, config)


def _not_explained(found: SortedTensors, config: AdapterConfig) -> Iterator[str]:
    firsts: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for tensor, what in _unexplained(found, config):
        firsts.setdefault(what, tensor)
        counts[what] += 1
    for what, first in firsts.items():
        more = f" and {counts[what] - 1} more" if counts[what] > 1 else ""
        yield f"tensor {first[:_MAX_SHOWN]!r}{more}: {what}; {MERGE_ELSEWHERE}"


def _unexplained(found: SortedTensors, config: AdapterConfig) -> Iterator[tuple[str, str]]:
    unset = "which adapter_config.json does not say"
    is_ia3 = config.method == IA3
    allowed = {
        "lora_A": not is_ia3,
        "lora_B": not is_ia3,
        "embedding_A": not is_ia3,
        "embedding_B": not is_ia3,
        "ia3": is_ia3,
        "lora_B.bias": config.lora_bias,
        "magnitude": config.use_dora,
        "tokens": bool(config.token_rows),
    }
    what = {
        "lora_B.bias": f"a trained bias, {unset}",
        "magnitude": f"DoRA, {unset}",
        "tokens": f"trained embeddings of tokens, {unset}",
    }
    for kind, tensors in found.by_kind.items():
        if not allowed[kind]:
            yield from ((tensor, what.get(kind, "of another method")) for tensor in tensors.values())
    for tensor in found.unknown:
        yield tensor, next((what for part, what in _WHAT.items() if part in tensor), "of no known kind")
    updated = found.updated_modules()
    for target, tensor in found.saved.items():
        if not _is_explained(target, config, updated):
            named = next((what for part, what in _WHAT.items() if target.endswith(part)), None)
            yield tensor, "of no known kind" if named is None else f"{named}, {unset}"
        elif target.endswith(".weight") and module_of(target) in updated:
            yield tensor, "a whole module that has an update as well"
    for target, tensor in found.beneath.items():
        module, is_bias = module_of(target), target.endswith(".bias")
        is_said = config.bias != "none" if is_bias else module.endswith(_SAVED_UNASKED)
        if module not in updated or not is_said:
            yield tensor, f"{'a trained bias' if is_bias else 'a whole module that was trained'}, {unset}"
    for module, tensor in found.of("tokens").items():
        if module in updated or f"{module}.weight" in found.saved:
            yield tensor, "trained embeddings of tokens of a module that is changed otherwise as well"


def _is_explained(target: str, config: AdapterConfig, updated: set[str]) -> bool:
    """Return whether a tensor that was saved whole is one that the configuration, or PEFT's habit, has saved."""
    module = module_of(target)
    if is_named(module, config.saved_modules):
        return True
    if target.endswith(".bias"):
        return config.bias == "all" or (config.bias == "lora_only" and module in updated)
    return target.endswith(".weight") and module.endswith(_SAVED_UNASKED)


def _missing(found: SortedTensors, config: AdapterConfig) -> Iterator[str]:
    again = "which adapter_config.json asks for; save the adapter again"
    modules = sorted({*found.of("lora_A"), *found.of("embedding_A")})
    linears = sorted(found.of("lora_A"))
    for is_asked, kind, what, names in (
        (config.use_dora, "magnitude", "lora_magnitude_vector (DoRA)", modules),
        (config.lora_bias, "lora_B.bias", "bias of lora_B", linears),
    ):
        lacking = [module for module in names if module not in found.of(kind)] if is_asked else []
        if lacking:
            more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            yield f"no {what} is there for {lacking[0][:_MAX_SHOWN]!r}{more}, {again}"
    for kind, what in (("magnitude", "lora_magnitude_vector"), ("lora_B.bias", "bias of lora_B")):
        alone = sorted(found.of(kind).keys() - set(modules))
        if alone:
            yield f"{alone[0][:_MAX_SHOWN]!r} has a {what} and no update; save the adapter again"
    downs, ups = found.of("embedding_A").keys(), found.of("embedding_B").keys()
    odd = sorted((downs ^ ups) | (downs & (found.of("lora_A").keys() | found.of("lora_B").keys())))
    if odd:
        yield f"{odd[0][:_MAX_SHOWN]!r} has not the one pair of lora_embedding_A and _B; save the adapter again"
    for end in config.saved_modules:
        if not any(is_named(module_of(target), (end,)) for target in found.saved):
            yield f"no tensor of the module {end[:_MAX_SHOWN]!r} is there, {again}"
    if config.token_rows and not found.of("tokens"):
        yield f"no trained embeddings of tokens are there, {again}"


def merged_parts(found: SortedTensors, config: AdapterConfig) -> Iterator[MergedPart]:
    """Yield what no engine serves unmerged, the parts that the configuration says first."""
    yield from config.merged_only
    for tensor in list(found.of("embedding_A").values())[:1]:
        yield MergedPart("embeddings", f"tensor {tensor[:_MAX_SHOWN]!r}: an update of embeddings")
    saved = sorted((found.saved | found.beneath).items())
    whole = [tensor for target, tensor in saved if target.endswith(".weight")]
    if whole and not config.saved_modules:
        yield MergedPart("whole modules", f"tensor {whole[0][:_MAX_SHOWN]!r}: a whole module that was trained")
