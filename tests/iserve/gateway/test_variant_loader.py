"""Loads of variants: how long they are waited for, and what clients see of a failed one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fingerprint.errors import CheckpointError, IserveError, UnavailableError
from iserve.gateway.errors import ApiError
from iserve.gateway.variant_loader import VariantLoader, without_paths
from iserve.gateway.worker_http import NotBegunError
from iserve.http_stream import StreamClient
from iserve.route_table import WorkerTarget
from tests.iserve.gateway.variant_requests import A

HOME = Path("/home/ann lee/.local/share/iserve")


class Folders:
    root = HOME / "variants"

    def __init__(self, error: Exception) -> None:
        self._error = error

    def loadable(self, content_hash: str) -> Path:
        raise self._error


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
            f"{HOME}/variants/x/a.safetensors: rank 128 is more than 64",
            "x/a.safetensors: rank 128 is more than 64",
        ),
        ("no file '/mnt/my models/b/config.json' here", "no file 'config.json' here"),
        ('read "/a/b c/d": failed', 'read "d": failed'),
        ("loading /mnt/models/llama failed (/etc/x)", "loading llama failed (x)"),
        (f"in {HOME / 'variants'} and {HOME}", "in variants and iserve"),
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
