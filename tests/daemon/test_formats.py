"""Weight formats: how far a stored weight may be from its original, and what it costs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear

from daemon.torch_engine.model.formats import FORMATS
from daemon.torch_engine.model.formats.int8 import Int8Format, Int8Linear, quantize_int8
from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.torch_engine.runner_types import StepItem, StepPlan
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.errors import EngineError
from tests.golden_words import Golden

BFLOAT16_EPS = 2**-8  # half a unit in the last place of an 8-bit mantissa, relative


def int8_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
    with torch.device("meta"):
        original = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    module = Int8Format().replace(original)
    Int8Format().store(module, weight)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    return module


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 33),
    seed=st.integers(0, 2**32),
    exponent=st.integers(-20, 20),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_int8_weights_are_off_by_at_most_half_a_step(rows, columns, seed, exponent, dtype) -> None:
    """Half a step of the row's own scale; the bfloat16 scale may be too small by one part in 2**8, which the
    largest weight of the row then loses by clamping."""
    weight = random(rows, columns, seed=seed, dtype=dtype) * 2.0**exponent
    quantized, scale = quantize_int8(weight)
    assert quantized.dtype is torch.int8
    assert scale.dtype is dtype
    off = (quantized.float() * scale.float()[:, None] - weight.float()).abs()
    bound = scale.float() / 2 + weight.float().abs().amax(dim=1) * (BFLOAT16_EPS if dtype is torch.bfloat16 else 0)
    assert (off <= bound[:, None] * (1 + 1e-6)).all()


def test_int8_keeps_what_is_on_its_grid() -> None:
    weight = torch.tensor([[-127.0, 0.0, 1.0, 127.0], [63.5, -0.5, 0.0, 12.5], [0.0, 0.0, 0.0, 0.0]])
    quantized, scale = quantize_int8(weight)
    assert quantized.tolist() == [[-127, 0, 1, 127], [127, -1, 0, 25], [0, 0, 0, 0]]
    assert scale.tolist() == [1.0, 0.5, 1.0]


@pytest.mark.parametrize("tokens", [1, 12, 13, 40])
@pytest.mark.parametrize("columns", [16, 40, 100, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_linear_multiplies_by_the_weight_it_stores(tokens: int, columns: int, dtype: torch.dtype) -> None:
    """On both sides of every switch between kernels: few and many tokens, widths the packed kernel takes or not.
    bfloat16 may round every one of the products' partial sums: eps times the sum of magnitudes is generous."""
    module = int8_linear(random(37, columns, seed=1, dtype=dtype), random(37, seed=2, dtype=dtype))
    x = random(1, tokens, columns, seed=3, dtype=dtype)
    stored = module.quantized.float() * module.scale.float()[:, None]
    expected = linear(x.float(), stored, module.bias.float())
    magnitude = linear(x.float().abs(), stored.abs(), module.bias.float().abs())
    eps = BFLOAT16_EPS if dtype is torch.bfloat16 else 1e-6
    assert module(x).dtype is dtype
    assert ((module(x).float() - expected).abs() <= 4 * eps * magnitude).all()


def test_a_bare_meta_module_has_the_bytes_of_the_filled_one() -> None:
    with torch.device("meta"):
        module = Int8Format().replace(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    before = {name: (buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()}
    Int8Format().store(module, random(32, 64, dtype=torch.bfloat16))
    assert {name: (buffer.shape, buffer.dtype) for name, buffer in module.named_buffers()} == before


@pytest.fixture
def loaded(tiny_checkpoint, tiny_stages, tiny_limits):
    made = []

    def make(family: str, num_layers: int, weights: WeightFormat, dtype: torch.dtype | None = torch.float32):
        made.append(LocalRunner(dtype=dtype))
        config = DeploymentConfig(weights=weights)
        made[-1].load(tiny_checkpoint(family), config, tiny_stages(num_layers), tiny_limits)
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize(("family", "num_layers"), [("llama", 4), ("qwen3", 3), ("mistral", 3)])
def test_a_model_in_int8_is_close_to_the_original(family: str, num_layers: int, loaded) -> None:
    """A weight row of normal spread s has its largest near 2.5 s over 32 columns, so a step is s / 50 and an even
    error within it has spread s / 175: 0.6% of each linear's output. Seven linears in each of four layers add up
    as squares to 3%; attention and the norms may enlarge that a few times, and it is not nothing."""
    plan = StepPlan((StepItem(0, 0, (3, 80, 0, 41, 17, 5, 66, 9, 90, 12)),))
    exact = loaded(family, num_layers, WeightFormat.BITS16).step(plan).logits
    close = loaded(family, num_layers, WeightFormat.INT8).step(plan).logits
    error = ((close - exact).norm() / exact.norm()).item()
    assert 1e-4 < error < 0.1


def test_int8_bytes_are_those_counted_by_hand(loaded) -> None:
    """Llama of the fixture: a byte per linear weight and 2 per output (q, o, down 32; k, v 16; gate, up 64);
    2 bytes for all else: embedding and head 96 x 32, biases, norms; two float32 copies of 4 frequencies."""
    linears = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    scales = 3 * 32 + 2 * 16 + 2 * 64
    biases = 96 + 160
    [memory] = loaded("llama", 4, WeightFormat.INT8, None).memory()
    assert memory.weights_bytes == 4 * (linears + 2 * scales + 2 * biases + 2 * 64) + 2 * (2 * 96 * 32 + 32) + 32


def test_experts_are_refused_with_a_reason(loaded, golden: Golden) -> None:
    with golden.raises("daemon", EngineError):
        loaded("mixtral", 2, WeightFormat.INT8)


def test_every_format_goes_by_its_own_name() -> None:
    assert all(implementation.name is name for name, implementation in FORMATS.items())
