"""Training of the demo model's variants: each step takes a batch of the new task and one of the base's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from iserve.demo.adapter_tasks import VariantTask, draw_kept, draw_new
from iserve.demo.train import build_tokenizer, encode, learning_rate, padded_batch

__all__ = ["train_on_task"]


def train_on_task(
    model: LlamaForCausalLM, task: VariantTask, *, steps: int, batch: int, peak_lr: float, seed: int
) -> None:
    """Train the parameters of ``model`` that require a gradient. Data of a step: of seed, task and step alone."""
    tokenizer = build_tokenizer()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.monotonic()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak_lr)
        losses = []
        for ids, labels in _batches(tokenizer, task, batch, seed, step):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            losses.append(f"{loss.item():.4f}")
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0 or step == steps - 1:
            elapsed_s = time.monotonic() - started
            print(f"{task.name} {step}/{steps}  loss {', '.join(losses)}  {elapsed_s:.0f} s", flush=True)


def _batches(
    tokenizer: PreTrainedTokenizerFast, task: VariantTask, size: int, seed: int, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a batch of the new task, and one of what is kept: their widths differ much."""
    rng = random.Random(f"{seed}/{task.name}/{step}")
    for draw in (draw_new, draw_kept):
        yield padded_batch([encode(tokenizer, draw(task, rng, held_out=False)) for _ in range(size)])
