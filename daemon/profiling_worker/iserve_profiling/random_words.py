"""Random bits in the packed words of dummy weights, which vLLM leaves as the memory was.

``--load-format dummy`` draws floating-point weights and scales, bytes and packed 4-bit floats, but no int32
parameter (``initialize_single_dummy_weight`` of 0.33): the words of GPTQ, AWQ and packed compressed-tensors are
what a fresh allocation holds, mostly zeros. Every word is legal and no kernel branches on one, but a GPU at its
power limit multiplies constants at a higher clock than random bits, so that such a model would look faster than
any real one. Runs in the engine's own processes, after the weights were made and before kernels re-pack them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

__all__ = ["fill_words", "install"]

# Ends of parameters' names: a linear's own, or ``w13_`` and ``w2_`` before it for joined experts. Indexes
# (``g_idx``) and shapes are integers too, of which not every value is legal.
WORDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")
_SEED = 1234
_MARK = "_iserve_fills_words"


def fill_words(model: Any) -> int:
    """Fill every packed word of ``model`` with random bits; return how many there are."""
    filled = 0
    for number, (name, words) in enumerate(model.named_parameters()):
        if words.dtype is not torch.int32 or words.is_meta or not name.endswith(WORDS):
            continue
        random = torch.Generator(device=words.device)
        random.manual_seed(_SEED + number)
        words.data.random_(-(2**31), 2**31, generator=random)
        filled += words.numel()
    return filled


def install() -> bool:
    """Have vLLM's dummy loader fill words; False where this release has no such loader. Safe to call again."""
    try:
        from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
    except (ImportError, AttributeError, NameError):  # a release that is not known may break while it is imported
        return False
    load_weights = DummyModelLoader.load_weights
    if hasattr(load_weights, _MARK):
        return True

    @functools.wraps(load_weights)
    def load_weights_then_fill(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        result = load_weights(self, model, *args, **kwargs)
        fill_words(model)
        return result

    setattr(load_weights_then_fill, _MARK, True)
    DummyModelLoader.load_weights = load_weights_then_fill
    return True
