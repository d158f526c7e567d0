"""The configuration space: the paper's count, what joins it where, and which shapes cannot be cut."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fingerprint.config import DeploymentConfig, KvFormat, Pruning, WeightFormat
from fingerprint.errors import ConfigError
from fingerprint.families import read_spec
from fingerprint.gpu_spec import GpuSpec
from fingerprint.gpus import gpu_spec
from fingerprint.model_spec import LayerShape, ModelSpec
from planner.space import configuration_space, shape_refusal

LLAMA_70B = ModelSpec(
    family="llama",
    architecture="LlamaForCausalLM",
    num_layers=80,
    hidden_size=8192,
    intermediate_size=28672,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    max_context_tokens=4096,
    tied_embeddings=False,
    layer_params=855_654_400,
    layer_linear_params=855_638_016,
    embedding_params=262_144_000,
    head_params=262_144_000,
    final_norm_params=8192,
)
LLAMA_7B = replace(LLAMA_70B, num_layers=32, num_heads=32, num_kv_heads=32, intermediate_size=11008)
FALCON_7B = replace(LLAMA_70B, family="falcon", num_layers=32, num_heads=71, num_kv_heads=1)
CPU = GpuSpec(
    name="cpu",
    memory_bytes=2**33,
    memory_bytes_per_s=1e10,
    flops_16bit_per_s=1e11,
    flops_8bit_per_s=None,
    flops_fp8_per_s=1e11,  # even if someone said so
    compute_capability=None,
    link_bytes_per_s=1e10,
    link_group_size=1,
    pcie_bytes_per_s=1e10,
)


def space(spec: ModelSpec, gpu: GpuSpec, num_gpus: int = 8) -> tuple[DeploymentConfig, ...]:
    return configuration_space(spec, gpu, num_gpus, lambda config: "torch")


def test_llama_2_70b_on_8_a6000_has_the_papers_180_configurations() -> None:
    configs = space(LLAMA_70B, gpu_spec("a6000"))
    assert len(configs) == len(set(configs)) == 180
    assert len({(c.tp, c.pp) for c in configs}) == 15
    assert len({(c.weights, c.kv, c.pruning) for c in configs}) == 12


@pytest.mark.parametrize(
    ("spec", "gpu", "num_gpus", "expected"),
    [
        pytest.param(LLAMA_7B, gpu_spec("a6000"), 8, 15 * 13, id="llm-pruner-on-multi-head"),
        pytest.param(LLAMA_70B, gpu_spec("h200"), 8, 15 * (5 * 3 + 4), id="fp8-on-hopper"),
        pytest.param(LLAMA_7B, CPU, 2, 3 * 13, id="no-fp8-on-cpu"),
        pytest.param(LLAMA_70B, gpu_spec("a6000"), 1, 12, id="one-gpu"),
        pytest.param(LLAMA_70B, gpu_spec("a6000"), 1000, 4 * 8 * 12, id="degrees-end-at-8-by-8"),
    ],
)
def test_size(spec: ModelSpec, gpu: GpuSpec, num_gpus: int, expected: int) -> None:
    assert len(space(spec, gpu, num_gpus)) == expected


def test_pruned_models_stay_at_16_bits() -> None:
    for config in space(LLAMA_7B, gpu_spec("h200")):
        if config.pruning is not Pruning.NONE:
            assert (config.weights, config.kv) == (WeightFormat.BITS16, KvFormat.BITS16)


def test_engine_is_chosen_per_configuration() -> None:
    def engine_of(config: DeploymentConfig) -> str:
        assert config.engine == "", "not chosen yet"
        return "tensorrt-llm" if config.weights is WeightFormat.GPTQ4 else "vllm"

    for config in configuration_space(LLAMA_70B, gpu_spec("a6000"), 8, engine_of):
        assert config.engine == ("tensorrt-llm" if config.weights == "gptq4" else "vllm")


@pytest.mark.parametrize(("engine", "keeps"), [("vllm", True), ("torch", False), ("tensorrt-llm", False)])
def test_drafts_are_an_axis_of_one_stage_on_vllm(engine: str, keeps: bool) -> None:
    plain = configuration_space(LLAMA_70B, gpu_spec("a6000"), 8, lambda config: engine)
    drafted = configuration_space(LLAMA_70B, gpu_spec("a6000"), 8, lambda config: engine, drafts=(2, 4))
    of_one_stage = {one for one in plain if one.pp == 1}
    further = {replace(one, draft_tokens=tokens) for one in of_one_stage for tokens in (2, 4)}
    assert set(drafted) == set(plain) | (further if keeps else set())
    assert len(drafted) == len(set(drafted))
    state = LayerShape(mixer="mamba2", params=1, linear_params=1, kv_elements=0, state_bytes=1)
    of_states = replace(LLAMA_70B, layer_shapes=(state,) * LLAMA_70B.num_layers)
    assert configuration_space(of_states, gpu_spec("a6000"), 8, lambda config: engine, drafts=(2, 4)) == plain


def test_no_gpu_no_plan() -> None:
    with pytest.raises(ConfigError, match="got 0"):
        space(LLAMA_70B, CPU, 0)


@pytest.mark.parametrize(
    ("spec", "tp", "pp", "numbers"),
    [
        pytest.param(FALCON_7B, 2, 1, ("tp=2", "71 attention heads"), id="falcon-7b-heads"),
        pytest.param(
            replace(LLAMA_70B, num_kv_heads=3, num_heads=24), 2, 1, ("tp=2", "3 KV heads"), id="kv-heads"
        ),
        pytest.param(replace(LLAMA_70B, intermediate_size=28674), 4, 1, ("tp=4", "28674"), id="intermediate"),
        pytest.param(replace(LLAMA_70B, num_layers=3), 1, 4, ("pp=4", "has 3"), id="more-stages-than-layers"),
        pytest.param(LLAMA_70B, 8, 2, ("16 GPUs", "there are 8"), id="more-gpus-than-there-are"),
    ],
)
def test_shapes_that_cannot_be_cut_say_both_numbers(
    spec: ModelSpec, tp: int, pp: int, numbers: tuple[str, str]
) -> None:
    reason = shape_refusal(spec, DeploymentConfig(tp=tp, pp=pp), 8)
    assert reason is not None
    for number in numbers:
        assert number in reason


@pytest.mark.parametrize(
    ("heads", "groups", "refused"),
    [
        pytest.param(128, 8, (), id="nemotron-nano-9b"),
        pytest.param(128, 1, (), id="granite-4.0-h-small"),
        pytest.param(64, 2, (4, 8), id="two-groups"),
        pytest.param(4, 4, (8,), id="more-ranks-than-heads"),
        pytest.param(12, 1, (8,), id="heads-alone"),
    ],
)
def test_mamba_2_is_cut_as_vllm_s_mixer_asserts(heads: int, groups: int, refused: tuple[int, ...]) -> None:
    """``MambaMixer2``: ``num_heads % tp_size == 0`` and (``n_groups % tp_size == 0`` or ``n_groups == 1``)."""
    config = {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 256,
        "head_dim": 64,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "hybrid_override_pattern": "M*-",
        "num_hidden_layers": 3,
        "mamba_num_heads": heads,
        "mamba_head_dim": 16,
        "n_groups": groups,
        "ssm_state_size": 16,
        "vocab_size": 128,
        "max_position_embeddings": 1024,
    }
    spec = read_spec(config)
    reasons = {tp: shape_refusal(spec, DeploymentConfig(tp=tp, engine="vllm"), 8) for tp in (1, 2, 4, 8)}
    assert tuple(tp for tp, reason in reasons.items() if reason is not None) == refused
    for tp in refused:
        assert f"tp={tp} does not divide" in str(reasons[tp])
        assert "state of mamba2 layers" in str(reasons[tp])


@pytest.mark.parametrize(
    ("spec", "tp"),
    [
        (LLAMA_70B, 8),
        (LLAMA_7B, 4),
        (FALCON_7B, 1),
        pytest.param(replace(LLAMA_70B, num_kv_heads=4), 8, id="replicated"),
    ],
)
def test_shapes_that_can_be_cut(spec: ModelSpec, tp: int) -> None:
    assert shape_refusal(spec, DeploymentConfig(tp=tp), 8) is None


def test_refused_shapes_stay_in_the_space() -> None:
    """Falcon-7B's 71 heads rule out every tp above 1, and the plan lists them with that reason."""
    configs = space(FALCON_7B, gpu_spec("a6000"))
    refused = [config for config in configs if shape_refusal(FALCON_7B, config, 8)]
    assert {config.tp for config in refused} == {2, 4, 8}
    assert len(configs) == 180
