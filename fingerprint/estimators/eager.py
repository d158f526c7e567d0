"""The host's time of an engine that launches every kernel of a step from Python, and captures no graph.

On a GPU such a step is bound by its launches: the device waits for the host. The figures are estimates, not a fit:
from one model on one machine (the embedded engine on two H200, 16 layers of Llama-2-7B's width, batches 1 and 4,
16bit and int8, tp 1 and 2: docs/performance.md), with all outside the layers put on them. A layer is some forty
kernels; 0.52 ms are 13 us for each, launch and Python together. gpt-fast takes 39 ms a token of Llama-7B on an
A100, 1.2 ms a layer, before it captures graphs (https://pytorch.org/blog/accelerating-generative-ai-2/). Hosts
differ by a factor of two either way, and so does the interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fingerprint.config import DeploymentConfig, WeightFormat

__all__ = ["EAGER", "EagerConstants"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerConstants:
    """Host seconds of a step, and how far off they may be."""

    layer_s: float = 5.2e-4
    sequence_s: float = 1.1e-4  # of each layer: attention goes over the sequences one after the other
    dequantizing_s: float = 1.8e-4  # of each layer of quantized weights: two more kernels for each of its matrices
    all_reduce_s: float = 1.9e-4  # of two in a layer
    log_error: float = math.log(2)  # on both sides

    def host_s(self, config: DeploymentConfig, num_layers: int, sequences: float) -> float:
        """Return the host's time for one step of ``sequences`` sequences."""
        layer_s = self.layer_s + self.sequence_s * sequences
        if config.weights is not WeightFormat.BITS16:
            layer_s += self.dequantizing_s
        if config.tp > 1:
            layer_s += 2 * self.all_reduce_s
        return num_layers * layer_s


EAGER = EagerConstants()
