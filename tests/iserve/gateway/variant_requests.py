"""Variants and routes of the tests, and requests for them."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from iserve.route_table import Route, VariantRoute
from tests.iserve.gateway.adapter_worker import AdapterWorker
from tests.iserve.gateway.conftest import Answer, GatewayProcess
from tests.waiting import wait_until

VARIANT_GATEWAY = "tests.iserve.gateway.variant_gateway"


def variant(name: str, content: str = "", *, pinned: bool = False) -> VariantRoute:
    content_hash = hashlib.sha256((content or name).encode()).hexdigest()
    return VariantRoute(
        name=name,
        engine_name=f"{name}@{content_hash[:16]}",
        content_hash=content_hash,
        created=1_700_000_001,
        num_bytes=1000,
        pinned=pinned,
    )


def route(*workers: AdapterWorker, variants: tuple[VariantRoute, ...], name: str = "m", **fields: Any) -> Route:
    return Route(
        name=name,
        model="org/base",
        created=1_700_000_000,
        max_context_tokens=2048,
        workers=tuple(worker.target(f"w{index}", **fields) for index, worker in enumerate(workers)),
        adapter_slots=min(worker.slots for worker in workers),
        loaded_adapters=min(worker.max_loaded for worker in workers),
        variants=variants,
    )


def said(answer: Answer) -> str:
    """Content hash of the adapter that answered, or the base's name."""
    assert answer.status == 200, answer.body
    text: str = answer.json["choices"][0]["text"]
    return text.split()[0].rpartition("/")[2]


def statuses(answers: list[Future[Answer]]) -> list[int]:
    return [answer.result().status for answer in answers]


def hold(
    gateway: GatewayProcess, clients: ThreadPoolExecutor, worker: AdapterWorker, *held: VariantRoute
) -> list[Future[Answer]]:
    """Requests that the worker answers once ``go_on`` is set; all are at the worker when this returns."""
    worker.held_models |= {one.engine_name for one in held}
    answers = [clients.submit(gateway.complete, one.name) for one in held]
    wait_until(lambda: all(worker.in_flight[one.engine_name] for one in held), "all are held")
    return answers


def frames(body: bytes) -> list[str]:
    assert body.endswith(b"\n\n")
    return [frame.removeprefix("data: ") for frame in body.decode().strip().split("\n\n")]


A, B, C = (variant(name) for name in "abc")
