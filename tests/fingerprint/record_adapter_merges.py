"""Record what PEFT makes of the adapters in ``adapter_cases``: scales, merged weights and the choice of patterns.

    PYTHONPATH=/tmp/peftsite python -m tests.fingerprint.record_adapter_merges

PEFT is no dependency of iServe: it is installed elsewhere, with accelerate (`pip install --no-deps --target`).
"""

from __future__ import annotations

import base64
import json
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from peft.utils.other import get_pattern_key

from tests.fingerprint.adapter_cases import CASES, PATTERN_KEYS, PATTERN_NAMES, RECORD, AdapterCase
from tests.fingerprint.small_adapters import DTYPE_NAMES, factors, write_adapter, write_base


def record_case(case: AdapterCase, folder: Path) -> dict[str, Any]:
    base = write_base(folder / "base", case.base_dtype)
    adapter = write_adapter(folder / "adapter", factors(case.ranks), case.adapter_dtype, **case.config)
    dtype = getattr(torch, DTYPE_NAMES[case.base_dtype])
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype, local_files_only=True)
    adapted = peft.PeftModel.from_pretrained(model, adapter, autocast_adapter_dtype=False)
    layers = {
        name.removeprefix("base_model.model."): module
        for name, module in adapted.named_modules()
        if hasattr(module, "lora_A")
    }
    assert layers.keys() == case.ranks.keys()
    scales = {name: module.scaling["default"] for name, module in layers.items()}
    ranks = {name: module.r["default"] for name, module in layers.items()}
    merged = adapted.merge_and_unload(safe_merge=True).state_dict()
    weights = {name: merged[f"{name}.weight"].float().numpy().astype("<f4").tobytes() for name in layers}
    return {
        "ranks": ranks,
        "scales": scales,
        "float32": {name: base64.b64encode(raw).decode() for name, raw in weights.items()},
    }


def main() -> None:
    found: dict[str, Any] = {
        "versions": {
            "peft": peft.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "pattern_keys": [[get_pattern_key(keys, name) for name in PATTERN_NAMES] for keys in PATTERN_KEYS],
        "cases": {},
    }
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found["cases"][name] = record_case(case, Path(folder))
    RECORD.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
