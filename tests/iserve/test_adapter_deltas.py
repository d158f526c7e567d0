"""Adapters that no engine serves: ``variant add`` and ``compress`` merge them and keep the difference."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from daemon.variants.compress import CompressOrder, compress_delta
from fingerprint.delta import FORMATS, read_delta
from fingerprint.lora import content_sha256, merge_adapter, read_adapter
from iserve.merged_adapters import fine_tune
from iserve.model_source import resolve
from tests.bad_input.conftest import Api, api
from tests.fingerprint.adapter_kinds import CASES, write_kind
from tests.fingerprint.small_adapters import (
    BIASED,
    Q0,
    VOCAB,
    factors,
    token_rows,
    values,
    write_adapter,
    write_base,
    write_ia3,
)
from tests.fingerprint.small_fine_tunes import TEXTS, read_bytes, tiny_tensors, write_model
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve
from tests.iserve.test_variant_register import body, command, content, empty, store
from tests.waiting import PATIENCE_S

__all__ = ["api", "command", "empty", "iserve"]  # fixtures

WORDS = ("variant", "add", "style", "--base")
MADE = ("combined", "ia3", "vocabulary", "tokens-tied")  # one of each way to change a tensor
PREFIX = "base_model.model."
MAGNITUDES = {f"{PREFIX}{Q0}.lora_magnitude_vector": values((16,), 3) + 1}
NAN = {name: each + np.float32(np.nan) for name, each in MAGNITUDES.items()}


def write_dora(more: dict[str, Any], folder: Path, module: str = Q0) -> Path:
    tensors = {name.replace(Q0, module): each for name, each in (factors({Q0: 4}) | MAGNITUDES | more).items()}
    return write_adapter(folder, tensors, target_modules=["q_proj"], use_dora=True)


BAD: dict[str, Callable[[Path], Path]] = {
    "magnitude-nan": partial(write_dora, NAN),
    "unknown-tensor": partial(write_dora, {f"{PREFIX}{Q0}.lora_diag": values((4,), 1)}),
    "other-base": partial(write_dora, {}, module=Q0.replace("layers.0", "layers.7")),
    "vector-short": partial(
        write_ia3, tensors={f"{PREFIX}model.layers.0.self_attn.k_proj.ia3_l": values((7, 1), 1)}
    ),
    "row-beyond": partial(
        write_adapter,
        tensors=token_rows(values((1, 16), 1)),
        target_modules=["q_proj"],
        trainable_token_indices=[VOCAB],
    ),
}


def left(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize("case", MADE)
def test_a_delta_of_an_adapter_is_that_of_its_merge(
    iserve: Callable[..., Done], tmp_path: Path, case: str
) -> None:
    base = write_base(tmp_path / "base", CASES[case].dtype, **CASES[case].base)
    adapter = write_kind(tmp_path / "adapter", case)
    done = iserve("variant", "compress", base, adapter, tmp_path / "made" / "delta", "--format", "int4", "--json")
    found, manifest = done.document, read_delta(tmp_path / "made" / "delta").manifest
    assert left(tmp_path / "made") == ["delta"]
    merge_adapter(base, read_adapter(adapter), tmp_path / "merged")
    order = CompressOrder(
        base=base,
        finetuned=tmp_path / "merged",
        target=tmp_path / "expected",
        format=FORMATS["int4"],
        calibration=None,
        max_error=None,
        base_name="base",
        finetuned_name="adapter",
    )
    assert manifest.content_hash == compress_delta(order).manifest.content_hash == found["content_hash"]
    assert manifest.finetuned_name == "adapter"
    assert manifest.adapter is not None
    assert (manifest.adapter.method, set(manifest.adapter.kinds)) == (
        "IA3" if CASES[case].is_ia3 else "LORA",
        {*CASES[case].kinds, *(["output layer"] if case == "vocabulary" else [])},
    )
    assert manifest.adapter.sha256 == content_sha256(read_adapter(adapter)) == found["adapter"]["sha256"]


def test_an_export_is_the_merged_model_but_for_what_the_format_loses(
    iserve: Callable[..., Done], tmp_path: Path
) -> None:
    from tests.fingerprint.test_adapter_merge import floats_of

    base, adapter = write_base(tmp_path / "base", **BIASED), write_kind(tmp_path / "adapter", "combined")
    assert iserve("variant", "compress", base, adapter, tmp_path / "delta", "--format", "int4").code == 0
    assert iserve("variant", "export", base, tmp_path / "delta", tmp_path / "model").code == 0
    assert iserve("variant", "merge", base, adapter, tmp_path / "merged").code == 0
    found, expected, before = (floats_of(tmp_path / name) for name in ("model", "merged", "base"))
    for name, wanted in expected.items():
        if wanted.ndim == 1:  # biases and norms are kept as they are
            assert np.array_equal(found[name], wanted)
        elif not np.array_equal(wanted, before[name]):
            assert np.square(found[name] - wanted).sum() < 0.05 * np.square(before[name] - wanted).sum()


def test_the_bits_are_chosen_by_measured_loss_as_for_a_full_fine_tune(
    iserve: Callable[..., Done], tmp_path: Path
) -> None:
    base = write_model(tmp_path / "base", tiny_tensors())
    lora = {
        f"{PREFIX}{Q0}.lora_A.weight": values((4, 64), 1),
        f"{PREFIX}{Q0}.lora_B.weight": values((64, 4), 2, 0.1),
        f"{PREFIX}{Q0}.lora_magnitude_vector": values((64,), 3) + 1,
    }
    adapter = write_adapter(tmp_path / "adapter", lora, target_modules=["q_proj"], use_dora=True)
    (tmp_path / "texts.txt").write_text("\n\n".join(TEXTS))
    command = ("variant", "compress", base, adapter, tmp_path / "made" / "delta", "--text", tmp_path / "texts.txt")
    found = iserve(*command, "--max-quality-loss", "0", "--json")
    assert found.code == 1
    assert all(name in found.err for name in ("int2", "int3", "int4"))
    assert left(tmp_path / "made") == []
    judged = iserve(*command, "--max-quality-loss", "100", "--json").document
    assert [trial["is_kept"] for trial in judged["judgement"]["trials"]] == [True]
    assert left(tmp_path / "made") == ["delta"]


def test_a_base_of_which_no_delta_is_made_is_refused_before_the_merge(
    iserve: Callable[..., Done], tmp_path: Path, golden: Golden
) -> None:
    base = write_base(tmp_path / "base", model_type="granite", architectures=["GraniteForCausalLM"])
    done = iserve("variant", "compress", base, write_kind(tmp_path / "adapter", "dora"), tmp_path / "delta")
    assert done.code != 0
    golden("variant", done.err)
    assert left(tmp_path) == ["adapter", "base"]


def test_a_registered_name_is_no_adapters_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    base, adapter = write_base(tmp_path / "base"), write_kind(tmp_path / "tuned", "dora")
    source = resolve(str(base), {})
    for registered, is_model in (({"tuned": base}, True), ({}, False)):
        with fine_tune(adapter.name, source, tmp_path / "out", registered, None, lambda _: None) as found:
            assert (found.adapter is None, found.directory == base) == (is_model, is_model)


def test_a_model_has_no_adapter_in_its_manifest(iserve: Callable[..., Done], tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    merge_adapter(base, read_adapter(write_adapter(tmp_path / "adapter")), tmp_path / "tuned")
    found = iserve("variant", "compress", base, tmp_path / "tuned", tmp_path / "delta", "--json").document
    assert found["adapter"] is None
    manifest = json.loads((tmp_path / "delta" / "delta.json").read_text())
    del manifest["adapter"]  # as releases before had it
    (tmp_path / "delta" / "delta.json").write_text(json.dumps(manifest))
    assert read_delta(tmp_path / "delta").manifest.content_hash == found["content_hash"]


class TestAdd:
    @pytest.fixture
    def base(self, api: Api) -> Path:
        folder = api.folder / "base-of-kinds"
        return folder if folder.exists() else write_base(folder, "BF16", **BIASED)

    @pytest.mark.parametrize("case", ["combined", "ia3-biases-and-saved"])
    def test_it_is_registered_as_a_delta_and_the_user_reads_why(
        self, command: Callable[..., Done], api: Api, base: Path, tmp_path: Path, golden: Golden, case: str
    ) -> None:
        adapter = write_kind(tmp_path / "adapter", case)
        done = command(*WORDS, base, adapter, "--format", "int3", "--json")
        assert done.code == 0, done.err
        golden("variant", done.err)
        assert (done.document["rank"], done.document["made_of"].split(":")[0]) == (
            0,
            "IA3" if CASES[case].is_ia3 else "LORA",
        )
        manifest = store(api).delta(done.document["content_hash"])
        assert manifest is not None
        assert (manifest.format, manifest.finetuned_name) == ("int3", "adapter")
        shown = command("variant", "show", "style").out.splitlines()
        golden("variant", next(line for line in shown if line.startswith("made of")), "show")
        assert left(Path(api.controller.settings.compressing_folder)) == []
        again = command(*WORDS, base, adapter, "--format", "int3", "--json").document
        assert (again["content_hash"], again["new_bytes"]) == (done.document["content_hash"], 0)

    @pytest.mark.parametrize("which", ["head", "rank"])
    def test_so_is_a_lora_without_slots_for_it(
        self, command: Callable[..., Done], base: Path, tmp_path: Path, golden: Golden, which: str
    ) -> None:
        head = {
            f"{PREFIX}lm_head.lora_A.weight": values((4, 16), 1),
            f"{PREFIX}lm_head.lora_B.weight": values((VOCAB, 4), 2),
        }
        fields: dict[str, Any] = {"target_modules": ["lm_head"]} if which == "head" else {"r": 257}
        adapter = write_adapter(tmp_path / "adapter", head if which == "head" else factors({Q0: 257}), **fields)
        done = command(*WORDS, base, adapter)
        assert done.code == 0
        golden("variant", done.err.splitlines()[0])

    def test_a_plain_one_is_served_as_it_is(
        self, command: Callable[..., Done], base: Path, tmp_path: Path
    ) -> None:
        adapter = write_adapter(
            tmp_path / "adapter", base_model_name_or_path=base.name
        )  # no other base: no warning
        done = command(*WORDS, base, adapter, "--json")
        assert (done.err, done.document["rank"], done.document["made_of"]) == ("", 4, None)

    def test_options_of_a_compression_are_refused_where_a_plain_one_is_served(
        self, command: Callable[..., Done], api: Api, base: Path, tmp_path: Path
    ) -> None:
        done = command(*WORDS, base, write_adapter(tmp_path / "adapter"), "--format", "int4")
        assert done.code == 2
        assert content(api) == set()

    def test_the_base_itself_is_named_and_leaves_nothing(
        self, command: Callable[..., Done], api: Api, base: Path, golden: Golden
    ) -> None:
        done = command(*WORDS, base, base)
        assert done.code == 1
        golden("variant", done.err.splitlines()[-1].replace(str(base), "BASE"))
        assert content(api) == set()
        assert left(Path(api.controller.settings.compressing_folder)) == []

    def test_over_rest_the_command_is_named(self, api: Api, base: Path, tmp_path: Path, golden: Golden) -> None:
        status, answer = api.ask("POST", "/api/v1/variants", body(base, write_kind(tmp_path / "adapter", "ia3")))
        assert status == 400
        golden("variant", answer["message"])

    @pytest.mark.parametrize("kind", [*BAD, "quantized-base", "texts"])
    def test_what_is_wrong_is_one_line_and_registers_nothing(
        self, command: Callable[..., Done], api: Api, base: Path, tmp_path: Path, golden: Golden, kind: str
    ) -> None:
        options: tuple[object, ...] = ()
        adapter = BAD.get(kind, partial(write_dora, {}))(tmp_path / "adapter")
        if kind == "quantized-base":
            base = write_base(tmp_path / "base", quantization_config={"quant_method": "fp8"})
        if kind == "unknown-tensor":
            options = ("--format", "int4")
        if kind == "texts":
            (tmp_path / "texts.txt").write_bytes(b"")
            options = ("--calibration", tmp_path / "texts.txt")
        done = command(*WORDS, base, adapter, *options)
        assert done.code != 0
        (line,) = (line for line in done.err.splitlines() if "is kept as a delta" not in line)
        golden("variant", line.replace(str(base), "BASE"))
        assert content(api) == set()
        assert left(Path(api.controller.settings.compressing_folder)) == []


@pytest.mark.slow
class TestKilled:
    """A merge or a compression that is killed: the same command goes on, and leaves nothing else."""

    CODE = """
import sys, time
import daemon.variants.compress.compressor as compressor
import fingerprint.derived_checkpoint as derived
from iserve.cli import main

module, name, calls = {module}, {name!r}, iter(range(1000))
real = getattr(module, name)

def paused(*arguments, **more):
    if next(calls) == {call}:
        print("paused", flush=True)
        time.sleep(10_000)
    return real(*arguments, **more)

setattr(module, name, paused)
sys.argv = ["iserve", "variant", "compress", *{words!r}]
main()
"""

    @pytest.mark.parametrize(
        ("module", "name", "call"),
        [
            pytest.param("derived", "write_safetensors", 1, id="while-it-is-merged"),
            pytest.param("compressor", "read_pair", 0, id="once-it-is-merged"),
            pytest.param("compressor", "_manifest", 0, id="once-it-is-compressed"),
        ],
    )
    def test_the_same_command_goes_on(
        self, iserve: Callable[..., Done], tmp_path: Path, module: str, name: str, call: int
    ) -> None:
        base = write_base(tmp_path / "base", files=3, **BIASED)
        adapter = write_kind(tmp_path / "adapter", "combined")
        words = [str(base), str(adapter), str(tmp_path / "made" / "delta"), "--json"]
        code = self.CODE.format(module=module, name=name, call=call, words=words)
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "paused\n"
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.communicate()
        assert len([entry for entry in left(tmp_path / "made") if ".merged." in entry]) == 1
        found = iserve("variant", "compress", *words).document
        assert found["units_found_done"] == (4 if name == "_manifest" else 0)
        assert left(tmp_path / "made") == ["delta"]
        whole: dict[str, Any] = iserve("variant", "compress", base, adapter, tmp_path / "whole", "--json").document
        assert whole["content_hash"] == found["content_hash"]
        made, expected = (read_bytes(tmp_path / name) for name in ("made/delta", "whole"))
        for files in (made, expected):
            del files["delta.json"]  # errors differ in last digits with the number of threads
        assert made == expected
