"""LoRA variants of one worker: those loaded, those in flight, and which is unloaded for another.

Two limits hold at a worker: at most ``slots`` distinct variants are in flight, as many as take part in one step,
and those loaded take at most ``max_loaded`` places, each one or a share of it. The places beyond the slots are for
variants that rest between two requests, and for those that are loaded while their request still waits for a slot.

Eviction. The least ``frequency * reload time / size`` goes, and of equals the least recently used. The size is
what is short: the share of a place; where memory is full, the bytes. A load takes a time that all have and one
that grows with the bytes (``fingerprint.load_time``). Frequencies decay, so that a variant that was popular an
hour ago gives way. A variant that is asked for more often and goes in the place of one with a longer reload takes
its own reload time off that one's, until it is used: so no more time goes into loads for the sake of one than its
own would take. A variant in flight or pinned is never evicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass

from fingerprint.errors import ConfigError

__all__ = ["WorkerVariants", "protected_pins"]

_HALF_LIFE_S = 300.0  # of a variant's frequency


@dataclass(slots=True)
class _Loaded:
    frequency: float  # admissions, decayed to ``used_s``
    used_s: float
    turn: int = 0  # of the loads ahead of need, of which the later are the less wanted
    use: int = 0  # number of its last use or load, among those of all
    paid_s: float = 0.0  # reload times of those that went in its place since it was used
    share: float = 1.0  # of a place that it takes

    def decayed(self, now_s: float) -> float:
        return self.frequency * math.exp2((self.used_s - now_s) / _HALF_LIFE_S)


class WorkerVariants:
    """Variants of one worker: those loaded (or being loaded) and those in flight.

    Args:
        slots: distinct variants in flight at most.
        max_loaded: places of loaded variants.
        reload_s: returns the time of a load of a variant.
        share: returns the share of a place that a variant takes, above 0 and at most 1.
    """

    def __init__(
        self,
        slots: int,
        max_loaded: float,
        reload_s: Callable[[str], float] = lambda variant: 1.0,
        share: Callable[[str], float] = lambda variant: 1.0,
    ) -> None:
        if not 1 <= slots <= max_loaded:
            raise ConfigError(f"a worker needs 1 <= slots <= loaded variants, got {slots} and {max_loaded}")
        self.slots, self.max_loaded, self._reload_s, self.share = slots, max_loaded, reload_s, share
        self.taken = 0.0  # places
        self.pinned: Collection[str] = frozenset()
        self._loaded: dict[str, _Loaded] = {}
        self._in_flight: dict[str, int] = {}
        self._led: set[str] = set()
        self._preloads = self._uses = 0

    @property
    def loaded(self) -> KeysView[str]:
        return self._loaded.keys()

    @property
    def in_flight(self) -> Mapping[str, int]:
        """Requests by variant, in the order in which their slots were taken."""
        return self._in_flight

    @property
    def led(self) -> Collection[str]:
        """Variants whose parent is in flight: the request that passed none as it was admitted."""
        return self._led

    @property
    def longest_held(self) -> str | None:
        """Variant in flight whose slot was taken before those of all that are in flight now."""
        return next(iter(self._in_flight), None)

    def has_slot(self, variant: str) -> bool:
        return variant in self._in_flight or len(self._in_flight) < self.slots

    def evictions(
        self,
        variant: str,
        now_s: float,
        wanted: Collection[str] = (),
        *,
        spare_wanted: bool = False,
        size: Callable[[str], float] | None = None,
    ) -> tuple[str, ...] | None:
        """Return what must be unloaded before ``variant`` can be loaded; None: too much is in flight or pinned.

        Args:
            wanted: variants of waiting requests, the last to be evicted.
            spare_wanted: never evict those.
            size: returns the bytes of a variant, where they are what is short; None: places are.
        """
        excess = self.taken + min(self.share(variant), self.max_loaded) - self.max_loaded
        if variant in self._loaded or excess <= 0:
            return ()
        idle = [
            name
            for name in self._loaded
            if name not in self._in_flight and name not in self.pinned and not (spare_wanted and name in wanted)
        ]
        if sum(self._loaded[name].share for name in idle) < excess:
            return None

        def value(name: str) -> tuple[bool, float, float, int]:
            worth_s, used_s, turn = self._value(name, now_s)
            takes = self._loaded[name].share if size is None else max(size(name), 1.0)
            return name in wanted, worth_s / takes, used_s, turn

        chosen: list[str] = []
        for name in sorted(idle, key=value):
            if excess <= 0:
                break
            chosen.append(name)
            excess -= self._loaded[name].share
        for name in chosen[-2::-1]:  # a larger one after it may have made enough room alone
            if excess + self._loaded[name].share <= 0:
                chosen.remove(name)
                excess += self._loaded[name].share
        return tuple(chosen)

    def loss(self, evicted: Iterable[str], now_s: float) -> float:
        """Return frequency times reload time of what would be evicted: the cost of loading here."""
        return sum(self._value(name, now_s)[0] for name in evicted)

    def admit(self, variant: str, now_s: float, *, passes: bool = False) -> bool:
        """Count one more request in flight; return whether it is its variant's parent.

        Args:
            passes: a request before this one, which may not be passed, goes on waiting.
        """
        self._in_flight[variant] = self._in_flight.get(variant, 0) + 1
        if variant in self._loaded:
            self._use(variant, now_s)
        is_parent = not passes and variant not in self._led
        if is_parent:
            self._led.add(variant)
        return is_parent

    def leave(self, variant: str, *, is_parent: bool = False) -> None:
        """Count one request in flight less."""
        if is_parent:
            self._led.discard(variant)
        left = self._in_flight[variant] - 1
        if left:
            self._in_flight[variant] = left
        else:
            del self._in_flight[variant]

    def load(self, variant: str, now_s: float, evicted: Iterable[str] = ()) -> None:
        """Give ``variant`` the place of a loaded one, from the moment its loading begins."""
        for name in evicted:
            self._charge(name, now_s)
            self.unload(name)
        self._place(variant, _Loaded(0.0, now_s, use=self._next_use(), share=self.share(variant)))
        if variant in self._in_flight:
            self._use(variant, now_s)

    def _charge(self, evicted: str, now_s: float) -> None:
        """Take the reload time of ``evicted`` off that of the least frequent one, if that is kept by its own."""
        if evicted not in self._loaded:
            return
        frequency = self._loaded[evicted].decayed(now_s)
        idle = (
            one
            for name, one in self._loaded.items()
            if name not in self._in_flight and name not in self.pinned and one.decayed(now_s) < frequency
        )
        spared = min(idle, key=lambda one: one.decayed(now_s), default=None)
        if spared is not None:
            spared.paid_s += self._reload_s(evicted)

    def preload(self, variant: str, served_s: float) -> None:
        """Give a free place to ``variant``, which no request needs; the last one was admitted at ``served_s``."""
        self._preloads += 1
        self._place(variant, _Loaded(0.0, served_s, self._preloads, self._next_use(), share=self.share(variant)))

    def _place(self, variant: str, loaded: _Loaded) -> None:
        self.unload(variant)
        self._loaded[variant] = loaded
        self.taken += loaded.share

    def unload(self, variant: str) -> None:
        if variant in self._loaded:
            self.taken -= self._loaded.pop(variant).share

    def _use(self, variant: str, now_s: float) -> None:
        loaded = self._loaded[variant]
        loaded.frequency, loaded.used_s = loaded.decayed(now_s) + 1.0, now_s
        loaded.use, loaded.paid_s = self._next_use(), 0.0

    def _next_use(self) -> int:
        self._uses += 1
        return self._uses

    def _value(self, variant: str, now_s: float) -> tuple[float, float, int]:
        loaded = self._loaded[variant]
        reload_s = max(0.0, self._reload_s(variant) - loaded.paid_s)
        return loaded.decayed(now_s) * reload_s, loaded.used_s, -loaded.turn

    @property
    def in_slots(self) -> frozenset[str]:
        """Variants that have a slot, where an engine gives one to those used last, else every loaded one may."""
        by_use = sorted(self._loaded, key=lambda name: (name in self._in_flight, self._loaded[name].use))
        return frozenset(by_use[-self.slots :])


def protected_pins(
    pinned: Sequence[str], max_loaded: float, share: Callable[[str], float] = lambda variant: 1.0
) -> tuple[str, ...]:
    """Return the pinned variants that are never evicted: all but those that would leave no place to the rest."""
    taken = itertools.accumulate(map(share, pinned))
    return tuple(name for name, places in zip(pinned, taken, strict=True) if places <= max_loaded - 1)
