"""Folders that a caller may name: the command line of this home any, an API key those of ISERVE_MODEL_FOLDERS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from fingerprint.codec import to_builtins
from fingerprint.errors import NotFoundError
from fingerprint.truncate import generate_dummy
from iserve.controller.folder_access import ANYWHERE, Reach
from iserve.demo import demo_model_path
from tests.bad_input.conftest import TOKEN, Api
from tests.bad_input.test_routes import bodies, filled, routes_of
from tests.iserve.test_quality_kept import of_model

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 4096,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole one, somewhere else on the machine."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "shape").mkdir()
    (folder / "shape" / "config.json").write_text(json.dumps(CONFIG))
    generate_dummy(folder / "shape", folder / "secret-model", 2)
    return folder / "secret-model"


@pytest.fixture(scope="module")
def inside(api: Api, checkpoint: Path) -> Path:
    """The same, where API keys may name models."""
    shutil.copytree(checkpoint, api.folder / "good")
    return api.folder / "good"


def requests(model: str) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
    """Every request of the API that names a model by a path."""
    wish = {"model": model, "gpus": "a6000:1"}
    yield "POST", "/api/v1/models", {"name": "theirs", "directory": model}
    yield "POST", "/api/v1/profiles", {"model": model, "max_seconds": 1}
    yield "POST", "/api/v1/plans", wish
    yield "POST", "/api/v1/plans/launch", wish
    yield "POST", "/api/v1/deployments", {"model": model}
    yield "POST", "/api/v1/verifications", {"model": model}
    yield "POST", "/api/v1/quality", to_builtins(of_model(name=model, variant_hash=None))
    yield "PATCH", "/api/v1/deployments/no-such", {"model": model}


def test_every_route_that_takes_a_model_is_tried_here(api: Api) -> None:
    bodied = bodies(api.app)
    named = {(m, path) for m, path, schema in bodied if schema["properties"].keys() & {"model", "directory"}}
    assert {(m, filled(path)) for m, path in named} == {(m, path) for m, path, _ in requests("m")}
    assert ("DELETE", "/api/v1/verifications") in set(routes_of(api.app))  # its model is in the query: below


def odd_paths(elsewhere: Path, allowed: Path) -> dict[str, str]:
    """Ways out of the allowed folder."""
    (allowed / "good").mkdir(exist_ok=True)
    ways = {
        "absolute": str(elsewhere),
        "its config": str(elsewhere / "config.json"),
        "up": str(allowed / ".." / elsewhere.parent.name / elsewhere.name),
        "up from a model": f"{allowed}/good/../../{elsewhere.parent.name}/{elsewhere.name}",
        "relative": "../" * 40 + str(elsewhere)[1:],
        "relative, two up": "../../etc",
        "the root": "/",
        "a neighbour of that name": f"{allowed}-not/model",
        "a device": "/dev/zero",
        "a process": "/proc/self/root" + str(elsewhere),
        "home": "~",
        "nobody's home": "~no-such-user/model",
        "NUL": f"{elsewhere}\0",
        "NUL inside": f"{allowed}/good\0/../../etc",
        "long": "/" + "a/" * 2000,
        "a long name": f"{allowed}/{'x' * 300}",
        "no such": "/no/such/folder",
        "escape": "/tmp/\x1b[2J",
    }
    (allowed / "linked").unlink(missing_ok=True)
    (allowed / "linked").symlink_to(elsewhere)
    ways["a linked folder"] = str(allowed / "linked")
    ways["below a linked folder"] = str(allowed / "linked" / "config.json")
    for name, file in (("shard", "model.safetensors"), ("config", "config.json"), ("more", "tokenizer.json")):
        folder = allowed / f"linked-{name}"
        if not folder.exists():
            shutil.copytree(elsewhere, folder)
            (folder / file).unlink(missing_ok=True)
            (folder / file).symlink_to(elsewhere / file)
        ways[f"a linked {name}"] = str(folder)
    return ways


def test_no_way_leads_out_for_an_api_key(api: Api, checkpoint: Path, inside: Path) -> None:
    for way, model in odd_paths(checkpoint, api.folder).items():
        for method, path, body in requests(model):
            status, answer = api.ask(method, path, body, token=api.keys["admin"])
            assert status in {400, 404}, (way, path, answer)
            assert answer["error"] in {"NotFoundError", "BadInputError"}, (way, path, answer)
            assert "\x1b" not in answer["message"]
            assert "\0" not in answer["message"]
        if "\0" not in model:
            query = urlencode({"model": model})
            status = api.ask("DELETE", f"/api/v1/verifications?{query}", token=api.keys["admin"])[0]
            assert status in {400, 404}, way
    assert api.controller.deployments() == ()
    assert [model.name for model in api.controller.models()] == ["iserve-demo"]


def test_what_is_refused_is_refused_alike_whether_it_exists_or_not(api: Api, checkpoint: Path) -> None:
    """An API key cannot be used to look around on this machine."""

    def told(model: str) -> str:
        _, answer = api.ask("POST", "/api/v1/plans", {"model": model}, token=api.keys["admin"])
        message: str = answer["message"]
        return message.replace(repr(model), "MODEL")

    there = told(str(checkpoint))
    assert "ISERVE_MODEL_FOLDERS" in there
    for model in ("/no/such/folder", "/etc/passwd", "/root", "/etc/shadow", str(checkpoint / "config.json")):
        assert told(model) == there


def test_within_the_folders_an_api_key_may_do_all(api: Api, inside: Path) -> None:
    token = api.keys["admin"]
    plan = {"model": str(inside), "gpus": "a6000:1"}
    assert api.ask("POST", "/api/v1/plans", plan, token=token)[0] == 201
    assert (
        api.ask("POST", "/api/v1/plans", plan | {"model": f"{inside}/../good/config.json"}, token=token)[0] == 201
    )
    linked = api.folder / "linked-inside"
    linked.mkdir(exist_ok=True)
    for file in inside.iterdir():
        if not (linked / file.name).exists():
            (linked / file.name).symlink_to(file)  # as the hub's cache does
    assert api.ask("POST", "/api/v1/plans", plan | {"model": str(linked)}, token=token)[0] == 201
    registered = api.ask("POST", "/api/v1/models", {"name": "theirs", "directory": str(inside)}, token=token)
    assert registered[0] == 201
    assert api.ask("POST", "/api/v1/plans", plan | {"model": "theirs"}, token=token)[0] == 201
    assert api.ask("DELETE", "/api/v1/models/theirs", token=token)[0] == 204


def test_the_homes_token_names_any_folder_and_keys_may_then_name_what_it_registered(
    api: Api, checkpoint: Path
) -> None:
    plan = {"model": str(checkpoint), "gpus": "a6000:1"}
    assert api.ask("POST", "/api/v1/plans", plan, token=TOKEN)[0] == 201
    assert api.ask("POST", "/api/v1/models", {"name": "ours", "directory": str(checkpoint)}, token=TOKEN)[0] == 201
    assert api.ask("POST", "/api/v1/plans", plan | {"model": "ours"}, token=api.keys["admin"])[0] == 201
    assert api.ask("POST", "/api/v1/plans", plan | {"model": None}, token=api.keys["admin"])[0] == 201  # the demo
    assert api.ask("DELETE", "/api/v1/models/ours")[0] == 204


def test_without_the_setting_an_api_key_names_no_folder_at_all(checkpoint: Path) -> None:
    for model in (str(checkpoint), str(demo_model_path()), "/"):
        with pytest.raises(NotFoundError, match="ISERVE_MODEL_FOLDERS"):
            Reach(()).check(model)
        ANYWHERE.check(model)
    Reach(()).check("owner/name-of-the-hub")
    Reach(()).check("registered", {"registered"})
    Reach(()).check(None)


def test_an_allowed_folder_that_is_a_link_itself_is_what_it_leads_to(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(checkpoint.parent)
    reach = Reach([tmp_path / "models"])
    reach.check(str(tmp_path / "models" / checkpoint.name))
    reach.check(str(checkpoint))


def test_a_folder_of_too_many_files_is_not_looked_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iserve.controller.folder_access._MOST_ENTRIES", 3)
    (tmp_path / "m").mkdir()
    for number in range(3):
        (tmp_path / "m" / str(number)).touch()
    Reach([tmp_path]).check(str(tmp_path / "m"))
    (tmp_path / "m" / "3").touch()
    with pytest.raises(NotFoundError):
        Reach([tmp_path]).check(str(tmp_path / "m"))
