"""World files: what they state is read whole, and what is wrong is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fingerprint.errors import ConfigError, NotFoundError
from iserve.evaluation.world import Information, World
from iserve.evaluation.world_file import read_world, world_of, world_schema
from tests.iserve.evaluation.worlds import world_values

ROOT = Path(__file__).parents[3]
WORLDS = sorted((ROOT / "notebooks" / "worlds").rglob("*.yaml"))


def test_defaults_are_the_documented_ones() -> None:
    world = world_of(world_values())
    assert world.information is Information.NONE
    assert (world.truth.sharing, world.truth.all_reduce, world.truth.startup_s) == (1.1, 1.0, 60.0)
    assert (world.slo_multiple, world.guard_multiple) == (5.0, 3.0)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        pytest.param({"horizon": 3}, "horizon_s", id="unknown field"),
        pytest.param({"truth": {"share": 1.2}}, "sharing", id="unknown field within"),
        pytest.param({"models": [{"name": "a", "config": {}, "deploy": 1}]}, "deploy_at_s", id="within a list"),
        pytest.param({"cluster": "abacus:4"}, "abacus", id="unknown GPU"),
        pytest.param({"cluster": "h200:0"}, "h200:0", id="no GPU"),
        pytest.param({"models": []}, "models", id="no models"),
        pytest.param({"models": [{"name": "a"}]}, "config", id="a model without a shape"),
        pytest.param({"models": [{"name": "a", "config": {}}] * 2}, "name", id="a name twice"),
        pytest.param({"horizon_s": -1}, "horizon_s", id="below 0"),
        pytest.param({"horizon_s": float("nan")}, "horizon_s", id="not a number"),
        pytest.param({"seeds": []}, "seeds", id="no seeds"),
        pytest.param({"intents": ["min-energy"]}, "min-energy", id="an intent without a metric"),
        pytest.param({"requests": {"rate_per_s": 1}}, "trace", id="requests of nothing"),
        pytest.param({"requests": {"trace": "a", "rates_per_s": {"chat": 1}}}, "rates_per_s", id="trace and law"),
        pytest.param(
            {"requests": {"lengths": {"input_mean_tokens": 9, "output_mean_tokens": 9}}},
            "rate_per_s",
            id="no rate",
        ),
        pytest.param(
            {
                "requests": {
                    "lengths": {"input_mean_tokens": 9, "output_mean_tokens": 9},
                    "rate_per_s": 1,
                    "shares": "zipf:2000",
                }
            },
            "shares: the exponent",
            id="all of one model",
        ),
    ],
)
def test_wrong_world_is_one_line(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        world_of(world_values(**changed), "w.yaml")
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[", "a: b: c", "\x00", "- 1", "3", ""])
def test_file_that_is_no_world_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "w.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_world(path)
    assert "\n" not in str(caught.value)


def test_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        read_world(tmp_path / "none.yaml")


@pytest.mark.parametrize("path", WORLDS, ids=lambda path: path.stem)
def test_recorded_worlds_keep_the_schema(path: Path) -> None:
    assert isinstance(read_world(path), World)
    jsonschema.validate(yaml.safe_load(path.read_text()), world_schema())


def test_schema_refuses_an_unknown_field() -> None:
    jsonschema.validate(world_values(), world_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(world_values(horizon=1), world_schema())


def test_published_schema_is_the_codes() -> None:
    published = json.loads((ROOT / "docs" / "world.schema.json").read_text())
    assert published == json.loads(json.dumps(world_schema()))
