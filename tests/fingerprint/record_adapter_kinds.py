"""Record what PEFT saves of the adapters in ``adapter_kinds``, and what its merge_and_unload makes of them.

    PYTHONPATH=/tmp/peftsite python -m tests.fingerprint.record_adapter_kinds

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

from fingerprint.checkpoint import Checkpoint
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE
from tests.fingerprint.adapter_kinds import CASES, KindCase, encoded, write_record
from tests.fingerprint.small_adapters import DTYPE_NAMES, values, write_base


def load(base: Path, dtype: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        base, dtype=getattr(torch, DTYPE_NAMES[dtype]), local_files_only=True
    )


def write_adapter(case: KindCase, base: Path, folder: Path) -> None:
    """Have PEFT save an adapter all of whose trainable values are given by a formula."""
    kind = peft.IA3Config if case.is_ia3 else peft.LoraConfig
    adapted = peft.get_peft_model(
        load(base, case.dtype), kind(task_type="CAUSAL_LM", **case.config), autocast_adapter_dtype=False
    )
    trainable = [(name, each) for name, each in adapted.named_parameters() if each.requires_grad]
    with torch.no_grad():
        for seed, (_, parameter) in enumerate(sorted(trainable)):
            given = values(tuple(parameter.shape), 5000 + seed) + (
                0.75 if parameter.dim() == 1 or case.is_ia3 else 0
            )
            parameter.copy_(torch.tensor(given))
    adapted.save_pretrained(folder)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"base_model_name_or_path": "example/base"}))


def record_case(case: KindCase, folder: Path) -> dict[str, Any]:
    base, adapter = write_base(folder / "base", case.dtype, **case.base), folder / "adapter"
    write_adapter(case, base, adapter)
    before = {name: tensor.float().clone() for name, tensor in load(base, case.dtype).state_dict().items()}
    adapted = peft.PeftModel.from_pretrained(load(base, case.dtype), adapter, autocast_adapter_dtype=False)
    after = {
        name: tensor.float() for name, tensor in adapted.merge_and_unload(safe_merge=True).state_dict().items()
    }
    assert before.keys() == after.keys()
    saved = Checkpoint.of_file(adapter / WEIGHTS_FILE)
    return {
        "config": json.loads((adapter / CONFIG_FILE).read_text()),
        "adapter": {
            name: [entry.dtype, list(entry.shape), base64.b64encode(saved.read(name)).decode()]
            for name, entry in sorted(saved.tensors.items())
        },
        "merged": {
            name: encoded(after[name].numpy())
            for name in sorted(after)
            if not torch.equal(before[name], after[name])
        },
    }


def main() -> None:
    versions = {"peft": peft.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    found: dict[str, Any] = {"versions": versions, "cases": {}}
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            found["cases"][name] = record_case(case, Path(folder))
    write_record(found)


if __name__ == "__main__":
    main()
