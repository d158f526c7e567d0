"""The demo model's two adapters: what the base cannot do, what it still does, and their files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fingerprint.lora import merge_adapter, read_adapter
from iserve.demo import demo_adapter_path, demo_model_path, demo_quality_path
from iserve.demo.adapter_tasks import ADAPTERS, AdapterTask, draw_kept, draw_new, quality_examples
from iserve.demo.training_tasks import Example, prompt_text

MOST_NEW, KEPT = 12, 16
LEAST_NEW, LEAST_KEPT = 0.85, 0.95  # questions in words that no training saw: a letter of one or two is wrong
MAX_BYTES = 10**6  # of both adapters


def test_the_adapters_are_small_plain_and_unlike() -> None:
    adapters = {name: read_adapter(demo_adapter_path(name)) for name in ADAPTERS}
    assert sum(adapter.num_bytes for adapter in adapters.values()) < MAX_BYTES
    for name, adapter in adapters.items():
        task = ADAPTERS[name]
        assert not adapter.unsupported
        assert {module.rank for module in adapter.modules} == {task.rank}
        scale = task.alpha / (task.rank**0.5 if task.uses_rslora else task.rank)
        assert {module.scale for module in adapter.modules} == {scale}
    assert len({adapter.max_rank for adapter in adapters.values()}) == len(adapters)


def test_the_text_of_the_demo_is_what_its_tasks_draw() -> None:
    lines = [json.loads(line) for line in demo_quality_path().read_text().splitlines()]
    assert lines == [
        {"prompt": "<s>" + prompt_text(example.question), "answer": example.answer}
        for example in quality_examples()
    ]


def drawn(draw: Callable[..., Example], task: AdapterTask, count: int) -> list[Example]:
    """Return different examples that training never saw; fewer where there are fewer."""
    rng = random.Random("held-out")
    found: dict[str, Example] = {}
    for _ in range(20 * count):
        example = draw(task, rng, held_out=True)
        found.setdefault(example.question, example)
    return list(found.values())[:count]


def answers(checkpoint: Path, examples: Sequence[Example]) -> list[str]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    found = []
    for example in examples:
        prompt = torch.tensor([tokenizer.encode("<s>" + prompt_text(example.question))])
        out = model.generate(prompt, max_new_tokens=112, do_sample=False, pad_token_id=1)
        found.append(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
    return found


def share_right(checkpoint: Path, examples: Sequence[Example]) -> float:
    right = [
        answer == example.answer for answer, example in zip(answers(checkpoint, examples), examples, strict=True)
    ]
    return sum(right) / len(right)


@pytest.mark.slow
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_merged_adapter_answers_where_the_base_fails_and_keeps_the_rest(name: str, tmp_path: Path) -> None:
    task = ADAPTERS[name]
    merge_adapter(demo_model_path(), read_adapter(demo_adapter_path(name)), tmp_path / "merged")
    new, kept = drawn(draw_new, task, MOST_NEW), drawn(draw_kept, task, KEPT)
    assert len(new) >= 5
    assert share_right(tmp_path / "merged", new) >= LEAST_NEW
    assert share_right(tmp_path / "merged", kept) >= LEAST_KEPT
    assert share_right(demo_model_path(), new) == 0
    assert share_right(demo_model_path(), kept) == 1
