"""TensorRT-LLM 1.2 as a table of what it runs. The adapter that starts it is not there yet, and command() says so.

Read in the sources of 1.3.0rc3 and the release notes of 1.2; not run. It has two flows: the PyTorch backend, and
the older one that builds an engine first, which alone has Falcon, GPT-J, GPTQ, int8 KV and 2:4 sparsity.
"""

from __future__ import annotations

from daemon.engines.table_only import TableOnlyEngine
from fingerprint.capability import EngineCapabilities, Exclusion, Note
from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.formats import DENSE_STORED, GROUP_SIZE

__all__ = ["TENSORRT_LLM"]

_PYTORCH_FLOW = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3"})
_ENGINE_FLOW_ONLY = frozenset({"falcon", "gptj"})
_ENGINE_FLOW = "runs in the older engine flow only (trtllm-build, or --backend tensorrt), which later 1.3 drops"
_FAMILIES = _PYTORCH_FLOW | _ENGINE_FLOW_ONLY

TENSORRT_LLM = TableOnlyEngine(
    EngineCapabilities(
        engine="tensorrt-llm",
        families=_FAMILIES,
        tp_families=_FAMILIES,
        weights=dict.fromkeys(WeightFormat),
        kv=dict.fromkeys(KvFormat),
        pruning={
            Pruning.NONE: None,
            Pruning.SPARSEGPT: None,
            Pruning.WANDA: None,
            Pruning.WANDA_2_4: None,
            Pruning.WANDA_4_8: None,
            Pruning.LLM_PRUNER_25: "layers of differing widths are not a shape its model classes load",
        },
        max_tp=8,
        max_pp=8,
        verified=False,
        exclusions=(
            Exclusion(
                weights=frozenset({WeightFormat.FP8}),
                below_compute_capability=(8, 9),
                reason="fp8 weights need an Ada or Hopper GPU (compute capability 8.9)",
            ),
            Exclusion(
                kv=frozenset({KvFormat.FP8}),
                below_compute_capability=(8, 9),
                reason="an fp8 KV cache on a GPU without fp8 arithmetic was not read to work",
            ),
            Exclusion(
                families=_ENGINE_FLOW_ONLY,
                weights=frozenset({WeightFormat.GPTQ4}),
                reason="its converters for Falcon and GPT-J were not read to take GPTQ checkpoints",
            ),
            Exclusion(
                families=frozenset({"qwen3"}),
                weights=frozenset({WeightFormat.GPTQ4}),
                reason="GPTQ needs the engine flow, which was not read to have the qwen3 family",
            ),
            Exclusion(
                families=frozenset({"qwen3"}),
                kv=frozenset({KvFormat.INT8}),
                reason="int8 KV needs the engine flow, which was not read to have the qwen3 family",
            ),
            Exclusion(
                families=frozenset({"qwen3"}),
                pruning=frozenset({Pruning.WANDA_2_4}),
                reason="2:4 sparsity needs the engine flow, which was not read to have the qwen3 family",
            ),
            Exclusion(
                pruning=frozenset({Pruning.WANDA_2_4}),
                below_compute_capability=(8, 0),
                reason="2:4 sparsity needs an Ampere GPU (compute capability 8.0)",
            ),
            Exclusion(
                weights=frozenset({WeightFormat.INT4, WeightFormat.GPTQ4}),
                cut_group_size=GROUP_SIZE,
                reason="its converter fails on a matrix whose inputs per rank are not whole groups of 128 "
                "(TensorRT-LLM issue 648)",
            ),
        ),
        notes=(
            Note(families=_ENGINE_FLOW_ONLY, text=_ENGINE_FLOW),
            Note(families=_PYTORCH_FLOW, weights=frozenset({WeightFormat.GPTQ4}), text=_ENGINE_FLOW),
            Note(families=_PYTORCH_FLOW, kv=frozenset({KvFormat.INT8}), text=_ENGINE_FLOW),
            Note(families=_PYTORCH_FLOW, pruning=frozenset({Pruning.WANDA_2_4}), text=_ENGINE_FLOW),
            Note(
                weights=frozenset(WeightFormat) - {WeightFormat.BITS16},
                text="needs a checkpoint quantized beforehand; there is no online quantization",
            ),
            Note(pruning=DENSE_STORED - {Pruning.NONE}, text="served as dense weights"),
        ),
    )
)
