"""AIConfigurator is asked through a script that runs in its own environment, where nothing of this project is."""

from __future__ import annotations

import json
from pathlib import Path

from fingerprint.config import DeploymentConfig, Workload
from tests.bench.aiconfigurator_answers import question
from tests.bench.aiconfigurator_static import Point, read_points


def test_what_is_asked_is_what_the_script_reads(tmp_path: Path) -> None:
    config, workload = DeploymentConfig(tp=2, engine="vllm"), Workload(8, 512, 65, longest_tokens=4096)
    asked = tmp_path / "points.json"
    asked.write_text(json.dumps([question("static", ("m", "h200_sxm", "vllm", config, workload))]))
    assert read_points(asked) == [
        Point(
            model="m",
            system="h200_sxm",
            backend="vllm",
            mode="static",
            tp=2,
            pp=1,
            weights="16bit",
            kv="16bit",
            batch=8,
            input_tokens=512,
            output_tokens=65,
        )
    ]
