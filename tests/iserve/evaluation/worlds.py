"""Small worlds for the tests of evaluation."""

from __future__ import annotations

from typing import Any

from iserve.evaluation.world import World
from iserve.evaluation.world_file import world_of

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def world_values(**changed: Any) -> dict[str, Any]:
    """Return the fields of a small valid world: two models on four H200s, 20 s of requests."""
    return {
        "name": "small",
        "cluster": "h200:4",
        "models": [{"name": "chat", "config": LLAMA_8B}, {"name": "mail", "config": LLAMA_8B}],
        "requests": {"lengths": {"input_mean_tokens": 400, "output_mean_tokens": 50}, "rate_per_s": 10},
        "horizon_s": 20,
        "seeds": [1],
        **changed,
    }


def small_world(**changed: Any) -> World:
    return world_of(world_values(**changed))
