"""Towers, images and own code of a model, by its config and the names and shapes of its tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from daemon.engines.registry import get_engine
from fingerprint.checkpoint import StoredTensor
from fingerprint.config import Workload
from fingerprint.description import describe, described_config
from fingerprint.errors import CheckpointError, ConfigError, UnsupportedModelError
from fingerprint.families import load_spec, read_spec
from fingerprint.image_tokens import image_tokens
from fingerprint.model_use import ModelUse
from fingerprint.own_code import missing_code, own_code_files, own_code_kinds
from fingerprint.truncate import generate_shape
from tests.fingerprint.small_checkpoints import (
    HEAD,
    HIDDEN,
    LLAVA_CONFIG,
    TEXT_CONFIG,
    TOWER,
    TOWER_PARAMS,
    VOCAB,
    Shapes,
    text_shapes,
    write_llama,
    write_llava,
    write_own,
)
from tests.golden_words import Golden


def stored(shapes: Shapes) -> dict[str, StoredTensor]:
    return {name: StoredTensor("BF16", shape) for name, shape in shapes.items()}


def under(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


LAYOUTS = [
    pytest.param(text_shapes("language_model.model."), under("language_model.", HEAD), TOWER, id="beside"),
    pytest.param(text_shapes("model.language_model."), HEAD, under("model.", TOWER), id="in one model"),
    pytest.param(text_shapes("model."), HEAD, under("model.", TOWER), id="in the text model"),
    pytest.param(
        text_shapes("model."),
        HEAD,
        {"visual.blocks.0.attn.qkv.weight": (HIDDEN, HIDDEN), "visual.merger.mlp.0.weight": (HIDDEN, HIDDEN)},
        id="visual",
    ),
    pytest.param(
        text_shapes("model.language_model."),
        HEAD,
        {"model.acoustic_tokenizer_encoder.head.conv.weight": (64, HIDDEN, 3), "model.joins.weight": (HIDDEN, 64)},
        id="sound",
    ),
]


class TestTowers:
    @pytest.mark.parametrize(("text", "head", "tower"), LAYOUTS)
    def test_without_its_towers_a_model_is_that_of_the_other_tensors(
        self, text: Shapes, head: Shapes, tower: Shapes
    ) -> None:
        whole = describe(LLAVA_CONFIG, stored({**text, **head, **tower}))
        alone = describe(LLAVA_CONFIG, stored({**text, **head}))
        assert whole.tower_params == sum(prod(shape) for shape in tower.values())
        assert whole.text_alone == alone
        assert alone.tower_params == 0
        assert whole.num_params - whole.text_alone.num_params == whole.tower_params
        assert whole.text_alone.shape_hash == alone.shape_hash != whole.shape_hash

    def test_a_model_of_text_has_none(self) -> None:
        spec = describe({**TEXT_CONFIG, "architectures": ["A"]}, stored({**text_shapes(), **HEAD}))
        assert (spec.tower_params, spec.text_alone) == (0, spec)

    def test_the_class_of_transformers_has_the_same(self) -> None:
        torch = pytest.importorskip("torch")
        from transformers import AutoConfig, LlavaForConditionalGeneration

        vision = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
        config: dict[str, Any] = {**LLAVA_CONFIG, "vision_config": {**LLAVA_CONFIG["vision_config"], **vision}}  # type: ignore[dict-item]
        with torch.device("meta"):
            model = LlavaForConditionalGeneration._from_config(AutoConfig.for_model(**config))
        towers = [model.model.vision_tower, model.model.multi_modal_projector]
        counted = sum(parameter.numel() for tower in towers for parameter in tower.parameters())
        assert described_config(config).tower_params == counted

    def test_hashes_kept_before_towers_and_code_were_told_apart_still_hold(self) -> None:
        spec = describe(LLAVA_CONFIG, stored({**text_shapes("language_model.model."), **HEAD, **TOWER}))
        before = replace(spec, tower_params=0, tower_vector_params=0)
        assert replace(spec, own_code=("AutoConfig",)).shape_hash == spec.shape_hash == before.shape_hash


SQUARE = {"image_size": 336, "patch_size": 14}


class TestImageTokens:
    @pytest.mark.parametrize(
        ("config", "tokens"),
        [
            # Published: LLaVA 1.5 has 24 x 24 places, Gemma 3 and PaliGemma 256 (224 pixels), BLIP-2 32 queries.
            ({"model_type": "llava", "vision_config": SQUARE}, 576),
            ({"model_type": "llava", "vision_config": SQUARE, "vision_feature_select_strategy": "full"}, 577),
            ({"model_type": "llava", "vision_config": {}, "image_seq_length": 576}, 576),
            ({"model_type": "gemma3", "vision_config": SQUARE, "mm_tokens_per_image": 256}, 256),
            ({"model_type": "paligemma", "vision_config": {**SQUARE, "num_image_tokens": 256}}, 256),
            ({"model_type": "blip-2", "vision_config": SQUARE, "num_query_tokens": 32}, 32),
            (
                {
                    "model_type": "internvl_chat",
                    "vision_config": {"image_size": 448, "patch_size": 14},
                    "downsample_ratio": 0.5,
                    "dynamic_image_size": False,
                },
                256,
            ),
        ],
    )
    def test_config_tells(self, config: dict[str, object], tokens: int) -> None:
        assert image_tokens(config) == tokens

    @pytest.mark.parametrize(
        "config",
        [
            {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2}},
            {"model_type": "qwen2_vl", "vision_config": {"patch_size": 14}},
            {"model_type": "llava_next", "vision_config": SQUARE},
            {"model_type": "idefics3", "vision_config": {**SQUARE, "image_size": 364}, "scale_factor": 2},
            {"model_type": "llama4", "vision_config": {**SQUARE, "pixel_shuffle_ratio": 0.5}},
            {"model_type": "unheard_of", "vision_config": SQUARE},
        ],
    )
    def test_what_the_image_decides_is_refused_with_what_to_give(
        self, config: dict[str, object], golden: Golden
    ) -> None:
        with pytest.raises(ConfigError) as refused:
            image_tokens(config)
        golden("fingerprint", str(refused.value))

    def test_a_model_that_reads_none_is_refused(self, golden: Golden) -> None:
        with golden.raises("fingerprint", UnsupportedModelError):
            image_tokens(TEXT_CONFIG)

    @pytest.mark.parametrize("size", [0, -1, 2.5, "14", None, [14, 16], True])
    def test_absurd_sizes_are_one_line(self, size: object) -> None:
        with pytest.raises(ConfigError):
            image_tokens({"model_type": "llava", "vision_config": {"image_size": 336, "patch_size": size}})

    def test_the_square_is_that_of_transformers(self) -> None:
        transformers = pytest.importorskip("transformers")
        pytest.importorskip("torch")
        config = transformers.CLIPVisionConfig(
            **SQUARE, hidden_size=64, num_hidden_layers=1, num_attention_heads=4
        )
        embeddings = transformers.CLIPVisionModel(config).get_input_embeddings()
        places = (config.image_size // embeddings.stride[0]) ** 2
        assert image_tokens({"model_type": "llava", "vision_config": SQUARE}) == places


class TestWorkload:
    def test_images_are_part_of_the_prompt_and_said_apart(self) -> None:
        work = Workload(input_tokens=512, output_tokens=128).with_images(2, 576)
        assert (work.input_tokens, work.context_tokens) == (512 + 2 * 576, 512 + 2 * 576 + 128)
        assert work.input_words == "512 + 2 x 576 image"
        assert Workload().input_words == "512"

    def test_a_context_that_is_too_short_says_so(self) -> None:
        with pytest.raises(ConfigError, match=r"512 \+ 2 x 576 image input"):
            Workload(longest_tokens=700).with_images(2, 576)


@pytest.mark.parametrize(
    "use",
    [
        {"images": -1},
        {"images": 1001},
        {"images": 1, "image_tokens": 0},
        {"image_tokens": 5},
        {"images": 1, "text_only": True},
    ],
    ids=repr,
)
def test_uses_that_cannot_be_are_refused(use: dict[str, Any], golden: Golden) -> None:
    with golden.raises("fingerprint", ConfigError):
        ModelUse(**use)


class TestOwnCode:
    def test_a_model_with_code_of_its_own_is_described_without_running_it(self, tmp_path: Path) -> None:
        folder = write_own(tmp_path / "own")
        spec = load_spec(folder)
        assert spec.own_code == ("AutoConfig", "AutoModelForCausalLM")
        assert spec.num_layers == 2
        assert own_code_files(folder) == ("configuration_own.py", "modeling_own.py")
        assert missing_code(folder) == ()
        assert not (folder / "ran").exists()

    def test_a_family_with_a_row_needs_none(self) -> None:
        config = {**TEXT_CONFIG, "auto_map": {"AutoConfig": "a.B"}}
        assert own_code_kinds(config) == ("AutoConfig",)
        assert read_spec(config).own_code == ()

    @pytest.mark.parametrize(
        ("auto_map", "kinds"),
        [
            (None, ()),
            ([], ()),
            ("x", ()),
            ({"AutoConfig": 1, "\x1b[31m": "a.b", 3: "c"}, ("AutoConfig",)),
            ({f"Auto{n:03}": "a.b" for n in range(500)}, tuple(f"Auto{n:03}" for n in range(64))),
        ],
    )
    def test_whatever_is_in_its_place_is_bounded(self, auto_map: object, kinds: tuple[str, ...]) -> None:
        assert own_code_kinds({"auto_map": auto_map}) == kinds

    def test_a_file_that_is_not_there_is_named(self, tmp_path: Path) -> None:
        folder = write_own(tmp_path / "own")
        (folder / "modeling_own.py").unlink()
        (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tok.T", None]}}))
        assert own_code_files(folder) == ("configuration_own.py", "modeling_own.py", "tok.py")
        assert missing_code(folder) == ("modeling_own.py", "tok.py")

    def test_files_that_the_named_ones_import_are_missed_too(self, tmp_path: Path) -> None:
        """Imports are found as transformers finds them: by text, in branches too, and of the same folder alone."""
        folder = write_own(tmp_path / "own")
        (folder / "modeling_own.py").write_text(
            "from .configuration_own import C\ntry:\n    from .kernels import k\nexcept ImportError:\n    pass\n"
            "import numpy\nfrom numpy import x\nfrom . import y\nfrom ..up import z\nfrom .sub.deep import d\n"
        )
        assert missing_code(folder) == ("kernels.py",)
        (folder / "kernels.py").write_text("import .far\nfrom .kernels import itself\n")
        assert missing_code(folder) == ("far.py",)
        (folder / "far.py").write_text("\n" * 2**20)
        assert missing_code(folder) == ()

    def test_code_that_is_no_text_is_looked_through(self, tmp_path: Path) -> None:
        folder = write_own(tmp_path / "own")
        (folder / "modeling_own.py").write_bytes(b"from .part import x\n\xff\x00")
        assert missing_code(folder) == ("part.py",)

    @pytest.mark.parametrize("named", ["someone/else--modeling.M", "../../etc/passwd", "", 7, "a b.C"])
    def test_code_from_elsewhere_is_refused(self, tmp_path: Path, named: object) -> None:
        (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": named}}))
        with pytest.raises(CheckpointError, match="auto_map of"):
            own_code_files(tmp_path)

    def test_a_fingerprint_has_the_code_only_where_it_may_run(self, tmp_path: Path) -> None:
        source = write_own(tmp_path / "own")
        generate_shape(source, tmp_path / "without", 1)
        generate_shape(source, tmp_path / "with", 1, code=True)
        for folder, has in (("without", False), ("with", True)):
            config = json.loads((tmp_path / folder / "config.json").read_text())
            assert config["num_hidden_layers"] == 1
            assert ("auto_map" in config) is has
            assert (tmp_path / folder / "modeling_own.py").is_file() is has
        assert not (source / "ran").exists()


class TestTables:
    """Refusals of engines for such models."""

    def test_vllm_takes_own_code_with_permission_and_the_others_never(
        self, tmp_path: Path, golden: Golden
    ) -> None:
        spec = load_spec(write_own(tmp_path / "own"))
        vllm, torch, tensorrt = (get_engine(n).capabilities() for n in ("vllm", "torch", "tensorrt-llm"))
        assert vllm.architecture_refusal(spec) is None
        assert "--trust-remote-code" in str(vllm.code_refusal(spec, trusted=False))
        assert vllm.code_refusal(spec, trusted=True) is None
        for table in (torch, tensorrt):
            golden("fingerprint", str(table.architecture_refusal(spec)))

    @pytest.mark.parametrize("family", ["deepseek_v3", "phi3", "qwen2_moe", "llava"])
    def test_a_model_type_of_transformers_needs_no_code(self, tmp_path: Path, family: str) -> None:
        spec = replace(load_spec(write_own(tmp_path / "own")), family=family)
        assert get_engine("vllm").capabilities().code_refusal(spec, trusted=False) is None

    def test_code_for_the_config_alone_makes_no_class_of_the_model(self, tmp_path: Path, golden: Golden) -> None:
        spec = replace(load_spec(write_own(tmp_path / "own")), own_code=("AutoConfig",))
        golden("fingerprint", str(get_engine("vllm").capabilities().architecture_refusal(spec)))

    def test_towers_that_vllm_loads_whatever_it_is_told_are_not_left_out(
        self, tmp_path: Path, golden: Golden
    ) -> None:
        table = get_engine("vllm").capabilities()
        spec = load_spec(write_llava(tmp_path / "llava"))
        assert table.text_only_refusal(spec) is None
        kept = replace(spec, architecture="FunASRForConditionalGeneration")
        golden("fingerprint", str(table.text_only_refusal(kept)))


def test_small_checkpoints_are_what_they_say(tmp_path: Path) -> None:
    assert load_spec(write_llava(tmp_path / "llava")).tower_params == TOWER_PARAMS
    plain = load_spec(write_llama(tmp_path / "llama"))
    assert (plain.tower_params, plain.own_code, plain.vocab_size) == (0, (), VOCAB)
