"""Variants and deployments of their own, in this process: which of them serves, and what removes both."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fingerprint.codec import to_json
from fingerprint.errors import ConflictError
from iserve.api_types import DeployBody
from iserve.merged_keys import merged_key
from iserve.registered_merges import merge_registered
from iserve.state.store import DeploymentRow
from tests.bad_input.conftest import Api, api
from tests.fingerprint.small_adapters import write_adapter
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.test_variant_register import VARIANTS, add, base, command, deploy, empty, routes, worker

__all__ = ["api", "base", "command", "deploy", "empty", "iserve"]  # fixtures

Own = Callable[[dict[str, Any]], DeploymentRow]


@pytest.fixture
def own(api: Api) -> Iterator[Own]:
    """``own(variant)``: its deployment of its own, just accepted."""
    store = api.controller.store
    made = []

    def accept(variant: dict[str, Any]) -> DeploymentRow:
        key = merged_key(variant["content_hash"], variant["base_directory"])
        model = str(api.controller.settings.merged_folder / key)
        made.append(store.add_deployment(variant["name"], to_json(DeployBody(model=model, name=variant["name"]))))
        return made[-1]

    yield accept
    for row in made:
        store.delete_deployment(row.id)


def served(api: Api) -> tuple[dict[str, list[str]], list[str], str | None]:
    """Variants by route, the deployments that ``variant show`` names, and why none serves."""
    shown = api.ask("GET", f"{VARIANTS}/style")[1]
    found = {name: [one.name for one in route.variants] for name, route in routes(api).items()}
    return found, shown["deployments"], shown["why_not_served"]


@pytest.mark.parametrize("phase", ["accepted", "profiling", "planning", "launching", "refused", "failed"])
def test_the_base_serves_it_until_its_own_deployment_does(
    api: Api, base: Path, tmp_path: Path, deploy: Callable[..., None], own: Own, phase: str
) -> None:
    deploy("chat", worker(0, base))
    row, store = own(add(api, base, write_adapter(tmp_path / "a"))), api.controller.store
    workers = to_json((worker(1, tmp_path, slots=0),)) if phase == "launching" else None
    store.update_deployment(row.id, phase=phase, workers=workers)
    assert served(api) == ({"chat": ["style"]}, ["chat"], None)
    store.update_deployment(row.id, phase="ready", workers=to_json((worker(1, tmp_path, slots=0),)))
    assert served(api) == ({"chat": [], "style": []}, ["style"], None)
    store.update_deployment(row.id, phase="scaled-to-zero")
    assert served(api) == ({"chat": [], "style": []}, ["style"], None)
    store.update_deployment(row.id, desired="removed")
    assert served(api) == ({"chat": ["style"]}, ["chat"], None)


def test_a_person_sees_its_name_and_its_base_for_the_folder(
    api: Api, base: Path, tmp_path: Path, own: Own, command: Callable[..., Done]
) -> None:
    """In lists, plans and events; as JSON the folder is still the model."""
    variant = add(api, base, write_adapter(tmp_path / "a"))
    row, controller = own(variant), api.controller
    (folder,) = (Path(one["model"]) for one in api.ask("GET", "/api/v1/deployments")[1])
    shutil.copytree(base, folder)
    source = controller.resolve(str(folder))
    assert (source.name, source.title) == ("style", f"style, merged into {variant['base']}")
    assert source.argument == str(folder)  # of a command to type
    for words in (("ps",), ("show", "style")):
        said = " ".join(command(*words).out.split())
        assert "style, merged into" in said  # the base's path takes several lines of a table
        assert folder.name not in said
    shown = api.ask("GET", "/api/v1/deployments/style")[1]
    assert (shown["model"], shown["variant"], shown["base"]) == (str(folder), "style", variant["base"])
    controller.variants.remove("style")
    assert row.id in {one.id for one in controller.store.deployments()}  # which is being removed
    shown = api.ask("GET", "/api/v1/deployments/style")[1]
    assert (shown["variant"], shown["base"]) == ("style", None)
    assert folder.name not in command("ps").out
    assert controller.resolve(str(folder)).title == folder.name  # of a folder that no variant is known to be in


def test_what_is_no_merge_is_shown_as_it_was_given(api: Api, base: Path, deploy: Callable[..., None]) -> None:
    deploy("chat", worker(0, base))
    (shown,) = api.ask("GET", "/api/v1/deployments")[1]
    assert (shown["variant"], shown["base"]) == (None, None)
    source = api.controller.resolve(str(base))
    assert source.title == source.name == base.name


def test_where_no_base_serves_it_the_phase_of_its_own_deployment_is_said(
    api: Api, base: Path, tmp_path: Path, own: Own, golden: Golden
) -> None:
    row = own(add(api, base, write_adapter(tmp_path / "a")))
    found, deployments, why = served(api)
    assert (found, deployments) == ({}, [])
    golden("variant", why or "", "accepted")
    workers = to_json((worker(1, tmp_path, slots=0),))
    api.controller.store.update_deployment(row.id, phase="launching", workers=workers)
    found, deployments, why = served(api)
    assert (found, deployments) == ({"style": []}, [])  # its requests wait, as those of any deployment
    golden("variant", why or "", "launching")


def test_what_is_merged_is_loaded_nowhere_and_costs_no_slot(
    api: Api, base: Path, tmp_path: Path, own: Own, command: Callable[..., Done], golden: Golden
) -> None:
    row = own(add(api, base, write_adapter(tmp_path / "a")))
    workers = to_json((worker(1, base, slots=0),))
    api.controller.store.update_deployment(row.id, phase="ready", workers=workers)
    shown = command("variant", "show", "style").out.splitlines()
    assert not [line for line in shown if line.startswith("costs")]
    golden("variant", next(line for line in shown if line.startswith("loaded")))
    assert command("variant", "ls").out.split()[-1] == "merged"


@pytest.fixture
def unmerged(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        pytest.fail("nothing is merged before what was asked for is checked")

    monkeypatch.setattr("iserve.registered_merges.merge_registered", fail)


@pytest.mark.usefixtures("unmerged")
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--scale-to-zero", "-5"), 2, "--scale-to-zero"),
        (("--reject-late",), 2, "--reject-late"),
        (("--engine", "torch", "--engine-version", "9.9.9"), 1, "9.9.9"),
        (("--engine", "vllm", "--engine-version", "9.9.9"), 1, "9.9.9"),
        (("--engine", "vllm"), 1, "vllm"),
    ],
)
def test_what_cannot_be_is_found_before_the_merge(
    api: Api,
    base: Path,
    tmp_path: Path,
    command: Callable[..., Done],
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    add(api, base, write_adapter(tmp_path / "a"))
    done = command("variant", "deploy", "style", *words)
    assert done.code == code
    assert said in done.err


@pytest.fixture
def at_home(api: Api, command: Callable[..., Done], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command in the controller's home."""
    monkeypatch.setenv("ISERVE_HOME", str(api.controller.settings.home))
    return command


def test_a_merge_whose_deployment_is_refused_is_removed(
    api: Api, base: Path, tmp_path: Path, at_home: Callable[..., Done]
) -> None:
    """Refused by the controller, which finds the release at no engine."""
    variant = add(api, base, write_adapter(tmp_path / "a"))
    folder = api.controller.settings.merged_folder
    asked = ("variant", "deploy", "style", "--engine-version", "9.9.9")
    done = at_home(*asked)
    assert (done.code, list(folder.iterdir())) == (1, [])
    store = api.controller.store
    key = merged_key(variant["content_hash"], variant["base_directory"])
    row = store.add_deployment("style", to_json(DeployBody(model=str(folder / key), name="style")))
    assert at_home(*asked).code == 1
    assert [one.name for one in folder.iterdir()] == [key]  # of a deployment that is there
    store.delete_deployment(row.id)
    api.controller.variants.drop_merged()
    assert list(folder.iterdir()) == []


def test_models_that_are_expected_and_code_are_named_as_deploy_does(
    api: Api,
    base: Path,
    tmp_path: Path,
    at_home: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add(api, base, write_adapter(tmp_path / "a"))
    write_adapter(tmp_path / "next")
    monkeypatch.chdir(tmp_path)
    posted: list[dict[str, Any]] = []

    def refuse(body: dict[str, Any], *_: object, **__: object) -> None:
        posted.append(body)
        raise ConflictError("not now")

    monkeypatch.setattr("iserve.cli.deploy.accepted_by", refuse)
    done = at_home("variant", "deploy", "style", "--expected-model", "./next=1", "--trust-remote-code")
    assert "--trust-remote-code" in done.err
    ((body,),) = (posted,)
    assert [one["model"] for one in body["expected_models"]] == [str(tmp_path / "next")]


@pytest.mark.parametrize(
    ("before", "change"),
    [(True, "replace"), (False, "replace"), (True, "remove"), (False, "remove"), (False, "edit")],
)
def test_what_changes_during_a_merge_is_not_deployed(
    api: Api,
    base: Path,
    tmp_path: Path,
    at_home: Callable[..., Done],
    monkeypatch: pytest.MonkeyPatch,
    before: bool,
    change: str,
    golden: Golden,
) -> None:
    """Before the merge, while its lock is awaited say, or after it."""
    add(api, base, write_adapter(tmp_path / "a"))

    def happen() -> None:
        if change == "replace":
            add(api, base, write_adapter(tmp_path / "b", lora_alpha=32), replace=True)
        elif change == "remove":
            assert api.ask("DELETE", f"{VARIANTS}/style")[0] == 204
        else:
            (base / "config.json").write_text((base / "config.json").read_text() + " ")

    def merge(*given: Any, **more: Any) -> Any:
        if before:
            happen()
        done = merge_registered(*given, **more)
        if not before:
            happen()
        return done

    monkeypatch.setattr("iserve.registered_merges.merge_registered", merge)
    done = at_home("variant", "deploy", "style", "--engine", "torch")
    assert done.code == 1
    line = done.err.strip().splitlines()[-1].replace(str(base), "BASE")
    golden("variant", re.sub(r"/\S+/merged/[0-9a-f]{64}", "HOME/merged/KEY", line))
    assert list(api.controller.settings.merged_folder.iterdir()) == []
    assert api.controller.store.deployments() == ()
