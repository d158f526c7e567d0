"""Architectures that the embedded engine runs: what transformers' classes say of themselves and what was compared.

A class that says that it takes the attention of another may still compute otherwise with it (DiffLlama does), and
nothing would fail. Of the classes that say so those are listed whose tokens were compared with transformers' own.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from daemon.sources.source_cache import kept_reading
from daemon.sources.transformers_classes import MAPPINGS_FILE, ModelClass, Transformers, read_transformers
from daemon.torch_engine.model import capabilities
from fingerprint.architectures import Architectures, Listed
from fingerprint.errors import EngineError

__all__ = ["architectures_of", "installed_transformers"]

_NO_INTERFACE = "its transformers class has no attention interface, which the embedded engine's cache goes through"
_UNDECLARED = "its transformers class does not say that it takes an attention function of others"
_STATEFUL = "its layers keep a state of each sequence, and the embedded engine's cache keeps K and V of each token"
_MULTIMODAL = "it takes more than text, and the embedded engine serves text alone"
_NO_PLAN = "transformers has no tensor-parallel plan for it"


def installed_transformers() -> Transformers:
    """Return the classes of the transformers that this interpreter imports.

    Raises:
        EngineError: there is none, or it cannot be read.
    """
    found = find_spec("transformers")
    if found is None or found.origin is None:
        raise EngineError("transformers is not installed")
    try:
        release = version("transformers")
    except PackageNotFoundError:
        release = "unknown"
    return kept_reading(read_transformers, Transformers, Path(found.origin).parent, release, file=MAPPINGS_FILE)


def architectures_of(transformers: Transformers) -> Architectures:
    """Return what the embedded engine runs with ``transformers``."""
    listed, reasons = dict[str, Listed](), dict[str, str]()
    for name, found in transformers.classes.items():
        family = next((one for one in found.families if one in capabilities.FAMILIES), None)
        if family is None:
            reasons[name] = _reason(found)
        else:
            listed[name] = Listed(
                no_tp=capabilities.NO_TP.get(family) if found.tp_plan else _NO_PLAN,
                no_pp=capabilities.ONE_STAGE.get(family),
                no_lora=capabilities.NO_LORA.get(family),
            )
    source = f"transformers {transformers.version}"
    return Architectures(
        source=source,
        listed=listed,
        reasons=reasons,
        families=frozenset(family for found in transformers.classes.values() for family in found.families),
        otherwise=f"{source} has no class of that name that generates text",
    )


def _reason(found: ModelClass) -> str:
    """Return why a class is not run: an exception of ours, what it says of itself, or that it was not compared."""
    for family in found.families:
        if family in capabilities.REFUSED:
            return capabilities.REFUSED[family]
    if found.multimodal:
        return _MULTIMODAL
    if found.stateful:
        return _STATEFUL
    if not found.takes_attention:
        return _UNDECLARED if found.sets_attention else _NO_INTERFACE
    return capabilities.UNTESTED
