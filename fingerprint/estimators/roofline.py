"""Memory and latency from a config.json and a datasheet, with nothing measured on the machine.

A step is bound by bytes or by arithmetic, plus communication, launches and the host; the few constants that turn
peak figures into attained ones are in :class:`RooflineConstants`, calibrated on public measurements
(``docs/decisions/0002-roofline-calibration.md``). Of engines it knows one difference: whether every kernel is
launched from Python (:mod:`fingerprint.estimators.eager`). What else an engine does better or worse than the
calibrated ones is inside the interval, and a measurement always takes precedence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fingerprint.cache_blocks import layer_kept_bytes
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat, Workload
from fingerprint.errors import ConfigError, NotMeasuredError
from fingerprint.estimates import Estimate, MemoryEstimate, Quantity, Source
from fingerprint.estimators.adapter_slots import kernel_cost
from fingerprint.estimators.eager import EAGER
from fingerprint.estimators.variant_cost import VariantCost
from fingerprint.gpu_spec import GpuSpec, Vendor
from fingerprint.loaded_bytes import added_layer_bytes
from fingerprint.model_spec import LayerKind, ModelSpec
from fingerprint.weight_bytes import (
    WEIGHT_16BIT_BYTES,
    embedding_bytes,
    expert_element_bytes,
    head_bytes,
    kept_fraction,
    kv_heads_per_gpu,
    kv_read_shares,
    kv_token_bytes_per_gpu,
    layer_state_bytes_per_gpu,
    layer_weight_bytes_per_gpu,
    stage_weight_ratio,
)

__all__ = ["CALIBRATED", "DEFAULT_MAX_BATCHED_TOKENS", "RooflineConstants", "RooflineEstimator", "all_reduce_s"]

DEFAULT_MAX_BATCHED_TOKENS = 8192  # tokens of the largest prefill step; longer prompts are cut into such chunks
_ACTIVATION_BYTES = 2.0  # activations are 16-bit in every format
_LOGIT_BYTES = 4.0  # logits are sampled in fp32
_MIB = 2**20
_MOST_KEPT = 4096  # estimates of one estimator: some spaces of configurations, 1 KiB each


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineConstants:
    """Constants of the roofline: attained shares of the peak figures, fixed times, and errors of the result.

    The latency figures are fitted by ``tests/bench/calibrate_roofline.py``, with the host terms of an engine that
    captures its decode step and overlaps its host with it (TensorRT-LLM of 2024 is in the tables; the engines of
    2025 and 2026 are within a few percent). The memory figures are assumptions, said so below.
    ``*_log_error`` bound ln(measured / predicted) for 90% of held-out measurements.
    """

    memory_efficiency: float = 0.778  # attained share of the memory bandwidth
    compute_efficiency: float = 0.609  # attained share of the dense peak, large prefills
    quantized_efficiency: float = 0.812  # of both, for linear weights that are not 16-bit
    activation_passes: float = 3.02  # times a layer's activations go through memory outside matrix products
    link_efficiency: float = 0.586  # attained share of a link's bandwidth in a large all-reduce
    all_reduce_latency_s: float = 21.8e-6  # of one all-reduce of a few bytes between two GPUs, in a running step
    all_reduce_hop_s: float = 2.55e-6  # for every GPU beyond two
    handover_latency_s: float = 9e-6  # from one pipeline stage to the next
    launch_per_layer_s: float = 21.7e-6  # gaps between the kernels of a layer
    host_per_step_s: float = 6.04e-4  # scheduling, sampling and detokenizing that the GPU waits for, once a step
    host_per_sequence_s: float = 2.68e-5  # of that, for every sequence of the batch
    ttft_log_error: tuple[float, float] = (-0.34, 0.76)
    tpot_log_error: tuple[float, float] = (-0.20, 0.48)
    # Upper end of TTFT only: what an HTTP client of a server at low load sees on top (tokenizing, queue, stream).
    client_overhead_s: float = 0.0553
    # Added to the interval outside of what was fitted; see the decision record for what they rest on.
    quantized_log_error: float = 0.1  # weights or KV not 16-bit, on both sides
    emulated_fp8_log_error: float = 1.4  # fp8 on a GPU without it, slower side only
    pipeline_log_error: float = 0.2  # pp > 1, on both sides
    cpu_log_error: float = math.log(3)  # a CPU, on both sides: assumption
    amd_log_error: float = math.log(2)  # an AMD GPU, on both sides: checked on one public table, not fitted
    power_low_fraction: float = 0.21  # of TDP: lower end of the average draw of whole runs
    # Not calibrated: no public table itemises memory. A CUDA context is 0.3 to 0.6 GiB on these parts, captured
    # graphs and library workspaces take about as much again; the second GPU adds NCCL buffers.
    context_bytes: int = 1024 * _MIB
    collective_bytes: int = 768 * _MIB
    # The same on a CPU: 371 MiB resident after importing torch 2.13 and a transformers 5.23 model (measured).
    host_process_bytes: int = 384 * _MIB
    # Half-widths of the 90% interval of each part, assumptions too.
    weights_relative_error: float = 0.005
    kv_relative_error: float = 0.03
    activation_relative_error: float = 0.6
    runtime_relative_error: float = 0.5


CALIBRATED = RooflineConstants()


def all_reduce_s(
    gpu: GpuSpec, hidden_size: int, tp: int, tokens: float, constants: RooflineConstants = CALIBRATED
) -> float:
    """Seconds of one all-reduce of ``tokens`` hidden states of 16 bits over ``tp`` GPUs.

    A ring moves 2 (tp - 1) / tp of the message over each link, the slowest of which decides; in a mesh each GPU
    exchanges 2 / tp of it with every other, over a link of their own, which takes as long as a ring over one link
    of the sum. Where the links of ``tp`` GPUs were measured, the measured times count, and the smallest message
    takes no less than the constants say of a running step (docs/decisions/0037).
    """
    if tp == 1:
        return 0.0
    size_bytes = tokens * hidden_size * _ACTIVATION_BYTES
    latency_s = constants.all_reduce_latency_s + (tp - 2) * constants.all_reduce_hop_s
    if (measured := gpu.measured_links(tp)) is not None:
        return measured.all_reduce_of_s(size_bytes, latency_s)
    link = gpu.collective_bytes_per_s(tp) * constants.link_efficiency
    return latency_s + 2 * (tp - 1) / tp * size_bytes / link


class _Shard(NamedTuple):
    """Memory and work of one GPU of a TP group for one layer under one configuration."""

    layer_bytes: float  # stored weights, all experts
    shared_read_bytes: float  # read in every step, at the bandwidth that 16-bit weights attain
    expert_read_bytes: float  # likewise all experts', of which a step reads a part
    token_flops: float  # multiply-adds times two of the linear matrices, per token
    kv_token_bytes: float
    kv_read_shares: tuple[float, ...]  # of these, what each kind of layer looks at
    sequence_state_bytes: float  # kept of a sequence whatever its length
    activation_token_bytes: float  # moved by norms, activation functions, rotations and sums
    flops_per_s: float  # peak of the format, less what quantized kernels lose
    head_read_bytes: float
    head_flops: float  # per row


class RooflineEstimator:
    """Predicts any configuration of one model on one kind of GPU (implements ``fingerprint.estimates.Estimator``).

    The batches of a pipeline run through its stages one after the other (no micro-batches): stage times add up.

    Args:
        spec: the model.
        gpu: the device; the links between devices are the datasheet's where they were not measured.
        constants: attained efficiencies and intervals.
        max_batched_tokens: largest prefill step in tokens; bounds activations, cuts long prompts.
        eager: engines that launch every kernel from Python, on a GPU
            (``fingerprint.capability.EngineCapabilities.eager``).
        adapter_kernels: engines that compute adapters by our kernels (there too).
    """

    name = "roofline"

    def __init__(
        self,
        spec: ModelSpec,
        gpu: GpuSpec,
        *,
        constants: RooflineConstants = CALIBRATED,
        max_batched_tokens: int = DEFAULT_MAX_BATCHED_TOKENS,
        eager: frozenset[str] = frozenset(),
        adapter_kernels: frozenset[str] = frozenset(),
    ) -> None:
        if max_batched_tokens < 1:
            raise ConfigError(f"max_batched_tokens must be at least 1, got {max_batched_tokens}")
        self._spec = spec
        self._gpu = gpu
        self._constants = constants
        self._max_batched_tokens = max_batched_tokens
        self._eager = frozenset() if gpu.is_cpu else eager
        self._adapter_kernels = adapter_kernels
        self._kinds = spec.kinds
        self._query_shares = [kind.query_share for kind in spec.kinds]
        self._shards: dict[DeploymentConfig, _Shard] = {}
        self._estimates: dict[tuple[DeploymentConfig, Workload], Estimate] = {}

    def estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        """Predict ``config`` under ``workload``.

        Raises:
            ConfigError: more stages than layers.
            NotMeasuredError: expert parallelism.
        """
        found = self._estimates.get((config, workload))
        if found is None:
            found = self._estimate(config, workload)
            if len(self._estimates) >= _MOST_KEPT:
                self._estimates.clear()
            self._estimates[config, workload] = found
        return found

    def _estimate(self, config: DeploymentConfig, workload: Workload) -> Estimate:
        if config.expert_parallel:
            raise NotMeasuredError(
                f"{config} was not measured, and datasheets do not say what expert parallelism takes: measure it "
                "by `iserve profile --expert-parallel` and estimate from that (--profile), or leave "
                "experts=parallel out"
            )
        if config.pp > self._spec.num_layers:
            raise ConfigError(
                f"pp={config.pp} needs at least {config.pp} layers, the model has {self._spec.num_layers}"
            )
        first_s = self._quantity(config, self.ttft_s(config, workload), self._constants.ttft_log_error)
        tpot_s = self._quantity(config, self.tpot_s(config, workload), self._constants.tpot_log_error)
        tdp_w = self._gpu.tdp_w
        return Estimate(
            config=config,
            workload=workload,
            memory=self._memory(config, workload),
            ttft_s=replace(first_s, high=first_s.high + self._constants.client_overhead_s),
            tpot_s=tpot_s,
            power_w_per_gpu=None if tdp_w is None else self._power(tdp_w),
            links_measured=self._gpu.measured_links(config.tp) is not None,
        )

    def variant_cost(self, config: DeploymentConfig) -> VariantCost | None:
        """Return what adapters take by our kernels, where these are used (``variant_cost.TellsVariantCost``)."""
        return kernel_cost(self._spec, config) if config.engine in self._adapter_kernels else None

    def ttft_s(self, config: DeploymentConfig, workload: Workload) -> float:
        """Seconds until the whole batch, handed over at once, has its first tokens; no interval."""
        tokens = workload.batch * workload.input_tokens
        steps = math.ceil(tokens / self._max_batched_tokens)
        pairs = self._mean(lambda kind: kind.attended_pairs(workload.input_tokens), self._query_shares)
        return steps * self._step_s(
            config,
            tokens=tokens / steps,
            sequences=workload.batch / steps,
            kv_tokens=tokens / steps,
            attended_pairs=workload.batch * pairs / steps,
        )

    def tpot_s(self, config: DeploymentConfig, workload: Workload) -> float:
        """Seconds of one decode step of the batch at the mean context (input + output / 2); no interval."""
        context = workload.input_tokens + workload.output_tokens / 2
        shares = self._shard(config).kv_read_shares
        read, pairs = (
            workload.batch * self._mean(lambda kind: kind.attended(context), weights)
            for weights in (shares, self._query_shares)
        )
        return self._step_s(
            config, tokens=workload.batch, sequences=workload.batch, kv_tokens=read, attended_pairs=pairs
        )

    def _step_s(
        self,
        config: DeploymentConfig,
        *,
        tokens: float,
        sequences: float,
        kv_tokens: float,
        attended_pairs: float,
    ) -> float:
        """Return the time of one pass through all stages (design, section 5, with the stages serial).

        Args:
            tokens: new tokens of all sequences; sequences: rows of logits wanted.
            kv_tokens: cached tokens read; attended_pairs: (query, key) pairs of the attention; of the mean layer.
        """
        spec, gpu, constants = self._spec, self._gpu, self._constants
        shard = self._shard(config)
        layer_bytes = shard.shared_read_bytes + shard.expert_read_bytes * self._experts_read_fraction(tokens)
        state_bytes = 2 * shard.sequence_state_bytes * sequences  # read and written
        kept_bytes = shard.kv_token_bytes * kv_tokens + state_bytes
        read_bytes = spec.num_layers * (layer_bytes + kept_bytes) + shard.head_read_bytes
        attention_flops = 4 * spec.num_heads * spec.head_dim * attended_pairs / config.tp
        linear_flops = spec.num_layers * shard.token_flops * tokens + shard.head_flops * sequences
        attention_s = spec.num_layers * attention_flops / gpu.flops_16bit_per_s
        memory_bytes_per_s = gpu.memory_bytes_per_s * constants.memory_efficiency
        work_s = max(
            read_bytes / memory_bytes_per_s,
            (linear_flops / shard.flops_per_s + attention_s) / constants.compute_efficiency,
        )
        element_s = spec.num_layers * shard.activation_token_bytes * tokens / memory_bytes_per_s
        host_s = constants.host_per_step_s + constants.host_per_sequence_s * sequences
        layers_s = (
            work_s
            + element_s
            + 2 * spec.num_layers * all_reduce_s(gpu, spec.hidden_size, config.tp, tokens, constants)
            + spec.num_layers * constants.launch_per_layer_s
        )
        if config.engine in self._eager:
            layers_s = max(layers_s, EAGER.host_s(config, spec.num_layers, sequences))
        return layers_s + (config.pp - 1) * self._handover_s(config, tokens) + host_s

    def _handover_s(self, config: DeploymentConfig, tokens: float) -> float:
        """Hidden states and residual to the next stage. The stages are taken to lie side by side."""
        if (measured := self._gpu.measured_links(config.num_gpus)) is not None:
            return measured.send_of_s(self._boundary_bytes(tokens), self._constants.handover_latency_s)
        link = self._gpu.slowest_link_bytes_per_s(config.num_gpus) * self._constants.link_efficiency
        return self._constants.handover_latency_s + self._boundary_bytes(tokens) / link

    def _boundary_bytes(self, tokens: float) -> float:
        return 2 * tokens * self._spec.hidden_size * _ACTIVATION_BYTES

    def _mean(self, of_kind: Callable[[LayerKind], float], weights: Sequence[float]) -> float:
        """Over the layers, each by the weight of its kind."""
        kinds = self._kinds
        if len(kinds) == 1:
            return weights[0] * of_kind(kinds[0])
        each = zip(kinds, weights, strict=True)
        return sum(kind.count * weight * of_kind(kind) for kind, weight in each) / self._spec.num_layers

    def _experts_read_fraction(self, tokens: float) -> float:
        """Expected share of distinct experts that ``tokens`` tokens choose, routed uniformly and independently."""
        spec = self._spec
        if not spec.is_mixture:
            return 1.0
        return 1 - math.pow(1 - spec.experts_per_token / spec.num_experts, max(tokens, 1.0))

    def _peak_flops_per_s(self, config: DeploymentConfig) -> float:
        """Return the peak of the type in which weights and activations are multiplied, where the GPU has it."""
        eight_bits = None
        if self._is_fp8(config):
            eight_bits = self._gpu.flops_fp8_per_s
        elif self._is_stored_as(config, "int"):  # with int8 activations (W8A8)
            eight_bits = self._gpu.flops_8bit_per_s
        return self._gpu.flops_16bit_per_s if eight_bits is None else eight_bits

    def _is_fp8(self, config: DeploymentConfig) -> bool:
        return config.weights is WeightFormat.FP8 or self._is_stored_as(config, "float")

    def _is_stored_as(self, config: DeploymentConfig, number: str) -> bool:
        """Return whether the checkpoint's weights are 8-bit numbers of that type, a scale for a row or more."""
        stored = self._spec.stored
        if config.weights is not WeightFormat.STORED or stored is None:
            return False
        return stored.bits == 8 and stored.form.startswith(number)

    def _shard(self, config: DeploymentConfig) -> _Shard:
        found = self._shards.get(config)
        if found is None:
            found = self._shards[config] = self._make_shard(config)
        return found

    def _make_shard(self, config: DeploymentConfig) -> _Shard:
        spec, gpu, tp = self._spec, self._gpu, config.tp
        fraction = kept_fraction(config.pruning)
        layer_bytes = layer_weight_bytes_per_gpu(spec, config) + added_layer_bytes(spec, config, gpu)
        expert_bytes = spec.layer_expert_params * expert_element_bytes(spec, config.weights) * fraction / tp
        active = spec.layer_linear_params - spec.layer_expert_params
        if spec.is_mixture:
            active += spec.layer_expert_params * spec.experts_per_token // spec.num_experts
        attained = 1.0 if config.weights is WeightFormat.BITS16 else self._constants.quantized_efficiency
        turned_back = 0.0
        if config.engine in self._eager and config.weights is WeightFormat.INT8:
            turned_back = 2 * WEIGHT_16BIT_BYTES * spec.layer_linear_params / tp  # written and read as 16 bits
        head = head_bytes(spec)
        return _Shard(
            layer_bytes=layer_bytes,
            shared_read_bytes=(layer_bytes - expert_bytes) / attained + turned_back,
            expert_read_bytes=expert_bytes / attained,
            token_flops=2 * active * kept_fraction(config.pruning) / tp,
            kv_token_bytes=kv_token_bytes_per_gpu(spec, config),
            kv_read_shares=kv_read_shares(spec, config),
            sequence_state_bytes=layer_state_bytes_per_gpu(spec, replace(config, pp=1), 1),
            activation_token_bytes=self._constants.activation_passes * self._layer_activation_bytes(tp),
            flops_per_s=self._peak_flops_per_s(config) * attained,
            head_read_bytes=head / tp,
            head_flops=2 * head / WEIGHT_16BIT_BYTES / tp,
        )

    def _memory(self, config: DeploymentConfig, workload: Workload) -> MemoryEstimate:
        spec, constants, tp = self._spec, self._constants, config.tp
        shard = self._shard(config)
        step_tokens = min(workload.most_prompt_tokens, self._max_batched_tokens)
        shared_head = spec.tied_embeddings and config.pp == 1
        last_bytes = spec.final_norm_params * WEIGHT_16BIT_BYTES + (0.0 if shared_head else head_bytes(spec) / tp)
        if self._gpu.is_cpu:
            runtime_bytes = constants.host_process_bytes
        else:
            runtime_bytes = constants.context_bytes + (constants.collective_bytes if config.num_gpus > 1 else 0)
        parts = MemoryEstimate(
            tp=tp,
            pp=config.pp,
            num_layers=spec.num_layers,
            layer_weight_bytes=math.ceil(shard.layer_bytes * stage_weight_ratio(spec, config.pp)),
            layer_kv_bytes=math.ceil(layer_kept_bytes(spec, config, workload, step_tokens, shard.kv_token_bytes)),
            first_stage_bytes=math.ceil(embedding_bytes(spec) / tp),
            last_stage_bytes=math.ceil(last_bytes),
            activation_bytes=math.ceil(self._activation_bytes(tp, step_tokens, workload.batch)),
            pp_buffer_bytes=math.ceil(self._boundary_bytes(step_tokens)) if config.pp > 1 else 0,
            runtime_bytes=runtime_bytes,
            relative_error=0.0,
            source=Source.ROOFLINE,
        )
        return _with_relative_error(parts, constants)

    def _layer_activation_bytes(self, tp: int) -> float:
        """Bytes of one token's hidden state, Q, K, V and MLP intermediates in one layer on one GPU."""
        spec = self._spec
        mlp = (2 if spec.gated_mlp else 1) * spec.intermediate_size * max(spec.experts_per_token, 1) / tp
        attention = (spec.num_heads / tp + 2 * kv_heads_per_gpu(spec, tp)) * spec.head_dim
        return (spec.hidden_size + attention + mlp) * _ACTIVATION_BYTES

    def _activation_bytes(self, tp: int, step_tokens: int, batch: int) -> float:
        """Peak live bytes of the largest step on one GPU.

        Residual and normed hidden states, plus the wider of the MLP (gate, up and their product) and the attention
        (Q, K, V and the output), both divided by tp; a MoE layer holds that for each expert of a token. Then the
        logits of the batch, gathered over the vocabulary, once at 16 bits and once in fp32. Flash attention: no
        score matrix. The formula is an assumption about what engines free when; see ``activation_relative_error``.
        """
        spec = self._spec
        mlp = (3 if spec.gated_mlp else 2) * spec.intermediate_size * max(spec.experts_per_token, 1) / tp
        attention = (2 * spec.num_heads / tp + 2 * kv_heads_per_gpu(spec, tp)) * spec.head_dim
        per_token = (2 * spec.hidden_size + max(mlp, attention)) * _ACTIVATION_BYTES
        logits = batch * spec.vocab_size * (_ACTIVATION_BYTES + _LOGIT_BYTES)
        return step_tokens * per_token + logits

    def _quantity(self, config: DeploymentConfig, value: float, log_error: tuple[float, float]) -> Quantity:
        constants, gpu = self._constants, self._gpu
        both_sides = 0.0
        if config.weights is not WeightFormat.BITS16 or config.kv is not KvFormat.BITS16:
            both_sides += constants.quantized_log_error
        if config.pp > 1:
            both_sides += constants.pipeline_log_error
        if gpu.is_cpu:
            both_sides += constants.cpu_log_error
        if gpu.vendor is Vendor.AMD:
            both_sides += constants.amd_log_error
        if config.engine in self._eager:
            both_sides += EAGER.log_error
        slower = 0.0
        if not gpu.has_fp8 and (self._is_fp8(config) or config.kv is KvFormat.FP8):
            slower = constants.emulated_fp8_log_error
        low = value * math.exp(min(log_error[0], 0.0) - both_sides)
        high = value * math.exp(max(log_error[1], 0.0) + both_sides + slower)
        return Quantity(value, low, high, Source.ROOFLINE)

    def _power(self, tdp_w: float) -> Quantity:
        return Quantity(tdp_w, tdp_w * self._constants.power_low_fraction, tdp_w, Source.ROOFLINE)


def _with_relative_error(parts: MemoryEstimate, constants: RooflineConstants) -> MemoryEstimate:
    """``parts`` with the half-width of its interval: the errors of the items are independent, so squares add."""
    layers = -(-parts.num_layers // parts.pp)
    weights = layers * parts.layer_weight_bytes + parts.first_stage_bytes + parts.last_stage_bytes
    kv = layers * parts.layer_kv_bytes
    activations = parts.activation_bytes + parts.pp_buffer_bytes
    spread = math.hypot(
        weights * constants.weights_relative_error,
        kv * constants.kv_relative_error,
        activations * constants.activation_relative_error,
        parts.runtime_bytes * constants.runtime_relative_error,
    )
    total = weights + kv + activations + parts.runtime_bytes
    return replace(parts, relative_error=spread / total)
