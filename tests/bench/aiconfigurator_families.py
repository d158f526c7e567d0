"""Writes the points of whole models on vLLM 0.33 for ``tests.bench.aiconfigurator_static``, which answers them.

    python -m tests.bench.aiconfigurator_families OUT
    python tests/bench/aiconfigurator_static.py --configs OUT/configs.json --points OUT/points.json \
        --json tests/bench/results/aiconfigurator_families.json.gz

The second command runs in AIConfigurator's own environment. Configs are the public ones; where no public one is
kept, the shared reference data's (``$ISERVE_REFERENCE_DATA``).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.bench.accuracy import truths
from tests.bench.accuracy_families import NEWEST, recordings_of
from tests.bench.accuracy_measure import OUTPUT, Recorded
from tests.bench.aiconfigurator_static import Point
from tests.bench.family_configs import PUBLIC


def points_of(recorded: Recorded, model: str) -> list[Point]:
    """Return the points of a whole model, named as its configuration is."""
    return [
        Point(
            model=model,
            system=recorded.profile.machine.device.name.replace("-", "_"),
            backend="vllm",
            mode="static",
            tp=recorded.tp,
            pp=recorded.pp,
            weights=recorded.weights,
            kv="16bit",
            batch=truth.batch,
            input_tokens=truth.input_tokens,
            output_tokens=OUTPUT,
        )
        for truth in truths(recorded)
    ]


def public_configs() -> dict[str, dict[str, Any]]:
    """Return config.json objects by model; those of the text part alone are named as the whole model is."""
    found: dict[str, dict[str, Any]] = {}
    if shared := os.environ.get("ISERVE_REFERENCE_DATA"):
        found |= json.loads((Path(shared) / "reference/model-configs.json").read_text())
    kept: Mapping[str, Any] = json.loads(PUBLIC.read_text())["models"]
    return found | {name.removesuffix(" (text)"): dict(model["config"]) for name, model in kept.items()}


def main(argv: list[str]) -> None:
    out, configs = Path(argv[0]), public_configs()
    by_name = {name.rpartition("/")[2]: name for name in configs}
    recorded = [one for folder in NEWEST for one in recordings_of(folder) if not one.expert_parallel]
    points = [point for one in recorded for point in points_of(one, by_name[one.model])]
    out.mkdir(parents=True, exist_ok=True)
    asked = sorted({point.model for point in points})
    (out / "configs.json").write_text(json.dumps({name: configs[name] for name in asked}))
    (out / "points.json").write_text(json.dumps([asdict(point) for point in points]))
    print(f"{len(points)} points of {len(asked)} models in {out}")


if __name__ == "__main__":
    main(sys.argv[1:])
