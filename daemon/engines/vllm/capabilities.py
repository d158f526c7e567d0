"""vLLM's capabilities as a value, where none is installed: one that is tells its own architectures.

Formats and degrees were read in the sources of the published wheels 0.24.0 to 0.33.0 (quantization, attention
backends). Architectures are those of the newest of them; what is excluded of these has its reason beside it.
"""

from __future__ import annotations

from daemon.engines.vllm.architectures import architectures_of, recorded_registry
from daemon.sources.transformers_classes import recorded_transformers
from fingerprint.capability import EngineCapabilities, Exclusion, Note, Verified
from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.gpu_spec import Vendor
from fingerprint.quantized import ACTIVATION_ORDER, ASYMMETRIC, BY_HEADERS, METHODS
from fingerprint.weight_bytes import DENSE_STORED, GROUP_SIZE

__all__ = ["TABLE"]

_FOUR_BITS = frozenset({WeightFormat.INT4, WeightFormat.GPTQ4})
_ADA = (8, 9)
_AMD = frozenset({Vendor.AMD})
_AMD_FORMATS = "of quantized formats its documentation lists fp8 alone for AMD GPUs"

TABLE = EngineCapabilities(
    engine="vllm",
    architectures=architectures_of(recorded_registry(), recorded_transformers()),
    weights={
        WeightFormat.BITS16: None,
        WeightFormat.INT8: "it quantizes to weight-only int8 the experts of MoE models only; a dense model "
        "would stay at 16bit without an error",
        WeightFormat.INT4: None,  # from a compressed-tensors or AWQ checkpoint
        WeightFormat.GPTQ4: None,  # from a GPTQ checkpoint
        WeightFormat.FP8: None,  # while loading
        WeightFormat.STORED: None,
    },
    stored=dict.fromkeys((*METHODS, *BY_HEADERS)),
    kv={KvFormat.BITS16: None, KvFormat.INT8: None, KvFormat.FP8: None},
    pruning={
        Pruning.NONE: None,
        Pruning.SPARSEGPT: None,
        Pruning.WANDA: None,
        Pruning.WANDA_2_4: "2:4 sparsity was removed (0.22); such a checkpoint is served as dense weights",
        Pruning.WANDA_4_8: None,
        Pruning.LLM_PRUNER_25: "layers of differing widths are not a shape its model classes load",
    },
    max_tp=8,
    max_pp=8,
    expert_parallel=None,
    degree_reason="larger ones are several nodes, which iServe does not span",
    verified=(  # vLLM 0.24.0, 2026-11-21 and 22: docs/accuracy.md
        Verified(
            gpu="h200-sxm",
            families=frozenset({"llama", "mistral", "qwen3", "falcon", "gptj"}),
            weights=frozenset({WeightFormat.BITS16}),
            kv=frozenset({KvFormat.BITS16}),
            pruning=frozenset({Pruning.NONE}),
        ),
        Verified(
            gpu="h200-sxm",
            families=frozenset({"qwen3"}),
            weights=frozenset({WeightFormat.FP8}),
            kv=frozenset({KvFormat.BITS16, KvFormat.FP8}),
            pruning=frozenset({Pruning.NONE}),
        ),
        Verified(
            gpu="h200-sxm",
            families=frozenset({"llama"}),
            weights=frozenset({WeightFormat.FP8}),
            kv=frozenset({KvFormat.BITS16}),
            pruning=frozenset({Pruning.NONE}),
        ),
    ),
    adapters=True,
    step_timed=True,
    own_environment=True,
    amd=True,
    exclusions=(
        Exclusion(vendors=_AMD, weights=_FOUR_BITS, reason=_AMD_FORMATS),
        Exclusion(vendors=_AMD, stored_as=frozenset({"gptq", "awq"}), reason=_AMD_FORMATS),
        Exclusion(
            vendors=_AMD,
            kv=frozenset({KvFormat.INT8}),
            reason="that its int8 KV cache works on AMD GPUs was not read",
        ),
        Exclusion(
            below_compute_capability=(7, 5),
            reason="its wheels are built with CUDA 13, whose GPUs begin with Turing (compute capability 7.5)",
        ),
        Exclusion(
            kv=frozenset({KvFormat.FP8}),
            below_compute_capability=_ADA,
            reason="an fp8 KV cache on a GPU without fp8 arithmetic was not read to work",
        ),
        Exclusion(
            families=frozenset({"gpt_oss"}),
            weights=frozenset(WeightFormat) - {WeightFormat.BITS16, WeightFormat.STORED},
            reason="that the class of GPT-OSS takes other weights than 16 bits and mxfp4 was not read",
        ),
        Exclusion(
            families=frozenset({"gpt_oss"}),
            kv=frozenset(KvFormat) - {KvFormat.BITS16},
            reason="that attention with sinks takes a quantized KV cache was not read",
        ),
        Exclusion(
            keeps_latent=True,
            kv=frozenset({KvFormat.INT8}),
            reason="int8 KV is of the Triton attention backend; that latent attention takes it was not read",
        ),
        Exclusion(
            weights=_FOUR_BITS,
            cut_group_size=GROUP_SIZE,
            reason="its loader refuses a matrix whose inputs per rank are not whole groups of 128 "
            "(vLLM issues 2699 and 5675)",
        ),
        Exclusion(
            weights=frozenset({WeightFormat.STORED}),
            stored_as=frozenset({"fp8", "compressed-tensors", "gptq", "awq"}),  # mxfp4 is filled up
            cut_stored_groups=True,
            reason="its loader refuses a matrix of which a rank does not get whole quantization groups; take a "
            "smaller tp",
        ),
        Exclusion(
            has_slots=True,
            keeps_latent=True,
            reason="its latent attention computes with weights made of kv_b_proj at the start: an adapter's "
            "update of that matrix would be left out; merge the adapter (`iserve variant merge`)",
        ),
        Exclusion(
            has_slots=True,
            has_experts=True,
            weights=frozenset(WeightFormat) - {WeightFormat.BITS16},
            reason="that its kernels for experts in another format than 16 bits take adapters was not read in "
            "every release; give the 16-bit model",
        ),
        Exclusion(
            has_slots=True,
            expert_parallel=True,
            reason="that variants are right where each GPU has experts of its own was not run, and not read in "
            "every release; leave experts=parallel out, or merge them (`iserve variant merge`)",
        ),
    ),
    notes=(
        Note(
            has_slots=True,
            text="adapter slots on vllm were run with one model only (Llama-3.1-8B, 0.33, an H200), on which the "
            "time that they add to a step rests",
        ),
        Note(
            has_slots=True,
            has_experts=True,
            text="with adapter slots its experts run in Triton kernels, not in those that were measured",
        ),
        Note(
            expert_parallel=True,
            text="with experts=parallel a step waits for the GPU whose experts are chosen most, and a profile has "
            "all chosen alike: traffic that favours some is slower than predicted",
        ),
        Note(
            vendors=_AMD,
            stored_as=frozenset({"compressed-tensors"}),
            text="of compressed-tensors only the fp8 forms are documented for AMD GPUs",
        ),
        Note(
            stored_as=frozenset({"gptq", "compressed-tensors"}),
            stored_form_ends=(ACTIVATION_ORDER, ASYMMETRIC),
            text="vllm 0.33 refuses groups in activation order (desc_act, actorder) and asymmetric GPTQ; which "
            "earlier releases run them was not read",
        ),
        Note(
            stored_as=frozenset(BY_HEADERS),
            text="ModelOpt's checkpoints (fp8, NVFP4) are listed by it; not run by us",
        ),
        Note(
            weights=_FOUR_BITS,
            text="needs a checkpoint quantized beforehand; there is no online 4-bit quantization",
            beforehand=True,
        ),
        Note(
            weights=frozenset({WeightFormat.FP8}),
            below_compute_capability=_ADA,
            text="fp8 on a GPU without fp8 arithmetic runs as weight-only (Marlin)",
        ),
        Note(
            kv=frozenset({KvFormat.INT8}),
            text="int8 KV is int8_per_token_head, in the Triton attention backend: another kernel",
        ),
        Note(
            pruning=frozenset(Pruning) - {Pruning.NONE},
            text="needs a checkpoint pruned beforehand",
            beforehand=True,
        ),
        Note(pruning=DENSE_STORED - {Pruning.NONE}, text="served as dense weights"),
    ),
)
