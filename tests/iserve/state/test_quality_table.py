"""Kept results of quality: by contents, bounded, over restarts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from iserve.state import quality_table
from iserve.state.database import open_database
from iserve.state.rows import QualityRow
from iserve.state.store import Store
from tests.iserve.state.raw_sql import Where, execute

ROW = QualityRow(identity="1" * 64, variant_hash="v" * 64, weights_stamp="w" * 64, measured_at=1.5, body="{}")


def test_results_are_of_their_contents_alone_the_newest_first(at: Callable[[], Store]) -> None:
    store = at()
    newer = replace(ROW, identity="2" * 64, measured_at=2.5)
    other = [
        replace(ROW, identity="3" * 64, variant_hash="x" * 64, measured_at=9.0),
        replace(ROW, identity="4" * 64, weights_stamp="x" * 64, measured_at=8.0),
        replace(ROW, identity="5" * 64, variant_hash="", measured_at=7.0),
    ]
    for row in (newer, ROW, *other):
        store.quality.put(row)
    store = at()
    assert store.quality.of_content(ROW.variant_hash, ROW.weights_stamp, 8) == (newer, ROW)
    assert store.quality.of_content(ROW.variant_hash, ROW.weights_stamp, 1) == (newer,)
    assert store.quality.of_content("", ROW.weights_stamp, 8) == (other[2],)
    assert store.quality.all(100) == (*other, newer, ROW)


def test_a_result_of_the_same_identity_is_replaced(at: Callable[[], Store]) -> None:
    store = at()
    store.quality.put(ROW)
    again = replace(ROW, measured_at=3.0, body='{"a":1}')
    store.quality.put(again)
    assert store.quality.all(10) == (again,)


def test_the_oldest_are_dropped_beyond_the_bound(at: Callable[[], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_table, "MAX_RESULTS", 5)
    store = at()
    rows = [replace(ROW, identity=f"{number:064}", measured_at=float(number)) for number in range(9)]
    for row in rows:
        store.quality.put(row)
    assert store.quality.all(100) == tuple(reversed(rows[4:]))


def test_results_of_one_content_push_out_their_own_alone(at: Callable[[], Store]) -> None:
    store = at()
    other = replace(ROW, identity="f" * 64, variant_hash="x" * 64, measured_at=0.0)
    store.quality.put(other)
    rows = [replace(ROW, identity=f"{number:064}", measured_at=1.0 + number) for number in range(40)]
    for row in rows:
        store.quality.put(row)
    assert store.quality.all(1_000) == (*reversed(rows[8:]), other)


def test_a_state_without_results_is_migrated(where: Where, at: Callable[[], Store]) -> None:
    database = open_database(where)
    database.migrate(to="0012")
    database.close()
    execute(where, "INSERT INTO models VALUES ('m', '/m', 1.5)")
    store = at()
    assert [model.name for model in store.models()] == ["m"]
    assert store.quality.all(10) == ()
