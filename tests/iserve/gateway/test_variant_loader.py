"""Loads of variants: how long they are waited for, and what clients see of a failed one."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import CheckpointError, IserveError, UnavailableError
from iserve.gateway.errors import ApiError
from iserve.gateway.variant_loader import VariantLoader, without_paths
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import StreamClient
from iserve.route_table import WorkerTarget
from tests.golden_words import Golden
from tests.iserve.gateway.timeless_loop import TimelessLoop
from tests.iserve.gateway.variant_requests import A

HOME = Path("/home/ann lee/.local/share/iserve")


class Folders:
    root = HOME / "variants"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def loadable(self, content_hash: str) -> Path:
        raise self._error


class HashedForLong(Folders):
    """Folders that are there; bases are hashed until they are let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()

    def loadable(self, content_hash: str) -> Path:
        return self.root / content_hash

    def checked(self, content_hash: str, base: Path) -> Path:
        self.go_on.wait()
        return base


class SilentWorker(StreamClient):
    """Client whose worker never answers; it notes how long one would have waited."""

    def __init__(self) -> None:
        self.silence_s: list[float] = []

    async def post(self, *arguments: Any, silence_s: float, connect_s: float) -> Any:
        self.silence_s.append(silence_s)
        raise TimeoutError


@pytest.mark.parametrize(("num_bytes", "silence_s"), [(0, 120.0), (4_000_000_000, 320.0)])
def test_a_large_adapter_has_longer_to_be_read(num_bytes: int, silence_s: float) -> None:
    workers = SilentWorker()
    loader = VariantLoader(workers, Folders(IserveError()))
    target = WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True)
    with pytest.raises(NotBegunError) as raised:
        asyncio.run(loader.load(target, replace(A, num_bytes=num_bytes), Path("/folder")))
    assert workers.silence_s == [silence_s]
    assert "'a'" in raised.value.answer.message


def test_no_adapter_waits_for_bases_that_are_hashed() -> None:
    """However many workers are to have a delta: the event loop has at most 32 threads for all that blocks."""
    folders = HashedForLong()
    loader = VariantLoader(SilentWorker(), folders)

    async def run() -> None:
        checks = [asyncio.create_task(loader.checked_folder(A, Path(f"/base{i}"))) for i in range(40)]
        left = asyncio.create_task(loader.checked_folder(A, Path("/left")))
        await asyncio.sleep(0)
        assert await loader.folder(A) == folders.root / A.content_hash
        assert not any(check.done() for check in checks)
        left.cancel()  # whose thread goes on, and says nothing
        folders.go_on.set()
        assert await asyncio.gather(*checks) == [Path(f"/base{i}") for i in range(40)]

    asyncio.run(run())


class ReadingWorker(StreamClient):
    """Client whose worker reads a delta, and has no place for it afterwards; it notes when it was asked."""

    def __init__(self, read_s: float = math.inf) -> None:
        self.read_s = read_s
        self.asked_s: list[float] = []

    async def post(self, *arguments: Any, **named: Any) -> Any:
        self.asked_s.append(asyncio.get_running_loop().time())
        if self.asked_s[-1] >= self.read_s:
            error = {"message": "2 are loaded, 1 of them until its last request ends", "param": "lora_name"}
            return Answer(400, json.dumps({"error": error}).encode())
        message = f"Call to add_lora method failed: delta {A.engine_name} is still being read: ask for it again"
        return Answer(500, json.dumps({"error": {"message": message}}).encode())


class Answer:
    def __init__(self, status: int, body: bytes) -> None:
        self.status, self._left = status, body

    async def read(self, silence_s: float) -> bytes:
        found, self._left = self._left, b""
        return found

    async def finish(self, linger_s: float) -> None:
        pass


def asked_s(workers: ReadingWorker, base: str | None = "/base") -> tuple[NotBegunError, list[float]]:
    """Return how the load of 200 MB ends at a worker, and when it was asked, on a clock that waits for nothing.

    Args:
        base: of a delta; None: it is an adapter.
    """
    loader = VariantLoader(workers, Folders(IserveError()))
    target = WorkerTarget(worker_id="w", url="http://127.0.0.1:1", ready=True)
    loop, variant = TimelessLoop(), replace(A, num_bytes=200_000_000, base_directory=base)
    try:
        with pytest.raises(NotBegunError) as raised:
            loop.run_until_complete(loader.load(target, variant, Path("/folder")))
    finally:
        loop.close()
    return raised.value, workers.asked_s


@pytest.mark.parametrize("base", ["/base", None])
def test_a_variant_that_is_never_read_is_asked_for_less_and_less_often_and_given_up(
    base: str | None, golden: Golden
) -> None:
    error, at_s = asked_s(ReadingWorker(), base)
    pauses_s = [after - before for before, after in pairwise(at_s)]
    assert pauses_s[:6] == pytest.approx([0.02, 0.02, 0.02, 0.02, 0.02, 0.02])
    assert pauses_s[6] == pytest.approx(0.12 / 5)
    assert all(after >= before - 1e-9 for before, after in pairwise(pauses_s))
    assert pauses_s[-1] == pytest.approx(1.0)
    assert 130 <= at_s[-1] < 131.5  # as long as one answer is waited for
    assert error.answer.status == 503
    golden("rest-errors", error.answer.message)


def test_a_variant_is_known_to_be_read_a_fifth_of_its_time_later_at_most() -> None:
    _, at_s = asked_s(ReadingWorker())
    assert all(after - before <= max(0.02, before / 5) + 1e-9 for before, after in pairwise(at_s))
    assert sum(at <= 1.0 for at in at_s) < 25  # each question is one for the worker's engine too


def test_a_worker_without_a_place_is_asked_for_as_long_after_it_has_read_a_delta() -> None:
    error, at_s = asked_s(ReadingWorker(read_s=50.0))
    assert 59 <= at_s[-1] < 61.5
    assert error.answer.status == 503


def test_clients_see_no_path_of_a_base(caplog: pytest.LogCaptureFixture, golden: Golden) -> None:
    base = "/mnt/ann's models (new)/llama"
    error = CheckpointError(f"the delta was made of another base than {base}: tensor 'x' differs")
    variant = replace(A, base_directory=base)
    with pytest.raises(ApiError) as raised:
        asyncio.run(VariantLoader(SilentWorker(), Folders(error)).folder(variant))
    golden("rest-errors", raised.value.message)
    assert base in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError(f"{HOME}/variants/tensors/ab/abcd: a tensor was changed; add the adapter again"),
        UnavailableError(f"cannot write '{HOME}/variants/loadable/x': No space left on device"),
        OSError(13, "Permission denied", f"{HOME}/variants/manifests/x.json"),
    ],
)
def test_clients_see_no_path_and_the_log_has_it(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ApiError) as raised:
        asyncio.run(VariantLoader(SilentWorker(), Folders(error)).folder(A))
    assert "ann lee" not in raised.value.message
    assert "/home" not in raised.value.message
    assert any(reason in raised.value.message for reason in ("was changed", "No space left", "Permission denied"))
    assert str(HOME) in caplog.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            f"{HOME}/variants/x/a.safetensors: rank 128",
            "x/a.safetensors: rank 128",
        ),
        ("no file '/mnt/my models/b/config.json' here", "no file 'config.json' here"),
        ('read "/a/b c/d": failed', 'read "d": failed'),
        ("load /mnt/models/llama (/etc/x)", "load llama (x)"),
        (f"{HOME / 'variants'}, {HOME}", "variants, iserve"),
        ("1/2 of a/b, see https://example.org/a/b or GET /v1/models", None),
    ],
)
def test_paths_are_cut_to_their_last_part(text: str, shown: str | None) -> None:
    found = without_paths(text, HOME / "variants")
    if shown is None:
        assert "https://example.org/a/b" in found
        assert found.startswith("1/2 of a/b")
    else:
        assert found == shown
