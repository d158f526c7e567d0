"""Time of a tensor-parallel group's all-reduces, which a rank run alone lacks, by the roofline's model.

A rank's shape on one GPU (``fingerprint.shard_config``) does a rank's arithmetic and no communication. A group
adds up the hidden states twice per layer, after attention and after the MLP (Shoeybi et al. 2019): 2 N all-reduces
of a step's tokens in the whole model. Left out: the sum after the embedding and the gathering of logits, one of
each per step (3% of 2 N sums with 32 layers); and that a group samples from the whole vocabulary, a rank alone
from its part.

Not measured, so assumed: that the model of an all-reduce is right within a factor of two, or of 1.3 where the
links were measured, and that a rank that waits for the group takes within 10% of one alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.estimators.roofline import all_reduce_s
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec

__all__ = ["GroupSums"]

_MODEL_FACTOR, _MEASURED_FACTOR = 2.0, 1.3
_ALONE_LOG_ERROR = 0.1


@dataclass(frozen=True, slots=True)
class GroupSums:
    """The all-reduces of a model divided over ``tp`` GPUs of one kind."""

    spec: ModelSpec
    gpu: GpuSpec
    tp: int

    def step_s(self, tokens: float) -> float:
        """Seconds of all the sums of one step of so many tokens."""
        return 2 * self.spec.num_layers * all_reduce_s(self.gpu, self.spec.hidden_size, self.tp, tokens)

    def prompts_s(self, tokens: float, passes: float) -> float:
        """Return the sums' time for prompts of ``tokens`` tokens in all, computed in ``passes`` equal steps."""
        return passes * self.step_s(tokens / passes)

    def log_errors(self, sums_s: float, whole_s: float) -> tuple[float, float]:
        """(below, above): the logarithm of ``whole_s`` may be off by so much, ``sums_s`` of it being modelled."""
        share = min(1.0, sums_s / whole_s)
        factor = _MODEL_FACTOR if self.gpu.measured_links(self.tp) is None else _MEASURED_FACTOR
        below = -math.log(1 - share * (1 - 1 / factor))
        above = math.log(1 + share * (factor - 1))
        return math.hypot(below, _ALONE_LOG_ERROR), math.hypot(above, _ALONE_LOG_ERROR)
