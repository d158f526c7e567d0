"""Deltas of tiny fine-tunes: exact where nothing changed, close where it did, and every unfit pair refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from daemon.torch_engine.api.tokenizer import end_token_ids, load_text_codec
from daemon.variants.compress import CalibrationTexts, compress_delta
from fingerprint.checkpoint import Checkpoint
from fingerprint.delta import FORMATS, export_delta, read_delta
from fingerprint.errors import (
    BadInputError,
    CheckpointError,
    IserveError,
    NotFoundError,
    UnsupportedModelError,
)
from iserve.demo import demo_adapter_path, demo_model_path
from tests.daemon.tiny_deltas import write_fine_tune
from tests.daemon.variants.tiny_pairs import DOWN1, NORM, Q0, exported, only, order, write_pair
from tests.fingerprint.small_fine_tunes import (
    TEXTS,
    Arrays,
    read_bytes,
    read_values,
    tiny_tensors,
    tuned,
    write_model,
)

# What a delta holds.


def test_a_base_has_an_empty_delta_of_itself(tmp_path: Path) -> None:
    write_pair(tmp_path, change=dict)
    result = compress_delta(order(tmp_path))
    assert not result.manifest.changed
    exported(tmp_path)
    assert read_bytes(tmp_path / "exported") == read_bytes(tmp_path / "base")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_close_to_the_fine_tune(tmp_path: Path, name: str) -> None:
    base = write_pair(tmp_path)
    result = compress_delta(order(tmp_path, format=FORMATS[name]))
    matrices = {matrix.name: matrix for matrix in result.manifest.matrices}
    assert matrices.keys() == {tensor for tensor, values in base.items() if values.ndim == 2}
    assert {each.name for each in result.manifest.exact} == {name for name, each in base.items() if each.ndim == 1}
    found, tuned_values, base_values = (
        exported(tmp_path),
        *(read_values(tmp_path / each) for each in ("tuned", "base")),
    )
    for tensor, values in tuned_values.items():
        if values.ndim == 1:
            assert np.array_equal(found[tensor], values), tensor
            continue
        is_embedding = tensor == "model.embed_tokens.weight"
        assert matrices[tensor].format == ("int4" if is_embedding else name)
        assert matrices[tensor].error < (0.02 if is_embedding else 0.5)
        change = values - base_values[tensor]
        lost = np.square(found[tensor] - values).sum() / np.square(change).sum()
        assert lost == pytest.approx(matrices[tensor].weight_error, rel=0.05, abs=0.005)  # rounded to bfloat16


@pytest.mark.parametrize("name", FORMATS)
def test_compensation_lowers_the_error_of_every_linear(tmp_path: Path, name: str) -> None:
    """Rounding's error on the same inputs is measured on the first group, whose inputs no change before it has."""
    write_pair(tmp_path)
    compensated = compress_delta(order(tmp_path, format=FORMATS[name]))
    rounded = compress_delta(
        order(tmp_path, format=FORMATS[name], target=tmp_path / "rounded", is_compensated=False)
    )
    for one, other in zip(compensated.manifest.matrices, rounded.manifest.matrices, strict=True):
        if "embed" not in one.name:  # rounded either way
            assert one.error < other.error
            assert one.weight_error >= other.weight_error  # what compensation gives away
    assert rounded.manifest.calibration is None


def test_only_what_changed_is_kept(tmp_path: Path) -> None:
    write_pair(tmp_path, change=only(DOWN1, NORM))
    result = compress_delta(order(tmp_path))
    assert [each.name for each in result.manifest.matrices] == [DOWN1]
    assert [each.name for each in result.manifest.exact] == [NORM]
    found, expected = exported(tmp_path), read_values(tmp_path / "base")
    assert {name for name in expected if not np.array_equal(found[name], expected[name])} == {DOWN1, NORM}


def test_random_tokens_take_the_place_of_texts(tmp_path: Path) -> None:
    """Without a tokenizer, and with the same result every time."""
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors, has_tokenizer=False)
    write_model(tmp_path / "tuned", only(Q0)(tensors), has_tokenizer=False)
    results = [compress_delta(order(tmp_path, target=tmp_path / name, calibration=None)) for name in ("a", "b")]
    assert results[0] == results[1]
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    calibration = results[0].manifest.calibration
    assert calibration is not None
    assert (calibration.sha256, calibration.num_texts, calibration.num_tokens) == (None, 0, 32 * 512)


def linear_inputs(folder: Path, tensors: Arrays, sequences: list[list[int]]) -> dict[str, torch.Tensor]:
    """Return what each linear of transformers' own model gets for ``sequences``, by its weight's name."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in tensors.items()})
    found: dict[str, list[torch.Tensor]] = {}

    def see(name: str, args: tuple[torch.Tensor, ...]) -> None:
        found.setdefault(f"{name}.weight", []).append(args[0].flatten(0, -2))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, args, name=name: see(name, args))
    with torch.inference_mode():
        for tokens in sequences:
            model(torch.tensor([tokens]))
    return {name: torch.cat(inputs) for name, inputs in found.items()}


def test_layers_see_what_the_ones_before_them_became(tmp_path: Path) -> None:
    """Errors are of the inputs that the reconstructed model makes, and not of the fine-tune's own."""
    write_pair(tmp_path, change=partial(tuned, size=0.1))
    settings = order(tmp_path, format=FORMATS["int1"])
    records = {matrix.name: matrix for matrix in compress_delta(settings).manifest.matrices}
    delta = read_delta(tmp_path / "delta")
    base, wanted = read_values(tmp_path / "base"), read_values(tmp_path / "tuned")
    kept = {name: delta.change(matrix) for name, matrix in records.items()}
    made = {name: base[name] + kept[name] if name in kept else values for name, values in wanted.items()}
    codec = load_text_codec(tmp_path / "tuned")
    assert codec is not None
    sequences = [codec.encode(text, 512) for text in TEXTS]
    codec.close()

    def errors(tensors: Arrays) -> dict[str, float]:
        inputs = linear_inputs(tmp_path / "base", tensors, sequences)
        found = {}
        for name, x in inputs.items():
            change = torch.from_numpy(wanted[name] - base[name])
            lost = x @ (change - torch.from_numpy(kept[name])).T
            found[name] = float(lost.square().sum() / (x @ change.T).square().sum())
        return found

    recorded = {name: records[name].error for name in errors(made)}
    assert len(recorded) == 2 * 7 + 1
    assert recorded == pytest.approx(errors(made), rel=1e-3)
    # Those of layer 0 that embeddings alone precede, which are in 4 bits.
    first = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
    apart = {name: abs(error / recorded[name] - 1) for name, error in errors(wanted).items() if name not in first}
    assert min(apart.values()) > 0.1, apart


def test_an_error_target_gives_finer_formats_where_they_are_needed(tmp_path: Path) -> None:
    write_pair(tmp_path)
    first = compress_delta(order(tmp_path))
    errors = sorted(each.error for each in first.manifest.matrices if each.format == "int2")
    target = errors[len(errors) // 2]
    result = compress_delta(order(tmp_path, target=tmp_path / "finer", max_error=target))
    formats = {each.format for each in result.manifest.matrices if "embed" not in each.name}
    assert {"int2", "int3"} <= formats
    assert all(each.error <= target for each in result.manifest.matrices if each.format != "int4")


def test_tied_embeddings_are_kept_once(tmp_path: Path) -> None:
    tensors = {name: values for name, values in tiny_tensors().items() if name != "lm_head.weight"}
    write_model(tmp_path / "base", tensors, tie_word_embeddings=True)
    write_model(tmp_path / "tuned", tuned(tensors), tie_word_embeddings=True)
    result = compress_delta(order(tmp_path))
    (embedding,) = (each for each in result.manifest.matrices if "layers" not in each.name)
    assert (embedding.name, embedding.format) == ("model.embed_tokens.weight", "int4")


def test_the_fine_tunes_tokenizer_goes_along(tmp_path: Path) -> None:
    write_pair(tmp_path, change=only(Q0))
    (tmp_path / "tuned" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    result = compress_delta(order(tmp_path))
    assert [each.name for each in result.manifest.companions] == ["chat_template.jinja"]
    exported(tmp_path)
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    (tmp_path / "delta" / "chat_template.jinja").write_text("other")
    with pytest.raises(CheckpointError, match="chat_template"):
        read_delta(tmp_path / "delta")


def test_a_fine_tune_in_float32_of_a_base_in_16_bits(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    rounded = read_values(tmp_path / "base")
    wide = {name: values if values.ndim == 1 else tuned({name: values})[name] for name, values in rounded.items()}
    write_model(tmp_path / "tuned", wide, dtype="F32")
    result = compress_delta(order(tmp_path, format=FORMATS["int4"]))
    assert not result.manifest.exact  # the same values in another type
    assert len(result.manifest.matrices) == sum(values.ndim == 2 for values in tensors.values())
    exported(tmp_path)
    assert {entry.dtype for entry in Checkpoint.open(tmp_path / "exported").tensors.values()} == {"BF16"}


# Greedy tokens of a trained model.


def greedy_tokens(folder: Path) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for question in ("Capitalise: hello world", "Reverse: abcdef", "What is 12+30?", "Spell: tree"):
        prompt = [0, *(byte + 2 for byte in f"Q: {question}\nA: ".encode())]
        made = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=1)
        found.append(made[0, len(prompt) :].tolist())
    return found


@pytest.mark.slow
def test_four_bits_keep_the_tokens_of_a_trained_model_and_two_bits_of_its_whole_weights_do_not(
    tmp_path: Path,
) -> None:
    """The control is the delta of a base without linears, rounded: the weights themselves in two bits."""
    from fingerprint.lora import merge_adapter, read_adapter

    base = tmp_path / "base"
    base.symlink_to(demo_model_path())
    merge_adapter(base, read_adapter(demo_adapter_path("shout")), tmp_path / "tuned")
    expected = greedy_tokens(tmp_path / "tuned")
    assert expected != greedy_tokens(base)
    compress_delta(order(tmp_path, format=FORMATS["int4"]))
    exported(tmp_path)
    assert greedy_tokens(tmp_path / "exported") == expected

    values = read_values(tmp_path / "tuned")
    config = json.loads((base / "config.json").read_text())
    del config["dtype"]  # written anew
    zeros = {
        name: np.zeros_like(each) if "layers" in name and each.ndim == 2 else each for name, each in values.items()
    }
    write_model(tmp_path / "zero", zeros, **config)
    control = order(tmp_path, base=tmp_path / "zero", target=tmp_path / "whole", is_compensated=False)
    compress_delta(control)
    export_delta(tmp_path / "zero", read_delta(tmp_path / "whole"), tmp_path / "rounded")
    assert greedy_tokens(tmp_path / "rounded") != expected


# What is refused.


def with_value(tensors: Arrays, name: str, value: float) -> Arrays:
    changed = tensors[name].copy()
    changed.flat[3] = value
    return {**tensors, name: changed}


def refused(folder: Path, error: type[IserveError], *words: str, **changes: Any) -> None:
    with pytest.raises(error) as caught:
        compress_delta(order(folder, **changes))
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (folder / "delta").exists()
    assert not (folder / ".delta.compressing").exists()


@pytest.mark.parametrize("side", ["base", "tuned"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite(tmp_path: Path, side: str, value: float) -> None:
    """Exact: encode_floats keeps infinities, and NaN is written as the bits that it has."""
    write_pair(tmp_path)
    file = tmp_path / side / "model.safetensors"
    entry = Checkpoint.open(tmp_path / side).tensors[DOWN1]
    with file.open("r+b") as stream:
        stream.seek(entry.offset + 10)
        stream.write(b"\xc0\x7f" if np.isnan(value) else b"\x80\x7f")
    refused(tmp_path, CheckpointError, DOWN1, "NaN or infinite")


@pytest.mark.parametrize("name", [DOWN1, "model.embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize(
    ("dtype", "before", "after"), [("BF16", 3e38, -3e38), ("F32", 3e38, -3e38), ("F32", 0, 1e17)]
)
def test_finite_weights_whose_change_is_beyond_measure(
    tmp_path: Path, name: str, dtype: str, before: float, after: float
) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", with_value(tensors, name, before), dtype=dtype)
    write_model(tmp_path / "tuned", with_value(tensors, name, after), dtype=dtype)
    with pytest.raises(CheckpointError, match=f"{name}.*more than 1e"):
        compress_delta(order(tmp_path, is_compensated=False))


def test_another_base(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", {name: each for name, each in tensors.items() if name not in (DOWN1, NORM)})
    refused(tmp_path, CheckpointError, NORM, "no fine-tune of")  # the first by name


def test_other_shapes(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    wider = {**tensors, "lm_head.weight": np.zeros((300, 64), np.float32), DOWN1: np.zeros((64, 96), np.float32)}
    write_model(tmp_path / "tuned", wider)
    refused(tmp_path, CheckpointError, "lm_head.weight", "[300, 64]", "[258, 64]")


def test_a_type_that_no_change_can_be_kept_of(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", tensors, dtypes={Q0: "I8"})
    refused(tmp_path, CheckpointError, Q0, "I8", "BF16")


def test_a_norm_that_the_bases_type_does_not_hold(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    values = with_value(read_values(tmp_path / "base"), NORM, 1.00001)
    write_model(tmp_path / "tuned", values, dtype="F32")
    refused(tmp_path, CheckpointError, NORM, "BF16 does not hold")


@pytest.mark.parametrize("side", ["base", "tuned"])
def test_a_quantized_model(tmp_path: Path, side: str) -> None:
    write_pair(tmp_path)
    config = tmp_path / side / "config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "quantization_config": {"quant_method": "fp8"}})
    )
    refused(tmp_path, CheckpointError, str(tmp_path / side), "quantized ('fp8')")


def test_pickle(tmp_path: Path) -> None:
    write_pair(tmp_path)
    (tmp_path / "tuned" / "model.safetensors").rename(tmp_path / "tuned" / "pytorch_model.bin")
    refused(tmp_path, CheckpointError, "pickle", "pytorch_model.bin")


def test_a_configuration_that_computes_otherwise(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", tuned(tensors), rms_norm_eps=1e-6, eos_token_id=5)
    refused(tmp_path, CheckpointError, "rms_norm_eps")


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("settings", [None, {"temperature": 0.5}])
def test_a_special_token_that_the_export_would_not_have(
    tmp_path: Path, name: str, settings: dict[str, object] | None
) -> None:
    """The export has the base's config.json, and its generation_config.json where the fine-tune has none."""
    tensors = tiny_tensors()
    base = write_model(tmp_path / "base", tensors, **{name: 2})  # type: ignore[arg-type]
    (base / "generation_config.json").write_text(json.dumps({name: 3}))
    write_model(tmp_path / "tuned", tuned(tensors), **{name: 7})  # type: ignore[arg-type]
    if settings is not None:
        (tmp_path / "tuned" / "generation_config.json").write_text(json.dumps(settings))
    refused(tmp_path, CheckpointError, f"{name} of", "is 7,", "generation_config.json")


def test_an_export_ends_answers_as_the_fine_tune_does(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors, eos_token_id=2)
    folder = write_model(tmp_path / "tuned", only(NORM)(tensors), eos_token_id=3)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    compress_delta(order(tmp_path, is_compensated=False))
    exported(tmp_path)
    assert end_token_ids(tmp_path / "exported", None) == end_token_ids(folder, None) == {7, 8}


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    write_model(tmp_path / "base", tiny_tensors())
    refused(tmp_path, NotFoundError, str(tmp_path / "tuned"))


def test_texts_need_a_tokenizer_and_tokens(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    write_model(tmp_path / "base", tensors)
    write_model(tmp_path / "tuned", tuned(tensors), has_tokenizer=False)
    refused(tmp_path, CheckpointError, "tokenizer")
    write_model(tmp_path / "with", tuned(tensors))
    empty = CalibrationTexts(sha256="0" * 64, texts=("",))
    refused(tmp_path, BadInputError, "no token", finetuned=tmp_path / "with", calibration=empty)


def test_a_family_that_does_not_run_layer_by_layer(tmp_path: Path, tiny_checkpoint: Callable[[str], Path]) -> None:
    base = tiny_checkpoint("olmo2")
    refused(tmp_path, UnsupportedModelError, "olmo2", "as a model of its own", base=base, finetuned=base)


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    odd = {**tensors, "model.layers.0.extra.weight": np.ones((8, 8), np.float32)}
    write_model(tmp_path / "base", odd)
    write_model(tmp_path / "tuned", only("model.layers.0.extra.weight")(odd))
    refused(tmp_path, CheckpointError, "model.layers.0.extra.weight", "neither a linear")


MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe"]


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("name", ["int2", "int4", "sparse24-int4"])
def test_a_mixture_is_compressed_around_its_experts(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], family: str, name: str
) -> None:
    """Attention, embeddings, norms and the output layer change; all experts run, and are the base's to the bit."""
    base = tiny_checkpoint(family)
    tuned_folder = write_fine_tune(base, tmp_path / "tuned", 1, is_changed=lambda tensor: ".mlp." not in tensor
        and "block_sparse_moe" not in tensor)  # fmt: skip
    result = compress_delta(
        order(tmp_path, base=base, finetuned=tuned_folder, format=FORMATS[name], calibration=None)
    )
    export_delta(base, read_delta(tmp_path / "delta"), tmp_path / "exported")
    found, wanted, before = (read_values(folder) for folder in (tmp_path / "exported", tuned_folder, base))
    matrices = {matrix.name: matrix for matrix in result.manifest.matrices}
    assert len(matrices) == 2 * 4 + 2
    for tensor, values in wanted.items():
        if tensor not in matrices:  # experts, routers and, replaced as they are, norms
            assert np.array_equal(found[tensor], values), tensor
            continue
        record, change = matrices[tensor], np.square(values - before[tensor]).sum()
        lost = np.square(found[tensor] - values).sum() / change
        assert lost == pytest.approx(record.weight_error, rel=0.05, abs=0.005), tensor
        assert record.error < {"int2": 0.3, "int4": 0.02, "sparse24-int4": 0.3}[record.format], tensor
    unchanged = [tensor for tensor in wanted if np.array_equal(wanted[tensor], before[tensor])]
    assert sum("experts" in tensor for tensor in unchanged) >= 2 * 4 * 3


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("part", ["experts", "gate."])
def test_changed_experts_and_routers_of_a_mixture_are_refused_by_name(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], family: str, part: str
) -> None:
    base = tiny_checkpoint(family)
    names = sorted(Checkpoint.open(base).tensors)
    changed = next(name for name in names if f".{part}" in name and "layers.1." in name)
    folder = write_fine_tune(base, tmp_path / "tuned", 1, is_changed=lambda tensor: tensor == changed)
    refused(tmp_path, CheckpointError, changed, "deploy the fine-tune", base=base, finetuned=folder)


@pytest.mark.parametrize("name", ["self_attn.sinks", "mlp.router.bias"])
def test_what_no_engine_can_replace_is_refused_though_it_has_one_axis(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Path], name: str
) -> None:
    base = tiny_checkpoint("gpt_oss")
    folder = write_fine_tune(base, tmp_path / "tuned", 1, is_changed=lambda tensor: tensor.endswith(name))
    refused(tmp_path, CheckpointError, f"layers.0.{name}", "neither a norm", base=base, finetuned=folder)


def test_an_export_onto_another_base_names_the_first_tensor(tmp_path: Path) -> None:
    tensors = write_pair(tmp_path)
    compress_delta(order(tmp_path))
    write_model(tmp_path / "other", with_value(with_value(tensors, Q0, 2), DOWN1, 2))
    with pytest.raises(CheckpointError, match=Q0):
        export_delta(tmp_path / "other", read_delta(tmp_path / "delta"), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
