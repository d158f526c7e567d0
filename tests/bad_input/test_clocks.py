"""A wall clock that jumps, hours ahead or back, ends no worker, keeps none, and loses or repeats no request.

Durations are counted on the monotonic clock; comparisons with stored times are tested here.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.torch_engine.__main__ import _lease_ended
from iserve.state.store import Store
from tests.bad_input.conftest import Api

JUMPS = [-86_400.0 * 365, -3600.0, 3600.0, 86_400.0 * 365]


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set this process's wall clock so many seconds ahead."""
    real, shift = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + shift[0])

    def by(seconds: float) -> None:
        shift[0] = seconds

    return by


@pytest.mark.parametrize("seconds", JUMPS)
def test_a_renewed_lease_holds_and_one_that_is_not_ends_whatever_the_wall_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """The embedded engine's watch over its lease, in made-up time: a touch a second for 60 s, the wall clock set
    between two of them. The file's times are of the wall clock, as the kernel's are."""
    lease, ttl_s, renewed_s = tmp_path / "lease.json", 10.0, 60.0
    now = {"monotonic": 1000.0, "wall": 1.7e9}
    lease.touch()

    async def sleep(seconds_slept: float) -> None:
        for _ in range(4):  # the touches happen while it sleeps
            before = int(now["monotonic"])
            now["monotonic"] += seconds_slept / 4
            now["wall"] += seconds_slept / 4
            assert now["monotonic"] < 1200, "the lease was kept"
            if int(now["monotonic"]) > before and now["monotonic"] < 1000 + renewed_s:
                os.utime(lease, (now["wall"], now["wall"]))
        if 1030 <= now["monotonic"] < 1030 + seconds_slept:
            now["wall"] += seconds

    clock = SimpleNamespace(monotonic=lambda: now["monotonic"], time=lambda: now["wall"])
    monkeypatch.setattr("daemon.torch_engine.__main__.time", clock)
    monkeypatch.setattr("daemon.torch_engine.__main__.asyncio", SimpleNamespace(sleep=sleep, Event=asyncio.Event))
    asyncio.run(_lease_ended(lease, ttl_s))
    ended_after_s = now["monotonic"] - 1000
    assert renewed_s + ttl_s - 2 <= ended_after_s <= renewed_s + ttl_s + 4


def deploy(api: Api, key: str) -> tuple[int, str]:
    status, answer = api.ask("POST", "/api/v1/deployments", {"name": "clock"}, Idempotency_Key=key)
    return status, answer.get("status") or answer["error"]


@pytest.mark.parametrize("seconds", [s for s in JUMPS if s < 3601])
def test_a_request_is_known_again_when_the_clock_was_set_back_or_an_hour_ahead(
    api: Api, jump: Callable[[float], None], seconds: float
) -> None:
    key = f"key{seconds}"
    assert deploy(api, key) == (202, "accepted")
    jump(seconds)
    assert deploy(api, key) == (202, "accepted")  # the first answer again
    assert deploy(api, "other")[0] == 409
    jump(0.0)
    assert deploy(api, key) == (202, "accepted")
    api.controller.store.delete_deployment(api.controller.store.deployment("clock").id)


def test_keys_and_the_order_of_events_do_not_depend_on_the_clock(
    tmp_path: Path, jump: Callable[[float], None]
) -> None:
    from iserve.keys import new_key

    store = Store.open(tmp_path / "state.db")
    try:
        kept = []
        for number, seconds in enumerate(JUMPS):
            jump(seconds)
            _, record = new_key("admin")
            store.add_key(record, str(number))
            store.add_event(None, "other", str(number))
            kept.append(record.key_id)
        assert [event.message for event in store.events()] == ["0", "1", "2", "3"]
        assert {k.key_id for k in store.api_keys() if not k.revoked} == set(kept)  # none expires
        store.revoke_key(kept[0])
        jump(0.0)
        assert {k.key_id for k in store.api_keys() if not k.revoked} == set(kept[1:])
    finally:
        store.close()
