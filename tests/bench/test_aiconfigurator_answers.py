"""AIConfigurator is asked through a script that runs in its own environment, where nothing of this project is."""

from __future__ import annotations

import json
from pathlib import Path

from fingerprint.config import DeploymentConfig, Workload
from tests.bench.aiconfigurator_answers import question
from tests.bench.aiconfigurator_choice import Question
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


def test_a_checkpoint_is_the_models_own_but_for_what_is_asked_in_its_place() -> None:
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "source": "s"}
    plain = Question(model="m", architecture=None, weights="16bit", limits_ms={})
    shape = Question(model="m", architecture="LlamaForCausalLM", weights="fp8", limits_ms={})
    assert plain.checkpoint(own) == {key: value for key, value in own.items() if key != "source"}
    told = shape.checkpoint(own)
    assert (told["architectures"], told["model_type"], told["hidden_size"]) == (
        ["LlamaForCausalLM"],
        "llama",
        4096,
    )
    assert told["quantization_config"]["quant_method"] == "fp8"  # type: ignore[index]
