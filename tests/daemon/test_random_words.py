"""Packed words of dummy weights: random in a profiling worker, whatever vLLM left in them, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.daemon.profiling_modules import profiling_module

torch = pytest.importorskip("torch")
LOADER = "vllm.model_executor.model_loader.dummy_loader"


@pytest.fixture
def words() -> ModuleType:
    return profiling_module("random_words")


class Model(torch.nn.Module):  # type: ignore[misc]
    """Parameters as vLLM 0.33 makes them of a GPTQ, a packed compressed-tensors and an expert layer."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "qweight": (torch.int32, (64, 96)),
            "qzeros": (torch.int32, (2, 12)),
            "scales": (torch.float16, (2, 96)),
            "g_idx": (torch.int32, (512,)),
            "weight_packed": (torch.int32, (96, 64)),
            "weight_shape": (torch.int64, (2,)),
            "w13_qweight": (torch.int32, (3, 64, 96)),
            "w2_g_idx": (torch.int32, (3, 512)),
            "weight": (torch.int8, (96, 64)),
        }
        for name, (dtype, shape) in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False))
        on_no_device = torch.zeros((8, 8), dtype=torch.int32, device="meta")
        self.other = torch.nn.Module()
        self.other.qweight = torch.nn.Parameter(on_no_device, requires_grad=False)


def test_words_alone_become_random(words: ModuleType) -> None:
    model = Model()
    assert words.fill_words(model) == 64 * 96 + 2 * 12 + 96 * 64 + 3 * 64 * 96
    changed = {name for name, value in model.named_parameters() if not value.is_meta and value.any()}
    assert changed == {"qweight", "qzeros", "weight_packed", "w13_qweight"}


def test_every_nibble_is_as_frequent(words: ModuleType) -> None:
    model = Model()
    words.fill_words(model)
    for value in (model.qweight, model.weight_packed, model.w13_qweight):
        nibbles = (value.flatten().unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        counts = torch.bincount(nibbles.flatten(), minlength=16).double()
        assert (counts / counts.mean() - 1).abs().max() < 0.1
    assert not torch.equal(model.qweight.flatten(), model.weight_packed.flatten())  # each has its own


def test_a_model_has_the_same_words_each_time(words: ModuleType) -> None:
    """Fingerprints of one shape repeat one another."""
    one, other = Model(), Model()
    words.fill_words(one)
    words.fill_words(other)
    assert torch.equal(one.qweight, other.qweight)


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    class DummyModelLoader:
        def load_weights(self, model: Any, model_config: Any) -> str:
            model.scales.fill_(0.5)
            return f"loaded {model_config}"

    module = ModuleType(LOADER)
    module.DummyModelLoader = DummyModelLoader  # type: ignore[attr-defined]
    parts = LOADER.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, LOADER, module)
    return DummyModelLoader


def test_vllms_loader_fills_them_after_its_own(words: ModuleType, loader: type) -> None:
    assert words.install()
    once = loader.load_weights
    assert words.install()
    assert loader.load_weights is once
    model = Model()
    assert loader().load_weights(model, "config") == "loaded config"
    assert model.scales.eq(0.5).all()
    assert model.qweight.any()


def test_a_release_without_that_loader_is_left_alone(words: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, LOADER, None)
    assert not words.install()
