"""Adapters of another base whose shapes fit, over commands and the REST API: added, served, and warned of."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.bad_input.conftest import Api, api
from tests.fingerprint.small_adapters import write_adapter
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.test_variant_register import VARIANTS, add, base, command, empty

__all__ = ["api", "base", "command", "empty", "iserve"]  # fixtures


def test_an_adapter_of_another_base_with_equal_shapes_is_added_and_warned_of(
    command: Callable[..., Done], api: Api, base: Path, tmp_path: Path, golden: Golden
) -> None:
    other = write_adapter(tmp_path / "other", base_model_name_or_path="owner/another-base")
    own = write_adapter(tmp_path / "own", lora_alpha=32)  # of example/base, which the folder is called
    done = command("variant", "add", "style", "--base", base, other)
    assert done.code == 0
    golden("variant", done.err.replace(str(base), "BASE"))
    warning = api.ask("GET", f"{VARIANTS}/style")[1]["base_warning"]
    assert done.err == f"iserve: {warning}\n"
    assert warning in " ".join(command("variant", "show", "style").out.split())
    assert command("variant", "show", "style", "--json").document["base_warning"] == warning
    assert add(api, base, other, "again")["base_warning"] == warning
    replaced = command("variant", "add", "style", "--base", base, own, "--replace")
    assert (replaced.code, replaced.err) == (0, "")
    assert "warning" not in command("variant", "show", "style").out
    assert api.ask("GET", f"{VARIANTS}/style")[1]["base_warning"] is None
    assert add(api, base, own, "own")["base_warning"] is None
