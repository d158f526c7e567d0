"""Loads and evictions that the gateway made, as events; where variants are, in documents and words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from iserve.cli.variant_register import _counted_places, _places
from iserve.controller import variant_events
from iserve.controller.variant_api import with_places
from iserve.controller.variant_events import VariantEvents
from iserve.route_table import VariantChange, VariantDemand, VariantPlace
from tests.golden_words import Golden
from tests.iserve.test_variant_advice import VARIANT


class Kept:
    """Store of events."""

    def __init__(self) -> None:
        self.events: list[tuple[int | None, str, str]] = []

    def add_event(self, deployment_id: int | None, kind: str, message: str) -> None:
        self.events.append((deployment_id, kind, message))


def change(number: int, kind: str = "loaded", variant: str = "style") -> VariantChange:
    took_s = 0.125 if kind == "loaded" else None
    return VariantChange(number=number, at=0.0, kind=kind, variant=variant, worker_id="chat-0", took_s=took_s)


def demand(*changes: VariantChange, places: tuple[VariantPlace, ...] = ()) -> VariantDemand:
    return VariantDemand(
        deployment="chat", requests_per_s=None, requests=0, of_variants=(), changes=changes, places=places
    )


class Looks:
    """Events of a controller, whose clock the test moves, and whose gateway has ``changes``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, serves: bool = True) -> None:
        monkeypatch.setattr(variant_events, "variant_servers", lambda rows: ("chat",) if serves else ())
        self.store, self.now_s, self.asked = Kept(), 1000.0, 0
        self.changes: tuple[VariantChange, ...] = ()
        self.further: tuple[VariantDemand, ...] = ()  # of other deployments
        store: Any = self.store
        self._events = VariantEvents(store, self._demand, lambda: self.now_s)

    def _demand(self) -> tuple[VariantDemand, ...]:
        self.asked += 1
        return (demand(*self.changes), *self.further)

    def look(self, after_s: float = 5.0) -> list[tuple[int | None, str, str]]:
        """Return the events of one look."""
        before = len(self.store.events)
        self.now_s += after_s
        row: Any = type("Row", (), {"name": "chat", "id": 7})()
        self._events.look([row])
        return self.store.events[before:]


def test_each_change_is_recorded_once(monkeypatch: pytest.MonkeyPatch, golden: Golden) -> None:
    looks = Looks(monkeypatch)
    looks.changes = (change(999_999), change(1_000_001), change(1_000_002, "evicted", "tone"))
    found = looks.look()
    assert [(owner, kind) for owner, kind, _ in found] == [(None, "variant-loaded"), (None, "variant-evicted")]
    golden("variant", [message for _, _, message in found])
    assert looks.look() == []
    looks.changes = (*looks.changes, change(1_000_003))
    assert looks.look(after_s=0.5) == []  # a moment after the last
    assert len(looks.look()) == 1


def test_many_changes_are_one_event_for_each_kind_and_worker(
    monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    looks = Looks(monkeypatch)
    looks.changes = tuple(
        change(1_000_001 + number, kind, f"v{number}")
        for number, kind in enumerate(["loaded", "loaded", "evicted"] * 8)
    )
    found = looks.look()
    assert [kind for _, kind, _ in found] == ["variant-loaded", "variant-evicted"]
    golden("variant", [message for _, _, message in found])


def test_changes_of_one_deployment_hide_none_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many at one moment have numbers ahead of the clock."""
    looks = Looks(monkeypatch)
    looks.changes = tuple(change(1_000_001 + number) for number in range(60))
    assert len(looks.look()) == 1
    looks.further = (replace(demand(change(1_000_020)), deployment="code"),)
    assert len(looks.look()) == 1
    assert looks.look() == []


def test_the_gateway_is_not_asked_where_no_variant_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch, serves=False)
    assert looks.look() == []
    assert looks.asked == 0


def test_documents_have_the_workers_of_each_variant(golden: Golden) -> None:
    places = tuple(
        VariantPlace(variant=name, worker_id=worker, place=place)
        for name, worker, place in (
            ("style", "chat-0", "gpu"),
            ("style", "chat-1", "host"),
            ("style", "chat-2", "loading"),
            ("tone", "chat-0", "gpu"),
        )
    )
    found = with_places((VARIANT, replace(VARIANT, name="none")), (demand(places=places),))
    assert [(one.worker_id, one.place) for one in found[0].places] == [
        ("chat-0", "gpu"),
        ("chat-1", "host"),
        ("chat-2", "loading"),
    ]
    assert {one.deployment for one in found[0].places} == {"chat"}
    assert found[1].places == ()
    said = [_places(one) for one in (*found, replace(found[1], on_disk=False))]
    golden("variant", [*said, *map(_counted_places, found)])
