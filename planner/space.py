"""Space of configurations to choose from, and those that the model's own shape rules out.

Does not know what an engine can run (that is ``EngineCapabilities``) nor what fits. What is in the space and what
is left out of it is decided in docs/decisions/0003-configuration-space.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, SlotFormat, WeightFormat
from fingerprint.engines import traits_of
from fingerprint.errors import ConfigError
from fingerprint.gpu_spec import GpuSpec
from fingerprint.lora.slot_bytes import reserved_bytes
from fingerprint.model_spec import LayerShape, ModelSpec
from fingerprint.weight_bytes import WEIGHT_16BIT_BYTES
from planner.adapter_slots import SlotNeed

__all__ = [
    "DRAFT_TOKENS",
    "MAX_PP",
    "TP_DEGREES",
    "EngineOf",
    "configuration_space",
    "formats",
    "shape_refusal",
    "slots_in_bounds",
]

TP_DEGREES = (1, 2, 4, 8)
MAX_PP = 8
DRAFT_TOKENS = (2, 4, 8)  # of each sequence and step, where drafts are part of the choice
_SLOTS_PART = 0.1  # of a GPU's memory, for adapter slots at most
_DELTAS_PART = (
    0.5  # of what the weights leave of it, for slots with a format for deltas: one has a part of a model
)

EngineOf = Callable[[DeploymentConfig], str]

_WEIGHTS = (WeightFormat.BITS16, WeightFormat.INT8, WeightFormat.INT4, WeightFormat.GPTQ4)
_KV = (KvFormat.BITS16, KvFormat.INT8)
_PRUNING = (Pruning.SPARSEGPT, Pruning.WANDA, Pruning.WANDA_2_4, Pruning.WANDA_4_8)


def formats(spec: ModelSpec, gpu: GpuSpec) -> tuple[tuple[WeightFormat, KvFormat, Pruning], ...]:
    """Return every (weights, KV, pruning) of the space: quantized but not pruned, or pruned but at 16 bits.

    An already quantized checkpoint stays as it is: its KV cache alone may be of several formats.
    fp8 is there where the GPU multiplies it; ``llm-pruner-25`` where every query head has its own KV head.
    """
    fp8 = gpu.has_fp8 and not gpu.is_cpu
    if spec.stored is not None:
        return tuple((WeightFormat.STORED, k, Pruning.NONE) for k in ((*_KV, KvFormat.FP8) if fp8 else _KV))
    weights = (*_WEIGHTS, WeightFormat.FP8) if fp8 else _WEIGHTS
    kv = (*_KV, KvFormat.FP8) if fp8 else _KV
    pruning = (*_PRUNING, Pruning.LLM_PRUNER_25) if spec.num_kv_heads == spec.num_heads else _PRUNING
    quantized = [(w, k, Pruning.NONE) for w, k in product(weights, kv)]
    return (*quantized, *((WeightFormat.BITS16, KvFormat.BITS16, p) for p in pruning))


def configuration_space(
    spec: ModelSpec,
    gpu: GpuSpec,
    num_gpus: int,
    engine_of: EngineOf,
    *,
    drafts: Sequence[int] = (),
    slots: SlotNeed | None = None,
    expert_parallel: Callable[[DeploymentConfig], bool] = lambda _: False,
) -> tuple[DeploymentConfig, ...]:
    """Return every configuration of ``spec`` on ``num_gpus`` GPUs like ``gpu``, whether or not it can run.

    Args:
        engine_of: names the engine for a configuration, whose own ``engine`` is then still empty.
        drafts: numbers of n-gram draft tokens to have as well as none, on an engine that takes them. Pipelines and
            models that keep states were not looked into.
        slots: adapter slots that every configuration has, or, unless so many were asked for, as many as take a
            tenth of a GPU, those for deltas half of what the weights leave; None: none.
        expert_parallel: whether to have one with expert parallelism too, which is given.

    Returns:
        Distinct configurations in their own order: 180 for Llama-2-70B on 8 A6000, as in the paper (figure 1).

    Raises:
        ConfigError: fewer than one GPU.
    """
    if num_gpus < 1:
        raise ConfigError(f"a plan needs at least 1 GPU, got {num_gpus}")
    degrees = [(tp, pp) for tp in TP_DEGREES for pp in range(1, MAX_PP + 1) if tp * pp <= num_gpus]
    bare = (
        DeploymentConfig(
            tp=tp,
            pp=pp,
            weights=weights,
            kv=kv,
            pruning=pruning,
            engine="",
            adapter_slots=0 if slots is None else slots.slots,
            adapter_rank=0 if slots is None else slots.rank,
            delta_mib=0 if slots is None else slots.delta_mib,
            delta_format=SlotFormat.NONE if slots is None else slots.delta_format,
        )
        for (tp, pp), (weights, kv, pruning) in product(degrees, formats(spec, gpu))
    )
    plain = [replace(config, engine=engine_of(config)) for config in bare]
    if slots is not None and not slots.is_fixed:
        plain = [slots_in_bounds(spec, gpu, config) for config in plain]
    drafting = (one for one in plain if one.pp == 1 and traits_of(one.engine).drafts_ngrams)
    drafted = (replace(one, draft_tokens=tokens) for one in drafting for tokens in drafts if not spec.keeps_state)
    divided = (replace(one, expert_parallel=True) for one in plain if spec.is_mixture and one.tp > 1)
    return tuple(sorted((*plain, *drafted, *filter(expert_parallel, divided))))


def slots_in_bounds(spec: ModelSpec, gpu: GpuSpec, config: DeploymentConfig) -> DeploymentConfig:
    """Return ``config`` with half as many slots, again and again, until they take their part of a GPU at most."""
    layers, most = math.ceil(spec.num_layers / config.pp), _SLOTS_PART * gpu.memory_bytes
    if config.has_delta_slots:
        most = _DELTAS_PART * (gpu.memory_bytes - spec.num_params * WEIGHT_16BIT_BYTES / config.num_gpus)
    while config.adapter_slots > 1 and reserved_bytes(spec, config, layers) > most:
        config = replace(config, adapter_slots=config.adapter_slots // 2)
    return config


def shape_refusal(spec: ModelSpec, config: DeploymentConfig, num_gpus: int) -> str | None:
    """Return why no engine can cut ``spec`` as ``config`` asks, with both numbers; None when it can be cut."""
    tp, pp = config.tp, config.pp
    if config.num_gpus > num_gpus:
        return f"tp={tp},pp={pp} needs {config.num_gpus} GPUs, there are {num_gpus}"
    if pp > spec.num_layers:
        return f"pp={pp} needs at least {pp} layers, the model has {spec.num_layers}"
    if spec.num_heads % tp:
        return f"tp={tp} does not divide the {spec.num_heads} attention heads"
    for heads in sorted({spec.kv_heads_of(kind) for kind in spec.kinds}, reverse=True):
        if max(heads, tp) % min(heads, tp):
            return f"neither of tp={tp} and the {heads} KV heads divides the other"
    if config.expert_parallel and not spec.is_mixture:
        return "experts=parallel is for mixtures of experts, and the model has no experts"
    if config.expert_parallel and spec.num_experts % tp:
        return f"tp={tp} does not divide the {spec.num_experts} experts, and experts=parallel leaves none divided"
    if spec.intermediate_size % tp:
        return f"tp={tp} does not divide the intermediate size {spec.intermediate_size}"
    return next(filter(None, (_state_refusal(shape, tp) for shape in spec.layer_shapes)), None)


def _state_refusal(shape: LayerShape, tp: int) -> str | None:
    """Return why ``tp`` ranks cannot share a layer's state, as vLLM 0.33's classes assert it.

    They are ``MambaMixer2``, which takes a single group whole on every rank, and ``MambaStateShapeCalculator``.
    """
    if shape.state_heads % tp:
        return f"tp={tp} does not divide the {shape.state_heads} heads of the state of {shape.mixer} layers"
    if shape.state_groups > 1 and shape.state_groups % tp:
        return f"tp={tp} does not divide the {shape.state_groups} groups of the state of {shape.mixer} layers"
    return None
