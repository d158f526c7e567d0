"""A layer that the calibration tokens run through once: each linear is visited before it computes.

What a visit replaces is what computes: each linear's inputs are those that the ones before it, already
reconstructed, have made. Linears called with one tensor (q, k and v; gate and up) share their inputs. All tokens
run at once, so that no pass is repeated: memory holds the widest linear's inputs for all of them, three times.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from daemon.torch_engine.model.stage_model import ModelSource
from daemon.variants.compress.calibration import CalibrationTokens, PromptOnlyCache
from daemon.variants.compress.model_parts import layer_stage

__all__ = ["LayerWalk", "Visit"]

Visit = Callable[[str, torch.Tensor], bool]  # a linear's name and its inputs; whether the pass is to go on


class _EnoughError(Exception):
    """Ends a pass whose remaining part nothing is asked of."""


class LayerWalk:
    """A layer with the weights of the fine-tune; those of its linears are replaced one by one."""

    def __init__(self, source: ModelSource, layer: int, tokens: CalibrationTokens, device: torch.device) -> None:
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

    @torch.inference_mode()
    def run(self, hidden: torch.Tensor | None, visit: Visit) -> torch.Tensor | None:
        """Return the layer's outputs [1, T, hidden] for those of the layer before it; of the last layer what the
        output layer gets, behind the final norm. None where a visit ended the pass.
        """
        assert self._is_first or hidden is not None
        seen: set[str] = set()
        outputs: torch.Tensor | None = None

        def see(name: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if name not in seen and not visit(name, args[0]):
                raise _EnoughError
            seen.add(name)

        def end(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            nonlocal outputs
            outputs = args[0]
            raise _EnoughError

        linears = self._stage.linears.items()
        handles = [module.register_forward_pre_hook(partial(see, name)) for name, module in linears]
        handles.append(self._head.register_forward_pre_hook(end))
        try:
            outputs = self._stage.forward(
                self._tokens.batch, None if self._is_first else hidden, PromptOnlyCache()
            )
        except _EnoughError:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return outputs

    def _set(self, module: nn.Module, weight: torch.Tensor) -> None:
        assert module.weight.shape == weight.shape
        module.weight = nn.Parameter(weight, requires_grad=False)
