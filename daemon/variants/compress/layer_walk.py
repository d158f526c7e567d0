"""Layer of the fine-tune in float32, through which the calibration tokens run.

Linears that are called with the same tensor (q, k and v; gate and up) are one group. Groups are compressed in the
order in which they are called, each with inputs that the ones before it, already reconstructed, have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from daemon.torch_engine.model.stage_model import ModelSource
from daemon.variants.compress.calibration import PromptOnlyCache, TokenBatches
from daemon.variants.compress.model_parts import layer_stage
from daemon.variants.compress.solver import add_second_moment, mirror

__all__ = ["LayerWalk"]

Hidden = list[torch.Tensor]  # [1, T, hidden] of each batch


class _InputSeenError(Exception):
    """Ends a pass whose remaining part nothing is asked of."""


class LayerWalk:
    """A layer with the weights of the fine-tune; those of its linears are replaced one by one."""

    def __init__(self, source: ModelSource, layer: int, tokens: TokenBatches, device: torch.device) -> None:
        self._stage, self._tokens = layer_stage(source, layer), tokens
        self._stage.load(device)
        self._is_first, self.is_last = self._stage.shape.is_first, self._stage.shape.is_last
        self._head = nn.Identity()  # in place of the output layer: logits are not needed, nor is their memory
        if self.is_last:
            parent, _, leaf = source.layout.head.rpartition(".")
            setattr(self._stage.model.get_submodule(parent), leaf, self._head)

    def embed(self, module: str, weight: torch.Tensor) -> None:
        """Replace embeddings, of the first layer's stage. A head that shares them is not used here."""
        if module != self._stage.source.layout.head:
            self._set(self._stage.model.get_submodule(module), weight)

    def replace(self, linear: str, weight: torch.Tensor) -> None:
        """Replace the weight [outputs, inputs] of a linear."""
        self._set(self._stage.linears[linear], weight)

    def groups(self, hidden: Hidden | None) -> list[tuple[str, ...]]:
        """Return the names of the linears in the order in which they are called, those of one input together."""
        inputs: list[torch.Tensor] = []  # all are held: no two are at one address
        members: list[list[str]] = []

        def see(name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            place = next((number for number, seen in enumerate(inputs) if seen is args[0]), None)
            if place is None:
                inputs.append(args[0])
                members.append([name])
            elif name not in members[place]:
                members[place].append(name)

        handles = [
            module.register_forward_pre_hook(partial(see, name)) for name, module in self._stage.linears.items()
        ]
        self._forward(0, hidden)
        _remove(handles)
        return [tuple(names) for names in members]

    def hessian(self, linear: str, hidden: Hidden | None) -> torch.Tensor:
        """Return the mean of x x^T over the inputs of a linear, [inputs, inputs]; the pass ends there."""
        return self._second_moment(self._stage.linears[linear], hidden)

    def head_hessian(self, hidden: Hidden | None) -> torch.Tensor:
        """Return the mean of x x^T over the inputs of the output layer, behind the last layer."""
        return self._second_moment(self._head, hidden)

    def forward(self, hidden: Hidden | None) -> Hidden:
        """Return the layer's outputs, which take the place of ``hidden``. Not of the last layer."""
        outputs = hidden if hidden is not None else [torch.empty(0)] * len(self._tokens.batches)
        for number in range(len(self._tokens.batches)):
            outputs[number] = self._forward(number, hidden)
        return outputs

    @torch.inference_mode()
    def _second_moment(self, module: nn.Module, hidden: Hidden | None) -> torch.Tensor:
        total: torch.Tensor | None = None

        def add(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal total
            inputs = args[0].reshape(-1, args[0].shape[-1])
            if total is None:
                total = inputs.new_zeros(inputs.shape[-1], inputs.shape[-1])
            add_second_moment(total, inputs)
            raise _InputSeenError

        handle = module.register_forward_pre_hook(add)
        for number in range(len(self._tokens.batches)):
            try:
                self._forward(number, hidden)
            except _InputSeenError:
                continue
        _remove([handle])
        assert total is not None
        mirror(total)
        return total.div_(self._tokens.num_tokens)

    def _forward(self, number: int, hidden: Hidden | None) -> torch.Tensor:
        assert self._is_first or hidden is not None
        inputs = None if self._is_first or hidden is None else hidden[number]
        return self._stage.forward(self._tokens.batches[number], inputs, PromptOnlyCache())

    def _set(self, module: nn.Module, weight: torch.Tensor) -> None:
        assert module.weight.shape == weight.shape
        module.weight = nn.Parameter(weight, requires_grad=False)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()
