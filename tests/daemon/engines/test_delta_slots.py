"""Slots of deltas and the folders that fill them, on the CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from fingerprint.delta.formats import FORMATS
from tests.daemon.variant_kernels import variant_module
from tests.fingerprint.small_fine_tunes import tiny_tensors, write_model
from tests.fingerprint.test_delta_reader import FILE, MATRIX, NORM, write_delta
from tests.golden_words import Golden

folder_module = variant_module("folder")
formats = variant_module("formats")
recoding = variant_module("recoding")
reference = variant_module("reference")
slots_module = variant_module("slots")
INT2 = formats.FORMATS["int2"]


def _packed(shape: tuple[int, int], name: str = "int2") -> tuple[torch.Tensor, torch.Tensor]:
    format_ = formats.FORMATS[name]
    codes = torch.randint(-(2**15), 2**15, format_.codes_shape(*shape), dtype=torch.int16)
    return codes, (torch.rand(format_.scales_shape(*shape)) * 0.01 + 0.001).bfloat16()


def _change(slots: object, slot: int) -> torch.Tensor:
    return reference.dequantize(slots.codes[slot], slots.scales[slot], slots.format)  # type: ignore[attr-defined]


def test_joined_matrices_are_rows_of_one() -> None:
    slots = slots_module.LinearSlots(slots=2, slices=(128, 64, 64), inputs=256, format_=INT2, device="cpu")
    q, v = _packed((128, 256)), _packed((64, 256))
    slots.put(1, [q, None, v])
    want = torch.cat([reference.dequantize(*q, INT2), torch.zeros(64, 256), reference.dequantize(*v, INT2)])
    assert torch.equal(_change(slots, 1), want)
    assert not _change(slots, 0).any()
    slots.put(1, [None, _packed((64, 256)), None])
    assert not _change(slots, 1)[:128].any()
    slots.clear(1)
    assert not _change(slots, 1).any()


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_shards_are_parts_of_the_matrix(name: str) -> None:
    packed, format_ = _packed((256, 512), name), formats.FORMATS[name]
    whole = reference.dequantize(*packed, format_)
    for shard in range(2):
        columns = slots_module.cut_outputs(packed, shard, 128)
        assert torch.equal(reference.dequantize(*columns, format_), whole[shard * 128 : (shard + 1) * 128])
        rows = slots_module.cut_inputs(packed, shard, 256)
        assert torch.equal(reference.dequantize(*rows, format_), whole[:, shard * 256 : (shard + 1) * 256])


PAIRS = [
    (of, to)
    for of in sorted(formats.FORMATS)
    for to in sorted(formats.FORMATS)
    if formats.FORMATS[to].holds(formats.FORMATS[of])
]


def test_a_format_holds_those_whose_levels_it_has() -> None:
    """The plug-in's formats and those of files agree, and both do with the levels."""
    for of, to in itertools.product(FORMATS.values(), repeat=2):
        is_held = set(of.levels.tolist()) <= set(to.levels.tolist())
        assert to.holds(of) == is_held, (of.name, to.name)
        assert formats.FORMATS[to.name].holds(formats.FORMATS[of.name]) == is_held
    assert ("int2", "int4") in PAIRS
    assert ("sparse24-int2", "sparse24-int4") in PAIRS
    assert ("sparse24-int4", "int4") not in PAIRS


@pytest.mark.parametrize("of, to", PAIRS)
@pytest.mark.parametrize("piece", [1, 2**22])
def test_a_narrower_matrix_means_the_same_in_wider_slots(
    of: str, to: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recoding, "_PIECE_WEIGHTS", piece)
    narrow, wide = formats.FORMATS[of], formats.FORMATS[to]
    slots = slots_module.LinearSlots(slots=2, slices=(128, 64, 64), inputs=256, format_=wide, device="cpu")
    q, k, v = _packed((128, 256), of), _packed((64, 256), to), _packed((64, 256), of)
    slots.put(1, [q, k, v])
    want = [reference.dequantize(*one, format_) for one, format_ in ((q, narrow), (k, wide), (v, narrow))]
    assert torch.equal(_change(slots, 1), torch.cat(want))
    embeddings = slots_module.EmbeddingSlots(slots=1, shape=(128, 256), format_=wide, device="cpu")
    embeddings.put(0, q)
    assert torch.equal(_change(embeddings, 0), want[0])


def test_slots_refuse_codes_of_more_bits_than_they_have() -> None:
    slots = slots_module.LinearSlots(slots=1, slices=(64,), inputs=128, format_=INT2, device="cpu")
    with pytest.raises(ValueError, match="do not fill"):
        slots.put(0, [_packed((64, 128), "int3")])
    embeddings = slots_module.EmbeddingSlots(slots=1, shape=(64, 128), format_=INT2, device="cpu")
    with pytest.raises(ValueError, match="do not fill"):
        embeddings.put(0, _packed((64, 128), "int4"))
    with pytest.raises(ValueError, match="does not hold"):
        recoding.recode_into(slots.codes[0], _packed((64, 128), "int3")[0], formats.FORMATS["int3"], INT2)


def test_parts_that_do_not_fit_leave_the_slot_as_it_was() -> None:
    slots = slots_module.LinearSlots(slots=1, slices=(64, 64), inputs=128, format_=INT2, device="cpu")
    slots.put(0, [_packed((64, 128)), _packed((64, 128))])
    before = _change(slots, 0)
    for parts in ([_packed((64, 128))], [_packed((64, 128)), _packed((128, 128))], [None, _packed((64, 256))]):
        with pytest.raises(ValueError, match="do not fill"):
            slots.put(0, parts)
    assert torch.equal(_change(slots, 0), before)
    with pytest.raises(ValueError, match="no whole tiles"):
        slots_module.LinearSlots(slots=1, slices=(96,), inputs=128, format_=INT2, device="cpu")


@pytest.mark.parametrize("heads", [None, 3])
def test_norm_has_the_weight_of_the_rows_slot(heads: int | None) -> None:
    base = torch.rand(32).bfloat16()
    slots = slots_module.NormSlots(slots=2, weight=base)
    tuned = torch.rand(32).bfloat16()
    slots.put(1, tuned)
    shape = (4, 32) if heads is None else (4, heads, 32)
    x, residual = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    slot_of_row = torch.tensor([-1, 1, 0, 1])
    found, total = slots.normalize(x, slot_of_row, 1e-5, residual)
    assert torch.equal(total, (x.float() + residual.float()).bfloat16())
    for row, weight in enumerate((base, tuned, base, tuned)):
        exact = torch.nn.functional.rms_norm((x.float() + residual.float())[row], (32,), None, 1e-5)
        assert torch.equal(found[row], exact.bfloat16() * weight)
    slots.clear(1)
    assert torch.equal(slots.table[2], base)
    with pytest.raises(ValueError, match="does not replace"):
        slots.put(0, torch.rand(16))


@pytest.mark.parametrize("name", ["int4", "int3", "int1"])
def test_embedding_reads_the_rows_of_its_tokens(name: str) -> None:
    shape, format_ = (200, 192), formats.FORMATS[name]
    slots = slots_module.EmbeddingSlots(slots=3, shape=shape, format_=format_, device="cpu")
    packed = [_packed(shape, name) for _ in range(2)]
    slots.put(0, packed[0])
    slots.put(2, packed[1])
    tokens, slot_of_row = torch.tensor([0, 199, 64, 63, 5, 7]), torch.tensor([0, 2, 2, -1, 1, 0])
    found = slots.change(tokens, slot_of_row)
    for row, (token, slot) in enumerate(zip(tokens.tolist(), slot_of_row.tolist(), strict=True)):
        of_slot = {0: packed[0], 2: packed[1]}.get(slot)
        want = reference.dequantize(*of_slot, format_)[token, :192] if of_slot else torch.zeros(192)
        assert torch.equal(found[row], want)


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_a_folder_is_read_as_the_compressor_writes_it(tmp_path: Path, name: str) -> None:
    change = write_delta(tmp_path / "delta", write_model(tmp_path / "base", tiny_tensors()), name)
    pauses = list[None]()
    delta = folder_module.read_folder(tmp_path / "delta", pin=False, pause=lambda: pauses.append(None))
    assert len(pauses) == 2 * (2 * len(delta.matrices) + len(delta.exact))  # views of files, and of the manifest
    matrix = delta.matrices[MATRIX]
    assert (matrix.format_name, matrix.shape) == (name, change.shape)
    found = reference.dequantize(matrix.codes, matrix.scales, matrix.format)[: change.shape[0], : change.shape[1]]
    assert torch.equal(found, torch.from_numpy(change))
    assert (delta.exact[NORM] == 1.5).all()


def test_folders_that_are_not_what_their_manifest_says(tmp_path: Path, golden: Golden) -> None:
    write_delta(tmp_path / "delta", write_model(tmp_path / "base", tiny_tensors()))
    manifest, file = tmp_path / "delta" / "delta.json", tmp_path / "delta" / FILE
    whole, written = file.read_bytes(), json.loads(manifest.read_bytes())

    def refused() -> None:
        with golden.raises("engines", ValueError):
            folder_module.read_folder(tmp_path / "delta", pin=False)

    for raw in (b"", whole[:7], b"\xff" * 8 + whole[8:], whole[:8] + b"[]" + whole[10:], whole[:-1]):
        file.write_bytes(raw)
        refused()
    file.write_bytes(whole)
    for path, value in (
        (("version",), 2),
        (("matrices", 0, "format"), "int5"),
        (("matrices", 0, "shape"), [9999, 1]),
        (("matrices", 0, "file"), "../delta/" + FILE),
        (("exact", 0, "dtype"), "F32"),
        (("exact", 0, "name"), "other"),
    ):
        changed = json.loads(json.dumps(written))
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        manifest.write_text(json.dumps(changed))
        refused()
    for text in ("", "[]", "{"):
        manifest.write_text(text)
        refused()
