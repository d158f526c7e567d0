"""Bytes that an engine holds of a checkpoint's matrices, where these are not those of its files.

vLLM 0.33 holds K's matrix twice where V has none of its own (Gemma 4). Of quantized checkpoints it re-packs the
words of 4-bit formats for its kernels, which keeps their size, and

* drops GPTQ's group indexes (``g_idx``), since it runs checkpoints without activation order alone;
* holds the zero points of AWQ and of asymmetric compressed-tensors as 16-bit products with their scales where
  Machete multiplies them: on a GPU of compute capability 9.0, by matrices in whole blocks of 64 inputs and 128
  outputs. GPTQ's stay packed, though nothing reads them;
* holds the scales of 8-bit compressed-tensors in 32 bits, which files have in 16;
* on a GPU of compute capability 9.0 fills up the scales of MXFP4 experts to 256 outputs and 4 groups, and holds
  their biases in 32 bits.

Sources: ``model_executor/layers/quantization``, ``kernels/linear/mixed_precision/machete.py`` and
``third_party/triton_kernels`` of its wheel. What kernels of other GPUs and of fp8 in blocks fill up is not
counted. Other engines are taken to hold what files have.
"""

from __future__ import annotations

import math

from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.engines import traits_of
from fingerprint.gpu_spec import GpuSpec
from fingerprint.model_spec import ModelSpec, Stored
from fingerprint.weight_bytes import linear_element_bytes

__all__ = ["added_layer_bytes"]

_HOPPER = (9, 0)
_MACHETE_INPUTS, _MACHETE_OUTPUTS = 64, 128
_MACHETE_GROUPS = (0, 64, 128)  # inputs that share a scale; 0: all
_WITH_ZEROS = ("awq", "compressed-tensors")
_BITS_HELD = 16  # of a zero point in Machete
_MX_OUTPUTS, _MX_GROUPS = 256, 4  # of scales that lie together
_BIAS_BYTES = 2  # more than in the file


def added_layer_bytes(spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> float:
    """Return by how many bytes one hidden layer of ``config`` takes more in a GPU's memory than in its files.

    Negative where it takes less. Mean layer, of one rank of the tensor-parallel group.
    """
    copied = _doubled_bytes(spec, config) if traits_of(config.engine).repacks_weights else 0.0
    return copied + _repacked_bytes(spec, config, gpu)


def _doubled_bytes(spec: ModelSpec, config: DeploymentConfig) -> float:
    """Return the copies of K's matrix in V's place, as ``Gemma4ForCausalLM`` loads where one matrix makes both."""
    copies = sum(kind.count * kind.shape.doubled_params for kind in spec.kinds if kind.shape)
    return copies / spec.num_layers / config.tp * linear_element_bytes(spec, config.weights)


def _repacked_bytes(spec: ModelSpec, config: DeploymentConfig, gpu: GpuSpec) -> float:
    """Return what the kernels of a quantized checkpoint's formats make of its matrices."""
    stored = spec.stored
    if stored is None or config.weights is not WeightFormat.STORED or not traits_of(config.engine).repacks_weights:
        return 0.0
    added = -stored.layer_index_bytes if stored.method == "gptq" else 0.0
    if stored.method in _WITH_ZEROS and stored.layer_zero_bytes and _is_by_machete(spec, stored, config.tp, gpu):
        added += stored.layer_zero_bytes * (_BITS_HELD / stored.bits - 1)
    if stored.method == "compressed-tensors" and not stored.group_inputs and stored.bits == 8:
        added += stored.layer_scale_bytes
    if stored.method == "mxfp4" and gpu.compute_capability == _HOPPER:
        return _filled_up_bytes(spec, stored, config.tp)
    return added / config.tp


def _filled_up_bytes(spec: ModelSpec, stored: Stored, tp: int) -> float:
    """Return what one rank's experts of GPT-OSS take more: the pair of first matrices, then the last."""
    inner, each = math.ceil(spec.intermediate_size / tp), 0
    for outputs, inputs in ((2 * inner, spec.hidden_size), (spec.hidden_size, inner)):
        groups = math.ceil(inputs / stored.group_inputs)
        filled = _up(outputs, _MX_OUTPUTS) * _up(groups, _MX_GROUPS)
        each += filled - outputs * groups + _BIAS_BYTES * outputs
    return float(spec.num_experts * each)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _is_by_machete(spec: ModelSpec, stored: Stored, tp: int, gpu: GpuSpec) -> bool:
    if gpu.compute_capability != _HOPPER or stored.group_inputs not in _MACHETE_GROUPS:
        return False
    queries = spec.num_heads * spec.head_dim // tp
    keys = spec.num_kv_heads * spec.head_dim // min(tp, spec.num_kv_heads)
    inner = spec.intermediate_size // tp
    inputs, outputs = (spec.hidden_size, queries, inner), (queries + 2 * keys, spec.hidden_size, 2 * inner)
    return not any(width % _MACHETE_INPUTS for width in inputs) and not any(w % _MACHETE_OUTPUTS for w in outputs)
