"""``iserve variant compress`` and ``export``: what they say, their JSON, and input that fits no delta."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fingerprint.delta import FORMATS, read_delta
from tests.fingerprint.small_fine_tunes import TEXTS, read_bytes, tiny_tensors, tuned, write_model
from tests.golden_words import Golden
from tests.iserve.command_line import Done, iserve

__all__ = ["iserve"]  # a fixture


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    tensors = tiny_tensors()
    return write_model(tmp_path / "base", tensors), write_model(tmp_path / "tuned", tuned(tensors))


def test_a_fine_tune_is_compressed_and_exported(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], golden: Golden
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(TEXTS))
    done = iserve("variant", "compress", *pair, tmp_path / "delta", "--calibration", text)
    assert done.code == 0
    shown = [line for line in done.out.splitlines() if not line.startswith(("error ", str(tmp_path)))]
    golden("variant", "\n".join(shown))  # sizes and errors differ in last digits from machine to machine
    assert done.err.startswith("compressing 0/0  MiB read\n")
    manifest = read_delta(tmp_path / "delta").manifest
    assert (manifest.format, manifest.base_name, manifest.finetuned_name) == ("int2", "base", "tuned")
    assert manifest.calibration is not None
    assert manifest.calibration.num_texts == len(TEXTS)
    done = iserve("variant", "export", pair[0], tmp_path / "delta", tmp_path / "model")
    golden("variant", done.out, "export")
    assert read_bytes(tmp_path / "model").keys() == read_bytes(pair[0]).keys()


def test_their_documents(iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path]) -> None:
    done = iserve(
        "variant", "compress", *pair, tmp_path / "delta", "--format", "int1", "--max-error", "0.05", "--json"
    )
    assert done.err == ""
    document, manifest = done.document, read_delta(tmp_path / "delta").manifest
    assert document["content_hash"] == manifest.content_hash
    assert document["base_sha256"] == manifest.base_sha256
    assert document["is_random"]
    assert document["num_unchanged"] == 0
    assert len(document["matrices"]) == len(manifest.matrices)
    assert {each["format"] for each in document["matrices"]} > {"int4"}
    assert document["size_bytes"] == sum(map(len, read_bytes(tmp_path / "delta").values()))
    exported = iserve("variant", "export", pair[0], tmp_path / "delta", tmp_path / "model", "--json").document
    assert exported["content_hash"] == manifest.content_hash
    assert exported["num_changed"] == exported["num_tensors"] == len(tiny_tensors())


def test_a_model_that_is_its_own_fine_tune(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], golden: Golden
) -> None:
    done = iserve("variant", "compress", pair[0], pair[0], tmp_path / "delta")
    golden("variant", next(line for line in done.out.splitlines() if "differs" in line))
    iserve("variant", "export", pair[0], tmp_path / "delta", tmp_path / "model")
    assert read_bytes(tmp_path / "model") == read_bytes(pair[0])


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b" \n\n \n", id="blank"),
        pytest.param(b"\x7fELF\0\0\xff", id="binary"),
        pytest.param(None, id="missing"),
    ],
)
def test_calibration_files_that_are_no_text(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], content: bytes | None, golden: Golden
) -> None:
    file = tmp_path / "text"
    if content is not None:
        file.write_bytes(content)
    done = iserve("variant", "compress", *pair, tmp_path / "delta", "--calibration", file)
    assert done.code != 0
    golden("variant", done.line)
    assert not (tmp_path / "delta").exists()


@pytest.mark.parametrize(
    "options",
    [
        ("--format", "int5"),
        ("--max-error", "0"),
        ("--max-error", "2"),
        ("--device", "gpu"),
        ("--device", "cuda:x"),
        ("--device", "cuda:256"),
        ("--device", "cuda:01"),
        ("--device", "cuda:\N{ARABIC-INDIC DIGIT ONE}"),
    ],
)
def test_options_that_mean_nothing(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], options: tuple[str, str]
) -> None:
    done = iserve("variant", "compress", *pair, tmp_path / "delta", *options)
    assert done.code == 2
    assert options[0] in done.err


def test_a_gpu_that_is_not_here(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], golden: Golden
) -> None:
    done = iserve("variant", "compress", *pair, tmp_path / "delta", "--device", "cuda:99")
    assert done.code == 1
    golden("variant", done.line)
    assert not (tmp_path / "delta").exists()


def test_folders_that_do_not_fit(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], golden: Golden
) -> None:
    other = write_model(tmp_path / "other", tuned(tiny_tensors()), rms_norm_eps=1e-6)
    quantized = write_model(tmp_path / "quantized", tiny_tensors(), quantization_config={"quant_method": "fp8"})
    shards = write_model(tmp_path / "shards", tuned(tiny_tensors()))
    (shards / "model.safetensors").rename(shards / "model-00001-of-00002.safetensors")
    files = dict.fromkeys(tiny_tensors(), "model-00001-of-00002.safetensors") | {
        "x": "model-00002-of-00002.safetensors"
    }
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    for what, words in {
        "a missing shard": ("compress", pair[0], shards, tmp_path / "delta"),
        "another configuration": ("compress", pair[0], other, tmp_path / "delta"),
        "a quantized base": ("compress", quantized, pair[1], tmp_path / "delta"),
        "an adapter's folder": ("export", pair[0], pair[1], tmp_path / "model"),
        "no folder": ("export", pair[0], tmp_path / "nowhere", tmp_path / "model"),
    }.items():
        done = iserve("variant", *words)
        assert done.code != 0
        golden("variant", done.line, what)
    assert not (tmp_path / "delta").exists()
    assert not (tmp_path / "model").exists()


def test_a_delta_is_no_adapter(
    iserve: Callable[..., Done], tmp_path: Path, pair: tuple[Path, Path], golden: Golden
) -> None:
    (tmp_path / "delta").mkdir()
    (tmp_path / "delta" / "delta.json").write_text("{}")
    for words in (("inspect", tmp_path / "delta"), ("merge", pair[0], tmp_path / "delta", tmp_path / "model")):
        done = iserve("variant", *words)
        assert done.code == 1
        golden("variant", done.line, words[0])


def test_the_help_names_every_format(iserve: Callable[..., Done]) -> None:
    said = " ".join(iserve("variant", "compress", "--help").out.split())
    assert all(name in said for name in FORMATS)


def test_nothing_loads_torch_that_compresses_nothing() -> None:
    """Exports, and the commands of the register, start in a moment."""
    program = "import sys; import iserve.deltas, iserve.cli.variant_delta; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.lower()) is False
