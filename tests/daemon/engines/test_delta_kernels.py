"""Delta kernels in Triton's interpreter against the reference in torch."""

from __future__ import annotations

import pytest
import torch

from tests.daemon.variant_kernels import kernel_module

delta_linear = kernel_module("delta_linear")
formats = kernel_module("formats")
merge = kernel_module("merge")
reference = kernel_module("reference")
Route = kernel_module("route").Route
choose_tiling = kernel_module("tilings").choose_tiling
Tiling, Workspace, add_delta = delta_linear.Tiling, delta_linear.Workspace, delta_linear.add_delta

pytestmark = pytest.mark.slow
SLOTS = 4
MIXES = {
    "any": [1, -1, 3, 3, 0, 1, -1, 3, 0, 0, 3, 3, 3, 3, 3, 3, 3, 3],
    "no delta": [-1] * 5,
    "one row": [2],
    "one delta": [3] * 19,
    "beyond the slots": [7, 0, 4, -9],
}
SMALL = Tiling(outputs=64, rows=16, programs_per_sm=2, min_groups=1)
ROUNDED = 2**-7  # of a value: the interpreter cuts bfloat16 off where a GPU rounds


def _delta(name: str, shape: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    format_ = formats.FORMATS[name]
    codes = torch.randint(-(2**15), 2**15, (SLOTS, *format_.codes_shape(*shape)), dtype=torch.int16)
    scales = torch.rand(SLOTS, *format_.scales_shape(*shape)) * 0.01 + 0.001
    return codes, scales.bfloat16()


def _routed(mix: list[int], tiling: Tiling) -> Route:
    route = Route.empty(max_rows=64, slots=SLOTS, segment_rows=tiling.rows, device="cpu")
    route.fill(torch.tensor(mix))
    return route


def _check(name: str, shape: tuple[int, int], mix: list[int], tiling: Tiling, workspace: Workspace) -> None:
    torch.manual_seed(0)
    format_, (n, k) = formats.FORMATS[name], shape
    codes, scales = _delta(name, shape)
    x, base = torch.randn(len(mix), k).bfloat16(), torch.randn(len(mix), n).bfloat16()
    y = base.clone()
    add_delta(y, x, codes, scales, _routed(mix, tiling), format_, tiling, workspace)
    slot_of_row = torch.tensor(mix)
    want = base.float() + reference.delta_product(x, codes, scales, slot_of_row, format_)[:, :n]
    torch.testing.assert_close(y.float(), want, rtol=ROUNDED, atol=1e-3)
    untouched = (slot_of_row < 0) | (slot_of_row >= SLOTS)
    assert torch.equal(y[untouched], base[untouched])
    assert not workspace.arrived(1).any()


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
def test_every_format_adds_its_products(name: str) -> None:
    _check(name, (128, 256), MIXES["any"], SMALL, Workspace("cpu"))


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_every_mix_in_one_workspace(mix: str) -> None:
    workspace = Workspace("cpu")
    for _ in range(2):
        _check("int2", (128, 384), MIXES[mix], SMALL, workspace)


@pytest.mark.parametrize("name", ["int2", "int3"])
@pytest.mark.parametrize("shape", [(192, 200), (100, 384), (1, 1)])
def test_padding_is_left_out(name: str, shape: tuple[int, int]) -> None:
    _check(
        name, shape, MIXES["any"], Tiling(outputs=128, rows=16, programs_per_sm=1, min_groups=1), Workspace("cpu")
    )


@pytest.mark.parametrize(
    "tiling",
    [
        Tiling(outputs=64, small_rows=16, rows=16, programs_per_sm=9, min_groups=1, step=1),
        Tiling(outputs=128, rows=32, programs_per_sm=1, min_groups=100, step=1),
        Tiling(outputs=64, rows=8, programs_per_sm=3, min_groups=2, step=4),
        Tiling(outputs=64, rows=16, programs_per_sm=5, min_groups=1, step=2),
        Tiling(outputs=128, rows=8, programs_per_sm=2, min_groups=3, step=2),
    ],
    ids=str,
)
def test_tiles_cut_anywhere(tiling: Tiling) -> None:
    """Programs of less than a group's share, of one whole tile, and of parts of several."""
    _check("int2", (128, 1024), MIXES["any"], tiling, Workspace("cpu"))


@pytest.mark.parametrize(("rows", "active"), [(4, 3), (18, 1), (18, 4), (40, 3), (2, 2)])
def test_chosen_tilings_serve_their_mix(rows: int, active: int) -> None:
    mix = [row % active for row in range(rows)]
    _check("int2", (128, 512), mix, choose_tiling(rows), Workspace("cpu"))


def test_rows_may_be_a_part_of_wider_rows() -> None:
    torch.manual_seed(0)
    format_, shape = formats.FORMATS["int2"], (64, 128)
    codes, scales = _delta("int2", shape)
    wide_x, wide_y = torch.randn(3, 256).bfloat16(), torch.zeros(3, 192).bfloat16()
    route = _routed([0, 2, 0], SMALL)
    add_delta(wide_y[:, 64:128], wide_x[:, 128:], codes, scales, route, format_, SMALL, Workspace("cpu"))
    want = reference.delta_product(wide_x[:, 128:], codes, scales, torch.tensor([0, 2, 0]), format_)
    torch.testing.assert_close(wide_y[:, 64:128].float(), want, rtol=ROUNDED, atol=1e-3)
    assert not wide_y[:, :64].any()
    assert not wide_y[:, 128:].any()


def test_products_may_be_stored_and_added_later() -> None:
    torch.manual_seed(0)
    format_, shape, mix = formats.FORMATS["int2"], (192, 256), [1, -1, 3, 0, 0, 3]
    codes, scales = _delta("int2", shape)
    x, base = torch.randn(len(mix), 256).bfloat16(), torch.randn(len(mix), 192).bfloat16()
    route, change = _routed(mix, SMALL), torch.full((len(mix), 192), float("nan"))
    add_delta(change, x, codes, scales, route, format_, SMALL, Workspace("cpu"), adds=False)
    y = base.clone()
    delta_linear.add_routed(y, change, route)
    want = reference.delta_product(x, codes, scales, torch.tensor(mix), format_)
    torch.testing.assert_close(y.float(), base.float() + want, rtol=ROUNDED, atol=1e-3)
    assert torch.equal(y[1], base[1])
    assert change[1].isnan().all()


def test_what_does_not_belong_together_is_refused() -> None:
    codes, scales = _delta("int2", (64, 128))
    x, y = torch.zeros(2, 128).bfloat16(), torch.zeros(2, 64).bfloat16()
    route, int2 = _routed([0, 1], SMALL), formats.FORMATS["int2"]
    for wrong in (
        lambda: add_delta(y, x, codes, scales, route, formats.FORMATS["int4"], SMALL, Workspace("cpu")),
        lambda: add_delta(y, x, codes, scales[:, :, :32], route, int2, SMALL, Workspace("cpu")),
        lambda: add_delta(y, x.float(), codes, scales, route, int2, SMALL, Workspace("cpu"), adds=False),
        lambda: add_delta(y.float(), x, codes, scales, route, int2, SMALL, Workspace("cpu")),
        lambda: add_delta(y, x, codes, scales, route, int2, Tiling(rows=32), Workspace("cpu")),
        lambda: add_delta(y, x.t().contiguous().t(), codes, scales, route, int2, SMALL, Workspace("cpu")),
    ):
        with pytest.raises(ValueError, match=r"codes|scales|bfloat16|segments|contiguous"):
            wrong()


@pytest.mark.parametrize("name", sorted(formats.FORMATS))
@pytest.mark.parametrize("shape", [(64, 512), (100, 200)])
def test_merged_weights_are_base_and_delta(name: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    format_, (n, k) = formats.FORMATS[name], shape
    codes, scales = _delta(name, shape)
    weight = torch.randn(n, k).bfloat16()
    out = torch.full_like(weight, float("nan"))
    merge.merge_delta(weight, out, codes[1], scales[1], format_)
    want = weight.float() + reference.dequantize(codes[1], scales[1], format_)[:n, :k]
    torch.testing.assert_close(out.float(), want, rtol=ROUNDED, atol=1e-5)
