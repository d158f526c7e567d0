"""``tensorrt_llm._torch.models.modeling_utils``: the registry, and a model that takes a number of seconds."""

import torch
from tensorrt_llm import costs

MODEL_CLASS_MAPPING: dict = {}


def register_auto_model(name):
    def decorator(cls):
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorator


class DecoderModelForCausalLM:
    """Embedding, layers, last norm and logits: all of it in ``forward``."""

    def __init__(self, layers):
        self.layers, self.calls = layers, 0

    def forward(self, *, tokens, pairs):
        self.calls += 1
        torch.kernel(costs.OTHER_S)
        for _ in range(self.layers):
            torch.kernel(costs.layer_s(tokens, pairs))
        return {"logits": tokens}


@register_auto_model("LlamaForCausalLM")
class LlamaForCausalLM(DecoderModelForCausalLM):
    pass


@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DecoderModelForCausalLM):
    pass


def create_model(config, args):
    name = config["architectures"][0]
    if name not in MODEL_CLASS_MAPPING:
        raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {name}")
    if config["num_attention_heads"] % args.tensor_parallel_size:
        raise ValueError(f"num_heads must be divisible by tp_size {args.tensor_parallel_size}")
    layers = config["num_hidden_layers"] // args.pipeline_parallel_size
    torch.memory.allocate(costs.OTHER_BYTES + layers * costs.LAYER_BYTES)
    return MODEL_CLASS_MAPPING[name](layers)
