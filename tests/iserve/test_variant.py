"""``iserve variant``: what is said of adapters and merges, and merges that are killed at any moment."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fingerprint.checkpoint import Checkpoint, StoredTensor, stored_tensors
from fingerprint.families import load_spec
from tests.fingerprint.adapter_kinds import CASES, write_kind
from tests.fingerprint.small_adapters import LAYERS, Q0, V1, factors, module_names, write_adapter, write_base
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.waiting import PATIENCE_S

__all__ = ["iserve"]  # a fixture


def test_inspect_says_what_it_is(iserve: Callable[..., Done], tmp_path: Path, golden: Golden) -> None:
    done = iserve(
        "variant", "inspect", write_adapter(tmp_path / "adapter"), "--base", write_base(tmp_path / "base")
    )
    assert done.code == 0
    golden("variant", done.out)


def test_inspect_counts_different_ranks(iserve: Callable[..., Done], tmp_path: Path, golden: Golden) -> None:
    ranks = {Q0: 2, **dict.fromkeys(module_names(["v_proj", "down_proj"]), 4)}
    folder = write_adapter(
        tmp_path / "adapter",
        factors(ranks),
        "BF16",
        rank_pattern={"q_proj": 2},
        target_modules="all-linear",
        base_model_name_or_path=None,
    )
    golden("variant", iserve("variant", "inspect", folder).out)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"use_dora": True, "bias": "all"}, id="more-than-lora"),
        pytest.param({"peft_type": "IA3", "feedforward_modules": []}, id="other-method"),
    ],
)
def test_inspect_says_every_reason(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden, fields: dict[str, object]
) -> None:
    done = iserve("variant", "inspect", write_adapter(tmp_path / "adapter", **fields))
    assert done.code == 0
    golden("variant", done.out)


@pytest.mark.parametrize("case", ["combined", "ia3", "vocabulary"])
def test_inspect_says_what_becomes_a_delta(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden, case: str
) -> None:
    folder = write_kind(tmp_path / "adapter", case)
    base = write_base(tmp_path / "base", **CASES[case].base)
    golden("variant", iserve("variant", "inspect", folder, "--base", base).out)
    document = iserve("variant", "inspect", folder, "--json").document
    assert (document["can_merge"], document["can_serve"], document["becomes_delta"]) == (True, False, True)
    reasons = document["why_not_served"].split("; ")
    assert len(reasons) == len(CASES[case].kinds) + (case == "vocabulary")  # and its lm_head has no slot


def test_inspect_says_why_a_base_does_not_fit(iserve: Callable[..., Done], tmp_path: Path, golden: Golden) -> None:
    base = write_base(tmp_path / "base", quantization_config={"quant_method": "fp8"})
    folder = write_adapter(tmp_path / "adapter", factors({V1: 4}))
    golden("variant", iserve("variant", "inspect", folder, "--base", base).out)


def test_inspect_reads_the_headers_of_a_base_on_the_hub(
    iserve: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that has the config alone; the hub's answer is replaced, the weights are not asked for."""
    base = write_base(tmp_path / "models--owner--base" / "snapshots" / "0123")
    tensors = stored_tensors(base)
    (base / "model.safetensors").unlink()
    monkeypatch.setattr("iserve.model_source.cached_snapshot", lambda _: base)
    monkeypatch.setattr("iserve.hub_tensors.hub_tensors", lambda model, snapshot: tensors)
    adapter = write_adapter(tmp_path / "adapter")
    assert iserve("variant", "inspect", adapter, "--base", "owner/base", "--json").document["can_merge"]
    tensors = {name: StoredTensor("F32", (3, 3)) for name in tensors}
    assert not iserve("variant", "inspect", adapter, "--base", "owner/base", "--json").document["can_merge"]


def test_inspects_document_has_every_module(iserve: Callable[..., Done], tmp_path: Path) -> None:
    document = iserve("variant", "inspect", write_adapter(tmp_path / "adapter"), "--json").document
    assert len(document["modules"]) == 2 * LAYERS
    assert document["modules"][0] == {
        "name": Q0,
        "rank": 4,
        "scale": 2.0,
        "in_features": 16,
        "out_features": 16,
    }
    assert (document["can_merge"], document["can_serve"], document["why_not_merged"]) == (True, True, [])
    assert (document["trained_on"], document["base"]) == ("example/base", None)
    broken = iserve("variant", "inspect", write_adapter(tmp_path / "dora", use_dora=True), "--json").document
    assert (broken["can_merge"], len(broken["why_not_merged"])) == (False, 1)


def test_merge_says_what_it_wrote(iserve: Callable[..., Done], tmp_path: Path, golden: Golden) -> None:
    base, adapter = write_base(tmp_path / "base", files=3), write_adapter(tmp_path / "adapter")
    (adapter / "tokenizer_config.json").write_text("{}\n")  # as the base's
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    done = iserve("variant", "merge", base, adapter, tmp_path / "my model")
    assert done.code == 0
    golden("variant", done.out)
    assert load_spec(tmp_path / "my model") == load_spec(base)
    assert done.err.startswith("merging 0/0  MiB\n")  # on stderr, so that pipes stay clean


def test_merges_document(iserve: Callable[..., Done], tmp_path: Path) -> None:
    base, adapter = write_base(tmp_path / "base"), write_adapter(tmp_path / "adapter")
    done = iserve("variant", "merge", base, adapter, tmp_path / "out", "--json")
    assert done.err == ""
    assert done.document == {
        "folder": str(tmp_path / "out"),
        "base": "base",
        "adapter": str(adapter),
        "trained_on": "example/base",
        "num_merged": 2 * LAYERS,
        "num_tensors": len(Checkpoint.open(base).tensors),
        "num_files": 1,
        "size_bytes": sum(entry.num_bytes for entry in Checkpoint.open(base).tensors.values()),
        "files_not_taken": [],
    }


def test_a_base_is_named_as_every_model(iserve: Callable[..., Done], tmp_path: Path, golden: Golden) -> None:
    """The bundled model by its name; its sizes are not those of the adapter."""
    adapter = write_adapter(tmp_path / "adapter", factors({Q0: 4}))
    said = iserve("variant", "merge", "iserve-demo", adapter, tmp_path / "out").line
    golden("variant", re.sub(r"/\S*/(?=iserve/demo/model)", "SITE/", said))


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("inspect", "no-such-folder"), id="inspect-nothing"),
        pytest.param(("inspect", "owner/name"), id="inspect-hub-id"),
        pytest.param(("inspect", "adapter", "--base", "./no/such/model"), id="inspect-no-base"),
        pytest.param(("merge", "base", "no-such-folder", "out"), id="merge-nothing"),
        pytest.param(("merge", "config-only", "adapter", "out"), id="merge-config-only"),
        pytest.param(("inspect", "adapter", "--base", "config-only"), id="inspect-config-only"),
        pytest.param(("merge", "base", "base", "out"), id="merge-whole-model"),
        pytest.param(("merge", "base", "adapter", "base"), id="merge-into-base"),
        pytest.param(("merge", "base", "adapter", "adapter/adapter_config.json/out"), id="merge-below-a-file"),
        pytest.param(("merge", "base", "adapter", "a\x1b[31mb"), id="merge-to-control-characters"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    iserve: Callable[..., Done],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Golden,
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    base = write_base(tmp_path / "base")
    write_adapter(tmp_path / "adapter")
    (tmp_path / "config-only").mkdir()
    (tmp_path / "config-only" / "config.json").write_bytes((base / "config.json").read_bytes())
    before = sorted(tmp_path.rglob("*"))
    golden("variant", iserve("variant", *words).line)
    assert sorted(tmp_path.rglob("*")) == before


_PAUSED = """
import sys, time
import fingerprint.safetensors_writer as writer, fingerprint.derived_checkpoint as derived
from iserve.cli import main

module, name, calls = {module}, {name!r}, iter(range(100))
real = getattr(module, name)

def paused(*arguments, **more):
    if next(calls) == {call}:
        print("paused", flush=True)
        time.sleep(10_000)
    return real(*arguments, **more)

setattr(module, name, paused)
sys.argv = ["iserve", "variant", "merge", *{words!r}]
main()
"""


@pytest.mark.parametrize(
    ("module", "name", "call", "end"),
    [
        pytest.param("derived", "encode_floats", 0, signal.SIGKILL, id="in-a-file"),
        pytest.param("derived", "write_safetensors", 2, signal.SIGKILL, id="before-the-last-file"),
        pytest.param("derived", "copy_companions", 0, signal.SIGKILL, id="before-the-tokenizer"),
        pytest.param("writer", "_appear", 0, signal.SIGKILL, id="before-its-name"),
        pytest.param("derived", "encode_floats", 0, signal.SIGINT, id="by-ctrl-c"),
    ],
)
def test_a_merge_that_is_ended_leaves_no_checkpoint_and_can_be_run_again(
    iserve: Callable[..., Done], tmp_path: Path, module: str, name: str, call: int, end: signal.Signals
) -> None:
    base, adapter = write_base(tmp_path / "base", files=3), write_adapter(tmp_path / "adapter")
    words = [str(base), str(adapter), str(tmp_path / "models" / "out")]
    code = _PAUSED.format(module=module, name=name, call=call, words=words)
    environment = os.environ | {"ISERVE_HOME": str(tmp_path / "home"), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "paused\n"
        process.send_signal(end)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.communicate()
    left = list((tmp_path / "models").iterdir())
    assert [entry.name.startswith(".out.") for entry in left] == [True] * (end is signal.SIGKILL)
    assert iserve("variant", "merge", *words).code == 0
    assert iserve("variant", "merge", *words[:2], tmp_path / "whole").code == 0
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["out"]
    again, whole = (
        {file.name: file.read_bytes() for file in folder.iterdir()}
        for folder in (tmp_path / "models" / "out", tmp_path / "whole")
    )
    assert again == whole
    assert json.loads(again["config.json"])["model_type"] == "llama"
