"""Architectures that vLLM runs: those that it lists, and classes of transformers that its backend for it takes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import resources

from daemon.engines.vllm.model_registry import Registered, Registry
from daemon.sources.transformers_classes import ModelClass, Transformers
from fingerprint.architectures import Architectures, Listed
from fingerprint.codec import from_json

__all__ = ["architectures_of", "recorded_registry"]

_DATA = "architectures.json"
_NO_PLAN = (
    "it takes transformers' class of it, which has no plan to split its tensors: vLLM refuses that (0.24) or "
    "keeps whole copies on each GPU, which a plan does not count"
)
_NO_LORA, _NO_PP = "its model class takes no adapters", "its model class is not made for several stages"
_NOT_TAKEN = "the Transformers implementation of it is not compatible with vLLM"
_STATEFUL = (
    "layers of its Transformers implementation do not dispatch through the attention interface, and vLLM has no "
    "other way to handle them"
)
_KEEPS_TOWERS = frozenset({"FunASRForConditionalGeneration"})  # of 0.24 to 0.33: their classes mark no tower
_NO_TEXT_ONLY = "its model class loads the towers whatever it is told"
_BACKEND_TOWERS = "its Transformers backend loads the towers in some releases"
_OTHER_TASK = "lists it to embed, to classify or as a part of another model, not to generate text"


@cache
def recorded_registry() -> Registry:
    """Return that of the newest release that iServe knows, recorded from its package, where none is installed."""
    data = resources.files("daemon.engines.vllm").joinpath(_DATA).read_bytes()
    return from_json(data, Registry, what=_DATA)


def architectures_of(registry: Registry, transformers: Transformers) -> Architectures:
    """Return what a vLLM with these two runs.

    The rule is that of its ``ModelRegistry``: a name that it lists is run by the class that it lists. Any other is
    looked up in transformers, whose class is run by the Transformers backend where its attention can be replaced.
    """
    source, backend = f"vLLM {registry.version}", registry.backend
    listed = {name: _listed(one, transformers.classes.get(name)) for name, one in registry.text.items()}
    listed |= {name: replace(listed[name], no_text_only=_NO_TEXT_ONLY) for name in _KEEPS_TOWERS if name in listed}
    if backend is not None:
        note = (
            f"{source} does not list it: its Transformers backend takes the class of transformers "
            f"{transformers.version}, which is tried"
        )
        listed |= {
            name: _listed(backend, found, note)
            for name, found in transformers.classes.items()
            if name not in listed and name not in registry.others and _is_taken(found)
        }
    reasons = {
        name: f"{source} does not list it, and {_STATEFUL if found.stateful else _NOT_TAKEN}"
        for name, found in transformers.classes.items()
        if not _is_taken(found)
    }
    reasons |= dict.fromkeys(registry.others, f"{source} {_OTHER_TASK}")
    reasons |= {
        name: f"vLLM had it until {release}, and {source} has it no more"
        for name, release in registry.removed.items()
    }
    reasons |= {
        name: f"{source} has it in a plug-in alone ({where}), which iServe does not install"
        for name, where in registry.plugins.items()
    }
    return Architectures(
        source=source,
        listed=listed,
        reasons={name: reason for name, reason in reasons.items() if name not in listed},
        families=frozenset(family for found in transformers.classes.values() for family in found.families),
        brought=None if backend is None else _brought(backend, source),
        otherwise=f"{source} does not list it, and transformers {transformers.version} has no class of that "
        "name that its Transformers backend could take",
    )


def _brought(backend: Registered, source: str) -> Listed:
    """Return the limits of a class whose code the checkpoint brings."""
    note = (
        f"{source} does not list it: its Transformers backend takes the class that the checkpoint brings, which "
        "is tried"
    )
    return Listed(
        no_tp="whether the class that the checkpoint brings can be split is not known",
        no_pp=_NO_PP if backend.pp is False else None,
        no_lora=_NO_LORA if backend.lora is False else None,
        no_text_only=_BACKEND_TOWERS,
        note=note,
    )


def _is_taken(found: ModelClass) -> bool:
    """Return whether the backend runs a class; one with a state it takes and fails at its first such layer."""
    return (found.takes_attention or found.sets_attention) and not found.stateful


def _listed(one: Registered, of_transformers: ModelClass | None, note: str | None = None) -> Listed:
    """Return the limits that the sources tell; what they do not tell is tried."""
    has_no_plan = of_transformers is not None and not of_transformers.tp_plan
    return Listed(
        no_tp=_NO_PLAN if one.by_transformers and has_no_plan else None,
        no_pp=_NO_PP if one.pp is False else None,
        no_lora=_NO_LORA if one.lora is False else None,
        no_text_only=_BACKEND_TOWERS if one.by_transformers or note is not None else None,
        note=note,
    )
