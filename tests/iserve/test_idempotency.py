"""A deploy that is asked for again without a key: the deployment that the same request made, or what differs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import to_builtins
from fingerprint.errors import ConflictError
from iserve.api_types import DeployBody
from iserve.controller.idempotency import deployed_before
from iserve.state.store import Store
from tests.golden_words import Golden


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(tmp_path / "state.db")
    yield store
    store.close()


def record(store: Store, *, without: tuple[str, ...] = (), **wish: Any) -> None:
    request = to_builtins(DeployBody(name="chat", **wish))
    kept = {field: value for field, value in request.items() if field not in without}
    store.add_deployment("chat", json.dumps(kept).encode())


OF_BEFORE = ("engine_version", "engine_args", "tool_call_parser", "reasoning_parser")  # fields it did not have


@pytest.mark.parametrize("batch", [None, 1])
def test_a_deployment_of_before_an_upgrade_is_known_by_the_same_options(store: Store, batch: int | None) -> None:
    """A batch that was left out was recorded as 1 then."""
    record(store, without=OF_BEFORE, batch=1)
    found = deployed_before(store, "chat", DeployBody(name="chat", batch=batch))
    assert found is not None
    assert found.name == "chat"


def test_a_batch_that_was_given_is_not_one_left_out(store: Store, golden: Golden) -> None:
    record(store, batch=1)
    with golden.raises("rest-errors", ConflictError):
        deployed_before(store, "chat", DeployBody(name="chat"))


@pytest.mark.parametrize(
    ("asked", "can_be_updated"),
    [
        ({"intent": "min-latency"}, True),
        ({"intent": "min-latency", "replicas": 2}, True),
        ({"input_tokens": 99}, True),
        ({"percentile": 99}, False),
        ({"intent": "min-latency", "percentile": 99}, False),
    ],
)
def test_update_is_named_where_it_changes_all_that_differs(
    store: Store, asked: dict[str, Any], can_be_updated: bool
) -> None:
    record(store)
    with pytest.raises(ConflictError) as refused:
        deployed_before(store, "chat", DeployBody(name="chat", **asked))
    assert re.findall("`iserve (update|rm) chat`", str(refused.value)) == ["update"] * can_be_updated + ["rm"]
