"""The demo model's full fine-tune, as a delta: whose it is, and what it answers next to its base in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from daemon.torch_engine.parallel.runner import LocalRunner
from daemon.worker_spec import StageAssignment, WorkerLimits
from fingerprint.checkpoint import Checkpoint
from fingerprint.config import DeploymentConfig, WeightFormat
from fingerprint.delta import check_base, read_delta
from iserve.demo import DEMO_MODEL_NAME, demo_delta_path, demo_model_path
from iserve.demo.adapter_tasks import ADAPTERS, ELEMENTS, SYMBOLS, TARGETS
from iserve.demo.train import build_tokenizer
from iserve.demo.train_delta import FIRST_TRAINED_LAYER, calibration_texts, held_out_examples
from iserve.demo.training_tasks import Example, prompt_text
from tests.daemon.tiny_adapters import greedy, load_adapter

MAX_BYTES = 450_000
# Of 28 questions, as the script printed in bfloat16; int8 weights of the base lose one more, and so do float32 and
# CPUs that multiply no bfloat16 by themselves, whose sums are rounded elsewhere.
HAS_BF16 = "amx_bf16" in Path("/proc/cpuinfo").read_text()
LEAST_NEW = {WeightFormat.BITS16: (27 if HAS_BF16 else 26) / 28, WeightFormat.INT8: 26 / 28}
MOST_KEPT, SHORT = 12, 16  # questions, and characters of their answers: every step unpacks the codes
LAYERS, EOS, DELTA = 8, 1, 1
LIMITS = WorkerLimits(
    max_batch=128,
    max_batched_tokens=8192,
    max_context_tokens=256,
    kv_tokens=128 * 256,
    memory_bytes_per_device=512 * 2**20,
)


def test_it_is_small_and_has_every_linear_that_was_trained() -> None:
    folder = demo_delta_path(SYMBOLS.name)
    assert sum(file.stat().st_size for file in folder.iterdir()) < MAX_BYTES
    manifest = read_delta(folder).manifest
    trained = range(FIRST_TRAINED_LAYER, LAYERS)
    assert {matrix.name.split(".")[2] for matrix in manifest.matrices} == set(map(str, trained))
    assert {matrix.name.split(".")[4] for matrix in manifest.matrices} == set(TARGETS)
    assert len(manifest.matrices) == len(trained) * len(TARGETS)
    assert not manifest.exact
    assert not manifest.companions


def test_it_is_of_the_bundled_model_and_of_the_texts_that_its_script_draws() -> None:
    manifest = read_delta(demo_delta_path(SYMBOLS.name)).manifest
    check_base(Checkpoint.open(demo_model_path()), manifest)
    assert manifest.base_name == DEMO_MODEL_NAME
    assert manifest.calibration is not None
    assert manifest.calibration.sha256 == calibration_texts(SYMBOLS).sha256


def test_its_task_is_no_adapters_and_none_of_what_it_is_asked_was_calibrated_on() -> None:
    assert SYMBOLS.name not in ADAPTERS
    assert len(dict(ELEMENTS)) == len(ELEMENTS) == len({symbol for _, symbol in ELEMENTS})
    texts = "\n".join(calibration_texts(SYMBOLS).texts)
    for example in held_out_examples(SYMBOLS)[0]:
        assert prompt_text(example.question) not in texts


def share_right(runner: LocalRunner, variant: int | None, asked: Sequence[Example]) -> float:
    tokenizer = build_tokenizer()
    prompts = [[0, *tokenizer.encode(prompt_text(example.question))] for example in asked]
    longest = max(len(example.answer) for example in asked) + 1
    found = greedy(runner, [(variant, prompt) for prompt in prompts], longest)
    right = 0
    for tokens, example in zip(found, asked, strict=True):
        right += EOS in tokens and tokenizer.decode(tokens[: tokens.index(EOS)]) == example.answer
    return right / len(asked)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [WeightFormat.BITS16, WeightFormat.INT8])
def test_the_engine_answers_with_it_as_its_script_printed_and_the_base_does_not(weights: WeightFormat) -> None:
    new, kept = held_out_examples(SYMBOLS)
    kept = [example for example in kept if len(example.answer) <= SHORT][:MOST_KEPT]
    runner = LocalRunner(dtype=torch.bfloat16)
    config = DeploymentConfig(weights=weights, adapter_slots=1, adapter_rank=16, delta_mib=1)
    runner.load(demo_model_path(), config, (StageAssignment(device_ids=("cpu:0",), num_layers=LAYERS),), LIMITS)
    try:
        load_adapter(runner, DELTA, demo_delta_path(SYMBOLS.name))
        of_delta = [share_right(runner, DELTA, asked) for asked in (new, kept)]
        of_base = share_right(runner, None, new[:4])
    finally:
        runner.close()
    assert of_base == 0
    assert of_delta[0] >= LEAST_NEW[weights]
    assert of_delta[1] == 1
