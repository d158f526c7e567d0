"""The paper's memory block: everything that M2 finds, in equal shares of the layers.

One layer's block is ``M(t, p) / (t * N)`` of each GPU, M the memory of the whole group without its KV cache; a
stage holds its layers' blocks and nothing else (the paper, section 6). So a GPU's activations, buffers and
context and the embedding are taken to follow its layers: the sum over an even split is M2's, a single GPU's is not
where one stage alone holds an embedding or where stages are of unequal depth.
"""

from __future__ import annotations

import math
from dataclasses import replace

from fingerprint.config import DeploymentConfig, Workload, even_split
from fingerprint.estimates import MemoryEstimate
from fingerprint.estimators.m2 import M2

__all__ = ["M2Blocks"]


class M2Blocks(M2):
    """Memory by blocks alone, for comparison: feasibility here is by M2's parts.

    Args:
        profile, max_batched_tokens: as M2's.
    """

    name = "M2-blocks"

    def memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        """Raises: as M2."""
        parts = super().memory(config, workload)
        stages = parts.stages(even_split(parts.num_layers, parts.pp))
        group = sum(stage.total_bytes - stage.kv_bytes for stage in stages)  # of one GPU of each stage: M / t
        return replace(
            parts,
            layer_weight_bytes=math.ceil(group / parts.num_layers),
            first_stage_bytes=0,
            last_stage_bytes=0,
            activation_bytes=0,
            pp_buffer_bytes=0,
            runtime_bytes=0,
        )
