"""Variants of a worker whose memory is full: which of them give way."""

from __future__ import annotations

import asyncio

from iserve.gateway.variant_worker import VariantWorker
from iserve.route_table import WorkerTarget
from placement.variant_routing import WorkerVariants


def worker_with(*loaded: str) -> VariantWorker:
    state = WorkerVariants(2, 4)
    for name in loaded:
        state.load(name, 0.0)
    return VariantWorker(WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True), state)


def test_an_idle_variant_gives_way() -> None:
    worker = worker_with("idle", "wanted")
    assert worker.shrink("wanted", 1.0, ()) == ("idle",)


def test_one_that_is_being_loaded_does_not_give_way() -> None:
    """Keep what reads one delta at a time from waiting for an unload that waits for it."""

    async def shrink() -> tuple[str, ...] | None:
        worker = worker_with("loading", "wanted")
        worker.loads["loading"] = asyncio.create_task(asyncio.sleep(0))
        found = worker.shrink("wanted", 1.0, ())
        await worker.loads["loading"]
        return found

    assert asyncio.run(shrink()) is None


def test_small_ones_that_left_no_memory_count_as_what_they_take() -> None:
    """Two adapters of an eighth each fill the memory: all of it is for one more of any size."""
    state = WorkerVariants(2, 4, share=lambda name: 0.125 if name.startswith("small") else 1.0)
    for name in ("small-1", "small-2", "large"):
        state.load(name, 0.0)
    worker = VariantWorker(WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True), state)
    assert worker.shrink("large", 1.0, ()) == ("small-1", "small-2")
    assert state.max_loaded == 0.25
