"""``--traffic-trace``: the traffic of a plan taken from a trace, by the command and by the REST API's body."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from iserve.api_types import PlanBody
from iserve.cli.app import make_app
from iserve.cli.groups import request_of
from planner.intent import Traffic
from planner.rate_profile import moving_rate
from tests.golden_words import Golden
from traces.trace_argument import requests_of
from traces.traffic import traffic_of

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "torch_dtype": "float16",
}  # fmt: skip
TRACE = "synthetic:azure-code"


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    return traffic_of(requests_of(TRACE))


def test_the_body_says_what_the_trace_says(traffic: Traffic) -> None:
    body = request_of(PlanBody, arrivals=TRACE, rate_per_s=1.0)
    assert len(traffic.relative_rates) > 1
    assert body.options(default_policy="hybrid", load_threshold=0.5).intent.traffic == traffic


def planned(folder: Path, *more: str) -> dict[str, object]:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    asked = ["plan", str(folder), "--gpus", "h200:1", "--rate", "4", "--batch", "32", "--slo", "ttft=9,e2e=90"]
    done = CliRunner().invoke(make_app(), [*asked, "--percentile", "50", "--json", *more], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    served = json.loads(done.stdout)["load_forecast"]
    assert isinstance(served, dict)
    return served


def test_a_plan_tells_the_levels_and_a_larger_risk(
    tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ISERVE_HOME", str(tmp_path / "home"))
    steady, moving = planned(tmp_path), planned(tmp_path, "--traffic-trace", TRACE)
    assert steady["rate_levels"] == []
    levels = moving_rate(traffic.relative_rates).levels
    assert moving["rate_levels"] == [
        {"share": level.share, "relative_rate": level.relative_rate} for level in levels
    ]
    assert moving["burstiness"] == traffic.burstiness
    assert moving["miss_probability"] >= steady["miss_probability"]  # type: ignore[operator]


@pytest.mark.parametrize(
    "options",
    [
        ["--traffic-trace", TRACE],
        ["--traffic-trace", TRACE, "--rate", "1", "--burstiness", "2"],
        ["--traffic-trace", "nowhere.csv", "--rate", "1"],
    ],
)
def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, options: list[str], golden: Golden) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    done = CliRunner().invoke(make_app(), ["plan", str(tmp_path), "--gpus", "h200:1", *options])
    assert done.exit_code != 0
    golden("controller", " ".join((done.output + str(done.exception)).replace("│", " ").split()))
