"""Names of a base, against what adapters say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from iserve.base_names import other_base_warning
from tests.golden_words import Golden


def base(folder: Path, **config: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return folder


@pytest.mark.parametrize(
    "trained_on",
    [
        None,
        "meta-llama/Llama-3.1-8B",
        "unsloth/llama-3.1-8b",  # the same name at another owner
        "/somewhere/else/Llama-3.1-8B/",
        "/cache/models--meta-llama--Llama-3.1-8B/snapshots/0123",
    ],
)
@pytest.mark.parametrize("kind", ["hub id", "folder", "hub's cache", "registered", "stated"])
def test_a_base_by_any_of_its_names_is_no_other(tmp_path: Path, trained_on: str | None, kind: str) -> None:
    named, folder, config = {
        "hub id": ("meta-llama/Llama-3.1-8B", tmp_path / "x", {}),
        "folder": (str(tmp_path / "Llama-3.1-8B"), tmp_path / "Llama-3.1-8B", {}),
        "hub's cache": ("chat", tmp_path / "models--meta-llama--Llama-3.1-8B" / "snapshots" / "0", {}),
        "registered": ("llama-3.1-8b", tmp_path / "x", {}),
        "stated": ("chat", tmp_path / "x", {"_name_or_path": "meta-llama/Llama-3.1-8B"}),
    }[kind]
    assert other_base_warning(trained_on, named, base(folder, **config)) is None


def test_another_one_is_warned_of(tmp_path: Path, golden: Golden) -> None:
    folder = base(tmp_path / "Llama-3.1-8B", _name_or_path="meta-llama/Llama-3.1-8B")
    warning = other_base_warning("meta-llama/Llama-3.1-8B-Instruct\x1b[31m", "chat", folder)
    assert warning is not None
    assert "\x1b" not in warning
    golden("variant", warning)


def test_a_base_that_has_gone_has_its_names(tmp_path: Path) -> None:
    assert other_base_warning("org/chat", "chat", tmp_path / "none") is None
    assert other_base_warning("org/other", "chat", tmp_path / "none") is not None
