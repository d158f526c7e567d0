"""Capabilities of TensorRT-LLM 1.2 with its PyTorch backend, as a value.

Read in the sources of 1.3.0rc3 and the release notes of 1.2; never run. Its older flow, which builds an engine
file first, has more (Falcon, GPT-J, GPTQ, int8 KV, 2:4 sparsity); later releases drop it, and iServe does not
drive it. Adapters are served of the classes that hand them on to every matrix of a layer: where one does not, they
are left out without an error.
"""

from __future__ import annotations

from fingerprint.architectures import Architectures, Listed
from fingerprint.capability import EngineCapabilities, Exclusion, Note
from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.weight_bytes import DENSE_STORED, GROUP_SIZE

__all__ = ["TABLE"]

_EXPERTS = frozenset({"gpt_oss", "mixtral", "qwen2_moe", "qwen3_moe"})
_SOURCE = "TensorRT-LLM 1.3.0rc3"
_NOT_HANDED_ON = "its class there hands adapters to no layer, so that they are left out without an error"
_NO_EXPERTS = "its experts take none there, so that those of an adapter are left out without an error"
# Of its PyTorch backend's classes those that were read next to what iServe counts, and why some take no adapters.
_READ = {
    "Gemma3": None,
    "GptOss": _NO_EXPERTS,
    "Llama": None,
    "Mistral": "it has two classes of that name, of which one hands adapters to attention alone",
    "Mixtral": _NOT_HANDED_ON,
    "Phi3": "its joined matrices need a table of names that was not tried",
    "Qwen2": None,
    "Qwen2Moe": _NOT_HANDED_ON,
    "Qwen3": None,
    "Qwen3Moe": _NOT_HANDED_ON,
}
_OLDER_FLOW = (
    "only its older engine flow (trtllm-build, or --backend tensorrt) has it, which later 1.3 drops and iServe "
    "does not drive"
)
# As ``checkpoint.stored_formats`` tells them.
_STORED = frozenset(
    {
        "fp8, float, a scale per 128 x 128",
        "compressed-tensors, float, a scale per channel",
        "compressed-tensors, float, a scale per tensor",
    }
)

TABLE = EngineCapabilities(
    engine="tensorrt-llm",
    architectures=Architectures(
        source=_SOURCE,
        listed={f"{name}ForCausalLM": Listed(no_lora=reason) for name, reason in _READ.items()},
        reasons={f"{name}ForCausalLM": _OLDER_FLOW for name in ("Falcon", "Gemma2", "GPTJ", "GPTNeoX", "OPT")},
        otherwise=f"{_SOURCE} may have a class of it, which was not read",
    ),
    weights={
        WeightFormat.BITS16: None,
        WeightFormat.INT8: None,
        WeightFormat.INT4: None,
        WeightFormat.GPTQ4: f"its PyTorch backend refuses GPTQ checkpoints; {_OLDER_FLOW}",
        WeightFormat.FP8: None,
        WeightFormat.STORED: None,
    },
    stored={
        "fp8": None,
        "compressed-tensors": None,
        "gptq": f"its PyTorch backend refuses GPTQ checkpoints; {_OLDER_FLOW}",
        "awq": "its PyTorch backend reads 4-bit weights as ModelOpt writes them only",
        "mxfp4": "that its adapter's reading of a checkpoint covers it was not done",
        "modelopt": "iServe's adapter was not made to read its checkpoints",
    },
    kv={
        KvFormat.BITS16: None,
        KvFormat.INT8: f"its PyTorch backend has fp8 and nvfp4 KV beside 16bit; {_OLDER_FLOW}",
        KvFormat.FP8: None,
    },
    pruning={
        Pruning.NONE: None,
        Pruning.SPARSEGPT: None,
        Pruning.WANDA: None,
        Pruning.WANDA_2_4: f"its PyTorch backend has no sparse kernels; {_OLDER_FLOW}",
        Pruning.WANDA_4_8: None,
        Pruning.LLM_PRUNER_25: "layers of differing widths are not a shape its model classes load",
    },
    max_tp=8,
    max_pp=8,
    expert_parallel="it has a degree of its own for that, which iServe does not set",
    degree_reason="larger ones are several nodes, which iServe does not span",
    adapters=True,
    step_timed=True,
    own_environment=True,
    exclusions=(
        Exclusion(
            below_compute_capability=(8, 0),
            reason="its documented GPUs begin with Ampere (compute capability 8.0)",
        ),
        Exclusion(
            weights=frozenset({WeightFormat.STORED}),
            stored_other_than=_STORED,
            reason="of what is quantized outside ModelOpt its PyTorch backend reads fp8 in blocks of 128 x 128 "
            "and 8-bit floats of compressed-tensors, other forms not or as another one; give the 16-bit model",
        ),
        Exclusion(
            weights=frozenset({WeightFormat.FP8, WeightFormat.STORED}),  # of what is stored it reads fp8 alone
            below_compute_capability=(8, 9),
            reason="fp8 weights need an Ada or Hopper GPU (compute capability 8.9)",
        ),
        Exclusion(
            kv=frozenset({KvFormat.FP8}),
            below_compute_capability=(8, 9),
            reason="an fp8 KV cache on a GPU without fp8 arithmetic was not read to work",
        ),
        Exclusion(
            families=_EXPERTS,
            weights=frozenset({WeightFormat.INT8, WeightFormat.INT4}),
            reason="its linear layers take weight-only int8 and int4; that its expert layers do was not read",
        ),
        Exclusion(
            weights=frozenset({WeightFormat.INT4}),
            cut_group_size=GROUP_SIZE,
            reason="that it takes a matrix whose inputs per rank are not whole groups of 128 was not read; its "
            "converter fails on one (TensorRT-LLM issue 648)",
        ),
    ),
    notes=(
        Note(
            weights=frozenset(WeightFormat) - {WeightFormat.BITS16},
            text="needs a checkpoint quantized beforehand; there is no online quantization",
            beforehand=True,
        ),
        Note(
            pruning=frozenset(Pruning) - {Pruning.NONE},
            text="needs a checkpoint pruned beforehand",
            beforehand=True,
        ),
        Note(pruning=DENSE_STORED - {Pruning.NONE}, text="served as dense weights"),
        Note(
            has_slots=True,
            text="adapters on TensorRT-LLM were never run: its steps are launched without CUDA graphs then, which "
            "no time here counts, and it keeps each adapter that it ever read on the GPU, of which memory counts "
            "as many as are loaded at once",
        ),
    ),
)
