"""Splits one stage's modules over a tensor-parallel group, by transformers' own plan for the family.

Decides which part of each parameter a rank reads and where the group must add up or gather. The plan names a
style per module: ``colwise`` (each rank computes some outputs), ``rowwise`` (each rank some inputs; the group
adds up), ``embedding_rowwise`` (each rank some tokens of the vocabulary; the group adds up), ``packed_colwise``
and ``moe_tp_experts`` (colwise and the sum for joined expert tensors). Any other style is refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding

from daemon.torch_engine.model.weights import Shard
from fingerprint.errors import EngineError

__all__ = ["TensorParallel"]

_REPLICATED = {"replicated_with_grad_allreduce"}  # norms over one head: every rank needs all of it
_OUT_DIM = {"colwise": 0, "colwise_gather_output": 0, "embedding_rowwise": 0, "packed_colwise": 1}
_BY_VOCABULARY = {"colwise_gather_output", "embedding_rowwise"}
_IN_DIM = {"rowwise": -1}
_SUM_AFTER = {"rowwise", "moe_tp_experts"}


@dataclass(frozen=True)
class TensorParallel:
    """Place of one rank in its group, and the plan of splitting modules.

    ``group`` is None while only sizes are counted, or when ``tp`` is 1.
    """

    tp: int
    index: int
    plan: dict[str, str]  # module name with '*' for a layer index -> style
    group: dist.ProcessGroup | None = None

    def style(self, name: str) -> str | None:
        """Return the style of a module or of a parameter that the plan lists by its own name."""
        return self.plan.get(re.sub(r"\.\d+(?=\.)", ".*", name))

    def check(self, model: nn.Module) -> None:
        """Refuse a plan that this module does not carry out.

        Raises:
            EngineError: an unknown style, or no plan at all.
        """
        if self.tp == 1:
            return
        if not self.plan:
            raise EngineError("transformers has no tensor-parallel plan for this family; use tp=1")
        known = _REPLICATED | _OUT_DIM.keys() | _IN_DIM.keys() | _SUM_AFTER
        for name, _ in (*model.named_modules(), *model.named_parameters()):
            style = self.style(name)
            if style is not None and style not in known:
                raise EngineError(f"the plan of {name} is {style!r}, which this engine does not split; use tp=1")

    def shard(self, parameter: str, shape: tuple[int, ...]) -> Shard | None:
        """Return which part of a parameter of the full ``shape`` this rank holds; None for all of it.

        Raises:
            EngineError: the dimension does not divide by ``tp``.
        """
        if self.tp == 1:
            return None
        module, _, kind = parameter.rpartition(".")
        style = self.style(parameter) or self.style(module)
        if style in _OUT_DIM:
            dim = 0 if kind == "bias" else _OUT_DIM[style]
        elif style in _IN_DIM and kind != "bias":
            dim = len(shape) + _IN_DIM[style]
        else:
            return None
        if shape[dim] % self.tp:
            if style in _BY_VOCABULARY:
                return None  # of an odd vocabulary every rank has the embedding and the head whole
            raise EngineError(f"{parameter} has {shape[dim]} rows or columns, not divisible by tp={self.tp}")
        return Shard(dim, self.index, self.tp)

    def adds_up(self, module: str) -> bool:
        """Return whether the group's outputs of this module are parts of one sum."""
        return self.tp > 1 and self.style(module) in _SUM_AFTER

    def connect(self, model: nn.Module) -> None:
        """Add the all-reduces. The bias of a summed linear must be kept by one rank only: see ``keeps_bias``."""
        if self.tp == 1:
            return
        for name, module in list(model.named_modules()):
            if self.adds_up(name):
                module.register_forward_hook(self._all_reduce)
            elif isinstance(module, nn.Embedding) and module.weight.shape[0] < module.num_embeddings:
                module.forward = partial(self._look_up, module)

    @property
    def keeps_bias(self) -> bool:
        """A bias added before the sum must be added once."""
        return self.index == 0

    def _look_up(self, module: nn.Embedding, token_ids: torch.Tensor) -> torch.Tensor:
        """Embed tokens by the rows that this rank has: tokens of other ranks' rows add zeros."""
        rows = module.weight
        local = token_ids - self.index * rows.shape[0]
        mine = (local >= 0) & (local < rows.shape[0])
        found = embedding(torch.where(mine, local, 0), rows).masked_fill_(~mine[..., None], 0)
        dist.all_reduce(found, group=self.group)
        scale = getattr(module, "embed_scale", None)  # Gemma's
        return found if scale is None else found * scale.to(found.dtype)

    def _all_reduce(self, module: nn.Module, args: tuple[object, ...], output: torch.Tensor) -> torch.Tensor:
        total = output.contiguous()
        dist.all_reduce(total, group=self.group)
        return total
