"""Tables of what the embedded engine runs, readable without importing torch.

``stage_model`` and ``formats`` hold the facts; a test compares these tables with them.
"""

from __future__ import annotations

from fingerprint.config import KvFormat, Pruning, WeightFormat
from fingerprint.quantized import BY_HEADERS, METHODS

__all__ = [
    "FAMILIES",
    "KV",
    "MAX_PP",
    "MAX_TP",
    "NO_LORA",
    "NO_TP",
    "ONE_STAGE",
    "PRUNING",
    "REFUSED",
    "STATIC_ROPE_TYPES",
    "STORED",
    "UNTESTED",
    "WEIGHTS",
]

# Families that are tested here over several ranks too. But for the last two, which are the class of Llama, they
# have rows of their own, which say which modules lie in which stage.
_STAGED = frozenset(
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
        "internlm3",
        "iquestcoder",
    }
)
# Families that are tested on one rank. But for OPT they have no row of their own: ``fingerprint.families.generic``
# finds their one stack of layers.
_ONE_RANK = (
    *("arcee", "bitnet", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "glm", "glm4", "gpt2"),
    *("granite", "granite_swa", "helium", "hunyuan_v1_dense", "hyperclovax"),
    *("jais2", "ministral", "ministral3", "nanochat", "olmo", "olmo2", "olmo3", "opt"),
    *("persimmon", "phi", "seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
FAMILIES = _STAGED | frozenset(_ONE_RANK)

# Why a family's layers do not lie in several stages, and why its tensors are not split.
_NOT_RUN_YET = "more than one rank was not run with this family yet"
_POSITIONS = "its transformers class adds position embeddings to whatever a later pipeline stage is handed"
ONE_STAGE: dict[str, str] = dict.fromkeys(_ONE_RANK, _NOT_RUN_YET) | dict.fromkeys(("gpt2", "opt"), _POSITIONS)
NO_TP: dict[str, str] = {
    **dict.fromkeys(_ONE_RANK, _NOT_RUN_YET),
    "phi3": "transformers' plan gathers its joined matrices again before they are used: nothing would be halved",
}
# Why no adapters of a family are served.
NO_LORA: dict[str, str] = {
    "gpt2": "transformers holds its matrices transposed (Conv1D), and linears alone are updated"
}

# Why a family that iServe reads is not run. Where the reason is not that a class says so itself, a test lets the
# family in and sees it fail.
_KEEPS_BACK = "its transformers class does not hand on to the attention interface what the cache needs"
_BUFFERS = (
    "its transformers class has buffers that cannot be made from the config alone, as this engine makes them"
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(("nemotron", "stablelm"), _KEEPS_BACK),
    **dict.fromkeys(("apertus", "ctrl", "gpt_bigcode", "xglm"), _BUFFERS),
    "diffllama": "its layers attend twice with other values, and this engine's cache keeps one V per layer",
    "doge": "its layers bring masks of their own, and the embedded engine makes its own",
}
UNTESTED = "its tokens were not compared with those of transformers yet"

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
    (*METHODS, *BY_HEADERS),
    "the embedded engine computes with 16-bit and its own int8 weights; give the 16-bit model, or take vLLM",
)
KV: dict[KvFormat, str | None] = {KvFormat.BITS16: None, KvFormat.INT8: _LATER, KvFormat.FP8: _LATER}
PRUNING: dict[Pruning, str | None] = {pruning: None if pruning is Pruning.NONE else _LATER for pruning in Pruning}

MAX_TP = 2
MAX_PP = 2
