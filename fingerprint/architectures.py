"""Model architectures that an engine has, as a value: adapters read it from the engine, planners only ask it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache

__all__ = ["Architectures", "Listed"]

_NEAREST = 3
_MOST_CHARACTERS = 100  # of a name that is looked for; the longest known has 49


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """Limits of one architecture that an engine has. A ``None`` reason means yes, or unknown and so tried."""

    no_tp: str | None = None  # why its tensors are not split
    no_pp: str | None = None  # why its layers lie in one pipeline stage
    no_lora: str | None = None  # why no adapters of it are served
    no_text_only: str | None = None  # why its towers are loaded whatever is asked
    note: str | None = None  # what a plan with it says


@dataclass(frozen=True, kw_only=True)
class Architectures:
    """Architectures of one engine, by the class name that config.json has.

    Attributes:
        source: the engine and release that lists them, as messages call it, e.g. "vLLM 0.33.0".
        listed: what it runs.
        reasons: why some further ones are not run, in the engine's own words.
        otherwise: why not any that is in neither.
        families: model types that the engine knows without any code of a checkpoint.
        brought: limits of a class whose code a checkpoint brings; None: the engine never runs such code.
    """

    source: str
    listed: Mapping[str, Listed]
    reasons: Mapping[str, str] = field(default_factory=dict)
    otherwise: str
    families: frozenset[str] = frozenset()
    brought: Listed | None = None

    def refusal(self, architecture: str) -> str | None:
        """Return why ``architecture`` is not run, with the nearest names that are; None when it is."""
        if architecture in self.listed:
            return None
        if (reason := self.reasons.get(architecture)) is not None:
            return reason
        nearest = _nearest(architecture[:_MOST_CHARACTERS], tuple(self.listed))
        return self.otherwise + (f"; nearest of those it has: {', '.join(nearest)}" if nearest else "")


@lru_cache(maxsize=1024)
def _nearest(name: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names most like ``name``. Kept: a plan asks it for every candidate of an unknown architecture."""
    return tuple(get_close_matches(name, names, n=_NEAREST))
