"""Adapter kernels in Triton's interpreter against the reference in torch."""

from __future__ import annotations

import pytest
import torch

from tests.daemon.variant_kernels import kernel_module

kernels = kernel_module("adapter_kernels")
adapter_change = kernel_module("reference").adapter_change
AdapterTiling, Groups, add_adapters = kernels.AdapterTiling, kernels.Groups, kernels.add_adapters

pytestmark = pytest.mark.slow
SLOTS = 12
SMALL = AdapterTiling(inputs=64, outputs=32)
MIXES = {
    "base and adapters": [1, -1, 3, 3, 11, 1, -1, 3, 0, 0],
    "one adapter, more rows than a product has": [3] * 37,
    "one row": [2],
    "no adapter": [-1] * 5,
    "an adapter for each row": [(7 * row) % SLOTS for row in range(SLOTS)],
    "many rows": [row % 5 - 1 for row in range(64)],
    "more than 64": [row // 40 - 1 for row in range(100)],
}
# The interpreter cuts bfloat16 off where a GPU rounds: at most 2**-7 of a value. y is cut, and so are the product
# that is added to it and the sums of A, whose errors have random signs in the product. All else is float32.
CUT = 2**-7


def groups_of(mix: list[int], slots: int = SLOTS) -> Groups:
    """Return what vLLM's ``LoRAKernelMeta.prepare_tensors`` makes of a mapping, with its padding."""
    mapping = torch.tensor(mix, dtype=torch.int32)
    found, count = torch.unique(mapping, sorted=True, return_counts=True)
    ids = torch.full((slots + 1,), -1, dtype=torch.int32)
    counts, starts = torch.zeros(slots + 1, dtype=torch.int32), torch.zeros(slots + 2, dtype=torch.int32)
    ids[: len(found)], counts[: len(found)] = found, count.int()
    starts[1 : 1 + len(found)] = torch.cumsum(count, 0).int()
    return Groups(torch.sort(mapping, stable=True).indices.int(), counts, starts, ids)


def adapters(rank: int, inputs: int, outputs: tuple[int, ...]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return random factors of ranks up to the slots', each in the shape that vLLM has, the rest of a slot 0."""
    a = [torch.randn(SLOTS, 1, rank, inputs).bfloat16() * 0.1 for _ in outputs]
    b = [torch.randn(SLOTS, 1, size, rank).bfloat16() for size in outputs]
    for slot in range(SLOTS):
        own = max(1, rank >> (slot % 4))
        for down, up in zip(a, b, strict=True):
            down[slot, :, own:], up[slot, ..., own:] = 0, 0
    return a, b


def check(mix: list[int], rank: int, inputs: int, outputs: tuple[int, ...], tiling: AdapterTiling = SMALL) -> None:
    torch.manual_seed(0)
    a, b = adapters(rank, inputs, outputs)
    x, base = torch.randn(len(mix), inputs).bfloat16(), torch.randn(len(mix), sum(outputs)).bfloat16()
    y, slot_of_row = base.clone(), torch.tensor(mix)
    add_adapters(y, x, a, b, groups_of(mix), 1.0, tiling)
    change = adapter_change(x, [e[:, 0] for e in a], [e[:, 0] for e in b], slot_of_row, 1.0)
    error = (y.float() - base.float() - change).norm(dim=1)
    assert (error <= CUT * (y.float().norm(dim=1) + 2 * change.norm(dim=1))).all()
    assert torch.equal(y[slot_of_row < 0], base[slot_of_row < 0])


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_every_mix(mix: str) -> None:
    check(MIXES[mix], 16, 128, (64, 32))


@pytest.mark.parametrize("rank", [8, 16, 32, 64])
def test_every_rank_of_slots(rank: int) -> None:
    check(MIXES["base and adapters"], rank, 128, (64,))


@pytest.mark.parametrize("outputs", [(96,), (64, 64), (96, 32, 32), (40, 24), (33,)])
def test_slices_that_are_whole_tiles_or_not(outputs: tuple[int, ...]) -> None:
    check(MIXES["base and adapters"], 16, 128, outputs)


@pytest.mark.parametrize(
    ("mix", "rows"), [*((mix, 8) for mix in sorted(MIXES)), ("base and adapters", 1), ("many rows", 1)]
)
def test_split_groups_have_the_same_rows(mix: str, rows: int) -> None:
    whole = groups_of(MIXES[mix])
    split = whole.split(rows)
    assert int(split.counts.max()) <= rows
    assert sorted(rows_of(split)) == sorted(rows_of(whole))
    used = int((split.counts > 0).sum())
    assert (split.slots[:used] >= 0).all()  # so that programs for as many as a step can have are enough
    assert (split.slots[used:] == -1).all()


def test_groups_are_split_into_the_same_memory() -> None:
    """Captured graphs read it: an earlier mapping has left nothing there."""
    first, second = groups_of([3] * 37), groups_of([2, -1])
    kept = first.split(8)
    memory = [tensor.data_ptr() for tensor in kept]
    second.split(8, kept)
    assert [tensor.data_ptr() for tensor in kept] == memory
    assert rows_of(kept._replace(order=second.order)) == [(0, 2)]


def test_many_slots_are_split() -> None:
    mix = [(7 * row) % 130 for row in range(64)]
    assert sorted(rows_of(groups_of(mix, 130).split(8))) == sorted(rows_of(groups_of(mix, 130)))


def rows_of(groups: Groups) -> list[tuple[int, int]]:
    """Return a row and its slot, for all rows that have one."""
    places = zip(groups.counts.tolist(), groups.starts.tolist(), groups.slots.tolist(), strict=False)
    return [
        (row, slot)
        for count, start, slot in places
        if slot >= 0
        for row in groups.order[start : start + count].tolist()
    ]


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_split_groups_give_the_same_sum(mix: str) -> None:
    torch.manual_seed(0)
    a, b = adapters(16, 128, (48,))
    slots, groups = MIXES[mix], groups_of(MIXES[mix])
    x, want = torch.randn(len(slots), 128).bfloat16(), torch.randn(len(slots), 48).bfloat16()
    found = want.clone()
    add_adapters(want, x, a, b, groups, 1.0, SMALL)
    add_adapters(found, x, a, b, groups.split(SMALL.rows), 1.0, SMALL)
    assert torch.equal(found, want)


@pytest.mark.parametrize("inputs", [64, 100, 72])
def test_inputs_that_are_whole_pieces_or_not(inputs: int) -> None:
    check(MIXES["base and adapters"], 16, inputs, (64,))


def test_tensors_of_graphs_are_longer_than_the_step() -> None:
    """A step is padded to its graph's rows: those behind its own are in no group, and stay as they are."""
    torch.manual_seed(0)
    a, b = adapters(16, 64, (32,))
    x, y = torch.randn(8, 64).bfloat16(), torch.randn(8, 32).bfloat16()
    before, groups = y.clone(), groups_of([4, 5, 4])
    padded = groups._replace(order=torch.cat([groups.order, torch.full((5,), 99, dtype=torch.int32)]))
    add_adapters(y, x, a, b, padded, 1.0, SMALL)
    assert torch.equal(y[3:], before[3:])
    assert (y[:3] != before[:3]).any(dim=1).all()


def test_the_scale_is_of_the_product() -> None:
    torch.manual_seed(0)
    a, b = adapters(16, 64, (32,))
    x, groups = torch.randn(2, 64).bfloat16(), groups_of([0, 1])
    once, twice = torch.zeros(2, 32).bfloat16(), torch.zeros(2, 32).bfloat16()
    add_adapters(once, x, a, b, groups, 1.0, SMALL)
    add_adapters(twice, x, a, b, groups, 2.0, SMALL)
    assert torch.equal(twice, 2 * once)


def test_the_same_sum_twice() -> None:
    torch.manual_seed(0)
    a, b = adapters(16, 192, (64,))
    x, groups = torch.randn(10, 192).bfloat16(), groups_of(MIXES["base and adapters"])
    first, second = torch.zeros(10, 64).bfloat16(), torch.zeros(10, 64).bfloat16()
    add_adapters(first, x, a, b, groups, 1.0, SMALL)
    add_adapters(second, x, a, b, groups, 1.0, SMALL)
    assert torch.equal(first, second)


def test_what_the_kernels_are_not_for_is_refused() -> None:
    a, b = adapters(16, 64, (32,))
    x = torch.zeros(2, 64).bfloat16()
    assert kernels.takes(x, a, b)
    assert kernels.takes(torch.zeros(kernels.MOST_ROWS, 64).bfloat16(), a, b)
    assert not kernels.takes(torch.zeros(kernels.MOST_ROWS + 1, 64).bfloat16(), a, b)
    assert not kernels.takes(x, *adapters(128, 64, (32,)))
    assert not kernels.takes(x, *adapters(16, 64, (32,) * 4))
    assert not kernels.takes(x.float(), a, b)
    for y in (torch.zeros(2, 33).bfloat16(), torch.zeros(3, 32).bfloat16(), torch.zeros(2, 32)):
        with pytest.raises(ValueError, match=r"rank|belong"):
            add_adapters(y, x, a, b, groups_of([0, 1]), 1.0, SMALL)
