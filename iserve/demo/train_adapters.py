"""Train the demo model's two LoRA adapters: ``python -m iserve.demo.train_adapters --out DIR``.

On one CPU thread about two minutes each. Deterministic data (batch ``i`` depends on the seed and ``i`` only); the
weights differ in the last bits between machines. Each step takes a batch of the new task and one of the base's.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.demo.adapter_tasks import ADAPTERS, TARGETS, AdapterTask
from iserve.demo.lora_training import LoraLinear, add_lora, lora_scale, save_adapter
from iserve.demo.variant_training import train_on_task

__all__ = ["train_adapter"]


def train_adapter(
    task: AdapterTask, *, steps: int, batch: int, peak_lr: float, seed: int
) -> dict[str, LoraLinear]:
    """Return the trained updates of the demo model, by the names of its modules."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    updates = add_lora(model, TARGETS, task.rank, lora_scale(task.rank, task.alpha, uses_rslora=task.uses_rslora))
    train_on_task(model, task, steps=steps, batch=batch, peak_lr=peak_lr, seed=seed)
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
