"""Fine-tune the demo model and compress the result: ``python -m iserve.demo.train_delta --out DIR``.

Every linear of the last six of its eight layers is trained, at full rank; embeddings, norms and the first two
layers are not. On one CPU thread about two minutes. Deterministic data; the weights differ in the last bits
between machines. DIR gets the fine-tune in ``finetuned`` and its delta under the name of the task. Exact match of
both is printed, on questions that training never saw.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from daemon.variants.compress import CalibrationTexts, CompressOrder, compress_delta
from fingerprint.delta import FORMATS, export_delta, read_delta
from iserve.demo import DEMO_MODEL_NAME, demo_model_path
from iserve.demo.adapter_tasks import SYMBOLS, TARGETS, VariantTask, draw_kept, draw_new
from iserve.demo.train import build_tokenizer, share_right
from iserve.demo.training_tasks import Example, prompt_text
from iserve.demo.variant_training import train_on_task

__all__ = ["FIRST_TRAINED_LAYER", "calibration_texts", "examples", "fine_tune", "held_out_examples"]

FIRST_TRAINED_LAYER = 2
FORMAT = "int2"
_CALIBRATION_EXAMPLES = 800  # of each kind
_HELD_OUT_KEPT = 60
_MOST_DRAWS = 4000

Draw = Callable[..., Example]  # draw_new or draw_kept


def examples(draw: Draw, task: VariantTask, count: int, *, held_out: bool, seed: str) -> list[Example]:
    """Return up to ``count`` different examples, the same for the same seed; fewer where there are fewer."""
    rng = random.Random(f"{seed}/{task.name}")
    found: dict[str, Example] = {}
    for _ in range(_MOST_DRAWS):
        example = draw(task, rng, held_out=held_out)
        found.setdefault(example.question, example)
        if len(found) == count:
            break
    return list(found.values())


def held_out_examples(task: VariantTask) -> tuple[list[Example], list[Example]]:
    """Return every question of the new task that training never sees, and some of what is kept."""
    new = examples(draw_new, task, _MOST_DRAWS, held_out=True, seed="held-out")
    return new, examples(draw_kept, task, _HELD_OUT_KEPT, held_out=True, seed="held-out")


def calibration_texts(task: VariantTask) -> CalibrationTexts:
    """Return questions and answers of the training's kinds, none of them held out."""
    texts = tuple(
        f"<s>{prompt_text(example.question)}{example.answer}</s>"
        for pair in zip(
            examples(draw_new, task, _CALIBRATION_EXAMPLES, held_out=False, seed="calibration"),
            examples(draw_kept, task, _CALIBRATION_EXAMPLES, held_out=False, seed="calibration"),
            strict=False,
        )
        for example in pair
    )
    return CalibrationTexts(sha256=hashlib.sha256("\n".join(texts).encode()).hexdigest(), texts=texts)


def fine_tune(task: VariantTask, *, steps: int, batch: int, peak_lr: float, seed: int) -> LlamaForCausalLM:
    """Return the demo model with the linears of its last layers trained, in bfloat16."""
    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32)
    model.requires_grad_(False)
    for layer in model.model.layers[FIRST_TRAINED_LAYER:]:
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] in TARGETS:
                module.requires_grad_(True)
    train_on_task(model, task, steps=steps, batch=batch, peak_lr=peak_lr, seed=seed)
    model.to(torch.bfloat16)  # type: ignore[arg-type]
    model.config.dtype = torch.bfloat16
    return model


def _save(model: LlamaForCausalLM, folder: Path) -> None:
    """Write a checkpoint whose other files are the base's, which a delta then leaves out."""
    shutil.copytree(demo_model_path(), folder)
    model.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(demo_model_path() / name, folder / name)


def _print_match(task: VariantTask, what: str, checkpoint: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.eval()  # type: ignore[no-untyped-call]
    new, kept = ((share_right(model, build_tokenizer(), asked), len(asked)) for asked in held_out_examples(task))
    print(f"{what}: exact match {new[0]:.1%} of {new[1]} new, {kept[0]:.1%} of {kept[1]} kept", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--peak-lr", type=float, default=1.5e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    task, finetuned = SYMBOLS, args.out / "finetuned"
    _save(fine_tune(task, steps=args.steps, batch=args.batch, peak_lr=args.peak_lr, seed=args.seed), finetuned)
    started = time.monotonic()
    done = compress_delta(
        CompressOrder(
            base=demo_model_path(),
            finetuned=finetuned,
            target=args.out / task.name,
            format=FORMATS[FORMAT],
            calibration=calibration_texts(task),
            max_error=None,
            base_name=DEMO_MODEL_NAME,
            finetuned_name=f"{DEMO_MODEL_NAME}-{task.name}",
        )
    )
    print(f"{FORMAT}: {done.num_bytes:,} bytes in {time.monotonic() - started:.0f} s", flush=True)
    _print_match(task, "base", demo_model_path())
    _print_match(task, "fine-tune", finetuned)
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder, "exported")
        export_delta(demo_model_path(), read_delta(args.out / task.name), exported)
        _print_match(task, "delta", exported)


if __name__ == "__main__":
    main()
