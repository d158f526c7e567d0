"""Writes config.json files of many families, cut in experts so that their fingerprints fit on a shared GPU.

    python -m tests.bench.family_configs OUT [NAME ...]

OUT/NAME/config.json for ``tests.bench.family_runs``, and OUT/order.txt. Configs are those of
``tests/fingerprint/recorded/public_models.json`` and, where a public one is not recorded, the defaults of
transformers' class. Experts are halved until the deeper fingerprint's weights take less than ``MOST_GIB``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from fingerprint.depth_tied_cuts import tied_depths, why_no_cuts
from fingerprint.errors import IserveError
from fingerprint.families import load_spec
from fingerprint.truncate import generate_shape

PUBLIC = Path(__file__).parents[1] / "fingerprint/recorded/public_models.json"
MOST_GIB = {"deepseek-ai/DeepSeek-V3": 21.0}
USUAL_MOST_GIB = 14.0
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Not run on a GPU yet, then those whose run was cut short after the engine's start.
RECORDED = (
    "google/gemma-4-31B-it (text)",
    "Qwen/Qwen3.5-27B (text)",
    "deepseek-ai/DeepSeek-V3",
    "allenai/OLMoE-1B-7B-0924",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "google/gemma-2-9b",
    "microsoft/phi-4",
    "allenai/OLMo-2-1124-7B",
    "HuggingFaceTB/SmolLM3-3B-Base",
    "ByteDance-Seed/Seed-OSS-36B-Base",
    "stabilityai/stablelm-3b-4e1t",
    "EleutherAI/pythia-6.9b",
)
DEFAULTS = {  # architecture: transformers' config class
    "Llama4ForCausalLM": "Llama4TextConfig",
    "Ernie4_5_MoeForCausalLM": "Ernie4_5_MoeConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Mistral3ForConditionalGeneration": "Mistral3Config",
    "JambaForCausalLM": "JambaConfig",
    "BambaForCausalLM": "BambaConfig",
}


def config_of(name: str) -> dict[str, Any]:
    """Return the recorded config of ``name``, or the default one of that architecture."""
    if name not in DEFAULTS:
        return dict(json.loads(PUBLIC.read_text())["models"][name]["config"])
    import transformers

    config: dict[str, Any] = getattr(transformers, DEFAULTS[name])().to_dict()
    left_out = ("id2label", "label2id", "transformers_version")
    return {key: value for key, value in config.items() if key not in left_out} | {
        "architectures": [name],
        "dtype": "bfloat16",
    }


def deeper_cut_gib(folder: Path) -> float:
    """Return the weights of the deeper fingerprint in 16 bits.

    Raises:
        ConfigError: the model's kinds of layers repeat in no pattern.
    """
    spec = load_spec(folder)
    if not (depths := tied_depths(spec, 1)):
        raise IserveError(why_no_cuts(spec, 1))
    with tempfile.TemporaryDirectory() as scratch:
        generate_shape(folder, Path(scratch) / "cut", depths[0])
        return 2 * load_spec(Path(scratch) / "cut").num_params / 2**30


def write_config(name: str, folder: Path) -> None:
    """Write ``folder``/config.json with as many experts as fit."""
    config, most = config_of(name), MOST_GIB.get(name, USUAL_MOST_GIB)
    text = config.get("text_config", config)
    folder.mkdir(parents=True)
    while True:
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        gib = deeper_cut_gib(folder)
        field = next((field for field in EXPERT_FIELDS if text.get(field)), None)
        if gib < most or field is None:
            print(f"{folder.name}: {gib:.1f} GiB" + (f", {text[field]} experts" if field else ""))
            return
        text[field] //= 2


def main(argv: list[str]) -> None:
    out, names = Path(argv[0]), argv[1:] or [*RECORDED, *DEFAULTS]
    written = []
    for name in names:
        folder = out / name.rpartition("/")[2].replace(" (text)", "-text")
        try:
            write_config(name, folder)
            written.append(folder.name)
        except IserveError as error:
            print(f"{name}: {error}")
    (out / "order.txt").write_text("\n".join(written) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
