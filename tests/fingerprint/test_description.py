"""Models described by their config and their tensors' names, types and shapes, written out here by hand."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fingerprint.checkpoint import StoredTensor
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.description import describe
from fingerprint.description.facts import LAYERS_KEYS
from fingerprint.errors import BadInputError, CheckpointError, ConfigError, UnsupportedModelError
from fingerprint.model_spec import LayerKind, ModelSpec
from fingerprint.truncated_config import cut_config
from fingerprint.weight_bytes import layer_weight_bytes
from tests.golden_words import Golden

HIDDEN, VOCAB, INNER, EXPERTS = 64, 100, 48, 4
Tensors = dict[str, StoredTensor]
ENDS = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCAB, HIDDEN),
}
NORMS = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
GROUPED = {
    "self_attn.q_proj.weight": (64, HIDDEN),
    "self_attn.k_proj.weight": (32, HIDDEN),
    "self_attn.v_proj.weight": (32, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, 64),
}
LATENT = {
    "self_attn.q_proj.weight": (96, HIDDEN),
    "self_attn.kv_a_proj_with_mqa.weight": (32 + 8, HIDDEN),
    "self_attn.kv_a_layernorm.weight": (32,),
    "self_attn.kv_b_proj.weight": (128, 32),
    "self_attn.o_proj.weight": (HIDDEN, 64),
}
DELTA = {  # 4 heads of values of 16, 2 of keys of 8
    "linear_attn.in_proj_qkvz.weight": (160, HIDDEN),
    "linear_attn.in_proj_ba.weight": (8, HIDDEN),
    "linear_attn.conv1d.weight": (2 * 16 + 64, 1, 4),
    "linear_attn.A_log": (4,),
    "linear_attn.dt_bias": (4,),
    "linear_attn.out_proj.weight": (HIDDEN, 64),
}
MLP = {
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
MIXTURE = {"mlp.gate.weight": (EXPERTS, HIDDEN)} | {
    f"mlp.experts.{expert}.{name.removeprefix('mlp.')}": shape
    for expert in range(EXPERTS)
    for name, shape in MLP.items()
}
CONFIG = {
    "model_type": "any",
    "architectures": ["AnyForCausalLM"],
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": INNER,
    "num_experts_per_tok": 2,
    "n_routed_experts": EXPERTS,
    "max_position_embeddings": 4096,
}


def model(*layers: dict[str, tuple[int, ...]], dtype: str = "BF16", **more: tuple[int, ...]) -> Tensors:
    shapes = ENDS | more
    for index, layer in enumerate(layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return {name: StoredTensor(dtype, shape) for name, shape in shapes.items()}


def spec_of(*layers: dict[str, tuple[int, ...]], **changes: Any) -> ModelSpec:
    return describe(CONFIG | {"num_hidden_layers": len(layers)} | changes, model(*layers))


def elements(*parts: dict[str, tuple[int, ...]]) -> int:
    return sum(prod(shape) for part in parts for shape in part.values())


def kinds(spec: ModelSpec) -> list[tuple[int, str, int, int]]:
    def told(kind: LayerKind) -> tuple[int, str, int, int]:
        assert kind.shape is not None
        return kind.count, kind.shape.mixer, kind.shape.kv_elements, kind.shape.state_bytes

    return [told(kind) for kind in spec.kinds]


def test_layers_all_alike_have_no_shapes_of_their_own() -> None:
    spec = spec_of(*[GROUPED | NORMS | MLP] * 3, n_routed_experts=0)
    assert (spec.layer_shapes, spec.num_layers, spec.num_kv_heads, spec.head_dim) == ((), 3, 2, 16)
    assert (spec.kv_elements, spec.gated_mlp, spec.tied_embeddings) == (64, True, False)
    assert spec.num_params == 3 * elements(GROUPED, NORMS, MLP) + elements(ENDS)
    assert spec.layer_linear_params == elements(GROUPED, MLP)


def test_dense_layers_before_a_mixture() -> None:
    spec = spec_of(LATENT | NORMS | MLP, *[LATENT | NORMS | MIXTURE] * 3)
    assert kinds(spec) == [(1, "latent attention", 40, 0), (3, "latent attention, experts", 40, 0)]
    assert (spec.num_experts, spec.experts_per_token, spec.num_kv_heads, spec.kv_head_elements) == (4, 2, 1, 40)
    assert spec.num_params == elements(LATENT, NORMS, MLP, ENDS) + 3 * elements(LATENT, NORMS, MIXTURE)
    dense, mixture = spec.layer_shapes
    assert mixture.expert_params == EXPERTS * elements(MLP)
    assert mixture.linear_params == elements(MIXTURE, LATENT) - EXPERTS * HIDDEN - 32  # router and norm
    assert dense.expert_params == 0


def test_linear_attention_keeps_a_state() -> None:
    sizes = {"linear_key_head_dim": 8, "linear_num_key_heads": 2}
    spec = spec_of(*[DELTA | NORMS | MLP] * 3, GROUPED | NORMS | MLP, n_routed_experts=0, **sizes)
    state, convolution = 4 * 8 * 16, 96 * 3
    assert kinds(spec) == [(3, "gated delta", 0, 2 * (state + convolution)), (1, "attention", 64, 0)]
    in_float32 = spec_of(*[DELTA | NORMS | MLP] * 2, n_routed_experts=0, mamba_ssm_dtype="float32", **sizes)
    assert kinds(in_float32) == [(2, "gated delta", 0, 4 * state + 2 * convolution)]


def test_layers_that_look_into_the_kv_of_others_keep_none() -> None:
    spec = spec_of(*[GROUPED | NORMS | MLP] * 5, n_routed_experts=0, num_kv_shared_layers=2)
    assert kinds(spec) == [(3, "attention", 64, 0), (2, "attention to another layer's KV", 0, 0)]


def test_windows_follow_layer_types() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention", "chunked_attention"]
    spec = spec_of(*[GROUPED | MLP] * 4, layer_types=types, sliding_window=8, attention_chunk_size=32)
    assert spec.windows == (8, None, 8, 32)


def test_draft_layers_and_heads_are_not_served() -> None:
    layer = GROUPED | NORMS | MLP
    tensors = model(*[layer] * 3) | {"mtp.fc.weight": StoredTensor("BF16", (HIDDEN, 2 * HIDDEN))}
    config = CONFIG | {"n_routed_experts": 0}
    assert describe(config | {"num_hidden_layers": 2}, tensors).num_params == 2 * elements(layer) + elements(ENDS)


def test_causal_masks_in_old_checkpoints_are_no_weights() -> None:
    """``GPT2LMHeadModel`` of vLLM 0.33 drops ``.attn.bias`` and ``.attn.masked_bias`` (its ``WeightsMapper``).

    A layer of openai-community/gpt2 has 12 x 768^2 elements in matrices, 9 x 768 in their biases and 4 x 768 in
    norms; 124,439,808 parameters in all.
    """
    width = 768
    layer = {
        "ln_1.weight": (width,),
        "ln_1.bias": (width,),
        "attn.bias": (1, 1, 1024, 1024),
        "attn.masked_bias": (),
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "ln_2.weight": (width,),
        "ln_2.bias": (width,),
        "mlp.c_fc.weight": (width, 4 * width),
        "mlp.c_fc.bias": (4 * width,),
        "mlp.c_proj.weight": (4 * width, width),
        "mlp.c_proj.bias": (width,),
    }
    ends = {
        "wte.weight": (50257, width),
        "wpe.weight": (1024, width),
        "ln_f.weight": (width,),
        "ln_f.bias": (width,),
    }
    shapes = ends | {f"h.{index}.{name}": shape for index in range(12) for name, shape in layer.items()}
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": width,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    spec = describe(config, {name: StoredTensor("F32", shape) for name, shape in shapes.items()})
    assert (spec.layer_params, spec.num_params) == (12 * width**2 + 13 * width, 124_439_808)


def test_towers_count_as_parameters_beside_the_layers() -> None:
    tower = {f"vision_tower.layers.{i}.attn.k_proj.weight": (32, 32) for i in range(2)}
    text = {key: value for key, value in CONFIG.items() if key != "architectures"} | {"num_hidden_layers": 2}
    config = {"model_type": "seeing", "architectures": ["SeeingForConditionalGeneration"], "text_config": text}
    spec = describe(config, model(*[GROUPED | NORMS | MIXTURE] * 2, **tower))
    assert (spec.family, spec.num_layers, spec.num_experts) == ("seeing", 2, 4)
    assert spec.num_params == 2 * elements(GROUPED, NORMS, MIXTURE) + elements(ENDS) + 2 * 32 * 32


class TestStoredInFewerBits:
    LAYER = GROUPED | MLP
    CONFIG = CONFIG | {"num_hidden_layers": 2, "n_routed_experts": 0}
    STORED = DeploymentConfig(weights=WeightFormat.STORED)

    def packed(self, **parts: tuple[str, Any]) -> Tensors:
        """Each matrix as the tensors ``parts``: (dtype, shape of its outputs and inputs)."""
        tensors = model(NORMS, NORMS)
        for index in range(2):
            for name, (outputs, inputs) in self.LAYER.items():
                stem = f"model.layers.{index}.{name.removesuffix('weight')}"
                tensors |= {
                    stem + part: StoredTensor(dtype, of(outputs, inputs)) for part, (dtype, of) in parts.items()
                }
        return tensors

    def check(self, quantization: dict[str, Any], tensors: Tensors, element_bits: float) -> None:
        spec = describe(self.CONFIG | {"quantization_config": quantization}, tensors)
        assert spec.stored is not None
        assert spec.num_params == 2 * elements(self.LAYER, NORMS) + elements(ENDS)
        assert spec.stored.layer_linear_bytes == pytest.approx(elements(self.LAYER) * element_bits / 8)
        assert layer_weight_bytes(spec, self.STORED) == spec.stored.layer_linear_bytes + 2 * elements(NORMS)

    def test_fp8_in_blocks(self) -> None:
        tensors = self.packed(
            weight=("F8_E4M3", lambda o, i: (o, i)), weight_scale_inv=("F32", lambda o, i: (-(-o // 16), i // 16))
        )
        self.check({"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors, 8 + 32 / 256)

    def test_gptq(self) -> None:
        tensors = self.packed(
            qweight=("I32", lambda o, i: (i // 8, o)),
            qzeros=("I32", lambda o, i: (i // 16, o // 8)),
            scales=("F16", lambda o, i: (i // 16, o)),
        )
        self.check({"quant_method": "gptq", "bits": 4, "group_size": 16}, tensors, 4 + 4 / 16 + 1)

    def test_awq(self) -> None:
        tensors = self.packed(qweight=("I32", lambda o, i: (i, o // 8)), scales=("F16", lambda o, i: (i // 16, o)))
        self.check({"quant_method": "awq", "bits": 4, "group_size": 16}, tensors, 4 + 1)

    def test_compressed_words(self) -> None:
        tensors = self.packed(
            weight_packed=("I32", lambda o, i: (o, i // 8)), weight_scale=("BF16", lambda o, i: (o, i // 16))
        )
        groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}}}
        self.check({"quant_method": "compressed-tensors", "config_groups": groups}, tensors, 4 + 1)

    def test_nvfp4_is_known_by_its_tensors_alone(self) -> None:
        tensors = self.packed(
            weight=("U8", lambda o, i: (o, i // 2)),
            weight_scale=("F8_E4M3", lambda o, i: (o, i // 16)),
        )
        self.check({"quant_method": "modelopt"}, tensors, 4 + 8 / 16)

    @pytest.mark.parametrize("quantization", [{"quant_method": "gptq"}, {"quant_method": "gptq", "bits": "4"}])
    def test_words_of_unknown_size_are_one_line(self, quantization: dict[str, Any], golden: Golden) -> None:
        tensors = self.packed(qweight=("I32", lambda o, i: (i // 8, o)))
        with golden.raises("fingerprint", CheckpointError):
            describe(self.CONFIG | {"quantization_config": quantization}, tensors)


LAYER = GROUPED | NORMS | MLP
UNKNOWN = {"mixer.twist.weight": (HIDDEN, HIDDEN), "mixer.turn.weight": (HIDDEN, HIDDEN)}
TWO = model(LAYER, LAYER)
OK = CONFIG | {"num_hidden_layers": 2, "n_routed_experts": 0}


@pytest.mark.parametrize(
    ("config", "tensors", "kind"),
    [
        (OK | {"num_hidden_layers": 3}, model(LAYER, LAYER), CheckpointError),
        (OK | {"num_hidden_layers": 1}, model(LAYER, LAYER), CheckpointError),
        (OK | {"hidden_size": 128}, model(LAYER, LAYER), ConfigError),
        (OK | {"vocab_size": 101}, model(LAYER, LAYER), ConfigError),
        (OK | {"num_key_value_heads": 1}, model(GROUPED, GROUPED), ConfigError),
        (OK | {"head_dim": 8}, model(GROUPED, GROUPED), ConfigError),
        (OK | {"num_hidden_layers": 10**30}, model(LAYER, LAYER), ConfigError),
        (OK | {"architectures": None}, model(LAYER, LAYER), ConfigError),
        (OK | {"is_encoder_decoder": True}, model(LAYER, LAYER), UnsupportedModelError),
        (OK, {"a": StoredTensor("BF16", (2, 2))}, CheckpointError),
        (OK, {}, CheckpointError),
        (OK, model(UNKNOWN, UNKNOWN), UnsupportedModelError),
        (OK | {"quantization_config": {"quant_method": "fp8"}}, model(LAYER, LAYER), ConfigError),
        (OK, model(LAYER, LAYER, dtype="F8_E4M3"), ConfigError),
        (OK | {"quantization_config": [1]}, model(LAYER, LAYER), ConfigError),
        (CONFIG | {"num_hidden_layers": 1, "num_experts_per_tok": 9}, model(GROUPED | MIXTURE), ConfigError),
        (
            OK,
            model(LAYER, LAYER)
            | {f"decoder.layers.{i}.{name}": t for i in range(2) for name, t in model(LAYER).items()},
            UnsupportedModelError,
        ),
    ],
)
def test_what_lies_or_is_not_known_is_one_line(
    config: dict[str, Any], tensors: Tensors, kind: type[BadInputError], golden: Golden
) -> None:
    with pytest.raises(kind) as caught:
        describe(config, tensors)
    golden("fingerprint", str(caught.value))
    assert "\n" not in str(caught.value)


WIDE = 2 * HIDDEN


def named(text: str, **tower: tuple[int, ...]) -> Tensors:
    """The model of two layers with ``text`` in the place of ``model``, beside a tower's tensors."""
    own = {name.replace("model.", text, 1): tensor for name, tensor in model(LAYER, LAYER).items()}
    return own | {name: StoredTensor("BF16", shape) for name, shape in tower.items()}


def tower(stack: str, width: int) -> dict[str, tuple[int, ...]]:
    """Two layers of another width, which are no text's."""
    return {f"{stack}.{index}.{name}.weight": (width, width) for index in range(2) for name in ("wq", "w1")}


@pytest.mark.parametrize(
    ("text", "beside"),
    [
        ("", {}),
        ("vision_language_model.model.", tower("siglip.encoder.layers", WIDE)),
        ("audiogpt.", tower("eyes.blocks", WIDE)),
        ("imagine.model.", tower("ears.layers", WIDE)),
        ("talker_lm.", tower("model.vision_tower.layers", HIDDEN)),
        ("text_encoder.", tower("text_encoder.vision_encoder.layers", HIDDEN)),
        ("draftsman.", tower("conformer.layers", WIDE)),
        ("model.", tower("model.layers_of_images.layers", WIDE)),
        ("model.", {"clip.token_embedding.weight": (9 * VOCAB, WIDE)}),
        ("speech.llm.", {"speech.codec.embed.weight": (9 * VOCAB, WIDE)} | tower("speech.codec.layers", WIDE)),
    ],
)
def test_names_that_sound_like_a_tower_s_hide_no_text(text: str, beside: dict[str, tuple[int, ...]]) -> None:
    plain, spec = describe(OK, model(LAYER, LAYER)), describe(OK, named(text, **beside))
    assert spec.layers_params == plain.layers_params
    assert (spec.vocab_size, spec.head_params) == (plain.vocab_size, plain.head_params)
    assert spec.num_params == plain.num_params + sum(map(prod, beside.values()))


@pytest.mark.parametrize("name", ["siglip.layers", "decoder.layers"])
def test_a_second_stack_as_wide_as_the_text_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="2 stacks of 2 layers"):
        describe(OK, named("model.", **tower(name, HIDDEN)))


def test_a_tower_with_as_many_layers_as_the_text_should_have_is_not_the_text(golden: Golden) -> None:
    three = model(LAYER, LAYER, LAYER)
    shifted = {name.replace("layers.0.", "layers.7."): tensor for name, tensor in three.items()}
    seeing = tower("model.visual.blocks", HIDDEN)
    towers = {name: StoredTensor("BF16", shape) for name, shape in seeing.items()}
    with golden.raises("fingerprint", CheckpointError):
        describe(OK, shifted | towers)


@st.composite
def damaged(draw: st.DrawFn) -> tuple[dict[str, Any], Tensors]:
    """A model of which some tensors, shapes and facts are otherwise than they can be."""
    layer = draw(st.sampled_from([GROUPED, LATENT, DELTA])) | NORMS | draw(st.sampled_from([MLP, MIXTURE]))
    tensors = model(*[layer] * draw(st.integers(1, 3)))
    sizes = st.lists(st.sampled_from([0, 1, 3, 7, 64, 2**31, 2**63 - 1]), max_size=4).map(tuple)
    for name in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(["BF16", "F32", "U8", "I32", "F8_E4M3", "BOOL"]))
        changed = draw(st.sampled_from([name, name + "_packed", name.replace("weight", "qweight"), name * 200]))
        del tensors[name]
        if draw(st.booleans()):
            tensors[changed] = StoredTensor(dtype, draw(sizes))
    values = st.none() | st.integers(-1, 2**40) | st.sampled_from([True, "4", 0.5, [], [3], {}, {"bits": 4}])
    facts = st.sampled_from([*CONFIG, "num_hidden_layers", "layer_types", "sliding_window", "quantization_config"])
    return CONFIG | {"num_hidden_layers": 2} | draw(st.dictionaries(facts, values, max_size=4)), tensors


@given(damaged())
def test_whatever_is_damaged_is_described_or_refused_in_one_line(it: tuple[dict[str, Any], Tensors]) -> None:
    refusal, spec = "", None
    try:
        spec = describe(*it)
    except BadInputError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 1000
    assert spec is None or min(spec.num_params, spec.kv_elements, spec.num_kv_heads, spec.head_dim) > 0


class TestCuts:
    """The first layers, whatever a config says of layers by."""

    def cut(self, count: int, **config: Any) -> dict[str, object]:
        return cut_config({"num_hidden_layers": 6} | config, range(count), LAYERS_KEYS)

    def test_a_character_a_layer(self) -> None:
        assert self.cut(4, hybrid_override_pattern="M-M*ME")["hybrid_override_pattern"] == "M-M*"

    def test_the_last_so_many(self) -> None:
        assert [self.cut(n, num_kv_shared_layers=2)["num_kv_shared_layers"] for n in (3, 5, 6)] == [0, 1, 2]

    def test_by_index(self) -> None:
        assert self.cut(3, per_layer_config={"02": {"a": 1}, "5": {"a": 2}})["per_layer_config"] == {"2": {"a": 1}}

    def test_indexes_that_are_counted_from_one(self) -> None:
        lists = {"full_attn_layers": [4, 6], "kda_layers": [1, 2, 3, 5]}
        cut = self.cut(4, linear_attn_config={"head_dim": 128} | lists)["linear_attn_config"]
        assert cut == {"head_dim": 128, "full_attn_layers": [4], "kda_layers": [1, 2, 3]}

    def test_draft_layers_are_left_out(self) -> None:
        assert self.cut(2, num_nextn_predict_layers=1)["num_nextn_predict_layers"] == 0

    def test_the_text_part_of_a_multimodal_model(self) -> None:
        config = {"model_type": "seeing", "text_config": {"num_hidden_layers": 6, "layer_types": list("abcdef")}}
        cut = cut_config(config, range(2), LAYERS_KEYS)
        assert cut["text_config"] == {"num_hidden_layers": 2, "layer_types": ["a", "b"]}

    def test_a_number_of_layers_that_only_a_list_tells(self) -> None:
        cut = cut_config({"layers_block_type": ["mamba", "moe", "attention"]}, range(2), LAYERS_KEYS)
        assert cut == {"layers_block_type": ["mamba", "moe"]}
