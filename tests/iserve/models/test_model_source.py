"""Resolution of a MODEL argument by registered name, directory or config.json."""

from __future__ import annotations

import json
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.errors import ConfigError, NotFoundError, UnavailableError
from iserve.model_source import is_hub_id, resolve
from tests.golden_words import Golden


def unprivileged(what: Callable[[], None]) -> None:
    """Run ``what`` as a user who cannot read everything: in a child process where this one is root."""
    if os.getuid():
        what()
        return
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            what()
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("closed", ["folder", "config.json"])
def test_what_cannot_be_read_is_one_line(config_only: Path, closed: str) -> None:
    """A folder, or its config.json, belongs to another user."""
    for folder in config_only.parents:
        if folder.stat().st_mode & 0o005 != 0o005:  # pytest's own, closed to other users
            folder.chmod(0o755)
    target = config_only if closed == "folder" else config_only / "config.json"
    target.chmod(0)

    def ask() -> None:
        with pytest.raises(ConfigError, match=r"cannot read .*config\.json: Permission denied"):
            resolve(str(config_only), need_weights=False)

    try:
        unprivileged(ask)
    finally:
        target.chmod(0o755)


# --- local ---


def test_a_checkpoint_directory(checkpoint: Path) -> None:
    source = resolve(str(checkpoint))
    assert (source.name, source.directory, source.has_weights) == ("tiny", checkpoint, True)
    assert source.spec.num_layers == 2


def test_a_config_alone_by_directory_or_file(config_only: Path) -> None:
    source = resolve(str(config_only))
    assert (source.name, source.has_weights) == ("shape", False)
    assert resolve(str(config_only / "config.json")) == source


def test_shards_count_as_weights_when_all_are_there(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").rename(checkpoint / "model-1.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert not resolve(str(checkpoint)).has_weights
    shutil.copy(checkpoint / "model-1.safetensors", checkpoint / "model-2.safetensors")
    assert resolve(str(checkpoint)).has_weights


def test_an_index_without_end_is_not_read(checkpoint: Path) -> None:
    """The index's presence counts; loading it reports what is wrong."""
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").touch()
    os.truncate(checkpoint / "model.safetensors.index.json", 2**40)
    assert resolve(str(checkpoint)).has_weights


def test_a_registered_name_comes_before_a_directory(
    checkpoint: Path, config_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(config_only.parent)
    assert resolve("shape").directory == config_only
    source = resolve("shape", {"shape": checkpoint})
    assert (source.name, source.directory) == ("shape", checkpoint)


def test_a_home_folder_is_expanded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert resolve("~/tiny").directory == checkpoint


@pytest.mark.parametrize(
    "name",
    ["", "./nowhere", "/no/where", "a/b/c", "a b", "../x", "a--b/c", "x" * 5000, "a\0b", "~nobody-here/x", "ü"],
)
def test_what_can_be_no_model_is_refused_without_asking_anyone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    with golden.raises("controller", NotFoundError) as caught:
        resolve(name)
    assert len(str(caught.value)) < 500


@given(st.from_regex(r"\A[A-Za-z0-9._/-]{1,12}\Z") | st.sampled_from(["Y.", "a/b-", "a.git", "x" * 96, "x" * 97]))
def test_what_is_taken_for_a_hub_id_is_one_for_the_hubs_client(model: str) -> None:
    """The client would else raise what no caller here expects."""
    from huggingface_hub.utils import validate_repo_id

    if is_hub_id(model):
        validate_repo_id(model)


def test_a_registered_directory_that_is_gone_is_named(tmp_path: Path, golden: Golden) -> None:
    with golden.raises("controller", NotFoundError):
        resolve("mine", {"mine": tmp_path / "gone"})


def test_a_file_that_is_no_config_is_refused(checkpoint: Path, golden: Golden) -> None:
    with golden.raises("controller", NotFoundError):
        resolve(str(checkpoint / "model.safetensors"))


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_an_absurd_config_is_refused(config_only: Path, golden: Golden) -> None:
    file = config_only / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": -16}))
    with golden.raises("controller", ConfigError):
        resolve(str(config_only))


@pytest.mark.parametrize(
    "model",
    [
        "iserve-dmo",
        "nope",
        "owner/nope",
    ],
)
def test_models_that_are_here_are_named_for_another(
    monkeypatch: pytest.MonkeyPatch, model: str, golden: Golden
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    registered = {"iserve-demo": Path("/nowhere"), "chat": Path("/nowhere")}
    with pytest.raises(UnavailableError) as caught:
        resolve(model, registered)
    golden("controller", str(caught.value))
