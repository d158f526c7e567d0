"""Rules by which tensors are packed, on made-up figures; kept figures give the level that the store has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from daemon.variants import tensor_files
from fingerprint.lora import read_adapter
from tests.bench import packed_tensors as bench
from tests.bench import packed_tensors_tables as tables
from tests.bench.packed_tensors_tables import LEVELS, Kind, Packing, Study
from tests.daemon.tiny_deltas import write_exact_delta
from tests.fingerprint.small_adapters import Q0, write_adapter

ROOT = Path(__file__).parents[2]
MB = 1_000_000


def study(sizes: dict[str, dict[int, int]], pack_mb_s: dict[int, float], shuffled: int = 0) -> Study:
    """Return a study of kinds of 1 MB with ``sizes`` by level, all packed at ``pack_mb_s``."""
    kinds = [
        Kind(name=name, model="m", dtype="BF16", num_bytes=MB, num_values=MB // 2, zlib_bits=16.0)
        for name in sizes
    ]
    packings = [
        Packing(
            kind=name,
            model="m",
            level=level,
            is_shuffled=is_shuffled,
            num_bytes=shuffled if is_shuffled else size,
            bits=16 * size / MB,
            pack_mb_s=(pack_mb_s[level],) * 3,
            unpack_mb_s=(900.0,) * 3,
        )
        for name, by_level in sizes.items()
        for level, size in by_level.items()
        for is_shuffled in (False, True)
    ]
    return Study(
        date="", machine="", zstandard="", elapsed_s=0.0, kinds=tuple(kinds), packings=tuple(packings), loads=()
    )


SPEEDS = {1: 300.0, 3: 200.0, 6: 100.0, 9: 51.0, 12: 49.0, 19: 4.0}


@pytest.mark.parametrize(
    ("sizes", "level"),
    [
        pytest.param((700_000, 699_000, 698_000, 695_000, 600_000, 500_000), 1, id="the fastest within 1%"),
        pytest.param((710_000, 699_000, 698_000, 695_000, 600_000, 500_000), 3, id="not beyond 1%"),
        pytest.param((800_000, 800_000, 800_000, 700_000, 600_000, 500_000), 9, id="fast enough"),
    ],
)
def test_the_level_is_the_fastest_that_saves_as_much_as_any_that_is_fast_enough(
    sizes: tuple[int, ...], level: int
) -> None:
    """Kinds that no level packs count neither in size nor in speed."""
    packed = dict(zip(LEVELS, sizes, strict=True))
    assert tables.chosen_level(study({"packed": packed, "plain": dict.fromkeys(LEVELS, 951_000)}, SPEEDS)) == level


def test_shuffled_bytes_are_compared_with_packed_ones() -> None:
    assert tables.shuffle_gain(study({"a": dict.fromkeys(LEVELS, 800_000)}, SPEEDS, shuffled=600_000), 1) == 0.25


def test_loads_of_adapters_and_deltas_are_measured_packed_and_plain(tmp_path: Path) -> None:
    values = np.zeros((4, 10_000), np.float32)
    name = f"base_model.model.{Q0}.lora"
    factors = {f"{name}_A.weight": values, f"{name}_B.weight": values.T}
    contents = {
        "adapter": read_adapter(write_adapter(tmp_path / "adapter", factors)),
        "delta": write_exact_delta(tmp_path / "delta", {"a": values, "b": values.T}),
    }
    loads = list(bench._loads(contents, tmp_path))
    assert [load.content for load in loads] == ["adapter", "delta"]
    for load in loads:
        assert load.num_bytes == 2 * values.nbytes
        assert 0 < load.disk_bytes < 0.1 * load.num_bytes
        assert len(load.packed_s) == len(load.plain_s) == len(load.add_packed_s) == len(load.add_plain_s) == 3


@pytest.fixture(scope="module")
def kept() -> Study:
    return tables.read_study(ROOT / "tests/bench/results/packed_tensors.json.xz")


class TestKept:
    def test_the_store_has_what_the_rules_choose(self, kept: Study) -> None:
        assert tables.chosen_level(kept) == tensor_files.LEVEL == kept.loads[0].level
        assert tables.shuffle_gain(kept, tensor_files.LEVEL) < 0.15

    def test_the_decision_has_the_tables(self, kept: Study) -> None:
        page = (ROOT / "docs/decisions/0055-packed-tensors.md").read_text()
        for table in (tables.kinds_table(kept), tables.levels_table(kept), tables.loads_table(kept)):
            assert table in page
        assert f"{tables.shuffle_gain(kept, tensor_files.LEVEL):.1%}" in page

    def test_every_format_and_level_is_there(self, kept: Study) -> None:
        from fingerprint.delta import FORMATS

        for model in (bench.TRAINED, bench.WIDE):
            assert {kind.name for kind in kept.kinds if kind.model == model} > FORMATS.keys()
        assert {packing.level for packing in kept.packings} == set(LEVELS)
