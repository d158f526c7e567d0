"""Adapters of an engine by name: loading, loaded, and leaving while the last requests of theirs run.

Pure: names and numbers, no tensors and no lock. Numbers are never used again, so that a name that is loaded anew
is not taken for the adapter that it named before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fingerprint.errors import ConflictError, NotFoundError

__all__ = ["Adapter", "Adapters"]

_MAX_SHOWN = 200


@dataclass(frozen=True, slots=True)
class Adapter:
    """Adapter under the name that requests give."""

    adapter_id: int
    name: str
    folder: str
    created: int  # seconds since the epoch


class Adapters:
    """Names and numbers of at most ``max_loaded`` adapters, those that are loading or leaving included."""

    def __init__(self, max_loaded: int, first_id: int = 1) -> None:
        self._max_loaded, self._next_id = max_loaded, first_id
        self._loading: dict[str, Adapter] = {}
        self._loaded: dict[str, Adapter] = {}
        self._leaving: set[int] = set()

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """Adapters that requests may name, in the order of their loading."""
        return tuple(self._loaded.values())

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    def begin(self, name: str, folder: str, created: int) -> Adapter:
        """Return a new adapter, which takes its place from now on and can be named after :meth:`finish`.

        Raises:
            ConflictError: the name is loaded or loading, or no place is left.
        """
        shown = f"{name[:_MAX_SHOWN]!r}"
        if name in self._loaded or name in self._loading:
            raise ConflictError(f"the adapter {shown} is loaded already; unload it first, or give another name")
        num_held = len(self._loaded) + len(self._loading) + len(self._leaving)
        if num_held >= self._max_loaded:
            leaving = f", {len(self._leaving)} of them until their last request ends" if self._leaving else ""
            raise ConflictError(
                f"{num_held} adapters are loaded{leaving}, at most {self._max_loaded} are; "
                f"unload one before {shown}"
            )
        adapter = self._loading[name] = Adapter(self._next_id, name, folder, created)
        self._next_id += 1
        return adapter

    def finish(self, adapter: Adapter, *, is_loaded: bool) -> None:
        """End what :meth:`begin` began: the adapter can be named, or its place is free."""
        del self._loading[adapter.name]
        if is_loaded:
            self._loaded[adapter.name] = adapter

    def find(self, name: str) -> Adapter:
        """Return the adapter that requests name so.

        Raises:
            NotFoundError: none is loaded under this name.
        """
        if name not in self._loaded:
            names = ", ".join(repr(each) for each in list(self._loaded)[:5]) or "none"
            raise NotFoundError(f"there is no adapter {name[:_MAX_SHOWN]!r} here; loaded are {names}")
        return self._loaded[name]

    def unload(self, name: str) -> None:
        """Let no further request name the adapter; it is freed once none of its requests runs or waits.

        Raises:
            NotFoundError: as :meth:`find`.
        """
        self._leaving.add(self.find(name).adapter_id)
        del self._loaded[name]

    def unused(self, in_use: Iterable[int | None]) -> frozenset[int]:
        """Return the leaving adapters that are not among ``in_use``, which is not looked at where none leaves."""
        return frozenset(self._leaving.difference(in_use)) if self._leaving else frozenset()

    def freed(self, adapter_id: int) -> None:
        """Give the place of an adapter back that was leaving."""
        self._leaving.remove(adapter_id)
