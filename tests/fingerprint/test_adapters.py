"""Reading PEFT adapters: what PEFT itself computes of them, and a refusal of everything that is more or broken."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.checkpoint import stored_tensors
from fingerprint.config_json import read_config
from fingerprint.errors import (
    BadInputError,
    CheckpointError,
    ConfigError,
    IserveError,
    NotFoundError,
    UnsupportedAdapterError,
)
from fingerprint.lora import BaseTensors, LoraAdapter, check_fit, check_values, read_adapter, require_supported
from fingerprint.lora.adapter import WEIGHTS_FILE
from fingerprint.lora.adapter_config import CONFIG_FILE, parse_adapter_config
from fingerprint.lora.module_patterns import first_keys
from tests.fingerprint.adapter_cases import CASES, PATTERN_KEYS, PATTERN_NAMES, recorded
from tests.fingerprint.small_adapters import (
    HIDDEN,
    LORA,
    Q0,
    V1,
    factors,
    module_names,
    values,
    write_adapter,
    write_base,
    write_tensors,
)
from tests.golden_words import Golden

PREFIX = "base_model.model."


@pytest.mark.parametrize("case", CASES)
def test_ranks_and_scales_are_those_of_peft(case: str, tmp_path: Path) -> None:
    asked, found = CASES[case], recorded()["cases"][case]
    adapter = read_adapter(
        write_adapter(tmp_path / "adapter", factors(asked.ranks), asked.adapter_dtype, **asked.config)
    )
    assert adapter.unsupported == ()
    assert {module.name: module.rank for module in adapter.modules} == found["ranks"] == asked.ranks
    assert {module.name: module.scale for module in adapter.modules} == pytest.approx(found["scales"])


def test_what_is_said_of_an_adapter_is_what_its_file_holds(tmp_path: Path) -> None:
    adapter = read_adapter(write_adapter(tmp_path / "adapter", dtype="F16"))
    assert [module.name for module in adapter.modules] == sorted(module_names(["q_proj", "v_proj"]))
    assert adapter.num_params == sum(module.num_params for module in adapter.modules) == 2 * (4 * 32 + 4 * 24)
    assert (adapter.num_bytes, adapter.dtypes, adapter.max_rank) == (2 * adapter.num_params, ("F16",), 4)
    assert adapter.config.base_model == "example/base"
    check_values(adapter)


def test_the_choice_among_patterns_is_that_of_peft() -> None:
    for keys, expected in zip(PATTERN_KEYS, recorded()["pattern_keys"], strict=True):
        found = first_keys(keys, PATTERN_NAMES, "rank_pattern")
        assert [key or name for key, name in zip(found, PATTERN_NAMES, strict=True)] == expected


_WORDS = st.sampled_from(["q_proj", "v_proj", "layers", "0", "1", "10", "self_attn", "mlp", "model"])
_PIECES = st.one_of(_WORDS, st.sampled_from([r"\d+", ".*", "[qv]_proj", "(q|v)_proj", "(?:mlp)?", ".", "^", "$"]))


@given(
    names=st.lists(st.lists(_WORDS, min_size=1, max_size=5).map(".".join), min_size=1, max_size=4),
    keys=st.lists(
        st.lists(_PIECES, min_size=1, max_size=3).map(r"\.".join)
        | st.lists(_WORDS, min_size=1, max_size=4).map(".".join),
        max_size=4,
        unique=True,
    ),
)
def test_a_module_has_the_value_of_the_first_expression_that_its_end_behind_a_dot_matches(
    names: list[str], keys: list[str]
) -> None:
    """The rule as PEFT states it, tried on every end of a name rather than by one expression with a prefix."""
    found = list(first_keys(keys, names, "rank_pattern"))
    for name, key in zip(names, found, strict=True):
        starts = [0, *(at.end() for at in re.finditer(r"\.", name))]
        # An expression that begins with ^ means the whole name; compiled patterns keep ^ at the string's begin.
        matching = [
            each for each in keys if any(re.compile(f"(?:{each})$").match(name, start) for start in starts)
        ]
        assert key == next(iter(matching), None)


@given(rank=st.integers(1, 512), alpha=st.floats(-1e3, 1e3), stabilized=st.booleans())
def test_the_scale_is_alpha_by_the_rank_or_its_root(rank: int, alpha: float, stabilized: bool) -> None:
    config = parse_adapter_config(LORA | {"r": rank, "lora_alpha": alpha, "use_rslora": stabilized})
    root = math.sqrt(rank) if stabilized else rank
    assert config.scale(rank, alpha) * root == pytest.approx(alpha)


def test_an_expression_that_could_take_for_ever_is_never_matched() -> None:
    for evil in ["(a+)+", "(a|a)*", "a**", "(.*)*x", ".*" * 9, "a{3,9}", "(?=a)", "x" * 600, "[", "(", r"\w+(\1)"]:
        with pytest.raises(UnsupportedAdapterError):
            list(first_keys([evil], ["a" * 40], "rank_pattern"))
    with pytest.raises(UnsupportedAdapterError, match="too long"):
        list(first_keys(["(a|a)" * 20], ["a" * 40], "rank_pattern"))
    many = [f"layers.{number}.q_proj" for number in range(20_000)]
    with pytest.raises(UnsupportedAdapterError, match="too long"):
        list(first_keys(many, many, "rank_pattern"))


Break = Callable[[Path], object]


def with_tensor(name: str, shape: tuple[int, ...] = (HIDDEN,)) -> Break:
    """Return a change that adds a tensor to a plain adapter."""
    tensors = factors({Q0: 4}) | {f"{PREFIX}{name}": values(shape, 1)}
    return lambda folder: write_tensors(folder / WEIGHTS_FILE, tensors)


def with_tensors(tensors: dict[str, Any], dtype: str = "F32") -> Break:
    return lambda folder: write_tensors(folder / WEIGHTS_FILE, tensors, dtype)


def with_field(**fields: Any) -> Break:
    return lambda folder: (folder / CONFIG_FILE).write_text(json.dumps(LORA | fields))


def with_text(text: str) -> Break:
    return lambda folder: (folder / CONFIG_FILE).write_text(text)


def renamed(tensors: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {name.replace(old, new): value for name, value in tensors.items()}


MORE_THAN_LORA: dict[str, Break] = {
    "dora": with_field(use_dora=True),
    "dora-tensor": with_tensor(f"{Q0}.lora_magnitude_vector"),
    "ia3": with_field(peft_type="IA3"),
    "prompt": with_field(peft_type="PROMPT_TUNING", num_virtual_tokens=8),
    "modules-to-save": with_field(modules_to_save=["lm_head"]),
    "whole-module": with_tensor("model.embed_tokens.weight", (32, HIDDEN)),
    "saved-module": with_tensor("lm_head.modules_to_save.weight", (32, HIDDEN)),
    "embedding": with_tensor("model.embed_tokens.lora_embedding_A", (4, 32)),
    "trainable-tokens": with_field(trainable_token_indices=[1, 2]),
    "trainable-tokens-tensor": with_tensor("model.embed_tokens.token_adapter.trainable_tokens_delta", (2, HIDDEN)),
    "bias": with_field(bias="lora_only"),
    "bias-tensor": with_tensor(f"{Q0}.bias"),
    "lora-bias": with_field(lora_bias=True),
    "lora-bias-tensor": with_tensor(f"{Q0}.lora_B.bias"),
    "conv1d": with_field(fan_in_fan_out=True),
    "activated": with_field(alora_invocation_tokens=[5, 6]),
    "experts": with_field(target_modules=[], target_parameters=["mlp.experts.down_proj"]),
    "repeated-layers": with_field(layer_replication=[[0, 1], [0, 2]]),
    "pissa": with_field(init_lora_weights="pissa_niter_16"),
    "unknown-start": with_field(init_lora_weights="novel"),
    "other-task": with_field(task_type="SEQ_CLS"),
    "layers-pattern": with_field(layers_to_transform=[0], layers_pattern="lay.*"),
    "unknown-field": with_field(use_novelty=True, novelty_group=16, novelty_off=False),
    "unknown-part": with_tensor(f"{Q0}.lora_diag", (4,)),
    "unknown-tensor": with_tensor("something"),
    "several": with_field(use_dora=True, bias="all", modules_to_save=["lm_head"]),
    "no-tensor": with_tensors({}),
}


@pytest.mark.parametrize("case", MORE_THAN_LORA)
def test_more_than_a_plain_lora_is_refused_by_name(case: str, tmp_path: Path, golden: Golden) -> None:
    folder = write_adapter(tmp_path / "adapter")
    MORE_THAN_LORA[case](folder)
    adapter = read_adapter(folder)  # what it is can be said all the same
    with pytest.raises(UnsupportedAdapterError) as refusal:
        require_supported(adapter)
    golden("adapter-errors", str(refusal.value))


def test_what_matters_to_training_alone_is_no_reason(tmp_path: Path) -> None:
    fields: dict[str, Any] = {
        "lora_dropout": 0.1,
        "init_lora_weights": "gaussian",
        "auto_mapping": {"base_model_class": "LlamaForCausalLM"},
        "peft_version": "0.21.2",
        "loftq_config": {},
        "megatron_core": "megatron.core",
        "qalora_group_size": 16,
        "modules_to_save": None,
        "layers_to_transform": None,
        "exclude_modules": ["lm_head"],
        "use_dora": False,
        "task_type": None,
        "later_feature": False,
    }
    folder = write_adapter(tmp_path / "adapter")
    with_field(**fields)(folder)
    assert read_adapter(folder).unsupported == ()


def test_a_rank_above_the_limit_is_a_reason(tmp_path: Path, golden: Golden) -> None:
    folder = write_adapter(tmp_path / "adapter")
    assert read_adapter(folder, max_rank=4).unsupported == ()
    (reason,) = read_adapter(folder, max_rank=3).unsupported
    golden("adapter-errors", reason)


def _truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS_FILE, (folder / WEIGHTS_FILE).stat().st_size - 8)


def _pickle(folder: Path) -> None:
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")


def _whole_model(folder: Path) -> None:
    shutil.rmtree(folder)
    write_base(folder)


def _link(name: str) -> Break:
    def change(folder: Path) -> None:
        outside = folder.parent / f"outside-{name}"
        (folder / name).rename(outside)
        (folder / name).symlink_to(outside)

    return change


def _ring(folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    (folder / WEIGHTS_FILE).symlink_to(WEIGHTS_FILE)


def _pipe(folder: Path) -> None:
    (folder / CONFIG_FILE).unlink()
    os.mkfifo(folder / CONFIG_FILE)


def _integers(folder: Path) -> None:
    header: dict[str, Any] = {}
    for at, (name, array) in enumerate(factors({Q0: 4}).items()):
        header[name] = {"dtype": "I8", "shape": list(array.shape), "data_offsets": [64 * at, 64 * at + 64]}
    raw = json.dumps(header).encode()
    (folder / WEIGHTS_FILE).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(128))


_PAIR = factors({Q0: 4})
_A, _B = _PAIR
BROKEN: dict[str, tuple[type[IserveError], Break]] = {
    "no-folder": (NotFoundError, shutil.rmtree),
    "no-config": (NotFoundError, lambda folder: (folder / CONFIG_FILE).unlink()),
    "no-weights": (NotFoundError, lambda folder: (folder / WEIGHTS_FILE).unlink()),
    "whole-model": (NotFoundError, _whole_model),
    "pickle": (CheckpointError, _pickle),
    "truncated": (CheckpointError, _truncate),
    "empty-weights": (CheckpointError, lambda folder: (folder / WEIGHTS_FILE).write_bytes(b"")),
    "weights-outside": (CheckpointError, _link(WEIGHTS_FILE)),
    "config-outside": (CheckpointError, _link(CONFIG_FILE)),
    "ring-of-links": (CheckpointError, _ring),
    "config-is-a-pipe": (NotFoundError, _pipe),
    "no-json": (ConfigError, with_text("{")),
    "json-list": (ConfigError, with_text("[]")),
    "large-config": (ConfigError, with_text(" " * (4 * 2**20 + 1))),
    "no-method": (ConfigError, with_field(peft_type=None)),
    "rank-of-zero": (ConfigError, with_field(r=0)),
    "rank-of-true": (ConfigError, with_field(r=True)),
    "no-alpha": (ConfigError, with_field(lora_alpha=None)),
    "alpha-nan": (ConfigError, with_text(json.dumps(LORA | {"lora_alpha": math.nan}))),
    "alpha-of-digits": (ConfigError, with_field(lora_alpha=10**400)),
    "flag-of-text": (ConfigError, with_field(use_rslora="yes")),
    "pattern-list": (ConfigError, with_field(rank_pattern=["q_proj"])),
    "pattern-rank": (ConfigError, with_field(rank_pattern={"q_proj": 2.5})),
    "targets-number": (ConfigError, with_field(target_modules=3)),
    "layers-text": (ConfigError, with_field(layers_to_transform=["0"])),
    "base-number": (ConfigError, with_field(base_model_name_or_path=7)),
    "evil-pattern": (UnsupportedAdapterError, with_field(rank_pattern={"(q+)+_proj": 4})),
    "other-rank": (CheckpointError, with_field(r=8)),
    "rank-of-pattern": (CheckpointError, with_field(rank_pattern={"v_proj": 2})),
    "not-targeted": (CheckpointError, with_field(target_modules=["q_proj"])),
    "excluded": (CheckpointError, with_field(exclude_modules=["layers.1.self_attn.v_proj"])),
    "layer-not-targeted": (CheckpointError, with_field(layers_to_transform=0)),
    "unpaired": (CheckpointError, with_tensors({_A: _PAIR[_A]})),
    "ranks-differ": (CheckpointError, with_tensors({_A: _PAIR[_A][:3], _B: _PAIR[_B]})),
    "flat": (CheckpointError, with_tensors({_A: _PAIR[_A].reshape(-1), _B: _PAIR[_B]})),
    "empty-factor": (CheckpointError, with_tensors({_A: _PAIR[_A][:0], _B: _PAIR[_B][:, :0]})),
    "long-name": (CheckpointError, with_tensors(renamed(_PAIR, "layers.0.", "layers.0." * 100))),
    "integers": (CheckpointError, _integers),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused_with_the_reason(case: str, tmp_path: Path, golden: Golden) -> None:
    kind, change = BROKEN[case]
    folder = write_adapter(tmp_path / "adapter")
    change(folder)
    with pytest.raises(IserveError) as refusal:
        read_adapter(folder)
    assert type(refusal.value) is kind
    golden("adapter-errors", str(refusal.value))


def test_json_that_nests_without_end_is_refused(tmp_path: Path, golden: Golden) -> None:
    folder = write_adapter(tmp_path / "adapter")
    with_text("[" * 100_000)(folder)
    with golden.raises("fingerprint", ConfigError):
        read_adapter(folder)


def test_links_within_a_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = write_adapter(tmp_path / "models--a--b" / "snapshots" / "0123")
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        (snapshot / name).rename(blobs / name)
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert read_adapter(snapshot).unsupported == ()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_values_that_are_not_finite_are_found_wherever_they_are(
    dtype: str, value: float, tmp_path: Path, golden: Golden
) -> None:
    tensors = {name: array.copy() for name, array in factors({Q0: 4, V1: 4}).items()}
    [*tensors.values()][-1].reshape(-1)[-1] = value
    if math.isnan(value) and dtype == "BF16":  # whose encoder is given finite values only
        [*tensors.values()][-1].reshape(-1)[-1] = math.inf
    adapter = read_adapter(write_adapter(tmp_path / "adapter", tensors, dtype))
    with golden.raises("fingerprint", CheckpointError):
        check_values(adapter)


@given(data=st.binary(max_size=200))
def test_no_bytes_make_anything_but_a_refusal(data: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_adapter(tmp_path_factory.mktemp("fuzzed") / "adapter")
    whole = (folder / WEIGHTS_FILE).read_bytes()
    for name, raw in ((WEIGHTS_FILE, data), (WEIGHTS_FILE, whole[:100] + data), (CONFIG_FILE, data)):
        (folder / name).write_bytes(raw)
        with pytest.raises(BadInputError):
            read_adapter(folder)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_FIELDS = [*LORA, "use_rslora", "rank_pattern", "alpha_pattern", "exclude_modules", "layers_to_transform"]
_FIELDS += ["layers_pattern", "init_lora_weights", "fan_in_fan_out", "modules_to_save", "use_dora", "novel"]
_FIELDS += ["lora_bias", "trainable_token_indices", "feedforward_modules"]


@pytest.mark.slow
@given(fields=st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=4))
def test_no_field_makes_anything_but_a_refusal(fields: dict[str, Any]) -> None:
    with suppress(BadInputError):
        config = parse_adapter_config(LORA | fields)
        list(first_keys([key for key, _ in config.rank_pattern.values], [Q0], "rank_pattern"))
        config.targets.contain(Q0)


def fit(adapter: LoraAdapter, base: Path) -> None:
    check_fit(adapter, BaseTensors(str(base), read_config(base), stored_tensors(base)))


@pytest.mark.parametrize("files", [1, 3])
def test_an_adapter_fits_the_base_that_it_was_made_for(files: int, tmp_path: Path) -> None:
    ranks = dict.fromkeys([*module_names(["_proj"]), "lm_head"], 4)
    folder = write_adapter(tmp_path / "adapter", factors(ranks), target_modules="all-linear")
    fit(read_adapter(folder), write_base(tmp_path / "base", files=files))


def _half_of_queries() -> dict[str, Any]:
    return {name: array[: HIDDEN // 2] if name == _B else array for name, array in _PAIR.items()}


OTHER_BASES: dict[str, tuple[type[IserveError], dict[str, Any] | None, dict[str, Any]]] = {
    "shape": (CheckpointError, _half_of_queries(), {}),
    "no-such-module": (CheckpointError, renamed(_PAIR, "layers.0.", "layers.7."), {}),
    "other-prefix": (CheckpointError, renamed(_PAIR, ".model.layers", ".language_model.layers"), {}),
    "quantized": (UnsupportedAdapterError, None, {"quantization_config": {"quant_method": "fp8"}}),
    "quantized-text": (UnsupportedAdapterError, None, {"text_config": {"quantization_config": {"bits": 4}}}),
    "conv1d-base": (UnsupportedAdapterError, None, {"model_type": "gpt2"}),
    "tied-head": (UnsupportedAdapterError, factors({"lm_head": 4}), {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("case", OTHER_BASES)
def test_a_base_that_it_cannot_be_added_to_is_refused(case: str, tmp_path: Path, golden: Golden) -> None:
    kind, tensors, config = OTHER_BASES[case]
    folder = write_adapter(tmp_path / "adapter", tensors, target_modules=None)
    with pytest.raises(IserveError) as refusal:
        fit(read_adapter(folder), write_base(tmp_path / "base", **config))
    assert type(refusal.value) is kind
    golden("adapter-errors", str(refusal.value))


def test_the_first_mismatch_by_name_is_the_one_in_the_message(tmp_path: Path) -> None:
    wrong = {
        name: np.ascontiguousarray(array[:, :8]) if "_A" in name else array
        for name, array in factors({V1: 4, Q0: 4}).items()
    }
    with pytest.raises(CheckpointError, match=re.escape(f"{Q0}.weight' of [16, 8]")):
        fit(read_adapter(write_adapter(tmp_path / "adapter", wrong)), write_base(tmp_path / "base"))


def test_an_adapter_of_many_modules_is_read_at_once(tmp_path: Path) -> None:
    """Updates of a mixture's 18,000 expert matrices, each named in the configuration."""
    names = [f"model.layers.{number // 384}.mlp.experts.{number % 384}.up_proj" for number in range(18_000)]
    tensors = {
        f"{PREFIX}{name}.lora_{part}.weight": np.zeros(shape, np.float32)
        for name in names
        for part, shape in (("A", (1, 1)), ("B", (1, 1)))
    }
    folder = write_adapter(tmp_path / "adapter", tensors, r=1, target_modules=names)
    assert len(read_adapter(folder).modules) == 18_000
