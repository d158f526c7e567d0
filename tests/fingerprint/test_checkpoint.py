"""Reading safetensors by byte range: against the safetensors library, and against broken and hostile files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from fingerprint import checkpoint as checkpoint_module
from fingerprint import safetensors_header as header_module
from fingerprint.checkpoint import Checkpoint, StoredTensor, stored_tensors
from fingerprint.errors import CheckpointError, ConflictError, NotFoundError
from fingerprint.safetensors_header import parse_header, parse_index
from fingerprint.safetensors_writer import OutputTensor, new_directory, write_safetensors
from tests.golden_words import Golden

ARRAYS = {
    "a": np.arange(7, dtype=np.float32),
    "b": np.arange(12, dtype=np.int16).reshape(3, 4),
    "empty": np.zeros((0, 5), dtype=np.float64),
    "scalar": np.array(3.5),
}


def raw_file(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


def tensor(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A directory with one small safetensors file."""
    save_file(ARRAYS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A directory with two files and their index."""
    save_file({"a": ARRAYS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": ARRAYS["b"]}, tmp_path / "two.safetensors")
    index = {"metadata": {}, "weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


# --- what is read ---


def test_every_tensor_reads_as_the_library_reads_it(single: Path) -> None:
    checkpoint = Checkpoint.open(single)
    assert checkpoint.tensors.keys() == ARRAYS.keys()
    for name, array in load_file(single / "model.safetensors").items():
        assert checkpoint.tensors[name].shape == array.shape
        assert checkpoint.read(name) == array.tobytes()


def test_shards_are_one_checkpoint(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    assert {name: entry.file.name for name, entry in checkpoint.tensors.items()} == {
        "a": "one.safetensors",
        "b": "two.safetensors",
    }
    assert checkpoint.read("b") == ARRAYS["b"].tobytes()
    assert checkpoint.source_bytes == sum(file.stat().st_size for file in sharded.glob("*.safetensors"))


def test_types_and_shapes_are_read_from_all_files(sharded: Path) -> None:
    assert stored_tensors(sharded) == {"a": StoredTensor("F32", (7,)), "b": StoredTensor("I16", (3, 4))}


def header_of(num_tensors: int) -> dict[str, Any]:
    """A header as one of a mixture of experts is, of two bytes per tensor."""
    return {
        f"model.layers.{n // 99}.mlp.experts.{n % 99}.down_proj.weight": tensor("BF16", [1], [2 * n, 2 * n + 2])
        for n in range(num_tensors)
    }


def compact(header: dict[str, Any]) -> bytes:
    return json.dumps(header, separators=(",", ":")).encode()


def test_a_header_of_many_pieces_is_read_as_one_with_white_space_in_it() -> None:
    header = header_of(5_000)
    raw, spaced = compact({"__metadata__": {"format": "pt"}} | header), json.dumps(header, indent=1).encode()
    found = parse_header(raw + b"    ", "f", 8 + len(raw) + 4 + 10_000)
    assert found == parse_header(spaced, "f", 8 + len(spaced) + 10_000)
    assert {name: found[name].data_offsets for name in found} == {
        name: tuple(entry["data_offsets"]) for name, entry in header.items()
    }


@pytest.mark.slow
def test_a_header_of_more_than_32_mib_is_read(tmp_path: Path) -> None:
    raw = compact(header_of(320_000))
    assert len(raw) > 2**25
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(raw_file(raw))
        file.truncate(8 + len(raw) + 640_000)
    assert len(stored_tensors(tmp_path)) == 320_000


def test_more_tensors_than_any_model_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header_module, "MAX_TENSORS", 99)
    for raw in (compact(header_of(100)), json.dumps(header_of(100)).encode()):
        with pytest.raises(CheckpointError, match="more than 99 tensors"):
            parse_header(raw, "f", 8 + len(raw) + 200)
    index = json.dumps({"weight_map": dict.fromkeys(header_of(100), "f.safetensors")})
    with pytest.raises(CheckpointError, match="more than 99 tensors"):
        parse_index(index.encode(), "index")


def test_more_tensors_in_all_files_than_any_model_has_are_refused(
    sharded: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    monkeypatch.setattr(header_module, "MAX_TENSORS", 2)
    assert len(stored_tensors(sharded)) == 2
    save_file({"b": ARRAYS["b"], "not in the index": ARRAYS["a"]}, sharded / "two.safetensors")
    with golden.raises("fingerprint", CheckpointError):
        stored_tensors(sharded)


@pytest.mark.parametrize("num_tensors", [2, 5_000])
@pytest.mark.parametrize("again", ['"NAME":ENTRY', '"\\u006dNAME":ENTRY'], ids=["plain", "escaped"])
def test_a_tensor_that_is_there_twice_is_refused(num_tensors: int, again: str, golden: Golden) -> None:
    """However it is written, next to the first or a piece later, and though both say the same."""
    header = header_of(num_tensors)
    name, entry = next(iter(header.items()))
    escaped = name.removeprefix("m") if "u006d" in again else name
    member = again.replace("NAME", escaped).replace("ENTRY", compact(entry).decode()).encode()
    raw = compact(header)[:-1] + b"," + member + b"}"
    with golden.raises("fingerprint", CheckpointError):
        parse_header(raw, "f", 8 + len(raw) + 2 * num_tensors)


def test_a_field_that_is_there_twice_is_refused(golden: Golden) -> None:
    raw = b'{"a":{"dtype":"U8","shape":[2,3],"shape":[3,2],"data_offsets":[0,6]}}'
    with golden.raises("fingerprint", CheckpointError):
        parse_header(raw, "f", 8 + len(raw) + 6)
    raw = b'{"weight_map":{"a":"one.safetensors","a":"two.safetensors"}}'
    with golden.raises("fingerprint", CheckpointError):
        parse_index(raw, "index")


def test_a_tensor_arrives_in_pieces_and_only_its_bytes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_module, "CHUNK_BYTES", 1000)
    arrays = {name: np.arange(1100, dtype=np.int32) for name in ("first", "second")}
    save_file(arrays, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    opened = checkpoint.bytes_read
    assert opened == os.path.getsize(tmp_path / "model.safetensors") - 2 * 4400
    pieces = list(checkpoint.chunks("second"))
    assert [len(piece) for piece in pieces] == [1000, 1000, 1000, 1000, 400]
    assert b"".join(pieces) == arrays["second"].tobytes()
    assert checkpoint.bytes_read == opened + 4400


def test_a_symlinked_file_is_read(single: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The hub's cache keeps links to blobs."""
    link = tmp_path_factory.mktemp("snapshot")
    (link / "model.safetensors").symlink_to(single / "model.safetensors")
    assert Checkpoint.open(link).read("a") == ARRAYS["a"].tobytes()


# --- what is refused ---


def test_a_missing_directory_is_named(tmp_path: Path, golden: Golden) -> None:
    with golden.raises("fingerprint", NotFoundError):
        Checkpoint.open(tmp_path / "absent")


@pytest.mark.parametrize(
    "files",
    [
        [],
        ["config.json"],
        ["adapter.safetensors"],
        ["pytorch_model.bin"],
        ["model.pt", "tokenizer.json"],
    ],
    ids=repr,
)
def test_a_directory_without_safetensors_is_refused(tmp_path: Path, files: list[str], golden: Golden) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    golden("fingerprint", str(caught.value))


def test_a_file_that_the_index_names_must_be_there(sharded: Path, golden: Golden) -> None:
    (sharded / "two.safetensors").unlink()
    with golden.raises("fingerprint", CheckpointError):
        Checkpoint.open(sharded)


def test_a_tensor_must_be_where_the_index_says(sharded: Path, golden: Golden) -> None:
    index = {"weight_map": {"a": "one.safetensors", "lost": "two.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    with golden.raises("fingerprint", CheckpointError):
        Checkpoint.open(sharded)


@pytest.mark.parametrize(
    "name",
    [
        "../one.safetensors",
        "/etc/passwd",
        "sub/one.safetensors",
        "model.bin",
        "",
        "..",
        7,
        None,
        "\0.safetensors",
        "\ud800.safetensors",
        "x" * 5000 + ".safetensors",
    ],
)
def test_an_index_reaches_only_safetensors_files_beside_it(sharded: Path, name: object) -> None:
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="names"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("content", [b"{", b"[]", b"{}", b'{"weight_map": {}}', b'{"weight_map": []}', b"\xff"])
def test_an_index_that_maps_nothing_is_refused(sharded: Path, content: bytes) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="index"):
        Checkpoint.open(sharded)


def test_a_truncated_file_tells_both_sizes(single: Path, golden: Golden) -> None:
    file = single / "model.safetensors"
    whole = file.stat().st_size
    os.truncate(file, whole - 5)
    with golden.raises("fingerprint", CheckpointError):
        Checkpoint.open(single)


def test_a_file_that_shrinks_while_it_is_read_is_no_short_tensor(single: Path, golden: Golden) -> None:
    checkpoint = Checkpoint.open(single)
    os.truncate(single / "model.safetensors", checkpoint.tensors["b"].offset + 1)
    with golden.raises("fingerprint", CheckpointError):
        checkpoint.read("b")


def test_an_unknown_tensor_is_named(single: Path, golden: Golden) -> None:
    with golden.raises("fingerprint", CheckpointError):
        Checkpoint.open(single).read("nope")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"1234567", id="seven"),
        pytest.param(b"version https://git-lfs.github.com/spec/v1\n", id="lfs"),
        pytest.param((2**63).to_bytes(8, "little"), id="huge-header"),
        pytest.param((50).to_bytes(8, "little") + b"{}", id="cut-header"),
        pytest.param(raw_file(b"nonsense"), id="not-json"),
        pytest.param(raw_file(b"[]"), id="list"),
        pytest.param(raw_file(b"[" * 200_000), id="deep"),
        pytest.param(raw_file(b"\xff\xff"), id="not-utf8"),
        pytest.param(raw_file(b'{"__metadata__": {"a": "1", "a": "2"}}'), id="duplicate"),
        pytest.param(raw_file({"a": 1}), id="no-entry"),
        pytest.param(raw_file({"a": tensor(extra=1)}, b"8bytes.."), id="extra-key"),
        pytest.param(raw_file({"a": tensor("F31")}, b"8bytes.."), id="dtype"),
        pytest.param(raw_file({"a": tensor(["F32"])}, b"8bytes.."), id="dtype-list"),
        pytest.param(raw_file({"a": tensor(shape=[-2])}, b"8bytes.."), id="negative"),
        pytest.param(raw_file({"a": tensor(shape=[2.0])}, b"8bytes.."), id="float"),
        pytest.param(raw_file({"a": tensor(shape=[True, 2])}, b"8bytes.."), id="bool"),
        pytest.param(raw_file({"a": tensor(shape=[1] * 33)}, b"8bytes.."), id="dimensions"),
        pytest.param(raw_file({"a": tensor(shape=[2**62] * 32)}, b"8bytes.."), id="vast"),
        pytest.param(raw_file({"a": tensor(shape=[3])}, b"8bytes.."), id="span"),
        pytest.param(raw_file({"a": tensor(offsets=[8, 0])}, b"8bytes.."), id="backwards"),
        pytest.param(raw_file({"a": tensor(offsets=[0])}, b"8bytes.."), id="one-offset"),
        pytest.param(raw_file({"a": tensor(offsets=[4, 12])}, b"x" * 12), id="gap"),
        pytest.param(raw_file({"a": tensor(), "b": tensor(offsets=[4, 12])}, b"x" * 12), id="overlap"),
        pytest.param(raw_file({"a": tensor(), "b": tensor()}, b"x" * 8), id="same-bytes"),
        pytest.param(raw_file({"a": tensor()}, b"x" * 7), id="short"),
        pytest.param(raw_file({"a": tensor()}, b"x" * 9), id="long"),
    ],
)
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes, golden: Golden) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    golden("fingerprint", str(caught.value))
    assert "\n" not in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path, golden: Golden) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with golden.raises("fingerprint", CheckpointError):
        Checkpoint.open(tmp_path)


GOOD = raw_file({"a": tensor(), "b": tensor("BF16", [2, 3], [8, 20]), "__metadata__": {"format": "pt"}}, b"x" * 20)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    edits=st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, len(GOOD)) | st.none(),
)
def test_mutated_bytes_are_read_or_refused(tmp_path: Path, edits: list[tuple[int, int]], cut: int | None) -> None:
    content = bytearray(GOOD)
    for position, value in edits:
        content[position] = value
    (tmp_path / "model.safetensors").write_bytes(bytes(content[:cut]))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError:
        return
    assert sum(entry.num_bytes for entry in checkpoint.tensors.values()) <= len(content)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.integers(0, 30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
entries = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "F4", "U8"]) | json_values,
        "shape": st.lists(st.integers(0, 4), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(0, 30), min_size=2, max_size=2) | json_values,
    }
)


@pytest.mark.slow
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(header=st.dictionaries(st.text(max_size=3), entries | json_values, max_size=3), size=st.integers(0, 40))
def test_any_json_header_is_read_or_refused(tmp_path: Path, header: dict[str, Any], size: int) -> None:
    """Accepted tensors lie inside the file, one after the other; white space makes no difference."""
    raw = compact(header)
    verdicts = []
    for text in (raw, json.dumps(header).encode()):
        try:
            verdicts.append(parse_header(text, "f", 8 + len(text) + size))
        except CheckpointError:
            verdicts.append({})
    assert verdicts[0] == verdicts[1]
    content = raw_file(raw, b"x" * size)
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except CheckpointError:
        return
    assert checkpoint.bytes_read + sum(entry.num_bytes for entry in checkpoint.tensors.values()) == len(content)


# --- what is written ---


def output(name: str, array: np.ndarray[Any, Any], dtype: str, piece_bytes: int = 5) -> OutputTensor:
    data = array.tobytes()
    pieces = [data[start : start + piece_bytes] for start in range(0, len(data), piece_bytes)]
    return OutputTensor(name, dtype, array.shape, len(data), lambda: pieces)


def test_a_written_file_is_one_that_the_library_reads(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = [
        output(name, array, dtype)
        for (name, array), dtype in zip(ARRAYS.items(), ["F32", "I16", "F64", "F64"], strict=True)
    ]
    counted: list[int] = []
    assert write_safetensors(file, tensors, on_bytes=counted.append) == file.stat().st_size
    loaded = load_file(file)
    assert loaded.keys() == ARRAYS.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in ARRAYS.items())
    assert sum(counted) == sum(array.nbytes for array in ARRAYS.values())
    assert Checkpoint.open(tmp_path).read("b") == ARRAYS["b"].tobytes()


def test_a_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    with new_directory(target, needed_bytes=1) as part:
        (part / "file").write_text("x")
        assert not target.exists()
    assert [entry.name for entry in target.iterdir()] == ["file"]
    assert [entry.name for entry in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), CheckpointError("bad"), KeyboardInterrupt()]
)
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    expected = CheckpointError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected), new_directory(tmp_path / "target", needed_bytes=1) as part:  # noqa: PT012
        (part / "file").write_text("x")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_too_small_a_disk_is_found_before_writing(tmp_path: Path, golden: Golden) -> None:
    with (
        golden.raises("fingerprint", CheckpointError),
        new_directory(tmp_path / "target", needed_bytes=2**60),
    ):
        pytest.fail("nothing may be written")
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "mine").write_text("x")
    with (
        pytest.raises(ConflictError, match="is there already"),
        new_directory(tmp_path / "target", needed_bytes=1),
    ):
        pytest.fail("nothing may be written")
    with pytest.raises(ConflictError, match="is there"), new_directory(tmp_path / "file", needed_bytes=1):  # noqa: PT012
        (tmp_path / "file").mkdir()
        (tmp_path / "file" / "theirs").write_text("x")  # someone else is faster
    assert sorted(str(entry.relative_to(tmp_path)) for entry in tmp_path.rglob("*")) == [
        "file",
        "file/theirs",
        "target",
        "target/mine",
    ]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(CheckpointError, match="cannot write"),
        new_directory(tmp_path / "file" / "t", needed_bytes=1),
    ):
        pytest.fail("nothing may be written")
