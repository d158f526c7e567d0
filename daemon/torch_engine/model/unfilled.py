"""Building a model on the meta device without what its constructors compute there, which nothing reads.

Weights are read from the checkpoint afterwards, and buffers made anew. On the meta device PyTorch's reference
operators in Python draw and compute them, and load sympy first: 0.4 s of a core, most of what a small model takes
to build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["build_unfilled"]

_INITIALIZERS = frozenset({"torch.nn.init", "transformers.initialization"})
_SEQUENCES = frozenset({torch.arange, torch.linspace, torch.tensor})  # what buffers are computed from


def build_unfilled(make: Callable[[], nn.Module]) -> nn.Module:
    """Return the model that ``make`` builds, with all its parameters and buffers on the meta device."""
    with torch.device("meta"), _Unfilled():
        model = make()
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to("meta"))
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:  # its first values were computed as those of buffers are
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad))
    return model


class _Unfilled(TorchFunctionMode):
    """Mode in which no weights are drawn, and buffers are computed on the CPU; inside ``torch.device("meta")``."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        _types: Any,
        arguments: tuple[Any, ...] = (),
        options: dict[str, Any] | None = None,
    ) -> Any:
        given = options or {}
        if getattr(function, "__module__", None) in _INITIALIZERS:
            return given["tensor"] if "tensor" in given else arguments[0]
        if function in _SEQUENCES and given.get("device") is None:
            given = given | {"device": "cpu"}
        return function(*arguments, **given)
