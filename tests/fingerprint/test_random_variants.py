"""Random adapters and deltas of a fingerprint are what an engine would load."""

from __future__ import annotations

from pathlib import Path

import pytest

from fingerprint.checkpoint import Checkpoint
from fingerprint.config import SlotFormat
from fingerprint.delta import FORMATS, BaseHashes, read_delta
from fingerprint.delta.formats import EMBEDDING_FORMAT
from fingerprint.lora import check_values, read_adapter, require_supported
from fingerprint.random_variants import write_random_variant
from fingerprint.truncate import generate
from fingerprint.variant_measurements import VariantKind
from iserve.demo import demo_model_path


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants") / "fingerprint"
    generate(demo_model_path(), folder, (0, 3))
    return folder


def test_an_adapter_updates_every_linear_of_the_layers(fingerprint: Path, tmp_path: Path) -> None:
    num_bytes = write_random_variant(fingerprint, tmp_path / "adapter", VariantKind(16), 0)
    adapter = read_adapter(tmp_path / "adapter", max_rank=16)
    require_supported(adapter)
    check_values(adapter)
    assert len(adapter.modules) == 2 * 7
    assert {module.rank for module in adapter.modules} == {16}
    assert num_bytes == sum(2 * 16 * (module.in_features + module.out_features) for module in adapter.modules)


@pytest.mark.parametrize("format_", [SlotFormat.INT2, SlotFormat.INT4])
def test_a_delta_changes_all_that_a_fine_tune_does(fingerprint: Path, tmp_path: Path, format_: SlotFormat) -> None:
    write_random_variant(fingerprint, tmp_path / "delta", VariantKind(delta_format=format_), 0)
    manifest = read_delta(tmp_path / "delta").manifest  # checks all hashes
    checkpoint = Checkpoint.open(fingerprint)
    BaseHashes(checkpoint).check(manifest.base)
    assert {each.name for each in manifest.changed} == set(checkpoint.tensors)
    formats = {each.name: each.format for each in manifest.matrices}
    assert formats.pop("model.embed_tokens.weight") == EMBEDDING_FORMAT.name
    assert set(formats.values()) == {FORMATS[format_].name}


def test_variants_differ_by_their_number_alone(fingerprint: Path, tmp_path: Path) -> None:
    for name, number in (("a", 0), ("b", 0), ("c", 1)):
        write_random_variant(fingerprint, tmp_path / name, VariantKind(8), number)
    first, same, other = (next((tmp_path / name).glob("*.safetensors")).read_bytes() for name in "abc")
    assert first == same != other
