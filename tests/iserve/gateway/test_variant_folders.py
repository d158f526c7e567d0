"""Folders of loaded variants, which stay while a worker may read them again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from iserve.gateway.errors import ApiError
from iserve.gateway.variant_residency import VariantResidency
from iserve.route_table import Route, VariantRoute, WorkerTarget
from tests.golden_words import Golden
from tests.waiting import PATIENCE_S


def variant(name: str, *, pinned: bool) -> VariantRoute:
    return VariantRoute(
        name=name, engine_name=f"{name}@1", content_hash=f"{name}-hash", created=0, num_bytes=1, pinned=pinned
    )


ROUTE = Route(
    name="base",
    model="base",
    created=0,
    max_context_tokens=100,
    workers=(WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True),),
    adapter_slots=2,
    loaded_adapters=8,
    variants=(variant("loaded", pinned=True), variant("broken", pinned=True), variant("cold", pinned=False)),
)


class Loader:
    """Stand-in that counts how often each folder is asked for; that of ``broken`` fails after the first time."""

    def __init__(self) -> None:
        self.asked: dict[str, int] = {}
        self.again = asyncio.Event()

    async def folder(self, one: VariantRoute) -> Path:
        self.asked[one.name] = self.asked.get(one.name, 0) + 1
        if min(self.asked.get("loaded", 0), self.asked.get("broken", 0)) >= 4:
            self.again.set()
        if one.name == "broken" and self.asked[one.name] > 1:
            raise ApiError(500, "a tensor was changed")
        return Path("/folder") / one.content_hash

    async def load(self, target: WorkerTarget, one: VariantRoute, folder: Path) -> None: ...
    async def unload(self, target: WorkerTarget, engine_name: str) -> None: ...

    async def loaded(self, target: WorkerTarget) -> frozenset[str]:
        return frozenset()


class Observer:
    def loaded(self, variant: str, seconds: float) -> None: ...
    def evicted(self, variant: str) -> None: ...


def test_folders_of_what_is_loaded_are_asked_for_until_the_deployment_ends(
    caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    async def run() -> dict[str, int]:
        loader: Any = Loader()
        residency = VariantResidency(ROUTE, lambda: None, loader, Observer(), keep_s=0.001)
        await asyncio.wait_for(loader.again.wait(), PATIENCE_S)
        residency.close()
        await asyncio.sleep(0)
        asked = dict(loader.asked)
        for _ in range(20):  # a timer that still ran would ask in each
            await asyncio.sleep(0.002)
        assert loader.asked == asked
        return asked

    asked = asyncio.run(run())
    assert "cold" not in asked, "nothing of it is read"
    golden("rest-errors", sorted({message for message in caplog.messages if "broken" in message}))
