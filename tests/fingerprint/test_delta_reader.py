"""Reading deltas: no size, name or hash of a folder is believed, and the message names the first tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fingerprint.checkpoint import Checkpoint
from fingerprint.codec import to_json
from fingerprint.delta import FORMATS, BaseHashes, DeltaManifest, export_delta, read_delta
from fingerprint.delta.manifest import MANIFEST_FILE, MANIFEST_VERSION, ExactTensor, MatrixRecord, TensorHash
from fingerprint.delta.packing import dequantize, pack_codes, pad_scales
from fingerprint.delta.reader import CODES_DTYPE, SCALES_DTYPE
from fingerprint.errors import CheckpointError, ConflictError, NotFoundError
from fingerprint.float_bytes import encode_floats
from fingerprint.safetensors_writer import OutputTensor, write_safetensors
from fingerprint.tensor_hash import tensor_hash
from tests.fingerprint.small_fine_tunes import read_values, tiny_tensors, write_model
from tests.golden_words import Golden

MATRIX, NORM = "model.layers.0.mlp.down_proj.weight", "model.norm.weight"
FILE = "delta-00001.safetensors"
Json = dict[str, Any]


def output(name: str, dtype: str, shape: tuple[int, ...], raw: bytes) -> OutputTensor:
    return OutputTensor(name, dtype, shape, len(raw), lambda: (raw,))


def write_delta(
    folder: Path, base: Path, name: str = "int3", seed: int = 0, scale: float = 0.01
) -> np.ndarray[Any, Any]:
    """Write a delta of one matrix and one norm, and return the change of the matrix."""
    random, format_, checkpoint = np.random.default_rng(seed), FORMATS[name], Checkpoint.open(base)
    shape, norm = checkpoint.tensors[MATRIX].shape, checkpoint.tensors[NORM]
    codes = random.integers(2**format_.bits, size=shape, dtype=np.uint8)
    scales = pad_scales(np.full((shape[0], -(-shape[1] // 128)), np.float32(scale)))
    words = pack_codes(codes, format_.bits)
    norm_raw = encode_floats(np.full(norm.shape, 1.5, np.float32), "BF16")
    tensors = [
        output(f"{MATRIX}.codes", CODES_DTYPE, words.shape, words.astype("<u2").tobytes()),
        output(f"{MATRIX}.scales", SCALES_DTYPE, scales.shape, encode_floats(scales, SCALES_DTYPE)),
        output(NORM, "BF16", norm.shape, norm_raw),
    ]
    folder.mkdir()
    write_safetensors(folder / FILE, tensors)
    hashes = [tensor_hash(each.dtype, each.shape, each.pieces()) for each in tensors]
    manifest = DeltaManifest(
        version=MANIFEST_VERSION,
        format=name,
        max_error=None,
        base_name="base",
        base=tuple(
            TensorHash(name=each, sha256=tensor_hash(entry.dtype, entry.shape, checkpoint.chunks(each)))
            for each, entry in sorted(checkpoint.tensors.items())
        ),
        finetuned_name="tuned",
        finetuned_sha256="0" * 64,
        calibration=None,
        matrices=(
            MatrixRecord(
                name=MATRIX,
                shape=(shape[0], shape[1]),
                format=name,
                error=0.1,
                weight_error=0.1,
                file=FILE,
                codes=hashes[0],
                scales=hashes[1],
            ),
        ),
        exact=(ExactTensor(name=NORM, dtype="BF16", shape=norm.shape, file=FILE, sha256=hashes[2]),),
        companions=(),
    )
    (folder / MANIFEST_FILE).write_bytes(to_json(manifest))
    stored = np.frombuffer(encode_floats(scales, "BF16"), "<u2").astype("<u4") << 16
    return dequantize(codes, stored.view("<f4").reshape(scales.shape), format_)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base", tiny_tensors())


@pytest.mark.parametrize("name", FORMATS)
def test_a_delta_is_read_and_exported_as_it_was_written(tmp_path: Path, base: Path, name: str) -> None:
    change = write_delta(tmp_path / "delta", base, name)
    delta = read_delta(tmp_path / "delta")
    assert np.array_equal(delta.change(delta.manifest.matrices[0]), change)
    export_delta(base, delta, tmp_path / "exported")
    before, after = read_values(base), read_values(tmp_path / "exported")
    rounded = np.frombuffer(encode_floats(before[MATRIX] + change, "BF16"), "<u2").astype("<u4") << 16
    assert np.array_equal(after[MATRIX], rounded.view("<f4").reshape(change.shape))
    assert (after[NORM] == 1.5).all()
    assert all(np.array_equal(after[each], before[each]) for each in before if each not in (MATRIX, NORM))


def test_the_content_hash_is_of_what_changes_answers(tmp_path: Path, base: Path) -> None:
    hashes = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_delta(tmp_path / name, base, seed=seed)
        hashes.append(read_delta(tmp_path / name).manifest.content_hash)
    assert hashes[0] == hashes[1] != hashes[2]


def edit(folder: Path, change: Callable[[Json], object]) -> None:
    document = json.loads((folder / MANIFEST_FILE).read_bytes())
    change(document)
    (folder / MANIFEST_FILE).write_text(json.dumps(document))


def set_of(place: str, **values: object) -> Callable[[Json], object]:
    return lambda document: document[place][0].update(values)


@pytest.mark.parametrize(
    "change, said",
    [
        pytest.param(lambda each: each.update(version=2), "version 2", id="version"),
        pytest.param(lambda each: each.pop("base"), "base", id="missing-field"),
        pytest.param(set_of("matrices", format="int5"), f"{MATRIX}.*int5", id="format"),
        pytest.param(set_of("matrices", format="int2"), f"{MATRIX}.*codes", id="other-format"),
        pytest.param(set_of("matrices", shape=[64, 2**40]), f"{MATRIX}.*impossible", id="huge-shape"),
        pytest.param(set_of("matrices", shape=[-64, 160]), f"{MATRIX}.*impossible", id="negative-shape"),
        pytest.param(set_of("matrices", shape=[640, 160]), f"{MATRIX}.codes", id="other-shape"),
        pytest.param(set_of("matrices", codes="0" * 64), f"{MATRIX}.codes.*changed", id="codes-hash"),
        pytest.param(set_of("matrices", scales="x"), f"{MATRIX}.scales.*changed", id="scales-hash"),
        pytest.param(set_of("matrices", name="no.such.weight"), "no.such.weight", id="name"),
        pytest.param(set_of("matrices", name=NORM), f"{NORM}.*twice", id="twice"),
        pytest.param(set_of("matrices", file="../delta-00001.safetensors"), f"{MATRIX}.*no file", id="file"),
        pytest.param(set_of("matrices", file="delta-00002.safetensors"), "has no delta-00002", id="missing-file"),
        pytest.param(set_of("exact", sha256="0" * 64), f"{NORM}.*changed", id="exact-hash"),
        pytest.param(set_of("exact", dtype="F16"), f"{NORM}.*F16", id="exact-type"),
        pytest.param(
            lambda each: each["companions"].append({"name": "../x", "sha256": ""}), r"\.\./x", id="companion"
        ),
    ],
)
def test_a_manifest_that_is_not_of_its_files(
    tmp_path: Path, base: Path, change: Callable[[Json], object], said: str
) -> None:
    write_delta(tmp_path / "delta", base)
    edit(tmp_path / "delta", change)
    with pytest.raises(CheckpointError, match=said):
        read_delta(tmp_path / "delta")


@pytest.mark.parametrize("scale", [-0.01, np.inf, np.nan])
def test_scales_that_are_none(tmp_path: Path, base: Path, scale: float) -> None:
    write_delta(tmp_path / "delta", base, scale=scale)
    with pytest.raises(CheckpointError, match=rf"{MATRIX}\.scales.*no scales"):
        read_delta(tmp_path / "delta")


def test_files_that_were_changed_or_lead_out(tmp_path: Path, base: Path, golden: Golden) -> None:
    folder = tmp_path / "delta"
    write_delta(folder, base)
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:-1])
    with golden.raises("fingerprint", CheckpointError, "truncated"):
        read_delta(folder)
    (folder / FILE).write_bytes(content[:-1] + b"\0")
    with golden.raises("fingerprint", CheckpointError, "changed"):
        read_delta(folder)
    (folder / FILE).unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    (folder / FILE).symlink_to(tmp_path / "elsewhere")
    with golden.raises("fingerprint", CheckpointError, "linked"):
        read_delta(folder)
    (folder / MANIFEST_FILE).write_bytes(b"{" * 100_000)
    with golden.raises("fingerprint", CheckpointError, "manifest"):
        read_delta(folder)


def test_folders_that_are_no_deltas(tmp_path: Path, base: Path) -> None:
    with pytest.raises(NotFoundError, match="no directory"):
        read_delta(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"delta\.json"):
        read_delta(base)


def test_an_export_refuses_another_base_and_a_target_that_is_there(tmp_path: Path, base: Path) -> None:
    write_delta(tmp_path / "delta", base)
    delta, tensors = read_delta(tmp_path / "delta"), tiny_tensors()
    fewer = write_model(tmp_path / "fewer", {name: each for name, each in tensors.items() if name != NORM})
    wide = write_model(tmp_path / "wide", tensors, dtype="F32")
    for other, named in ((fewer, NORM), (wide, "lm_head.weight")):
        with pytest.raises(CheckpointError, match=f"{named}.*differs"):
            export_delta(other, delta, tmp_path / "out")
        assert not (tmp_path / "out").exists()
    with pytest.raises(ConflictError):
        export_delta(base, delta, base)


def test_a_sum_beyond_the_bases_type_is_an_error(tmp_path: Path, base: Path) -> None:
    write_delta(tmp_path / "delta", base, scale=3e38)
    with pytest.raises(CheckpointError, match=f"{MATRIX}.*does not hold"):
        export_delta(base, read_delta(tmp_path / "delta"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_base_is_read_once_however_many_deltas_are_compared_with_it(tmp_path: Path) -> None:
    base = Checkpoint.open(write_model(tmp_path / "base", tiny_tensors()))
    of_base = [
        TensorHash(name=name, sha256=tensor_hash(entry.dtype, entry.shape, base.chunks(name)))
        for name, entry in sorted(base.tensors.items())
    ]
    base, sizes = Checkpoint.open(tmp_path / "base"), [entry.num_bytes for entry in base.tensors.values()]
    hashes, headers = BaseHashes(base), base.bytes_read
    hashes.check(of_base)
    hashes.check(of_base)
    assert base.bytes_read == headers + sum(sizes)
    with pytest.raises(CheckpointError, match=of_base[3].name):
        hashes.check([*of_base[:3], replace(of_base[3], sha256="0" * 64), *of_base[4:]])
    assert base.bytes_read == headers + sum(sizes)
