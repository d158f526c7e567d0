"""Checkpoints of two layers on disk: with towers for images, with Python code of their own, or with neither."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path

HIDDEN, INNER, VOCAB, LAYERS = 256, 512, 1000, 2
TEXT_CONFIG = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAVA_CONFIG = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "text_config": TEXT_CONFIG,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    "vision_feature_select_strategy": "default",
}
OWN_CONFIG = {
    **TEXT_CONFIG,
    "model_type": "quite_its_own",
    "architectures": ["QuiteItsOwnForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    },
}
Shapes = dict[str, tuple[int, ...]]
HEAD = {"lm_head.weight": (VOCAB, HIDDEN)}
TOWER: Shapes = {
    "vision_tower.vision_model.embeddings.patch_embedding.weight": (HIDDEN, 3, 14, 14),
    "multi_modal_projector.linear_1.weight": (HIDDEN, HIDDEN),
    "multi_modal_projector.linear_1.bias": (HIDDEN,),
} | {
    f"vision_tower.vision_model.encoder.layers.{index}.{name}": shape
    for index in range(3)
    for name, shape in {"self_attn.q_proj.weight": (HIDDEN, HIDDEN), "self_attn.q_proj.bias": (HIDDEN,)}.items()
}
TOWER_PARAMS = sum(prod(shape) for shape in TOWER.values())


def text_shapes(prefix: str = "model.") -> Shapes:
    """Return the tensors of a Llama without its head."""
    layer: Shapes = {f"self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qkvo"}
    layer |= {
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    of_layers = {
        f"{prefix}layers.{index}.{name}": shape for index in range(LAYERS) for name, shape in layer.items()
    }
    return {f"{prefix}embed_tokens.weight": (VOCAB, HIDDEN), f"{prefix}norm.weight": (HIDDEN,), **of_layers}


def write_checkpoint(folder: Path, config: dict[str, object], shapes: Shapes) -> Path:
    """Write a checkpoint of zeros in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def write_llava(folder: Path) -> Path:
    """Write a model that reads images of 576 tokens."""
    shapes = {**text_shapes("language_model.model."), "language_model.lm_head.weight": (VOCAB, HIDDEN), **TOWER}
    return write_checkpoint(folder, LLAVA_CONFIG, shapes)


def write_llama(folder: Path) -> Path:
    """Write a model without towers or code."""
    config = {**TEXT_CONFIG, "architectures": ["LlamaForCausalLM"]}
    return write_checkpoint(folder, config, {**text_shapes(), **HEAD})


def write_own(folder: Path) -> Path:
    """Write a model whose classes are Python files in its folder; importing one leaves the file ``ran`` there."""
    write_checkpoint(folder, OWN_CONFIG, {**text_shapes(), **HEAD})
    for name in ("configuration_own.py", "modeling_own.py"):
        (folder / name).write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    return folder
