"""Train the demo model's two LoRA adapters: ``python -m iserve.demo.train_adapters --out DIR``.

On one CPU thread about two minutes each. Deterministic data (batch ``i`` depends on the seed and ``i`` only); the
weights differ in the last bits between machines. Each step takes a batch of the new task and one of the base's.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.demo.adapter_tasks import ADAPTERS, TARGETS, AdapterTask, draw_kept, draw_new
from iserve.demo.lora_training import LoraLinear, add_lora, lora_scale, save_adapter
from iserve.demo.train import build_tokenizer, encode, learning_rate, padded_batch

__all__ = ["train_adapter"]


def _batches(
    tokenizer: PreTrainedTokenizerFast, task: AdapterTask, size: int, seed: int, step: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield a batch of the new task, and one of what is kept: their widths differ much."""
    rng = random.Random(f"{seed}/{task.name}/{step}")
    for draw in (draw_new, draw_kept):
        yield padded_batch([encode(tokenizer, draw(task, rng, held_out=False)) for _ in range(size)])


def train_adapter(
    task: AdapterTask, *, steps: int, batch: int, peak_lr: float, seed: int
) -> dict[str, LoraLinear]:
    """Return the trained updates of the demo model, by the names of its modules."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    updates = add_lora(model, TARGETS, task.rank, lora_scale(task.rank, task.alpha, uses_rslora=task.uses_rslora))
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
    return updates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="each adapter is written to a folder in it")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--peak-lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for task in ADAPTERS.values():
        updates = train_adapter(task, steps=args.steps, batch=args.batch, peak_lr=args.peak_lr, seed=args.seed)
        save_adapter(
            args.out / task.name,
            updates,
            base_model=DEMO_MODEL_NAME,
            rank=task.rank,
            alpha=task.alpha,
            uses_rslora=task.uses_rslora,
            targets=TARGETS,
        )


if __name__ == "__main__":
    main()
