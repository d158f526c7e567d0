"""Record what vLLM's own functions keep of a sequence on each TP rank, for every architecture with a state.

    python -m tests.fingerprint.record_state_sizes VLLM_WHEEL

Configs are those of the family truths: the config class's defaults, and public models'.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fingerprint import family_truths
from tests.fingerprint.record_family_truths import COMPLETED, model_class
from tests.fingerprint.vllm_state_sizes import VllmWheel

RECORD = Path(__file__).parent / "recorded" / "state_sizes_by_tp.json"
DEGREES = (1, 2, 4, 8, 16)
# MiniMax-Text-01. vLLM dropped its class after 0.23.0, whose functions of lightning attention are those of today.
HEADS, HEAD_DIM = 64, 128


def by_degree(wheel: VllmWheel, architecture: str, fields: Mapping[str, Any] | None) -> dict[str, int]:
    """Return the bytes of a rank by TP degree, of those degrees that vLLM accepts."""
    _, config_class = model_class(architecture, wheel)
    if fields is None:
        config = config_class(**COMPLETED.get(architecture, {}))
    else:
        config = config_class.from_dict(copy.deepcopy(dict(fields)))
    found = {}
    for tp in DEGREES:
        try:
            found[str(tp)] = wheel.state_bytes(architecture, config, tp)
        except ValueError:
            continue
    return {tp: size for tp, size in found.items() if size is not None}


def main() -> None:
    """Record all."""
    wheel = VllmWheel(Path(sys.argv[1]))
    defaults = [a for a in family_truths.recorded() if family_truths.default(a).vllm_state_bytes]
    public = {
        name: entry["config"]
        for name, entry in family_truths.public_models().items()
        if family_truths.public(name).vllm_state_bytes
    }
    document = {
        "source": f"vLLM {Path(sys.argv[1]).name.split('-')[1]}, MambaStateShapeCalculator and its dtypes",
        "defaults": {name: by_degree(wheel, name, None) for name in defaults},
        "lightning": {
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "tp": {str(tp): wheel.linear_attention_bytes(HEADS, HEAD_DIM, tp) for tp in DEGREES},
        },
        "public": {name: by_degree(wheel, c["architectures"][0], c) for name, c in public.items()},
    }
    RECORD.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
