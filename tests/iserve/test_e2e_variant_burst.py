"""Many variants added at once over HTTP: each request is answered, and none is lost or made twice."""

from __future__ import annotations

import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from daemon.variants.store import VariantStore
from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import from_json
from iserve.api_documents import EventDocument, VariantDocument
from iserve.client import post_when_free
from iserve.demo import demo_model_path
from tests.fingerprint.small_adapters import values, write_adapter
from tests.waiting import PATIENCE_S

PATH = "/api/v1/variants"
WAITING = 256  # that the controller keeps


def write_adapters(folder: Path, number: int) -> list[Path]:
    """Write small adapters of the demo model that share a tensor."""
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = Checkpoint.open(demo_model_path()).tensors[f"{name}.weight"].shape
    a, b = (f"base_model.model.{name}.lora_{side}.weight" for side in "AB")
    return [
        write_adapter(folder / str(index), {a: values((1, columns), 0), b: values((rows, 1), 1 + index)}, r=1)
        for index in range(number)
    ]


def add_at_once(home: Any, folder: Path, number: int) -> Counter[int]:
    """Add variants at the same moment, each by a client of its own; return the first answers' statuses."""
    record, adapters = home.record("controller"), write_adapters(folder, number)
    where, client = urlsplit(record.url), home.controller()
    all_ready = threading.Barrier(number)
    headers = {"Authorization": f"Bearer {record.token}", "Content-Type": "application/json"}

    def add(index: int) -> tuple[int, VariantDocument]:
        body = {"name": f"v{index}", "base": "iserve-demo", "path": str(adapters[index])}
        connection = HTTPConnection(str(where.hostname), where.port, timeout=PATIENCE_S)
        all_ready.wait(PATIENCE_S)
        try:
            connection.request("POST", PATH, json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        if answer.status == 201:
            return 201, from_json(text, VariantDocument)
        assert answer.status == 503, text
        assert int(answer.headers["Retry-After"]) > 0
        assert json.loads(text)["is_busy"]
        patient = client.patient(PATIENCE_S)
        return 503, post_when_free(patient, PATH, body, VariantDocument, patience_s=PATIENCE_S)

    with ThreadPoolExecutor(number) as pool:
        done = list(pool.map(add, range(number)))
    listed = {one.name: one.content_hash for one in client.get(PATH, tuple[VariantDocument, ...])}
    assert listed == {one.name: one.content_hash for _, one in done}
    assert set(listed) == {f"v{index}" for index in range(number)}
    contents = VariantStore(home.home / "variants").contents()
    assert sorted(one.content_hash for one in contents) == sorted(listed.values())
    assert len(set(listed.values())) == number
    assert added_events(client) == Counter(f"v{index}" for index in range(number)), "each is added once"
    return Counter(status for status, _ in done)


def added_events(client: Any) -> Counter[str]:
    found, after = Counter[str](), 0
    while events := client.get("/api/v1/events", tuple[EventDocument, ...], after=after, limit=1000):
        found += Counter(one.message.partition(":")[0] for one in events if one.kind == "variant-added")
        after = events[-1].id
    return found


def test_more_variants_than_may_wait_are_added_at_once(make_installation: Any, tmp_path: Path) -> None:
    home = make_installation()
    home.run("up")
    statuses = add_at_once(home, tmp_path / "adapters", 300)
    assert statuses[201] >= WAITING


@pytest.mark.long
def test_a_thousand_variants_are_added_at_once(make_installation: Any, tmp_path: Path) -> None:
    home = make_installation()
    home.run("up")
    statuses = add_at_once(home, tmp_path / "adapters", 1000)
    assert statuses[201] >= WAITING
    assert statuses[503], "more arrive than may wait"
