"""Safetensors headers that are cut, overlap, are too large or lie: read rightly or refused, and nothing else."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

from fingerprint.checkpoint import INDEX_FILE, MAX_HEADER_BYTES, SINGLE_FILE, Checkpoint, stored_tensors
from fingerprint.errors import CheckpointError
from fingerprint.safetensors_header import MAX_TENSORS
from tests.golden_words import Golden

HUGE = (2**31, 2**32, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 10**30, -1, -(2**63))
ODD: tuple[Any, ...] = (None, True, 1.5, 1e308, "", "8", [], [[]], {}, {"": 0}, "\ud800", "\x1b[31m", "a" * 5000)
DTYPES = ("F32", "BF16", "U8", "F4", "F64", "F8_E4M3", "C64", "BOOL", "f32", "I128")


def good(rng: random.Random) -> tuple[dict[str, Any], int]:
    """A header as it should be, and how many bytes it describes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if rng.random() < 0.5 else {}
    end = 0
    for number in range(rng.randint(1, 4)):
        shape = [rng.randint(0, 5) for _ in range(rng.randint(0, 3))]
        size = 4
        for length in shape:
            size *= length
        header[f"layers.{number}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    return header, end


def lie(rng: random.Random, header: dict[str, Any]) -> None:
    """Make one field of one tensor lie: overlaps, gaps, vast and negative sizes, other types."""
    whole = {"dtype", "shape", "data_offsets"}
    names = [name for name, entry in header.items() if isinstance(entry, dict) and entry.keys() >= whole]
    if not names:
        return  # the lies before this one left nothing to lie about
    name = rng.choice(names)
    entry = header[name]
    match rng.randrange(8):
        case 0:
            begin_end = [rng.choice((0, 4, 8, *HUGE)), rng.choice((0, 4, 8, *HUGE))]
            shift = rng.choice((-8, -4, -1, 1, 4, 8))
            old = entry["data_offsets"]
            shifted = [shift + o for o in old if isinstance(o, int)] if isinstance(old, list) else old
            entry["data_offsets"] = rng.choice((begin_end, shifted))
        case 1:
            entry["shape"] = [rng.choice((0, 1, 2, *HUGE)) for _ in range(rng.choice((0, 1, 3, 32, 33, 200)))]
        case 2:
            entry["dtype"] = rng.choice(DTYPES)
        case 3:
            entry[rng.choice(("dtype", "shape", "data_offsets", "more"))] = rng.choice(ODD)
        case 4:
            entry.pop(rng.choice(("dtype", "shape", "data_offsets")))
        case 5:
            header[rng.choice(("", "twin", "a/../../b", "\x00", "\u202e", "x" * 3000))] = dict(entry)
        case 6:
            header[name] = rng.choice(ODD)
        case 7:
            header["__metadata__"] = rng.choice(ODD)


def bad_file(rng: random.Random) -> bytes:
    """A safetensors file with up to three things wrong."""
    header, size = good(rng)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        lie(rng, header)
    raw = json.dumps(header).encode()
    if rng.random() < 0.2:
        raw = raw[:-1] + b"," + raw[1:]  # every key twice
    length = len(raw) if rng.random() < 0.8 else rng.choice((0, 1, len(raw) - 1, len(raw) + 1, *HUGE)) % 2**64
    content = bytearray(length.to_bytes(8, "little") + raw + rng.randbytes(size))
    match rng.randrange(8):
        case 0:
            del content[rng.randrange(len(content)) :]
        case 1:
            content += rng.randbytes(rng.randint(1, 9))
        case 2:
            for _ in range(rng.randint(1, 8)):
                content[rng.randrange(len(content))] = rng.randrange(256)
        case 3:
            start = rng.randrange(len(content))
            content[start:start] = rng.choice((b"[" * 3000, b"9" * 5000, b'{"a":', b"\xff", b"NaN", b"\\ud800"))
    return bytes(content)


def bad_index(rng: random.Random) -> bytes:
    """Return an index that names files next to it, elsewhere, or none, or is none."""
    named = (SINGLE_FILE, "one.safetensors", "../one.safetensors", "/etc/passwd", "a/one.safetensors", *ODD)
    index: Any = {"weight_map": {f"layers.{n}.weight": rng.choice(named[: rng.choice((2, 19))]) for n in range(2)}}
    if rng.random() < 0.2:
        index = rng.choice(({}, [], {"weight_map": rng.choice(ODD)}, {"weight_map": {"a": ["b"]}}))
    raw = bytearray(json.dumps(index).encode())
    if rng.random() < 0.3:
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


def read_whole(folder: Path) -> None:
    """Read a checkpoint whole: what is accepted lies in the folder's own files, every byte of it once."""
    checkpoint = Checkpoint.open(folder)
    for name, entry in checkpoint.tensors.items():
        assert entry.file.parent == folder
        content = entry.file.read_bytes()
        assert checkpoint.read(name) == content[entry.offset : entry.offset + entry.num_bytes]
        assert len(checkpoint.read(name)) == entry.num_bytes


def fuzz(folder: Path, cases: int, seed: int, read: Callable[[Path], None] = read_whole) -> dict[str, int]:
    """Return how many were read and refused. Any other error is a failure."""
    rng, counts = random.Random(seed), {"read": 0, "refused": 0, "at length": 0}
    for _ in range(cases):
        single = rng.random() < 0.8
        (folder / SINGLE_FILE).unlink(missing_ok=True)
        (folder / (SINGLE_FILE if single else "one.safetensors")).write_bytes(bad_file(rng))
        if not single:
            (folder / INDEX_FILE).write_bytes(bad_index(rng))
        try:
            read(folder)
            counts["read"] += 1
        except CheckpointError as error:
            counts["refused" if len(str(error)) < 2000 else "at length"] += 1
    assert counts.pop("at length") == 0
    return counts


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that can be: a file is made for each case."""
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


def test_a_lying_header_is_read_rightly_or_refused(folder: Path) -> None:
    counts = fuzz(folder, 2_000, seed=1)
    assert min(counts.values()) > 100  # the cases tell something: some are accepted


@pytest.mark.long
def test_a_hundred_thousand_lying_headers(folder: Path) -> None:
    assert sum(fuzz(folder, 100_000, seed=2).values()) == 100_000


def test_the_embedded_engine_reads_no_other_files_than_the_plan_did(folder: Path) -> None:
    import torch

    from daemon.torch_engine.model.weights import WeightReader

    def read(folder: Path) -> None:
        expected = Checkpoint.open(folder)
        with WeightReader(folder, "llama") as reader:
            for name, entry in expected.tensors.items():
                if entry.dtype != "F32":
                    continue
                found = reader.read(name, entry.shape, None, torch.float32, torch.device("cpu"))
                assert found.numpy().tobytes() == expected.read(name)

    counts = fuzz(folder, 300, seed=3, read=read)
    assert min(counts.values()) > 20


@pytest.mark.parametrize(
    "unit", [b"[],", b"{},", b"0,", b'"ab",', b"1e9,", b'{"":0},', b"[[[[]]]],"], ids=lambda unit: unit.decode()
)
def test_memory_is_bounded_by_the_header_whatever_is_in_it(tmp_path: Path, unit: bytes) -> None:
    """100 MB are the largest header that is read; at four times its size that is 400 MB."""
    raw = b"[" + unit * (2**18 // len(unit)) + b"0]"
    (tmp_path / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            Checkpoint.open(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * len(raw) + 2**20
    assert 4 * MAX_HEADER_BYTES <= 400_000_000


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")], ids=["compact", "spaced"])
def test_memory_is_bounded_by_the_number_of_tensors(tmp_path: Path, separators: tuple[str, str]) -> None:
    """Tensors of the shortest entries that there are: their header and a gigabyte at most."""
    header = {f"{n}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for n in range(20_000)}
    raw = json.dumps(header, separators=separators).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw)
    tracemalloc.start()
    try:
        assert len(stored_tensors(tmp_path)) == len(header)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (peak - 4 * len(raw)) / len(header) * MAX_TENSORS < 1e9


@pytest.mark.parametrize(
    ("before", "unit"),
    [
        pytest.param(b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":[', b"0,", id="a shape"),
        pytest.param(b'{"a":[', b"[11111111111],", id="a tensor"),
        pytest.param(b'{"__metadata__":[', b"1e5,", id="metadata"),
        pytest.param(b"{", b'"":0,', id="names"),
    ],
)
def test_a_header_is_read_no_further_than_to_what_is_wrong_in_it(
    tmp_path: Path, before: bytes, unit: bytes
) -> None:
    """100 MB of numbers read in one call hold all other threads of the process for seconds."""
    raw = before + unit * (2**20 // len(unit))
    (tmp_path / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            Checkpoint.open(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * len(raw)  # its bytes and their text, and none of its numbers


@pytest.mark.slow
def test_no_single_call_holds_the_process_for_long_however_many_tensors_a_header_names(tmp_path: Path) -> None:
    """The CPU time of this thread, in parts of what all of the reading takes, is the same on any machine."""
    places = list(range(20_000))
    random.Random(5).shuffle(places)
    header = {f"t{at}": {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]} for at in places}
    raw = json.dumps(header).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(len(places)))
    begun: list[float] = []
    longest_s = 0.0

    def watch(_frame: FrameType, event: str, _what: object) -> None:
        nonlocal longest_s
        if event == "c_call":
            begun.append(time.thread_time())
        elif event in ("c_return", "c_exception") and begun:
            longest_s = max(longest_s, time.thread_time() - begun.pop())

    gc.disable()
    try:
        start_s = time.thread_time()
        assert len(Checkpoint.open(tmp_path).tensors) == len(places)
        whole_s = time.thread_time() - start_s
        sys.setprofile(watch)
        Checkpoint.open(tmp_path)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert longest_s < 0.04 * whole_s


def test_metadata_without_end_is_refused(tmp_path: Path) -> None:
    raw = json.dumps({"__metadata__": {str(number): "" for number in range(20_000)}}).encode()
    (tmp_path / SINGLE_FILE).write_bytes(len(raw).to_bytes(8, "little") + raw)
    with pytest.raises(CheckpointError, match="__metadata__"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**40, 2**64 - 1])
def test_a_length_that_lies_allocates_nothing(tmp_path: Path, length: int, golden: Golden) -> None:
    file = tmp_path / SINGLE_FILE
    file.write_bytes(length.to_bytes(8, "little"))
    os.truncate(file, 2**41)  # sparse: the length is within the file
    tracemalloc.start()
    try:
        with golden.raises("cli-errors", CheckpointError):
            Checkpoint.open(tmp_path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**20


def test_an_index_that_is_too_large_is_not_read(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / INDEX_FILE).touch()
    os.truncate(tmp_path / INDEX_FILE, 2**40)
    with golden.raises("cli-errors", CheckpointError):
        Checkpoint.open(tmp_path)
