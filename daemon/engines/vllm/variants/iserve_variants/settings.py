"""Settings of the plug-in, which travel to every worker in vLLM's ``additional_config``.

vLLM hashes that configuration into the key of its compiled graphs, so graphs of other settings, and of another
revision of this plug-in, are not taken for these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from math import ceil
from typing import Any

from iserve_variants.formats import FORMATS

__all__ = [
    "ADAPTERS_KEY",
    "ADAPTER_LOADS_KEY",
    "KEY",
    "PER_PLACE",
    "RELEASES",
    "REVISION",
    "Settings",
    "adapter_loads_config",
    "adapters_config",
    "check_release",
    "place_share",
    "read_settings",
    "wants_adapter_kernels",
    "wants_background_adapters",
]

KEY = "iserve_deltas"
ADAPTERS_KEY = "iserve_adapters"
_ADAPTERS = {"kernels": 1}  # raise it where compiled graphs with our kernels of adapters change
ADAPTER_LOADS_KEY = "iserve_adapter_loads"
_ADAPTER_LOADS = {"background": 1}
PER_PLACE = 8  # adapters that share a place at most
_SHARE_STEPS = 64  # in which shares are counted: their sums are exact
REVISION = 1  # raise it where compiled graphs change
RELEASES = ("0.33.0",)  # of vLLM, whose sources the plug-in was written for


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Contents of slots, which are decided at the start: their memory is taken then."""

    format: str = "int2"
    """Of the changes of linears."""
    embedding_format: str | None = None
    """Of the change of embeddings; None: no slots for it."""
    output_format: str | None = None
    """Of the change of an output layer with weights of its own; None: no slots for it."""
    norms: bool = False
    """Whether slots have weights of norms."""
    adapters: bool = True
    """Whether LoRA adapters are served next to deltas; False: no step launches their kernels."""
    graphs_by_kind: bool = True
    """Whether steps with deltas, with adapters and with both have graphs of their own, where slots hold both."""
    merged_from_rows: int | None = 256
    """Rows of one delta in a step, from which on a prompt is multiplied with merged weights; None: never."""
    background: bool = False
    """Whether a load is refused until a thread of each rank has read the delta into a spare slot; steps go on."""
    arena_mib: int = 0
    """Host memory of each rank, page-locked, that keeps deltas which were read for later loads."""
    revision: int = REVISION

    def __post_init__(self) -> None:
        for name in (self.format, self.embedding_format, self.output_format):
            if name is not None and name not in FORMATS:
                raise ValueError(f"{KEY}: format {name!r} is none of {', '.join(FORMATS)}")
        if self.revision != REVISION:
            raise ValueError(f"{KEY}: these settings are of revision {self.revision}, the plug-in is {REVISION}")
        if self.arena_mib < 0:
            raise ValueError(f"{KEY}: arena_mib is {self.arena_mib}, and has to be 0 or more")
        if self.merged_from_rows is not None and self.merged_from_rows < 1:
            raise ValueError(f"{KEY}: merged_from_rows is {self.merged_from_rows}, and has to be 1 or more")

    def to_config(self) -> dict[str, Any]:
        """Return what ``--additional-config`` has to hold."""
        return {KEY: asdict(self)}


def read_settings(additional_config: object) -> Settings | None:
    """Return the settings in vLLM's ``additional_config``; None where there are none.

    Raises:
        ValueError: a setting that is not known, or a value that is none.
    """
    if not isinstance(additional_config, Mapping) or KEY not in additional_config:
        return None
    given = additional_config[KEY]
    known = {field.name for field in fields(Settings)}
    if not isinstance(given, Mapping) or not set(given) <= known:
        raise ValueError(f"{KEY}: {given!r} is no object of {', '.join(sorted(known))}")
    return Settings(**given)


def adapters_config() -> dict[str, Any]:
    """Return what ``--additional-config`` has to hold for our kernels of adapters."""
    return {ADAPTERS_KEY: dict(_ADAPTERS)}


def place_share(rank: int, slot_rank: int) -> float:
    """Return the share that an adapter of ``rank`` takes of a place for one of ``slot_rank``."""
    return min(1.0, max(1 / PER_PLACE, ceil(_SHARE_STEPS * rank / slot_rank) / _SHARE_STEPS))


def wants_adapter_kernels(additional_config: object) -> bool:
    """Return whether vLLM's ``additional_config`` asks for our kernels of adapters.

    Raises:
        ValueError: for those of another revision.
    """
    if not isinstance(additional_config, Mapping) or ADAPTERS_KEY not in additional_config:
        return False
    if additional_config[ADAPTERS_KEY] != _ADAPTERS:
        raise ValueError(f"{ADAPTERS_KEY}: {additional_config[ADAPTERS_KEY]!r} is not {_ADAPTERS}")
    return True


def adapter_loads_config() -> dict[str, Any]:
    """Return what ``--additional-config`` has to hold for loads of adapters next to steps."""
    return {ADAPTER_LOADS_KEY: dict(_ADAPTER_LOADS)}


def wants_background_adapters(additional_config: object) -> bool:
    """Return whether vLLM's ``additional_config`` asks for loads of adapters next to steps.

    Raises:
        ValueError: for what is none of ours.
    """
    if not isinstance(additional_config, Mapping) or ADAPTER_LOADS_KEY not in additional_config:
        return False
    if additional_config[ADAPTER_LOADS_KEY] != _ADAPTER_LOADS:
        raise ValueError(f"{ADAPTER_LOADS_KEY}: {additional_config[ADAPTER_LOADS_KEY]!r} is not {_ADAPTER_LOADS}")
    return True


def check_release(version: str) -> None:
    """Refuse a vLLM whose sources were not read.

    Raises:
        RuntimeError: with what to do.
    """
    if version.partition("+")[0] not in RELEASES:
        raise RuntimeError(
            f"deltas, kernels and loads of adapters were written for vLLM {', '.join(RELEASES)}, this is "
            f"{version or 'unknown'}: take that release, or export the variant (`iserve variant export`) and "
            "deploy its checkpoint"
        )
