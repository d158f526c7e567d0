"""A disk that fills while something is written: nothing half-made is left, the message says what to free, and once
that is done it goes on. On a small tmpfs where this process may mount one, and under a limit on the size of files,
which the kernel answers alike, everywhere."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pytest

from daemon.process import own_record, read_record, write_record
from daemon.shim import RotatingLog
from daemon.variants.store import VariantStore
from fingerprint import safetensors_writer
from fingerprint.delta import read_delta
from fingerprint.errors import CheckpointError, NotFoundError, StateUnavailableError, UnavailableError
from fingerprint.lora import merge_adapter, read_adapter
from fingerprint.output_file import write_output
from fingerprint.truncate import generate
from iserve.client import connect
from iserve.controller.child_processes import ChildProcess
from iserve.demo import demo_model_path
from iserve.settings import Settings
from iserve.state.store import Store
from tests.daemon.tiny_deltas import write_exact_delta
from tests.fingerprint.small_adapters import Q0, factors, write_adapter, write_base
from tests.golden_words import Golden

SIZE_BYTES = 2**20

Filled = Callable[[int], AbstractContextManager[None]]


@pytest.fixture(params=["tmpfs", "file size limit"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Path, Filled]]:
    """A folder, and a context in which no more than so many bytes can be written to it (to one file of it)."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "file size limit":
        yield folder, limited
        return
    command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "tmpfs", str(folder)]
    mounted = (
        subprocess.run(command, capture_output=True, text=True, check=False) if shutil.which("mount") else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip(
            f"a tmpfs cannot be mounted here: {mounted.stderr.strip() if mounted else 'there is no mount'}"
        )
    try:
        yield folder, lambda left: filled(folder, left)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextlib.contextmanager
def limited(left_bytes: int) -> Iterator[None]:
    """Limit the file size of this process, whose other files are small meanwhile.

    Python ignores the signal: EFBIG.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (left_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def filled(folder: Path, left_bytes: int) -> Iterator[None]:
    filler = folder / "filler"
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    filler.write_bytes(bytes(max(0, free - left_bytes)))
    try:
        yield
    finally:
        filler.unlink()


def left_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.name != "filler"}


def test_a_fingerprint_is_whole_or_not_there(
    disk: tuple[Path, Filled], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    folder, only = disk
    # The room is looked at before; here other files take it after that.
    usage = shutil.disk_usage(folder)._replace(free=2**40)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer.shutil, "disk_usage", lambda _: usage)
        with only(300_000), pytest.raises(CheckpointError) as caught:
            generate(demo_model_path(), folder / "cut", [0])
    assert left_in(folder) == set()
    golden("cli-errors", str(caught.value))


def test_a_merged_checkpoint_is_whole_or_not_there(
    disk: tuple[Path, Filled], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, only = disk
    base = write_base(tmp_path / "base", files=3)  # of 7 to 8 KB each
    adapter = read_adapter(write_adapter(tmp_path / "adapter"))
    usage = shutil.disk_usage(folder)._replace(free=2**40)
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_writer.shutil, "disk_usage", lambda _: usage)
        with only(7_500), pytest.raises(CheckpointError) as caught:
            merge_adapter(base, adapter, folder / "merged")
    assert left_in(folder) == set()
    assert "nothing was kept" in str(caught.value)
    merge_adapter(base, adapter, folder / "merged")  # once there is room


@pytest.mark.parametrize("left_bytes", [200, 300])
def test_a_variant_is_whole_or_not_there(disk: tuple[Path, Filled], tmp_path: Path, left_bytes: int) -> None:
    """The tensors have 256 bytes each, the manifest more than 300."""
    folder, only = disk
    store = VariantStore(folder / "variants")
    kept = store.add(read_adapter(write_adapter(tmp_path / "kept"))).content_hash
    adapter = read_adapter(write_adapter(tmp_path / "adapter", {n: a + 1 for n, a in factors({Q0: 4}).items()}))

    def files() -> set[str]:
        return {path for path in left_in(folder) if (folder / path).is_file() and not path.endswith(".lock")}

    before = files()
    with only(left_bytes), pytest.raises(UnavailableError, match="iserve variant rm"):
        store.add(adapter)
    assert files() == before
    with only(left_bytes), pytest.raises(UnavailableError, match="iserve variant rm"):
        store.loadable(kept)
    assert files() == before
    for content_hash in (kept, store.add(adapter).content_hash):
        read_adapter(store.loadable(content_hash))


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


def test_a_packed_variant_is_whole_or_not_there(disk: tuple[Path, Filled], tmp_path: Path) -> None:
    """The larger tensor has 160,000 bytes and packed 40,000 to 80,000; the loadable file has it plain."""
    folder, only = disk
    store = VariantStore(folder / "variants")
    shapes = {"a.weight": (4, 10_000), "b.weight": (16, 4)}
    rng = np.random.default_rng(0)
    tensors = {name: rng.integers(256, size=shape).astype(np.float32) for name, shape in shapes.items()}
    delta = write_exact_delta(tmp_path / "delta", tensors)
    with only(30_000), pytest.raises(UnavailableError, match="iserve variant rm"):
        store.add(delta)
    assert files_in(store.root / "tensors") == files_in(store.root / "writing") == set()
    with only(90_000):
        stored = store.add(delta)
    assert 40_000 < stored.disk_bytes < 80_000
    with only(90_000), pytest.raises(UnavailableError, match="iserve variant rm"):
        store.loadable(stored.content_hash)
    assert files_in(store.root / "loadable") == files_in(store.root / "writing") == set()
    read_delta(store.loadable(stored.content_hash))


def test_too_little_room_for_a_fingerprint_is_said_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(safetensors_writer.shutil, "disk_usage", lambda _: usage)
    with golden.raises("cli-errors", CheckpointError):
        generate(demo_model_path(), tmp_path / "cut", [0])
    assert left_in(tmp_path) == set()


def test_the_state_keeps_what_it_acknowledged_and_goes_on_when_there_is_room(disk: tuple[Path, Filled]) -> None:
    folder, only = disk
    store = Store.open(folder / "state.db")
    try:
        kept: list[str] = []

        def keep() -> None:
            for number in range(1000):
                name = f"m{len(kept)}-{number}"
                store.put_model(name, "/" + "x" * 4000)
                kept.append(name)

        with only(200_000), pytest.raises(StateUnavailableError) as caught:
            keep()
        assert kept, "it was full from the beginning"
        assert "free space in" in str(caught.value)
        assert str(folder) in str(caught.value)
        assert {model.name for model in store.models()} == {*kept}
        store.put_model("after", "/after")
        with only(0), pytest.raises(StateUnavailableError):
            keep()
        assert {*kept, "after"} <= {model.name for model in store.models()}
    finally:
        store.close()
    again = Store.open(folder / "state.db")  # as after a crash
    assert {*kept, "after"} <= {model.name for model in again.models()}
    again.close()


def test_a_workers_log_loses_lines_and_nothing_else(disk: tuple[Path, Filled]) -> None:
    folder, only = disk
    log = RotatingLog(folder / "worker.log", max_bytes=200_000, files=1)
    log.write(b"first\n")
    with only(10_000):
        for _ in range(50):
            log.write(b"x" * 999 + b"\n")
    log.write(b"last\n")
    text = (folder / "worker.log").read_bytes()
    assert text.startswith(b"first\n")
    assert text.endswith(b"last\n")
    assert len(text) < 40_000
    assert left_in(folder) == {"worker.log"}


def test_a_process_goes_on_when_its_log_cannot_be_written(
    disk: tuple[Path, Filled], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, only = disk
    with (folder / "controller.log").open("a", buffering=1) as stream:
        handler = logging.StreamHandler(stream)
        monkeypatch.setattr("sys.stderr", stream)  # where logging complains, and Python's last words go
        logger = logging.Logger("of-this-test")
        logger.addHandler(handler)
        logger.error("before")
        with only(20_000):
            for _ in range(50):
                logger.error("x" * 999)
        with contextlib.suppress(OSError):
            stream.flush()
        logger.error("after")
    assert (folder / "controller.log").read_text().startswith("before\n")


def test_a_record_is_the_old_one_or_the_new(disk: tuple[Path, Filled], golden: Golden) -> None:
    folder, only = disk
    path = folder / "controller.json"
    before = own_record(url="http://127.0.0.1:1", token="t")
    write_record(path, before)
    with only(0), pytest.raises(UnavailableError) as caught:
        write_record(path, own_record(url="http://127.0.0.1:2", token="t" * 8000))
    golden("cli-errors", str(caught.value))
    assert read_record(path) == before
    assert left_in(folder) == {"controller.json"}


def test_a_page_is_whole_or_the_old_one(disk: tuple[Path, Filled], golden: Golden) -> None:
    folder, only = disk
    page = folder / "report.html"
    write_output(page, "old")
    with only(50_000), pytest.raises(NotFoundError) as caught:
        write_output(page, "new" * 100_000)
    golden("cli-errors", str(caught.value))
    assert page.read_text() == "old"
    assert left_in(folder) == {"report.html"}


@pytest.mark.process
def test_a_first_start_says_that_the_disk_is_full(
    disk: tuple[Path, Filled], monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    """The controller cannot even say so in its log."""
    folder, only = disk
    for name in [name for name in os.environ if name.startswith("ISERVE_")]:
        monkeypatch.delenv(name)
    with only(0), pytest.raises(UnavailableError) as caught:
        connect(Settings(home=folder / "home", port=0, api_port=0))
    golden("cli-errors", str(caught.value))


def test_a_daemon_or_gateway_that_cannot_write_its_log_is_told_so(
    disk: tuple[Path, Filled], golden: Golden
) -> None:
    folder, only = disk
    settings = Settings(home=folder / "home")
    companion = ChildProcess("gateway", settings, [sys.executable, "-c", "raise SystemExit(1)"])
    settings.log_folder.mkdir(parents=True)
    with only(0), pytest.raises(UnavailableError) as caught:
        companion.ensure()
    golden("cli-errors", str(caught.value))
    assert left_in(folder) <= {"home", "home/logs", "home/logs/gateway.log"}
