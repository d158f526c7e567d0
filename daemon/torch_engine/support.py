"""What the embedded engine runs, as plain tables: readable without importing torch.

``stage_model`` and ``formats`` hold the facts; a test compares these tables with them.
"""

from __future__ import annotations

from fingerprint.config import KvFormat, Pruning, WeightFormat

__all__ = [
    "FAMILIES",
    "KV",
    "MAX_PP",
    "MAX_TP",
    "PRUNING",
    "STATIC_ROPE_TYPES",
    "STORED",
    "TP_FAMILIES",
    "WEIGHTS",
]

# Families whose transformers classes go through the attention interface, and that are tested here.
FAMILIES = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "phi3",
        "gpt_neox",
        "gemma2",
        "gemma3_text",
        "gpt_oss",
    }
)
# transformers' plan for Phi-3 gathers its joined matrices again before they are used: nothing would be halved. For
# GPT-OSS it has none.
TP_FAMILIES = FAMILIES - {"phi3", "gpt_oss"}

# Rotary embeddings whose frequencies depend on the model alone, not on how long a batch's sequences are.
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

# Format -> None where it runs, else the reason. What is not listed is a plain no.
_LATER = "not yet done in the embedded engine"
WEIGHTS: dict[WeightFormat, str | None] = {
    WeightFormat.BITS16: None,
    WeightFormat.INT8: None,
    WeightFormat.INT4: _LATER,
    WeightFormat.GPTQ4: _LATER,
    WeightFormat.FP8: _LATER,
    WeightFormat.STORED: None,  # of those, which: STORED
}
STORED: dict[str, str | None] = dict.fromkeys(
    ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4"),
    "the embedded engine computes with 16-bit and its own int8 weights; give the 16-bit model, or take vLLM",
)
KV: dict[KvFormat, str | None] = {KvFormat.BITS16: None, KvFormat.INT8: _LATER, KvFormat.FP8: _LATER}
PRUNING: dict[Pruning, str | None] = {pruning: None if pruning is Pruning.NONE else _LATER for pruning in Pruning}

MAX_TP = 2
MAX_PP = 2
