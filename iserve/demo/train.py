"""Train the demo model from nothing: ``python -m iserve.demo.train --out DIR``.

Deterministic data (batch ``i`` depends on the seed and ``i`` only); the weights differ in the last bits between
machines. On one H200 the default takes minutes; ``--steps`` shortens it. Writes the checkpoint, its tokenizer
and a model card whose table is measured at the end on inputs that were never trained on.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from iserve.demo.training_tasks import TASKS, Example, draw, prompt_text

BOS, EOS = "<s>", "</s>"
CONTEXT_TOKENS = 1024
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{{ 'Q: ' + m['content'] + '\\n' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'A: ' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'A: ' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per byte: a byte-level BPE without merges, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {BOS: 0, EOS: 1} | {symbol: i + 2 for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, model_max_length=CONTEXT_TOKENS
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        dtype="bfloat16",
    )
    return LlamaForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, example: Example) -> tuple[list[int], int]:
    """Return token ids of a whole example, and how many of them are the prompt (no loss there)."""
    prompt = [0, *tokenizer.encode(prompt_text(example.question), add_special_tokens=False)]
    answer = [*tokenizer.encode(example.answer, add_special_tokens=False), 1]
    return prompt + answer, len(prompt)


def padded_batch(rows: list[tuple[list[int], int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and labels of encoded examples, padded on the right to a multiple of 8."""
    width = 8 * math.ceil(max(len(ids) for ids, _ in rows) / 8)
    ids = torch.ones(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (tokens, prompt) in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, prompt : len(tokens)] = torch.tensor(tokens[prompt:])
    return ids, labels


class Batches(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batch ``i`` is a function of the seed and ``i``, whichever process draws it."""

    def __init__(self, steps: int, batch: int, seed: int) -> None:
        self.steps, self.batch, self.seed = steps, batch, seed
        self.tokenizer = build_tokenizer()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rng = random.Random(f"{self.seed}/{index}")
        return padded_batch([encode(self.tokenizer, draw(rng, held_out=False)) for _ in range(self.batch)])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return a linear warm-up over 2%, then a cosine to a hundredth of the peak."""
    warmup = max(1, steps // 50)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


@torch.no_grad()
def exact_match(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, per_task: int) -> dict[str, float]:
    """Return the share of held-out inputs answered exactly, greedily, per task."""
    model.eval()
    scores = {}
    for task in TASKS:
        rng = random.Random(f"held-out/{task}")
        seen: dict[str, Example] = {}
        for _ in range(per_task * 20):
            example = draw(rng, held_out=True, task=task)
            seen.setdefault(example.question, example)
            if len(seen) == per_task:
                break
        scores[f"{task} ({len(seen)})"] = share_right(model, tokenizer, list(seen.values()))
    return scores


@torch.no_grad()
def share_right(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, examples: Sequence[Example]) -> float:
    """Return the share of ``examples`` that ``model`` answers exactly, greedily."""
    device = next(model.parameters()).device
    right = 0
    for example in examples:
        prompt = torch.tensor([[0, *tokenizer.encode(prompt_text(example.question), add_special_tokens=False)]])
        out = model.generate(prompt.to(device), max_new_tokens=112, do_sample=False, pad_token_id=1)  # type: ignore[misc]
        text = tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)
        right += text == example.answer
    return right / len(examples)


def train(out: Path, *, steps: int, batch: int, peak_lr: float, seed: int, workers: int, per_task: int) -> None:
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer, model = build_tokenizer(), build_model().float().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.05)
    loader = DataLoader(
        Batches(steps, batch, seed), batch_size=None, num_workers=workers, pin_memory=device.type == "cuda"
    )
    started = time.monotonic()
    model.train()
    for step, (ids, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak_lr)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = model(
                input_ids=ids.to(device, non_blocking=True), labels=labels.to(device, non_blocking=True)
            ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 500 == 0 or step == steps - 1:
            print(f"step {step}/{steps}  loss {loss.item():.4f}  {time.monotonic() - started:.0f} s", flush=True)
    trained_s = time.monotonic() - started
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    scores = exact_match(model, tokenizer, per_task)
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    facts = (
        f"{sum(p.numel() for p in model.parameters()):,} parameters; "
        f"{steps:,} steps of {batch} examples, seed {seed}, {trained_s:.0f} s on {device_name}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )
    (out / "README.md").write_text(model_card(facts, scores))
    print((out / "README.md").read_text())


def model_card(facts: str, scores: dict[str, float]) -> str:
    rows = "\n".join(f"| {task} | {score:.1%} |" for task, score in scores.items())
    return f"""# iserve-demo

A byte-level Llama-shaped model that ships with iServe so that a deployment can be tried with no download. It does
arithmetic up to three digits, sorts and compares small numbers, spells, reverses and capitalises words, and knows
a few facts about iServe. It knows nothing else and is not meant to.

Made from nothing by `python -m iserve.demo.train` (data: `iserve/demo/training_tasks.py`, all generated).

{facts}

Exact match, greedy, bfloat16, on inputs that training never saw (one input in twenty is held out by hash; for the
facts it is the phrasing of the question that is new, not the answer). The number of inputs is in brackets.

| task | exact match |
|---|---|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8_000)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--per-task", type=int, default=200)
    args = parser.parse_args()
    train(
        args.out,
        steps=args.steps,
        batch=args.batch,
        peak_lr=args.peak_lr,
        seed=args.seed,
        workers=args.workers,
        per_task=args.per_task,
    )


if __name__ == "__main__":
    main()
