"""A single rank: what a step computes, and what it takes."""

from __future__ import annotations

import dataclasses
import gc
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from daemon.engines.registry import ENGINES
from daemon.torch_engine.model import attention, capabilities
from daemon.torch_engine.model.architectures import architectures_of, installed_transformers
from daemon.torch_engine.model.formats import FORMATS
from daemon.torch_engine.model.formats.int8 import Int8Linear
from daemon.torch_engine.model.stage_model import StageModel, StageShape, read_source
from daemon.torch_engine.model.tensor_parallel import TensorParallel
from daemon.torch_engine.parallel.runner import LocalRunner, _result
from daemon.torch_engine.parallel.stage import RankTiming
from daemon.torch_engine.runner_types import StepItem, StepPlan
from daemon.worker_spec import StageAssignment
from fingerprint.config import DeploymentConfig, KvFormat, WeightFormat
from fingerprint.errors import CheckpointError, EngineError, UnsupportedModelError
from fingerprint.gpus import gpu_spec
from tests.golden_words import Golden

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen3", "mistral", "mixtral"]
FAMILIES += ["qwen2_moe", "qwen3_moe", "phi3", "gpt_neox", "gemma2", "gemma3_text", "gpt_oss"]
FAMILIES += ["internlm3", "iquestcoder"]
ONE_RANK = sorted(capabilities.ONE_STAGE)  # most have no row of their own: transformers' class tells their layout
PROMPT = [3, 80, 0, 41, 17, 5, 66, 9, 90, 12, 7, 58, 33, 2, 71, 44, 20, 8, 95, 61]
TABLE, H200 = ENGINES["torch"].capabilities(), gpu_spec("h200-sxm")
OTHER = [50, 1, 88, 23, 14, 77, 6]
NEW_TOKENS = 20


def plan(*items: tuple[int, int, list[int]]) -> StepPlan:
    return StepPlan(tuple(StepItem(slot, start, tuple(tokens)) for slot, start, tokens in items))


def load(checkpoint: Path, stages, limits, *, dtype=torch.float32, **config) -> LocalRunner:
    runner = LocalRunner(dtype=dtype)
    num_layers = transformers.AutoConfig.from_pretrained(checkpoint).num_hidden_layers
    runner.load(checkpoint, DeploymentConfig(**config), stages(num_layers), limits)
    return runner


@pytest.fixture
def loaded(tiny_checkpoint, tiny_stages, tiny_limits):
    """``loaded("llama", weights=...)``: a runner in float32, closed at the end."""
    made = []

    def make(family: str, **kwargs) -> LocalRunner:
        made.append(load(tiny_checkpoint(family), tiny_stages, tiny_limits, **kwargs))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.fixture(scope="module")
def generated(tiny_checkpoint):
    """Return what ``transformers.generate`` says, greedily, without our code; each prompt's answer is kept."""
    models, said = {}, {}

    def make(family: str, prompt: list[int]) -> list[int]:
        if (family, *prompt) not in said:
            said[family, *prompt] = generate(family, prompt)
        return said[family, *prompt]

    def generate(family: str, prompt: list[int]) -> list[int]:
        if family not in models:
            models[family] = transformers.AutoModelForCausalLM.from_pretrained(
                tiny_checkpoint(family), dtype=torch.float32
            )
        ids = torch.tensor([prompt])
        out = models[family].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        tokens: list[int] = out[0, len(prompt) :].tolist()
        assert len(set(tokens)) >= 5, "the same token over and over would hide what is wrong"
        return tokens

    return make


def greedy(runner: LocalRunner, slot: int, prompt: list[int], *, chunk: int) -> list[int]:
    """Prompt in pieces of ``chunk``, then one token at a time."""
    tokens = list(prompt)
    for start in range(0, len(prompt), chunk):
        result = runner.step(plan((slot, start, prompt[start : start + chunk])))
    for _ in range(NEW_TOKENS):
        tokens.append(int(result.logits[0].argmax()))
        result = runner.step(plan((slot, len(tokens) - 1, tokens[-1:])))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chunk", [len(PROMPT), 7, 1])
def test_greedy_tokens_equal_transformers_generate(family: str, chunk: int, loaded, generated) -> None:
    """Also past Mistral's window of 8 tokens, with pieces shorter and longer than it."""
    assert greedy(loaded(family), 2, PROMPT, chunk=chunk) == generated(family, PROMPT)


@pytest.mark.parametrize("family", ONE_RANK)
def test_greedy_tokens_of_a_family_without_a_row_equal_transformers_generate(family, loaded, generated) -> None:
    """OPT's too. Pieces of a prompt that are shorter and longer than the windows of 8; one slot after another."""
    runner = loaded(family)
    for slot, chunk in enumerate((len(PROMPT), 7, 1)):
        assert greedy(runner, slot, PROMPT, chunk=chunk) == generated(family, PROMPT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_joining_midway_changes_nobodys_tokens(family: str, loaded, generated) -> None:
    """A sequence decodes while the other's prompt arrives in two pieces, then both decode in one batch."""
    runner = loaded(family)
    first, second = list(PROMPT), list(OTHER)

    def step(*items: tuple[int, int, list[int]]) -> list[int]:
        return [int(row.argmax()) for row in runner.step(plan(*items)).logits]

    first.append(step((3, 0, first))[0])
    for _ in range(4):
        first.append(step((3, len(first) - 1, first[-1:]))[0])
    first.append(step((3, len(first) - 1, first[-1:]), (0, 0, second[:4]))[0])
    joined = step((0, 4, second[4:]), (3, len(first) - 1, first[-1:]))
    second.append(joined[0])
    first.append(joined[1])
    while len(second) < len(OTHER) + NEW_TOKENS:
        items = [(3, len(first) - 1, first[-1:]), (0, len(second) - 1, second[-1:])]
        both = step(*items)
        first.append(both[0])
        second.append(both[1])
    assert first[len(PROMPT) :][:NEW_TOKENS] == generated(family, PROMPT)
    assert second[len(OTHER) :] == generated(family, OTHER)


def test_a_slot_used_again_remembers_nothing(loaded) -> None:
    runner = loaded("llama")
    fresh = runner.step(plan((1, 0, OTHER))).logits
    runner.step(plan((1, 0, PROMPT)))
    assert torch.equal(runner.step(plan((1, 0, OTHER))).logits, fresh)


def test_16bit_means_bfloat16_for_a_float32_checkpoint(loaded) -> None:
    """bfloat16 has 8 bits of mantissa: logits of a few layers agree to some percent of their spread."""
    exact = loaded("llama").step(plan((0, 0, PROMPT))).logits
    rounded = loaded("llama", dtype=None).step(plan((0, 0, PROMPT))).logits
    assert rounded.dtype is torch.float32
    assert 1e-4 < (rounded - exact).abs().max() / exact.std() < 0.2


def test_bytes_are_those_counted_by_hand(loaded) -> None:
    """Llama of the fixture, bfloat16: 96 x 32 embedding and head, 4 layers, final norm of 32; two float32 copies
    of 4 rotary frequencies. A layer: q and o 32 x 32, k and v 16 x 32, biases 32 + 16 + 16 + 32; MLP 3 x 64 x 32,
    biases 64 + 64 + 32; two norms of 32."""
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 96 + 3 * 64 * 32 + 160 + 2 * 32
    [memory] = loaded("llama", dtype=None).memory()
    assert memory.weights_bytes == 2 * (2 * 96 * 32 + 4 * layer + 32) + 2 * 4 * 4
    # 4 layers of K and V: 4 slots x 2 heads x 64 tokens x 8 numbers of 2 bytes
    assert memory.kv_bytes == 4 * 2 * 4 * 2 * 64 * 8 * 2
    assert memory.pp_buffer_bytes == 0
    assert memory.runtime_bytes > 50 * 2**20  # torch itself


def test_a_tied_head_takes_no_bytes_of_its_own(loaded) -> None:
    layer = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32
    [memory] = loaded("llama-tied", dtype=None).memory()
    assert memory.weights_bytes == 2 * (96 * 32 + 2 * layer + 32) + 2 * 4 * 4


def test_activation_peak_is_of_the_largest_step(loaded) -> None:
    """At least the MLP's three [tokens, 64] tensors of a layer are alive together; a second layer adds none."""
    runner = loaded("llama")
    assert runner.memory()[0].activation_peak_bytes == 0
    runner.step(plan((0, 0, PROMPT)))
    peak = runner.memory()[0].activation_peak_bytes
    assert 3 * 20 * 64 * 4 <= peak <= 4 * 3 * 20 * 64 * 4
    runner.step(plan((0, 20, [1])))
    assert runner.memory()[0].activation_peak_bytes == peak
    runner.step(plan((0, 0, PROMPT), (1, 0, PROMPT)))
    assert 1.8 * peak < runner.memory()[0].activation_peak_bytes < 2.2 * peak


def test_activation_peak_counts_the_mask_of_a_later_piece(loaded) -> None:
    """20 tokens behind 40 need a mask of 20 x 60; the same 20 at the beginning need none. Both are pieces of the
    same size, so the second is measured for its mask alone."""
    runner = loaded("llama")
    runner.step(plan((0, 0, PROMPT)))
    before = runner.memory()[0].activation_peak_bytes
    runner.step(plan((0, 20, PROMPT)))
    runner.step(plan((0, 40, PROMPT)))
    assert runner.memory()[0].activation_peak_bytes >= before + 20 * 60


def _live_tensor_bytes() -> int:
    gc.collect()
    storages = {}
    for found in gc.get_objects():
        if issubclass(type(found), torch.Tensor) and found.device.type == "cpu":
            storages[found.untyped_storage().data_ptr()] = found.untyped_storage().nbytes()
    return sum(storages.values())


def test_loading_again_and_closing_give_every_byte_back(
    tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden
) -> None:
    """A profile loads many fingerprints after each other in one process."""
    runner = LocalRunner()
    before = _live_tensor_bytes()
    sizes = []
    for weights in (WeightFormat.BITS16, WeightFormat.INT8) * 2:
        config = DeploymentConfig(weights=weights)
        runner.load(tiny_checkpoint("llama"), config, tiny_stages(4), tiny_limits)
        runner.step(plan((0, 0, PROMPT)))
        [memory] = runner.memory()
        sizes.append(_live_tensor_bytes() - before)
        assert sizes[-1] == memory.weights_bytes + memory.kv_bytes
    assert sizes[:2] == sizes[2:]
    runner.close()
    runner.close()
    assert _live_tensor_bytes() == before
    with golden.raises("daemon", EngineError):
        runner.step(plan((0, 0, PROMPT)))


def test_step_times_are_of_the_forward(loaded) -> None:
    result = loaded("llama").step(plan((0, 0, PROMPT), (1, 0, OTHER)))
    assert result.logits.shape == (2, 96)
    assert result.busy_s == (result.device_s,)
    assert result.device_s > 0
    assert result.handover_s == 0


def test_step_times_of_two_stages_of_two_ranks() -> None:
    """The times by hand are 0.5 + 0.4 for the slowest rank of each stage, and 0.15 between the stages.

    The latter is from when the last of the first stage was done (1.6) to when the last of the second had its input
    (1.75).
    """
    timings = (
        RankTiming(forward_s=0.3, input_ready_at=1.0, output_begun_at=1.5),
        RankTiming(forward_s=0.5, input_ready_at=1.1, output_begun_at=1.6),
        RankTiming(forward_s=0.4, input_ready_at=1.7, output_begun_at=2.1),
        RankTiming(forward_s=0.2, input_ready_at=1.75, output_begun_at=2.0),
    )
    result = _result(torch.zeros(1, 1), timings, tp=2)
    assert result.handover_s == pytest.approx(0.15)
    assert result.device_s == pytest.approx(0.5 + 0.4 + 0.15)
    assert result.busy_s == (0.3, 0.5, 0.4, 0.2)


@pytest.mark.parametrize(
    ("items", "match"),
    [
        pytest.param([(4, 0, [1])], "slot 4", id="slot"),
        pytest.param([(0, 0, [1]), (0, 1, [1])], "slot 0", id="twice"),
        pytest.param([(0, 60, [1] * 5)], "room for 64", id="context"),
        pytest.param([(0, 0, [1] * 25), (1, 0, [1] * 24)], "49 tokens", id="batched-tokens"),
        pytest.param([(0, 0, [96])], "vocabulary of 96", id="token"),
        pytest.param([(0, 0, [])], "no tokens", id="empty-item"),
        pytest.param([], "0 tokens", id="empty-plan"),
    ],
)
def test_a_plan_beyond_the_limits_is_a_bug_and_does_no_harm(items, match: str, loaded) -> None:
    runner = loaded("llama")
    with pytest.raises(ValueError, match=match):
        runner.step(plan(*items))
    runner.step(plan((0, 0, PROMPT)))


# --- what is refused ---


def causal_lm(family: str) -> type[transformers.PreTrainedModel]:
    return transformers.AutoModelForCausalLM._model_mapping[transformers.CONFIG_MAPPING[family]]


def test_a_family_without_the_attention_interface_is_refused_with_that_reason(loaded) -> None:
    with pytest.raises(UnsupportedModelError, match="attention interface"):
        loaded("falcon")


@pytest.mark.parametrize("value", [[1, 2], "one", {}])
def test_a_value_that_transformers_does_not_take_is_one_line(value, tiny_checkpoint, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_checkpoint("llama"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": value}))
    with pytest.raises(CheckpointError, match=r"^transformers cannot read .*pad_token_id.*$"):
        read_source(folder, torch.device("cpu"), None)


@pytest.mark.parametrize("family", ONE_RANK)
def test_int8_takes_every_matrix_of_a_layer_or_is_refused_as_the_table_says(
    family, tiny_checkpoint, tiny_limits
) -> None:
    source = read_source(tiny_checkpoint(family), torch.device("cpu"), torch.float32)
    whole = StageShape(0, source.spec.num_layers, is_first=True, is_last=True)

    def build() -> torch.nn.Module:
        model = StageModel(source, whole, WeightFormat.INT8, TensorParallel(1, 0, {})).model
        return model.get_submodule(source.layout.layers)

    if TABLE.refusal(source.spec, DeploymentConfig(weights=WeightFormat.INT8, engine="torch"), H200):
        with pytest.raises(EngineError, match="Conv1D"):
            build()
    else:
        layers = build()
        assert not [name for name, parameter in layers.named_parameters() if parameter.dim() > 1]
        assert any(isinstance(module, Int8Linear) for module in layers.modules())


@pytest.mark.parametrize(("family", "split"), [("opt", {"pp": 2}), ("olmo2", {"pp": 2}), ("phi3", {"tp": 2})])
def test_a_split_that_was_not_proven_is_refused_with_the_table_s_reason(family, split, tiny_checkpoint) -> None:
    source = read_source(tiny_checkpoint(family), torch.device("cpu"), torch.float32)
    said = TABLE.refusal(source.spec, DeploymentConfig(engine="torch", **split), H200)
    tp, pp = split.get("tp", 1), split.get("pp", 1)
    first = StageShape(0, source.spec.num_layers // pp, is_first=True, is_last=pp == 1)
    with pytest.raises(EngineError) as caught:
        StageModel(source, first, WeightFormat.BITS16, TensorParallel(tp, 0, {}))
    assert said.partition(": ")[2] == str(caught.value).partition(": ")[2] != ""


@pytest.mark.parametrize("family", ["biogpt", "bloom", "codegen", "falcon", "gptj", "mpt"])
def test_a_class_is_refused_for_its_attention_only_while_it_does_not_say_that_it_has_the_interface(
    family: str,
) -> None:
    model = causal_lm(family)  # CodeGen's and GPT-J's say so since transformers 5.24
    said = architectures_of(installed_transformers()).refusal(model.__name__)
    assert (said == capabilities.UNTESTED) == model._supports_attention_backend
    assert ("attention" in said) == (not model._supports_attention_backend)


@pytest.mark.parametrize("family", sorted(capabilities.REFUSED))
def test_a_family_is_refused_only_as_long_as_it_cannot_run(family, loaded, generated, monkeypatch) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(capabilities.REFUSED[family])):
        loaded(family)
    monkeypatch.setattr(capabilities, "FAMILIES", capabilities.FAMILIES | {family})
    if family == "diffllama":
        assert greedy(loaded(family), 0, PROMPT, chunk=7) != generated(family, PROMPT)
        return
    failing = {"nemotron": (TypeError, "iserve_step"), "stablelm": (TypeError, "iserve_step")}
    failing["doge"] = (AssertionError, None)  # of the attention, that there is no mask
    error, said = failing.get(family, (EngineError, "cannot make the buffers of"))
    with pytest.raises(error, match=said):
        greedy(loaded(family), 0, PROMPT, chunk=7)


def test_the_tables_say_what_the_code_does() -> None:
    allowed = {w for w, reason in capabilities.WEIGHTS.items() if reason is None}
    assert allowed - {WeightFormat.STORED} == set(FORMATS)
    assert all(capabilities.STORED.values()), "what a checkpoint stores quantized is refused by its method"
    for family in capabilities.FAMILIES:
        assert causal_lm(family)._supports_attention_backend
    attention.register()
    assert attention.IMPLEMENTATION in transformers.AttentionInterface()


@pytest.mark.parametrize(
    ("config", "match"),
    [
        pytest.param({"kv": KvFormat.INT8}, "kv=int8", id="kv"),
        pytest.param({"weights": WeightFormat.INT4}, "weights=int4", id="weights"),
        pytest.param({"tp": 8}, "tp up to 2", id="tp"),
    ],
)
def test_what_the_engine_does_not_run_is_refused(config, match: str, loaded) -> None:
    with pytest.raises(EngineError, match=match):
        loaded("llama", **config)


def test_more_than_the_limit_is_refused_before_anything_is_read(
    tiny_checkpoint, tiny_stages, tiny_limits, tmp_path
) -> None:
    """The weights file is truncated, so that reading would give another error."""
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "cut")
    with (tmp_path / "cut/model.safetensors").open("r+b") as file:
        file.truncate(10_000)
    small = dataclasses.replace(tiny_limits, memory_bytes_per_device=100_000)
    with pytest.raises(EngineError, match="its limit is 100,000"):
        load(tmp_path / "cut", tiny_stages, small)
    with pytest.raises(CheckpointError, match="is truncated"):
        load(tmp_path / "cut", tiny_stages, tiny_limits)


def edited(checkpoint: Path, folder: Path, **changes: object) -> Path:
    """A copy of the checkpoint with another config.json."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_rotary_frequencies_that_follow_the_longest_sequence_are_refused(
    tiny_checkpoint, tiny_stages, tiny_limits, tmp_path
) -> None:
    """The other sequences of a batch would change with it."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    checkpoint = edited(tiny_checkpoint("llama"), tmp_path / "dynamic", rope_parameters=rope)
    with pytest.raises(UnsupportedModelError, match="rope type 'dynamic'"):
        load(checkpoint, tiny_stages, tiny_limits)


@pytest.mark.skipif(torch.cuda.is_available(), reason="float16 stays float16 on a GPU")
def test_float16_is_held_as_bfloat16_on_a_cpu(tiny_checkpoint, tiny_stages, tiny_limits, tmp_path, loaded) -> None:
    checkpoint = edited(tiny_checkpoint("llama"), tmp_path / "half", dtype="float16")
    runner = load(checkpoint, tiny_stages, tiny_limits, dtype=None)
    same = loaded("llama", dtype=None)
    assert torch.equal(runner.step(plan((0, 0, PROMPT))).logits, same.step(plan((0, 0, PROMPT))).logits)
    runner.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_torch_does_not_see_is_refused(tiny_checkpoint, tiny_limits) -> None:
    stages = (StageAssignment(device_ids=("GPU-1234",), num_layers=4),)
    with pytest.raises(EngineError, match=r"GPU-1234, torch .* sees 0 GPUs"):
        LocalRunner().load(tiny_checkpoint("llama"), DeploymentConfig(), stages, tiny_limits)


def test_a_bug_in_a_step_ends_the_runner_and_keeps_its_traceback(loaded, monkeypatch) -> None:
    runner = loaded("llama")
    monkeypatch.setattr(StageModel, "forward", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        runner.step(plan((0, 0, PROMPT)))
    with pytest.raises(EngineError, match="load it again"):
        runner.step(plan((0, 0, PROMPT)))


def test_a_failed_load_leaves_the_runner_fit_for_the_next(
    tiny_checkpoint, tiny_stages, tiny_limits, tmp_path, golden: Golden
) -> None:
    shutil.copytree(tiny_checkpoint("llama"), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    runner = load(tiny_checkpoint("llama"), tiny_stages, tiny_limits)
    with pytest.raises(CheckpointError, match="neither"):
        runner.load(tmp_path / "bare", DeploymentConfig(), tiny_stages(4), tiny_limits)
    with golden.raises("daemon", EngineError):
        runner.step(plan((0, 0, PROMPT)))
    runner.load(tiny_checkpoint("qwen3"), DeploymentConfig(), tiny_stages(3), tiny_limits)
    runner.step(plan((0, 0, PROMPT)))
    runner.close()


def test_stages_that_do_not_hold_the_models_layers_are_refused(
    tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden
) -> None:
    with golden.raises("daemon", EngineError):
        LocalRunner().load(tiny_checkpoint("llama"), DeploymentConfig(), tiny_stages(3), tiny_limits)


@pytest.mark.parametrize("layers", [(4, 0), (5, -1)])
def test_a_stage_without_layers_is_refused(
    layers, tiny_checkpoint, tiny_stages, tiny_limits, golden: Golden
) -> None:
    with golden.raises("daemon", EngineError):
        LocalRunner().load(
            tiny_checkpoint("llama"), DeploymentConfig(pp=2), tiny_stages(4, pp=2, layers=layers), tiny_limits
        )
