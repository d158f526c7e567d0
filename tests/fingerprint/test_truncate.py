"""Fingerprints of every family: what transformers makes of them, and what making them cost."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fingerprint.errors import BadInputError, CheckpointError, ConfigError, ConflictError, UnsupportedModelError
from fingerprint.families import FAMILIES, load_spec, read_blueprint, read_spec
from fingerprint.truncate import generate, generate_dummy, generate_shape
from fingerprint.truncated_config import cut_config
from tests.golden_words import Golden

LLAMA_2_70B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}


def load(directory: Path) -> Any:
    """The model that transformers loads, nothing missing and nothing left over."""
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, local_files_only=True)
    assert {key: list(value) for key, value in info.items() if value} == {}
    return model.eval()


def cut(model: Any, layers: tuple[int, ...]) -> Any:
    """``model`` itself with only ``layers``, by taking modules out of it."""
    import torch

    model = copy.deepcopy(model)
    layout = FAMILIES[model.config.model_type].layout
    parent, _, name = layout.layers.rpartition(".")
    kept = [model.get_submodule(layout.layers)[index] for index in layers]
    setattr(model.get_submodule(parent), name, torch.nn.ModuleList(kept))
    model.config.num_hidden_layers = len(layers)
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[index] for index in layers]
    return model


def logits(model: Any) -> Any:
    import torch

    tokens = torch.arange(24).reshape(2, 12) * 7 % 96  # longer than the windows of 8
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


@pytest.mark.parametrize("layers", [(0,), (0, 1), (1, 3)], ids=["k1", "k2", "second-and-last"])
@pytest.mark.parametrize("files", ["single", "sharded"])
def test_logits_equal_those_of_the_model_cut_to_the_same_layers(
    saved_model: Any, tmp_path: Path, layers: tuple[int, ...], files: str
) -> None:
    import torch

    source = getattr(saved_model, files)
    assert (source / "model.safetensors.index.json").exists() == (files == "sharded")
    result = generate(source, tmp_path / "fingerprint", layers)
    assert result.layers == layers
    assert result.bytes_written == (tmp_path / "fingerprint" / "model.safetensors").stat().st_size
    got = logits(load(tmp_path / "fingerprint"))
    assert torch.equal(got, logits(cut(saved_model.model, layers)))
    assert not torch.equal(got, logits(saved_model.model))


def test_the_spec_of_a_fingerprint_is_the_models_but_for_the_layers(saved_model: Any, tmp_path: Path) -> None:
    import dataclasses

    generate(saved_model.single, tmp_path / "fingerprint", [0, 1])
    whole = load_spec(saved_model.single)
    cut_spec = load_spec(tmp_path / "fingerprint")
    assert cut_spec.windows == whole.windows[:2]
    as_whole = {"num_layers": 4, "sliding_window": whole.sliding_window, "layer_windows": whole.layer_windows}
    assert dataclasses.replace(cut_spec, **as_whole) == whole


def test_all_layers_give_the_same_tensors_back(saved_llama: Any, tmp_path: Path) -> None:
    generate(saved_llama.sharded, tmp_path / "all", range(4))
    before, after = (
        load_file(saved_llama.single / "model.safetensors"),
        load_file(tmp_path / "all/model.safetensors"),
    )
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_tokenizer_and_generation_config_come_along_code_and_pickles_do_not(
    saved_llama: Any, tmp_path: Path
) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(saved_llama.single, source)
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "modeling_evil.py", "old.bin"):
        (source / name).write_text(name)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoModel": "modeling_evil.Evil"}}))
    generate(source, tmp_path / "fingerprint", [0])
    assert sorted(entry.name for entry in (tmp_path / "fingerprint").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer.model",
    ]
    assert (tmp_path / "fingerprint/tokenizer.json").read_text() == "tokenizer.json"
    assert "auto_map" not in json.loads((tmp_path / "fingerprint/config.json").read_text())


def test_progress_ends_at_all(saved_llama: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    generate(
        saved_llama.single, tmp_path / "fingerprint", [0], progress=lambda done, total: seen.append((done, total))
    )
    spec = read_spec(saved_llama.model.config.to_dict())
    rest = spec.embedding_params + spec.head_params + spec.final_norm_params
    assert seen[-1] == (4 * (spec.layer_params + rest),) * 2
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        pytest.param({"model_type": "gemma2"}, ["full", "sliding"], id="every-second"),
        pytest.param(
            {"model_type": "gemma3_text", "sliding_window_pattern": 2}, ["full", "sliding"], id="pattern"
        ),
        pytest.param({"model_type": "gemma3_text"}, ["sliding", "sliding"], id="every-sixth"),
        pytest.param({"model_type": "gpt_oss", "num_local_experts": 2}, ["full", "sliding"], id="experts"),
    ],
)
def test_a_kept_layer_looks_as_far_back_as_before(
    config: dict[str, Any], kinds: list[str], tmp_path: Path
) -> None:
    """The published configs have no layer_types, which classes fill in by a layer's place."""
    sizes = {"head_dim": 128, "sliding_window": 8, "num_experts_per_tok": 1, "architectures": None}
    whole = LLAMA_2_70B | sizes | config
    (tmp_path / "config.json").write_text(json.dumps(whole))
    generate_shape(tmp_path, tmp_path / "cut", 3)
    cut = json.loads((tmp_path / "cut/config.json").read_text())
    assert cut["layer_types"][1:] == [f"{kind}_attention" for kind in kinds]
    assert read_spec(cut).windows == read_spec(whole).windows[:3]


# --- what is refused, and that nothing is left ---


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [4],
        [-1],
        [True],
        [1.0],
        [1, 0],
        [0, 0],
    ],
    ids=repr,
)
def test_layers_that_are_no_choice_are_refused(
    saved_llama: Any, tmp_path: Path, layers: list[Any], golden: Golden
) -> None:
    with pytest.raises(BadInputError) as caught:
        generate(saved_llama.single, tmp_path / "fingerprint", layers)
    golden("fingerprint", str(caught.value))
    assert list(tmp_path.iterdir()) == []


def without(source: Path, target: Path, missing: str) -> None:
    """A copy of the checkpoint ``source`` that lacks one tensor."""
    from safetensors.numpy import save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    del tensors[missing]
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())


@pytest.mark.parametrize(
    "missing",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
    ],
)
def test_a_checkpoint_that_lacks_a_tensor_is_refused(
    saved_llama: Any, tmp_path: Path, missing: str, golden: Golden
) -> None:
    without(saved_llama.single, tmp_path / "source", missing)
    with pytest.raises(CheckpointError) as caught:
        generate(tmp_path / "source", tmp_path / "fingerprint", [0, 1])
    golden("fingerprint", str(caught.value))
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_config_of_another_size_than_the_weights_is_refused(saved_llama: Any, tmp_path: Path) -> None:
    without(saved_llama.single, tmp_path / "source", "model.norm.weight")
    tensors = saved_llama.single / "model.safetensors"
    (tmp_path / "source/model.safetensors").write_bytes(tensors.read_bytes())
    config = json.loads((tmp_path / "source/config.json").read_text())
    (tmp_path / "source/config.json").write_text(json.dumps(config | {"intermediate_size": 4096}))
    with pytest.raises(CheckpointError, match=r"layer 0 .* config\.json says"):
        generate(tmp_path / "source", tmp_path / "fingerprint", [0])


def test_a_write_that_fails_midway_leaves_nothing(saved_llama: Any, tmp_path: Path, golden: Golden) -> None:
    """A real failure of the system: this process may write files of at most 20 kB."""
    code = (
        "import resource, sys; from pathlib import Path; from fingerprint.errors import CheckpointError\n"
        "from fingerprint.truncate import generate\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
        "try: generate(Path(sys.argv[1]), Path(sys.argv[2]), [0])\n"
        "except CheckpointError as error: print(error)"
    )
    command = [sys.executable, "-c", code, str(saved_llama.single), str(tmp_path / "fingerprint")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    golden("fingerprint", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_source_truncated_meanwhile_leaves_nothing(saved_llama: Any, tmp_path: Path, golden: Golden) -> None:
    import shutil

    source = tmp_path / "source"
    shutil.copytree(saved_llama.single, source)

    def truncate(done: int, total: int) -> None:
        os.truncate(source / "model.safetensors", 5000)

    with golden.raises("fingerprint", CheckpointError):
        generate(source, tmp_path / "fingerprint", [0], progress=truncate)
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_a_directory_in_use_is_not_overwritten(saved_llama: Any, tmp_path: Path) -> None:
    generate(saved_llama.single, tmp_path / "fingerprint", [0])
    with pytest.raises(ConflictError):
        generate(saved_llama.single, tmp_path / "fingerprint", [1])
    assert len(list(tmp_path.iterdir())) == 1


# --- the cost of a large model ---


def sparse_checkpoint(folder: Path, config: dict[str, Any], num_files: int) -> int:
    """A checkpoint of 16-bit zeros in files of holes, with real headers and a real index. Returns its bytes."""
    blueprint = read_blueprint(config)
    layers = FAMILIES[blueprint.spec.family].layout.layers
    shapes = {t.name: t.shape for t in blueprint.rest}
    for index in range(blueprint.spec.num_layers):
        shapes |= {f"{layers}.{index}.{t.name}": t.shape for t in blueprint.layer}
    names = sorted(shapes)
    weight_map, total = {}, 0
    for number in range(num_files):
        file = f"model-{number + 1:05}-of-{num_files:05}.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for name in names[number * len(names) // num_files : (number + 1) * len(names) // num_files]:
            size = 2 * int(np.prod(shapes[name], dtype=np.int64))
            header[name] = {"dtype": "F16", "shape": shapes[name], "data_offsets": [end, end + size]}
            weight_map[name] = file
            end += size
        raw = json.dumps(header).encode()
        (folder / file).write_bytes(len(raw).to_bytes(8, "little") + raw)
        os.truncate(folder / file, 8 + len(raw) + end)
        total += 8 + len(raw) + end
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))
    return total


def counted_generate(
    source: Path, target: Path, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, int, int]:
    """The result, the bytes that the operating system was asked for, and the peak of Python's memory."""
    asked = 0
    true_pread = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        nonlocal asked
        data = true_pread(descriptor, count, offset)
        asked += len(data)
        return data

    monkeypatch.setattr(os, "pread", pread)
    tracemalloc.start()
    try:
        result = generate(source, target, layers)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    return result, asked, peak


def test_only_the_needed_bytes_are_read_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama-2-70B sixteen times narrower: 80 layers in 15 files."""
    small = {"hidden_size": 512, "intermediate_size": 1792, "num_attention_heads": 8, "num_key_value_heads": 1}
    config = LLAMA_2_70B | small
    (tmp_path / "source").mkdir()
    total = sparse_checkpoint(tmp_path / "source", config, num_files=15)
    result, asked, peak = counted_generate(tmp_path / "source", tmp_path / "target", [0, 1], monkeypatch)
    spec = read_spec(config)
    ends = spec.embedding_params + spec.head_params + spec.final_norm_params
    index_bytes = (tmp_path / "source/model.safetensors.index.json").stat().st_size
    weights = 2 * (2 * spec.layer_params + ends)
    assert result.source_bytes == total
    assert result.bytes_read == asked + index_bytes
    assert weights < asked < weights + 200_000  # the headers of 15 files
    assert peak < 2 * (spec.layer_params + ends)


@pytest.mark.long
def test_llama_2_70b_is_handled_by_reading_three_and_a_half_percent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    total = sparse_checkpoint(tmp_path / "source", LLAMA_2_70B, num_files=15)
    assert total > 137e9
    result, asked, peak = counted_generate(tmp_path / "source", tmp_path / "target", [0, 1], monkeypatch)
    assert 0.032 < asked / total < 0.036
    assert result.bytes_read / result.source_bytes == pytest.approx(asked / total, rel=1e-3)
    assert peak < 2 * (855_654_400 + 2 * 262_144_000)  # one layer and the embeddings, in bytes
    assert peak < 100e6  # and in fact a few pieces and headers
    (tmp_path / "target/model.safetensors").unlink()


# --- from a config alone ---


def test_a_dummy_loads_as_the_family(small_config: dict[str, Any], tmp_path: Path) -> None:
    import torch

    (tmp_path / "config.json").write_text(json.dumps(small_config))
    result = generate_dummy(tmp_path, tmp_path / "dummy", 2, seed=3)
    assert (result.bytes_read, result.source_bytes, result.layers) == (0, 0, (0, 1))
    model = load(tmp_path / "dummy")
    assert model.config.num_hidden_layers == 2
    assert sum(p.numel() for p in model.parameters()) == load_spec(tmp_path / "dummy").num_params
    assert torch.isfinite(logits(model)).all()


@pytest.mark.parametrize(
    ("dtype", "torch_name"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float32"),
        ({}, "float32"),
    ],
)
def test_a_dummy_has_the_configs_dtype_and_normal_weights(
    tmp_path: Path, dtype: dict[str, str], torch_name: str
) -> None:
    import torch
    from safetensors.torch import load_file as load_torch

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_70B | sizes | {"torch_dtype": None} | dtype))
    generate_dummy(tmp_path, tmp_path / "dummy", 1)
    tensors = load_torch(tmp_path / "dummy/model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {getattr(torch, torch_name)}
    matrix = tensors["model.embed_tokens.weight"].float()
    assert matrix.numel() == 4_096_000
    assert matrix.mean().abs() < 5e-5  # five standard errors of the mean
    assert matrix.std() == pytest.approx(0.02, rel=2e-3)
    assert matrix[:100].flatten().tolist() != tensors["lm_head.weight"].float()[:100].flatten().tolist()
    assert torch.equal(tensors["model.norm.weight"].float(), torch.ones(128))


@given(
    st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-(2.0**100), max_value=2.0**100),
        min_size=1,
    )
)
def test_bfloat16_rounds_as_torch_does(values: list[float]) -> None:
    import torch

    from fingerprint.float_bytes import encode_floats

    encoded = np.frombuffer(encode_floats(np.array(values, np.float32), "BF16"), np.int16)
    expected = torch.tensor(values, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy()
    assert np.array_equal(encoded, expected)


def test_one_seed_gives_one_dummy(tmp_path: Path, saved_llama: Any) -> None:
    def made(name: str, layers: int, seed: int) -> dict[str, Any]:
        generate_dummy(saved_llama.single, tmp_path / name, layers, seed=seed)
        return load_file(tmp_path / name / "model.safetensors")

    one, same, other, longer = made("a", 1, 0), made("b", 1, 0), made("c", 1, 1), made("d", 2, 0)
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(np.array_equal(one[key], same[key]) for key in one)
    assert not np.array_equal(one[name], other[name])
    assert all(np.array_equal(one[key], longer[key]) for key in one)  # a longer one begins with the shorter


@pytest.mark.parametrize("layers", [0, 5, -1])
def test_a_dummy_has_at_most_the_models_layers(tmp_path: Path, saved_llama: Any, layers: int) -> None:
    with pytest.raises(BadInputError, match="num_layers must be 1 to 4"):
        generate_dummy(saved_llama.single, tmp_path / "dummy", layers)
    assert list(tmp_path.iterdir()) == []


def test_a_dummy_of_an_unknown_dtype_is_refused(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_70B | {"torch_dtype": "float8"}))
    with golden.raises("fingerprint", ConfigError):
        generate_dummy(tmp_path, tmp_path / "dummy", 1)


def test_a_config_alone_has_no_checkpoint(tmp_path: Path, golden: Golden) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_70B))
    with golden.raises("fingerprint", CheckpointError):
        generate(tmp_path, tmp_path / "fingerprint", [0])
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedModelError):
        generate(tmp_path, tmp_path / "fingerprint", [0])


# --- the config of a cut model ---

SIX = {"num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("config", "layers", "expected"),
    [
        pytest.param({"layer_types": list("abcdef")}, [1, 4], {"layer_types": ["b", "e"]}, id="types"),
        pytest.param({"no_rope_layers": [1, 1, 0, 1, 1, 0]}, [0, 2], {"no_rope_layers": [1, 0]}, id="flags"),
        pytest.param({"mlp_only_layers": [0, 3, 5]}, [0, 1, 5], {"mlp_only_layers": [0, 2]}, id="indexes"),
        pytest.param(
            {"mlp_only_layers": [0, 1, 2, 3, 4, 5]}, [4, 5], {"mlp_only_layers": [0, 1]}, id="all-indexes"
        ),
        pytest.param(
            {"decoder_sparse_step": 2, "mlp_only_layers": [3]},
            [0, 1, 3],  # of 0..5, layers 1 and 5 have experts
            {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]},
            id="sparse-step",
        ),
        pytest.param({"decoder_sparse_step": 1}, [0], {"decoder_sparse_step": 1}, id="every-layer-sparse"),
        pytest.param({"max_window_layers": 3}, [1, 2, 4], {"max_window_layers": 2}, id="window-from"),
        pytest.param({"max_window_layers": 28}, [0, 1], {"max_window_layers": 2}, id="window-never"),
        pytest.param({"first_k_dense_replace": 1}, [1, 2], {"first_k_dense_replace": 0}, id="first-dense"),
        pytest.param({"eos_token_id": [1, 2, 3, 4, 5, 6]}, [0], {"eos_token_id": [1, 2, 3, 4, 5, 6]}, id="tokens"),
        pytest.param({"architectures": ["A"] * 6}, [0], {"architectures": ["A"] * 6}, id="architectures"),
        pytest.param(
            {"rope_scaling": {"long_factor": [1.0] * 6}},
            [0],
            {"rope_scaling": {"long_factor": [1.0] * 6}},
            id="nested",
        ),
        pytest.param({"auto_map": {"AutoModel": "x.Y"}}, [0], {}, id="code"),
    ],
)
def test_what_speaks_of_layers_is_cut(config: dict[str, Any], layers: list[int], expected: dict[str, Any]) -> None:
    before = copy.deepcopy(SIX | config)
    source = SIX | config
    assert cut_config(source, layers, ["num_hidden_layers"]) == {"num_hidden_layers": len(layers)} | expected
    assert source == before


@pytest.mark.parametrize(
    "config", [{"mlp_only_layers": ["a"]}, {"decoder_sparse_step": 0}, {"decoder_sparse_step": "2"}]
)
def test_a_pattern_that_is_none_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        cut_config(SIX | config, [0], ["num_hidden_layers"])
