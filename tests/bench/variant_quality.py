"""Quality of low-rank adapters against full fine-tuning, by rank and by task, on a model trained from nothing.

    python -m tests.bench.variant_quality OUT.json [--jobs 2]

A small Llama learns to copy, reverse, shift and restyle strings; then it is fine-tuned on a table of random facts
(too large for rank 1), on addition, and on another style of copying: in full, and by LoRA of
several ranks. An adapter is written in PEFT's format and merged by ``fingerprint.lora``; what is measured is the
merged checkpoint. Controls that must fail: an adapter that was never trained, and one merged into the base of
another seed. CPU, one thread a process; every number is a function of the seed and of the build of torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fingerprint.codec import to_json
from fingerprint.lora import merge_adapter, read_adapter
from iserve.demo.lora_training import add_lora, lora_scale, save_adapter
from iserve.demo.train import learning_rate
from tests.bench.kept import write_kept

__all__ = [
    "BASE",
    "CONTROLS",
    "FULL",
    "OTHER_BASE",
    "VOCAB",
    "Outcome",
    "Rows",
    "Sizes",
    "Study",
    "Task",
    "load_model",
    "lora_name",
    "mean_and_range",
    "measure_model",
    "merged_model",
    "new_model",
    "pretrained_model",
    "pretraining_rows",
    "run_study",
    "table",
    "tasks",
    "train_adapter",
    "train_model",
]

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LETTERS = 32  # symbols 0 to 31; 32 to 63 are the same ones in the other style
SIGNS = 64  # one symbol for each task, then "is", "plus" and "end"
FACT, ADD, STYLE, COPY, REVERSE, SHIFT, RESTYLE, IS, PLUS, END = range(SIGNS, SIGNS + 10)
VOCAB = SIGNS + 10
FULL, BASE, UNTRAINED, OTHER_BASE = "full fine-tune", "base", "untrained adapter", "adapter of another base"
CONTROLS = (BASE, UNTRAINED, OTHER_BASE)
Rows = npt.NDArray[np.int64]
_MEASURED_AT_ONCE = 4096  # rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Extent of a study."""

    hidden: int = 48
    layers: int = 2
    heads: int = 4
    facts: int = 512
    fact_symbols: int = 3  # of an answer
    digits: int = 2  # of a number that is added
    string: int = 5  # symbols of a string that is copied
    batch: int = 128
    pretraining_steps: int = 400
    steps: tuple[tuple[str, int], ...] = (("facts", 900), ("addition", 1000), ("style", 300))
    ranks: tuple[int, ...] = (1, 4, 16, 64)
    seeds: int = 3
    held_out: int = 1000  # strings or sums that are measured and never trained on
    full_lr: float = 2e-3
    lora_lr: float = 3e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Measured quality of one model on one task."""

    task: str
    method: str
    seed: int
    trained_params: int
    exact_match: float  # answers that are right in every symbol
    nll: float  # nats per symbol of the answers


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Outcomes, with what they were made by."""

    date: str
    machine: str
    torch: str
    elapsed_s: float
    model_params: int
    sizes: Sizes
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """Rows of one width, whose answers begin at one place."""

    train: Callable[[np.random.Generator, int], Rows]
    measured: Rows
    answer: int  # index of the first symbol that is answered


# Tasks. A row is a sign, a question, IS, an answer, END.


def _rows(sign: int, questions: Rows, answers: Rows) -> Rows:
    def column(symbol: int) -> Rows:
        return np.full((len(questions), 1), symbol)

    return np.concatenate((column(sign), questions, column(IS), answers, column(END)), axis=1)


def _strings(rng: np.random.Generator, count: int, length: int) -> Rows:
    return rng.integers(LETTERS, size=(count, length))


def pretraining_rows(rng: np.random.Generator, count: int, length: int) -> Rows:
    part = count // 4
    made = []
    for sign, answer in (
        (COPY, lambda text: text),
        (REVERSE, lambda text: text[:, ::-1]),
        (SHIFT, lambda text: (text + 1) % LETTERS),
        (RESTYLE, lambda text: (text + LETTERS) % SIGNS),
    ):
        text = _strings(rng, part, length)
        made.append(_rows(sign, text, answer(text)))
    return np.concatenate(made)


def _facts(seed: int, count: int, symbols: int) -> Task:
    """Return random answers (5 bits a symbol) to random questions of 4 symbols: nothing but memory helps."""
    rng = np.random.default_rng([seed, FACT])
    numbers = rng.choice(LETTERS**4, size=count, replace=False)
    questions = np.stack([numbers // LETTERS**place % LETTERS for place in range(4)], axis=1)
    table = _rows(FACT, questions, _strings(rng, count, symbols))
    return Task(lambda batch_rng, size: table[batch_rng.integers(count, size=size)], table, 6)


def _addition(seed: int, held_out: int, digits: int) -> Task:
    """Return sums of two numbers, the last digit first; some pairs are never trained on."""
    rng = np.random.default_rng([seed, ADD])
    pairs = rng.permutation(100**digits)

    def digits_of(numbers: Rows, count: int) -> list[Rows]:
        return [numbers // 10**place % 10 for place in range(count)]

    def rows(numbers: Rows) -> Rows:
        a, b = numbers // 10**digits, numbers % 10**digits
        question = [*digits_of(a, digits), np.full_like(a, PLUS), *digits_of(b, digits)]
        return _rows(ADD, np.stack(question, axis=1), np.stack(digits_of(a + b, digits + 1), axis=1))

    known = pairs[held_out:]
    return Task(
        lambda batch_rng, size: rows(known[batch_rng.integers(len(known), size=size)]),
        rows(pairs[:held_out]),
        2 * digits + 3,
    )


def _style(seed: int, held_out: int, length: int) -> Task:
    """Return copies in the other style, by a sign that is new: the base can write so, and does not know when."""

    def rows(text: Rows) -> Rows:
        return _rows(STYLE, text, text + LETTERS)

    measured = rows(_strings(np.random.default_rng([seed, STYLE]), held_out, length))
    return Task(lambda batch_rng, size: rows(_strings(batch_rng, size, length)), measured, length + 2)


def tasks(sizes: Sizes, seed: int) -> dict[str, Task]:
    made = {
        "facts": _facts(seed, sizes.facts, sizes.fact_symbols),
        "addition": _addition(seed, sizes.held_out, sizes.digits),
        "style": _style(seed, sizes.held_out, sizes.string),
    }
    return {name: made[name] for name, _ in sizes.steps}


# Training and measuring.


def new_model(sizes: Sizes) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=sizes.hidden,
            intermediate_size=2 * sizes.hidden,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.heads,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
        )
    )


def train_model(
    model: LlamaForCausalLM, steps: int, peak_lr: float, draw: Callable[[], Rows], answer: int
) -> None:
    """Train on the model's device; on a GPU products are computed in bfloat16, of weights in float32."""
    device, on_gpu = model.device, model.device.type != "cpu"
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(
        trained, lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True if on_gpu else None
    )
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak_lr)
        rows = torch.from_numpy(draw()).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            nll = _nll(model, rows, answer)[0].mean()
        nll.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _nll(model: LlamaForCausalLM, rows: torch.Tensor, answer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return NLL and correctness of each symbol that is answered, [rows, symbols]."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits[:, answer - 1 :].float()
    targets = rows[:, answer:]
    nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return nll, logits.argmax(dim=-1) == targets


@torch.no_grad()
def measure_model(model: LlamaForCausalLM, task: Task) -> tuple[float, float]:
    """Return exact match and NLL per symbol.

    Each symbol is predicted after the right ones: a row is all right just where greedy decoding is.
    """
    model.eval()
    parts = torch.split(torch.from_numpy(task.measured), _MEASURED_AT_ONCE)
    found = [_nll(model, part.to(model.device), task.answer) for part in parts]
    nll, right = (torch.cat(each) for each in zip(*found, strict=True))
    return right.all(dim=1).float().mean().item(), nll.mean().item()


def load_model(folder: Path, device: str = "cpu") -> LlamaForCausalLM:
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.to(torch.device(device))  # type: ignore[arg-type]
    return model


def pretrained_model(sizes: Sizes, seed: int, folder: Path) -> Path:
    torch.manual_seed(seed)
    rng = np.random.default_rng([seed, COPY])
    model = new_model(sizes)
    train_model(
        model,
        sizes.pretraining_steps,
        sizes.full_lr,
        lambda: pretraining_rows(rng, sizes.batch, sizes.string),
        sizes.string + 2,
    )
    model.save_pretrained(folder)
    return folder


def train_adapter(
    base: Path, task: Task, steps: int, rank: int, sizes: Sizes, seed: int, folder: Path, device: str = "cpu"
) -> int:
    """Write an adapter that had ``steps`` of training; return its parameters."""
    torch.manual_seed(seed)
    model, alpha = load_model(base), 2 * rank
    updates = add_lora(model, TARGETS, rank, lora_scale(rank, alpha, uses_rslora=False))
    model.to(torch.device(device))  # type: ignore[arg-type]
    rng = np.random.default_rng([seed, rank])
    train_model(model, steps, sizes.lora_lr, lambda: task.train(rng, sizes.batch), task.answer) if steps else None
    save_adapter(
        folder,
        updates,
        base_model=base.name,
        rank=rank,
        alpha=alpha,
        uses_rslora=False,
        targets=TARGETS,
        dtype=torch.float32,
    )
    return sum(update.down.numel() + update.up.numel() for update in updates.values())


def merged_model(base: Path, adapter: Path, folder: Path, device: str = "cpu") -> LlamaForCausalLM:
    merge_adapter(base, read_adapter(adapter), folder)
    return load_model(folder, device)


def _outcomes_of(sizes: Sizes, seed: int, name: str, bases: Path) -> list[Outcome]:
    """Return all outcomes of one task and seed, whose base is in ``bases`` already, as is the next seed's."""
    torch.set_num_threads(1)
    task, steps = tasks(sizes, seed)[name], dict(sizes.steps)[name]
    base, other = bases / str(seed), bases / str((seed + 1) % max(2, sizes.seeds))
    found = []

    def measure(method: str, model: LlamaForCausalLM, trained_params: int) -> None:
        exact, nll = measure_model(model, task)
        found.append(
            Outcome(
                task=name,
                method=method,
                seed=seed,
                trained_params=trained_params,
                exact_match=round(exact, 4),
                nll=round(nll, 4),
            )
        )
        print(f"{name} seed {seed} {method}: exact match {exact:.1%}, NLL {nll:.4f}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        measure(BASE, load_model(base), 0)
        model, rng = load_model(base), np.random.default_rng([seed, 0])
        train_model(model, steps, sizes.full_lr, lambda: task.train(rng, sizes.batch), task.answer)
        measure(FULL, model, sum(parameter.numel() for parameter in model.parameters()))
        for rank in sizes.ranks:
            params = train_adapter(base, task, steps, rank, sizes, seed, folder / f"r{rank}")
            measure(lora_name(rank), merged_model(base, folder / f"r{rank}", folder / f"merged-{rank}"), params)
        train_adapter(base, task, 0, max(sizes.ranks), sizes, seed, folder / "untrained")
        measure(UNTRAINED, merged_model(base, folder / "untrained", folder / "merged-untrained"), 0)
        best = folder / f"r{max(sizes.ranks)}"
        measure(OTHER_BASE, merged_model(other, best, folder / "merged-other"), 0)
    return found


def lora_name(rank: int) -> str:
    return f"LoRA r={rank}"


def _pretrain_one(sizes: Sizes, seed: int, bases: Path) -> None:
    torch.set_num_threads(1)
    pretrained_model(sizes, seed, bases / str(seed))
    print(f"base of seed {seed} is trained", file=sys.stderr, flush=True)


def run_study(sizes: Sizes, *, jobs: int = 1) -> Study:
    """Train and measure everything; with ``jobs`` above 1 in so many processes."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        bases = Path(temporary)
        parts = [(sizes, seed, name, bases) for name, _ in sizes.steps for seed in range(sizes.seeds)]
        seeds = [(sizes, seed, bases) for seed in range(max(2, sizes.seeds))]  # each has another's base
        if jobs == 1:
            for one in seeds:
                _pretrain_one(*one)
            found = [_outcomes_of(*part) for part in parts]
        else:
            with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
                list(pool.map(_pretrain_one, *zip(*seeds, strict=True)))
                found = list(pool.map(_outcomes_of, *zip(*parts, strict=True)))
    return Study(
        date=datetime.now(UTC).date().isoformat(),
        machine=f"{platform.machine()} CPU, {os.cpu_count()} shared cores, one thread a process",
        torch=str(torch.__version__),
        elapsed_s=round(time.monotonic() - started, 1),
        model_params=sum(parameter.numel() for parameter in new_model(sizes).parameters()),
        sizes=sizes,
        outcomes=tuple(outcome for part in found for outcome in part),
    )


def table(study: Study) -> str:
    """Return the study's exact match and NLL by method and task, means and ranges over the seeds, in Markdown."""
    names = [name for name, _ in study.sizes.steps]
    methods = list(dict.fromkeys(outcome.method for outcome in study.outcomes))
    heads = [f"{name}: {what}" for name in names for what in ("exact match", "NLL")]
    lines = ["| | parameters | " + " | ".join(heads) + " |", "|---" * (len(heads) + 2) + "|"]
    for method in methods:
        own = [outcome for outcome in study.outcomes if outcome.method == method]
        cells = [f"{own[0].trained_params:,}" if own[0].trained_params else ""]
        for name in names:
            found = [outcome for outcome in own if outcome.task == name]
            cells.append(mean_and_range([100 * outcome.exact_match for outcome in found], ".1f") + "%")
            cells.append(mean_and_range([outcome.nll for outcome in found], ".3f"))
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def mean_and_range(values: Sequence[float], form: str) -> str:
    """Return the mean, and the least and the most where they differ."""
    low, mean, high = (
        format(value, form) for value in (min(values), math.fsum(values) / len(values), max(values))
    )
    return mean if low == high else f"{mean} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    parser.add_argument("--seeds", type=int, default=Sizes().seeds)
    args = parser.parse_args()
    study = run_study(replace(Sizes(), seeds=args.seeds), jobs=args.jobs)
    write_kept(args.out, json.dumps(json.loads(to_json(study)), indent=1) + "\n")
    print(table(study))


if __name__ == "__main__":
    main()
