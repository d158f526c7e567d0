"""Record what transformers' own classes hold and keep, for every text architecture that a vLLM release lists.

    python -m tests.fingerprint.record_family_truths VLLM_WHEEL [ARCHITECTURE ...]

The wheel is read, not installed. Each architecture is built twice: with its config class's defaults on torch's
meta device (parameters), and shrunk by the rule of ``shrunk_family_configs`` on the CPU with random weights
(checkpoint as saved, cache as it grows in a real forward). Public models, whose configs and published counts are
typed in ``recorded/public_models.json``, are built and run on the meta device. ``family_truths`` reads the record.
"""

from __future__ import annotations

import copy
import datetime
import json
import lzma
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from tests.fingerprint.family_truths import TRUTHS, public_models
from tests.fingerprint.shrunk_family_configs import shrunk
from tests.fingerprint.vllm_state_sizes import VllmWheel

TABLES = {
    "_TEXT_GENERATION_MODELS": "vLLM's own",
    "_TRANSFORMERS_SUPPORTED_MODELS": "transformers backend",
    "_MULTIMODAL_MODELS": "multimodal",
}
TOWER = re.compile(
    "vision|visual|audio|image|speech|sound|encoder|qformer|talker|token2wav|video|projector|resampler"
)
# Architectures whose class transformers has under another name, or as the text model of a multimodal class.
OTHER_NAMES = {
    "ExaoneMoEForCausalLM": ("ExaoneMoeForCausalLM", None),
    "LLaMAForCausalLM": ("LlamaForCausalLM", None),
    "PhiMoEForCausalLM": ("PhimoeForCausalLM", None),
    "InternLM3ForCausalLM": ("LlamaForCausalLM", "internlm3"),
    "IQuestCoderForCausalLM": ("LlamaForCausalLM", "iquestcoder"),
    "MiniMaxM3SparseForCausalLM": ("MiniMaxM3VLForCausalLM", None),
    "BailingMoeV3ForCausalLM": ("BailingHybridForCausalLM", None),
}
# The windows of the shrunk configs are of 16 tokens: one prompt ends before, the other after.
SHORT_PROMPT, LONG_PROMPT, MORE_TOKENS = 5, 32, 3
MOST_PARAMETERS = 150_000_000  # of a shrunk model


def _rotated_in_three(sections: list[int], **more: float) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"text_config": {"rope_parameters": rope}}


_QSA: dict[str, Any] = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25},
}
# What a class's defaults lack to build, or to have the kinds of layers that its published models have.
COMPLETED: dict[str, dict[str, Any]] = {
    "DbrxForCausalLM": {
        "d_model": 6144,
        "n_heads": 48,
        "attn_config": {"kv_n_heads": 8, "clip_qkv": 8, "rope_theta": 500000},
        "ffn_config": {"hidden_size": 6144, "ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba" if i % 10 != 5 else "attention" for i in range(32)]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 128, "num_key_value_heads": 8},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 128, "num_key_value_heads": 8, "num_experts": 16},
    "Lfm2ForCausalLM": {"num_hidden_layers": 16, "full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "Lfm2MoeForCausalLM": {
        "num_hidden_layers": 24,
        "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
    },
    "PaddleOCRVLForConditionalGeneration": _rotated_in_three([16, 24, 24]),
    "Qwen2VLForConditionalGeneration": _rotated_in_three([16, 24, 24]),
    "Qwen2_5_VLForConditionalGeneration": _rotated_in_three([16, 24, 24]),
    "Glm4vForConditionalGeneration": _rotated_in_three([8, 12, 12], partial_rotary_factor=0.5),
    "GlmOcrForConditionalGeneration": _rotated_in_three([8, 12, 12], partial_rotary_factor=0.5),
    "NemotronForCausalLM": {"head_dim": 128, "num_key_value_heads": 8},
    "Qwen4ExpForCausalLM": _QSA,
    "Qwen4ExpForConditionalGeneration": {"text_config": _QSA},
}


def listed_architectures(wheel: VllmWheel) -> dict[str, str]:
    """Return each architecture of vLLM's registry that generates text and the table that lists it."""
    found = {}
    for table, title in TABLES.items():
        for name, (_, implementation) in wheel.registry[table].items():
            found.setdefault(name, "multimodal" if "MultiModal" in implementation else title)
    return found


def published(config: Any, architecture: str) -> dict[str, Any]:
    """Return what ``config.save_pretrained`` writes, without what differs from release to release."""
    written = config._decode_special_floats(json.loads(config.to_json_string(use_diff=True)))
    dropped = ("transformers_version", "_name_or_path", "dtype")
    fields = {key: value for key, value in written.items() if key not in dropped}
    return {"architectures": [architecture], **_as_authors_write(architecture, fields)}


def _as_authors_write(architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of two families under the names that their public checkpoints have, and vLLM reads."""
    if architecture == "BailingMoeV3ForCausalLM":
        fields = {**fields, "head_dim": fields["linear_head_dim"]}
        return {k: v for k, v in fields.items() if not k.startswith("linear_")}
    if architecture == "KimiLinearForCausalLM":
        kinds = {"full_attn_layers": "full_attention", "kda_layers": "linear_attention"}
        linear: dict[str, Any] = {
            "head_dim": fields["linear_head_dim"],
            "num_heads": fields["linear_num_heads"],
            "short_conv_kernel_size": fields["linear_conv_kernel_dim"],
        }
        for name, kind in kinds.items():
            linear[name] = [i for i, of_layer in enumerate(fields["layer_types"], 1) if of_layer == kind]
        kept_names = (k for k in fields if not k.startswith("linear_") and k != "layer_types")
        return {**{k: fields[k] for k in kept_names}, "linear_attn_config": linear}
    return fields


def check_config(fields: Mapping[str, Any], model: Any, config_class: Any, expected: Mapping[str, Any]) -> None:
    """Raise ValueError unless the recorded config builds the same model."""
    with torch.device("meta"):
        again = counts(model(config_class.from_dict(copy.deepcopy(dict(fields)))))
    if again != {name: expected[name] for name in again}:
        raise ValueError(f"its config as written builds {again['parameters']} parameters")


def stack_of_layers(model: Any) -> str:
    """Return the name of the list of the language model's layers: in no other list, of no tower, the longest."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1}
    outer = {k: len(m) for k, m in lists.items() if not any(k != o and k.startswith(o + ".") for o in lists)}
    of_text = {name: length for name, length in outer.items() if not TOWER.search(name)}
    return max(of_text, key=lambda name: of_text[name], default="")


def unique_tensors(model: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """Return what the state dict holds, tied tensors once, and whether each is a parameter."""
    parameters = {id(p) for p in model.parameters()}
    seen: dict[int, str] = {}
    out = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen[id(tensor)] = name
            out[name] = (tensor, id(tensor) in parameters)
    return out


def counts(model: torch.nn.Module) -> dict[str, Any]:
    """Return the elements of the state dict: in all, of each layer, of each other tensor, of each tower."""
    tensors = unique_tensors(model)
    main = stack_of_layers(model)
    layers = [0] * len(model.get_submodule(main)) if main else []
    ends: dict[str, int] = {}
    for name, (tensor, _) in tensors.items():
        if main and name.startswith(main + "."):
            layers[int(name[len(main) + 1 :].split(".")[0])] += tensor.numel()
        else:
            end = ".".join(name.split(".")[:2]) + ".*" if TOWER.search(name) else name
            ends[end] = ends.get(end, 0) + tensor.numel()
    return {
        "parameters": sum(t.numel() for t, _ in tensors.values()),
        "of_these_buffers": sum(t.numel() for t, is_parameter in tensors.values() if not is_parameter),
        "layers_at": main,
        "layer_parameters": layers,
        "other_parameters": ends,
    }


def kept(cache: Any) -> list[dict[str, tuple[int, str]]]:
    """Return the elements and the dtype of each tensor that each layer's cache holds."""
    layers = cache.layers if hasattr(cache, "layers") else list(cache)
    return [dict(_tensors_of(vars(layer) if hasattr(layer, "__dict__") else layer)) for layer in layers]


def _tensors_of(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, tuple[int, str]]]:
    if isinstance(value, torch.Tensor):
        if value.dim() > 1 and "position" not in name:
            yield name, (value.numel(), str(value.dtype).removeprefix("torch."))
    elif depth < 4 and isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors_of(item, f"{name}.{key}".strip("."), depth + 1)
    elif depth < 4 and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _tensors_of(item, f"{name}.{index}".strip("."), depth + 1)


Sizes = list[list[dict[str, tuple[int, str]]]]


def growth(short: Sizes, long: Sizes) -> list[dict[str, dict[str, Any]]]:
    """Return, of each layer's tensors, elements a token, constant elements, and the tokens at which it stops.

    ``short`` and ``long`` hold the sizes after a prompt of 5 and of 32 tokens and after each of three more tokens.
    """
    layers: list[dict[str, dict[str, Any]]] = []
    for layer in range(len(short[0])):
        facts = {}
        for name, (_, dtype) in long[-1][layer].items():
            before, after = ([at[layer].get(name, (0, ""))[0] for at in sizes] for sizes in (short, long))
            facts[name] = {"dtype": dtype, **_law(before, after)}
        layers.append(facts)
    return layers


def _law(before: list[int], after: list[int]) -> dict[str, Any]:
    early, late = ({b - a for a, b in pairwise(sizes)} for sizes in (before, after))
    if len(early) == len(late) == 1:
        step, constant = min(early), before[0] - SHORT_PROMPT * min(early)
        if early == late and after[0] == LONG_PROMPT * step + constant:
            return _both(step, constant)
        if late == {0} and step and not constant:
            return {"elements_per_token": step, "tokens_at_most": after[0] // step}
    return {"elements_after_5_to_8": before, "elements_after_32_to_35": after}


def _both(step: int, constant: int) -> dict[str, int]:
    return {k: v for k, v in (("elements", constant), ("elements_per_token", step)) if v}


def looked_at(attentions: Any) -> list[int | None]:
    """Return how many tokens the last one attends to in each layer that returns its weights."""
    if not attentions:
        return []
    return [None if a is None else int((a[0, :, -1] > 0).sum(-1).max()) for a in attentions]


def sizes_kept(model: Any, tokens: torch.Tensor, prompt: int) -> Sizes:
    """Return what the cache holds after a prompt and after each of three more tokens."""
    with torch.no_grad():
        out = model(input_ids=tokens[:, :prompt], use_cache=True)
        name = "past_key_values" if out.get("past_key_values") is not None else "cache_params"
        cache = out[name]
        sizes = [kept(cache)]
        for at in range(prompt, prompt + MORE_TOKENS):
            model(input_ids=tokens[:, at : at + 1], use_cache=True, **{name: cache})
            sizes.append(kept(cache))
    return sizes


def forward(model: Any, vocabulary: int) -> dict[str, Any]:
    """Return what the cache holds of a sequence, and how far back the last token looks."""
    torch.manual_seed(0)
    tokens = torch.randint(3, vocabulary, (1, LONG_PROMPT + MORE_TOKENS))
    result: dict[str, Any] = {
        "cache": growth(sizes_kept(model, tokens, SHORT_PROMPT), sizes_kept(model, tokens, LONG_PROMPT))
    }
    try:
        with torch.no_grad():
            weights = model(input_ids=tokens, use_cache=False, output_attentions=True).get("attentions")
        result["attended_by_the_last_of_35"] = looked_at(weights)
    except Exception as error:  # noqa: BLE001  a class may not return its weights
        result["attended_by_the_last_of_35"] = []
        result["attended_error"] = _line(error)
    return result


def stored_tensors(model: Any) -> dict[str, list[Any]]:
    """Return dtype and shape of each tensor of the checkpoint that ``save_pretrained`` writes."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        found = {}
        for file in sorted(Path(folder).glob("*.safetensors")):
            with file.open("rb") as stream:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            found |= {k: [v["dtype"], v["shape"]] for k, v in header.items() if k != "__metadata__"}
    return found


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def vllm_state(wheel: VllmWheel, architecture: str, config: Any) -> dict[str, Any]:
    """Return what a recurrent layer keeps of a sequence by vLLM's own functions; nothing where it has none."""
    try:
        found = wheel.state_bytes(architecture, config)
    except Exception as error:  # noqa: BLE001  reported, not raised
        return {"vllm_state_error": _line(error)}
    return {} if found is None else {"vllm_state_bytes": found}


def _why_missing(architecture: str, wheel: VllmWheel) -> str:
    base = re.sub("For(CausalLM|ConditionalGeneration|BlockDiffusion)$", "", architecture)
    if (multimodal := f"{base}ForConditionalGeneration") != architecture and hasattr(transformers, multimodal):
        return f", only the multimodal {multimodal}"
    own = [name for name in sorted(wheel.config_classes) if re.fullmatch(f"{base}(Text)?Config", name)]
    return (
        f"; vLLM has a config class of its own, {own[0]}" if own else "; nor has vLLM a config class of that name"
    )


def model_class(architecture: str, wheel: VllmWheel) -> tuple[Any, Any]:
    """Return transformers' classes of the model and of its config."""
    name, model_type = OTHER_NAMES.get(architecture, (architecture, None))
    model = getattr(transformers, name, None)
    if model is None:
        raise LookupError(f"transformers has no class {name}{_why_missing(architecture, wheel)}")
    config = transformers.CONFIG_MAPPING[model_type] if model_type else model.config_class
    return model, config


def truth_of(architecture: str, wheel: VllmWheel) -> dict[str, Any]:
    """Return all truths of an architecture; what fails is reported under ``error``."""
    record: dict[str, Any] = {"architecture": architecture}
    try:
        model, config_class = model_class(architecture, wheel)
        config = config_class(**COMPLETED.get(architecture, {}))
        record |= {"class": model.__name__, "config_class": config_class.__name__, "model_type": config.model_type}
        record["default"] = {"config": published(config, architecture)}
        with torch.device("meta"):
            record["default"] |= counts(model(config))
        check_config(record["default"]["config"], model, config_class, record["default"])
        record["default"] |= vllm_state(wheel, architecture, config)
    except Exception as error:  # noqa: BLE001  reported, not raised
        return record | {"error": _line(error)}
    tiny: dict[str, Any] = {}
    try:
        small = config_class.from_dict(shrunk(config.to_dict()))
        small._attn_implementation = "eager"
        tiny["config"] = published(small, architecture)
        with torch.device("meta"):
            size = sum(p.numel() for p in model(small).parameters())
        if size > MOST_PARAMETERS:
            raise ValueError(f"shrunk to {size:,} parameters, which are too many for a test")
        torch.manual_seed(0)
        built = model(small).to(torch.bfloat16).eval()
        tiny |= counts(built)
        check_config(tiny["config"], model, config_class, tiny)
        tiny["tensors"] = stored_tensors(built)
        tiny |= vllm_state(wheel, architecture, small)
        tiny |= forward(built, small.get_text_config().vocab_size)
    except Exception as error:  # noqa: BLE001
        tiny["error"] = _line(error)
    return record | {"tiny": tiny}


def public_truth(architecture: str, fields: Mapping[str, Any], wheel: VllmWheel) -> dict[str, Any]:
    """Return counts of a public model, and what its cache holds, by a forward on the meta device."""
    model, config_class = model_class(architecture, wheel)
    config = config_class.from_dict(copy.deepcopy(dict(fields)))  # it changes what is nested
    config._attn_implementation = "eager"
    with torch.device("meta"), torch.no_grad():
        built = model(config).to(torch.bfloat16)
        caches = [built(input_ids=torch.zeros(1, n, dtype=torch.long))["past_key_values"] for n in (5, 6)]
    fewer, more = (kept(cache) for cache in caches)
    layers = []
    for before, after, layer in zip(fewer, more, caches[1].layers, strict=True):
        facts: dict[str, dict[str, Any]] = {}
        for name, (size, dtype) in after.items():
            step = size - before[name][0]
            facts[name] = {"dtype": dtype, **_both(step, size - 6 * step)}
            if step and getattr(layer, "sliding_window", None):
                facts[name]["tokens_at_most"] = layer.sliding_window - 1
        layers.append(facts)
    return {"config": dict(fields), **counts(built), **vllm_state(wheel, architecture, config), "cache": layers}


def main() -> None:
    """Record all architectures, or print those named."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    file, chosen = Path(sys.argv[1]), sys.argv[2:]
    wheel = VllmWheel(file)
    listed = listed_architectures(wheel)
    records = {}
    for architecture in chosen or listed:
        record = truth_of(architecture, wheel)
        records[architecture] = {"listed": listed[architecture], **record}
        print(architecture, record.get("error") or record["tiny"].get("error") or "recorded", flush=True)
    if chosen:
        print(json.dumps(records, indent=1))
        return
    public = {}
    for name, entry in public_models().items():
        public[name] = public_truth(entry["config"]["architectures"][0], entry["config"], wheel)
        print(name, "recorded", flush=True)
    document = {
        "recorded": datetime.date.today().isoformat(),
        "vllm": file.name.split("-")[1],
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "architectures": {name: r for name, r in records.items() if r["listed"] != "multimodal"},
        "multimodal": {name: r for name, r in records.items() if r["listed"] == "multimodal"},
        "public": public,
    }
    TRUTHS.parent.mkdir(exist_ok=True)
    TRUTHS.write_bytes(lzma.compress(json.dumps(document, indent=0).encode(), preset=9))


if __name__ == "__main__":
    main()
