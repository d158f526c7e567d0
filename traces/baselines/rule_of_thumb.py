"""Rule of thumb: "max TP for latency, min TP that fits for cost".

One order of configurations for the cluster simulator and for decision regret (``tests/bench``). Its caller gives
the formats: the narrowest weights and KV that the GPU multiplies and the request's quality allows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec
from planner.intent import IntentKind
from planner.space import formats

__all__ = ["FAST_KINDS", "rule_of_thumb"]

FAST_KINDS = frozenset({IntentKind.MIN_LATENCY, IntentKind.MAX_THROUGHPUT, IntentKind.LATENCY_SLO})

_WIDTH = {WeightFormat.BITS16: 16, WeightFormat.INT8: 8, WeightFormat.FP8: 8, KvFormat.BITS16: 16}


def rule_of_thumb(
    spec: ModelSpec, gpu: GpuSpec, *, fast: bool, room: float = 0.0, every_gpu: bool = False
) -> Callable[[DeploymentConfig], tuple[Any, ...]]:
    """Return a key to sort configurations by, the rule's favourite first.

    TP before PP; of equal degrees the narrowest weights, then KV.

    Args:
        fast: max TP; else the fewest GPUs.
        room: the share of the GPUs' memory that weights should leave to the KV cache, where more GPUs can.
        every_gpu: when ``fast``, of equal TP the most stages; else the fewest, which cost least time.
    """
    usable = formats(spec, gpu)

    def order(config: DeploymentConfig) -> tuple[Any, ...]:
        foreign = (config.weights, config.kv, config.pruning) not in usable
        bits = _WIDTH.get(config.weights, 4)
        full = spec.num_params * bits / 8 > (1 - room) * config.num_gpus * gpu.memory_bytes
        stages = -config.pp if every_gpu else config.pp
        degrees = (-config.tp, stages) if fast else (room > 0 and full, config.num_gpus, config.pp)
        return (foreign, *degrees, bits, _WIDTH.get(config.kv, 8), config)

    return order
