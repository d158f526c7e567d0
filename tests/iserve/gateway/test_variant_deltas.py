"""Loads of deltas at workers that check none and read them while they go on: asked for again, one at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from iserve.route_table import VariantRoute
from tests.daemon.engines.vllm_stand_in.deltas import Reader
from tests.golden_words import Golden
from tests.iserve.gateway.variant_requests import route, said, statuses, variant
from tests.waiting import wait_until

pytestmark = pytest.mark.process
MANY = tuple(f"delta-{number}" for number in range(8))


def delta(name: str, base: str = "/models/base") -> VariantRoute:
    return replace(variant(name), base_directory=base)


def checks(gateway: Any) -> list[str]:
    """Return the contents that were checked, with their base, since the gateway started."""
    file = gateway.home / "variants" / "checked"
    return file.read_text().splitlines() if file.exists() else []


def test_one_that_is_still_being_read_is_asked_for_again(variant_gateway: Any, make_adapter_worker: Any) -> None:
    worker, one = make_adapter_worker(reader=Reader(3)), delta("read")
    variant_gateway.publish(route(worker, variants=(one,)))
    assert said(variant_gateway.complete("read")) == one.content_hash
    assert worker.loads == [one.engine_name] * 4
    assert checks(variant_gateway).count(f"{one.content_hash} /models/base") == 1
    assert said(variant_gateway.complete("read")) == one.content_hash
    assert len(worker.loads) == 4


def test_of_many_at_once_none_is_read_in_vain(variant_gateway: Any, make_adapter_worker: Any) -> None:
    """A worker keeps the last one that it has read, so it is asked for no other until that one is loaded."""
    worker = make_adapter_worker(slots=8, max_loaded=8, reader=Reader(2))
    variants = tuple(map(delta, MANY))
    variant_gateway.publish(route(worker, variants=variants))
    with ThreadPoolExecutor(len(MANY)) as clients:
        answers = [clients.submit(variant_gateway.complete, name) for name in MANY]
        assert statuses(answers) == [200] * len(MANY)
    assert sorted(worker.loads) == sorted(one.engine_name for one in variants for _ in range(3))


def test_an_adapter_does_not_wait_for_a_delta(variant_gateway: Any, make_adapter_worker: Any) -> None:
    worker, one, adapter = make_adapter_worker(reader=Reader(10**9)), delta("endless"), variant("adapter")
    variant_gateway.publish(route(worker, variants=(one, adapter)))
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(variant_gateway.complete, "endless")
        wait_until(lambda: one.engine_name in worker.loads, "the delta is asked for")
        assert said(variant_gateway.complete("adapter")) == adapter.content_hash
        worker.reader.left = 0  # it is read
        assert answer.result().status == 200


def test_a_restarted_worker_gets_its_deltas_again(variant_gateway: Any, make_adapter_worker: Any) -> None:
    worker, variants = make_adapter_worker(reader=Reader(2)), tuple(map(delta, MANY[:2]))
    variant_gateway.publish(route(worker, variants=variants))
    for _ in range(2):
        assert [said(variant_gateway.complete(one.name)) for one in variants] == [v.content_hash for v in variants]
        worker.restart()
    assert worker.loads == [one.engine_name for one in variants for _ in range(3)] * 2


def test_one_of_another_base_is_not_loaded(variant_gateway: Any, make_adapter_worker: Any, golden: Golden) -> None:
    worker, one = make_adapter_worker(), delta("stranger", "/models/OTHER")
    variant_gateway.publish(route(worker, variants=(one,)))
    answer = variant_gateway.complete("stranger")
    assert answer.status == 500
    golden("rest-errors", answer.error["message"])
    assert worker.loads == []


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_content_that_is_replaced_while_its_load_waits_is_not_served(
    variant_gateway: Any, make_adapter_worker: Any, is_replaced: bool, is_gone: bool
) -> None:
    """A request that waits for the load is answered from the new content, or 404, be the old files gone or not."""
    worker, names = make_adapter_worker(), f"{is_replaced}-{is_gone}"
    first, old = delta(f"first-{names}", "/models/HELD"), delta(f"second-{names}")
    new = replace(variant(old.name, f"new-{names}"), base_directory=old.base_directory)
    variant_gateway.publish(route(worker, variants=(first, old)))
    with ThreadPoolExecutor(2) as clients:
        held = clients.submit(variant_gateway.complete, first.name)
        wait_until(lambda: f"{first.content_hash} /models/HELD" in checks(variant_gateway), "the base is hashed")
        answer = clients.submit(variant_gateway.complete, old.name)
        pending = 'iserve_gateway_pending_loads{deployment="m"}'
        wait_until(lambda: variant_gateway.metric(pending) == 2, "the second waits for the first")
        variant_gateway.publish(route(worker, variants=(first, new) if is_replaced else (first,)))
        folders = variant_gateway.home / "variants"
        if is_gone:
            (folders / f"{old.content_hash}.broken").touch()
        (folders / f"{first.content_hash}.hashed").touch()
        assert said(held.result()) == first.content_hash
        if is_replaced:
            assert said(answer.result()) == new.content_hash
        else:
            assert (answer.result().status, answer.result().error["code"]) == (404, "model_not_found")
    assert (old.engine_name in worker.loads) is not is_gone


def test_a_gateway_that_ends_waits_for_no_delta(make_variant_gateway: Any, make_adapter_worker: Any) -> None:
    worker, one = make_adapter_worker(reader=Reader(10**9)), delta("endless")
    gateway = make_variant_gateway("--grace", "0")
    gateway.publish(route(worker, variants=(replace(one, pinned=True),)))
    wait_until(lambda: one.engine_name in worker.loads, "the delta is asked for")
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.logged()


def test_a_gateway_that_ends_waits_for_no_base(make_variant_gateway: Any, make_adapter_worker: Any) -> None:
    worker, one = make_adapter_worker(), delta("unchecked", "/models/HUGE")
    gateway = make_variant_gateway("--grace", "0")
    gateway.publish(route(worker, variants=(replace(one, pinned=True),)))
    wait_until(lambda: checks(gateway), "the base is hashed")
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.logged()
